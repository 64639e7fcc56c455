"""What a process finds in the compiler's cache, which another one has left there."""

from pathlib import Path

from running import python, write

from overflowstat.recorder import RecorderName

SCRIPT = """
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters

from overflowstat import Monitor


class Prints:
    every_frame = True

    def frame(self, frame, traced):
        print(frame)

    def report(self, report):
        pass


torch.manual_seed(0)
model = nn.Sequential()
model.add_module("body", nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)))
with Monitor(model, recorder=sys.argv[1], sinks=[Prints()]):
    torch.compile(model)(torch.ones(2, 4))
    torch.compile(model, dynamic=True)(torch.ones(5, 4))
print(counters["aot_autograd"]["autograd_cache_hit"], file=sys.stderr)
"""


def test_what_is_in_the_cache_is_read_as_what_was_compiled_here(recorder_name: RecorderName, tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", SCRIPT)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    first, second = (python(tmp_path, str(script), recorder_name, environment=cache) for _ in range(2))
    assert first.status == second.status == 0, first.errors + second.errors
    assert second.output == first.output and "not read" not in first.output
    assert "body.0" in first.output
    hits = [int(ended.errors.splitlines()[-1]) for ended in (first, second)]
    assert hits[0] == 0 and hits[1] > 0
