"""What all tests share: the two recorders, each under its own name."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from keeps import Keeps
from ranks import GLOO_ENDS, RankServer
from running import Server
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import optimizer

from overflowstat import native
from overflowstat.recorder import Recorder, RecorderName, make_recorder

pytest_plugins = ["parity"]


IN_SUMMARY = "in the summary"
"""A property of a test whose text is a line at the end of the run, whatever process the test ran in."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties if report.when == "call" else ():
            if name == IN_SUMMARY:
                terminalreporter.line(text)


@pytest.fixture
def in_summary(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Has a line shown there."""
    return lambda text: record_property(IN_SUMMARY, text)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Before the test, nor after it."""
    from torch._dynamo.utils import counters  # whose import takes a second

    for run_test in (True, False):
        torch.compiler.reset()
        counters.clear()
        if run_test:
            yield


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
def sink() -> Keeps:
    return Keeps()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs `overflowstat run` in processes."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Runs scenarios in groups of processes."""
    server = RankServer(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()


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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models that are too small for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def light_collections() -> Iterator[None]:
    """Garbage is looked for among what is made from here on: all that was imported would take half a second each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_optimizer_hooks() -> Iterator[None]:
    """Of those that torch calls for every optimizer: monitors that other tests have left attached keep theirs."""
    kept: tuple[Any, ...] = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    before = [dict(hooks) for hooks in kept]
    for hooks in kept:
        hooks.clear()
    yield
    for hooks, there in zip(kept, before, strict=True):
        hooks.update(there)


@pytest.fixture
def two_processes(tmp_path: Path) -> Callable[[str], str]:
    """Runs a script in two processes of one group, on the CPU, and gives what both print: whole lines by its `say`."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")

    def run(script: str) -> str:
        file, tests = tmp_path / "script.py", Path(__file__).parent
        said = "import os\ndef say(*what):\n    os.write(1, (' '.join(map(str, what)) + '\\n').encode())\n"
        file.write_text(said + script + GLOO_ENDS)
        threads = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(file)],
            env={**os.environ, **threads, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            printed, errors = process.communicate(timeout=150)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        assert process.returncode == 0, errors
        return printed

    return run
