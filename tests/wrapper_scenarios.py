"""A small model in each wrapper that splits it among ranks, watched in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from keeps import Keeps
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from overflowstat import Monitor, NonFiniteError, check_weights
from overflowstat.frames import Frame
from overflowstat.stats import TensorStats

NAN = float("nan")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(x)))
        return y


class Net(nn.Module):
    """With a child that is called `module` by its author."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.module = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.module(x)
        return y


def rank() -> int:
    return int(os.environ["RANK"])


def in_fsdp1(use_orig_params: bool) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )

    return wrap


def in_fsdp2(reshard: bool) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        return model

    return wrap


def in_fsdp2_of_bfloat16(model: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def in_tensor_parallel(model: nn.Module) -> nn.Module:
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def in_zero3(model: nn.Module) -> nn.Module:
    """As DeepSpeed's stage 3 leaves parameters: without elements, with this rank's part in `ds_tensor`, and gathered by
    hooks around the forward of the module that has them. Parts are as large as each other; what is added to the last
    ones is memory that nobody has written to, here NaN."""

    def gather(module: nn.Module, *_: object) -> None:
        for weight in module.parameters(recurse=False):
            whole = [torch.empty_like(weight.ds_tensor) for _ in range(dist.get_world_size())]  # type: ignore[attr-defined]
            dist.all_gather(whole, weight.ds_tensor)  # type: ignore[attr-defined]
            shape = weight.ds_shape  # type: ignore[attr-defined]
            weight.data = torch.cat(whole)[: shape.numel()].view(shape)

    def release(module: nn.Module, *_: object) -> None:
        for weight in module.parameters(recurse=False):
            weight.data = torch.empty(0)

    for module in model.modules():
        for weight in module.parameters(recurse=False):
            size = -(-weight.numel() // dist.get_world_size())
            added = size * dist.get_world_size() - weight.numel()
            padded = torch.cat([weight.detach().flatten(), torch.full((added,), NAN)])
            weight.ds_shape = weight.shape  # type: ignore[attr-defined]
            weight.ds_numel = weight.numel()  # type: ignore[attr-defined]
            weight.ds_process_group = dist.group.WORLD  # type: ignore[attr-defined]
            weight.ds_tensor = padded[rank() * size : (rank() + 1) * size].clone()  # type: ignore[attr-defined]
            weight.ds_tensor.ds_numel = size  # type: ignore[attr-defined]
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
        release(module)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "DDP": DistributedDataParallel,
    "FSDP1": in_fsdp1(True),
    "FSDP1 of flat parameters": in_fsdp1(False),
    "FSDP2": in_fsdp2(True),
    "FSDP2 that keeps weights": in_fsdp2(False),
    "FSDP2 of bfloat16": in_fsdp2_of_bfloat16,
    "tensor parallel": in_tensor_parallel,
    "ZeRO-3": in_zero3,
}
AROUND = ("DistributedDataParallel", "FullyShardedDataParallel")


def numbers(content: TensorStats | str) -> Any:
    return content if isinstance(content, str) else [content.abs_min, content.abs_max, content.numel]


def lines_of(frames: list[Frame]) -> list[Any]:
    return [
        [frame.module, frame.class_name, [[line.label, numbers(line.content)] for line in frame.lines]]
        for frame in frames
    ]


def one_batch(wrapper: str, recorder: str) -> dict[str, Any]:
    """Lines of a forward and its backward, of the same inputs on all ranks; and after it the weights that are here."""
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](Net())
    sink = Keeps()
    with Monitor(model, recorder=recorder, sinks=[sink], agree=20) as monitor:  # type: ignore[arg-type]
        for _ in range(2):
            sink.frames.clear()
            loss = model(torch.linspace(-1, 1, 16).view(2, 8)).float().sum()
            if wrapper != "ZeRO-3":  # of which the backward is not made here
                loss.backward()
        merged = [
            [frame.module, frame.class_name, [[line.label, numbers(line.content)] for line in frame.lines]]
            for frame in monitor.merge()
        ]
    here = {
        name: [float(local.abs().min()), float(local.abs().max())]
        for name, weight in model.named_parameters()
        if (local := held_here(weight)).numel()
    }
    return {
        "frames": lines_of(sink.frames),
        "merged": merged,
        "here": here,
        "checked": {name: numbers(stats)[:2] for name, stats in check_weights(model).stats.items()},
        "unreadable": dict(check_weights(model).unreadable),
    }


def held_here(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return weight.to_local() if isinstance(weight, DTensor) else getattr(weight, "ds_tensor", weight)


def bad_weight(wrapper: str, recorder: str) -> list[Any]:
    """In the piece of the last rank alone."""
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](Net())
    if is_last():
        weights = {name.replace("_fsdp_wrapped_module.", ""): weight for name, weight in model.named_parameters()}
        with torch.no_grad():
            held_here(next(w for name, w in weights.items() if name.endswith("blocks.1.down.weight"))).view(-1)[0] = NAN
    return found(model, torch.ones(2, 8), recorder)


