"""What reading one tensor costs, as a multiple of torch's own sum over the same bytes seen as int64.

    python benchmarks/kernel.py
    python benchmarks/kernel.py --device cuda --megabytes 64 1024 --json benchmarks/results/kernel-here.json

The sum reads every byte once and does next to nothing with it, so that 1.00 is the speed of memory. It is taken over
int64 because torch sums narrower integers many times slower.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measure import interleaved, machine
from torch import Tensor

from overflowstat import tensor_stats
from overflowstat.recorder import make_recorder

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.int8, torch.complex64),
)
BASE = "sum"


def reference(x: Tensor) -> None:
    """The four reductions of transformers.debug_utils, each fetched."""
    x.abs().min().item()
    x.abs().max().item()
    x.isnan().any().item()
    x.isinf().any().item()


def has_reference(x: Tensor) -> bool:
    try:
        reference(x[:1])
    except RuntimeError:  # torch has no abs for float8
        return False
    return True


def contenders(data: Tensor, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    x, words = data.view(dtype), data.view(torch.int64)
    found: dict[str, Callable[[], object]] = {BASE: words.sum}
    for name in ("native", "torch"):
        recorder = make_recorder(name)
        found[name] = lambda recorder=recorder: tensor_stats(x, recorder=recorder)
    if has_reference(x):
        found["reference"] = lambda: reference(x)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 16, 256], help="bytes of a tensor, in MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)

    about = machine(options.device)
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    print(f"\nmedians of {options.rounds} rounds over that of sum (10th to 90th percentile of the rounds)\n")
    print(f"{'dtype':18} {'MiB':>5}  {'native':20} {'torch':20} {'reference':20}")
    rows: list[dict[str, Any]] = []
    for megabytes in options.megabytes:
        # Bytes below 60 are a finite value of every format, whatever they are put together to.
        data = torch.randint(0, 60, (megabytes << 20,), dtype=torch.uint8, device=options.device)
        for dtype in DTYPES:
            timings = interleaved(contenders(data, dtype), options.rounds, options.device)
            ratios = {name: timing.ratio(timings[BASE]) for name, timing in timings.items() if name != BASE}
            cells = "".join(
                f" {ratios[name]!s:20}" if name in ratios else "" for name in ("native", "torch", "reference")
            )
            print(f"{str(dtype).removeprefix('torch.'):18} {megabytes:5} {cells}", flush=True)
            gigabytes = (megabytes << 20) / 1e9
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "megabytes": megabytes,
                    "sum_gigabytes_per_second": gigabytes / timings[BASE].median,
                    "ratio_to_sum": {name: asdict(ratio) for name, ratio in ratios.items()},
                }
            )
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rounds": options.rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
