"""Models on a CUDA device. Run by `pytest -m cuda` where there is one; skipped elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import Subject
from on_cuda import chain, is_busy, keep_busy, late, late_overflow, overflow, requires_cuda, same, subject_on_cuda
from parity import Parity, assert_same, forward_batches, run_ours, run_reference
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError, tensor_stats
from overflowstat.errors import MonitorWarning
from overflowstat.monitor import CHECKS, CheckName
from overflowstat.recorder import NativeRecorder, Recorder, RecorderName, make_recorder

pytestmark = [pytest.mark.cuda, requires_cuda]

TWO_MODELS = [models.llama, models.t5_gated_gelu]
each_model = pytest.mark.parametrize("make", TWO_MODELS, ids=lambda make: make.__name__)
each_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


# what a user sees is what transformers' own class shows


@each_model
@each_half
def test_traces_chosen_batches(parity: Parity, make: Callable[..., Subject], dtype: torch.dtype) -> None:
    ours = parity(lambda: subject_on_cuda(make(dtype)), forward_batches(3), trace_batch_nums=[0, 2])
    assert ours.stdout.count("*** Starting batch number=") == 2 and ours.error is None


@each_model
def test_keeps_the_frames_of_a_model_that_is_well(parity: Parity, make: Callable[..., Subject]) -> None:
    ours = parity(lambda: subject_on_cuda(make(torch.float16)), forward_batches(2))
    assert ours.stdout == "" and len(ours.frames) == 21


@each_model
@each_half
@pytest.mark.parametrize("check", CHECKS)
def test_detects_a_weight_that_goes_bad_in_a_later_batch(
    recorder_name: RecorderName, make: Callable[..., Subject], dtype: torch.dtype, check: CheckName
) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        for number in range(3):
            if number == 1:
                subject.model.get_submodule(subject.middle).get_parameter("weight").data.view(-1)[7] = float("inf")
            subject.model(**subject.batch(number))

    reference = run_reference(subject_on_cuda(make(dtype)), drive)
    ours = run_ours(recorder_name, subject_on_cuda(make(dtype)), drive, check=check)
    assert isinstance(ours.error, NonFiniteError) and "weight has infs" in ours.stdout
    if check == "module":  # in the others later modules have run before it was seen
        assert_same(ours, reference)
    else:
        assert (ours.stdout, str(ours.error), ours.frames) == (reference.stdout, str(reference.error), reference.frames)
        assert ours.error.batch_number == reference.batch_number == 1


@each_model
def test_detects_an_output_that_overflows_float16(recorder_name: RecorderName, make: Callable[..., Subject]) -> None:
    def subject() -> Subject:
        return subject_on_cuda(make(torch.float16).overflow_float16())

    reference = run_reference(subject(), forward_batches(1))
    ours = run_ours(recorder_name, subject(), forward_batches(1), check="module")
    assert_same(ours, reference)
    assert isinstance(ours.error, NonFiniteError) and "inf output\n" in ours.stdout


# when numbers that are late are judged

X = torch.ones(2)


def test_module_raises_in_the_very_hook(recorder_name: RecorderName) -> None:
    ran: list[str] = []
    model = chain(ran, a=late, b=overflow, c=same)
    Monitor(model, recorder=recorder_name, check="module", sinks=[])
    with pytest.raises(NonFiniteError):
        model(X.cuda())
    assert ran == ["a", "b"]


def test_batch_raises_out_of_the_call_of_the_model(recorder_name: RecorderName) -> None:
    ran: list[str] = []
    model = chain(ran, a=late, b=overflow, c=same)
    Monitor(model, recorder=recorder_name, check="batch", sinks=[])
    with pytest.raises(NonFiniteError) as raised:
        model(X.cuda())
    assert ran == ["a", "b", "c"] and [frame.module for frame in raised.value.frames] == ["0", "1"]


def test_step_lets_a_forward_go_that_the_device_has_not_done(recorder_name: RecorderName) -> None:
    x = X.cuda()
    Monitor(chain([], a=same), recorder=recorder_name, sinks=[]).model(x).sum().backward()  # loads all that is needed
    model = chain([], a=late, b=overflow, c=same)
    monitor = Monitor(model, recorder=recorder_name, check="step", sinks=[])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x).sum().backward()
    assert is_busy() and monitor.batch_number == 1
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError) as raised:
        optimizer.step()
    assert [frame.module for frame in raised.value.frames] == ["0", "1"]
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_what_has_arrived_is_judged_by_the_next_hook() -> None:
    def wait(x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return x

    ran: list[str] = []
    model = chain(ran, a=late_overflow, b=same, c=wait, d=same)
    Monitor(model, recorder="native", sinks=[])
    with pytest.raises(NonFiniteError) as raised:
        model(X.cuda())
    assert ran == ["a", "b", "c"] and [frame.module for frame in raised.value.frames] == ["0"]


@pytest.mark.parametrize(("check", "waits"), [("batch", 1), ("step", 0)])
def test_waits_of_a_batch_that_is_late(check: CheckName, waits: int) -> None:
    model = chain([], a=late, b=same, c=late, d=same)
    monitor = Monitor(model, recorder="native", check=check, sinks=[])
    x = X.cuda()
    for _ in range(3):
        before = monitor.counters().syncs
        model(x)
        assert monitor.counters().syncs - before == waits
        torch.cuda.synchronize()
    monitor.check()
    assert len(monitor.frames) == 15 and not monitor.detected_overflow


# what it costs, counted by the profiler


def calls_of_the_runtime(run: Callable[[], object]) -> Counter[str]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return Counter(event.name for event in profile.events() if event.name.startswith("cuda"))


FORBIDDEN = ("Synchronize", "Memcpy", "Memset", "Malloc", "HostAlloc", "HostRegister", "Free", "Event")


@pytest.mark.parametrize("check", ["batch", "step"])
@pytest.mark.parametrize("layers", [5, 50], ids=["weights in the arguments", "weights in a table"])
def test_a_watched_batch_launches_once_a_module_and_does_nothing_else(layers: int, check: CheckName) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(layers)]).half().cuda()
    x = torch.randn(8, 32, dtype=torch.float16, device="cuda")

    def batch() -> None:
        with torch.no_grad():
            model(x)

    batch()
    plain = calls_of_the_runtime(batch)
    if not any("LaunchKernel" in name for name in plain):
        pytest.skip("the profiler sees no call of the runtime here")
    with Monitor(model, recorder="native", check=check, sinks=[]) as monitor:
        for _ in range(2):  # memory, table
            batch()
            torch.cuda.synchronize()
        before = monitor.counters()
        watched = calls_of_the_runtime(batch)
        after = monitor.counters()
    more = Counter({name: watched[name] - plain[name] for name in {*watched, *plain}})
    assert {name: n for name, n in more.items() if n and any(part in name for part in FORBIDDEN)} == {}
    # All weights; the input and what the first module made of it; what each of the others made.
    assert sum(n for name, n in more.items() if "LaunchKernel" in name) == 1 + layers
    assert after.launches - before.launches == 1 + layers
    assert after.syncs - before.syncs <= (1 if check == "batch" else 0)


def test_reading_a_gigabyte_takes_next_to_no_memory() -> None:
    recorder = make_recorder("native")
    x = torch.ones(1 << 28, device="cuda")
    for tensor in (x, x.view(1 << 14, 1 << 14).t(), x[::2]):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert tensor_stats(tensor, recorder=recorder).abs_max == 1
        assert torch.cuda.max_memory_allocated() - before < 4 << 20


class Many(nn.Module):
    """Two dtypes in turn."""

    def __init__(self, count: int) -> None:
        super().__init__()
        layers = [nn.Linear(4, 4).to(torch.float16 if i % 2 else torch.float32) for i in range(count)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.get_parameter("weight").dtype))
        return x


def test_a_model_of_two_dtypes_and_thousands_of_weights(recorder_name: RecorderName) -> None:
    torch.manual_seed(0)
    model = Many(1100).cuda()
    weights = {name: p.abs().max().item() for name, p in model.cpu().named_parameters()}
    model.cuda()
    monitor = Monitor(model, recorder=recorder_name, max_frames_to_save=None, check="step", sinks=[])
    with torch.no_grad():
        model(torch.randn(2, 4, device="cuda"))
    monitor.check()
    shown = {
        f"{frame.module}.{line.label}": line.content.abs_max
        for frame in monitor.frames
        for line in frame.lines
        if line.label in ("weight", "bias") and not isinstance(line.content, str)
    }
    assert shown == weights and len(weights) == 2200
    if recorder_name == "native":
        assert monitor.counters().launches == 1 + 1100


# what goes wrong

ASSERTION = """
import os
import torch
from torch import nn
from overflowstat import Monitor

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Embedding(10, 4)

    def forward(self, x):
        torch.cuda._sleep(600_000_000)  # so that the hooks are done before the device begins
        x = self.linear(x)
        y = self.table(torch.full((1000,), 12345, device="cuda"))
        return (x.sum() + y.sum()).item()  # where the process learns of it

