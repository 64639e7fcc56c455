"""What nobody wants in a report of a bug."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["shortened", "without_domain"]


def without_domain(host: str) -> str:
    return host.partition(".")[0]


def shortened(value: Any, home: str, host: str) -> Any:
    """The same texts, lists and dicts, with ~ for the home folder and a host name without its domain."""
    if isinstance(value, str):
        if home.strip("/"):
            value = re.sub(rf"(?<![\w.-]){re.escape(home.rstrip('/'))}(?![\w.-])", "~", value)
        return value.replace(host, without_domain(host)) if "." in host else value
    if isinstance(value, Mapping):
        return {key: shortened(held, home, host) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(held, home, host) for held in value]
    return value
