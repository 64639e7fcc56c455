"""What DebugUnderflowOverflow prints, raises and keeps is what the one of transformers does, byte for byte."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import transformers
from models import Subject
from parity import Drive, Parity, forward_batches, run_ours, run_reference, train_batches
from torch import Tensor, nn

from overflowstat import NonFiniteError
from overflowstat.recorder import RecorderName

each_model = pytest.mark.parametrize("make", models.SMALL_MODELS, ids=lambda make: make.__name__)


def toy(make_model: Callable[[], nn.Module], *inputs: Any, name: str = "toy modules") -> Callable[[], Subject]:
    """A subject of a few modules whose positional inputs are the same in every batch."""

    def build() -> Subject:
        torch.manual_seed(0)
        return Subject(name, make_model(), lambda number: {"inputs": inputs}, "")

    return build


def call(times: int) -> Drive:
    def drive(subject: Subject, debugger: Any) -> None:
        with torch.no_grad():
            for number in range(times):
                subject.model(*subject.batch(number)["inputs"])

    return drive


GOOD = torch.linspace(-1, 1, 12).reshape(3, 4)
NAN = GOOD.masked_fill(GOOD > 0.9, float("nan"))
INF = GOOD.masked_fill(GOOD < -0.9, float("inf"))

# whole models


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_traces_chosen_batches_of_a_model(parity: Parity, make: Callable[..., Subject], dtype: torch.dtype) -> None:
    ours = parity(lambda: make(dtype), forward_batches(3), trace_batch_nums=[0, 2])
    assert ours.stdout.count("*** Starting batch number=") == 2
    assert ours.error is None


@each_model
def test_keeps_the_frames_of_a_model_that_is_well(parity: Parity, make: Callable[..., Subject]) -> None:
    ours = parity(make, forward_batches(2))
    assert ours.stdout == "" and len(ours.frames) == 21


@each_model
def test_detects_an_output_that_overflows_float16(parity: Parity, make: Callable[..., Subject]) -> None:
    ours = parity(lambda: make(torch.float16).overflow_float16(), forward_batches(1))
    assert isinstance(ours.error, NonFiniteError)
    assert ours.stdout.startswith("output has infs\n") and "inf output\n" in ours.stdout


@each_model
@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=str)
def test_detects_a_weight_that_goes_bad_in_a_later_batch(
    parity: Parity, make: Callable[..., Subject], value: float
) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        for number in range(3):
            if number == 1:
                subject.model.get_submodule(subject.middle).get_parameter("weight").data.view(-1)[7] = value
            subject.model(**subject.batch(number))

    ours = parity(make, drive, max_frames_to_save=1000)
    assert isinstance(ours.error, NonFiniteError)
    assert "Detected inf/nan during batch_number=1" in ours.stdout
    assert "weight has" in ours.stdout


@each_model
def test_aborts_a_model_after_the_batch_asked_for(parity: Parity, make: Callable[..., Subject]) -> None:
    ours = parity(make, forward_batches(3), trace_batch_nums=[1], abort_after_batch_num=1)
    assert ours.batch_number == 2
    assert isinstance(ours.error, ValueError) and not isinstance(ours.error, NonFiniteError)
    assert str(ours.error).endswith("aborting after 2 batches due to `abort_after_batch_num=1` arg")


@each_model
def test_traces_training_steps(parity: Parity, make: Callable[..., Subject]) -> None:
    ours = parity(make, train_batches(3), trace_batch_nums=[0, 1, 2])
    assert ours.batch_number == 3


def test_detects_training_that_diverges(parity: Parity) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e30)
        for number in range(5):
            optimizer.zero_grad()
            subject.model(**subject.batch(number)).logits.square().mean().backward()
            optimizer.step()

    ours = parity(models.llama, drive)
    assert isinstance(ours.error, NonFiniteError) and ours.batch_number >= 1


# the documents' example


@pytest.mark.parametrize("frames", [1, 21, 1000])
def test_a_dropout_of_t5_overflows_as_in_the_documents(parity: Parity, frames: int) -> None:
    ours = parity(models.t5_whose_dropout_overflows, forward_batches(1, grad=True), max_frames_to_save=frames)
    assert isinstance(ours.error, NonFiniteError)
    header, before, after = ours.stdout.rstrip("\n").splitlines()[-3:]
    assert header.endswith(" encoder.block.2.layer.1.dropout Dropout")
    largest = float(before.split()[1])
    assert before.endswith(" input[0]") and 0.9 * 65504 < largest < 65504
    assert after == "0.00e+00      inf output"


def test_a_trace_of_t5_with_an_overflow_in_it_says_so_and_goes_on(parity: Parity) -> None:
    ours = parity(models.t5_whose_dropout_overflows, forward_batches(1), trace_batch_nums=[0])
    assert ours.error is None
    assert "output has infs\n" in ours.stdout and "T5ForConditionalGeneration\n" in ours.stdout


# real weights


def test_traces_trained_weights(parity: Parity) -> None:
    ours = parity(models.minilm, forward_batches(2), trace_batch_nums=[1])
    assert ours.stdout.count("BertLayer\n") == 6


def test_detects_float16_overflow_with_trained_weights(parity: Parity) -> None:
    ours = parity(lambda: models.minilm(torch.float16).overflow_float16(), forward_batches(1), max_frames_to_save=1000)
    assert isinstance(ours.error, NonFiniteError)
    assert " encoder.layer.4.intermediate.dense Linear\n" in ours.stdout


# which frames a report holds


@pytest.mark.parametrize("frames", [0, 1, 2, 21, 1000, None])
def test_a_report_holds_the_last_frames_across_a_batch_boundary(parity: Parity, frames: int | None) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        subject.model(**subject.batch(0))
        subject.model.get_submodule("bert.embeddings.LayerNorm").get_parameter("bias").data[3] = float("inf")
        subject.model(**subject.batch(1))

    ours = parity(models.bert, drive, max_frames_to_save=frames)
    assert "Detected inf/nan during batch_number=1" in ours.stdout
    if frames == 21:
        assert "pooler BertPooler\n" in ours.stdout
        assert ours.stdout.index("BertPooler") < ours.stdout.index("*** Starting batch number=1 ***")


@pytest.mark.parametrize("frames", [0, 1, 21, None])
def test_a_trace_prints_every_frame_however_few_are_kept(parity: Parity, frames: int | None) -> None:
    ours = parity(models.gpt2, forward_batches(2), max_frames_to_save=frames, trace_batch_nums=[0, 1])
    assert "GPT2LMHeadModel\n" in ours.stdout


@pytest.mark.parametrize("frames", [0, 1, 21, 1000, None])
def test_frames_that_are_kept_are_the_last(parity: Parity, frames: int | None) -> None:
    ours = parity(models.vit, forward_batches(2), max_frames_to_save=frames)
    assert len(ours.frames) == (ours.total_calls if frames in (1000, None) else frames)


@pytest.mark.parametrize(
    "chosen", [[1], [0, 2], [2, 0, 2], (1, 2), {0}, range(1, 3), [7], [], None], ids=lambda chosen: repr(chosen)
)
def test_any_container_of_numbers_chooses_the_batches_to_trace(parity: Parity, chosen: Any) -> None:
    parity(models.llama, forward_batches(3), trace_batch_nums=chosen, max_frames_to_save=1000)


@pytest.mark.parametrize(("traced", "last"), [(None, 0), ([0], 0), ([1, 3], 3), ([5], 1)])
def test_abort_leaves_with_the_batch_counted(parity: Parity, traced: list[int] | None, last: int) -> None:
    ours = parity(models.llama, forward_batches(6), trace_batch_nums=traced, abort_after_batch_num=last)
    assert ours.batch_number == last + 1 and isinstance(ours.error, ValueError)


def test_detection_comes_before_abort(parity: Parity) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        subject.model.get_submodule("model.norm").get_parameter("weight").data[0] = float("nan")
        subject.model(**subject.batch(0))

    ours = parity(models.llama, drive, abort_after_batch_num=0)
    assert isinstance(ours.error, NonFiniteError)


@pytest.mark.parametrize("traced", [[0], None], ids=["traced", "detecting"])
@pytest.mark.parametrize("value", [GOOD, INF], ids=["good", "bad"])
def test_detected_overflow_says_whether_a_bad_value_was_seen(
    recorder_name: RecorderName, value: Tensor, traced: list[int] | None
) -> None:
    build = toy(lambda: nn.Sequential(nn.Identity()), value)
    reference = run_reference(build(), call(1), trace_batch_nums=traced)
    ours = run_ours(recorder_name, build(), call(1), trace_batch_nums=traced)
    assert ours.detected_overflow == reference.detected_overflow == (value is INF)


def test_attributes_set_after_construction_are_honoured(parity: Parity) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        assert debugger.model is subject.model
        assert debugger.trace_batch_nums == [] and debugger.abort_after_batch_num is None
        subject.model(**subject.batch(0))
        debugger.trace_batch_nums = [1]
        subject.model(**subject.batch(1))
        debugger.trace_batch_nums.append(3)
        debugger.abort_after_batch_num = 3
        for number in (2, 3, 4):
            subject.model(**subject.batch(number))

    ours = parity(models.llama, drive)
    assert ours.batch_number == 4 and "batch number=3 ***" in ours.stdout


# what a frame reads


class Returns(nn.Module):
    """Hands its inputs on in whatever shape `arrange` gives them."""

    def __init__(self, arrange: Callable[..., Any]) -> None:
        super().__init__()
        self.arrange = arrange

    def forward(self, *inputs: Any) -> Any:
        return self.arrange(*inputs)


class Wraps(nn.Module):
    """A root whose own frame shows nothing, so that its child's frame is the one that is compared."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, *inputs: Any) -> None:
        self.child(*inputs)


