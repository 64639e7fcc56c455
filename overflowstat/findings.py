"""What an investigation has found of a detection: its facts, without words for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .calls import Call, Source
from .frames import Frame
from .headroom import Growth
from .operations import Birth, Entry
from .origin import Origin
from .recorder import Recorder
from .root_call import RootCall
from .verdict import Kind

__all__ = ["Findings", "Held", "Scene"]


@dataclass(frozen=True)
class Scene:
    """What there is to look at when numbers are found to be bad."""

    bad: Frame
    kept: Sequence[Frame]
    """Those before it, of other batches, too, as far as they were kept."""
    calls: Sequence[Call]
    """Those in progress that it is in, the innermost first, up to the root's."""
    is_current: bool
    """Whether the first of these is its own."""
    names: Mapping[nn.Module, str]
    recorder: Recorder
    why_no_drill: str
    """Why nothing is to be run again; empty if it may."""
    root_call: RootCall | None
    """The one that it is in, if the root is in progress."""
    quiet_batch: int | None
    """The last one before this that was watched, if nothing bad was found in it."""
    tensor: Tensor | None
    """That of the first bad line, if it is still there and was not written to since."""

    @property
    def frames(self) -> list[Frame]:
        """Those of the batch before the bad one."""
        return [frame for frame in self.kept if frame.batch_number == self.bad.batch_number]

    def module(self, name: str) -> nn.Module:
        return next(module for module, each in self.names.items() if each == name)


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that a module of the model holds."""

    module: str
    class_name: str
    name: str
    what: str
    """Which of "weight", "buffer" and "attribute" it is."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What is not known is None."""

    origin: Origin
    birth: Birth | None
    """Where the numbers were made."""
    entry: Entry | None
    """Or else where they came in, if they were there before or are written down."""
    held: Held | None
    """What bears them there."""
    why_not_run: str
    """Why running it again has shown neither; empty if it has, or was not needed."""
    maker: str
    class_name: str
    kind: Kind
    why: str
    source: Source | None
    last_child: Frame | None
    """The last module that the maker had called before."""
    growth: Growth | None
    was_finite_in: int | None
    """For a weight, the last batch of those of which frames are kept in which it was read, and finite."""
    advice: str | None
