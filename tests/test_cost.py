"""What watching costs, counted: what is read, what is not read again, what is kept, and what is left when it is off."""

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError, TensorStats
from overflowstat.recorder import RecorderName

FLOAT = 4


class Apply(nn.Module):
    """Does something to its input."""

    def __init__(self, does: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Any:
        return self.does(x)


def chain(*steps: Callable[[Tensor], Any]) -> nn.Sequential:
    return nn.Sequential(*[Apply(step) for step in steps])


def same(x: Tensor) -> Tensor:
    return x


def double(x: Tensor) -> Tensor:
    return x * 2


def extremes(monitor: Monitor) -> list[list[float]]:
    """The abs_max of each line of each frame."""
    return [
        [float(line.content.abs_max) for line in frame.lines if isinstance(line.content, TensorStats)]
        for frame in monitor.frames
    ]


# what is read


def test_the_cost_of_a_forward_is_what_its_tensors_are(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2, bias=False))
    monitor = Monitor(model, recorder=recorder_name)
    model(torch.ones(4, 3))
    counters = monitor.counters()
    weights = 3 * 5 + 5 + 5 * 2
    activations = 4 * 3 + 4 * 5 + 4 * 5 + 4 * 2  # the input, and what each of three modules gives
    assert counters.frames == 4
    assert counters.tensors == 3 + 4
    assert counters.bytes_read == FLOAT * (weights + activations)
    # Inputs of the second and third module; input and output of the root.
    assert counters.bytes_reused == FLOAT * (4 * 5 + 4 * 5 + 4 * 3 + 4 * 2)
    assert (counters.launches, counters.syncs) == (0, 0)


def test_without_reuse_everything_that_is_shown_is_read(recorder_name: RecorderName) -> None:
    model = chain(same, double, same)
    monitor = Monitor(model, recorder=recorder_name, reuse_unchanged=False)
    model(torch.ones(8))
    # A tensor that is input and output of one call is still read once for both.
    assert (monitor.counters().tensors, monitor.counters().bytes_reused) == (1 + 2 + 1 + 2, 0)


def test_elements_that_an_expanded_view_repeats_are_read_once(recorder_name: RecorderName) -> None:
    model = chain(same)
    monitor = Monitor(model, recorder=recorder_name)
    model(torch.ones(3, 1).expand(3, 1000))
    assert monitor.counters().bytes_read == FLOAT * 3


# what is not read again, and what has to be


def write_in_place(x: Tensor) -> Tensor:
    return x.mul_(3)


def write_by_a_view(x: Tensor) -> Tensor:
    x[:1].fill_(3)
    return x


def write_by_out(x: Tensor) -> Tensor:
    return torch.mul(x, 3, out=x)


def swap_data(x: Tensor) -> Tensor:
    x.data = x.detach() * 3
    return x


def resize(x: Tensor) -> Tensor:
    return x.resize_(2).fill_(3)


@pytest.mark.parametrize("write", [write_in_place, write_by_a_view, write_by_out, swap_data, resize])
def test_a_tensor_that_was_written_to_is_read_again(
    recorder_name: RecorderName, write: Callable[[Tensor], Tensor]
) -> None:
    model = chain(same, write, same)
    monitor = Monitor(model, recorder=recorder_name)
    model(torch.ones(4))
    # What was the second module's input is another number by the time that its hook runs.
    assert extremes(monitor) == [[1, 1], [3, 3], [3, 3], [3, 3]]
    assert monitor.counters().tensors == 2


def test_another_tensor_in_the_same_memory_is_read(recorder_name: RecorderName) -> None:
    """An address says nothing: what was freed is soon used again, at the same version."""
    addresses = set()

    def make(value: float) -> Callable[[Tensor], None]:
        def step(x: Tensor) -> None:
            made = torch.full((1000,), value)
            addresses.add(made.data_ptr())
            inner(made)

        return step

    inner = Apply(same)
    steps = [make(float(value)) for value in range(1, 40)]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> None:
            for step in steps:
                step(x)

    model = Model()
    monitor = Monitor(model, recorder=recorder_name, max_frames_to_save=None)
    model(torch.ones(1))
    assert len(addresses) < len(steps), "no memory was used again, so that nothing was tested"
    assert extremes(monitor)[:-1] == [[value, value] for value in range(1, 40)]


def test_a_tensor_is_read_again_in_the_next_batch(recorder_name: RecorderName) -> None:
    model = chain(same)
    monitor = Monitor(model, recorder=recorder_name)
    x = torch.ones(4)
    for batch in range(1, 4):
        model(x)
        assert monitor.counters().tensors == batch


