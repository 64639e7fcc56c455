"""What Monitor adds to the drop-in: frames as data, its own words, sinks."""

import pickle
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from overflowstat import BatchLimitReached, Monitor, NonFiniteError, TensorStats, detect_overflow, native, tensor_stats
from overflowstat.debug_utils import get_abs_min_max
from overflowstat.errors import MonitorWarning
from overflowstat.frames import Frame
from overflowstat.recorder import NativeRecorder, Reading, RecorderName, make_recorder
from overflowstat.report import Report


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Keeps:
    """A sink that keeps what it is told."""

    every_frame = True

    def __init__(self) -> None:
        self.frames: list[tuple[Frame, bool]] = []
        self.reports: list[Report] = []

    def frame(self, frame: Frame, traced: bool) -> None:
        self.frames.append((frame, traced))

    def report(self, report: Report) -> None:
        self.reports.append(report)


def overflowing() -> nn.Sequential:
    return nn.Sequential(Scale(100.0), Scale(100.0), nn.Identity()).half()


X = torch.tensor([[1.0, -2.0, 7.0], [0.0, 3.0, -8.0]], dtype=torch.float16)


def test_an_error_tells_batch_and_frames(recorder_name: RecorderName) -> None:
    model = overflowing()
    with Monitor(model, recorder=recorder_name, sinks=[]) as monitor:
        model(X / 10)
        with pytest.raises(NonFiniteError) as raised:
            model(X)
    error = raised.value
    assert isinstance(error, ValueError) and error.batch_number == 1
    assert [frame.module for frame in error.frames] == ["0", "1", "2", "", "0", "1"]
    bad = error.frames[-1]
    assert [line.label for line in bad.lines] == ["factor", "input[0]", "output"]
    # 700 * 100 and -800 * 100 are beyond 65504; 300 * 100 is the largest that is not.
    assert bad.lines[2].content == TensorStats(
        abs_min=0.0,
        abs_max=float("inf"),
        finite_abs_max=30000.0,
        nan_count=0,
        posinf_count=1,
        neginf_count=1,
        first_bad=(0, 2),
        numel=6,
        dtype=torch.float16,
        shape=(2, 3),
    )
    assert str(error) == (
        "overflowstat: inf in batch 1, first in 1 (Scale), output: 1 of 6 is +inf, 1 of 6 is -inf, first at [0, 2]; "
        "float16, shape [2, 3]\n"
        "  made here   its inputs and weights are finite; largest 800 in input[0], 1% of float16's 65504\n"
        f"  by          aten.mul, test_monitor.py:{Scale.forward.__code__.co_firstlineno + 1}: return x * self.factor\n"
        "  given       self up to 800 (float16), other up to 100 (float16)\n"
        "  kind        arithmetic-overflow: 700 * 100 = 7e+04 is beyond float16's 65504\n"
        "  try         torch.bfloat16 for the model, which holds up to 3.4e+38: in float32 it is finite"
    )
    assert monitor.batch_number == 2 and not monitor.frames


def test_an_error_can_be_pickled(recorder_name: RecorderName) -> None:
    model = overflowing()
    Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(NonFiniteError) as raised:
        model(X)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.batch_number, copy.frames) == (str(raised.value), 0, raised.value.frames)


def test_the_report_is_the_frames_and_what_is_bad(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Identity())
    Monitor(model, recorder=recorder_name)
    with pytest.raises(NonFiniteError):
        model(torch.tensor(float("nan")))
    assert capsys.readouterr().out == (
        "\nDetected inf/nan during batch_number=0\nLast 1 forward frames:\nabs min  abs max  metadata\n"
        "\n\n                  *** Starting batch number=0 ***\nabs min  abs max  metadata\n"
        "                  0 Identity\n     nan      nan input[0]\n     nan      nan output\n\n"
        "overflowstat: nan in batch 0, first in 0 (Identity), input[0]: 1 of 1 is nan; "
        "float32, shape []\n"
        "  given       it came from outside of the model, which got it as input[0]\n"
        "  kind        bad-input\n\n"
    )


def test_a_bad_value_of_the_root_is_said_to_be_the_models_own(recorder_name: RecorderName) -> None:
    model = Scale(float("inf"))
    Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(NonFiniteError, match=r"first in the model itself \(Scale\), factor: 1 of 1 is \+inf"):
        model(torch.ones(2))


def test_sinks_get_every_frame_and_each_detection_once(recorder_name: RecorderName) -> None:
    model, sink = overflowing(), Keeps()
    Monitor(model, recorder=recorder_name, sinks=[sink], trace_batch_nums={1})
    model(X / 10)
    model(X)  # traced, so not judged
    with pytest.raises(NonFiniteError) as raised:
        model(X)
    assert [(f.batch_number, f.module, traced) for f, traced in sink.frames] == [
        *((0, name, False) for name in ("0", "1", "2", "")),
        *((1, name, True) for name in ("0", "1", "2", "")),
        *((2, name, False) for name in ("0", "1")),
    ]
    (report,) = sink.reports
    assert report.frames == raised.value.frames and report.bad is report.frames[-1]
    assert [frame.starts_batch for frame in report.frames] == [True, False]


