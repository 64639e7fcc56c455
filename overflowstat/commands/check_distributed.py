"""python -m overflowstat check-distributed"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from ..terminal import on_one_line
from . import Command, number

__all__ = ["COMMAND"]

WHAT_TO_SET = """\
  what to look at: NCCL_DEBUG=INFO, or TORCH_DISTRIBUTED_DEBUG=DETAIL for gloo, shows where it stops
    interface:   NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, as eth0; `ip addr` lists them, on every node
    firewall:    MASTER_PORT and, from node to node, all ports above 1023 must be open
    InfiniBand:  NCCL_IB_DISABLE=1 to try it without; NCCL_P2P_DISABLE=1, without the direct way between two GPUs
    without GPUs: --backend gloo tells whether the network is at fault
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="default: nccl where there are GPUs, else gloo")
    parser.add_argument(
        "--timeout",
        type=number("a number of seconds", lambda seconds: 0 < seconds < 1e6),
        default=60.0,
        metavar="S",
        help="seconds that each stage may take (default: 60)",
    )


def run(chosen: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from ..communication import CommunicationError, Launch, check_communication

    try:
        launch = Launch.of(os.environ)
        if not dist.is_available():
            raise ValueError("this build of torch has no torch.distributed")
        backend = chosen.backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if not dist.is_backend_available(backend):
            raise ValueError(f"this build of torch has no {backend}: --backend gloo")
    except ValueError as error:
        print(on_one_line(f"overflowstat check-distributed: {error}"), file=sys.stderr)
        return 2
    try:
        me = check_communication(launch, backend, chosen.timeout)
    except CommunicationError as error:
        name = f"{os.uname().nodename}-{launch.local_rank}"
        _tell(f"[{name}] FAILED (global rank: {launch.rank}/{launch.size}): {on_one_line(str(error))}\n{WHAT_TO_SET}")
        _tell_versions(launch.rank, backend)
        _leave(1)
    _tell(f"[{me.name}] is OK (global rank: {launch.rank}/{launch.size})\n")
    _tell_versions(launch.rank, backend)
    return 0


def _tell_versions(rank: int, backend: str) -> None:
    from ..communication import versions

    if rank == 0:
        _tell(f"{versions(backend)}\n")


def _tell(text: str) -> None:
    """In one piece, since all processes write to the same terminal."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), text.encode(errors="backslashreplace"))


def _leave(status: int) -> NoReturn:
    """Without what waits for other processes at an ordinary end."""
    sys.stderr.flush()
    os._exit(status)


COMMAND = Command(
    name="check-distributed",
    summary="whether the processes of a launch, and their GPUs, can communicate",
    description="""\
To be started by a launcher, in as many processes as the training has. Each takes its device, finds the others, forms a
group with them, and sends numbers every way: all-reduce, barrier, each pair once; all with right answers, and each
within a time limit. Each prints one line; if something hangs, which ranks are missing or silent.""",
    examples="""\
examples:
  torchrun --nproc_per_node 2 -m overflowstat check-distributed
  python -m torch.distributed.run --nproc_per_node 2 -m overflowstat check-distributed --backend gloo
  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \\
    -m overflowstat check-distributed   on each node, of which HOST is one

exit status: 0 all is well, 1 something is missing, silent or wrong, 2 arguments or the environment make no sense""",
    add_arguments=add_arguments,
    run=run,
)