def test_tensors_of_inference_mode_are_read_each_time(recorder_name: RecorderName) -> None:
    def write(x: Tensor) -> Tensor:
        return x.mul_(3)  # which changes no version there

    model = chain(same, write, same)
    monitor = Monitor(model, recorder=recorder_name)
    with torch.inference_mode():
        model(torch.ones(4))
    assert extremes(monitor) == [[1, 1], [3, 3], [3, 3], [3, 3]]
    assert monitor.counters().tensors == 4


def test_a_write_that_changes_no_version_is_the_documented_blind_spot(recorder_name: RecorderName) -> None:
    def write(x: Tensor) -> Tensor:
        x.data.mul_(float("inf"))
        return x

    for reuse in (True, False):
        model = chain(same, write, same)
        monitor = Monitor(model, recorder=recorder_name, sinks=[], reuse_unchanged=reuse)
        if reuse:
            model(torch.ones(4))
        else:
            with pytest.raises(NonFiniteError, match="first in 1 "):
                model(torch.ones(4))
        monitor.remove()


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_nothing_is_reused_where_collectives_could_write_unless_it_is_asked_for(
    recorder_name: RecorderName, process_group: None
) -> None:
    for reuse, tensors in ((None, 3), (True, 1), (False, 3)):
        model = chain(same, same)
        monitor = Monitor(model, recorder=recorder_name, reuse_unchanged=reuse)
        model(torch.ones(4))
        assert monitor.counters().tensors == tensors


# weights


def test_names_of_weights_may_be_made_anew_each_time(recorder_name: RecorderName) -> None:
    """As by what takes parameters out of a module and puts others in."""
    linear = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(linear)
    monitor = Monitor(model, recorder=recorder_name)
    for number in range(100):
        del linear._parameters["weight"]
        name = "".join(["wei", "ght"])  # the same text in another object
        linear._parameters[name] = nn.Parameter(torch.full((2, 2), float(number)))
        model(torch.ones(1, 2))
        assert extremes(monitor)[-2][0] == number and monitor.frames[-2].lines[0].label == "weight"


def test_weights_on_change_are_read_when_they_have_changed(recorder_name: RecorderName) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    model = nn.Sequential(first, second)
    monitor = Monitor(model, recorder=recorder_name, weights="on_change")
    x = torch.ones(1, 3)

    def weights_read() -> int:
        before = monitor.counters().tensors
        with torch.no_grad():
            model(x)
        return monitor.counters().tensors - before - 3  # the input, and what the two modules give

    assert weights_read() == 3
    assert weights_read() == 0
    with torch.no_grad():
        first.weight.mul_(2)
    assert weights_read() == 1
    second.weight.data = torch.full((3, 3), 2.0)
    assert weights_read() == 1
    second.weight = nn.Parameter(torch.ones(3, 3))
    assert weights_read() == 1
    assert weights_read() == 0


def test_weights_that_are_written_to_unseen_are_read_when_they_are_forgotten(recorder_name: RecorderName) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(first, second)
    monitor = Monitor(model, recorder=recorder_name, weights="on_change", sinks=[])
    x = torch.ones(1, 3)
    model(x)
    second.weight.data.fill_(float("inf"))
    before = monitor.counters().bytes_read
    first(x)
    assert monitor.counters().bytes_read - before < 2 * 12 * 4  # no weights
    monitor.forget_weights()
    with pytest.raises(NonFiniteError, match=r"first in 1 \(Linear\), weight"):
        model(x)


