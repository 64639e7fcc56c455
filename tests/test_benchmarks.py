"""The parts of the benchmarks that can be wrong without being slow: the arithmetic of their figures, what they read."""

import functools
import itertools

import llama
import overhead
import pytest
import tables
import torch
from bandwidth import Comparison, verdict
from measure import FEWEST_ROUNDS, Ratio, Timing, interleaved
from readers import ColdMemory, Compiler, Readers, fused

from overflowstat import tensor_stats

LLAMA_2_7B = 6_738_415_616  # parameters, as its authors count them


def test_a_ratio_is_that_of_the_rounds_and_so_is_its_spread() -> None:
    mine, its = Timing({1: 2.0, 2: 4.0, 4: 9.0}), Timing({1: 1.0, 2: 4.0, 3: 100.0, 4: 3.0})
    ratio = mine.ratio(its)
    # Quotients 2, 1, 3: the 10th percentile of three values lies a fifth of the way from the first to the second.
    assert (ratio.median, ratio.p10, ratio.p90) == pytest.approx((2.0, 1.2, 2.8))


def test_one_round_has_no_spread() -> None:
    assert Timing({1: 3.0}).ratio(Timing({1: 2.0})) == Ratio(1.5, 1.5, 1.5)


def three_rounds(seconds: float) -> Timing:
    return Timing(dict.fromkeys(range(3), seconds))


@pytest.fixture
def comparison() -> Comparison:
    timings = {
        "sum": three_rounds(0.2),
        "sum_int32": three_rounds(0.1),
        "native": three_rounds(0.125),
    }
    return Comparison(timings, 10**9, {"sum", "sum_int32", "foreach_norm"})


def test_the_best_is_the_fastest_that_only_reads(comparison: Comparison) -> None:
    comparison.timings["native"] = three_rounds(0.01)
    assert comparison.best == "sum_int32"


def test_bandwidth_and_ratios_to_both_bases(comparison: Comparison) -> None:
    assert comparison.gigabytes_per_second("native") == pytest.approx(8.0)
    figures = comparison.as_json()
    assert figures["ratio_to_best"]["native"]["median"] == pytest.approx(1.25)
    assert figures["ratio_to_sum"]["native"]["median"] == pytest.approx(0.625)


@pytest.mark.parametrize(("target", "met"), [(0.8, True), (0.81, False)])
def test_a_target_is_a_fraction_of_the_bests_bandwidth(comparison: Comparison, target: float, met: bool) -> None:
    found = verdict(comparison, "native", target)
    assert found["reached"]["median"] == pytest.approx(0.8)
    assert (found["fraction_of_best"], found["met"]) == (target, met)


def test_who_could_not_run_has_missed_the_target(comparison: Comparison) -> None:
    del comparison.timings["native"]
    assert verdict(comparison, "native", 0.9) == {"fraction_of_best": 0.9, "reached": None, "met": False}


def test_contenders_take_turns_and_the_first_round_is_not_kept() -> None:
    order: list[str] = []
    contenders = {name: functools.partial(order.append, name) for name in "abc"}
    timings = interleaved(contenders, 3, "cpu", prepare=lambda name: order.append(f"before {name}"))
    ran = [name for name in order if len(name) == 1]
    assert [sorted(ran[i : i + 3]) for i in (0, 3, 6, 9)] == [["a", "b", "c"]] * 4 and ran != [*"abc"] * 4
    assert order[::2] == [f"before {name}" for name in order[1::2]]
    assert [list(timing.rounds) for timing in timings.values()] == [[1, 2, 3]] * 3


def test_slow_ones_are_timed_now_and_then() -> None:
    timings = interleaved({"a": lambda: None, "slow": lambda: None}, 9, "cpu", rare=["slow"])
    assert list(timings["a"].rounds) == [*range(1, 10)] and list(timings["slow"].rounds) == [1, 4, 8]


def test_rounds_end_with_the_time_for_them_but_not_before_there_are_some() -> None:
    timings = interleaved({"a": lambda: None}, 1000, "cpu", budget=0.0)
    assert len(timings["a"].rounds) == FEWEST_ROUNDS


