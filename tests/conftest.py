"""What all tests share: the two recorders, each under its own name."""

import pytest

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