def test_weights_on_change_are_all_read_after_an_optimizer_step(recorder_name: RecorderName) -> None:
    class WritesRaw(torch.optim.SGD):
        """As a fused kernel of somebody's own, which no version shows."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.fill_(float("inf"))

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    monitor = Monitor(model, recorder=recorder_name, weights="on_change", sinks=[])
    model(torch.ones(1, 3))
    WritesRaw(model.parameters(), lr=1.0).step()
    with pytest.raises(NonFiniteError, match=r"first in 0 \(Linear\), weight"):
        model(torch.ones(1, 3))
    monitor.remove()


def test_a_weight_that_is_not_read_again_is_still_shown_and_judged(recorder_name: RecorderName) -> None:
    linear = nn.Linear(2, 2)
    model = nn.Sequential(linear)
    with torch.no_grad():
        linear.weight.fill_(7)
    monitor = Monitor(model, recorder=recorder_name, weights="on_change", max_frames_to_save=2)
    for _ in range(3):
        model(torch.ones(1, 2))
    assert extremes(monitor)[0][0] == 7
    with torch.no_grad():
        linear.weight[0, 0] = float("nan")
    for batch in (3, 4):
        with pytest.raises(NonFiniteError) as raised:
            model(torch.ones(1, 2))
        assert raised.value.batch_number == batch


# off, and now and then


def test_one_batch_in_n_is_watched_and_those_that_are_traced(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = chain(double)
    monitor = Monitor(model, recorder=recorder_name, every_n=3, trace_batch_nums=[4])
    for batch in range(7):
        model(torch.ones(2))
        assert monitor.batch_number == batch + 1
    assert monitor.total_calls == 2 * len([0, 3, 4, 6])
    out = capsys.readouterr().out
    assert out.count("Starting batch") == 1 and "batch number=4 " in out
    bad = torch.full((2,), float("inf"))
    model(bad)
    model(bad)
    with pytest.raises(NonFiniteError) as raised:
        model(bad)
    assert raised.value.batch_number == 9


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_one_batch_in_what(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="every_n="):
        Monitor(chain(same), every_n=value)


def test_a_disabled_monitor_leaves_no_hook_and_is_as_before_when_it_is_enabled(recorder_name: RecorderName) -> None:
    model = chain(double, double)
    monitor = Monitor(model, recorder=recorder_name, sinks=[], check="step", weights="on_change")

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    attached = hooks()
    monitor.disable()
    monitor.disable()
    assert hooks() == 0
    model(torch.full((2,), float("nan")))
    assert (monitor.total_calls, monitor.batch_number) == (0, 0)
    monitor.enable()
    monitor.enable()
    assert hooks() == attached
    model(torch.ones(2))
    assert (monitor.total_calls, monitor.batch_number) == (3, 1)


# what is kept


def test_nothing_keeps_an_activation_alive(recorder_name: RecorderName) -> None:
    storages: list[weakref.ref[Any]] = []

    def make(x: Tensor) -> Tensor:
        made = x * 2
        storages.append(weakref.ref(made))
        return made

    model = chain(make, make, lambda x: x.sum())
    freed_in_time = []

    def look(module: nn.Module, args: object, output: object) -> None:
        freed_in_time.append([reference() is None for reference in storages])

    model[2].register_forward_hook(look)
    monitor = Monitor(model, recorder=recorder_name)
    with torch.no_grad():
        model(torch.ones(4))
    # The first one is gone while the forward goes on, the second when it is over.
    assert freed_in_time == [[True, False]]
    assert all(reference() is None for reference in storages) and len(monitor.frames) == 4


def test_memory_is_the_same_after_10_batches_and_after_10_000(recorder_name: RecorderName) -> None:
    batches = 10_000 if recorder_name == "native" else 1_000  # the same kind of leak would show
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    monitor = Monitor(model, recorder=recorder_name)
    x = torch.ones(2, 4)

    def run(count: int) -> tuple[int, int, int]:
        with torch.no_grad():
            for _ in range(count):
                model(x)
        gc.collect()
        return tracemalloc.get_traced_memory()[0], resident_bytes(), len(gc.get_objects())

    tracemalloc.start()
    try:
        run(200)
        python, resident, objects = run(10)
        python_later, resident_later, objects_later = run(batches)
    finally:
        tracemalloc.stop()
    assert python_later - python < 20_000
    assert abs(objects_later - objects) < 50
    # A frame takes some hundred bytes, so that keeping all of them would take more than 10 MB.
    assert resident_later - resident < 3_000_000
    assert len(monitor.frames) == 21


def test_memory_is_the_same_however_many_calls_a_batch_has(recorder_name: RecorderName) -> None:
    """Nobody ends it where the model itself is never called."""
    calls = 40_000 if recorder_name == "native" else 4_000
    layer = nn.Linear(4, 4)
    monitor = Monitor(nn.ModuleList([layer]), recorder=recorder_name, sinks=[])
    x = torch.ones(2, 4)

    def run(count: int) -> int:
        with torch.no_grad():
            for _ in range(count):
                layer(x)
        gc.collect()
        return resident_bytes()

    before = run(calls // 4)
    # What is kept of a tensor that is gone would be half a kilobyte a call.
    assert run(calls) - before < 100 * calls
    assert monitor.batch_number == 0 and monitor.total_calls == calls + calls // 4


def resident_bytes() -> int:
    import os

    with open("/proc/self/statm") as statistics:
        return int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_watched_model_that_nobody_keeps_is_freed_with_its_monitor(recorder_name: RecorderName) -> None:
    model = chain(double, double)
    monitor = Monitor(model, recorder=recorder_name)
    model(torch.ones(2))
    references: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(monitor), weakref.ref(model[0])]
    del model, monitor
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