def test_each_way_to_watch_has_its_hooks_only_while_it_is_timed() -> None:
    model = torch.nn.Sequential(torch.nn.ReLU())
    calls: list[str] = []
    kept = {}
    for name in ("first", "second"):
        model[0].register_forward_hook(lambda *_, name=name: calls.append(name))
        kept[name] = overhead.exchange_hooks(model)
    model(torch.ones(1))
    assert calls == []
    for name in ("second", "first", "second"):
        overhead.exchange_hooks(model, kept[name])
        model(torch.ones(1))
    assert calls == ["second", "first", "second"]


def test_no_part_of_cold_memory_is_read_twice_in_a_row_by_whoever_asks() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    cold = ColdMemory(memory, 16)
    words, halves = cold.views(torch.int64), cold.views(torch.int16)
    offsets = [next(each).storage_offset() * each_size for each, each_size in [(words, 8), (halves, 2)] * 3]
    assert offsets == [0, 16, 32, 48, 0, 16]


def test_the_weights_are_those_of_llama_2_7b_at_its_width() -> None:
    assert len(llama.shapes(4096)) == 291
    assert llama.bytes_of(4096) == 2 * LLAMA_2_7B
    assert llama.widest(13000 << 20) == 4096


@pytest.mark.parametrize("size", [llama.bytes_of(128), llama.bytes_of(256) - 1, llama.bytes_of(256), 512 << 20])
def test_the_weights_are_the_widest_that_fit(size: int) -> None:
    width = llama.widest(size)
    assert llama.bytes_of(width) <= size < llama.bytes_of(width + llama.WIDTH_STEP)


def test_too_little_memory_for_any_weights() -> None:
    with pytest.raises(ValueError, match="the smallest list of weights takes"):
        llama.widest(llama.bytes_of(128) - 1)


def test_the_weights_cover_their_memory_once_and_are_aligned() -> None:
    memory = torch.zeros(llama.bytes_of(128), dtype=torch.uint8)
    tensors = llama.views(memory, 128)
    assert [tuple(t.shape) for t in tensors] == llama.shapes(128)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors)
    assert all(t.is_contiguous() for t in tensors)
    assert spans[0][0] == memory.data_ptr() and spans[-1][1] == memory.data_ptr() + memory.numel()
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all((start - memory.data_ptr()) % 256 == 0 for start, _ in spans)


def test_what_fails_is_left_out_with_its_reason() -> None:
    readers = Readers("cpu")
    readers.add("sum", lambda: None)
    readers.add("torch", lambda: torch.ones(1, dtype=torch.float8_e4m3fn).min())
    assert list(readers.calls) == list(readers.launches) == ["sum"]
    assert list(readers.left_out) == ["torch"] and "not implemented" in readers.left_out["torch"]


def test_nothing_is_compiled_when_the_time_for_it_is_over() -> None:
    with pytest.raises(RuntimeError, match="no time left"):
        Compiler(0.0).fused_for(torch.ones(3))


def test_the_function_that_is_compiled_asks_what_the_reference_asks() -> None:
    x = torch.tensor([3.0, -0.5, -7.0, 1.0])
    low, high, nan, inf = fused(x)
    stats = tensor_stats(x, recorder="torch")
    assert (low.item(), high.item()) == (stats.abs_min, stats.abs_max) == (0.5, 7.0)
    assert not nan and not inf
    assert [bool(flag) for flag in fused(torch.tensor([float("nan"), float("-inf")]))[2:]] == [True, True]


def test_a_table_goes_between_its_marks_and_nowhere_else() -> None:
    text = "before\n<!-- a -->\nold\n<!-- /a -->\n<!-- b -->\nkept\n<!-- /b -->\nafter\n"
    new = tables.replace(text, "a", "first\nsecond")
    assert new == text.replace("old", "first\nsecond")
    assert tables.replace(new, "a", "old") == text


@pytest.mark.parametrize("text", ["", "<!-- a -->\n", "<!-- a -->\nx\n<!-- /a -->\n<!-- a -->\ny\n<!-- /a -->\n"])
def test_a_table_without_a_place_of_its_own_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no place, or several, for a"):
        tables.replace(text, "a", "x")


def test_the_readme_has_a_place_for_each_table() -> None:
    text = tables.README.read_text()
    for name in ("kernel", "overhead"):
        assert f"<!-- {name} -->\nx\n<!-- /{name} -->" in tables.replace(text, name, "x")
