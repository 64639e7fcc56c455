"""What a build leaves beside the extension, since pip hides what it prints."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

from .plan import Facts, Plan

__all__ = ["BUILD_RECORD", "BuildRecord", "make_record", "python_tag"]

BUILD_RECORD = "_build.json"


@dataclass(frozen=True)
class BuildRecord:
    """What was built, for what, and why not more."""

    kind: str
    reason: str
    remedy: str
    torch: str | None
    cuda: str | None
    toolkit: str | None
    arch_list: tuple[str, ...]
    python: str

    def save(self, folder: Path) -> None:
        """Write the record into a package folder."""
        (folder / BUILD_RECORD).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> BuildRecord | None:
        """The record in a package folder, or None where no build left a readable one."""
        try:
            fields = json.loads((folder / BUILD_RECORD).read_text(encoding="utf-8"))
            return BuildRecord(**(fields | {"arch_list": tuple(fields["arch_list"])}))
        except (OSError, ValueError, TypeError, KeyError):
            return None


def python_tag() -> str:
    """The Python that an extension module built here can be imported by, such as cpython-311-x86_64-linux-gnu."""
    return str(sysconfig.get_config_var("SOABI"))


def make_record(plan: Plan, facts: Facts) -> BuildRecord:
    """What `native.py` must know of a build made by this plan."""
    built = plan.kind != "none"
    return BuildRecord(
        kind=plan.kind,
        reason=plan.reason,
        remedy=plan.remedy,
        torch=facts.torch.version if built and facts.torch else None,
        cuda=facts.torch.cuda if built and facts.torch else None,
        toolkit=facts.toolkit.version if plan.kind == "cuda" and facts.toolkit else None,
        arch_list=plan.architectures,
        python=python_tag(),
    )
