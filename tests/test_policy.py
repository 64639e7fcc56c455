"""What is watched of a model, where bad numbers are meant, and what a detection does."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn

from overflowstat import DebugUnderflowOverflow, Monitor, NonFiniteError, Policy, TensorStats
from overflowstat.errors import MonitorWarning
from overflowstat.monitor import CheckName
from overflowstat.native_frame_log import make_frame_log
from overflowstat.recorder import RecorderName, make_recorder
from overflowstat.report import Report

INF, NAN = float("inf"), float("nan")


def shown(sink: Keeps) -> dict[str, list[str]]:
    """The lines of each module, in the frames since this was last called."""
    return {frame.module: [line.label for line in frame.lines] for frame in sink.take()}


class Layer(nn.Module):
    """Adds a mask, and what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = nn.ReLU()
        self.adds: float = 0.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.act(self.linear(x)) + self.adds
        return y if mask is None else torch.softmax(y + mask, -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        y: Tensor = self.head(x)
        return y


def adds(model: Model, layer: int, value: float) -> None:
    found = model.layers[layer]
    assert isinstance(found, Layer)
    found.adds = value


X = torch.ones(2, 3)
MASK = torch.tensor([0.0, 0.0, -INF])
EVERYTHING = {
    "layers.0.linear": ["weight", "bias", "input[0]", "output"],
    "layers.0.act": ["input[0]", "output"],
    "layers.0": ["input[0]", "output"],
    "layers.1.linear": ["weight", "bias", "input[0]", "output"],
    "layers.1.act": ["input[0]", "output"],
    "layers.1": ["input[0]", "output"],
    "head": ["weight", "bias", "input[0]", "output"],
    "": ["input[0]", "output"],
}


def only(*modules: str) -> dict[str, list[str]]:
    return {module: EVERYTHING[module] for module in modules}


def without(*modules: str) -> dict[str, list[str]]:
    return {module: labels for module, labels in EVERYTHING.items() if module not in modules}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(), EVERYTHING),
        (Policy(include=["layers.1"]), only("layers.1.linear", "layers.1.act", "layers.1")),
        (Policy(include=["layers.?.act"]), only("layers.0.act", "layers.1.act")),
        (Policy(include=["*.act", "head"]), only("layers.0.act", "layers.1.act", "head")),
        (Policy(include=[nn.Linear]), only("layers.0.linear", "layers.1.linear", "head")),
        (Policy(include=[]), {}),
        (Policy(include=["layer"]), {}),  # of no module the name
        (Policy(exclude=["layers"]), only("head", "")),
        (Policy(exclude=["layers.0"]), without("layers.0.linear", "layers.0.act", "layers.0")),
        (Policy(exclude=[nn.ReLU, Model]), without("layers.0.act", "layers.1.act", "")),
        (Policy(exclude=["*"]), {}),
        (Policy(include=["layers.1"], exclude=["*.linear"]), only("layers.1.act", "layers.1")),
        (
            Policy(include=["*:output"]),
            {module: ["output"] for module in EVERYTHING},
        ),
        (Policy(include=["head:weight", "head:input[?]"]), {"head": ["weight", "input[0]"]}),
        (
            Policy(include=[nn.Linear], exclude=[":bias", "layers:input[*]"]),
            {
                "layers.0.linear": ["weight", "output"],
                "layers.1.linear": ["weight", "output"],
                "head": ["weight", "input[0]", "output"],
            },
        ),
    ],
)
def test_what_is_shown(
    recorder_name: RecorderName, sink: Keeps, policy: Policy, expected: dict[str, list[str]]
) -> None:
    model = Model()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink], policy=policy)
    for number in range(2):
        model(X)
        assert shown(sink) == expected
        assert monitor.batch_number == number + 1


