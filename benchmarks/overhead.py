"""What watching a model costs: its forward and its training step, watched over unwatched, for every way to watch it.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --device cuda --json benchmarks/results/overhead-here.json --plot overhead.png

All ways are timed in turn, in one process and on one model, whose hooks are changed in between: two copies of a model
in two places of memory differ by more than what is measured here. A training step is forward, backward and an optimizer
step. What a ratio can come down to is told beside it: one torch.sum over as many bytes as the native recorder reads,
and a hook on every module that does nothing.
"""

import argparse
import importlib
import json
from collections import OrderedDict
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
SUM = "sum"


def hooked(model: nn.Module) -> None:
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: None)


def watchers(case: Case) -> dict[str, Callable[[nn.Module], object]]:
    """What is done to the model, by name."""
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


OF_MODULES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
OF_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
Hooks = list[OrderedDict[int, Any]]


def exchange_hooks(model: nn.Module, hooks: Hooks | None = None) -> Hooks:
    """Give its modules, and all optimizers, these hooks, or none, in place of theirs, which are returned."""
    places: list[tuple[object, str]] = [(module, kind) for module in model.modules() for kind in OF_MODULES]
    places += [(importlib.import_module("torch.optim.optimizer"), kind) for kind in OF_OPTIMIZERS]
    before = [getattr(holder, kind) for holder, kind in places]
    for (holder, kind), new in zip(places, hooks or [OrderedDict() for _ in places], strict=True):
        setattr(holder, kind, new)
    return before


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


def measure(case: Case, trains: bool, rounds: int, budget: float, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = case.make().to(device).train(trains)
    inputs = tuple(x.to(device) for x in case.inputs())
    run = (training_step if trains else forward)(model, inputs)
    hooks_of: dict[str, Hooks] = {}
    for name, watch in watchers(case).items():
        watcher = watch(model)
        run()
        if name == "native":
            assert isinstance(watcher, Monitor)
            before = watcher.counters()
            run()
            counters = {
                key: new - old for key, new, old in zip(before._fields, watcher.counters(), before, strict=True)
            }
        hooks_of[name] = exchange_hooks(model)
    contenders = dict.fromkeys(hooks_of, run) | {SUM: floor(counters["bytes_read"], device)}
    timings = interleaved(
        contenders,
        rounds,
        device,
        prepare=lambda name: exchange_hooks(model, hooks_of.get(name)),
        budget=budget,
        rare=("reference", "torch"),
    )
    plain, of_bytes = timings.pop(PLAIN), timings.pop(SUM)
    return {
        "model": case.name,
        "step": "training" if trains else "forward",
        "rounds": len(plain.rounds),
        "modules": sum(1 for _ in model.modules()),
        "weight_megabytes": round(sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6),
        "native_counters": counters,
        "ratio_to_plain": {name: asdict(timing.ratio(plain)) for name, timing in timings.items()},
        "floor_by_sum": asdict(with_sum(plain, of_bytes).ratio(plain)),
    }


def with_sum(plain: Timing, of_bytes: Timing) -> Timing:
    return Timing({number: seconds + of_bytes.rounds[number] for number, seconds in plain.rounds.items()})


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
        low = [ratio["median"] - ratio["p10"] for _, ratio in found]
        high = [ratio["p90"] - ratio["median"] for _, ratio in found]
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
    parser.add_argument("--rounds", type=int, default=101, help="of each model and step, at most")
    parser.add_argument("--seconds", type=float, default=90, help="for the rounds of each model and step")
    parser.add_argument("--models", nargs="+", default=[""], help="only those whose name has one of these in it")
    parser.add_argument("--steps", nargs="+", choices=["forward", "training"], default=["forward", "training"])
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--plot", type=Path, help="draw them there; needs matplotlib")
    options = parser.parse_args()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)

    about = machine(options.device)
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    print(f"\ntime over that of the plain model, median of up to {options.rounds} rounds (10th to 90th percentile);")
    print("hooks: one on each module that does nothing; floor: one torch.sum over what native reads\n")
    print(f"{'model':42} {'step':9}" + "".join(f" {name:18}" for name in (*COLUMNS, "floor")))
    rows: list[dict[str, Any]] = []

    def save() -> None:
        """After each row, so that a run that is ended early leaves what it has."""
        if options.json:
            options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")

    for case in CASES:
        if not any(part in case.name for part in options.models):
            continue
        for step in options.steps:
            if step == "training" and not case.trains:
                continue
            rows.append(measure(case, step == "training", options.rounds, options.seconds, options.device))
            print(line(rows[-1]), flush=True)
            save()
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
