"""Models in the wrappers that split them among ranks: their lines are those of the plain model, by its names."""

from __future__ import annotations

from typing import Any

import pytest
import wrapper_scenarios as scenarios
from ranks import RankServer

from overflowstat.recorder import RecorderName

CLOSE = 1e-5
SPLIT = ("tensor parallel",)
"""In which a rank has another part of what a layer gives."""


@pytest.fixture(scope="module")
def plain(ranks: RankServer) -> dict[str, Any]:
    """The model as it is, on one rank."""
    result: dict[str, Any] = ranks.run(scenarios.one_batch, "plain", "torch", size=1)[0]
    return result


def inside(frames: list[Any]) -> list[Any]:
    """Those of the user's own modules."""
    return [frame for frame in frames if frame[1] not in scenarios.AROUND]


def names(frames: list[Any]) -> list[str]:
    return [frame[0] for frame in inside(frames)]


def by_line(frames: list[Any]) -> dict[tuple[str, str], Any]:
    return {(module, label): content for module, _, lines in inside(frames) for label, content in lines}


def is_computed(label: str) -> bool:
    return label.startswith(("input", "output"))


@pytest.mark.parametrize("wrapper", [name for name in scenarios.WRAPPERS if name != "plain"])
def test_frames_are_those_of_the_plain_model_by_its_names(
    ranks: RankServer, plain: dict[str, Any], wrapper: str, recorder_name: RecorderName
) -> None:
    tolerance = 2e-2 if "bfloat16" in wrapper else CLOSE
    expected = by_line(plain["frames"])
    for each in ranks.run(scenarios.one_batch, wrapper, recorder_name):
        assert names(each["frames"]) == names(plain["frames"])
        found = by_line(each["frames"])
        assert [key for key in expected if key not in found] == []
        assert [key for key in found if key not in expected and key[1] != "_flat_param"] == []
        for (module, label), content in expected.items():
            if wrapper in SPLIT and (not is_computed(label) or module.endswith((".up", ".act")) or "down" in module):
                continue
            if wrapper == "ZeRO-3" and not is_computed(label):
                continue
            assert found[module, label][:2] == pytest.approx(content[:2], rel=tolerance, abs=tolerance), (module, label)
            assert found[module, label][2] == content[2]


@pytest.mark.parametrize("wrapper", ["tensor parallel", "ZeRO-3", "FSDP2"])
def test_weights_that_are_split_are_read_as_far_as_they_are_here(
    ranks: RankServer, wrapper: str, recorder_name: RecorderName
) -> None:
    for each in ranks.run(scenarios.one_batch, wrapper, recorder_name):
        assert each["checked"] == {name: pytest.approx(numbers) for name, numbers in each["here"].items()}
        assert each["unreadable"] == {}


@pytest.mark.parametrize("wrapper", ["tensor parallel", "ZeRO-3"])
def test_merged_shards_are_the_whole(
    ranks: RankServer, plain: dict[str, Any], wrapper: str, recorder_name: RecorderName
) -> None:
    ended = ranks.run(scenarios.one_batch, wrapper, recorder_name)
    assert ended[0]["merged"] == ended[1]["merged"]
    found, expected = by_line(ended[0]["merged"]), by_line(plain["merged"])
    assert list(found) == list(expected)
    for (module, label), content in expected.items():
        assert found[module, label][:2] == pytest.approx(content[:2], rel=CLOSE, abs=CLOSE), (module, label)


def test_of_a_part_in_zero3_only_what_is_of_the_weight_is_read(
    ranks: RankServer, plain: dict[str, Any], recorder_name: RecorderName
) -> None:
    """By three ranks no weight here can be divided without a rest, and the last one has nothing of one of four."""
    ended = ranks.run(scenarios.one_batch, "ZeRO-3", recorder_name, size=3)
    merged = by_line(ended[0]["merged"])
    weights = {key: content for key, content in by_line(plain["merged"]).items() if not is_computed(key[1])}
    assert {key: merged[key] for key in weights} == {key: pytest.approx(numbers) for key, numbers in weights.items()}
    for name in ("blocks.0.up.weight", "blocks.1.down.bias", "module.weight"):
        module, _, label = name.rpartition(".")
        parts = [each["checked"][name] for each in ended]
        whole = [min(low for low, _ in parts), max(high for _, high in parts)]
        assert whole == pytest.approx(weights[module, label][:2])


@pytest.mark.parametrize(
    ("wrapper", "found_by"),
    [
        ("DDP", 1),
        ("FSDP1", 0),
        ("FSDP2", 0),
        ("FSDP2 that keeps weights", 0),
        ("tensor parallel", 1),
        ("ZeRO-3", 1),
    ],
)
def test_a_bad_weight_is_named_as_the_user_does(
    ranks: RankServer, wrapper: str, found_by: int, recorder_name: RecorderName
) -> None:
    """By the rank that has the piece, or where all gather it by the first."""
    ended = ranks.run(scenarios.bad_weight, wrapper, recorder_name)
    assert ended == [[["blocks.1.down", "weight", "bad-weight"], found_by]] * 2


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP1", "FSDP2"])
def test_a_bad_batch_of_one_rank_is_named_on_all(ranks: RankServer, wrapper: str, recorder_name: RecorderName) -> None:
    assert ranks.run(scenarios.bad_batch, wrapper, recorder_name) == [[["blocks.0.up", "input[0]", "bad-input"], 1]] * 2


