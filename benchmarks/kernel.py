"""What reading costs: one tensor of every dtype and size, and all weights of a model in one call.

    python benchmarks/kernel.py
    python benchmarks/kernel.py --device cuda --megabytes 64 1024 --json benchmarks/results/kernel-here.json

What is compared:
    native, torch   tensor_stats by either recorder, until its values are Python numbers
    reference       the four reductions of transformers.debug_utils, each fetched
    aminmax         torch.aminmax(x.abs()): no counts, and a copy
    foreach_norm    torch._foreach_norm([x], ord=inf): the maximum alone
    compiled        abs, amin, amax, isnan.any and isinf.any in one function, by torch.compile (compiling is not timed)
    sum             torch's sum over the same bytes seen as int64; on CUDA also as int32 and as float32

A call is timed by the host's clock, from an idle device until the device is idle again. All but native, torch and
reference leave their results on the device. On CUDA that is little but launches and waits unless a tensor is large, so
that a second figure tells what the device itself takes for each of a row of calls that nobody waits for (`device` in
the JSON; of native it is `record`, the numbers fetched later, as hooks do it).

The machine's own limit is taken to be what the fastest of sum, foreach_norm and compiled reads in the same run: each
reads every byte once and does little else. On a CPU that is the sum over int64, a loop of loads and additions. On a
CUDA device native is to reach 0.95 of that bandwidth for a tensor of 64 MB or more, and 0.9 for the weights.

Small tensors are read 900 in a call, as the hook of a module that gives them all does it, against a torch.sum of each.

But for these no cache holds what is read: a tensor is one of several, read in turn, which take 512 MiB together.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama
import torch
from bandwidth import BASE, Comparison, verdict
from measure import interleaved, machine, on_device
from readers import SINGLE_READS, ColdMemory, Compiler, Readers, of_list, of_one, of_small
from torch import Tensor
from torch.utils import cpp_extension

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.int8, torch.complex64),
)
HERE = Path(__file__).resolve().parent
SHOWN = ("native", "torch", "reference", "aminmax", "foreach_norm", "compiled")
MIB = 1 << 20
COLD_BYTES = 512 * MIB  # four times the 126 MB of a B200's L2, the largest last cache here
LARGE = 64 * 10**6
TARGET_OF_LARGE, TARGET_OF_WEIGHTS = 0.95, 0.9
SMALL_COUNT, SMALL_ELEMENTS = 900, 64
BURST_BYTES = 4 << 30  # what a row of launches reads: a millisecond or so


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_on(device: str, size: int) -> Tensor:
    """Below 60, they are a finite value of every format, whatever they are put together to."""
    return torch.randint(0, 60, (size,), dtype=torch.uint8, device=device)


def figures(readers: Readers, size: int, target: float | None, device: str, rounds: int) -> dict[str, Any]:
    """What one row of the JSON says, beside what was read."""
    calls = Comparison(interleaved(readers.calls, rounds, device), size, SINGLE_READS)
    row = calls.as_json() | {"device": None, "target": None, "left_out": readers.left_out}
    if device == "cuda":
        launches = min(32, max(2, BURST_BYTES // size))
        alone = Comparison(on_device(readers.launches, rounds, launches), size, SINGLE_READS)
        row["device"] = alone.as_json()
        row["target"] = None if target is None else verdict(alone, "native", target)
    show(row, calls)
    return row


HEADER = f"{'':18} {'MiB':>6}  {'best':13} {'GB/s':>6}  {f'native / {BASE}':18} " + "".join(
    f" {f'{name} / best':19}" for name in SHOWN
)


def show(row: dict[str, Any], calls: Comparison) -> None:
    """The rest of a line that says what was read."""
    timed = calls.timings
    cells = [str(calls.ratio("native", BASE)) if {"native", BASE} <= timed.keys() else "-"]
    cells += [str(calls.ratio(name, calls.best)) if name in timed else "-" for name in SHOWN]
    print(f"  {calls.best:13} {calls.gigabytes_per_second(calls.best):6.1f}  " + " ".join(f"{c:19}" for c in cells))
    if device := row["device"]:
        speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in device["gigabytes_per_second"].items())
        print(f"{'':18} the device alone, GB/s: {speeds}")
    if target := row["target"]:
        reached = f"{target['reached']['median']:.3f} of the best" if target["reached"] else "nothing"
        print(f"{'':18} native reaches {reached}: {target['fraction_of_best']} {'met' if target['met'] else 'MISSED'}")
    for name, reason in row["left_out"].items():
        print(f"{'':18} without {name}: {reason}")


def weights_row(size: int, device: str, compiler: Compiler, rounds: int) -> dict[str, Any]:
    width = llama.widest(size)
    memory = bytes_on(device, llama.bytes_of(width))
    tensors = llama.views(memory, width)
    print(f"{'weights, bfloat16':18} {memory.numel() // MIB:6}", end="", flush=True)
    readers = of_list(ColdMemory(memory, memory.numel()), tensors, device, compiler)
    about = {"tensors": len(tensors), "width": width, "dtype": name_of(llama.DTYPE), "bytes": memory.numel()}
    return about | figures(readers, memory.numel(), TARGET_OF_WEIGHTS, device, rounds)


def tensor_row(
    memory: ColdMemory, dtype: torch.dtype, size: int, device: str, compiler: Compiler, rounds: int
) -> dict[str, Any]:
    print(f"{name_of(dtype):18} {size // MIB:6}", end="", flush=True)
    readers = of_one(memory, dtype, device, compiler)
    target = TARGET_OF_LARGE if size >= LARGE else None
    about = {"dtype": name_of(dtype), "megabytes": size // MIB}
    return about | figures(readers, size, target, device, rounds)


def seconds_of_the_pass() -> float:
    """For one small tensor, called from C++. Compiles small_pass.cpp."""
    csrc = HERE.parent / "csrc"
    sources = [str(HERE / "small_pass.cpp"), str(csrc / "cpu" / "reduce.cpp")]
    flags = ["-O3", "-fopenmp", "-ffp-contract=off"]  # as setup.py has them
    module = cpp_extension.load("small_pass", sources, extra_include_paths=[str(csrc)], extra_cflags=flags)
    return float(module.seconds_each(SMALL_COUNT, SMALL_ELEMENTS, 100))


def small_row(device: str, rounds: int) -> dict[str, Any]:
    """Many small tensors in one call, which is dispatch and little else."""
    memory = bytes_on(device, SMALL_COUNT * 4 * SMALL_ELEMENTS).view(torch.float32)
    tensors = list(torch.split(memory, SMALL_ELEMENTS))
    timings = interleaved(of_small(tensors, device).calls, rounds, device)
    each = {name: timing.median / SMALL_COUNT * 1e6 for name, timing in timings.items()}
    print(f"\n{SMALL_COUNT} float32 tensors of {SMALL_ELEMENTS} elements, microseconds for each:")
    print("  " + ", ".join(f"{name} {value:.2f}" for name, value in each.items()))
    alone = seconds_of_the_pass() * 1e6 if device == "cpu" else None
    if alone is not None:
        print(f"  the C++ pass alone {alone:.3f}")
    return {
        "tensors": SMALL_COUNT,
        "elements": SMALL_ELEMENTS,
        "microseconds_of_the_pass": alone,
        "microseconds_each": each,
        "ratio_to_sum": {name: asdict(timing.ratio(timings[BASE])) for name, timing in timings.items()},
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--megabytes", type=int, nargs="*", default=[1, 16, 256], help="bytes of a tensor, in MiB")
    parser.add_argument(
        "--weights-megabytes",
        type=int,
        help="most that the weights take, in MiB; 0 leaves them out (default: 512; on CUDA 13000, which is Llama 2 7B, "
        "or 60 %% of what is free)",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile-seconds", type=float, default=float("inf"), help="no more compiling after so long")
    parser.add_argument("--json", type=Path, help="write the figures there, too, after every row")
    return parser.parse_args()


def default_weights(device: str) -> int:
    if device == "cpu":
        return 512
    free, _ = torch.cuda.mem_get_info()
    return min(13000, free * 6 // 10 // MIB)


def main() -> None:
    chosen = options()
    device, rounds = chosen.device, chosen.rounds
    result: dict[str, Any] = {"machine": machine(device), "rounds": rounds, "weights": None, "rows": []}
    print(*(f"{key}: {value}" for key, value in result["machine"].items()), sep="\n")
    print(f"\ntimes of a call over each other, medians of {rounds} rounds (10th to 90th percentile of the rounds)\n")
    print(HEADER)

    def save() -> None:
        """After each row, so that a run that is ended early leaves what it has."""
        if chosen.json:
            chosen.json.parent.mkdir(parents=True, exist_ok=True)
            unfinished = chosen.json.with_name(chosen.json.name + ".part")
            unfinished.write_text(json.dumps(result, indent=1) + "\n")
            unfinished.replace(chosen.json)

    compiler = Compiler(chosen.compile_seconds)
    weights = default_weights(device) if chosen.weights_megabytes is None else chosen.weights_megabytes
    if weights:
        result["weights"] = weights_row(weights * MIB, device, compiler, rounds)
        save()
    for megabytes in chosen.megabytes:
        size = megabytes * MIB
        memory = ColdMemory(bytes_on(device, max(COLD_BYTES, size)), size)
        for dtype in DTYPES:
            result["rows"].append(tensor_row(memory, dtype, size, device, compiler, rounds))
            save()
    result["small"] = small_row(device, rounds)
    save()


if __name__ == "__main__":
    main()
