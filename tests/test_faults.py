"""Each row of the table of differences: what the reference does, so that it stays true, and what ours does instead.

Each section carries the words of its row.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import Subject
from parity import Outcome, Parity, Reference, forward_batches, run_ours, run_reference
from torch import Tensor, nn

from overflowstat import DebugUnderflowOverflow, Monitor, NonFiniteError
from overflowstat.debug_utils import get_abs_min_max
from overflowstat.recorder import RecorderName

GOOD = torch.linspace(-1, 1, 12).reshape(3, 4)
NAN = GOOD.masked_fill(GOOD > 0.9, float("nan"))
INF = GOOD.masked_fill(GOOD < -0.9, float("inf"))
BAD_VALUES = pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])


class Times(nn.Module):
    """Multiplies by a number that is no parameter, so that an inf in it shows in the output alone."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Any:
        return x * self.factor


class Wraps(nn.Module):
    """A root whose own frame shows no number: what is found is found in its child."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, *, inputs: tuple[Any, ...]) -> None:
        self.child(*inputs)


def chain(length: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Identity() for _ in range(length)])


def watched(model: nn.Module, recorder_name: RecorderName, *args: Any, **options: Any) -> DebugUnderflowOverflow:
    return DebugUnderflowOverflow(model, *args, recorder=recorder_name, **options)


def hooks(model: nn.Module) -> int:
    """All hooks of all modules, of every kind there is."""
    return sum(
        len(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if "_hooks" in name and isinstance(value, dict)
    )


def subject_of(model: nn.Module) -> Subject:
    return Subject("faults", model, lambda number: {}, "")


def on_inputs(*inputs: Tensor) -> Callable[[Subject, Any], None]:
    """One batch for each input; the caller's own code catches what a batch raises and goes on."""

    def drive(subject: Subject, debugger: Any) -> None:
        for x in inputs:
            try:
                subject.model(x)
            except ValueError:
                print("caught")

    return drive


def header(batch: int) -> str:
    return f"\n\n{'':17} *** Starting batch number={batch} ***\nabs min  abs max  metadata\n"


# bad values first seen in the root module's own frame print batch N+1


class RootParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()
        self.scale = nn.Parameter(torch.tensor([1.0, float("nan")]))

    def forward(self, x: Tensor) -> Any:
        return self.child(x)


class RootOutput(nn.Module):
    def __init__(self, when: int) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.when = when
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.child(x)
        return y / 0 if self.calls > self.when else y


class RootInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.child(torch.zeros(2))


ROOTS: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "its parameter": (RootParameter, GOOD, 0),
    "its output": (lambda: RootOutput(0), GOOD, 0),
    "its output in batch 2": (lambda: RootOutput(2), GOOD, 2),
    "its input": (RootInput, INF, 0),
    "it is the only module": (lambda: Times(float("inf")), GOOD, 0),
}


@pytest.mark.parametrize("case", ROOTS)
def test_bad_values_in_the_roots_own_frame_name_the_batch_they_are_in(recorder_name: RecorderName, case: str) -> None:
    make, x, batch = ROOTS[case]

    def drive(subject: Subject, debugger: Any) -> None:
        for _ in range(batch + 1):
            subject.model(x)

    def run(runner: Callable[[Subject], Outcome]) -> Outcome:
        torch.manual_seed(0)
        return runner(subject_of(make()))

    reference = run(lambda subject: run_reference(subject, drive))
    ours = run(lambda subject: run_ours(recorder_name, subject, drive))
    said, truth = (f"\nDetected inf/nan during batch_number={number}\n" for number in (batch + 1, batch))
    assert reference.stdout.count(said) == 1
    assert ours.stdout == reference.stdout.replace(said, truth)
    assert isinstance(ours.error, NonFiniteError) and str(ours.error) == str(reference.error)
    assert ours.error.batch_number == batch
    assert ours.batch_number == reference.batch_number == batch + 1


def test_a_detection_below_the_root_names_the_same_batch(recorder_name: RecorderName) -> None:
    model = Wraps(Times())
    watched(model, recorder_name)
    model(inputs=(GOOD,))
    with pytest.raises(NonFiniteError) as raised:
        model(inputs=(INF,))
    assert raised.value.batch_number == 1


