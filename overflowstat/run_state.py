"""What a forward depends on and does not get as an argument: random numbers to come, and autocast."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RunState"]


class RunState(NamedTuple):
    """Of the calling thread. Random numbers are those of torch on CPU and CUDA.

    Cost: some microseconds, and two more for each GPU, without a wait.
    """

    generators: tuple[tuple[torch.Generator, Tensor], ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """(kind of device, whether it is on, to which dtype)"""

    @classmethod
    def now(cls) -> "RunState":
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        generators = (torch.default_generator, *(torch.cuda.default_generators if has_cuda else ()))
        kinds = ("cpu", "cuda") if has_cuda else ("cpu",)
        return cls(
            tuple((generator, generator.get_state()) for generator in generators),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        )

    def restore(self) -> None:
        for generator, state in self.generators:
            generator.set_state(state)
        for kind, is_on, dtype in self.autocast:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As it was then, in this block; afterwards as it is now, whatever the block does."""
        now = RunState.now()
        self.restore()
        try:
            yield
        finally:
            now.restore()
