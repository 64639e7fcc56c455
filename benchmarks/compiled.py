"""What watching a compiled model costs: its forward, its training step, its compilation and its memory.

    python benchmarks/compiled.py --json benchmarks/results/compiled-here.json

Each way to watch has a process of its own, since Dynamo keeps what it has compiled with the code of a class. They are
timed in turn, by the clock of the parent, which costs each some tens of microseconds more. The memory of a step is what
is resident at its peak beyond what was before it. Compilation, of a forward without gradients and of one with, is timed
once, without caches, one process after the other.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measure import Ratio, Timing, interleaved, machine
from overhead import forward, scalar
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
from transformers.debug_utils import DebugUnderflowOverflow as Reference

from overflowstat import Monitor

PLAIN = "compiled"
REFERENCE = "compiled, reference"


def bert_base() -> tuple[nn.Module, Tensor]:
    return BertModel(BertConfig()), torch.randint(0, 30_000, (4, 128))


def llama() -> tuple[nn.Module, Tensor]:
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config), torch.randint(0, 32_000, (2, 256))


class Pointwise(nn.Module):
    """The worst case for memory: Inductor makes one kernel of it, and writes down nothing in between."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4096))
        self.layers = nn.ModuleList(nn.SiLU() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


def pointwise() -> tuple[nn.Module, Tensor]:
    return Pointwise(), torch.randn(4096, 4096)  # 64 MiB


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "bert-base": bert_base,
    "Llama, 8 x 512": llama,
    "8 pointwise modules, 64 MiB": pointwise,
}

WAYS: dict[str, Callable[[nn.Module], object]] = {
    PLAIN: lambda model: None,
    "compiled, watched": Monitor,
    "compiled, watched, weights on change": lambda model: Monitor(model, weights="on_change"),
    "compiled, watched by reductions, weights on change": lambda model: by_reductions(model),
    "eager": lambda model: None,
    "eager, watched": Monitor,
    REFERENCE: Reference,
}


def by_reductions(model: nn.Module) -> Monitor:
    """As where the extension does not read: for the choice between the two, which is no option of a monitor."""
    monitor = Monitor(model, weights="on_change")
    for _, hook in monitor._compiled.hooked:
        hook._native = False
    return monitor


def work(way: str, model_name: str) -> None:
    """Compile, and tell how long that took; then run what each line of the standard input names, and answer each."""
    torch.manual_seed(0)
    model, ids = MODELS[model_name]()
    model.eval()  # dropout would take more than what is measured
    watcher = WAYS[way](model)
    # The first graph break, which it says it cannot do without, is the reference's own.
    run: Any = torch.compile(model, fullgraph=way != REFERENCE) if way.startswith(PLAIN) else model
    steps = {"forward": forward(run, (ids,)), "training step": training_step(run, ids)}
    seconds = {}
    for name, step in steps.items():
        start = time.perf_counter()
        step()
        seconds[name] = time.perf_counter() - start
    print(json.dumps({"compilation": seconds, "modules": sum(1 for _ in model.modules())}), flush=True)
    for line in sys.stdin:
        before = forget_peak()
        steps[line.strip()]()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"peak_kilobytes": peak, "step_kilobytes": resident("VmHWM") - before}), flush=True)
    del watcher


def forget_peak() -> int:
    """Have the peak of the resident memory begin anew, by clear_refs of proc(5); gives what is resident, in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(what: str) -> int:
    """A line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def training_step(model: Any, ids: Tensor) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad()
        scalar(model(ids)).backward()  # type: ignore[no-untyped-call]

    return run


class Worker:
    def __init__(self, way: str, model_name: str) -> None:
        environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", way, model_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if way == REFERENCE else None,  # Dynamo warns of each print
            text=True,
            env=environment,
        )
        self.began = self._answer()
        self.peak_kilobytes = 0
        self.step_kilobytes: dict[str, list[int]] = {}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # or else it is the reference's
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"a worker has ended with {self._process.wait()}")

    def run(self, step: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(step + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak_kilobytes = answer["peak_kilobytes"]
        self.step_kilobytes.setdefault(step, []).append(answer["step_kilobytes"])

    def end(self) -> None:
        self._process.communicate()


def measure(model_name: str, ways: list[str], rounds: int, budget: float) -> dict[str, Any]:
    workers = {way: Worker(way, model_name) for way in dict.fromkeys((PLAIN, *ways))}
    found: dict[str, Any] = {
        "model": model_name,
        "modules": workers[PLAIN].began["modules"],
        "rounds": {},
        "ratio_to_compiled": {},
    }
    for step in ("forward", "training step"):
        contenders: dict[str, Callable[[], object]] = {
            way: functools.partial(worker.run, step) for way, worker in workers.items()
        }
        timings = interleaved(contenders, rounds, "cpu", budget=budget, rare=(REFERENCE,))
        found["rounds"][step] = len(timings[PLAIN].rounds)
        found["ratio_to_compiled"][step] = ratios(timings)
    plain = workers[PLAIN]
    whole = {way: worker for way, worker in workers.items() if way.startswith(PLAIN) and way != REFERENCE}
    found["compilation_ratio"] = {way: total(worker) / total(plain) for way, worker in whole.items()}
    found["peak_memory_ratio"] = {way: worker.peak_kilobytes / plain.peak_kilobytes for way, worker in whole.items()}
    found["step_mebibytes"] = {
        step: {way: statistics.median(worker.step_kilobytes[step]) / 1024 for way, worker in workers.items()}
        for step in found["ratio_to_compiled"]
    }
    for worker in workers.values():
        worker.end()
    return found


def ratios(timings: dict[str, Timing]) -> dict[str, Any]:
    return {way: asdict(timing.ratio(timings[PLAIN])) for way, timing in timings.items()}


def total(worker: Worker) -> float:
    return float(sum(worker.began["compilation"].values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="at most; the first one is not kept")
    parser.add_argument("--budget", type=float, default=60, help="seconds for each model and step")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS), help="besides the plain one")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    figures = []
    for name in options.models:
        found = measure(name, options.ways, options.rounds, options.budget)
        figures.append(found)
        for step, of_ways in found["ratio_to_compiled"].items():
            for way, ratio in of_ways.items():
                print(f"{name}, {step}: {way} {Ratio(**ratio)}")
        for step, of_ways in found["step_mebibytes"].items():
            print(
                f"{name}, {step}, MiB at its peak: " + ", ".join(f"{way} {size:.0f}" for way, size in of_ways.items())
            )
        for what in ("compilation_ratio", "peak_memory_ratio"):
            print(f"{name}, {what}: " + ", ".join(f"{way} {ratio:.2f}" for way, ratio in found[what].items()))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine("cpu"), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
