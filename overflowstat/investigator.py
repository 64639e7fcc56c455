"""What a monitor knows when it asks for a verdict: the calls in progress, and what may be run again."""

import threading
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from .bad_tensors import tensors_in
from .calls import Call, calls_in_progress
from .detections import Found
from .findings import Scene
from .frames import Frame
from .hooks import is_in_backward
from .investigation import investigate
from .names import named_modules
from .origin import inputs_of
from .provenance import storage_of
from .recorder import Recorder, is_capturing
from .root_call import RootCall
from .verdict import Verdict

__all__ = ["Investigator"]


class Investigator:
    """Of one model.

    Args:
        model: whose call is told of by `root_begins` and `root_ends`.
        recorder: reads what is looked at.
        drill: whether forwards are run again; None for where only one process runs.
        every_n: one batch in so many is watched.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, drill: bool | None, every_n: int) -> None:
        self._model = model
        self._recorder = recorder
        self._drill = drill
        self._every_n = every_n
        self._root_calls: dict[int, RootCall] = {}  # by thread

    def root_begins(self, batch_number: int, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Cost: some microseconds."""
        if not is_capturing():
            self._root_calls[threading.get_ident()] = RootCall.begins(batch_number, args, kwargs)

    def root_ends(self) -> None:
        """And all of its calls have been judged."""
        self._root_calls.pop(threading.get_ident(), None)

    def verdict(self, found: Found) -> Verdict:
        """To be asked on the thread that judges, where it judges."""
        bad = found.bad
        tensor = None if found.tensor is None else found.tensor()
        names = {module: name for name, module in named_modules(self._model)}
        calls = [call for call in calls_in_progress() if call.module in names]
        is_current = found.is_last and bool(calls) and names[calls[0].module] == bad.module
        root_call = self._root_calls.get(threading.get_ident())
        if len(self._root_calls) > 1 and not (is_current and _is_of(calls[0], tensor)):
            # Of which of the threads that are in the model this call is, nothing tells.
            is_current, root_call = False, None
        if root_call is not None and root_call.batch_number != bad.batch_number:
            root_call = None
        if not is_current:
            calls = [call for call in calls[-1:] if root_call is not None and call.module is self._model]
        earlier = (bad.batch_number - 1) // self._every_n * self._every_n
        return investigate(
            Scene(
                bad,
                found.before,
                calls,
                is_current,
                names,
                self._recorder,
                self._why_no_drill(bad),
                root_call,
                earlier if earlier >= 0 and earlier != found.last_bad_batch else None,
                tensor,
            )
        )

    def _why_no_drill(self, bad: Frame) -> str:
        if self._drill is False:
            return "drill=False"
        if bad.is_recompute or is_in_backward() or is_capturing():
            return "a backward, or a CUDA graph, is not run again"
        if self._drill is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return "more than one process runs; drill=True runs it again all the same"
        return ""


def _is_of(call: Call, tensor: Tensor | None) -> bool:
    """Whether a tensor, or what it is a view of, is among what a call was given or gave."""
    if tensor is None:
        return False
    storage = storage_of(tensor)
    return any(storage_of(each) == storage for each in (*(t for _, t in inputs_of(call)), *tensors_in(call.result)))
