"""What the hook of a small module takes: called again at once, and between the modules of a model.

    python benchmarks/hook.py

The difference is what the caches no longer hold when a hook runs, and what a hook takes from them that the model then
waits for. Both are native's, with what it reads. The second is what a forward takes longer than the same forward with
hooks that watch nothing; weights are not read in it (`weights="on_change"`).
"""

import time

import torch
from cases import CASES
from measure import interleaved
from overhead import exchange_hooks, forward
from torch import nn

from overflowstat import Monitor
from overflowstat.native_frame_log import make_frame_log
from overflowstat.recorder import make_recorder

ROUNDS, CALLS = 60, 20_000


def called_again_at_once() -> float:
    """Seconds of the hook of a linear map of 32 x 64, its output read each time."""
    module = nn.Linear(64, 64)
    x = torch.randn(32, 64)
    y = module(x).detach()
    log = make_frame_log(make_recorder("native"), keep=21)
    log.add_module(0, "", module)
    hook = log.hook(0, module, lambda: None)
    log.configure(is_watching=True, is_told=False, always_look=False, reuse=False)
    start = time.perf_counter()
    for _ in range(CALLS):
        hook(module, (x,), {}, y)
    return (time.perf_counter() - start) / CALLS


def in_a_model() -> tuple[float, int]:
    """Seconds of a module call, and the modules, of a Llama of many small modules."""
    case = next(case for case in CASES if "small modules" in case.name)
    torch.manual_seed(0)
    model = case.make().eval()
    run = forward(model, case.inputs())
    hooks = {}
    for name, every_n in (("watched", 1), ("not watched", 1 << 30)):
        Monitor(model, recorder="native", weights="on_change", every_n=every_n, sinks=[])
        run()
        run()
        hooks[name] = exchange_hooks(model)
    contenders = dict.fromkeys(hooks, run)
    timings = interleaved(contenders, ROUNDS, "cpu", prepare=lambda name: exchange_hooks(model, hooks[name]))
    modules = sum(1 for _ in model.modules())
    return (timings["watched"].median - timings["not watched"].median) / modules, modules


def main() -> None:
    print(f"called again at once: {called_again_at_once() * 1e6:.2f} microseconds")
    seconds, modules = in_a_model()
    print(f"in a model of {modules} modules: {seconds * 1e6:.2f} microseconds")


if __name__ == "__main__":
    main()