ARRANGEMENTS: dict[str, Callable[..., Any]] = {
    "a tensor": lambda x, y: y,
    "nothing": lambda x, y: None,
    "a tuple": lambda x, y: (x, y),
    "an empty tuple": lambda x, y: (),
    "a tuple with nothing in it": lambda x, y: (None, y),
    "a tuple in a tuple": lambda x, y: (x, (x, y)),
    "an empty tuple in a tuple": lambda x, y: ((), y),
    "nothing in a tuple in a tuple": lambda x, y: ((None, y), None),
    "a number": lambda x, y: 3.5,
    "numbers and words": lambda x, y: (1, "two", (3.0, y)),
    "a shape": lambda x, y: (x.shape, y),
}
UNSEEN: dict[str, Callable[..., Any]] = {
    "a list": lambda x, y: [y],
    "a dict": lambda x, y: {"y": y},
    "a list in a tuple": lambda x, y: (x, [y]),
    "a tuple three deep": lambda x, y: (x, (x, (y,))),
    "a ModelOutput": lambda x, y: transformers.modeling_outputs.BaseModelOutput(last_hidden_state=y),
}


@pytest.mark.parametrize("shape", [*ARRANGEMENTS, *UNSEEN])
@pytest.mark.parametrize("traced", [[0], None], ids=["traced", "detecting"])
def test_every_shape_of_output(parity: Parity, shape: str, traced: list[int] | None) -> None:
    arrange = {**ARRANGEMENTS, **UNSEEN}[shape]
    parity(toy(lambda: Wraps(Returns(arrange)), GOOD, GOOD * 3), call(2), trace_batch_nums=traced)


