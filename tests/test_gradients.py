"""What a monitor sees of the backward, and what it says of it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import models
import pytest
import torch
from brute_force import all_bits
from gradient_models import Calls, X, around, line, linear, sqrt_at_0, verdict_of
from keeps import Keeps
from models import Subject
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overflowstat import Monitor, NonFiniteError, Policy, check_gradients
from overflowstat.errors import MonitorWarning
from overflowstat.monitor import CheckName
from overflowstat.recorder import Reading, Recorder, RecorderName, Replays, make_recorder
from overflowstat.report import Report
from overflowstat.row import Row

INF, NAN = float("inf"), float("nan")


def backward(model: nn.Module, x: Tensor, recorder_name: RecorderName, **options: Any) -> NonFiniteError:
    with (
        Monitor(model, gradients=True, recorder=recorder_name, sinks=[], **options),
        pytest.raises(NonFiniteError) as e,
    ):
        model(x).sum().backward()
    return e.value


def lines(error: NonFiniteError) -> list[str]:
    return [f"{frame.module}:{line.label}" for frame in error.frames for line in frame.lines]


def norm_at_0(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True).sqrt() + 1.0)


def masked_nan_branch(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.log(), torch.zeros_like(x))


def logarithm_in_float16(x: Tensor) -> Tensor:
    return torch.log(x.half() + 1e-7).float()  # 1 / 1.2e-7 is beyond float16


@pytest.mark.parametrize(
    ("function", "operation", "kind"),
    [
        (sqrt_at_0, "SqrtBackward0", "inf"),
        (norm_at_0, "SqrtBackward0", "inf"),
        (masked_nan_branch, "LogBackward0", "nan"),
        (logarithm_in_float16, "LogBackward0", "inf"),
    ],
)
def test_the_module_that_makes_it_is_named(
    recorder_name: RecorderName, function: Callable[..., Any], operation: str, kind: str
) -> None:
    """Before is what gets it: the gradient that reaches after's output and middle's is finite."""
    error = backward(around(function), X, recorder_name)
    verdict = verdict_of(error)
    assert (verdict.module, verdict.class_name, verdict.produced) == ("middle", "Calls", True)
    assert (verdict.label, verdict.source, error.batch_number) == ("grad output", None, 0)
    assert lines(error) == ["after:grad output", "middle:grad output", "before:grad output"]
    assert [bool(frame.bad_lines) for frame in error.frames] == [False, False, True]
    made = "made in     the backward of middle (Calls); the gradients that reached it are finite, up to 1"
    assert verdict.text.splitlines()[0] == f"  {made}"
    assert verdict.text in str(error)
    # The line is known only where torch keeps it.
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        in_anomaly = verdict_of(backward(around(function), X, recorder_name))
    assert (in_anomaly.module, in_anomaly.operation) == ("middle", operation)
    assert in_anomaly.source == line(function)
    assert f"  by          {operation}, of {line(function)}; in it aten.div\n" in in_anomaly.text
    assert pickle.loads(pickle.dumps(error)).verdict == error.verdict


def test_a_single_operation_is_known_without_anomaly_mode(recorder_name: RecorderName) -> None:
    verdict = verdict_of(backward(around(torch.sqrt), X, recorder_name))
    assert (verdict.module, verdict.operation, verdict.source) == ("middle", "SqrtBackward0", None)


class Between(nn.Module):
    """Does it in its own forward, between two children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.second = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z: Tensor = self.second(sqrt_at_0(y)) + y
        return z


def test_between_children_it_is_the_parent(recorder_name: RecorderName) -> None:
    model = nn.ModuleDict({"outer": nn.Sequential(Between())})["outer"]
    error = backward(model, X, recorder_name)
    verdict = verdict_of(error)
    assert (verdict.module, verdict.class_name, verdict.produced) == ("0", "Between", True)
    assert "in its own forward between its children" in verdict.text
    assert lines(error) == ["0:grad output", "0.second:grad output", "0.second:grad input[0]", "0.first:grad output"]


