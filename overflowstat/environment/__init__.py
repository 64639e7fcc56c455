"""`python -m overflowstat env`: what is here, what is built of overflowstat, and what would get more of it."""

from .description import describe, version
from .text import render

__all__ = ["describe", "render", "version"]
