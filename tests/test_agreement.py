"""agree=True: all ranks raise at the same batch, and a rank that is missing ends in an error, never in a wait."""

from __future__ import annotations

import os
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import rank_scenarios as scenarios
import torch
from ranks import RankServer
from torch import nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.recorder import RecorderName

HOST = socket.gethostname()


def first_line(told: dict[str, Any]) -> str:
    return str(told["text"]).partition("\n")[0]


@pytest.mark.parametrize("recorder", ["native", "torch"])
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_raise_at_the_batch_in_which_one_of_them_is_bad(ranks: RankServer, size: int, recorder: str) -> None:
    ended = ranks.run(scenarios.train, {"1": (3, "third")}, 6, True, {"recorder": recorder}, size=size)
    for each in ended:
        assert (each["error"], each["batch"], each["number"]) == ("NonFiniteError", 3, 3)
        assert (each["rank"], each["world_size"], each["device"]) == (1, size, "cpu")
        assert first_line(each) == first_line(ended[1])
        assert each["verdict"] == ["third", "weight"]
        assert each["ours"][0] == 4
    expected = f"overflowstat: rank 1 of {size} ({HOST}, cpu): nan in batch 3, first in third (Linear), weight"
    assert first_line(ended[1]).startswith(expected)
    assert [each["frames"][-1:] for each in ended] == [["third"] if r == 1 else [] for r in range(size)]
    assert [each["ours"][1] for each in ended] == [r == 1 for r in range(size)]


def test_that_which_comes_first_in_the_order_of_execution_is_named_on_all_ranks(ranks: RankServer) -> None:
    bad = {"0": (2, "third"), "1": (2, "second"), "2": (2, "third"), "3": (2, "input")}
    ended = ranks.run(scenarios.train, bad, 6, False, size=4)
    for r, each in enumerate(ended):
        assert (each["batch"], each["rank"], each["verdict"]) == (2, 3, ["first", "input[0]"])
        also = re.findall(r"and on this rank: overflowstat: rank (\d) of 4", each["text"])
        assert also == ([] if r == 3 else [str(r)])
    assert [each["frames"][-1] for each in ended] == ["third", "second.linear", "third", "first"]


def test_of_two_ranks_at_the_same_module_the_lower_one_is_named(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.train, {"1": (1, "second"), "2": (1, "second")}, 6, True, size=3)
    assert [(each["batch"], each["rank"]) for each in ended] == [(1, 1)] * 3


def test_no_collective_is_issued(ranks: RankServer) -> None:
    """Counted by the group itself, in a model that has none of its own."""
    ended = ranks.run(scenarios.train, {"0": (3, "second")}, 6, False)
    assert [(each["error"], each["collectives"]) for each in ended] == [("NonFiniteError", 0)] * 2


def test_without_it_only_the_rank_that_detects_raises(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.train, {"1": (3, "second")}, 6, False, {"agree": False})
    assert [(each["error"], each["number"]) for each in ended] == [("NoneType", 5), ("NonFiniteError", 3)]


def test_what_a_backward_made_bad_is_raised_by_all_before_the_next_forward(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.train, {"1": (2, "gradient")}, 6, True, {"gradients": True})
    assert [(each["error"], each["batch"], each["number"]) for each in ended] == [("NonFiniteError", 2, 3)] * 2
    # The weights' gradients of the other rank are bad, too, by the reduction, but later in the order of execution.
    assert [each["rank"] for each in ended] == [1, 1]
    assert [each["verdict"] for each in ended] == [["second", "grad output"]] * 2


def test_what_the_last_backward_made_bad_is_raised_where_the_monitor_is_asked(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.train, {"1": (2, "gradient")}, 3, False, {"gradients": True})
    assert [each["error"] for each in ended] == ["NoneType", "NonFiniteError"]


def test_ranks_meet_in_the_batches_that_are_watched_alone(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.train, {"0": (3, "second")}, 9, False, {"every_n": 2})
    assert [(each["error"], each["batch"]) for each in ended] == [("NonFiniteError", 4)] * 2


