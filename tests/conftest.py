"""What all tests share: the two recorders, each under its own name."""

import pytest

from overflowstat import native
from overflowstat.recorder import Recorder, RecorderName, make_recorder

pytest_plugins = ["parity"]


@pytest.fixture(params=["native", "torch"])
def recorder_name(request: pytest.FixtureRequest) -> RecorderName:
    """Every test that takes this runs on both. A missing extension fails "native", so that no fallback can hide it."""
    name: RecorderName = request.param
    if name == "native":
        assert native.load() is not None, native.reason()
    return name


@pytest.fixture
def recorder(recorder_name: RecorderName) -> Recorder:
    return make_recorder(recorder_name)
