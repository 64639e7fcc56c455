"""What all tests share: the two recorders, each under its own name."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overflowstat import native
from overflowstat.recorder import Recorder, RecorderName, make_recorder

pytest_plugins = ["parity"]


@pytest.fixture(scope="session", autouse=True)
def extension_is_there() -> None:
    """Without it "auto" would fall back, and tests that leave the choice to it would pass without a word."""
    assert native.load() is not None, native.reason()


@pytest.fixture(params=["native", "torch"])
def recorder_name(request: pytest.FixtureRequest) -> RecorderName:
    """Every test that takes this runs on both."""
    name: RecorderName = request.param
    return name


@pytest.fixture
def recorder(recorder_name: RecorderName) -> Recorder:
    return make_recorder(recorder_name)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of one process, this one."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def light_collections() -> Iterator[None]:
    """Garbage is looked for among what is made from here on: all that was imported would take half a second each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