def test_ranks_may_be_stepped(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.train, {"0": (3, "first")}, 6, False, {"batch_ends": "step"}, True)
    assert [(each["error"], each["batch"], each["number"]) for each in ended] == [("NonFiniteError", 3, 3)] * 2


def test_the_last_batch_is_judged_before_the_run_is_stopped_after_it(ranks: RankServer) -> None:
    assert [each["error"] for each in ranks.run(scenarios.limit, 2, 2)] == ["NonFiniteError"] * 2
    assert [each["error"] for each in ranks.run(scenarios.limit, 9, 2)] == ["BatchLimitReached"] * 2


def test_only_the_ranks_of_the_group_raise(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.in_groups, 3, size=4)
    assert [each["error"] for each in ended] == ["NoneType"] * 2 + ["NonFiniteError"] * 2
    assert [each["batches"] for each in ended] == [4, 4, 3, 3]
    assert first_line(ended[2]).startswith(f"overflowstat: rank 3 of 4 ({HOST}, cpu): nan in batch 2")


def test_a_rank_that_is_not_of_the_group_is_told(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.not_in_the_group)
    assert [each["error"] for each in ended] == ["NoneType", "TypeError"]
    assert ended[1]["text"].endswith("must be a group of torch.distributed that this process is in")


def test_a_rank_whose_forward_raises_is_not_waited_for(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.train, {"1": (2, "raises")}, 6, False)
    assert [each["error"] for each in ended] == ["AgreementError", "KeyError"]
    assert ended[0]["text"] == f"rank 1 of 2 ({HOST}, cpu) has left batch 2 by KeyError: 'lost'"
    assert ended[1]["text"].startswith("'lost'")
    assert ended[1]["non_finite"]["error"] == "NoneType"


def test_what_a_rank_found_before_its_forward_raised_is_what_the_others_are_told(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.bad_and_raises)
    assert [each["error"] for each in ended] == ["NonFiniteError", "KeyError"]
    assert ended[1]["non_finite"]["text"] == ended[0]["text"]
    assert ended[0]["verdict"] == ["first", "input[0]"]


@pytest.mark.parametrize("what", ["exits", "is stopped"])
def test_a_rank_that_falls_silent_is_named_within_the_time_that_is_given(ranks: RankServer, what: str) -> None:
    ended = ranks.run(scenarios.train, {"1": (2, what)}, 6, False, {"agree": 3}, missing=1, seconds=10)
    assert ended[0]["error"] == "AgreementError"
    assert ended[0]["text"] == (
        f"the ranks did not end the batch together: rank 1 [{HOST}] did not come within 3 s. A rank has died, hangs, "
        "or runs fewer batches; where one is only slow, agree=30 waits as many seconds"
    )


def test_a_rank_that_runs_fewer_batches_is_named_at_once(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.train, {}, [4, 3, 4], False, size=3)
    assert [each["error"] for each in ended] == ["AgreementError", "NoneType", "AgreementError"]
    assert ended[0]["text"] == f"rank 1 of 3 ({HOST}, cpu) has left batch 3 by monitor.remove()"


def test_a_rank_that_found_something_raises_it_though_the_others_do_not_come(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.train, {"0": (3, "second")}, [6, 3], False)
    assert [each["error"] for each in ended] == ["NonFiniteError", "NoneType"]
    bad = {"0": (3, "second"), "1": (3, "is stopped")}
    ended = ranks.run(scenarios.train, bad, 6, False, {"agree": 3}, missing=1, seconds=10)
    assert ended[0]["error"] == "NonFiniteError"


@pytest.mark.parametrize(
    ("what", "group", "text"),
    [
        ("destroyed", True, "the process group was destroyed, which agree=True needs until monitor.remove()"),
        ("never formed", False, "agree=True needs a process group: call init_process_group() before the model"),
    ],
)
def test_without_a_group_it_is_told_what_is_missing(ranks: RankServer, what: str, group: bool, text: str) -> None:
    ended = ranks.run(scenarios.end_by, what, group=group)
    assert [(each["error"], each["text"]) for each in ended] == [("AgreementError", text)] * 2


