"""Versions, as far as they decide anything."""

from __future__ import annotations

import re

__all__ = ["major", "release"]


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as 2.14.1+cu130 or 2.15.0a0+git123; (0, 0) when there is none to read."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def major(version: str | None) -> str:
    """Of 13.0, "13"; empty without one."""
    return (version or "").split(".")[0]
