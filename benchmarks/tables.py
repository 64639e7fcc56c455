"""Writes the tables of results into the README, between the comments that mark their places.

python benchmarks/tables.py benchmarks/results/kernel-here.json benchmarks/results/overhead-here.json
"""

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["kernel_table", "overhead_table", "replace"]

README = Path(__file__).resolve().parent.parent / "README.md"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(ratio: dict[str, float] | None) -> str:
    """A ratio and its spread, in three digits."""
    if ratio is None:
        return ""

    def short(value: float) -> str:
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"

    return f"{short(ratio['median'])} ({short(ratio['p10'])}-{short(ratio['p90'])})"


def source(results: dict[str, Any], path: Path) -> str:
    about = results["machine"]
    rounds = sorted({row.get("rounds", results.get("rounds")) for row in results["rows"]})
    how_many = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    rare = " (of the original and of plain torch a fourth of them)" if "ratio_to_plain" in results["rows"][0] else ""
    where = f"{about['gpu']} beside {about['cpu']}" if about["gpu"] else f"{about['cpu']}, {about['cores']} cores"
    return (
        f"{where}, torch {about['torch']}, {about['date']}, commit {about['commit']}; "
        f"medians of {how_many} interleaved rounds{rare}, and their 10th to 90th percentile (`{path.as_posix()}`)."
    )


def kernel_table(results: dict[str, Any], path: Path) -> str:
    """Of the largest tensors."""
    largest = max(row["megabytes"] for row in results["rows"])
    names = {"native": "native", "torch": "plain torch", "reference": "the original"}
    rows = [
        [row["dtype"], *(number(row["ratio_to_sum"].get(name)) for name in names)]
        for row in results["rows"]
        if row["megabytes"] == largest
    ]
    return f"{source(results, path)}\n\n{table([f'one tensor of {largest} MiB', *names.values()], rows)}"


def overhead_table(results: dict[str, Any], path: Path) -> str:
    names = {
        "reference": "the original",
        "torch": "plain torch",
        "native": "native",
        "native, on change": "native, weights on change",
        "hooks": "empty hooks",
    }
    rows = [
        [
            row["model"],
            row["step"],
            *(number(row["ratio_to_plain"].get(name)) for name in names),
            number(row["floor_by_sum"]),
        ]
        for row in results["rows"]
    ]
    return f"{source(results, path)}\n\n{table(['model', 'step', *names.values(), 'one sum'], rows)}"


def replace(text: str, name: str, content: str) -> str:
    """`text` with this between its marks of that name. Raises ValueError if it has not exactly one pair of them."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the text has no place, or several, for {name}")
    return pattern.sub(lambda found: f"{found[1]}{content}{found[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", type=Path, nargs="+", help="JSON of kernel.py or of overhead.py, told by its content"
    )
    options = parser.parse_args()
    text = README.read_text()
    for path in options.results:
        results = json.loads(path.read_text())
        if "ratio_to_plain" in results["rows"][0]:
            text = replace(text, "overhead", overhead_table(results, path))
        else:
            text = replace(text, "kernel", kernel_table(results, path))
    README.write_text(text)


if __name__ == "__main__":
    main()