def test_no_frame_is_kept_of_max_frames_0_and_the_error_still_says_what_is_bad(recorder_name: RecorderName) -> None:
    model = overflowing()
    Monitor(model, recorder=recorder_name, sinks=[], max_frames_to_save=0)
    with pytest.raises(NonFiniteError, match=r"first in 1 \(Scale\)") as raised:
        model(X)
    assert raised.value.frames == ()


def test_a_run_ends_after_the_batch_named(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.Identity())
    Monitor(model, recorder=recorder_name, abort_after_batch_num=1)
    model(X)
    with pytest.raises(BatchLimitReached, match="stopped after 2 batches, as abort_after_batch_num=1 asks"):
        model(X)


def test_an_interrupted_forward_is_a_batch_that_has_ended(recorder_name: RecorderName) -> None:
    """A KeyboardInterrupt, as in a notebook, leaves a forward without any hook being called."""

    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model, sink = nn.Sequential(nn.Identity(), nn.Identity()), Keeps()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model[1] = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        model(X)
    model[1] = nn.Identity()
    model(X)
    assert [(f.batch_number, f.starts_batch) for f, _ in sink.frames] == [(0, True), (1, True), (1, False)]


def test_a_root_that_calls_itself_ends_a_batch_with_each_call(recorder_name: RecorderName) -> None:
    class Tree(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            y: Tensor = x if depth == 0 else self(x, depth - 1)
            return y

    model, sink = Tree(), Keeps()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X, 2)
    assert [f.batch_number for f, _ in sink.frames] == [0, 1, 2] and monitor.batch_number == 3
    with pytest.raises(TypeError):
        model(X, None)
    assert monitor.batch_number == 4


def test_a_monitor_attached_during_a_forward_watches_the_rest_of_it(recorder_name: RecorderName) -> None:
    class Attaches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            monitors.append(Monitor(model, recorder=recorder_name, sinks=[sink]))
            return x

    monitors: list[Monitor] = []
    model, sink = nn.Sequential(Attaches(), nn.Identity()), Keeps()
    model.register_forward_hook(lambda *_: None)  # without any, torch does not look for hooks after the forward
    model(X)
    assert [f.module for f, _ in sink.frames] == ["1", ""] and monitors[0].batch_number == 1


def test_a_forward_called_while_an_exception_is_handled_is_a_batch_like_any_other(recorder_name: RecorderName) -> None:
    model, sink = nn.Sequential(nn.Identity()), Keeps()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    try:
        raise KeyError("the user's own")
    except KeyError:
        model(X)
    assert [frame.module for frame, _ in sink.frames] == ["0", ""]


def test_weights_are_read_once_a_batch_and_shown_by_each_module_that_has_them(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    monitor = Monitor(model, recorder=recorder_name, sinks=[], reuse_unchanged=False)
    for batch in range(1, 3):
        model(torch.ones(2, 3))
        # 2 weights and 3 biases; input and output of 4 modules.
        assert monitor.counters().tensors == batch * (5 + 8)
    for frame in list(monitor.frames)[:3]:
        parameters = dict(model.get_submodule(frame.module).named_parameters())
        assert [line.label for line in frame.lines[:2]] == ["weight", "bias"]
        assert [line.content for line in frame.lines[:2]] == tensor_stats(list(parameters.values()))


# what must not make a hook raise, and what must not leave a monitor blind


def test_threads_may_share_a_model(recorder_name: RecorderName) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)])
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    errors: list[BaseException] = []

    def forward() -> None:
        try:
            for _ in range(20):
                model(torch.ones(2, 4))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=forward) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == [] and monitor.batch_number == 80 and monitor.total_calls == 80 * 13


class Broken:
    """An extension that cannot read, as one without code for this GPU cannot."""

    has_cuda = False

    def record(self, tensors: list[Tensor], detail: bool) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")


def test_an_extension_that_does_not_work_is_replaced_with_a_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats = tensor_stats([torch.tensor(float("nan"))] * 2, recorder=NativeRecorder(Broken()))
    assert [s.nan_count for s in stats] == [1, 1]
    (warning,) = caught
    assert re.search("does not work on cpu.*plain torch.*no kernel image", str(warning.message))


class Finds:
    """An extension that finds one thing on the CPU, and another, or nothing, elsewhere."""

    has_cuda = True

    def __init__(self, elsewhere: list[Any]) -> None:
        self.elsewhere = elsewhere

    def current_capture(self) -> int:
        return 0

    def record(self, tensors: list[Tensor], detail: bool) -> Any:
        rows = [("a row",), ("another",)] if tensors[0].device.type == "cpu" else self.elsewhere
        return SimpleNamespace(rows=lambda: rows)


