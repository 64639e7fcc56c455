"""Which lines of frames are drawn together."""

from typing import Literal, get_args

__all__ = ["PARTS", "Part", "part_of"]

Part = Literal["output", "input", "weight", "gradient"]
PARTS: tuple[Part, ...] = get_args(Part)


def part_of(label: str) -> Part:
    """Of a line."""
    if label.startswith("grad "):
        return "gradient"
    if label.startswith("output"):
        return "output"
    return "input" if label.startswith("input") else "weight"
