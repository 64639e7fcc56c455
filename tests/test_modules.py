"""Which modules are watched and whose weights are shown: those that are called, those that are not, those that come and
go, those that several share, and those of a model that is never called itself."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD

from overflowstat import Monitor, NonFiniteError
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName

NAN = float("nan")
X = torch.ones(2, 4)


def poison(weight: object) -> None:
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        weight.view(-1)[0] = NAN


class Both(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


# modules that are shared, called often, or not at all


def test_a_shared_module_is_shown_at_each_call_under_its_first_name(recorder_name: RecorderName, sink: Keeps) -> None:
    shared = nn.Linear(4, 4)
    model = Both(shared, nn.Sequential(shared, shared))
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert sink.modules() == ["first", "first", "first", "second", ""]


def test_tied_weights_are_shown_by_each_owner_and_read_once(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Both(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model.second.weight = model.first.weight
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert sink.labels("first")[0] == sink.labels("second")[0] == "weight"
    assert monitor.counters().tensors == 1 + 3  # and the input, and what each of the two makes
    poison(model.second.weight)
    with pytest.raises(NonFiniteError, match=r"first in first \(Linear\), weight"):
        model(X)


def test_a_module_that_is_called_now_and_then_is_shown_when_it_is(recorder_name: RecorderName, sink: Keeps) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for _ in range(self.calls % 3):
                x = self.layer(x)
            return x

    model = Skips()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    for expected in (["layer", ""], ["layer", "layer", ""], [""]):
        model(X)
        assert sink.modules() == expected


# weights that are used without their module's forward


class UsesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.projection.weight, self.projection.bias)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x[None], x[None], x[None], need_weights=False)[0]
        return y


@pytest.mark.parametrize(
    ("make", "parent", "label"),
    [(UsesWeight, "", "projection.weight"), (Attention, "attention", "out_proj.weight")],
    ids=["a linear map", "nn.MultiheadAttention"],
)
def test_weights_of_a_child_that_is_not_called_are_shown_by_its_parent(
    recorder_name: RecorderName, sink: Keeps, make: type[nn.Module], parent: str, label: str
) -> None:
    model = make()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert label in sink.labels(parent) and label.replace("weight", "bias") in sink.labels(parent)
    poison(dict(model.named_parameters())[f"{parent}.{label}".lstrip(".")])
    with pytest.raises(NonFiniteError, match=f"{label}: 1 of 16 is nan, first at .0, 0."):
        model(X)


def test_a_bad_weight_that_nothing_uses_is_shown_and_not_told(recorder_name: RecorderName, sink: Keeps) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.used(x)
            return y

    model = Idle()
    poison(model.idle.weight)
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert "idle.weight" in sink.labels("") and not monitor.detected_overflow
    (line,) = (line for line in sink.frames[-1].lines if line.label == "idle.weight")
    assert line.is_bad and not line.is_judged and sink.frames[-1].bad_lines == []


def test_a_child_that_has_been_called_shows_its_weights_itself_from_then_on(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.uses_layer = False

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if self.uses_layer else x + 1

    model = Later()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert "layer.weight" in sink.labels("")
    model.uses_layer = True
    for _ in range(2):
        model(X)
        assert "layer.weight" not in sink.labels("") and "weight" in sink.labels("layer")
        model.uses_layer = False


def test_experts_that_no_token_was_sent_to_make_no_lines(recorder_name: RecorderName, sink: Keeps) -> None:
    """There may be hundreds."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.experts[3](x)
            return y

    model = Mixture()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert sink.labels("") == ["input[0]", "output"]


# modules that come, go and change


