"""What the ranks of a group do, in processes of their own. Each function gives what json.dumps takes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from overflowstat import AgreementError, BatchLimitReached, Monitor, NonFiniteError
from overflowstat.sinks import Printer

NAN = float("nan")


class Net(nn.Module):
    """Three layers; what befalls a rank happens in the second one."""

    def __init__(self, befalls: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), Second(befalls), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(self.first(x)))
        return y


class Second(nn.Module):
    def __init__(self, befalls: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.befalls = befalls

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if self.befalls is None else self.befalls(y)


class SpoilsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * NAN


def rank() -> int:
    return int(os.environ["RANK"])


def told(error: BaseException | None) -> dict[str, Any]:
    """Of an error, what the tests compare."""
    found: dict[str, Any] = {"error": type(error).__name__, "text": str(error)}
    if isinstance(error, NonFiniteError):
        process, verdict = error.process, error.verdict
        found |= {
            "batch": error.batch_number,
            "frames": [frame.module for frame in error.frames],
            "rank": process and process.rank,
            "world_size": process and process.world_size,
            "device": process and process.device,
            "verdict": verdict and [verdict.module, verdict.label],
        }
    return found


def befall(what: str) -> Tensor:
    if what == "raises":
        raise KeyError("lost")
    if what == "exits":
        os._exit(7)
    if what == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError(what)


def train(
    bad: dict[str, Any],
    batches: int | Sequence[int] = 6,
    wrapped: bool = True,
    options: dict[str, Any] | None = None,
    steps: bool = False,
) -> dict[str, Any]:
    """A few batches, in which something befalls some ranks.

    Args:
        bad: of a rank as a text, (batch, what): "input", "first", "second" or "third", a weight of which gets a NaN;
            "gradient"; or what `befall` knows, in the second layer.
        batches: of all, or of each.
        wrapped: in DistributedDataParallel.
        options: of the monitor.
        steps: with a monitor that is stepped.
    """
    when, what = bad.get(str(rank()), (-1, ""))
    number = 0

    def befalls(y: Tensor) -> Tensor:
        if number != when or what in ("input", "first", "second", "third"):
            return y
        result: Tensor = SpoilsGradient.apply(y) if what == "gradient" else befall(what)  # type: ignore[no-untyped-call,unused-ignore]
        return result

    model = Net(befalls)
    called: nn.Module = DistributedDataParallel(model) if wrapped else model
    monitor = Monitor(called, sinks=[], **{"agree": 20, **(options or {})})
    optimizer = SGD(model.parameters(), lr=0.01)
    error: BaseException | None = None
    number_of_collectives = collectives()
    try:
        for number in range(batches if isinstance(batches, int) else batches[rank()]):
            x = torch.ones(2, 4)
            if number == when and what in ("first", "second", "third"):
                layer = getattr(model, what)
                with torch.no_grad():
                    getattr(layer, "linear", layer).weight[0, 0] = NAN
            if number == when and what == "input":
                x[0, 0] = NAN
            called(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if steps:
                monitor.step()
        monitor.remove()
    except Exception as exception:
        error = exception
    return {
        **told(error),
        "non_finite": told(getattr(error, "non_finite", None)),
        "number": number,
        "collectives": collectives() - number_of_collectives,
        "ours": [monitor.batch_number, monitor.detected_overflow],
    }


def collectives() -> int:
    """That the default group has begun."""
    group: Any = dist.group.WORLD
    return 0 if group is None else int(group._get_sequence_number_for_group())


def end_by(what: str) -> dict[str, Any]:
    """Two batches with a group, if there is one, and one without."""
    model = Net()
    Monitor(model, sinks=[], agree=20)
    try:
        for _ in range(2):
            model(torch.ones(2, 4))
        if what == "destroyed":
            dist.barrier()
            dist.destroy_process_group()
        model(torch.ones(2, 4))
    except Exception as error:
        return told(error)
    return told(None)


def form_anew(of_all: bool, file: str) -> dict[str, Any]:
    """Two batches with a group, and one with another one, in which the second rank's numbers are bad.

    Args:
        file: by which the ranks find each other then. At the port they may still find the store that ends.
    """
    model = Net()
    group: Any = None if of_all else dist.new_group([0, 1])
    Monitor(model, sinks=[], agree=20, group=group)
    for _ in range(2):
        model(torch.ones(2, 4))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank(), world_size=2)
    try:
        model(torch.full((2, 4), NAN if rank() == 1 else 1.0))
    except Exception as error:
        return told(error)
    return told(None)


def end_by_the_end_of_the_store() -> dict[str, Any]:
    """The last rank keeps it here, and dies."""
    store = TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=rank() == 1)
    dist.init_process_group("gloo", store=store, rank=rank(), world_size=2)
    model = Net()
    Monitor(model, sinks=[], agree=20)
    model(torch.ones(2, 4))
    if rank() == 1:
        time.sleep(0.5)
        os._exit(7)
    time.sleep(1.0)
    try:
        model(torch.ones(2, 4))
    except Exception as error:
        dist.destroy_process_group()
        return told(error)
    return told(None)


def bad_and_raises() -> dict[str, Any]:
    """On the second rank, in this order."""
    model = Net(lambda y: befall("raises") if rank() == 1 else y)
    Monitor(model, sinks=[], agree=20)
    try:
        model(torch.full((2, 4), NAN if rank() == 1 else 1.0))
    except Exception as error:
        return {**told(error), "non_finite": told(getattr(error, "non_finite", None))}
    return told(None)


def in_groups(bad_rank: int) -> dict[str, Any]:
    """Four ranks, of which two and two agree."""
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Net()
    monitor = Monitor(model, sinks=[], agree=20, group=groups[rank() // 2])
    try:
        for number in range(4):
            model(torch.full((2, 4), NAN if rank() == bad_rank and number == 2 else 1.0))
    except NonFiniteError as error:
        return {**told(error), "batches": monitor.batch_number}
    return {**told(None), "batches": monitor.batch_number}


def not_in_the_group() -> dict[str, Any]:
    """Of a group of the first rank alone, which the second one has no part in."""
    group: Any = dist.new_group([0])
    try:
        Monitor(Net(), sinks=[], agree=True, group=group)
    except Exception as error:
        return told(error)
    return told(None)


def keys_left(batches: int) -> int:
    """In the store of all, by meetings."""
    model = Net()
    monitor = Monitor(model, sinks=[], agree=20)
    store = dist.distributed_c10d._get_default_store()
    model(torch.ones(2, 4))
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(batches):
        model(torch.ones(2, 4))
    dist.barrier()
    left = store.num_keys() - before
    dist.barrier()
    monitor.remove()
    return int(left)


def report_much(modules: int) -> None:
    """All ranks, at once, with their rank in each name."""
    model = nn.Sequential()
    for index in range(modules):
        model.add_module(f"of_rank_{rank()}_{index}", nn.Identity())
    model.add_module(f"of_rank_{rank()}_end", nn.Linear(4, 4))
    monitor = Monitor(model, max_frames_to_save=None, sinks=[Printer()])
    nn.init.constant_(model[-1].weight, NAN)  # type: ignore[arg-type]
    dist.barrier()
    try:
        model(torch.ones(2, 4))
    except NonFiniteError:
        return
    finally:
        monitor.remove()


def trace(traces_of: int | None) -> None:
    model = nn.Sequential()
    model.add_module(f"of_rank_{rank()}", nn.Identity())
    monitor = Monitor(model, trace_batch_nums=[0], sinks=[Printer(traces_of=traces_of)])
    model(torch.ones(2, 4))
    monitor.remove()


def limit(bad_in: int, last: int) -> dict[str, Any]:
    """A batch after which all end, in which the second rank's numbers go bad."""
    model = Net()
    monitor = Monitor(model, sinks=[], agree=20, abort_after_batch_num=last)
    try:
        for number in range(last + 2):
            model(torch.full((2, 4), NAN if rank() == 1 and number == bad_in else 1.0))
    except (NonFiniteError, BatchLimitReached, AgreementError) as error:
        return told(error)
    finally:
        monitor._attachment.detach()
    return told(None)
