"""One look at all weights, and at all gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

from overflowstat import check_gradients, check_weights
from overflowstat.recorder import Reading, Recorder, RecorderName

INF, NAN = float("inf"), float("nan")


class Counts(Recorder):
    """Launches of another recorder."""

    name = "counts"

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.read: list[int] = []

    def record(self, tensors: Any) -> Reading:
        self.read.append(len(tensors))
        return self.recorder.record(tensors)

    def capture(self) -> int | None:
        return self.recorder.capture()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2, bias=False)))


def parameter(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(name).data


def test_a_good_model_passes_and_everything_is_read_in_one_launch(recorder: Recorder) -> None:
    counts = Counts(recorder)
    found = check_weights(model(), recorder=counts)
    assert found and found.offenders == {} and found.unreadable == {}
    assert list(found.stats) == [
        *("0.weight", "0.bias", "1.weight", "1.bias"),
        *("1.running_mean", "1.running_var", "1.num_batches_tracked", "2.0.weight"),
    ]
    assert counts.read == [8]
    assert str(found) == "overflowstat: none of 8 weights hold nan or inf"
    assert len(check_weights(model(), buffers=False, recorder=recorder).stats) == 5


def test_all_offenders_are_listed_by_name(recorder_name: RecorderName) -> None:
    subject = model()
    parameter(subject, "0.weight")[1, 0] = NAN
    parameter(subject, "2.0.weight")[:, 2] = -INF
    subject.get_buffer("1.running_var")[0] = INF
    found = check_weights(subject, recorder=recorder_name)
    assert not found and list(found.offenders) == ["0.weight", "1.running_var", "2.0.weight"]
    assert found.offenders["0.weight"].first_bad == (1, 0) and found.offenders["2.0.weight"].neginf_count == 2
    assert str(found).splitlines() == [
        "overflowstat: 3 of 8 weights hold nan or inf",
        "  0.weight: 1 of 6 is nan, first at [1, 0]; float32, shape [3, 2]",
        "  1.running_var: 1 of 3 is +inf, first at [0]; float32, shape [3]",
        "  2.0.weight: 2 of 6 are -inf, first at [0, 2]; float32, shape [2, 3]",
    ]


def test_tied_weights_are_read_once_under_their_first_name(recorder: Recorder) -> None:
    subject = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    subject["head"].weight = subject["embed"].weight
    subject["again"] = subject["head"]
    parameter(subject, "head.weight")[0, 0] = NAN
    counts = Counts(recorder)
    assert list(check_weights(subject, recorder=counts).offenders) == ["embed.weight"]
    assert counts.read == [1]


def test_what_cannot_be_read_is_named_with_the_reason_and_not_judged(recorder_name: RecorderName) -> None:
    subject = nn.ModuleDict(
        {
            "meta": nn.Linear(2, 2, bias=False, device="meta"),
            "lazy": nn.LazyLinear(2, bias=False),
            "freed": nn.Linear(2, 2, bias=False),
            "here": nn.Linear(2, 2, bias=False),
        }
    )
    parameter(subject, "freed.weight").untyped_storage().resize_(0)
    found = check_weights(subject, recorder=recorder_name)
    assert found and list(found.stats) == ["here.weight"]
    assert found.unreadable == {"meta.weight": "meta", "lazy.weight": "uninitialized", "freed.weight": "empty here"}
    assert "not read: meta.weight (meta), lazy.weight (uninitialized), freed.weight (empty here)" in str(found)


def test_plain_tensors_in_place_of_weights_and_wrappers_are_read(recorder_name: RecorderName, mesh: Any) -> None:
    subject = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    del subject[0].weight
    subject[0].weight = torch.full((2, 2), INF)  # as offloading does
    sharded = distribute_tensor(torch.full((2, 2), NAN), mesh, [Replicate()])
    subject[1].weight = nn.Parameter(sharded)
    found = check_weights(subject, recorder=recorder_name)
    assert {name: (stats.inf_count, stats.nan_count) for name, stats in found.offenders.items()} == {
        "0.weight": (4, 0),
        "1.weight": (0, 4),
    }


def test_gradients_that_are_bad_and_those_that_are_not_there(recorder: Recorder) -> None:
    subject = model()
    subject[0].requires_grad_(False)
    subject.register_parameter("unused", nn.Parameter(torch.ones(1)))
    x = torch.ones(2, 3)
    subject[2](subject[1](x) * math.inf).sum().backward()  # 0 * inf: batch norm of a constant is its bias, 0
    counts = Counts(recorder)
    found = check_gradients(subject, recorder=counts)
    assert counts.read == [3]
    assert list(found.stats) == ["1.weight", "1.bias", "2.0.weight"]
    assert list(found.offenders) == ["1.weight", "1.bias", "2.0.weight"]
    assert found.missing == ("unused",)
    assert str(found).splitlines()[0] == "overflowstat: 3 of 3 gradients hold nan or inf"
    assert str(found).splitlines()[-1] == "no gradient: unused"


def test_sparse_gradients(recorder_name: RecorderName) -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    (embedding(torch.tensor([1, 3])) * torch.tensor([[1.0, 1.0], [INF, 1.0]])).sum().backward()
    found = check_gradients(embedding, recorder=recorder_name)
    assert {name: stats.posinf_count for name, stats in found.offenders.items()} == {"weight.values": 1}


def test_nothing_to_read(recorder_name: RecorderName) -> None:
    assert check_weights(nn.ReLU(), recorder=recorder_name)
    assert check_gradients(model(), recorder=recorder_name).stats == {}


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not dict"):
        check_weights({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not Tensor"):
        check_gradients(torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="buffers=1"):
        check_weights(nn.ReLU(), buffers=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recorder='fast'"):
        check_weights(nn.ReLU(), recorder="fast")  # type: ignore[arg-type]