def test_a_lazy_module_is_shown_as_what_it_becomes(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Both(nn.LazyLinear(4), nn.LazyLinear(4))
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert [frame.class_name for frame in sink.frames] == ["Linear", "Linear", "Both"]
    assert all(not isinstance(line.content, str) for line in sink.frames[0].lines)


def test_a_module_that_is_replaced_is_watched_from_the_next_batch_on(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Both(nn.Linear(4, 4), nn.Identity())
    old = model.first
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    model.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    sink.frames.clear()
    model(X)
    assert sink.modules() == ["first.0", "first.1", "first", "second", ""]
    old(X)
    assert sink.modules() == [] and not old._forward_hooks
    poison(model.first[0].weight)
    with pytest.raises(NonFiniteError, match=r"first in first.0 \(Linear\), weight"):
        model(X)


def test_a_module_that_is_added_is_watched_also_after_a_break(recorder_name: RecorderName, sink: Keeps) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    model.append(nn.Linear(4, 4))
    model(X)
    monitor.disable()
    model.append(nn.Linear(4, 4))
    model(X)
    monitor.enable()
    sink.frames.clear()
    model(X)
    assert sink.modules() == ["0", "1", "2", ""]
    monitor.remove()
    assert not any(module._forward_hooks for module in model.modules())


def test_modules_that_come_and_go_all_the_time_leave_nothing_behind(recorder_name: RecorderName) -> None:
    import gc
    import weakref

    model = Both(nn.Linear(4, 4), nn.Identity())
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    gone = []
    for _ in range(5):
        model.first = nn.Linear(4, 4)
        gone.append(weakref.ref(model.first))
        model(X)
    gc.collect()
    assert [reference() is None for reference in gone] == [True] * 4 + [False]
    assert len(monitor._attachment._handles_of) == 3


def test_a_module_without_hooks_that_is_added_is_told_and_the_rest_is_watched(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    model = Both(nn.Linear(4, 4), nn.Identity())
    Monitor(model, recorder=recorder_name, sinks=[sink])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        model.second = torch.jit.script(nn.Tanh())
    with pytest.warns(MonitorWarning, match=r"second \(RecursiveScriptModule\) takes no hooks, and is not watched"):
        model(X)
    assert sink.modules() == ["first", ""]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_module_without_hooks_that_is_there_from_the_beginning_is_told_once_and_its_weights_are_shown(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = Both(first, torch.jit.script(second))
    with pytest.warns(MonitorWarning) as told:
        monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    assert [str(w.message).split(",")[0] for w in told] == ["second (RecursiveScriptModule) takes no hooks"]
    model(X)
    assert sink.modules() == ["first", ""]
    poison(second[1].weight)
    with pytest.raises(NonFiniteError, match=r"first in the model itself .*, output"):
        model(X)
    monitor.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in (model, first))


@pytest.mark.parametrize("register", [parametrizations.weight_norm, parametrizations.orthogonal])
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrized_weights_are_shown_as_what_they_are_made_of(
    recorder_name: RecorderName, sink: Keeps, register: Callable[[nn.Module], nn.Module], when: str
) -> None:
    model = Both(nn.Linear(4, 4), nn.Identity())
    if when == "before":
        register(model.first)
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    if when == "after":
        register(model.first)
    model(X)
    originals = [name for name, _ in model.named_parameters() if "original" in name]
    assert originals and parametrize.is_parametrized(model.first)
    shown = {f"{frame.module}.{line.label}" for frame in sink.frames for line in frame.lines}
    assert set(originals) <= shown
    assert not monitor.detected_overflow
    poison(dict(model.named_parameters())[originals[0]])
    with pytest.raises((NonFiniteError, RuntimeError)) as raised:
        model(X)
    if isinstance(raised.value, NonFiniteError):
        assert "parametrizations.weight" in raised.value.frames[-1].module


def test_weight_norm_of_the_old_kind_is_shown_with_the_weight_that_it_makes(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    model = Both(nn.Linear(4, 4), nn.Identity())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.first)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert sink.labels("first") == ["bias", "weight_g", "weight_v", "weight", "input[0]", "output"]
    poison(model.first.weight_g)
    with pytest.raises(NonFiniteError, match=r"first in first \(Linear\), weight_g"):
        model(X)


# buffers


def test_buffers_are_shown_if_asked_for(recorder_name: RecorderName, sink: Keeps) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    Monitor(model, recorder=recorder_name, sinks=[sink], buffers=True)
    model(X)
    labels = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked", "input[0]", "output"]
    assert sink.labels("0") == labels
    content = {line.label: line.content for line in sink.frames[0].lines}
    mean, tracked = content["running_mean"], content["num_batches_tracked"]
    assert not isinstance(mean, str) and mean.abs_max == pytest.approx(0.1)  # a tenth of a batch of ones
    assert not isinstance(tracked, str) and tracked.abs_max == 1


def test_running_statistics_are_shown_as_the_forward_left_them(recorder_name: RecorderName, sink: Keeps) -> None:
    """They are written to without a new version, so that nothing tells that they have changed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    Monitor(model, recorder=recorder_name, sinks=[sink], buffers=True, weights="on_change")
    for _ in range(3):
        model(torch.randn(8, 4))
        content = {line.label: line.content for frame in sink.frames[-3:] for line in frame.lines}
        mean, tracked = content["running_mean"], content["num_batches_tracked"]
        buffer = model[1].running_mean
        assert isinstance(buffer, Tensor) and not isinstance(mean, str) and not isinstance(tracked, str)
        assert mean.abs_max == buffer.abs().max().item()
        assert tracked.abs_max == len(sink.frames) / 3


def test_a_bad_buffer_is_told_only_if_asked_for(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4)).train()
    poison(model[0].running_var)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    model(X)
    monitor.remove()
    Monitor(model, recorder=recorder_name, sinks=[], buffers=True)
    with pytest.raises(NonFiniteError, match=r"first in 0 \(BatchNorm1d\), running_var"):
        model(X)


# a model that is never called itself


class Trains(nn.Module):
    """As one of PyTorch Lightning's: its children are called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.encoder(x)).sum()
        return loss


def test_step_ends_a_batch_of_a_model_that_is_not_called_itself(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Trains()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            model.training_step(X).backward()  # type: ignore[no-untyped-call]
            monitor.step()
            assert monitor.batch_number == number + 1
        monitor.remove()
    assert [(f.batch_number, f.module, f.starts_batch) for f in sink.frames] == [
        (number, module, module == "encoder") for number in range(3) for module in ("encoder", "head")
    ]


def test_step_does_nothing_after_a_forward_of_the_model_itself(recorder_name: RecorderName) -> None:
    model = Both(nn.Linear(4, 4), nn.Identity())
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    monitor.step()
    for number in range(2):
        model(X)
        monitor.step()
        monitor.step()
        assert monitor.batch_number == number + 1


def test_step_ends_batches_that_are_not_watched_too(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Trains()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink], every_n=3)
    for _ in range(7):
        model.training_step(X)
        monitor.step()
    assert monitor.batch_number == 7
    assert [frame.batch_number for frame in sink.frames if frame.starts_batch] == [0, 3, 6]


def test_a_detection_names_the_batch_that_step_has_counted(recorder_name: RecorderName) -> None:
    model = Trains()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    model.training_step(X)
    monitor.step()
    poison(model.head.weight)
    with pytest.raises(NonFiniteError, match="nan in batch 1, first in head"):
        model.training_step(X)
    monitor.step()
    assert monitor.batch_number == 2


def ask_by_check(monitor: Monitor) -> None:
    monitor.check()


def ask_by_remove(monitor: Monitor) -> None:
    monitor.remove()


def ask_by_optimizer(monitor: Monitor) -> None:
    SGD(monitor.model.parameters(), lr=0.1).step()


def ask_by_leaving_the_block(monitor: Monitor) -> None:
    with monitor:
        pass


@pytest.mark.parametrize("ask", [ask_by_check, ask_by_remove, ask_by_optimizer, ask_by_leaving_the_block])
def test_a_model_that_is_never_called_itself_is_told_once(
    recorder_name: RecorderName, ask: Callable[[Monitor], None]
) -> None:
    model = Trains()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    model.training_step(X).backward()  # type: ignore[no-untyped-call]
    with pytest.warns(MonitorWarning, match=r"the forward of Trains itself is never called.*monitor\.step\(\)"):
        ask(monitor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(monitor)


@pytest.mark.parametrize("ask", [ask_by_check, ask_by_remove, ask_by_optimizer])
def test_a_model_that_is_called_or_where_nothing_ran_is_told_nothing(
    recorder_name: RecorderName, ask: Callable[[Monitor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether another test of this process has compiled something is not what this one is about.
    monkeypatch.setattr("overflowstat.unseen.has_compiled", lambda: False)
    model = Both(nn.Linear(4, 4), nn.Identity())
    for runs in (False, True):
        monitor = Monitor(model, recorder=recorder_name, sinks=[])
        if runs:
            model(X)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ask(monitor)
        monitor.remove()


def test_several_models_are_watched_as_a_list_of_them(recorder_name: RecorderName, sink: Keeps) -> None:
    generator, critic = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 1))
    monitor = Monitor(nn.ModuleList([generator, critic]), recorder=recorder_name, sinks=[sink])
    for _ in range(2):
        critic(generator(X)).sum().backward()
        critic(X).sum().backward()
        monitor.step()
    assert sink.modules() == ["0.0", "0", "1.0", "1", "1.0", "1"] * 2
    assert monitor.batch_number == 2


def test_an_optimizer_step_of_anybody_keeps_no_monitor_alive(recorder_name: RecorderName) -> None:
    import gc
    import weakref

    model = Trains()
    monitor = Monitor(model, recorder=recorder_name, sinks=[], check="step", weights="on_change")
    reference = weakref.ref(monitor)
    del model, monitor
    gc.collect()
    assert reference() is None
    other = nn.Linear(2, 2)
    SGD(other.parameters(), lr=0.1).step()


# a forward that ends in another way


class Raises(nn.Module):
    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), StopIteration()], ids=repr)
def test_a_batch_whose_forward_raised_counts_and_the_next_one_starts_clean(
    recorder_name: RecorderName, sink: Keeps, error: BaseException
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Raises(error), nn.Linear(4, 4))
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    with pytest.raises(type(error)):
        model(X)
    assert isinstance(model[1], Raises)
    model[1].error = None
    model(X)
    assert monitor.batch_number == 2
    assert [(f.batch_number, f.module, f.starts_batch) for f in sink.frames] == [
        (0, "0", True),
        (1, "0", True),
        (1, "1", False),
        (1, "2", False),
        (1, "", False),
    ]


class StopEarly(Exception):
    pass


def test_a_hook_of_the_users_that_ends_the_forward_early_ends_the_batch(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    """As feature extractors do."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    features: list[Tensor] = []

    def stop(module: nn.Module, args: Any, output: Tensor) -> None:
        features.append(output)
        raise StopEarly

    Monitor(model, recorder=recorder_name, sinks=[sink])
    model[1].register_forward_hook(stop)
    for number in range(2):
        with pytest.raises(StopEarly):
            model(X)
        assert [frame.batch_number for frame in sink.frames] == [number, number]
        assert sink.modules() == ["0", "1"]
    assert len(features) == 2


def test_a_module_that_calls_itself_is_shown_at_each_call(recorder_name: RecorderName, sink: Keeps) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = nn.Identity()

        def forward(self, x: Tensor, depth: int) -> Tensor:
            y: Tensor = self.leaf(x) if depth == 0 else self(x, depth - 1)
            return y

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Recursive()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x, 2)
            return y

    model = Root()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert sink.modules() == ["inner.leaf", "inner", "inner", "inner", ""] and monitor.batch_number == 1


def test_threads_that_call_parts_of_a_model_are_all_seen(recorder_name: RecorderName) -> None:
    model = Trains()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(50):
                model.training_step(X)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.step()
    assert errors == [] and monitor.counters().frames == 4 * 50 * 2 and monitor.batch_number == 1