@pytest.mark.parametrize("shape", ["a tensor", "a tuple", "a tuple in a tuple", "numbers and words", "a shape"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, torch.cat([NAN, INF])], ids=["nan", "inf", "-inf", "both"])
@pytest.mark.parametrize("traced", [[0], None], ids=["traced", "detecting"])
def test_a_bad_value_in_every_shape_of_output(
    parity: Parity, shape: str, bad: Tensor, traced: list[int] | None
) -> None:
    build = toy(lambda: Wraps(Returns(lambda x: ARRANGEMENTS[shape](x, bad))), GOOD)
    ours = parity(build, call(1), trace_batch_nums=traced)
    assert " has " in ours.stdout
    assert isinstance(ours.error, NonFiniteError) == (traced is None)


@pytest.mark.parametrize("shape", UNSEEN)
def test_a_bad_value_where_the_reference_does_not_look(parity: Parity, shape: str) -> None:
    ours = parity(toy(lambda: Wraps(Returns(lambda x: UNSEEN[shape](x, NAN))), GOOD), call(1), trace_batch_nums=[0])
    assert "not a tensor" in ours.stdout and "has nans" not in ours.stdout


@pytest.mark.parametrize(
    "inputs",
    [(NAN,), (GOOD, INF), (None, "text", 3, NAN), ((NAN,), [NAN], {"a": NAN}), ()],
    ids=["first", "second", "after others", "inside containers", "none at all"],
)
@pytest.mark.parametrize("traced", [[0], None], ids=["traced", "detecting"])
def test_inputs_of_every_kind(parity: Parity, inputs: tuple[Any, ...], traced: list[int] | None) -> None:
    parity(toy(lambda: Wraps(Returns(lambda *_: None)), *inputs), call(1), trace_batch_nums=traced)


