"""What watching a model costs: its forward and its training step, watched over unwatched, for every way to watch it.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --device cuda --json benchmarks/results/overhead-here.json --plot overhead.png

All ways are timed in turn, in one process and on copies of one model, each round once. A training step is forward,
backward and an optimizer step. What a ratio can come down to is told beside it: one torch.sum over as many bytes as the
native recorder reads, and a hook on every module that does nothing.
"""

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case
from measure import Ratio, Timing, interleaved, machine
from torch import Tensor, nn
from transformers.debug_utils import DebugUnderflowOverflow as Reference

from overflowstat import Monitor

PLAIN = "plain"


def hooked(model: nn.Module) -> None:
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: None)


def watchers(case: Case) -> dict[str, Callable[[nn.Module], object]]:
    """What is done to a copy of the model, by name."""
    ways: dict[str, Callable[[nn.Module], object]] = {
        PLAIN: lambda model: None,
        "hooks": hooked,
        "reference": Reference,
        "torch": lambda model: Monitor(model, recorder="torch"),
        "native": lambda model: Monitor(model, recorder="native"),
    }
    if case.generates:
        ways["native, on change"] = lambda model: Monitor(model, recorder="native", weights="on_change")
    return ways


def scalar(output: object) -> Tensor:
    value = output if isinstance(output, Tensor) else output[0]  # type: ignore[index]
    assert isinstance(value, Tensor)
    return value.float().square().mean()


def forward(model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> object:
        return model(*inputs)

    return run


def training_step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def run() -> None:
        scalar(model(*inputs)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return run


def floor(bytes_read: int, device: str) -> Callable[[], object]:
    data = torch.zeros(max(1, bytes_read // 8), dtype=torch.int64, device=device)
    return lambda: data.sum()


def measure(case: Case, trains: bool, rounds: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    original = case.make().to(device).train(trains)
    inputs = tuple(x.to(device) for x in case.inputs())
    contenders: dict[str, Callable[[], object]] = {}
    monitors = {}
    for name, watch in watchers(case).items():
        model = copy.deepcopy(original)
        monitors[name] = watch(model)
        contenders[name] = (training_step if trains else forward)(model, inputs)
        contenders[name]()
    native = monitors["native"]
    assert isinstance(native, Monitor)
    before = native.counters()
    contenders["native"]()
    counters = {name: new - old for name, new, old in zip(before._fields, native.counters(), before, strict=True)}
    contenders["sum"] = floor(counters["bytes_read"], device)
    timings = interleaved(contenders, rounds, device)
    plain = timings.pop(PLAIN)
    return {
        "model": case.name,
        "step": "training" if trains else "forward",
        "modules": sum(1 for _ in original.modules()),
        "weight_megabytes": round(sum(p.numel() * p.element_size() for p in original.parameters()) / 1e6),
        "native_counters": counters,
        "ratio_to_plain": {name: asdict(timing.ratio(plain)) for name, timing in timings.items() if name != "sum"},
        "floor_by_sum": asdict(with_sum(plain, timings["sum"]).ratio(plain)),
    }


def with_sum(plain: Timing, of_bytes: Timing) -> Timing:
    return Timing([a + b for a, b in zip(plain.seconds, of_bytes.seconds, strict=True)])


COLUMNS = ("reference", "torch", "native", "native, on change", "hooks")


def line(row: dict[str, Any]) -> str:
    ratios = {name: Ratio(**ratio) for name, ratio in row["ratio_to_plain"].items()}
    cells = [str(ratios[name]) if name in ratios else "" for name in COLUMNS]
    floor_by_sum = Ratio(**row["floor_by_sum"])
    return f"{row['model']:42} {row['step']:9}" + "".join(f" {cell:18}" for cell in cells) + f" {floor_by_sum}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 0.7 * len(rows) + 1.5))
    names = [name for name in COLUMNS if name != "hooks"]
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        found = [(at, row["ratio_to_plain"][name]) for at, row in enumerate(rows) if name in row["ratio_to_plain"]]
        places = [at + i * height for at, _ in found]
        values = [ratio["median"] for _, ratio in found]
        low = [ratio["median"] - min(ratio["p10"], ratio["median"]) for _, ratio in found]
        high = [max(ratio["p90"], ratio["median"]) - ratio["median"] for _, ratio in found]
        axes.barh(places, values, height, xerr=[low, high], label=name)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks([at + 0.3 for at in range(len(rows))], [f"{row['model']}\n{row['step']}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("time over that of the unwatched model, median with 10th and 90th percentile")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--models", nargs="+", default=[""], help="only those whose name has one of these in it")
    parser.add_argument("--steps", nargs="+", choices=["forward", "training"], default=["forward", "training"])
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--plot", type=Path, help="draw them there; needs matplotlib")
    options = parser.parse_args()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)

    about = machine(options.device)
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    print(
        f"\nmedians of {options.rounds} rounds over those of the plain model (10th to 90th percentile of the rounds);"
    )
    print("hooks: one on each module that does nothing; floor: one torch.sum over what native reads\n")
    print(f"{'model':42} {'step':9}" + "".join(f" {name:18}" for name in (*COLUMNS, "floor")))
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if not any(part in case.name for part in options.models):
            continue
        for step in options.steps:
            if step == "training" and not case.trains:
                continue
            rows.append(measure(case, step == "training", options.rounds, options.device))
            print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rounds": options.rounds, "rows": rows}, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
