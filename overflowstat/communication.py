"""Whether the processes of a launch, and their devices, can communicate: run in each of them."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .presence import SILENCE, Member, Presence, Store, connect

__all__ = ["CommunicationError", "Launch", "check_communication", "versions"]

NUMBERS = 1 << 20  # elements of a message: more than NCCL and gloo send in one piece
LONGER = 2.0  # seconds: until what has taken too long has told so itself

_Result = TypeVar("_Result")


class CommunicationError(RuntimeError):
    """Processes cannot communicate; the text says in which stage, and which of them are missing or silent."""


class Launch(NamedTuple):
    """What a launcher tells a process by its environment."""

    rank: int
    size: int
    local_rank: int
    host: str
    """Where the store of all is, by which they find each other."""
    port: int
    keeps_store: bool
    """This process does; where no launcher does, the first rank."""
    run: str
    """Unlike that of every other run, and every restart of this one."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch:
        """Raises ValueError where a variable is missing or makes no sense."""
        found = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            value = environment.get(name)
            if value is None or not value.isdecimal():
                problem = "is not set" if value is None else f"is {value!r}, not a number"
                raise ValueError(f"{name} {problem}: start it as `torchrun --nproc_per_node 2 -m overflowstat ...`")
            found[name] = int(value)
        if found["RANK"] >= found["WORLD_SIZE"]:
            raise ValueError(f"RANK is {found['RANK']}, and WORLD_SIZE {found['WORLD_SIZE']}: ranks count from 0")
        return cls(
            found["RANK"],
            found["WORLD_SIZE"],
            found["LOCAL_RANK"],
            environment.get("MASTER_ADDR", "localhost"),
            found["MASTER_PORT"],
            found["RANK"] == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            f"{environment.get('TORCHELASTIC_RUN_ID', '')}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        )


def check_communication(launch: Launch, backend: str, timeout: float) -> Member:
    """Find the other processes, form a group with a device for each, and send numbers every way with right answers.

    Gives who this process is. Forms the default group, and leaves it when all is well.

    Args:
        backend: "nccl" or "gloo".
        timeout: seconds that each stage may take.

    Raises:
        CommunicationError: a stage failed or took too long. The process should end by os._exit then, since what hangs
            in another thread is not ended.
    """
    me = Member(launch.rank, socket.gethostname(), launch.local_rank)
    presence = _present(launch, me, timeout)
    device = torch.device("cuda", launch.local_rank) if backend == "nccl" else torch.device("cpu")
    stages: list[tuple[str, Callable[[], object]]] = [
        ("taking the device", lambda: _take(device)),
        ("forming the group", lambda: _form(launch, backend, presence.store, device, timeout)),
        ("all-reduce", lambda: _all_reduce(launch, device)),
        ("barrier", dist.barrier),
        ("each pair", lambda: _each_pair(launch, device)),
        ("memory", lambda: _memory(device)),
    ]
    with _told_of_the_end() as ended:
        _run("finding each other", 0, lambda: None, presence, timeout, ended)
        for number, (name, function) in enumerate(stages, 1):
            _run(name, number, function, presence, timeout, ended)
    dist.destroy_process_group()
    presence.reach(len(stages) + 1)
    if launch.keeps_store:  # which the others still ask
        presence.wait_for_all(len(stages) + 1, timeout)
    presence.close()
    return me


def _present(launch: Launch, me: Member, timeout: float) -> Presence:
    prefix = f"overflowstat/{launch.run}"
    try:
        store = connect(launch.host, launch.port, prefix, timeout, launch.keeps_store)
        second = connect(launch.host, launch.port, prefix, timeout, False)
        return Presence(store, second, me, launch.size)
    except (RuntimeError, OSError) as error:
        raise CommunicationError(
            f"nobody answers at {launch.host}:{launch.port} within {timeout:g} s, where rank 0 or its launcher should: "
            f"MASTER_ADDR or MASTER_PORT is wrong, or a firewall is in between ({_first_line(error)})"
        ) from error


def _run(
    name: str, number: int, function: Callable[[], object], presence: Presence, timeout: float, ended: threading.Event
) -> None:
    """One stage, after which all have come so far."""

    def stage() -> None:
        function()
        presence.reach(number)
        if presence.wait_for_all(number, timeout):
            raise TimeoutError

    try:
        _within(timeout + LONGER, stage, ended)
        return
    except TimeoutError as error:
        failure: Exception = error
        what = "was ended from outside" if ended.is_set() else f"did not end within {timeout:g} s"
    except Exception as error:
        failure = error
        what = f"failed ({_first_line(error)})"
    raise CommunicationError(f"{name} {what}; {_whose_fault(presence, number)}") from failure


def _whose_fault(presence: Presence, number: int) -> str:
    try:
        silent, behind = _within(SILENCE + LONGER, lambda: (presence.silent(), presence.behind(number)))
        if silent:
            return f"no sign of life from {presence.names(silent)}"
        others = [rank for rank in behind if rank != presence.me.rank]
        return f"not so far yet: {presence.names(others)}" if others else "all others are there"
    except (RuntimeError, OSError):  # TimeoutError among them
        return "the store of all, which rank 0 or its launcher keeps, does not answer"


def _within(seconds: float, function: Callable[[], _Result], ended: threading.Event | None = None) -> _Result:
    """What a function gives or raises that may hang for ever, or TimeoutError; also where `ended` is set before."""
    results: list[_Result] = []
    failures: list[Exception] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    limit = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < limit and not (ended is not None and ended.is_set()):
        thread.join(0.05)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError
    return results[0]


@contextmanager
def _told_of_the_end() -> Iterator[threading.Event]:
    """A launcher ends all processes by SIGTERM when one has failed, and leaves them the time to say what they know."""
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        yield ended
    finally:
        signal.signal(signal.SIGTERM, before)


def _take(device: torch.device) -> None:
    if device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if device.index >= count:
        raise RuntimeError(f"this host has {count} visible GPUs, and none for local rank {device.index}")
    torch.cuda.set_device(device)


def _form(launch: Launch, backend: str, store: Store, device: torch.device, timeout: float) -> None:
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )


def _all_reduce(launch: Launch, device: torch.device) -> None:
    x = torch.full((NUMBERS,), float(launch.rank + 1), device=device)
    dist.all_reduce(x)
    _expect(x, launch.size * (launch.size + 1) / 2, "the sum over all ranks")


def _each_pair(launch: Launch, device: torch.device) -> None:
    """In rounds in which each rank has one partner, as a tournament is drawn up by the circle method."""
    size = launch.size + launch.size % 2  # with one that nobody is, where they are odd
    for turn in range(size - 1):
        order = [0, *((i + turn) % (size - 1) + 1 for i in range(size - 1))]
        partner = order[size - 1 - order.index(launch.rank)]
        if partner >= launch.size:
            continue
        sent = torch.full((NUMBERS,), float(launch.rank), device=device)
        got = torch.empty_like(sent)
        operations = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, got, partner)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        _expect(got, partner, f"what rank {partner} sent")


def _memory(device: torch.device) -> None:
    x = torch.ones(NUMBERS, device=device)
    _expect(x + x, 2, "what is written to the device's memory")


def _expect(x: Tensor, value: float, what: str) -> None:
    if wrong := int((x != value).sum()):
        raise RuntimeError(f"{what} is wrong in {wrong} of {x.numel()} numbers")


def versions(backend: str) -> str:
    """On one line."""
    found = [f"torch {torch.__version__}"]
    if torch.version.cuda is not None:
        found.append(f"CUDA {torch.version.cuda}")
    if backend == "nccl":
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return ", ".join([*found, f"NCCL {'.'.join(map(str, nccl))}"])
    return ", ".join([*found, backend])


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