def test_keyword_inputs_stay_out_of_the_frame(parity: Parity) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return x

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def forward(self, x: Tensor) -> None:
            self.scaled(x, scale=NAN)

    ours = parity(toy(Root, GOOD), call(1), trace_batch_nums=[0])
    assert "nan" not in ours.stdout


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
def test_numbers_of_every_type_the_reference_reads(parity: Parity, dtype: torch.dtype) -> None:
    values = torch.tensor([[3.25, -117.5, 0.75], [-2.0, 64.0, 99.0]])
    values = values.abs() if dtype == torch.uint8 else values
    tensor = values.to(dtype) * (0.6 - 0.8j) if dtype.is_complex else values.to(dtype)
    ours = parity(toy(lambda: Wraps(nn.Identity()), tensor), call(1), trace_batch_nums=[0])
    assert ("0.00e+00" if not (dtype.is_floating_point or dtype.is_complex) else "7.50e-01") in ours.stdout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_at_the_edges_of_a_format(parity: Parity, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    edges = (
        torch.tensor([limits.tiny, -limits.max], dtype=dtype),
        torch.tensor([limits.tiny / 2, limits.min], dtype=dtype),
        torch.tensor([-0.0, limits.eps], dtype=dtype),
        torch.tensor([limits.tiny * limits.eps], dtype=dtype),
        torch.tensor(-1.0, dtype=dtype),
    )
    parity(toy(lambda: Wraps(Returns(lambda *inputs: inputs)), *edges), call(1), trace_batch_nums=[0])


@pytest.mark.parametrize("bad", ["nan", "inf", "nan and inf"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_bad_numbers_of_every_type_that_has_them(parity: Parity, dtype: torch.dtype, bad: str) -> None:
    values = torch.arange(1000, dtype=torch.float32).to(dtype)
    if "nan" in bad:
        values[501] = float("nan")
    if "inf" in bad:
        values[77:78] = torch.tensor([complex(1, float("-inf")) if dtype.is_complex else float("-inf")])
    ours = parity(toy(lambda: Wraps(nn.Identity()), values), call(1))
    assert isinstance(ours.error, NonFiniteError)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "strided": lambda x: x[:, ::3],
    "every other row": lambda x: x[::2],
    "offset": lambda x: x.flatten()[5:],
    "expanded": lambda x: x[:, :1].expand(-1, 50),
    "channels last": lambda x: x.reshape(2, 5, 6, 10).contiguous(memory_format=torch.channels_last),
    "flipped": lambda x: x.flip(0),
    "scalar": lambda x: x[3, 4],
    "gaps hide the rest": lambda x: torch.cat([x, torch.full_like(x, float("nan"))], 1)[:, : x.shape[1]],
    "conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "negative view": lambda x: torch.complex(x, x + 1).conj().imag,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_every_layout(parity: Parity, layout: str) -> None:
    values = torch.randn(20, 30, generator=models.generator(0))
    ours = parity(toy(lambda: Wraps(nn.Identity()), LAYOUTS[layout](values)), call(1), trace_batch_nums=[0])
    assert "nan" not in ours.stdout


def test_a_large_tensor_with_its_extremes_at_its_ends(parity: Parity) -> None:
    values = torch.full((1 << 21,), 0.5)
    values[0], values[-1] = 0.125, -8.0
    ours = parity(toy(lambda: Wraps(nn.Identity()), values), call(1), trace_batch_nums=[0])
    assert "1.25e-01 8.00e+00 input[0]\n" in ours.stdout


def test_recurrent_outputs_and_packed_sequences(parity: Parity) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, num_layers=2)

        def forward(self, x: Tensor) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
            self.lstm(packed)
            return self.lstm(x)[0]

    ours = parity(toy(Recurrent, torch.randn(5, 2, 4, generator=models.generator(0))), call(2), trace_batch_nums=[0, 1])
    assert "output[1][1]\n" in ours.stdout and "output[0][0]\n" in ours.stdout and "weight_hh_l1\n" in ours.stdout


def test_tuples_and_hidden_states_of_a_real_model(parity: Parity) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        subject.model(subject.batch(0)["input_ids"], return_dict=False, output_hidden_states=True, use_cache=False)

    ours = parity(models.gpt2, drive, trace_batch_nums=[0])
    *_, ids, logits, first, second, third = ours.stdout.splitlines()
    assert ids.endswith(" input[0]") and logits.endswith(" output[0]")
    assert [line.split()[-1] for line in (first, second, third)] == ["output[1][0]", "output[1][1]", "output[1][2]"]


# what happens between two frames


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_a_tensor_changed_in_place_is_read_as_it_is_at_each_frame(parity: Parity, mode: Callable[[], Any]) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.relu = nn.ReLU(inplace=True)
            self.second = nn.Identity()

        def forward(self, x: Tensor) -> Any:
            y = self.relu(self.first(x))
            y += 10
            z = self.second(y)
            z[0].mul_(2)
            return z

    def drive(subject: Subject, debugger: Any) -> None:
        with mode():
            subject.model(GOOD)
            subject.model(GOOD)

    parity(toy(Residual, GOOD), drive, trace_batch_nums=[0, 1])


def test_inference_mode(parity: Parity) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        with torch.inference_mode():
            for number in range(2):
                subject.model(**subject.batch(number))

    parity(models.bert, drive, trace_batch_nums=[0, 1])


def test_autocast(parity: Parity) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for number in range(2):
                subject.model(**subject.batch(number))

    parity(models.t5_gated_gelu, drive, trace_batch_nums=[0, 1])


class Changes(nn.Module):
    """Two calls of a Linear, with a change of its weight before each: `change` gets the root and the call's number."""

    def __init__(self, change: Callable[[Any, int], None]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.change = change

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        self.change(self, 0)
        x = self.second(x)
        self.change(self, 1)
        return self.second(x)


def scale_in_place(root: Any, number: int) -> None:
    with torch.no_grad():
        root.second.weight.mul_(number + 2)


def replace(root: Any, number: int) -> None:
    root.second.weight = nn.Parameter(torch.full((4, 4), number + 3.0))


def point_elsewhere(root: Any, number: int) -> None:
    root.second.weight.data = torch.full((4, 4), number + 5.0)


def spoil_in_place(root: Any, number: int) -> None:
    with torch.no_grad():
        root.second.bias[number] = float("nan")


def move_to_the_same_address(root: Any, number: int) -> None:
    """What an allocator does that gives a weight the block which an earlier one has left."""
    if not hasattr(root, "block"):
        root.block = bytearray(4 * 16)
    torch.frombuffer(root.block, dtype=torch.float32).fill_(number + 11.0)
    root.second.weight.data = torch.frombuffer(root.block, dtype=torch.float32).reshape(4, 4)


def add_a_parameter(root: Any, number: int) -> None:
    root.second.register_parameter(f"extra_{number}", nn.Parameter(torch.full((3,), number + 7.0)))


def take_the_bias_away(root: Any, number: int) -> None:
    root.second.bias = None


@pytest.mark.parametrize(
    "change",
    [
        scale_in_place,
        replace,
        point_elsewhere,
        move_to_the_same_address,
        spoil_in_place,
        add_a_parameter,
        take_the_bias_away,
    ],
)
@pytest.mark.parametrize("traced", [[0, 1], None], ids=["traced", "detecting"])
def test_a_weight_changed_within_a_batch_is_read_again(
    parity: Parity, change: Callable[[Any, int], None], traced: list[int] | None
) -> None:
    parity(toy(lambda: Changes(change), GOOD), call(2), trace_batch_nums=traced)


def test_a_weight_made_in_inference_mode_is_read_again_though_it_has_no_version(parity: Parity) -> None:
    def build() -> Subject:
        with torch.inference_mode():
            return toy(lambda: Changes(scale_in_place), GOOD)()

    def drive(subject: Subject, debugger: Any) -> None:
        with torch.inference_mode():
            subject.model(GOOD)
            subject.model(GOOD)

    parity(build, drive, trace_batch_nums=[0, 1])


def test_a_weight_whose_memory_is_freed_until_its_module_runs(parity: Parity) -> None:
    def build() -> Subject:
        subject = toy(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), GOOD)()
        weight = subject.model[1].weight
        kept, size = weight.detach().clone(), weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)

        def load(_module: nn.Module, _inputs: Any) -> None:
            weight.untyped_storage().resize_(size)
            weight.data.copy_(kept)

        subject.model[1].register_forward_pre_hook(load)
        return subject

    parity(build, call(1), trace_batch_nums=[0])


def test_a_bad_weight_mended_before_its_module_runs_is_not_detected(parity: Parity) -> None:
    def build() -> Subject:
        subject = toy(lambda: Changes(replace), GOOD)()
        subject.model.second.weight.data.fill_(float("nan"))
        return subject

    ours = parity(build, call(2))
    assert ours.error is None


def test_weights_stepped_by_an_optimizer_between_batches_are_read_each_batch(parity: Parity) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.5)
        for _ in range(3):
            subject.model(GOOD).sum().backward()
            optimizer.step()

    ours = parity(toy(lambda: nn.Sequential(nn.Linear(4, 4)), GOOD), drive, trace_batch_nums=[0, 1, 2])
    weights = [line for line in ours.stdout.splitlines() if line.endswith(" weight")]
    assert len(set(weights)) == 3


