"""What a wheel is built for, in its name."""

from __future__ import annotations

from pathlib import Path

from .plan import Facts, Plan
from .versions import release

__all__ = ["local_version"]


def local_version(plan: Plan, facts: Facts, source: Path) -> str:
    """What follows the version of a wheel: "+torch2.13cu130", "+torch2.13cpu" where it has no CUDA kernels.

    Empty where it has no extension, and so fits any torch; and where it is built from a source archive, which has a
    PKG-INFO: pip refuses what an index has as 0.1.0 and a build calls otherwise.
    """
    if plan.kind == "none" or facts.torch is None or (source / "PKG-INFO").exists():
        return ""
    gpu = "cu{}{}".format(*release(str(facts.torch.cuda))) if plan.kind == "cuda" else "cpu"
    return "+torch{}.{}".format(*release(facts.torch.version)) + gpu