def test_stages_of_a_pipeline_are_watched_each_on_its_rank(ranks: RankServer, recorder_name: RecorderName) -> None:
    """A part of a batch is a forward of a stage."""
    first, last = ranks.run(scenarios.stages, recorder_name, False)
    assert names(first["frames"]) == ["block.up", "block.act", "block.down", "block", ""] * 4
    assert names(last["frames"]) == ["block.up", "block.act", "block.down", "block", "end", ""] * 4
    assert [each["batches"] for each in (first, last)] == [4, 4]
    given = by_line(first["frames"])["", "output"]
    assert by_line(last["frames"])["", "input[0]"] == given
    assert first["merged"] == last["merged"] and "end" in first["merged"]


def test_a_stage_of_a_pipeline_that_goes_bad_raises_on_its_rank(ranks: RankServer, recorder_name: RecorderName) -> None:
    _, last = ranks.run(scenarios.stages, recorder_name, True)
    assert last["found"].startswith("overflowstat: rank 1 of 2 (")
    assert "nan in batch 2, first in block.up (Linear), weight: " in last["found"]


def test_stages_that_are_stepped_all_raise_after_the_batch(ranks: RankServer, recorder_name: RecorderName) -> None:
    first, last = ranks.run(scenarios.stages, recorder_name, True, {"agree": 20, "batch_ends": "step"})
    assert first["found"] == last["found"]
    assert "rank 1 of 2 (" in last["found"]
    assert "nan in batch 1, first in block.up (Linear), weight: " in last["found"]
    assert [each["batches"] for each in (first, last)] == [2, 2]


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_stages_whose_gradients_are_watched_do_not_wait_for_each_other(ranks: RankServer, schedule: str) -> None:
    options = {"agree": 20, "batch_ends": "step", "gradients": True}
    first, last = ranks.run(scenarios.stages, "native", True, options, schedule)
    assert first["found"] == last["found"]
    assert "nan in batch 1, first in block.up (Linear), weight: " in last["found"]


def test_stages_that_would_wait_for_each_other_are_told(ranks: RankServer) -> None:
    first, _ = ranks.run(scenarios.stages, "native", True, {"agree": 20}, missing=1)
    assert first["found"].startswith("stages of a pipeline cannot agree after each forward")


def test_merged_batches_name_the_ranks_that_are_bad(ranks: RankServer, recorder_name: RecorderName) -> None:
    """Rank r holds 2**r, -2**(r + 4) and 0; later the first one is a NaN on rank 2."""
    ended = ranks.run(scenarios.merge_batches, recorder_name, size=3)
    assert ended[0] == ended[1] == ended[2]
    ranks_of = [0, 1, 2]
    assert ended[0] == [
        [0, module, "output", ranks_of, [2], "     nan      nan output  <- rank 2", 0.0, 64.0, 9, 1, 3, 1.0]
        for module in ("0", "")
    ]


CALLS = [["Linear", "weight", [1.0]], ["Linear", "weight", [2.0]], ["Linear", "weight", [4.0]]]


@pytest.mark.parametrize(
    ("lack", "there"),
    [
        ("end", [True, True, False, False]),
        ("beginning", [False, False, True, True]),
        ("wrapper", [True, True, True, True, False]),
        ("gradients", [True, True, True, True]),
    ],
)
def test_calls_are_merged_with_the_same_calls_where_a_rank_lacks_some(
    ranks: RankServer, lack: str, there: list[bool], recorder_name: RecorderName
) -> None:
    ended = ranks.run(scenarios.merge_unlike, recorder_name, lack)
    assert ended[0] == ended[1]
    frames = [frame for frame in ended[0] if not frame[1].startswith("grad ")]
    roots = [["Thrice", "input[0]", [1.0]], ["DistributedDataParallel", "input[0]", [1.0]]]
    assert [[*frame[:2], frame[3]] for frame in frames] == [*CALLS, *roots][: len(there)]
    assert [frame[2] for frame in frames] == [[0, 1] if both else [0] for both in there]


@pytest.mark.parametrize("lack", ["gradients", "gradients of weights"])
def test_gradients_are_not_merged_with_what_they_are_not_of(
    ranks: RankServer, lack: str, recorder_name: RecorderName
) -> None:
    ended = ranks.run(scenarios.merge_unlike, recorder_name, lack)
    found = [frame[1:3] for frame in ended[0] if frame[1].startswith("grad ")]
    assert [label for label, _ in found] == ["grad output"] * 3 + ["grad weight"]
    assert [ranks_of for label, ranks_of in found if label == "grad weight"] == [[0]]
    of_others = [ranks_of for label, ranks_of in found if label != "grad weight"]
    assert of_others == [[0] if lack == "gradients" else [0, 1]] * 3