def test_a_weight_shared_by_two_modules_shows_in_both(parity: Parity) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Any:
            return self.head(self.embed(x))

    parity(toy(Tied, torch.tensor([1, 2, 3])), call(2), trace_batch_nums=[0, 1])


def test_one_parameter_under_two_names_of_a_module_shows_once(parity: Parity) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(2))
            self.other = self.one

        def forward(self, x: Tensor) -> Any:
            return x

    ours = parity(toy(lambda: Wraps(Twice()), GOOD), call(1), trace_batch_nums=[0])
    assert " one\n" in ours.stdout and " other\n" not in ours.stdout


def test_a_lazy_module_that_makes_its_weight_at_its_first_call(parity: Parity) -> None:
    build = toy(lambda: nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2)), GOOD)
    ours = parity(build, call(2), trace_batch_nums=[0, 1])
    assert ours.stdout.count(" 1 Linear\n") == 2


def test_a_weight_loaded_from_meta_just_before_its_module_runs(parity: Parity) -> None:
    def build() -> Subject:
        subject = toy(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), GOOD)()
        second = subject.model[1].to("meta")

        def load(module: nn.Module, _inputs: Any) -> None:
            module.weight = nn.Parameter(torch.full((4, 4), 0.25))
            module.bias = nn.Parameter(torch.full((4,), -0.5))

        second.register_forward_pre_hook(load)
        return subject

    parity(build, call(2), trace_batch_nums=[0, 1])