def bad_batch(wrapper: str, recorder: str) -> list[Any]:
    """Of the last rank alone."""
    torch.manual_seed(0)
    return found(WRAPPERS[wrapper](Net()), torch.full((2, 8), NAN if is_last() else 1.0), recorder)


def is_last() -> bool:
    return rank() == dist.get_world_size() - 1


def found(model: nn.Module, x: Tensor, recorder: str) -> list[Any]:
    """Where, why, and on which rank, as each of them is told."""
    try:
        with Monitor(model, recorder=recorder, sinks=[], agree=20):  # type: ignore[arg-type]
            model(x)
    except NonFiniteError as error:
        verdict, process = error.verdict, error.process
        return [verdict and [verdict.module, verdict.label, verdict.kind], process and process.rank]
    return []


def stages(
    recorder: str, bad: bool, options: dict[str, Any] | None = None, schedule_of: str = "ScheduleGPipe"
) -> dict[str, Any]:
    """Of a pipeline: the first rank has the first block, the second one all else. Two batches of two parts, in the
    second of which the last rank's numbers may go bad; with options the monitor is stepped."""
    torch.manual_seed(0)
    whole = Net()
    stage = nn.Sequential()
    parts = [{"block": whole.blocks[0]}, {"block": whole.blocks[1], "end": whole.module}]
    for name, module in parts[rank()].items():
        stage.add_module(name, module)
    sink = Keeps()
    monitor = Monitor(stage, recorder=recorder, sinks=[sink], **(options or {}))  # type: ignore[arg-type]
    schedule_class = getattr(pipelining, schedule_of)
    schedule = schedule_class(PipelineStage(stage, rank(), 2, torch.device("cpu")), 2, loss_fn=lambda y, _: y.sum())
    error: BaseException | None = None
    try:
        for number in range(2):
            if bad and number == 1 and rank() == 1:
                nn.init.constant_(whole.blocks[1].up.weight, NAN)  # type: ignore[arg-type,union-attr]
            if rank() == 0:
                schedule.step(torch.linspace(-1, 1, 32).view(4, 8))
            else:
                schedule.step(target=torch.zeros(4, 4))
            if options:
                monitor.step()
    except (NonFiniteError, RuntimeError) as caught:  # the latter is what a stage makes of what its module raises
        error = caught.__cause__ or caught
    batches = monitor.batch_number
    merged = [] if bad else [frame.module for frame in monitor.merge()]
    monitor._attachment.detach()
    return {
        "frames": lines_of(sink.frames),
        "found": str(error).partition("\n")[0],
        "batches": batches,
        "merged": merged,
    }


def merge_batches(recorder: str) -> list[Any]:
    """Each rank has another batch, of numbers that tell whose they are; a NaN is in that of the last one."""
    model = nn.Sequential(nn.Identity())
    sink = Keeps()
    monitor = Monitor(model, recorder=recorder, sinks=[sink], trace_batch_nums=[0], detail=True)  # type: ignore[arg-type]
    x = torch.tensor([2.0 ** rank(), -(2.0 ** (rank() + 4)), 0.0])
    if rank() == 2:
        x[0] = NAN
    model(x)
    merged = monitor.merge(sink.frames)
    monitor.remove()
    return [
        [frame.batch_number, frame.module, line.label, list(line.ranks), list(line.bad_ranks), str(line)]
        + (
            []
            if isinstance(line.content, str)
            else [
                line.content.abs_min,
                line.content.abs_max,
                line.content.numel,
                line.content.nan_count,
                line.content.zero_count,
                line.content.abs_min_nonzero,
            ]
        )
        for frame in merged
        for line in frame.lines
        if line.label == "output"
    ]


class Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.again(self.again(self.again(x)))
        return y


def merge_unlike(recorder: str, lack: str) -> list[Any]:
    """Frames of which the second rank lacks some; of each the class, the first label, the ranks, and the largest of its
    last input, which is 2**k for call k from 0 on."""
    model = Thrice()
    nn.init.constant_(model.again.weight, 0.5)
    if rank() == 1 and lack == "gradients of weights":
        model.again.weight.requires_grad_(False)
    sink = Keeps()
    watched: nn.Module = DistributedDataParallel(model) if lack == "wrapper" else model
    with Monitor(watched, recorder=recorder, sinks=[sink], gradients=True) as monitor:  # type: ignore[arg-type]
        y = watched(torch.ones(2, 4, requires_grad=True))
        if "gradients" in lack and (rank() == 0 or lack == "gradients of weights"):
            y.sum().backward()
        frames = sink.frames
        if rank() == 1:
            frames = {"end": frames[:2], "beginning": frames[2:], "wrapper": frames[:-1]}.get(lack, frames)
        merged = monitor.merge(frames)
    return [
        [
            frame.class_name,
            frame.lines[0].label,
            list(frame.lines[0].ranks),
            [numbers(line.content)[1] for line in frame.lines if line.label == "input[0]"],
        ]
        for frame in merged
    ]
