"""Runs a scenario in several processes of a group, each forked from this one, which has imported torch.

Reads one JSON object a line, as ranks.py writes it, and writes the list of exit statuses as subprocess has them. In
the folder each rank leaves `RANK.json`, what the scenario gave, and `RANK.errors`. All of them share the stdout
`output`, a file, or a pipe that is there.
"""

import gc
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import rank_scenarios  # noqa: F401, as the next one: what takes a while is imported once
import torch
import torch._dynamo  # which optimizers and DistributedDataParallel import where they are first used
import torch.distributed as dist
import wrapper_scenarios  # noqa: F401
from ranks import free_port


def be(rank: int, wanted: dict[str, Any]) -> None:
    """Become a rank, until the end."""
    folder = Path(wanted["folder"])
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(wanted["size"]),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(wanted["port"]),
            **wanted["environment"],
        }
    )
    os.dup2(os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(os.open(folder / f"{rank}.errors", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if wanted["group"]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    result = getattr(sys.modules[wanted["module"]], wanted["scenario"])(*wanted["arguments"])
    (folder / f"{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        # Whoever keeps the store is the last to go.
        store = dist.distributed_c10d._get_default_store()
        store.add("done", 1)
        while rank == 0 and store.add("done", 0) < wanted["size"] - wanted["missing"]:
            time.sleep(0.01)


def wait(children: list[int], seconds: float) -> list[int]:
    """For all to end, by themselves or, later than that, killed."""
    statuses: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(statuses) < len(children):
        for child in set(children) - set(statuses):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                statuses[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for child in set(children) - set(statuses):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[child] for child in children]


gc.freeze()
for line in sys.stdin:
    wanted = {**json.loads(line), "port": free_port()}
    children = []
    for rank in range(wanted["size"]):
        child = os.fork()
        if child == 0:
            try:
                be(rank, wanted)
                sys.stdout.flush()
                os._exit(0)  # a destructor that waits for other ranks is not what is tested
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        children.append(child)
    print(json.dumps(wait(children, wanted["seconds"])), flush=True)