def test_an_error_carries_the_frames_that_the_report_shows(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = chain(5)
    watched(model, recorder_name, 3)
    with pytest.raises(NonFiniteError) as raised:
        model(NAN)
    assert len(raised.value.frames) == 1
    model.append(Times(float("inf")))
    other = chain(5).append(Times(float("inf")))
    watched(other, recorder_name, 3)
    with pytest.raises(NonFiniteError) as raised:
        other(GOOD)
    assert len(raised.value.frames) == 3
    assert "Last 3 forward frames:" in capsys.readouterr().out


# detected_overflow is sticky: bad values in a traced batch raise in the first later frame, which is clean


@BAD_VALUES
def test_bad_values_in_a_traced_batch_do_not_raise_in_a_later_clean_one(
    recorder_name: RecorderName, bad: Tensor
) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        subject.model(bad)
        subject.model(GOOD)
        subject.model(GOOD)

    reference = run_reference(subject_of(chain()), drive, trace_batch_nums=[0])
    ours = run_ours(recorder_name, subject_of(chain()), drive, trace_batch_nums=[0])
    assert reference.error is not None and "Last 1 forward frames:" in reference.stdout
    assert ours.error is None
    traced = reference.stdout[: reference.stdout.index("\nDetected")]
    assert ours.stdout == traced
    assert ours.batch_number == 3


@BAD_VALUES
def test_bad_values_between_two_traces_are_detected_where_they_are(recorder_name: RecorderName, bad: Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Times(), Times())
    watched(model, recorder_name, trace_batch_nums=[0, 2])
    model(bad)
    with pytest.raises(NonFiniteError) as raised:
        model(bad)
    assert raised.value.batch_number == 1
    model(bad)
    model(GOOD)


def test_a_bad_root_frame_of_a_traced_batch_does_not_raise(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = RootOutput(0)
    watched(model, recorder_name, trace_batch_nums=[0])
    model(GOOD)
    out = capsys.readouterr().out
    assert "output has infs\n" in out and "Detected" not in out


def test_a_bad_weight_of_a_traced_batch_is_detected_in_the_next_one(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].get_parameter("bias").data[2] = float("inf")
    model = Wraps(layers)
    watched(model, recorder_name, trace_batch_nums=[0])
    model(inputs=(GOOD,))
    capsys.readouterr()
    with pytest.raises(NonFiniteError):
        model(inputs=(GOOD,))
    out = capsys.readouterr().out
    assert "Last 2 forward frames:\nabs min  abs max  metadata\n" + header(1) in out
    assert " child.0 Linear\n" in out and " child.1 Linear\n" in out


# after a caught error every further frame raises again, and a batch whose forward raised is not counted


@BAD_VALUES
def test_after_a_caught_detection_clean_batches_do_not_raise(recorder_name: RecorderName, bad: Tensor) -> None:
    drive = on_inputs(bad, GOOD, GOOD)
    reference = run_reference(subject_of(chain()), drive)
    ours = run_ours(recorder_name, subject_of(chain()), drive)
    assert reference.stdout.count("caught") == 3
    assert ours.stdout.count("caught") == ours.stdout.count("Detected") == 1
    assert reference.batch_number == 0
    assert ours.batch_number == 3
    assert len(ours.frames) == 2 * 4
    assert ours.frames[0].startswith(header(1)) and ours.frames[4].startswith(header(2))


def test_each_batch_that_is_bad_raises_once_with_its_own_frames(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = chain()
    debugger = watched(model, recorder_name)
    batches = []
    for x in (GOOD, INF, GOOD, NAN, NAN):
        try:
            model(x)
        except NonFiniteError as error:
            batches.append(error.batch_number)
            assert list(debugger.frames) == []
    assert batches == [1, 3, 4]
    assert debugger.batch_number == 5
    reports = capsys.readouterr().out.split("\nDetected inf/nan during ")[1:]
    assert [report.splitlines()[:2] for report in reports] == [
        ["batch_number=1", "Last 5 forward frames:"],
        ["batch_number=3", "Last 5 forward frames:"],
        ["batch_number=4", "Last 1 forward frames:"],
    ]
    assert header(2) in reports[1] and header(3) in reports[1] and header(1) not in reports[1]
    assert header(4) in reports[2] and header(3) not in reports[2]


def test_after_a_caught_detection_the_next_batch_can_be_traced(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = chain(1)
    watched(model, recorder_name, trace_batch_nums=[1])
    with pytest.raises(NonFiniteError):
        model(INF)
    capsys.readouterr()
    model(GOOD)
    lines = "9.09e-02 1.00e+00 input[0]\n9.09e-02 1.00e+00 output\n"
    assert capsys.readouterr().out == f"{header(1)}{'':17} 0 Identity\n{lines}{'':17}  Sequential\n{lines}"


def test_a_detection_caught_inside_the_forward_counts_one_batch(recorder_name: RecorderName) -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.risky = Times(float("inf"))
            self.safe = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            try:
                return self.risky(x)
            except NonFiniteError:
                return self.safe(x)

    model = Tries()
    debugger = watched(model, recorder_name)
    for number in range(3):
        model(GOOD)
        assert debugger.batch_number == number + 1


class FailsAt(nn.Module):
    def __init__(self, *batches: int) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.second = nn.Identity()
        self.batches = batches
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.first(x)
        if self.calls - 1 in self.batches:
            raise ArithmeticError("of the model's own")
        return self.second(y)


def test_a_batch_whose_forward_raised_is_counted(recorder_name: RecorderName) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        for _ in range(3):
            with contextlib.suppress(ArithmeticError):
                subject.model(GOOD)

    reference = run_reference(subject_of(FailsAt(1)), drive)
    ours = run_ours(recorder_name, subject_of(FailsAt(1)), drive)
    assert reference.batch_number == 2
    assert ours.batch_number == 3
    starts = [(i, frame.split("***")[1].strip()) for i, frame in enumerate(ours.frames) if "Starting" in frame]
    assert starts == [(0, "Starting batch number=0"), (3, "Starting batch number=1"), (4, "Starting batch number=2")]


def test_a_batch_that_raised_before_any_frame_is_counted(recorder_name: RecorderName) -> None:
    model = chain()
    debugger = watched(model, recorder_name)
    with pytest.raises(TypeError):
        model()
    assert debugger.batch_number == 1
    model(GOOD)
    assert debugger.frames[0].startswith(header(1))


def test_a_batch_that_raised_between_traces_shifts_no_number(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FailsAt(0, 1)
    debugger = watched(model, recorder_name, trace_batch_nums=[1, 2])
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            model(GOOD)
    model(GOOD)
    model(GOOD)
    assert debugger.batch_number == 4
    out = capsys.readouterr().out
    assert [int(part.split(" ***")[0]) for part in out.split("batch number=")[1:]] == [1, 2]
    assert out.count(" Identity\n") == 1 + 2


# after the first trace or dump the bounded deque becomes a plain list: the report grows without bound


@pytest.mark.parametrize("frames", [0, 1, 3, 21])
def test_a_report_after_a_trace_has_at_most_the_frames_asked_for(
    recorder_name: RecorderName, frames: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        for x in (GOOD, GOOD, GOOD, GOOD, GOOD, GOOD, INF):
            subject.model(x)

    reference = run_reference(subject_of(chain()), drive, max_frames_to_save=frames, trace_batch_nums=[0])
    ours = run_ours(recorder_name, subject_of(chain()), drive, max_frames_to_save=frames, trace_batch_nums=[0])
    since_the_trace = 5 * 4 + 1
    assert f"Last {since_the_trace} forward frames:" in reference.stdout
    assert f"Last {min(frames, since_the_trace)} forward frames:" in ours.stdout
    report = ours.stdout[ours.stdout.index("Last") :]
    assert report.count(" Identity\n") + report.count(" Sequential\n") == min(frames, since_the_trace)


@pytest.mark.parametrize("frames", [1, 3])
def test_frames_stay_bounded_after_a_dump_and_a_trace(recorder_name: RecorderName, frames: int) -> None:
    model = chain()
    debugger = watched(model, recorder_name, frames, trace_batch_nums=[3])
    for x in (GOOD, INF, GOOD, GOOD, GOOD, GOOD, NAN, GOOD, GOOD):
        with contextlib.suppress(NonFiniteError):
            model(x)
        assert len(debugger.frames) <= frames
    assert len(debugger.frames) == frames


# hooks can never be removed; every new instance adds another set

SECOND = r"(?i)already|second|another"


@pytest.mark.parametrize("leave", ["remove", "with", "with and an error"])
def test_a_model_left_behind_is_as_it_was(
    recorder_name: RecorderName, leave: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = models.bert().model
    model.register_forward_hook(lambda *_: None)
    model.bert.embeddings.register_forward_pre_hook(lambda *_: None)
    state, attributes = set(model.state_dict()), {name: set(vars(m)) for name, m in model.named_modules()}
    before = hooks(model)
    if leave == "remove":
        debugger = watched(model, recorder_name, trace_batch_nums=[0, 1, 2])
        assert hooks(model) > before
        debugger.remove()
        debugger.remove()
    else:
        with (
            pytest.raises(KeyError) if "error" in leave else warnings.catch_warnings(),
            watched(model, recorder_name, trace_batch_nums=[0, 1, 2]) as debugger,
        ):
            assert isinstance(debugger, DebugUnderflowOverflow)
            assert hooks(model) > before
            if "error" in leave:
                raise KeyError("the user's")
    assert hooks(model) == before
    assert set(model.state_dict()) == state
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    model(models.tokens(0))
    assert capsys.readouterr().out == ""
    assert debugger.total_calls == 0


def test_the_reference_adds_a_set_of_hooks_with_every_instance() -> None:
    model = chain(3)
    for count in (1, 2, 3):
        Reference(model)
        assert hooks(model) == 4 * count
    assert not hasattr(Reference, "remove")


def test_frames_can_be_read_after_removal(recorder_name: RecorderName) -> None:
    model = chain(2)
    debugger = watched(model, recorder_name)
    model(GOOD)
    debugger.remove()
    model(GOOD)
    assert len(debugger.frames) == 3 and debugger.batch_number == 1


def test_a_second_instance_on_a_model_warns(recorder_name: RecorderName) -> None:
    model = chain(2)
    first = watched(model, recorder_name)
    with pytest.warns(UserWarning, match=SECOND) as caught:
        second = watched(model, recorder_name)
    assert len(caught) == 1 and caught[0].filename == __file__
    first.remove()
    model(GOOD)
    assert (first.batch_number, second.batch_number) == (0, 1)
    second.remove()
    assert hooks(model) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched(model, recorder_name)
        watched(chain(2), recorder_name)


def test_a_bare_instance_stays_attached_and_still_warns_the_second(recorder_name: RecorderName) -> None:
    model = chain(2)
    DebugUnderflowOverflow(model, recorder=recorder_name)
    gc.collect()
    with pytest.warns(UserWarning, match=SECOND):
        watched(model, recorder_name)


def test_a_removed_instance_and_its_model_can_be_freed(recorder_name: RecorderName) -> None:
    import weakref

    model = chain(2)
    debugger = watched(model, recorder_name)
    model(GOOD)
    debugger.remove()
    gone = weakref.ref(model[0])
    del model, debugger
    gc.collect()
    assert gone() is None


# a module shared by k parents is hooked k times and prints its frame k times a call; it has one name


def frames_of(trace: str) -> list[str]:
    """The frames of a trace, each from its header line (17 blanks, a blank, a name, a class) to the next one."""
    frames: list[str] = []
    for line in trace.splitlines(keepends=True):
        if line.startswith(" " * 18) and "***" not in line:
            frames.append("")
        if frames:
            frames[-1] += line
    return frames


def without_the_repeats_of_shared_modules(trace: str, shared: dict[str, int]) -> tuple[str, int]:
    """The trace with each run of k equal frames of a module with k parents made one, and how many frames that took."""
    frames, kept, dropped = frames_of(trace), [], 0
    start = trace[: trace.index(frames[0])]
    while frames:
        name = frames[0].split()[0]
        run = shared.get(name, 1)
        bodies = {frame.removesuffix(header_after(frame)) for frame in frames[:run]}
        assert len(bodies) == 1
        kept.append(frames[run - 1])
        dropped += run - 1
        frames = frames[run:]
    return start + "".join(kept), dropped


def header_after(frame: str) -> str:
    """The next batch's header, which a trace shows behind a root's frame."""
    return frame[frame.index("\n\n") :] if "\n\n" in frame else ""


def test_one_frame_a_call_of_an_embedding_shared_by_three_parents(parity: Parity) -> None:
    def t5_with_one_embedding() -> Subject:
        subject = models.t5_gated_gelu()
        subject.model.encoder.embed_tokens = subject.model.decoder.embed_tokens = subject.model.shared
        return subject

    drive, options = forward_batches(2), {"trace_batch_nums": [0, 1]}
    reference = run_reference(t5_with_one_embedding(), drive, **options)
    ours = run_ours(parity.recorder, t5_with_one_embedding(), drive, **options)
    expected, dropped = without_the_repeats_of_shared_modules(reference.stdout, {"shared": 3})
    assert dropped == 2 * 2 * (3 - 1)
    assert reference.stdout.count(" shared Embedding\n") == 2 * 2 * 3
    assert ours.stdout == expected
    assert ours.total_calls == reference.total_calls - dropped
    assert ours.batch_number == reference.batch_number == 2
    assert ours.names == reference.names
    parity.count("T5 gated-gelu, shared embedding", expected.count("\n"))


@pytest.mark.parametrize("parents", [2, 3, 5])
def test_one_frame_a_call_of_an_activation_shared_by_layers(recorder_name: RecorderName, parents: int) -> None:
    def build() -> Subject:
        torch.manual_seed(0)
        activation = nn.ReLU()
        layers = [nn.Sequential(nn.Linear(4, 4), activation) for _ in range(parents)]
        return Subject("", Wraps(nn.Sequential(*layers)), lambda number: {"inputs": (GOOD,)}, "")

    drive, options = forward_batches(1), {"trace_batch_nums": [0]}
    reference = run_reference(build(), drive, **options)
    ours = run_ours(recorder_name, build(), drive, **options)
    expected, dropped = without_the_repeats_of_shared_modules(reference.stdout, {"child.0.1": parents})
    assert dropped == parents * (parents - 1)
    assert ours.stdout == expected
    assert ours.stdout.count(" child.0.1 ReLU\n") == parents


def test_a_detection_in_a_shared_module_raises_once(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = Times(float("inf"))
    model = nn.Sequential(nn.Sequential(nn.Identity(), shared), nn.Sequential(shared))
    watched(model, recorder_name)
    with pytest.raises(NonFiniteError):
        model(GOOD)
    assert capsys.readouterr().out.count("output has infs\n") == 1


# abs(-2**31) of an int32 prints negative


@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [
        (torch.int8, "1.28e+02"),
        (torch.int16, "3.28e+04"),
        (torch.int32, "2.15e+09"),
        (torch.int64, "9.22e+18"),
    ],
    ids=str,
)
def test_the_least_integer_shows_its_true_magnitude(
    recorder_name: RecorderName, dtype: torch.dtype, magnitude: str
) -> None:
    x = torch.tensor([3, torch.iinfo(dtype).min, -5], dtype=dtype)

    def drive(subject: Subject, debugger: Any) -> None:
        subject.model(inputs=(x,))

    reference = run_reference(subject_of(Wraps(nn.Identity())), drive, trace_batch_nums=[0])
    ours = run_ours(recorder_name, subject_of(Wraps(nn.Identity())), drive, trace_batch_nums=[0])
    assert f"-{magnitude} 5.00e+00 input[0]\n" in reference.stdout
    assert f"\n3.00e+00 {magnitude} input[0]\n" in ours.stdout
    assert get_abs_min_max(x[1:2], "alone") == f"{magnitude} {magnitude} alone"


# weights re-read at each module's forward: read in one pass a batch, judged and printed in their owner's frame


def test_a_bad_weight_of_a_module_never_called_is_never_reported(recorder_name: RecorderName) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4, 4)
            self.idle = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.used(x)

    def build() -> Subject:
        torch.manual_seed(0)
        model = Idle()
        model.idle.weight.data.fill_(float("nan"))
        return subject_of(model)

    def drive(subject: Subject, debugger: Any) -> None:
        subject.model(GOOD)
        subject.model(GOOD)

    for options in ({}, {"trace_batch_nums": [0, 1]}):
        reference, ours = run_reference(build(), drive, **options), run_ours(recorder_name, build(), drive, **options)
        assert ours.error is None and reference.error is None
        assert ours.stdout == reference.stdout and ours.frames == reference.frames


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_bad_weight_is_reported_in_its_owners_frame(
    recorder_name: RecorderName, layer: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    model[layer].get_parameter("bias").data[1] = float("-inf")
    debugger = watched(model, recorder_name)
    with pytest.raises(NonFiniteError) as raised:
        model(GOOD)
    assert debugger.total_calls == len(raised.value.frames) == layer + 1
    out = capsys.readouterr().out
    assert out.startswith("bias has infs\noutput has infs\n")
    assert f" {layer} Linear\n" in out and f" {layer + 1} Linear\n" not in out


def test_a_weight_changed_in_place_before_its_module_runs_shows_as_it_then_is(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    class Warms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Identity()
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            with torch.no_grad():
                self.second.weight.fill_(7.0)
            self.second.bias = nn.Parameter(torch.full((4,), 9.0))
            return self.second(x)

    model = Warms()
    watched(model, recorder_name, trace_batch_nums=[0])
    model(GOOD)
    assert f"{'':17} second Linear\n7.00e+00 7.00e+00 weight\n9.00e+00 9.00e+00 bias\n" in capsys.readouterr().out


# crashes on tensors a hook really meets: bool, empty, meta, float8; and no kind of tensor makes the hook raise


def frame_lines(recorder_name: RecorderName, x: Any) -> list[str]:
    """The lines of the frame of a module that gets `x` and hands it on, without the frame's header."""
    model = Wraps(nn.Identity())
    debugger = watched(model, recorder_name)
    model(inputs=(x,))
    assert debugger.batch_number == 1
    child = debugger.frames[0]
    return child.split(" child Identity\n")[1].splitlines()


def assert_the_reference_dies(x: Tensor) -> None:
    model = Wraps(nn.Identity())
    Reference(model)
    with pytest.raises((RuntimeError, NotImplementedError, IndexError, TypeError)):
        model(inputs=(x,))


@pytest.mark.parametrize(
    ("values", "numbers"),
    [([True, False], "0.00e+00 1.00e+00"), ([True] * 3, "1.00e+00 1.00e+00"), ([False], "0.00e+00 0.00e+00")],
)
def test_a_bool_mask_shows_its_numbers(recorder_name: RecorderName, values: list[bool], numbers: str) -> None:
    x = torch.tensor(values)
    assert_the_reference_dies(x)
    assert frame_lines(recorder_name, x) == [f"{numbers} input[0]", f"{numbers} output"]


def test_a_real_model_with_a_padding_mask(recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = {"input_ids": models.tokens(0), "attention_mask": models.padding_mask()}
    model = models.bert().model
    Reference(model)
    with pytest.raises(NotImplementedError, match="Bool"):
        model(**inputs)
    capsys.readouterr()
    model = models.bert().model
    watched(model, recorder_name, trace_batch_nums=[0])
    model(**inputs)
    assert "0.00e+00 1.00e+00 input[1]\n" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)], ids=str)
def test_a_tensor_without_elements_says_so(
    recorder_name: RecorderName, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.empty(shape, dtype=dtype)
    assert_the_reference_dies(x)
    assert frame_lines(recorder_name, x) == ["            empty input[0]", "            empty output"]


def test_a_parameter_without_elements_says_so(recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the zero-element initialisation
        model = nn.Sequential(nn.Linear(0, 3))
    watched(model, recorder_name, trace_batch_nums=[0])
    model(torch.empty(2, 0))
    assert "            empty weight\n" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_a_meta_tensor_says_so(recorder_name: RecorderName, dtype: torch.dtype) -> None:
    x = torch.empty(3, 4, dtype=dtype, device="meta")
    assert_the_reference_dies(x)
    assert frame_lines(recorder_name, x) == ["             meta input[0]", "             meta output"]


def test_a_model_on_meta_runs_under_watch(recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        x = torch.empty(2, 4)
    watched(model, recorder_name, trace_batch_nums=[0])
    model(x)
    out = capsys.readouterr().out
    assert out.count("             meta ") == 8


FLOAT8 = {
    torch.float8_e4m3fn: ([0.0, -448.0, 0.5], "0.00e+00 4.48e+02"),
    torch.float8_e5m2: ([0.25, -57344.0, 1.5], "2.50e-01 5.73e+04"),
    torch.float8_e4m3fnuz: ([0.0, 240.0, -0.5], "0.00e+00 2.40e+02"),
    torch.float8_e5m2fnuz: ([3.0, -57344.0, 7.0], "3.00e+00 5.73e+04"),
    torch.float8_e8m0fnu: ([0.5, 2.0, 1024.0], "5.00e-01 1.02e+03"),
}
# bits of a NaN (and, where the format has one, of an infinity), from the OCP 8-bit specification and the fnuz proposal
FLOAT8_NAN = {
    torch.float8_e4m3fn: [0x7F, 0xFF],
    torch.float8_e5m2: [0x7D, 0x7E, 0xFF],
    torch.float8_e4m3fnuz: [0x80],
    torch.float8_e5m2fnuz: [0x80],
    torch.float8_e8m0fnu: [0xFF],
}


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_a_float8_tensor_shows_its_numbers(recorder_name: RecorderName, dtype: torch.dtype) -> None:
    values, numbers = FLOAT8[dtype]
    x = torch.tensor(values).to(dtype)
    assert_the_reference_dies(x)
    assert frame_lines(recorder_name, x) == [f"{numbers} input[0]", f"{numbers} output"]


@pytest.mark.parametrize(
    ("dtype", "bits"), [(dtype, bits) for dtype, codes in FLOAT8_NAN.items() for bits in codes], ids=str
)
def test_a_nan_in_a_float8_tensor_is_detected(
    recorder_name: RecorderName, dtype: torch.dtype, bits: int, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.tensor([1.0, 2.0, 1.0]).to(dtype)
    x.view(torch.uint8)[1] = bits
    model = Wraps(nn.Identity())
    watched(model, recorder_name)
    with pytest.raises(NonFiniteError):
        model(inputs=(x,))
    out = capsys.readouterr().out
    assert out.startswith("input[0] has nans\noutput has nans\n")
    assert "\n     nan      nan input[0]\n" in out


@pytest.mark.parametrize("bits", [0x7C, 0xFC])
def test_an_infinity_in_a_float8_tensor_is_detected(
    recorder_name: RecorderName, bits: int, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.tensor([1.0, 2.0, 1.0]).to(torch.float8_e5m2)
    x.view(torch.uint8)[1] = bits
    model = Wraps(nn.Identity())
    watched(model, recorder_name)
    with pytest.raises(NonFiniteError):
        model(inputs=(x,))
    assert "\n1.00e+00      inf input[0]\n" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_a_float4_tensor_says_its_type(recorder_name: RecorderName) -> None:
    x = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert_the_reference_dies(x)
    assert frame_lines(recorder_name, x) == [" float4_e2m1fn_x2 input[0]", " float4_e2m1fn_x2 output"]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_wide_unsigned_integers_show_their_numbers(recorder_name: RecorderName, dtype: torch.dtype) -> None:
    limit = {torch.uint16: 2**16, torch.uint32: 2**32, torch.uint64: 2**64}[dtype] - 1
    x = torch.tensor([2, limit], dtype=dtype)
    assert_the_reference_dies(x)
    assert frame_lines(recorder_name, x)[0] == f"2.00e+00 {limit:8.2e} input[0]"


class Tagged(torch.Tensor):
    """A subclass that changes nothing but its type."""


class Untouchable(torch.Tensor):
    """A subclass that lets no operation near its values, as a wrapper of remote or encrypted data would."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} is not allowed here")


class Wrapper(torch.Tensor):
    """A wrapper subclass: it has a shape and a dtype, and no memory of its own."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} is not allowed here")


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype and say so
        return torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])


def sparse_csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so are the compressed layouts
        return torch.eye(3).to_sparse_csr()


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


UNUSUAL: dict[str, Callable[[], Tensor]] = {
    "sparse coo": lambda: torch.eye(3).to_sparse(),
    "sparse coo, empty": lambda: torch.zeros(3, 3).to_sparse(),
    "sparse csr": sparse_csr,
    "quantized": quantized,
    "nested": nested,
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "subclass": lambda: torch.ones(3).as_subclass(Tagged),
    "subclass that refuses": lambda: torch.ones(3).as_subclass(Untouchable),
    "wrapper subclass": lambda: Wrapper(),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("traced", [[0], None], ids=["traced", "detecting"])
def test_no_kind_of_tensor_makes_the_hook_raise(
    recorder_name: RecorderName, kind: str, traced: list[int] | None
) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        subject.model(inputs=(UNUSUAL[kind](), GOOD))
        if not traced:
            assert all(label in debugger.frames[0] for label in (" input[0]\n", " input[1]\n", " output"))
        else:
            debugger.trace_batch_nums = []
        subject.model(inputs=(GOOD, NAN))

    class Drops(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return y

    ours = run_ours(recorder_name, subject_of(Wraps(Drops())), drive, trace_batch_nums=traced)
    assert isinstance(ours.error, NonFiniteError) and ours.error.batch_number == 1
    assert "9.09e-02 1.00e+00 input[1]\n" in ours.stdout


@pytest.mark.parametrize("kind", UNUSUAL)
def test_no_kind_of_output_makes_the_hook_raise(recorder_name: RecorderName, kind: str) -> None:
    class Makes(nn.Module):
        def forward(self) -> Any:
            return UNUSUAL[kind](), (UNUSUAL[kind](), GOOD)

    model = Wraps(Makes())
    debugger = watched(model, recorder_name)
    model(inputs=())
    assert [line[18:] for line in debugger.frames[0].splitlines()[-3:]] == ["output[0]", "output[1][0]", "output[1][1]"]


# DataParallel replicas: KeyError in the hook


@pytest.mark.parametrize("inside", [False, True], ids=["the model", "inside the model"])
def test_data_parallel_is_refused_at_construction(recorder_name: RecorderName, inside: bool) -> None:
    parallel = nn.DataParallel(nn.Linear(4, 4))
    model = nn.Sequential(nn.Identity(), parallel) if inside else parallel
    with pytest.raises((TypeError, ValueError), match="DistributedDataParallel"):
        watched(model, recorder_name)
    assert hooks(model) == 0


def test_a_replica_of_a_watched_module_says_what_to_use_instead(recorder_name: RecorderName) -> None:
    def replica(module: Any) -> Any:
        return module._replicate_for_data_parallel()

    model = nn.Sequential(nn.Identity())
    Reference(model)
    with pytest.raises(KeyError):
        replica(model[0])(GOOD)
    model = nn.Sequential(nn.Identity())
    watched(model, recorder_name)
    for module in (model[0], model):
        with pytest.raises(RuntimeError, match="DistributedDataParallel"):
            replica(module)(GOOD)


# a copy of a watched model is a model of its own


def through_pickle(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: nn.Module = torch.load(file, weights_only=False)
    return copied


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("after_a_batch", [False, True], ids=["before a batch", "after a batch"])
def test_a_copy_of_a_watched_model_is_not_watched(
    recorder_name: RecorderName,
    copied: Callable[[nn.Module], nn.Module],
    after_a_batch: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(OrderedDict(one=nn.Linear(4, 4), two=nn.ReLU(), three=nn.Sequential(nn.Linear(4, 2))))
    debugger = watched(model, recorder_name, trace_batch_nums=[0, 1, 2])
    if after_a_batch:
        model(GOOD)
    calls = debugger.total_calls
    capsys.readouterr()
    other = copied(model)
    assert torch.equal(other(GOOD), other(GOOD))
    other(NAN)
    assert capsys.readouterr().out == "" and debugger.total_calls == calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = watched(other, recorder_name, trace_batch_nums=[0])
    other(GOOD)
    assert second.batch_number == 1
    printed = capsys.readouterr().out
    assert printed.count(" one Linear\n") == 1
    model(GOOD)
    assert capsys.readouterr().out.count(" one Linear\n") == 1
    assert debugger.total_calls == calls + 5


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.parametrize("pickled", [pickle.dumps, lambda model: pickle.dumps(model, 0), saved], ids=["5", "0", "save"])
@pytest.mark.parametrize("watcher", [Monitor, DebugUnderflowOverflow])
@pytest.mark.parametrize("after_a_batch", [False, True], ids=["before a batch", "after a batch"])
def test_what_a_watched_model_is_saved_as_needs_nothing_of_this_package(
    recorder_name: RecorderName,
    pickled: Callable[[nn.Module], bytes],
    watcher: Callable[..., Any],
    after_a_batch: bool,
) -> None:
    """Who loads it may not have it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    options = {"gradients": True} if watcher is Monitor else {}
    watcher(model, recorder=recorder_name, **options)
    if after_a_batch:
        model(GOOD).sum().backward()
    assert b"overflowstat" not in pickled(model)


def test_a_copy_of_a_watched_model_compiles_in_one_graph(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    Monitor(model, recorder=recorder_name, sinks=[], gradients=True)
    model(GOOD)
    other = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    assert torch.equal(compiled(GOOD), other(GOOD))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("watcher", [Monitor, DebugUnderflowOverflow])
def test_a_model_may_hold_what_watches_it(
    recorder_name: RecorderName, copied: Callable[[nn.Module], nn.Module], watcher: Callable[..., Any]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.watcher = watcher(model, recorder=recorder_name)
    model(GOOD)
    other = copied(model)
    assert other.watcher is None and torch.equal(other(GOOD), model(GOOD))
    with pytest.raises(NonFiniteError):
        model(NAN)
    assert other(NAN).isnan().any()


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model[0]], ids=["root", "child"])
def test_scripting_a_watched_model_says_what_to_do(
    recorder_name: RecorderName, part: Callable[[nn.Module], nn.Module]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(AttributeError, match=r"cannot be scripted: call monitor\.disable\(\) before"):
        torch.jit.script(part(model))
    monitor.disable()
    scripted = torch.jit.script(part(model))
    monitor.enable()
    assert torch.equal(scripted(GOOD), model(GOOD)) and monitor.total_calls == 2
