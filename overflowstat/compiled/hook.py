"""The hook that torch.compile traces with the module that it is on."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling, is_exporting  # a name less to look up in each call

from ..dynamo import constant_where_traced, get_eval_frame_callback, traced_only
from ..hooks import Hook
from .operation import read_into
from .row import empty_rows
from .walk import given

if TYPE_CHECKING:
    from .calls import CompiledCalls

__all__ = ["WatchedHook"]


class WatchedHook(Hook):
    """After each forward of one module: in a graph reads what it was given and gave into `rows`; elsewhere `eager` does
    what there is to do.

    Dynamo guards on the hooks of a module where there are any, and so on `rows`: what it has compiled with a hook runs
    with this hook or another of its kind, as on another layer, and nowhere else.

    Args:
        number: of the module.
        compiled: told before `eager` is called, where anything is compiled: it may have left rows by then.
        nested: see `Monitor`.
        native: whether the extension reads what is in host memory.
    """

    def __init__(
        self,
        number: int,
        eager: Callable[..., None],
        compiled: "CompiledCalls",
        nested: bool,
        native: bool,
        device: torch.device,
    ) -> None:
        self._number = number
        self._eager = eager
        self._compiled = compiled
        self._nested = nested
        self._native = native
        self.rows: Tensor = empty_rows(device)

    @traced_only
    def __call__(self, module: nn.Module, args: object, kwargs: Mapping[str, object], output: object) -> None:
        if is_dynamo_compiling():
            labels, words, tensors = given(args, kwargs, output, self._nested)
            site = self._site(tuple(labels), tuple(words))
            if site is not None:
                read_into(tensors, self.rows, site, self._native)
        elif not is_exporting():
            if self._compiled.may_have_run:
                self._compiled.before_eager(self._number, get_eval_frame_callback())
            self._eager(module, args, kwargs, output)

    # Runs as it is where a graph is made, so that nothing guards on the numbers, which another layer does not have.
    @constant_where_traced
    def _site(self, labels: Sequence[str], words: Sequence[str]) -> int | None:
        return None if is_exporting() else self._compiled.new_site(self._number, labels, words)