def test_ranks_that_have_formed_their_group_anew_meet_by_that(ranks: RankServer, tmp_path: Path) -> None:
    ended = ranks.run(scenarios.form_anew, True, str(tmp_path / "store"))
    assert [(each["error"], each["batch"], each["rank"]) for each in ended] == [("NonFiniteError", 2, 1)] * 2


def test_a_group_that_was_given_and_is_gone_is_told(ranks: RankServer, tmp_path: Path) -> None:
    ended = ranks.run(scenarios.form_anew, False, str(tmp_path / "store"))
    assert [each["error"] for each in ended] == ["AgreementError", "NonFiniteError"]  # which it has found itself
    assert ended[0]["text"] == "the process group of `group=` was destroyed: make a new monitor"


def test_a_store_that_is_gone_is_told(ranks: RankServer) -> None:
    ended = ranks.run(scenarios.end_by_the_end_of_the_store, missing=1, group=False)
    assert ended[0]["error"] == "AgreementError"
    assert ended[0]["text"].startswith("the store of all ranks, which rank 0 or its launcher keeps, does not answer: ")


def test_the_store_does_not_grow_with_the_batches(ranks: RankServer) -> None:
    assert ranks.run(scenarios.keys_left, 20) == [0, 0]


def test_a_process_that_is_alone_raises_at_the_end_of_the_batch(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ran: list[nn.Module] = []
    Monitor(model, recorder=recorder_name, sinks=[], agree=True)
    model[1].register_forward_pre_hook(lambda module, args: ran.append(module))
    with pytest.raises(NonFiniteError, match=r"^overflowstat: nan in batch 0, first in 0 \(Linear\), input\[0\]"):
        model(torch.full((2, 4), float("nan")))
    assert ran == [model[1]]
    model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"agree": "yes"}, TypeError, "agree='yes': must be True, False or seconds, not str"),
        ({"agree": 0}, ValueError, "agree=0: must be True, False or seconds, above 0"),
        ({"agree": float("inf")}, ValueError, "agree=inf: must be True, False or seconds, above 0"),
        ({"agree": True, "check": "step"}, ValueError, 'agree=True: needs check="batch" and on_detect="raise"'),
        ({"agree": 5, "on_detect": "warn"}, ValueError, 'agree=5: needs check="batch" and on_detect="raise"'),
        ({"group": "world"}, TypeError, "group='world': must be a group of torch.distributed"),
    ],
)
def test_arguments_that_make_no_sense_leave_the_model_alone(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        Monitor(model, **options)
    assert not model._forward_hooks


@pytest.mark.parametrize("into", ["file", "pipe"])
def test_reports_of_several_ranks_are_printed_one_after_another(ranks: RankServer, into: str) -> None:
    """A pipe takes 64 KiB at once; each report here is larger."""
    printed: list[str] = []
    folder = ranks.next_folder
    folder.mkdir()
    if into == "pipe":
        os.mkfifo(folder / "output")
        reader = threading.Thread(target=lambda: printed.append((folder / "output").read_text()))
        reader.start()
    ranks.run(scenarios.report_much, 1500, size=4)
    if into == "pipe":
        reader.join()
    else:
        printed.append(ranks.output())
    assert len(printed[0]) > 4 * (1 << 16)
    seen = re.findall(r"of_rank_(\d)_", printed[0])
    runs = [r for r, before in zip(seen, [None, *seen[:-1]], strict=True) if r != before]
    assert sorted(runs) == ["0", "1", "2", "3"]
    assert printed[0].count("Detected inf/nan during batch_number=0") == 4


@pytest.mark.parametrize(("traces_of", "printed"), [(0, ["0"]), (2, ["2"]), (None, ["0", "1", "2"])])
def test_traces_are_those_of_one_rank(ranks: RankServer, traces_of: int | None, printed: list[str]) -> None:
    ranks.run(scenarios.trace, traces_of, size=3)
    assert sorted(re.findall(r"of_rank_(\d) Identity", ranks.output())) == printed