def test_weights_behind_a_parametrization(parity: Parity) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))

    ours = parity(toy(model, GOOD), call(2), trace_batch_nums=[0, 1])
    assert "parametrizations.weight" in ours.stdout


def functional_call(model: nn.Module) -> None:
    torch.func.functional_call(model, {name: p.detach() * 3 for name, p in model.named_parameters()}, (GOOD,))
    model(GOOD)


def functional_gradient(model: nn.Module) -> None:
    torch.func.grad(lambda x: model(x).sum())(GOOD)


def forward_mode_gradient(model: nn.Module) -> None:
    torch.func.jvp(model, (GOOD,), (GOOD,))


def dual_numbers(model: nn.Module) -> None:
    forward_ad: Any = torch.autograd.forward_ad
    with forward_ad.dual_level():
        model(forward_ad.make_dual(GOOD, GOOD))


def another_default_device(model: nn.Module) -> None:
    with torch.device("meta"):
        model(GOOD)


def another_default_dtype(model: nn.Module) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model(GOOD)
    finally:
        torch.set_default_dtype(torch.float32)


def jit_trace(model: nn.Module) -> None:
    trace: Any = torch.jit.trace
    trace(model, GOOD)


def in_an_except_block(model: nn.Module) -> None:
    try:
        raise KeyError("the user's")
    except KeyError:
        model(GOOD)
    model(GOOD)