def test_between_the_modules_of_a_list_it_is_the_one_that_calls_them(recorder_name: RecorderName) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([linear(), linear()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = sqrt_at_0(layer(x)) + 1e-3
            return x

    model = Model()
    monitor = Monitor(model, gradients=True, recorder=recorder_name, sinks=[])
    model(torch.ones(1, 2)).sum().backward()
    model.layers.append(linear())  # later, and the order changes
    model.layers.append(model.layers.pop(0))
    with pytest.raises(NonFiniteError) as error:
        model(X).sum().backward()
    verdict = verdict_of(error.value)
    assert (verdict.module, verdict.class_name, verdict.produced) == ("", "Model", True)
    monitor.remove()


def test_the_gradient_that_leaves_a_module_for_its_own_input(recorder_name: RecorderName) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = linear()
            self.root = Calls(torch.sqrt)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.root(self.first(x) * 2.0)
            return y

    verdict = verdict_of(backward(Model(), X, recorder_name))
    assert (verdict.module, verdict.label, verdict.operation) == ("root", "grad input[0]", "SqrtBackward0")


def test_one_that_comes_from_two_modules_is_pinned_on_neither(recorder_name: RecorderName) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.root, self.log = linear(), Calls(torch.sqrt), Calls(torch.log1p)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            z: Tensor = self.root(y) + self.log(y)
            return z

    verdict = verdict_of(backward(Model(), X, recorder_name))
    assert (verdict.module, verdict.produced, verdict.kind) == ("first", False, "unknown")
    assert verdict.text.startswith("  made in     the backward of one of log, root\n")


def test_what_was_used_before_a_module_took_it_may_have_made_it(recorder_name: RecorderName) -> None:
    """The product is met first by `log`; its root was taken before, in the forward around it, and went to `other`."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other, self.log = linear(), linear(), Calls(torch.log1p)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x) * 2.0
            z: Tensor = self.other(y.sqrt()) + self.log(y)
            return z

    verdict = verdict_of(backward(Model(), X, recorder_name))
    assert verdict.label == "grad input[0]" and not verdict.produced
    assert "one of log, the model itself" in verdict.text


def test_a_loss_that_makes_it(recorder_name: RecorderName) -> None:
    model = nn.Sequential(linear())
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[]), pytest.raises(NonFiniteError) as error:
        model(X).sqrt().sum().backward()
    verdict = verdict_of(error.value)
    assert (verdict.module, verdict.produced, verdict.kind) == ("0", False, "bad-input")
    assert verdict.text.startswith(
        "  given       it came so to the model, from the loss or what else has used what it gave"
    )


def test_bad_gradients_of_weights_alone(recorder_name: RecorderName) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.0, 1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.sqrt()

    model = nn.Sequential(linear(), Scales(), linear())
    error = backward(model, torch.ones(1, 2), recorder_name)
    verdict = verdict_of(error)
    assert (verdict.module, verdict.class_name, verdict.label) == ("1", "Scales", "grad scale")
    assert verdict.produced and verdict.text.startswith("  made in     the backward of 1 (Scales)")
    assert lines(error) == ["2:grad output", "1:grad output", "0:grad output", "2:grad weight", "1:grad scale"]


def test_tied_weights_are_read_once_and_pinned_on_no_module(recorder_name: RecorderName) -> None:
    model = nn.Sequential(linear(), Calls(torch.tanh), linear())
    model[2].weight = model[0].weight
    sink = Keeps()
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[sink]):
        model(X).sum().backward()
        assert [f.module for f in sink.take() if f.lines[0].label == "grad weight"] == ["0"]
        x = X.clone()
        x[0, 0] = 3e38
        loss = (model(x) * 3e38).sum()
        with pytest.raises(NonFiniteError) as error:
            loss.backward()
    verdict = verdict_of(error.value)
    assert verdict.label == "grad weight" and not verdict.produced and "one of 0, 2" in verdict.text


def test_clip_by_norm_with_an_infinity(recorder_name: RecorderName) -> None:
    """It makes nan of it, in all others 0; the module with the infinity is found before."""
    model = nn.Sequential(linear(), linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.full((3, 2), 3e38)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[]), pytest.raises(NonFiniteError) as error:
        step()
    assert verdict_of(error.value).module == "1" and verdict_of(error.value).label == "grad weight"
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert check_gradients(model).offenders["1.weight"].nan_count == 4


def test_gradients_that_no_hook_met_are_read_before_the_step(recorder_name: RecorderName) -> None:
    model = nn.Sequential(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, gradients=True, recorder=recorder_name, sinks=[])
    weight = model.get_parameter("0.weight")
    weight.grad = torch.tensor([[1.0, INF], [0.0, 0.0]])
    before = weight.detach().clone()
    with pytest.raises(NonFiniteError, match=r"grad weight: 1 of 4 is \+inf"):
        optimizer.step()
    assert torch.equal(weight, before)
    monitor.remove()


EVERY_MODEL: list[Callable[[], Subject]] = [*models.SMALL_MODELS]


@pytest.mark.parametrize("make", EVERY_MODEL, ids=lambda make: make.__name__)
def test_gradients_are_those_of_the_unwatched_model_bit_for_bit(
    recorder_name: RecorderName, make: Callable[[], Subject]
) -> None:
    def gradients(watched: bool) -> list[Any]:
        subject = make()
        model = subject.model.train()
        if watched:
            Monitor(model, gradients=True, recorder=recorder_name, sinks=[], on_detect=lambda report: None)
        torch.manual_seed(1)
        for number in range(2):
            output = model(**subject.batch(number))
            loss = next(x for x in output.values() if isinstance(x, Tensor) and x.requires_grad)
            torch.autograd.backward([loss.float().square().mean()])
        return all_bits(weight.grad for weight in model.parameters())

    assert gradients(True) == gradients(False)


def test_what_is_written_to_after_a_module_gave_it(recorder_name: RecorderName) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice, self.last = linear(), Calls(lambda x: x.mul_(2)), linear()

        def forward(self, x: Tensor) -> Tensor:
            y = self.twice(self.first(x))
            y.mul_(3)
            y[:, 0] += 1
            a, b = y.split(1, -1)
            z: Tensor = self.last(torch.cat([a * 2, b], -1))
            return z.add_(1)

    model, sink = Writes(), Keeps()
    plain = copy.deepcopy(model)
    plain(torch.ones(1, 2)).sum().backward()
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[sink]):
        model(torch.ones(1, 2)).sum().backward()
    assert all_bits(w.grad for w in model.parameters()) == all_bits(w.grad for w in plain.parameters())
    found = {
        f"{frame.module}:{line.label}": line.content.abs_max  # type: ignore[union-attr]
        for frame in sink.take()
        for line in frame.lines
        if frame.is_backward
    }
    # Of the versions that were given: before the product with 3, and with 2 in one of two columns.
    assert found["twice:grad output"] == 6.0 and found["first:grad output"] == 12.0 and found["last:grad output"] == 1.0


def test_a_module_that_works_in_place_is_named(recorder_name: RecorderName) -> None:
    model = around(lambda x: x.sqrt_())
    verdict = verdict_of(backward(model, X, recorder_name))
    assert (verdict.module, verdict.produced, verdict.operation) == ("middle", True, "SqrtBackward0")


def test_a_tensor_that_several_modules_give_is_shown_by_the_innermost(recorder_name: RecorderName) -> None:
    model, sink = nn.Sequential(nn.Sequential(linear()), nn.Identity()), Keeps()
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[sink]):
        model(X).sum().backward()
    assert [frame.module for frame in sink.take() if frame.is_backward and "output" in frame.lines[0].label] == ["0.0"]


def test_outputs_in_structures_and_several_of_one_node(recorder_name: RecorderName) -> None:
    model, sink = nn.Sequential(linear(4), Calls(lambda x: {"parts": x.chunk(2, -1), "n": 3})), Keeps()
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[sink]):
        a, b = model(torch.ones(1, 4))["parts"]
        (a + 2 * b).sum().backward()
    frames = [frame for frame in sink.take() if frame.is_backward]
    assert [(frame.module, [line.label for line in frame.lines]) for frame in frames] == [
        ("1", ["grad output[parts][0]", "grad output[parts][1]"]),
        ("0", ["grad output"]),
        ("0", ["grad weight"]),
    ]


def test_no_tensor_is_kept_nor_the_monitor(recorder_name: RecorderName) -> None:
    model = around(torch.tanh)
    monitor = Monitor(model, gradients=True, recorder=recorder_name, sinks=[])
    kept: list[weakref.ref[Tensor]] = []
    handles = [module.register_forward_hook(lambda m, a, output: kept.append(weakref.ref(output))) for module in model]
    gc.disable()
    try:
        loss = model(X).sum()
        assert len(kept) == 3 and sum(reference() is not None for reference in kept) <= 1  # what tanh's node keeps
        loss.backward()
        del loss
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()
    for handle in handles:
        handle.remove()
    left = model(X).sum()
    monitor.remove()
    reference = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert reference() is None
    left.backward()  # its hooks find nobody


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(recorder_name: RecorderName, reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = around(sqrt_at_0), linear()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(checkpoint(self.inner, x, use_reentrant=reentrant))
            return y

    model, sink = Model(), Keeps()
    ones = torch.ones(1, 2).requires_grad_()
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[sink]):
        for number in range(2):
            model(ones).sum().backward()
            frames = [frame for frame in sink.take() if frame.is_backward]
            assert {frame.batch_number for frame in frames} == {number}
            assert [f.module for f in frames if f.lines[0].label == "grad output"] == [
                *("last", "inner.after", "inner.middle", "inner.before")
            ]
            assert sorted(f.module for f in frames if f.lines[0].label == "grad weight") == [
                *("inner.after", "inner.before", "last")
            ]
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[]), pytest.raises(NonFiniteError) as error:
        model(X.clone().requires_grad_()).sum().backward()
    assert verdict_of(error.value).module == "inner.middle"


def test_without_gradients_and_twice_through_a_graph(recorder_name: RecorderName) -> None:
    model, sink = nn.Sequential(linear()), Keeps()
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[sink]) as monitor:
        with torch.no_grad():
            model(X)
        assert not any(frame.is_backward for frame in sink.take())
        loss = model(X).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
            labels = [line.label for frame in sink.take() if frame.is_backward for line in frame.lines]
            assert labels == ["grad output", "grad weight"]
        (gradient,) = torch.autograd.grad(loss, model.get_parameter("0.weight"), create_graph=True)
        assert gradient is not None
        labels = [line.label for frame in sink.take() if frame.is_backward for line in frame.lines]
        assert labels == ["grad output"]  # that of the weight has not changed
        assert monitor.counters().tensors == 3 + 3 + 5  # input, weight and output of both; and these


def test_all_weights_are_one_launch(recorder: Recorder) -> None:
    read: list[int] = []

    class Counts(Recorder):
        name = "counts"

        def record(self, tensors: Sequence[Tensor]) -> Reading:
            read.append(len(tensors))
            return recorder.record(tensors)

        def capture(self) -> int | None:
            return None

    model = nn.Sequential(linear(), linear(), linear())
    with Monitor(model, gradients=True, recorder=Counts(), sinks=[]):
        output = model(X)
        read.clear()
        output.sum().backward()
    assert read == [1, 1, 1, 3]


def test_traced_batches_are_printed_and_not_judged(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = around(sqrt_at_0)
    with Monitor(model, gradients=True, recorder=recorder_name, trace_batch_nums=[0]) as monitor:
        model(X).sum().backward()
        assert monitor.detected_overflow
        printed = capsys.readouterr().out.splitlines()
        first = printed.index(f"{'':17} after Linear", printed.index(f"{'':17}  Sequential"))
        assert printed[first + 1] == "1.00e+00 1.00e+00 grad output"
        assert any(line.endswith(" nan grad weight") for line in printed)
        with pytest.raises(NonFiniteError):
            model(X).sum().backward()
    assert "Last 3 backward frames:" in capsys.readouterr().out


def test_warnings_and_reports_once_for_each_place(recorder_name: RecorderName) -> None:
    model, reports = around(sqrt_at_0), list[Report]()
    monitor = Monitor(model, gradients=True, recorder=recorder_name, sinks=[], on_detect=reports.append)
    for _ in range(3):
        model(X).sum().backward()
        model.zero_grad()
    assert [report.verdict.module for report in reports if report.verdict] == ["middle"]
    assert [detection.batches for detection in monitor.detections] == [3]
    monitor.remove()
    Monitor(model, gradients=True, recorder=recorder_name, sinks=[], on_detect="warn")
    loss = model(X).sum()
    with pytest.warns(MonitorWarning, match="made in     the backward of middle"):
        loss.backward()


def test_policy(recorder_name: RecorderName) -> None:
    model, sink = around(sqrt_at_0), Keeps()
    policy = Policy(exclude=["after", ":grad weight"], allow={"before:grad output": ["inf", "nan"]})
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[sink], policy=policy):
        model(X).sum().backward()
    labels = [f"{f.module}:{line.label}" for f in sink.take() if f.is_backward for line in f.lines]
    assert labels == [":grad output", "middle:grad output", "before:grad output"]


def test_every_n_disable_and_remove(recorder_name: RecorderName) -> None:
    model, sink = nn.Sequential(linear()), Keeps()
    monitor = Monitor(model, gradients=True, recorder=recorder_name, sinks=[sink], every_n=2)

    def watched() -> bool:
        model(X).sum().backward()
        model.zero_grad()
        return any(frame.is_backward for frame in sink.take())

    assert [watched() for _ in range(4)] == [True, False, True, False]
    loss = model(X).sum()
    monitor.disable()
    loss.backward()
    assert not any(frame.is_backward for frame in sink.take()) and not watched()
    monitor.enable()
    assert [watched(), watched()] == [False, True]
    monitor.remove()
    assert not watched() and all(len(module._forward_hooks) == 0 for module in model.modules())


class LateReading:
    def __init__(self, reading: Reading, late: Late) -> None:
        self.reading, self.late, self.is_there = reading, late, False

    def ready(self) -> bool:
        return self.is_there

    def rows(self) -> Sequence[Row | str]:
        self.late.waits += not self.is_there
        self.is_there = True
        return self.reading.rows()

    def replays(self) -> Replays | None:
        return None


class Late(Recorder):
    """Its numbers come when they are waited for."""

    name = "late"

    def __init__(self) -> None:
        self.recorder = make_recorder("torch")
        self.waits = 0

    def record(self, tensors: Sequence[Tensor]) -> LateReading:
        return LateReading(self.recorder.record(tensors), self)

    def capture(self) -> int | None:
        return None


@pytest.mark.parametrize(("check", "where"), [("module", "hook"), ("batch", "end"), ("step", "step")])
def test_numbers_that_come_late_are_judged_when_check_says(check: CheckName, where: str) -> None:
    model, late = around(sqrt_at_0), Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Monitor(model, gradients=True, recorder=late, sinks=[], check=check)
    output = model(X)
    late.waits = 0
    ran: list[str] = []
    output.register_hook(lambda gradient: ran.append("after") if late.waits == 0 else None)
    model.get_parameter("before.weight").register_hook(lambda gradient: ran.append("before"))  # type: ignore[no-untyped-call]

    def step() -> None:
        try:
            output.sum().backward()
            ran.append("backward")
        finally:
            ran.append("over")
        optimizer.step()

    with pytest.raises(NonFiniteError) as error:
        step()
    expected = {"hook": ["after", "over"], "end": ["after", "before", "over"]}
    assert ran == expected.get(where, ["after", "before", "backward", "over"])
    assert verdict_of(error.value).module == "middle"
    assert lines(error.value) == ["after:grad output", "middle:grad output", "before:grad output"]


def test_late_numbers_have_their_cause_in_anomaly_mode() -> None:
    """Each node is waited for there, since what it has saved is freed when it has run."""
    model, late = around(sqrt_at_0), Late()
    Monitor(model, gradients=True, recorder=late, sinks=[])
    with torch.autograd.set_detect_anomaly(True, check_nan=False), pytest.raises(NonFiniteError) as error:
        model(X).sum().backward()
    verdict = verdict_of(error.value)
    assert (verdict.module, verdict.operation, verdict.kind) == ("middle", "SqrtBackward0", "division-by-zero")


def test_after_the_backward_nobody_looks_for_other_uses() -> None:
    model = around(sqrt_at_0)
    monitor = Monitor(model, gradients=True, recorder=Late(), sinks=[], check="step")
    model(X).sum().backward()
    with pytest.raises(NonFiniteError) as error:
        monitor.check()
    text = verdict_of(error.value).text
    assert "are finite, up to 1; whether anything outside has used what it gave was not looked for" in text


@pytest.fixture
def scaler() -> torch.amp.GradScaler:
    gc.collect()  # those of other tests
    return torch.amp.GradScaler("cpu", init_scale=2.0**16)


def scaled_model() -> nn.Sequential:
    """Its gradients are beyond float16 where they are multiplied by 2 ** 16."""
    return nn.Sequential(linear(), Calls(lambda x: x.half()), Calls(lambda x: x.float()))


def test_a_step_that_a_scaler_skips_is_told_and_not_raised(
    recorder_name: RecorderName, scaler: torch.amp.GradScaler, capsys: pytest.CaptureFixture[str]
) -> None:
    model = scaled_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, gradients=True, recorder=recorder_name) as monitor:
        for _ in range(3):
            before = model.get_parameter("0.weight").detach().clone()
            scale = scaler.get_scale() if scaler._scale is not None else 2.0**16
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(model.get_parameter("0.weight"), before) == (scale == 2.0**16)
    printed = capsys.readouterr().out
    assert printed.count("GradScaler will skip this step, and lower its scale (now 65536)") == 1
    assert [detection.batches for detection in monitor.detections] == [1]
    verdict = monitor.detections[0].report.verdict
    assert verdict is not None and verdict.advice is not None and verdict.advice.startswith("GradScaler will skip")


Loss = Callable[[torch.amp.GradScaler, Tensor], Tensor]


def halves(scaler: torch.amp.GradScaler, loss: Tensor) -> Tensor:
    first, second = scaler.scale([loss / 2, loss / 2])
    return first + second


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    "loss_of",
    [lambda scaler, loss: scaler.scale(loss), lambda scaler, loss: scaler.scale(loss * 2) / 2, halves],
    ids=["scaled", "divided", "summed"],
)
def test_a_scaler_over_many_steps_with_growth(recorder_name: RecorderName, loss_of: Loss, clips: bool) -> None:
    """Beyond float16 are a scale of 65536 and more; it is doubled after each two steps that are taken."""
    model = scaled_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gc.collect()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2)
    scales, taken = [2.0**17], []
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[]) as monitor:
        for _ in range(8):
            before = model.get_parameter("0.weight").detach().clone()
            optimizer.zero_grad()
            torch.autograd.backward([loss_of(scaler, model(torch.ones(1, 2)).sum())])
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            taken.append(not torch.equal(model.get_parameter("0.weight"), before))
    assert scales == [2.0**k for k in (17, 16, 15, 15, 16, 15, 15, 16, 15)]
    assert taken == [False, False, True, True, False, True, True, False]
    assert [detection.batches for detection in monitor.detections] == [4]
    verdict = monitor.detections[0].report.verdict
    assert verdict is not None and (verdict.kind, verdict.operation) == ("cast-overflow", "ToCopyBackward0")
    assert verdict.text.endswith("  then        GradScaler will skip this step, and lower its scale (now 131072)")
    assert "  try " not in verdict.text


def test_what_a_smaller_scale_does_not_cure(recorder_name: RecorderName, scaler: torch.amp.GradScaler) -> None:
    model, reports = around(torch.sqrt), list[Report]()
    Monitor(model, gradients=True, recorder=recorder_name, sinks=[], on_detect=reports.append)
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    other.scale(torch.ones(1))  # so that nobody knows whose scale is the one
    scaler.scale(model(X).sum() * 2.0**-16).backward()
    verdict = reports[0].verdict
    assert verdict is not None and verdict.kind == "division-by-zero"
    assert verdict.advice == "GradScaler will skip this step, and lower its scale, which is no cure for this"


def test_what_came_to_the_model_beyond_its_dtype_may_be_cured_by_a_smaller_scale(
    recorder_name: RecorderName, scaler: torch.amp.GradScaler
) -> None:
    """65536, the gradient of the scaled sum, is inf as the float16 that the model gave."""
    model, reports = nn.Sequential(nn.Linear(2, 2).half()), list[Report]()
    Monitor(model, gradients=True, recorder=recorder_name, sinks=[], on_detect=reports.append)
    scaler.scale(model(X.half()).float().sum()).backward()
    verdict = reports[0].verdict
    assert verdict is not None and verdict.kind == "bad-input"
    assert verdict.advice == "GradScaler will skip this step, and lower its scale (now 65536)"


def test_a_product_in_the_model_is_no_scaler(recorder_name: RecorderName, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(torch.ones(1, requires_grad=True))
    model = around(lambda x: sqrt_at_0(x) * 0.5)
    Monitor(model, gradients=True, recorder=recorder_name, sinks=[])
    with pytest.raises(NonFiniteError, match="made in     the backward of middle"):
        model(X).sum().backward()


def test_a_step_that_is_taken_though_a_scaler_is_there_raises(
    recorder_name: RecorderName, scaler: torch.amp.GradScaler
) -> None:
    model = scaled_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Monitor(model, gradients=True, recorder=recorder_name, sinks=[])
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    before = model.get_parameter("0.weight").detach().clone()
    with pytest.raises(NonFiniteError, match="and yet the optimizer takes its step"):
        optimizer.step()
    assert torch.equal(model.get_parameter("0.weight"), before)


def test_a_loss_that_no_scaler_has_multiplied_raises_though_one_is_there(
    recorder_name: RecorderName, scaler: torch.amp.GradScaler
) -> None:
    scaler.scale(torch.ones(1, requires_grad=True))
    model = around(sqrt_at_0)
    Monitor(model, gradients=True, recorder=recorder_name, sinks=[])
    with pytest.raises(NonFiniteError, match="made in     the backward of middle"):
        model(X).sum().backward()


def test_a_product_of_the_users_own_is_no_scaler(recorder_name: RecorderName) -> None:
    gc.collect()
    model = around(sqrt_at_0)
    Monitor(model, gradients=True, recorder=recorder_name, sinks=[])
    with pytest.raises(NonFiniteError, match="made in     the backward of middle"):
        (model(X).sum() * torch.tensor(0.5)).backward()


def test_after_a_backward_that_raised_the_next_one_is_watched(recorder_name: RecorderName) -> None:
    model, sink = around(sqrt_at_0), Keeps()
    Monitor(model, gradients=True, recorder=recorder_name, sinks=[sink])
    for number in range(2):
        with pytest.raises(NonFiniteError) as error:
            model(X).sum().backward()
        assert error.value.batch_number == number
    empty: dict[str, Tensor] = {}
    output = model(torch.ones(1, 2))
    output.register_hook(lambda gradient: empty["mine"])
    with pytest.raises(KeyError):
        output.sum().backward()
    sink.take()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert sum(frame.is_backward for frame in sink.take()) == 5
    assert {frame.batch_number for frame in sink.take()} == set()


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="gradients=1: must be True or False"):
        Monitor(nn.ReLU(), gradients=1)  # type: ignore[arg-type]