model = Model().cuda().half()
with torch.no_grad():
    model.linear.weight.fill_(60000)
monitor = Monitor(model, recorder="native", check=CHECK, sinks=[])
try:
    model(torch.ones(2, 4, device="cuda", dtype=torch.float16))
except RuntimeError as error:
    found = error.non_finite
    print("raised:", "device-side assert" in str(error))
    print("found:", found)
    print("frames:", [(f.module, [str(l.content.posinf_count) for l in f.lines]) for f in found.frames])
print("end", flush=True)
os._exit(0)  # in a process whose context is gone
"""


@pytest.mark.parametrize("check", ["batch", "step"])
def test_what_was_read_before_a_device_side_assert_survives_it(check: CheckName) -> None:
    script = ASSERTION.replace("CHECK", repr(check))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    printed = done.stdout.splitlines()
    assert printed and printed[-1] == "end", done.stderr[-3000:]
    assert printed[0] == "raised: True"
    assert printed[1].startswith(
        "found: overflowstat: inf in batch 0, first in linear (Linear), output: 8 of 8 are +inf"
    )
    assert printed[2] == "frames: [('linear', ['0', '0', '0', '8'])]"


def test_a_device_that_the_build_has_no_code_for_is_read_by_plain_torch() -> None:
    class Unfit:
        has_cuda = True

        def __init__(self) -> None:
            self.reads = 0

        def current_capture(self) -> int:
            return 0

        def record(self, tensors: list[Tensor]) -> object:
            self.reads += 1
            raise RuntimeError("CUDA error while launching the pass: cudaErrorNoKernelImageForDevice")

    extension = Unfit()
    recorder = NativeRecorder(extension)
    name = "{}, architecture {}.{}".format(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())
    with pytest.warns(MonitorWarning, match="cudaErrorNoKernelImageForDevice") as warned:
        assert tensor_stats(torch.full((3,), 2.0, device="cuda"), recorder=recorder).abs_max == 2
    assert len(warned) == 1 and name in str(warned[0].message)
    assert tensor_stats(torch.full((3,), 3.0, device="cuda"), recorder=recorder).abs_max == 3
    assert extension.reads == 1, "it is tried once"


def test_a_first_read_tries_the_device_once() -> None:
    recorder = NativeRecorder(make_recorder("native").extension)  # type: ignore[attr-defined]
    device = torch.device("cuda", torch.cuda.current_device())
    recorder.prepare([device])
    assert recorder._works_on == {device: True}


# several devices

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_devices
def test_tensors_of_two_devices_in_one_list(recorder: Recorder) -> None:
    for current in (0, 1):
        with torch.cuda.device(current):
            tensors = [torch.full((100 + n,), float(n), device=f"cuda:{n % 2}") for n in range(6)]
            rows = tensor_stats(tensors, recorder=recorder)
            assert torch.cuda.current_device() == current
        assert [row.abs_max for row in rows] == [0, 1, 2, 3, 4, 5]


@two_devices
def test_a_model_on_two_devices_is_watched_on_each(recorder_name: RecorderName) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 4).to("cuda:1")

        def forward(self, x: Tensor) -> Tensor:
            keep_busy()
            y: Tensor = self.second(self.first(x).to("cuda:1"))
            return y

    model = Split()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    model(torch.ones(2, 4, device="cuda:0"))
    assert monitor.batch_number == 1 and not monitor.detected_overflow
    with torch.no_grad():
        model.second.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"first in second \(Linear\), weight"):
        model(torch.ones(2, 4, device="cuda:0"))
