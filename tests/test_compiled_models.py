"""Compiled models: the frames, the verdict and the text of the eager ones, from the graphs that they have anyway."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.compilers import nop
from torch._inductor.cudagraph_utils import check_for_mutation_ignore_cuda_graph_managed_tensor
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import checkpoint

from overflowstat import DebugUnderflowOverflow, Monitor, NonFiniteError, Policy
from overflowstat.capture import MAX_DEPTH, TOO_DEEP
from overflowstat.frames import Frame
from overflowstat.recorder import RecorderName
from overflowstat.stats import TensorStats

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("nothing_compiled"),
]

BACKEND = "aot_eager"  # which decomposes, and makes functional, what Inductor then fuses


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.down(self.act(self.up(x)))
        return x + hidden if scale is None else x + scale * hidden


class Net(nn.Module):
    """Gives a dict, takes keywords, and recomputes its blocks if it is to."""

    def __init__(self, blocks: int = 2, width: int = 8, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)
        self.recomputes = recomputes

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x, scale=scale)
        return {"logits": self.head(x)}


EVERY_CALL = [f"blocks.{i}{part}" for i in (0, 1) for part in (".up", ".act", ".down", "")] + ["head", ""]


def make(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 8)), generator=torch.Generator().manual_seed(1))


def shown(frames: Sequence[Frame]) -> list[Any]:
    """All but the number of the batch, numbers as the lines show them."""

    def content(stats: TensorStats | str) -> object:
        if isinstance(stats, str):
            return stats
        return stats.dtype, stats.shape, f"{stats.abs_min:.2e}", f"{stats.abs_max:.2e}", stats.has_nan, stats.has_inf

    return [
        (f.module, f.class_name, f.starts_batch, f.calls, [(line.label, content(line.content)) for line in f.lines])
        for f in frames
    ]


def whole(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, **options)


def in_place(model: nn.Module, **options: Any) -> Callable[..., Any]:
    model.compile(**options)
    return model


def by_block(model: Any, **options: Any) -> Callable[..., Any]:
    for block in model.blocks:
        block.compile(**options)
    return model  # type: ignore[no-any-return]


def some_of_it(model: Any, **options: Any) -> Callable[..., Any]:
    model.blocks[1].compile(**options)
    return model  # type: ignore[no-any-return]


HOWS = [whole, in_place, by_block, some_of_it]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("nested", [True, False])
def test_the_frames_are_those_of_the_eager_model(
    recorder_name: RecorderName, sink: Keeps, how: Callable[..., Callable[..., Any]], nested: bool
) -> None:
    model = make()
    Monitor(model, recorder=recorder_name, sinks=[sink], nested=nested)
    model(x(), scale=torch.tensor(0.5))
    eager = sink.take()
    assert [frame.module for frame in eager] == EVERY_CALL
    run = how(model, backend=BACKEND, fullgraph=True)
    for _ in range(3):
        run(x(), scale=torch.tensor(0.5))
        assert shown(sink.take()) == shown(eager)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_step_shows_the_eager_frames_and_has_the_gradients_of_the_unwatched_one(
    recorder_name: RecorderName, sink: Keeps, recomputes: bool, autocast: bool
) -> None:
    def step(run: Callable[..., Any], model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(x())["logits"].float().square().sum()
        loss.backward()
        return [loss.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]

    model = make(recomputes=recomputes)
    unwatched = step(torch.compile(model, backend=BACKEND, fullgraph=True), model)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    step(model, model)
    eager = [frame for frame in sink.take() if not frame.is_recompute]
    run = torch.compile(model, backend=BACKEND, fullgraph=True)
    for _ in range(2):
        watched = step(run, model)
        assert shown(sink.take()) == shown(eager)
        assert all(map(torch.equal, watched, unwatched))


@pytest.mark.parametrize("dynamic", [None, True])
def test_shapes_are_those_of_the_call_where_the_graph_does_not_fix_them(
    recorder_name: RecorderName, sink: Keeps, dynamic: bool | None
) -> None:
    model = make()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    run = torch.compile(model, backend=BACKEND, fullgraph=True, dynamic=dynamic)
    for rows in (3, 5, 4, 7):
        model(x(rows, 8))
        eager = sink.take()
        run(x(rows, 8))
        assert shown(sink.take()) == shown(eager)


def graphs_of(model: nn.Module, how: Callable[..., Callable[..., Any]], inputs: Sequence[Tensor]) -> tuple[int, int]:
    """How many were made, and breaks."""
    torch.compiler.reset()
    counters.clear()
    run = how(model, backend=BACKEND)
    for value in inputs:
        run(value)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("how", [whole, in_place, by_block])
@pytest.mark.parametrize("rows", [(3, 3), (3, 5, 4, 7), (3, 1, 6)])
def test_no_graph_is_made_that_is_not_made_without_a_monitor(
    recorder_name: RecorderName, how: Callable[..., Callable[..., Any]], rows: Sequence[int]
) -> None:
    inputs = [x(count, 8) for count in rows]
    plain = graphs_of(make(blocks=12), how, inputs)
    model = make(blocks=12)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    assert graphs_of(model, how, inputs) == plain
    assert monitor.total_calls == len(rows) * (12 * 4 + 2)


class Loops(nn.Module):
    """Calls a layer three times, whose numbers grow."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.twice(x)
        return x


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_calls_of_a_module_in_one_graph_are_one_frame_that_counts_them(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    model = Loops()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    torch.compile(model, backend=BACKEND, fullgraph=True)(torch.tensor([1.0, -3.0]))
    inner, root = sink.take()
    assert (inner.module, inner.calls, root.calls) == ("twice", 3, 1)
    numbers = {line.label: (line.content.abs_min, line.content.abs_max) for line in inner.lines}  # type: ignore[union-attr]
    assert numbers == {"input[0]": (1.0, 12.0), "output": (2.0, 24.0)}
    assert monitor.total_calls == 4


def overflows(model: Net) -> Net:
    """In the second block's `down`, of a model that computes in float16."""
    with torch.no_grad():
        model.get_parameter("blocks.1.up.weight").mul_(1e3)
        model.get_parameter("blocks.1.down.weight").mul_(6e4)
    return model.half()


@pytest.mark.parametrize("how", HOWS)
def test_the_report_is_that_of_the_eager_model_but_for_what_nobody_counted(
    recorder_name: RecorderName, how: Callable[..., Callable[..., Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for is_compiled in (False, True):
        model = overflows(make())
        with Monitor(model, recorder=recorder_name):
            run = how(model, backend=BACKEND, fullgraph=True) if is_compiled else model
            with pytest.raises(NonFiniteError) as raised:
                run(x().half())
        assert raised.value.verdict is not None
        texts.append((str(raised.value), capsys.readouterr().out, raised.value.verdict))
    (eager, eager_out, eager_verdict), (compiled, compiled_out, verdict) = texts
    first, _, rest = eager.partition("\n")
    assert first.startswith("overflowstat: inf in batch 0, first in blocks.1.down (Linear), output: ")
    counted = first.partition("output: ")[2].partition("; ")[0]
    kinds = [kind for kind in ("+inf", "-inf") if kind in counted]
    some = ", ".join(f"some of 24 are {kind}" for kind in kinds)
    assert compiled == f"{first.replace(counted, some)}\n{rest}"
    assert compiled_out == eager_out.replace(counted, some)
    same = ("module", "label", "produced", "operation", "source", "kind", "advice")
    assert [getattr(verdict, name) for name in same] == [getattr(eager_verdict, name) for name in same]
    assert verdict.kind == "accumulation-overflow"


def test_the_drop_in_prints_what_it_prints_of_the_eager_model(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for backend in (None, BACKEND):
        model = overflows(make())
        watch = DebugUnderflowOverflow(model)
        run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        with pytest.raises(ValueError, match="DebugUnderflowOverflow: inf/nan detected"):
            run(x().half())
        printed.append(capsys.readouterr().out)
        watch.remove()
    assert printed[0] == printed[1]
    assert "blocks.1.down Linear" in printed[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", HOWS)
def test_a_bad_input_is_told_where_it_comes_in(
    recorder_name: RecorderName, how: Callable[..., Callable[..., Any]], bad: float
) -> None:
    model = make()
    Monitor(model, recorder=recorder_name, sinks=[])
    run = how(model, backend=BACKEND, fullgraph=True)
    run(x())
    given = x()
    given[1, 2] = bad
    with pytest.raises(NonFiniteError, match=r"in batch 1, first in blocks\.0\.up \(Linear\), input\[0\]"):
        run(given)
    run(x())


def test_a_policy_holds_for_what_a_graph_reads(recorder_name: RecorderName, sink: Keeps) -> None:
    model = make()
    given = x()
    given[1, 2] = -math.inf
    policy = Policy(exclude=["*.act", "head"], allow={"*": "-inf", "blocks.1": "nan"})
    with pytest.raises(NonFiniteError) as eager, Monitor(model, recorder=recorder_name, sinks=[], policy=policy):
        model(given)
    Monitor(model, recorder=recorder_name, sinks=[sink], policy=policy)
    with pytest.raises(NonFiniteError) as raised:
        torch.compile(model, backend=BACKEND, fullgraph=True)(given)
    assert raised.value.frames[-1].module == eager.value.frames[-1].module
    assert [frame.module for frame in raised.value.frames] == [frame.module for frame in eager.value.frames]


def test_batches_that_are_not_watched_leave_nothing_for_those_that_are(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    model = make()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink], every_n=2)
    run = torch.compile(model, backend=BACKEND, fullgraph=True)
    given = x()
    run(given)
    run(given * float("nan"))
    sink.take()
    run(given)
    assert [(frame.module, frame.calls) for frame in sink.take()] == [(name, 1) for name in EVERY_CALL]
    assert monitor.batch_number == 3


class Raises(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        raise KeyError("of its own")


def test_what_a_forward_read_before_it_raised_is_told_with_what_it_raises(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    torch.manual_seed(0)
    model = Raises()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    run = torch.compile(model, backend=BACKEND)
    with pytest.raises(KeyError, match="of its own") as raised:
        run(x() * math.nan)
    assert isinstance(raised.value.non_finite, NonFiniteError)  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="of its own") as raised:
        run(x())
    assert not hasattr(raised.value, "non_finite")


@dataclasses.dataclass
class Given:
    hidden: Tensor
    nothing: None = None


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Structures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x, [x, (x * 2, 3)], mask={"a": x > 0, "b": None}, pair=Pair(x * 3, x * 4), name="n")
        return output["list"][1] + output["given"].hidden  # type: ignore[no-any-return]


class Inner(nn.Module):
    def forward(self, x: Tensor, values: Any, mask: Any, pair: Any, name: str) -> dict[str, Any]:
        return {"list": [None, x * 5], "given": Given(x * 6), "count": 7}


@pytest.mark.parametrize("nested", [True, False])
def test_structures_are_opened_as_in_the_eager_model(recorder_name: RecorderName, sink: Keeps, nested: bool) -> None:
    model = Structures()
    Monitor(model, recorder=recorder_name, sinks=[sink], nested=nested)
    model(x())
    eager = sink.take()
    torch.compile(model, backend=BACKEND, fullgraph=True)(x())
    assert shown(sink.take()) == shown(eager)
    assert len(eager[0].lines) == (8 if nested else 3)


class Deep(nn.Module):
    """Calls a module with lists in lists, in the innermost of which is a tensor."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        value: Any = x
        for _ in range(self.depth):
            value = [value]
        self.inner(value)
        return x


@pytest.mark.parametrize("depth", [1, MAX_DEPTH, MAX_DEPTH + 1, MAX_DEPTH + 2])
def test_what_lies_too_deep_is_told_as_that(recorder_name: RecorderName, sink: Keeps, depth: int) -> None:
    model = Deep(depth)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(x())
    eager = sink.take()
    torch.compile(model, backend=BACKEND, fullgraph=True)(x())
    assert shown(sink.take()) == shown(eager)
    assert (eager[0].lines[0].content == TOO_DEEP) == (depth > MAX_DEPTH)


def test_two_monitors_of_a_compiled_model_see_the_same(recorder_name: RecorderName) -> None:
    model, first, second = make(), Keeps(), Keeps()
    Monitor(model, recorder=recorder_name, sinks=[first])
    with pytest.warns(UserWarning, match="watched by another monitor"):
        other = Monitor(model, recorder=recorder_name, sinks=[second])
    run = torch.compile(model, backend=BACKEND, fullgraph=True)
    run(x())
    assert shown(first.take()) == shown(second.take())
    other.remove()
    run(x())
    assert ([f.module for f in first.take()], second.frames) == (EVERY_CALL, [])


def test_a_model_that_moves_to_another_dtype_is_compiled_anew_and_watched(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    model = make()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    run = torch.compile(model, backend=BACKEND, fullgraph=True)
    run(x())
    model.double()
    sink.take()
    run(x().double())
    assert [frame.module for frame in sink.frames] == EVERY_CALL
    assert {line.content.dtype for f in sink.frames for line in f.lines} == {torch.float64}  # type: ignore[union-attr]


def test_a_model_that_is_given_memory_after_it_is_watched_is_compiled_and_watched(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    with torch.device("meta"):
        model = Net()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model.to_empty(device="cpu")
    model.load_state_dict(make().state_dict())
    torch.compile(model, backend=BACKEND, fullgraph=True)(x())
    compiled = sink.take()
    model(x())
    assert shown(compiled) == shown(sink.take())


def test_a_layer_that_leaves_the_model_is_as_it_was(recorder_name: RecorderName, sink: Keeps) -> None:
    model = make()
    run = torch.compile(model, backend=BACKEND)
    run(x())
    layer = model.blocks[1]
    layer.compile(backend=BACKEND)
    layer(x())
    members = set(vars(layer))
    Monitor(model, recorder=recorder_name, sinks=[sink])
    assert "forward" in vars(layer)
    model.blocks[1] = Block(8)
    sink.take()
    run(x())
    assert set(vars(layer)) == members
    assert [frame.module for frame in sink.take()] == EVERY_CALL


class Refusals:
    """What torch has against a graph as a CUDA graph: that it writes to inputs which may be elsewhere each time."""

    def __init__(self) -> None:
        self.found: list[str | None] = []
        self.backend = aot_autograd(fw_compiler=self._check, bw_compiler=nop)

    def _check(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        facts: Any = torch._guards.TracingContext.get().fw_metadata
        written = OrderedSet(i for i, info in enumerate(facts.input_info) if info.mutates_data)
        assert written
        self.found.append(
            check_for_mutation_ignore_cuda_graph_managed_tensor(
                graph, OrderedSet(map(str, written)), written, facts.static_input_indices
            )
        )
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize("how", [whole, by_block])
@pytest.mark.parametrize("trains", [False, True])
def test_rows_are_where_cuda_graphs_may_write_to_them(
    recorder_name: RecorderName, how: Callable[..., Callable[..., Any]], trains: bool
) -> None:
    model, refusals = make(), Refusals()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    run = how(model, backend=refusals.backend, fullgraph=True)
    with torch.set_grad_enabled(trains):
        for _ in range(2):
            run(x())
    assert monitor.total_calls == 2 * len(EVERY_CALL)
    assert set(refusals.found) == {None}


def test_a_tensor_of_no_module_is_not() -> None:
    written, refusals = torch.zeros(3, 8), Refusals()
    torch.compile(lambda x: written.add_(x), backend=refusals.backend)(x())
    assert refusals.found[0] is not None and "mutated inputs" in refusals.found[0]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_without_gradients_it_is_the_same(recorder_name: RecorderName, sink: Keeps, mode: str) -> None:
    model = make()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    run = torch.compile(model, backend=BACKEND, fullgraph=True)
    for _ in range(2):
        with getattr(torch, mode)():
            model(x())
            eager = sink.take()
            run(x())
        assert shown(sink.take()) == shown(eager)


@pytest.mark.slow
@pytest.mark.parametrize("trains", [False, True])
def test_inductor_shows_the_eager_frames_with_no_break(recorder_name: RecorderName, sink: Keeps, trains: bool) -> None:
    model = make()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(x())
    eager = sink.take()
    run = torch.compile(model, fullgraph=True)
    for _ in range(2):
        with torch.set_grad_enabled(trains), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = run(x())["logits"].square().sum()
        if trains:
            loss.backward()
        found = sink.take()
        assert [(f.module, [line.label for line in f.lines]) for f in found] == [
            (f.module, [line.label for line in f.lines]) for f in eager
        ]
        contents = [[line.content for frame in frames for line in frame.lines] for frames in (found, eager)]
        for ours, theirs in zip(*contents, strict=True):
            assert isinstance(ours, TensorStats) and isinstance(theirs, TensorStats)
            assert ours.abs_max == pytest.approx(theirs.abs_max, rel=1e-5)
            assert ours.abs_min == pytest.approx(theirs.abs_min, rel=1e-3)
    assert not counters["graph_break"]