@pytest.mark.parametrize(
    "way",
    [
        functional_call,
        functional_gradient,
        forward_mode_gradient,
        dual_numbers,
        another_default_device,
        another_default_dtype,
        jit_trace,
        in_an_except_block,
    ],
)
def test_every_way_to_call_a_model(parity: Parity, way: Callable[[nn.Module], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of parts it has deprecated and of numbers leaving a trace
        parity(
            toy(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), GOOD),
            lambda subject, _debugger: way(subject.model),
            trace_batch_nums=[0, 1, 2],
        )


def test_hooks_of_the_user_before_and_after(parity: Parity) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        subject.model[0].register_forward_hook(lambda _m, _i, output: output * 100)
        subject.model(GOOD)

    def build() -> Subject:
        subject = toy(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), GOOD)()
        subject.model[0].register_forward_hook(lambda _m, _i, output: output + 1)
        subject.model[1].register_forward_pre_hook(lambda _m, inputs: (inputs[0] / 3,))
        return subject

    parity(build, drive, trace_batch_nums=[0])


def test_a_module_called_twice_in_a_batch_has_two_frames(parity: Parity) -> None:
    ours = parity(toy(lambda: Changes(lambda root, number: None), GOOD), call(1), trace_batch_nums=[0])
    assert ours.stdout.count(" second Linear\n") == 2


def test_modules_called_outside_the_root_belong_to_the_batch_that_follows(parity: Parity) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        for number in range(3):
            batch = subject.batch(number)
            encoded = subject.model.get_encoder()(batch["input_features"])
            subject.model(encoder_outputs=encoded, decoder_input_ids=batch["decoder_input_ids"])

    parity(models.whisper, drive, trace_batch_nums=[0, 2])
    ours = parity(models.whisper, drive, max_frames_to_save=1000)
    assert ours.batch_number == 3


def test_generation_is_one_batch_for_each_token(parity: Parity) -> None:
    def drive(subject: Subject, debugger: Any) -> None:
        subject.model.generate(subject.batch(0)["input_ids"], max_new_tokens=4, min_new_tokens=4, do_sample=False)

    ours = parity(models.gpt2, drive, trace_batch_nums=[1, 3])
    assert ours.batch_number == 4


def test_what_a_model_prints_itself_stays_between_the_frames_it_was_printed_between(parity: Parity) -> None:
    def talk(x: Tensor) -> Tensor:
        print("inside forward")
        return x * float("inf")

    parity(toy(lambda: nn.Sequential(nn.Linear(4, 4), Returns(talk)), GOOD), call(1), trace_batch_nums=[0])
    ours = parity(toy(lambda: nn.Sequential(nn.Linear(4, 4), Wraps(Returns(talk))), GOOD), call(1))
    assert ours.stdout.startswith("inside forward\noutput has ")


def test_an_exception_that_the_model_itself_catches_leaves_the_batch_whole(parity: Parity) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            self.inner(x)
            raise ArithmeticError("this one the parent expects")

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = Fails()
            self.instead = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            try:
                return self.fails(x)
            except ArithmeticError:
                return self.instead(x)

    ours = parity(toy(Tries, GOOD), call(2), trace_batch_nums=[0, 1])
    assert ours.batch_number == 2


def test_a_root_that_has_no_children(parity: Parity) -> None:
    ours = parity(toy(lambda: nn.Linear(4, 2), GOOD), call(3), trace_batch_nums=[0, 2])
    assert ours.stdout.count("                   Linear\n") == 2


def test_never_stored_it_stays_attached(recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]) -> None:
    import gc

    from overflowstat import DebugUnderflowOverflow

    model = nn.Sequential(nn.Linear(4, 4))
    DebugUnderflowOverflow(model, trace_batch_nums=[0], recorder=recorder_name)
    gc.collect()
    model(GOOD)
    assert " 0 Linear\n" in capsys.readouterr().out