class UsesWeights(nn.Module):
    """Its children are not called, and one has the name of a line."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.output = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return x @ self.projection.weight @ self.output.weight


@pytest.mark.parametrize(
    ("policy", "left_out"),
    [
        (Policy(exclude=["inner.projection:weight"]), ["projection.weight"]),
        (Policy(exclude=["*projection:*"]), ["projection.weight", "projection.bias"]),
        (Policy(exclude=[":bias"]), ["projection.bias", "output.bias"]),
        (Policy(exclude=["inner:output.bias"]), ["output.bias"]),
        (Policy(exclude=["inner.nothing:weight", "projection:weight"]), []),
    ],
)
def test_a_line_of_a_child_that_is_not_called_is_selected_by_either_name(
    recorder_name: RecorderName, sink: Keeps, policy: Policy, left_out: list[str]
) -> None:
    model = nn.Sequential()
    model.add_module("inner", UsesWeights())
    Monitor(model, recorder=recorder_name, sinks=[sink], policy=policy)
    model(X)
    weights = ["projection.weight", "projection.bias", "output.weight", "output.bias"]
    frame = next(frame for frame in sink.frames if frame.module == "inner")
    assert [line.label for line in frame.lines if line.label in weights] == [w for w in weights if w not in left_out]


def test_what_is_meant_in_a_child_that_is_not_called_is_allowed(recorder_name: RecorderName, sink: Keeps) -> None:
    model = UsesWeights()
    with torch.no_grad():
        model.projection.bias[0] = -INF
    Monitor(model, recorder=recorder_name, sinks=[sink], policy=Policy(allow={"projection:bias": "-inf"}))
    model(X)
    (line,) = (line for line in sink.frames[-1].lines if line.label == "projection.bias")
    assert isinstance(line.content, TensorStats) and line.content.neginf_count == 1 and not line.is_bad


def test_a_bracket_in_a_line_is_a_bracket(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Model()
    Monitor(model, recorder=recorder_name, sinks=[sink], policy=Policy(include=["layers.0:input[mask]"]))
    model(X, torch.zeros(3))
    assert shown(sink) == {"layers.0": ["input[mask]"]}


def test_what_is_not_shown_is_not_read(recorder_name: RecorderName) -> None:
    model = Model()
    monitor = Monitor(model, recorder=recorder_name, sinks=[], policy=Policy(include=["head:weight"]))
    model(X)
    assert monitor.counters().tensors == 1 and monitor.counters().bytes_read == 2 * 3 * 4


def test_a_module_of_which_nothing_is_watched_has_no_hook(recorder_name: RecorderName) -> None:
    model = Model()
    Monitor(model, recorder=recorder_name, sinks=[], policy=Policy(include=["head"]))
    hooked = {name for name, module in model.named_modules() if module._forward_hooks}
    assert hooked == {"", "head"}


def test_a_module_that_is_replaced_inside_of_one_that_is_not_watched_is_watched(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    model = Model()
    Monitor(model, recorder=recorder_name, sinks=[sink], policy=Policy(include=["layers.0.act"]))
    model(X)
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    layer.act = nn.Tanh()  # type: ignore[assignment]
    sink.take()
    model(X)
    assert [(frame.module, frame.class_name) for frame in sink.frames] == [("layers.0.act", "Tanh")]


def test_what_is_not_watched_is_not_judged(recorder_name: RecorderName) -> None:
    model = Model()
    adds(model, 0, INF)
    Monitor(model, recorder=recorder_name, sinks=[], policy=Policy(exclude=["layers.0"]))
    with pytest.raises(NonFiniteError, match=r"first in layers\.1\.linear \(Linear\), input\[0\]"):
        model(X)


# numbers that are meant


@pytest.mark.parametrize(
    "selector", [":input[mask]", "layers:input[mask]", "layers.?:input[mask]", "layers.?:input*", "layers", "*"]
)
def test_a_mask_of_infinities_is_shown_and_not_judged(recorder_name: RecorderName, sink: Keeps, selector: str) -> None:
    model = Model()
    policy = Policy(allow={selector: "-inf", ":input[1]": "-inf"})  # the root's
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink], policy=policy)
    model(X, MASK)
    assert not monitor.detected_overflow
    mask = next(line for frame in sink.frames for line in frame.lines if line.label == "input[mask]")
    assert not isinstance(mask.content, str) and mask.content.neginf_count == 1 and not mask.is_bad


@pytest.mark.parametrize(
    ("value", "allowed", "good"),
    [
        (-INF, "-inf", True),
        (-INF, "inf", False),
        (-INF, "nan", False),
        (INF, "inf", True),
        (INF, "-inf", False),
        (NAN, "nan", True),
        (NAN, ["inf", "-inf"], False),
        (INF, ["inf", "-inf"], True),
        (NAN, ["nan", "inf", "-inf"], True),
        (INF, [], False),
    ],
)
def test_each_kind_is_allowed_on_its_own(recorder_name: RecorderName, value: float, allowed: Any, good: bool) -> None:
    model = nn.Sequential(nn.Identity())
    monitor = Monitor(model, recorder=recorder_name, sinks=[], policy=Policy(allow={"*": allowed}))
    x = torch.tensor([1.0, value])
    if good:
        model(x)
        assert not monitor.detected_overflow
    else:
        with pytest.raises(NonFiniteError):
            model(x)


def test_another_kind_beside_one_that_is_allowed_is_told(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.Identity())
    Monitor(model, recorder=recorder_name, sinks=[], policy=Policy(allow={nn.Identity: "-inf"}))
    with pytest.raises(NonFiniteError, match="1 of 3 is nan, 1 of 3 is -inf"):
        model(torch.tensor([-INF, NAN, 1.0]))


@pytest.mark.parametrize("allowed", ["inf", "-inf"])
def test_a_view_of_the_other_sign_is_judged_as_it_is_seen(recorder_name: RecorderName, allowed: Any) -> None:
    """Its memory holds +inf."""
    view = torch.tensor([1.0 + 0j, INF + 0j]).conj()._neg_view()
    view = torch.view_as_complex(torch.tensor([[0.0, -1.0], [0.0, INF]])).conj().imag
    assert view.is_neg() and view.tolist() == [1.0, -INF]
    model = nn.Sequential(nn.Identity())
    monitor = Monitor(model, recorder=recorder_name, sinks=[], policy=Policy(allow={"*": allowed}))
    if allowed == "-inf":
        model(view)
        assert not monitor.detected_overflow
    else:
        with pytest.raises(NonFiniteError, match="-inf"):
            model(view)


def test_what_several_selectors_allow_adds_up(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.Identity())
    policy = Policy(allow={"0:input[0]": "inf", nn.Identity: "nan", ":output": ["inf"], "": "inf"})
    monitor = Monitor(model, recorder=recorder_name, sinks=[], policy=policy)
    with pytest.raises(NonFiniteError, match="the model itself"):
        model(torch.tensor([NAN, INF]))
    assert monitor.batch_number == 1


def test_the_drop_in_takes_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    policy = Policy(allow={":input*": "-inf"})
    DebugUnderflowOverflow(model, nested=True, policy=policy)
    model(X, MASK)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"include": "encoder"}, TypeError, "include='encoder': must be a list"),
        ({"exclude": "encoder"}, TypeError, "exclude='encoder': must be a list"),
        ({"include": [3]}, TypeError, "include: 3 is neither a text nor a class of modules"),
        ({"exclude": [int]}, TypeError, "exclude: <class 'int'> is neither"),
        ({"exclude": ["encoder:"]}, ValueError, "'encoder:' names no line"),
        ({"allow": {"encoder": "infinity"}}, ValueError, "allow: 'infinity' is not one of 'nan', 'inf', '-inf'"),
        ({"allow": {"encoder": 3}}, TypeError, "allow: 3 is no kind of number"),
        ({"allow": ["encoder"]}, TypeError, "must map selectors to kinds of numbers, not list"),
        ({"allow": {3: "nan"}}, TypeError, "allow: 3 is neither"),
    ],
)
def test_a_policy_that_makes_no_sense(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Policy(**arguments)


# what a detection does


def rerun(model: Model, *values: float) -> None:
    """A batch with each of these added in the first layer."""
    for value in values:
        adds(model, 0, value)
        model(X)


@pytest.mark.parametrize("check", ["module", "batch", "step"])
def test_warn_goes_on_and_folds_what_is_met_again(recorder_name: RecorderName, sink: Keeps, check: CheckName) -> None:
    model = Model()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink], on_detect="warn", check=check)
    with pytest.warns(MonitorWarning, match=r"inf in batch 1, first in layers\.0 \(Layer\), output") as caught:
        rerun(model, 0, INF, 0, INF, INF)
    assert len(caught) == 1 and len(sink.reports) == 1
    assert monitor.batch_number == 5 and monitor.detected_overflow
    (found,) = monitor.detections
    assert (found.batches, found.report.batch_number, found.last_batch) == (3, 1, 4)
    with pytest.warns(MonitorWarning, match=r"layers\.0 \(Layer\), output: in 3 batches, from 1 to 4"):
        monitor.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.remove()


def test_each_place_is_told(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Model()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink], on_detect="warn")

    def run() -> None:
        rerun(model, INF)
        adds(model, 1, NAN)
        rerun(model, 0)
        model(X * INF)

    with pytest.warns(MonitorWarning) as caught:
        run()
    assert len(caught) == 3
    assert [(r.bad.module, r.bad.bad_lines[0].label) for r in sink.reports] == [
        ("layers.0", "output"),
        ("layers.1", "output"),
        ("layers.0.linear", "input[0]"),
    ]
    assert [detection.batches for detection in monitor.detections] == [1, 1, 1]


def test_a_callable_gets_the_report_of_each_place(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Model()
    got: list[Report] = []
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink], on_detect=got.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rerun(model, INF, INF, 0)
        monitor.remove()
    assert got == sink.reports and [report.bad.module for report in got] == ["layers.0"]
    assert monitor.detections[0].batches == 2


def test_what_a_callable_raises_reaches_the_caller_of_the_model(recorder_name: RecorderName) -> None:
    class Mine(Exception):
        pass

    def stop(report: Report) -> None:
        raise Mine(report.bad.module)

    model = Model()
    Monitor(model, recorder=recorder_name, sinks=[], on_detect=stop)
    with pytest.raises(Mine, match=r"layers\.0"):
        rerun(model, INF)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_no_more_reports_than_asked_for(recorder_name: RecorderName, sink: Keeps, most: int) -> None:
    model = Model()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink], max_reports=most)
    for _ in range(4):
        with pytest.raises(NonFiniteError):
            rerun(model, INF)
    assert len(sink.reports) == most and monitor.detections[0].batches == 4


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ({"on_detect": "stop"}, ValueError),
        ({"on_detect": None}, ValueError),
        ({"max_reports": -1}, ValueError),
        ({"max_reports": True}, TypeError),
        ({"policy": ["encoder"]}, TypeError),
    ],
)
def test_an_argument_that_makes_no_sense_leaves_the_model_alone(
    argument: dict[str, Any], error: type[Exception]
) -> None:
    model = Model()
    with pytest.raises(error, match=next(iter(argument))):
        Monitor(model, **argument)
    assert not model._forward_hooks


# what a detection says


def bad_rows() -> Tensor:
    x = torch.ones(2, 3, 4)
    x[0, 1] = NAN
    x[1, 2] = torch.tensor([INF, NAN, -INF, INF])
    x[1, 0, 3] = INF
    return x


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            bad_rows,
            "input[0]: 5 of 24 are nan, 3 of 24 are +inf, 1 of 24 is -inf, first at [0, 1, 0], 2 of 6 rows wholly",
        ),
        (lambda: bad_rows().bfloat16(), "first at [0, 1, 0], 2 of 6 rows wholly"),
        (lambda: bad_rows().to(torch.float8_e5m2), "first at [0, 1, 0], 2 of 6 rows wholly"),
        (lambda: bad_rows().transpose(0, 2), "first at [0, 1, 0], 0 of"),
        (lambda: torch.tensor([[NAN], [1.0]]), "1 of 2 is nan, first at [0, 0], 1 of 2 rows wholly"),
        (lambda: torch.tensor([NAN, 1.0]), "1 of 2 is nan, first at [0]"),
        (lambda: torch.tensor(NAN), "1 of 1 is nan"),
    ],
    ids=["float32", "bfloat16", "float8", "columns", "one column", "one dimension", "none"],
)
def test_a_detection_counts_kinds_and_rows(recorder_name: RecorderName, make: Callable[[], Tensor], said: str) -> None:
    model = nn.Sequential(nn.Identity())
    Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(NonFiniteError) as raised:
        model(make())
    text = str(raised.value)
    assert said.removesuffix(", 0 of") in text and ("rows" in text) == ("rows" in said)


def test_rows_of_a_large_tensor_are_counted_in_parts(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.Identity())
    Monitor(model, recorder=recorder_name, sinks=[])
    x = torch.ones(3, 1, 1000, 1000)
    x[1, 0, 7:19] = INF
    x[2, 0, 0, 0] = NAN
    with pytest.raises(NonFiniteError, match="12 of 3000 rows wholly"):
        model(x)


def test_rows_of_a_tensor_that_has_changed_since_are_not_counted(recorder_name: RecorderName) -> None:
    log = make_frame_log(make_recorder(recorder_name), keep=3)
    module = nn.Identity()
    log.add_module(0, "", module)
    for changes in (False, True):
        x = torch.full((2, 2), INF)
        assert log.call(0, module, (), {}, x)
        if changes:
            x.zero_()
        assert log.next(wait=True) is not None
        assert log.tensor(0) is (None if changes else x)
    del x
    assert log.tensor(0) is None
