"""What ends a build before it has begun."""

from __future__ import annotations

__all__ = ["BuildError"]


class BuildError(Exception):
    """It was asked for something that cannot be had here; the text says what, and what can."""
