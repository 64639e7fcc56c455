"""What is timed: ours, what torch has instead, and what does little but read."""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from bandwidth import BASE
from measure import finish
from torch import Tensor, nn

from overflowstat import native, tensor_stats
from overflowstat.native_frame_log import make_frame_log
from overflowstat.recorder import NativeRecorder, Recorder, make_recorder

__all__ = ["SINGLE_READS", "ColdMemory", "Compiler", "Readers", "of_list", "of_one", "of_small"]

Run = Callable[[], object]

# Each reads every byte once and writes next to nothing. `sum` adds int64, whatever the dtype.
SINGLE_READS = frozenset({BASE, "sum_int32", "sum_float32", "foreach_norm", "compiled"})


class ColdMemory:
    """Memory of which every read is of another part than the last ones, so that no cache has it.

    Args:
        memory: uint8, several times what the last cache holds.
        size: bytes of a part.
    """

    def __init__(self, memory: Tensor, size: int) -> None:
        self._parts = [memory[start : start + size] for start in range(0, memory.numel() - size + 1, size)]
        self._turns = itertools.cycle(range(len(self._parts)))

    def views(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """The next part whenever it is asked, whoever asked before."""
        views = [part.view(dtype) for part in self._parts]
        while True:
            yield views[next(self._turns)]


class Readers:
    """Contenders by name. What fails is left out, and why is kept."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls: dict[str, Run] = {}  # what a user waits for
        self.launches: dict[str, Run] = {}  # the same work of those that can leave the device to it
        self.left_out: dict[str, str] = {}

    def add(self, name: str, call: Run, launch: Run | None = None) -> None:
        """Tries it once. A single read waits for nothing, so that its launch is the call itself."""
        with self.leaving_out(name):
            call()
            finish(self.device)
            self.calls[name] = call
            if launch or name in SINGLE_READS:
                self.launches[name] = launch or call

    @contextmanager
    def leaving_out(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines()
            self.left_out[name] = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


class Compiler:
    """Compiles `fused` for one shape and dtype at a time, and none after `seconds` of it altogether."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._left = seconds

    def fused_for(self, x: Tensor) -> Callable[[Tensor], object]:
        """Raises what torch raises where it lacks an operation for this dtype, or has no compiler."""
        fused(x.view(-1)[:1])
        if self._left <= 0:
            raise RuntimeError("there was no time left to compile it")
        start = time.monotonic()
        try:
            torch._dynamo.reset()  # else the ninth shape or dtype is one too many for one function
            compiled = torch.compile(fused, dynamic=False, fullgraph=True)
            compiled(x)
        finally:
            self._left -= time.monotonic() - start
        return compiled


def fused(x: Tensor) -> tuple[Tensor, ...]:
    """What the reference asks of a tensor, to be compiled into one pass."""
    magnitude = x.abs()
    return magnitude.amin(), magnitude.amax(), x.isnan().any(), x.isinf().any()


def reference(x: Tensor) -> tuple[float | bool, ...]:
    """The four reductions of transformers.debug_utils, each fetched."""
    return x.abs().min().item(), x.abs().max().item(), x.isnan().any().item(), x.isinf().any().item()


def of_one(memory: ColdMemory, dtype: torch.dtype, device: str, compiler: Compiler) -> Readers:
    """Readers of one tensor of that dtype."""
    x = memory.views(dtype)
    readers = Readers(device)
    _add_sums(readers, memory)
    _add_ours(readers, lambda: [next(x)])
    readers.add("reference", lambda: reference(next(x)))
    readers.add("aminmax", lambda: torch.aminmax(next(x).abs()))
    readers.add("foreach_norm", lambda: torch._foreach_norm([next(x)], ord=math.inf))
    _add_compiled(readers, x, compiler)
    return readers


def of_list(memory: ColdMemory, tensors: list[Tensor], device: str, compiler: Compiler) -> Readers:
    """Readers of all of a list; `sum` and `compiled` read, as one tensor, the memory that all of the list is in."""
    readers = Readers(device)
    _add_sums(readers, memory)
    _add_ours(readers, lambda: tensors)
    readers.add("reference", lambda: [reference(x) for x in tensors])
    readers.add("aminmax", lambda: [torch.aminmax(x.abs()) for x in tensors])
    readers.add("foreach_norm", lambda: torch._foreach_norm(tensors, ord=math.inf))
    _add_compiled(readers, memory.views(tensors[0].dtype), compiler)
    return readers


def of_small(tensors: list[Tensor], device: str) -> Readers:
    """Readers of all of a list; ours as a hook reads what a module gives."""
    readers = Readers(device)
    readers.add(BASE, lambda: [x.sum() for x in tensors])
    for name in ("native", "torch"):
        with readers.leaving_out(name):
            readers.add(name, _module_call(make_recorder(name), tensors))
    readers.add("reference", lambda: [reference(x) for x in tensors])
    readers.add("foreach_norm", lambda: torch._foreach_norm(tensors, ord=math.inf))
    return readers


def _module_call(recorder: Recorder, tensors: list[Tensor]) -> Run:
    """What the hook of a module that gives all of these does, but that none is taken for known."""
    module = nn.Identity()
    log = make_frame_log(recorder, keep=0)
    log.add_module(0, "", module)
    log.configure(is_watching=True, is_told=False, always_look=False, reuse=False)
    return functools.partial(log.call, 0, module, (), {}, tuple(tensors))


def _add_sums(readers: Readers, memory: ColdMemory) -> None:
    """On a CPU of int64 only: torch sums int32 there many times slower."""
    dtypes = {BASE: torch.int64}
    if readers.device == "cuda":
        dtypes |= {"sum_int32": torch.int32, "sum_float32": torch.float32}
    for name, dtype in dtypes.items():
        readers.add(name, _sum_of(memory.views(dtype)))


def _sum_of(words: Iterator[Tensor]) -> Run:
    return lambda: next(words).sum()


def _add_ours(readers: Readers, tensors: Callable[[], list[Tensor]]) -> None:
    with readers.leaving_out("native"):
        recorder = make_recorder("native")
        example = tensors()[0]
        if not (isinstance(recorder, NativeRecorder) and recorder._can_read(example)):
            raise RuntimeError(native.reason() or f"the extension does not work on {example.device}")
        readers.add("native", lambda: tensor_stats(tensors(), recorder=recorder), lambda: recorder.record(tensors()))
    readers.add("torch", lambda: tensor_stats(tensors(), recorder="torch"))


def _add_compiled(readers: Readers, x: Iterator[Tensor], compiler: Compiler) -> None:
    with readers.leaving_out("compiled"):
        compiled = compiler.fused_for(next(x))
        readers.add("compiled", lambda: compiled(next(x)))
