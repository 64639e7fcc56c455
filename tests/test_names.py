"""Modules have the names of the model that the user wrote, whatever wraps it or parts of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from overflowstat import DebugUnderflowOverflow, Monitor, check_weights, run_in_float32
from overflowstat.names import module_around, named_modules, submodule
from overflowstat.recorder import RecorderName


class Net(nn.Module):
    """With children that are called as wrappers call theirs, which is the author's right."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())])

    def forward(self, x: Tensor) -> Tensor:
        x = self.module(x)
        for layer in self.layers:
            x = layer(x)
        return x


class DeepSpeedEngine(nn.Module):
    """Holds the model as DeepSpeed's own does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


def with_a_checkpointed_layer(model: Net) -> nn.Module:
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    return model


def with_a_compiled_layer(model: Net) -> nn.Module:
    model.layers[0] = cast("nn.Module", torch.compile(model.layers[0], backend="eager"))
    return model


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DeepSpeed": DeepSpeedEngine,
    "checkpoint_wrapper": with_a_checkpointed_layer,
    "a compiled layer": with_a_compiled_layer,
    "torch.compile": lambda model: cast("nn.Module", torch.compile(model, backend="eager")),
    "two of them": lambda model: DistributedDataParallel(DeepSpeedEngine(with_a_checkpointed_layer(model))),
}
NAMES = ["", "module", "layers", "layers.0", "layers.0.0", "layers.0.1"]
WEIGHTS = ["module.weight", "module.bias", "layers.0.0.weight", "layers.0.0.bias"]
wrappers = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


@pytest.mark.usefixtures("mesh")
@wrappers
def test_a_wrapper_has_the_name_of_what_it_wraps(wrap: Callable[[Net], nn.Module]) -> None:
    net = Net()
    inside = dict(net.named_modules())
    names = list(named_modules(wrap(net)))
    assert list(dict.fromkeys(name for name, _ in names)) == NAMES
    for name in NAMES:
        its = [module for each, module in names if each == name]
        assert its[-1] is inside[name]  # and what is around it comes before
        assert submodule(its[0] if name == "" else names[0][1], name) is inside[name]


@pytest.mark.usefixtures("mesh")
@pytest.mark.filterwarnings("ignore::overflowstat.errors.MonitorWarning")  # of what other tests have compiled
@wrappers
def test_frames_weights_and_the_drop_in_have_these_names(
    wrap: Callable[[Net], nn.Module], recorder_name: RecorderName, sink: Keeps
) -> None:
    model = wrap(Net())
    assert list(check_weights(model).stats) == WEIGHTS
    debug = DebugUnderflowOverflow(model, recorder=recorder_name)
    assert set(debug.module_names.values()) == set(NAMES)
    debug.remove()
    with Monitor(model, recorder=recorder_name, sinks=[sink]):
        model(torch.ones(2, 4))
    seen = list(dict.fromkeys(sink.modules()))
    assert seen == ["module", "layers.0.0", "layers.0.1", "layers.0", ""]


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("name", ["layers.0", "module.layers.0"])
def test_a_module_is_run_in_float32_by_its_name_with_the_wrapper_or_without(name: str) -> None:
    model = DistributedDataParallel(Net().to(torch.bfloat16))
    dtypes = []
    model.module.layers[0][1].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    with run_in_float32(model, name):
        result = model(torch.ones(2, 4, dtype=torch.bfloat16))
    assert (dtypes, result.dtype) == ([torch.float32], torch.bfloat16)


def test_what_calls_a_module_is_found_through_lists_and_wrappers() -> None:
    model = DeepSpeedEngine(with_a_checkpointed_layer(Net()))
    around = {name: module_around(model, name) for name in NAMES}
    assert around == {
        "": None,
        "module": "",
        "layers": "",
        "layers.0": "",
        "layers.0.0": "layers.0",
        "layers.0.1": "layers.0",
    }
    with pytest.raises(KeyError):
        submodule(model, "layers.1")