@pytest.mark.parametrize(
    ("elsewhere", "said"),
    [
        ([("a row",), ("a wrong one",)], r"it finds .*a wrong one.* in place of .*another"),
        ([("a row",), "cudaErrorLaunchFailure"], "plain torch operations, slower: cudaErrorLaunchFailure"),
        ([], r"it finds \[\] in place of"),
    ],
    ids=["another row", "a failure", "no row"],
)
def test_a_device_on_which_a_first_read_finds_other_numbers_than_the_cpu_is_left_to_plain_torch(
    elsewhere: list[Any], said: str
) -> None:
    recorder = NativeRecorder(Finds(elsewhere))
    device = torch.device("meta")  # to which a tensor can be brought
    with pytest.warns(MonitorWarning, match=said):
        assert not recorder.works_on(device)
    assert NativeRecorder(Finds([("a row",), ("another",)])).works_on(device)


def test_a_first_read_under_a_mode_of_the_callers_is_no_part_of_it() -> None:
    class Sees(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen: list[object] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(function)
            return function(*args, **(kwargs or {}))

    native = make_recorder("native")
    assert isinstance(native, NativeRecorder)
    with Sees() as mode:
        assert NativeRecorder(native.extension).works_on(torch.device("cpu"))
    assert mode.seen == []
    with FakeTensorMode():
        assert NativeRecorder(native.extension).works_on(torch.device("cpu"))


def test_the_warning_names_the_architecture_that_is_there_and_those_that_were_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "architectures", lambda: ("8.0", "9.0+PTX"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    recorder = NativeRecorder(Broken())
    monkeypatch.setattr(recorder, "_first_problem", lambda device: "no kernel image")
    with pytest.warns(MonitorWarning, match="does not work on") as caught:
        works = [recorder.works_on(torch.device("cuda", 0)) for _ in range(2)]
    assert works == [False, False]
    (warning,) = caught
    assert re.search(
        r"built for 8\.0;9\.0\+PTX, does not work on cuda:0 \(Tesla V100, architecture 7\.0\)", str(warning.message)
    )


def test_a_recorder_that_fails_later_is_no_secret(recorder_name: RecorderName) -> None:
    class FailsLater:
        name = "fails"
        recorder = make_recorder(recorder_name)
        capture = recorder.capture

        def record(self, tensors: Sequence[Tensor]) -> Reading:
            if any(t.numel() == 3 for t in tensors):
                raise MemoryError("no room")
            return self.recorder.record(tensors)

    model, sink = nn.Sequential(nn.Identity()), Keeps()
    Monitor(model, recorder=FailsLater(), sinks=[sink])
    with pytest.warns(UserWarning, match="could not be read, and is not judged: MemoryError: no room"):
        model(torch.ones(3))
    assert sink.frames[0][0].lines[0].content == "not read: MemoryError"
    model(torch.ones(4))


def test_a_model_may_have_its_own_idea_of_parameters(recorder_name: RecorderName) -> None:
    class Adapter(nn.Linear):
        def parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
            return [self.bias]

    adapter = Adapter(3, 3)
    with torch.no_grad():
        adapter.weight[0, 0] = float("inf")
    model = nn.Sequential(adapter, nn.Linear(3, 3))
    Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(NonFiniteError, match=r"first in 0 \(Adapter\), weight"):
        model(torch.ones(2, 3))


def test_a_model_as_deep_as_python_allows(recorder_name: RecorderName) -> None:
    class Nest(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    model: nn.Module = nn.Linear(2, 2)
    for _ in range(170):
        model = Nest(model)
    model(torch.ones(1, 2))
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    model(torch.ones(1, 2))
    assert monitor.total_calls == 171


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.script(nn.Sequential(module))])
def test_a_model_that_takes_no_hooks_is_refused_with_the_reason(
    recorder_name: RecorderName, make: Callable[[nn.Module], nn.Module]
) -> None:
    with pytest.raises(TypeError, match=r"model is a RecursiveScriptModule that takes no hooks.*on ScriptModules"):
        Monitor(make(nn.Linear(2, 2)), recorder=recorder_name)


@pytest.mark.parametrize("argument", [{"style": "x"}, {"sinks": [1]}], ids=repr)
def test_a_style_or_sink_without_its_methods_is_refused(argument: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Identity())
    with pytest.raises(TypeError, match=next(iter(argument))):
        Monitor(model, **argument)
    assert not model._forward_hooks


@pytest.mark.parametrize("call", [lambda v: detect_overflow(v, "x"), lambda v: get_abs_min_max(v, "x")])
@pytest.mark.parametrize("value", [None, 1.0, [torch.ones(1)], "x"], ids=repr)
def test_helpers_name_what_is_no_tensor(call: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=f"var must be a tensor, not {type(value).__name__}"):
        call(value)
