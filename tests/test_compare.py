"""Two traces side by side: which calls are compared, where they part, and what the command says and returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from traces import frame, numbers, write

from overflowstat import Monitor, TensorStats, Trace, TraceError, cli, load_trace
from overflowstat.compare import By, compare
from overflowstat.frames import Frame
from overflowstat.recorder import RecorderName


def made(path: Path, frames: list[Frame], root: str | None = "Model") -> Trace:
    return load_trace(write(path, frames, root))


def model_calls(batch: int, scale: float = 1.0, from_layer: int = 2) -> list[Frame]:
    """Four layers, whose outputs are `scale` times as large from one of them on."""
    factors = [scale if layer >= from_layer else 1.0 for layer in range(4)]
    return [
        frame(batch, f"layer.{i}", {"weight": numbers(0.01, 0.5), "output": numbers(0.1 * f, 2.0 * f)})
        for i, f in enumerate(factors)
    ]


def test_the_same_does_not_part(tmp_path: Path) -> None:
    a = made(tmp_path / "a", model_calls(0) + model_calls(1))
    found = compare(a, a, tolerance=1.0, by="both")
    assert (found.first, found.parted, found.calls, found.lines) == (None, 0, 8, 16)
    assert found.batches == [(0, 0), (1, 1)] and found.largest(10) == []


def test_the_first_place_is_the_first_that_ran_and_the_largest_ratios_are_sorted(tmp_path: Path) -> None:
    calls = model_calls(0, 3.0)
    calls[3] = frame(0, "layer.3", {"weight": numbers(0.01, 0.6), "output": numbers(0.1, 10.0)})
    found = compare(made(tmp_path / "a", model_calls(0)), made(tmp_path / "b", calls))
    assert found.first is not None and found.before_first is not None
    assert found.first.place == ("layer.2", "forward", 0, "output") and found.first.ratio_max == 3.0
    assert found.before_first.ratio("max") == 1.0
    assert [(each.place.module, each.ratio("max")) for each in found.largest(10)] == [
        ("layer.3", 5.0),
        ("layer.2", 3.0),
        ("layer.3", pytest.approx(1.2)),
    ]
    assert [each.ratio_max for each in found.largest(1)] == [5.0]
    assert found.parted == 2


@pytest.mark.parametrize(("scale", "tolerance", "parts"), [(2.0, 2.0, False), (2.5, 2.0, True), (0.4, 2.0, True)])
def test_the_tolerance_is_a_ratio_either_way(tmp_path: Path, scale: float, tolerance: float, parts: bool) -> None:
    a, b = made(tmp_path / "a", model_calls(0)), made(tmp_path / "b", model_calls(0, scale))
    assert (compare(a, b, tolerance=tolerance).first is not None) is parts
    assert (compare(b, a, tolerance=tolerance).first is not None) is parts


@pytest.mark.parametrize(("by", "ratio"), [("max", 2.0), ("min", 8.0), ("both", 8.0)])
def test_which_magnitude_is_held_against_the_tolerance(tmp_path: Path, by: By, ratio: float) -> None:
    a = made(tmp_path / "a", [frame(0, "m", {"output": numbers(0.5, 2.0)})])
    b = made(tmp_path / "b", [frame(0, "m", {"output": numbers(0.0625, 4.0)})])
    assert [each.ratio(by) for each in compare(a, b, by=by).largest(5)] == [ratio]
    assert (compare(a, b, by=by, tolerance=3.0).first is None) == (by == "max")


NAN, INF = float("nan"), float("inf")
ALL_INF = TensorStats(INF, INF, NAN, 0, 4, 0, (0,), 4, torch.float32, (4,))
ALL_NAN = TensorStats(NAN, NAN, NAN, 4, 0, 0, (0,), 4, torch.float32, (4,))
STATES: dict[str, tuple[TensorStats, TensorStats, float]] = {
    "inf against finite": (numbers(0.5, 2.0, posinf=1), numbers(0.5, 2.0), INF),
    "-inf against +inf": (numbers(0.5, 2.0, neginf=1), numbers(0.5, 2.0, posinf=1), INF),
    "nan against finite": (numbers(0.5, 2.0, nan=16), numbers(0.5, 2.0), INF),
    "nan in both, of another count": (numbers(0.5, 2.0, nan=1), numbers(0.5, 2.0, nan=7), 1.0),
    "inf in both, finite ones larger": (numbers(0.5, 2.0, posinf=1), numbers(0.5, 8.0, posinf=1), 4.0),
    "all inf in both": (ALL_INF, ALL_INF, 1.0),
    "all nan in both": (ALL_NAN, ALL_NAN, 1.0),
    "all nan against all inf": (ALL_NAN, ALL_INF, INF),
    "zero in both": (numbers(0.0, 0.0), numbers(0.0, 0.0), 1.0),
    "zero against a subnormal": (numbers(0.0, 0.0), numbers(0.0, 5e-324), INF),
    "a subnormal against the largest": (numbers(0.0, 5e-324), numbers(0.0, 1e308), INF),
    "two dtypes": (numbers(0.5, 2.0, dtype=torch.float16), numbers(0.5, 2.0), 1.0),
    "large integers": (
        TensorStats(0, 2**63, 2**63, 0, 0, 0, None, 4, torch.int64, (4,)),
        TensorStats(0, 2**62, 2**62, 0, 0, 0, None, 4, torch.int64, (4,)),
        2.0,
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_the_ratio_of_any_two_states(tmp_path: Path, name: str) -> None:
    first, second, ratio = STATES[name]
    a, b = made(tmp_path / "a", [frame(0, "m", {"x": first})]), made(tmp_path / "b", [frame(0, "m", {"x": second})])
    for found in (compare(a, b, tolerance=1.5), compare(b, a, tolerance=1.5)):
        assert (found.first is not None) == (ratio > 1.5)
        assert [each.ratio("max") for each in found.largest(9)] == ([ratio] if ratio > 1 else [])


# which calls are the same


def test_calls_are_matched_by_module_kind_and_order_whatever_the_order_of_others(tmp_path: Path) -> None:
    def call(module: str, high: float, **options: Any) -> Frame:
        return frame(0, module, {"output": numbers(0.0, high)}, **options)

    gradient = frame(0, "x", {"grad output": numbers(0.0, 7.0)})
    a = [call("x", 1.0), call("y", 3.0), call("x", 2.0), call("x", 5.0, is_recompute=True), gradient]
    b = [gradient, call("x", 5.0, is_recompute=True), call("x", 1.0), call("x", 2.0), call("y", 3.0)]
    found = compare(made(tmp_path / "a", a), made(tmp_path / "b", b), tolerance=1.0)
    assert (found.first, found.calls, found.lines) == (None, 5, 5)
    swapped = [b[0], b[1], b[3], b[2], b[4]]
    found = compare(made(tmp_path / "a", a), made(tmp_path / "c", swapped), tolerance=1.0)
    assert found.first is not None and found.first.place == ("x", "forward", 0, "output")


def test_what_only_one_has_is_counted_and_does_not_part_them(tmp_path: Path) -> None:
    a = [*model_calls(0), frame(0, "only.a", {"output": numbers(0.0, 1.0)})]
    b = model_calls(0)[1:]
    b[0] = frame(0, "layer.1", {"output": numbers(0.1, 2.0), "input[0]": numbers(0.0, 9.0)})
    b[1] = frame(0, "layer.2", {"weight": "offloaded", "output": TensorStats(NAN, NAN, NAN, 0, 0, 0, None, 0,
                                                                          torch.float32, (0,))})  # fmt: skip
    found = compare(made(tmp_path / "a", a), made(tmp_path / "b", b))
    assert found.first is None and (found.calls, found.lines) == (3, 3)
    assert dict(found.only_in_a.calls) == {"layer.0": 1, "only.a": 1} and not found.only_in_b.calls
    assert dict(found.only_in_a.lines) == {"layer.1": 1, "layer.2": 2}
    assert dict(found.only_in_b.lines) == {"layer.1": 1}


def test_batches_that_both_have_are_compared(tmp_path: Path) -> None:
    a = made(tmp_path / "a", model_calls(0) + model_calls(1) + model_calls(4))
    b = made(tmp_path / "b", model_calls(1) + model_calls(2) + model_calls(4, 9.0))
    found = compare(a, b)
    assert found.batches == [(1, 1), (4, 4)]
    assert found.first is not None and found.first.batches == (4, 4)


def test_batches_that_are_named_are_compared_crosswise(tmp_path: Path) -> None:
    a = made(tmp_path / "a", model_calls(149) + model_calls(150, 8.0))
    found = compare(a, a, batches=[(149, 150)])
    assert found.first is not None and found.first.batches == (149, 150) and found.first.ratio_max == 8.0


def test_a_place_is_once_among_the_largest_with_its_worst_batch(tmp_path: Path) -> None:
    a = made(tmp_path / "a", model_calls(0) + model_calls(1) + model_calls(2))
    b = made(tmp_path / "b", model_calls(0, 3.0, 3) + model_calls(1, 7.0, 3) + model_calls(2, 5.0, 3))
    found = compare(a, b)
    (worst,) = found.largest(9)
    assert (worst.place.module, worst.batches) == ("layer.3", (1, 1))
    assert worst.ratio_max == pytest.approx(7.0)
    assert found.parted == 3


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", model_calls(0), "Bert"), made(tmp_path / "b", model_calls(3))
    with pytest.raises(TraceError, match=r"no batch in common \(batch 0 and batch 3\)"):
        compare(a, b)
    with pytest.raises(TraceError, match="has no batch 5: it has batch 3"):
        compare(a, b, batches=[(0, 5)])
    other = made(tmp_path / "c", [frame(0, "encoder", {"output": numbers(0.0, 1.0)})], "T5")
    with pytest.raises(TraceError, match="no module call in common: they are of Bert and T5"):
        compare(a, other)


@pytest.mark.parametrize(
    ("modules_a", "modules_b", "is_one_model"),
    [
        (["enc", ""], ["dec", ""], False),
        (["enc", "enc.0", ""], ["dec", ""], False),
        (["enc", ""], ["module.enc", "module", ""], False),
        (["enc", ""], ["enc", "dec", ""], True),
        (["enc", ""], ["enc"], True),
        ([""], [""], True),
        (["enc", ""], [""], True),  # a policy may leave out all but the model itself
    ],
)
def test_what_has_nothing_but_a_root_in_common_is_another_model(
    modules_a: list[str], modules_b: list[str], is_one_model: bool, tmp_path: Path
) -> None:
    a, b = (
        made(tmp_path / name, [frame(0, module, {"output": numbers(0.5, 1.0)}) for module in modules], root)
        for name, modules, root in (("a", modules_a, "Bert"), ("b", modules_b, "T5"))
    )
    if is_one_model:
        assert compare(a, b).first is None
    else:
        with pytest.raises(TraceError, match="no module call in common: they are of Bert and T5"):
            compare(a, b)


@pytest.mark.usefixtures("mesh")
def test_a_wrapped_model_against_itself(tmp_path: Path, recorder_name: RecorderName) -> None:
    """The frame of the wrapper is all that the other one lacks."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for name, root in (("plain", model), ("wrapped", DistributedDataParallel(model))):
        with Monitor(root, recorder=recorder_name, trace_file=tmp_path / name, sinks=[]):
            root(torch.ones(2, 4))
    found = compare(load_trace(tmp_path / "plain"), load_trace(tmp_path / "wrapped"), tolerance=1.0)
    assert found.calls == 3 and found.first is None
    assert (sum(found.only_in_a.calls.values()), found.only_in_b.calls) == (0, {"": 1})


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ({"output": "not a tensor"}, {"output": "not a tensor"}),
        ({"output": "meta"}, {"output": numbers(0.5, 1.0)}),
        ({"output": numbers(0.5, 1.0)}, {"output[0]": numbers(0.5, 1.0)}),
    ],
)
def test_nothing_compared_is_not_the_same(of_a: dict[str, Any], of_b: dict[str, Any], tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", [frame(0, "m", of_a)]), made(tmp_path / "b", [frame(0, "m", of_b)])
    with pytest.raises(TraceError, match="no tensor with numbers in common: nothing was compared"):
        compare(a, b)


def test_two_models_are_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Holds(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return next(self.children())(x)  # type: ignore[no-any-return]

    for name in ("enc", "dec"):
        model = Holds(name)
        with Monitor(model, trace_file=tmp_path / name, sinks=[]):
            model(torch.ones(2, 4))
    assert cli.main(["compare", str(tmp_path / "enc"), str(tmp_path / "dec")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "have no module call in common" in err


# the command


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[2](self.layers[1](x) * self.factor)  # type: ignore[no-any-return]


@pytest.fixture
def run(tmp_path: Path, recorder_name: RecorderName) -> str:
    """Of three batches of the same data, of which the last overflows before layers.2."""
    torch.manual_seed(0)
    model, x = Grows(), torch.randn(4, 8)
    path = str(tmp_path / "run.jsonl.gz")
    with Monitor(model, recorder=recorder_name, trace_file=path, sinks=[], on_detect=lambda report: None) as monitor:
        for monitor.model.factor in (1.0, 1.0, 1e39):  # type: ignore[assignment]
            model(x)
    return path


def test_two_batches_of_a_run_part_where_the_bad_one_goes_bad(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", run, "--batches", "1,2"]) == 1
    told = capsys.readouterr().out
    assert "They part first in batches 1 and 2, layers.2 (Linear), input[0]: all finite in a, " in told
    assert "All before it is the same." in told
    assert cli.main(["compare", run, "--batches", "0,1", "--tolerance", "1", "--by", "both"]) == 0
    assert "They do not part: " in capsys.readouterr().out


def test_float16_against_float32(tmp_path: Path, recorder_name: RecorderName) -> None:
    torch.manual_seed(0)
    model, x = Grows(), torch.randn(4, 8)
    paths = []
    for dtype in (torch.float32, torch.float16):
        with Monitor(model.to(dtype), recorder=recorder_name, trace_file=tmp_path / "run.jsonl") as monitor:
            model(x.to(dtype))
        paths.append(str(monitor.trace_file))
    assert cli.main(["compare", *paths]) == 0
    assert cli.main(["compare", *paths, "--tolerance", "1"]) == 1


def test_the_json_has_the_same_facts_and_is_json(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert cli.main(["compare", run, "--batches", "0,2", "--json", "--top", "2"]) == 1
    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert (told["a"], told["b"], told["batches"]) == (run, run, [[0, 2]])
    first = told["first"]
    assert (first["module"], first["label"], first["different_state"]) == ("layers.2", "input[0]", True)
    assert first["b"]["posinf_count"] + first["b"]["neginf_count"] > 0 and first["a"]["posinf_count"] == 0
    assert len(told["largest"]) == 2 and told["only_in_a"] == {"calls": {}, "lines": {}}


EVIL = "\x1b]0;owned\x07\x1b[2J\nroot # \u202egnp.exe\ud800\x9b31m"


def test_names_cannot_obey_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def calls(high: float) -> list[Frame]:
        lost = frame(0, f"{EVIL}.{high}", {"output": numbers(0.0, 1.0)})
        return [frame(0, EVIL, {EVIL: numbers(0.0, high)}, class_name=EVIL), lost]

    a, b = write(tmp_path / f"a{EVIL[:-6]}", calls(1.0), EVIL), write(tmp_path / "b", calls(9.0))
    assert cli.main(["compare", str(a), str(b)]) == 1
    told = capsys.readouterr().out
    assert all(character.isprintable() for character in told.replace("\n", ""))
    assert r"\x1b]0;owned\x07\x1b[2J\nroot # \u202egnp.exe\ud800\x9b31m" in told
    assert cli.main(["compare", str(a), "--batches", "0,9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


def test_what_is_missing_is_told_in_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = [frame(0, f"expert.{i}", {"output": numbers(0.0, 1.0)}) for i in range(30)]
    a, b = write(tmp_path / "a", model_calls(0) + lost), write(tmp_path / "b", model_calls(0))
    assert cli.main(["compare", str(a), str(b)]) == 0
    expected = "Only in a: 30 module calls, of expert.0, expert.1, expert.2, expert.3, expert.4 and 25 more modules"
    assert capsys.readouterr().out.splitlines()[-1] == expected


def test_a_cut_trace_is_compared_and_told_of_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", model_calls(0))
    (tmp_path / "b").write_bytes(a.read_bytes()[:-30])
    assert cli.main(["compare", str(a), str(tmp_path / "b")]) == 0
    told = capsys.readouterr()
    assert "is cut in its last line: the 3 frames before that are read" in told.err
    assert "Only in a: 1 module call, of layer.3" in told.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "required: A"),
        (["A"], "one trace is not enough"),
        (["A", "missing"], "'missing' cannot be read: No such file or directory"),
        (["A", "."], "'.' cannot be read: Is a directory"),
        (["A", "A", "--batch", "7"], "has no batch 7: it has batches 0 to 1"),
        (["A", "--batches", "0,7"], "has no batch 7: it has batches 0 to 1"),
        (["A", "A", "--batch", "-1"], "--batch"),
        (["A", "A", "--batch", "x"], "'x' is not a whole number"),
        (["A", "--batches", "3"], "'3' is not two batches, as 149,150"),
        (["A", "--batches", "0,1", "--batch", "0"], "not allowed with argument"),
        (["A", "A", "--tolerance", "0.5"], "'0.5' is not a ratio, 1 or more"),
        (["A", "A", "--tolerance", "nan"], "'nan' is not a ratio, 1 or more"),
        (["A", "A", "--by", "mean"], "--by"),
        (["A", "A", "--tol", "2"], "unrecognized arguments: --tol"),
        (["A", "A", "A"], "unrecognized arguments: "),
    ],
)
def test_arguments_that_make_no_sense_are_one_line_and_exit_status_2(
    tmp_path: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path / "a", model_calls(0) + model_calls(1)))
    try:
        status: Any = cli.main(["compare", *[path if argument == "A" else argument for argument in arguments]])
    except SystemExit as error:
        status = error.code
    output = capsys.readouterr()
    assert status == 2 and output.out == ""
    (line,) = output.err.splitlines()
    assert told in line and line.startswith("overflowstat")


def test_ratios_near_one_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", [frame(0, "m", {"x": numbers(0.0, 1.0), "y": numbers(0.0, 1.0)})])
    b = write(tmp_path / "b", [frame(0, "m", {"x": numbers(0.0, 1.004), "y": numbers(0.0, 1234.0)})])
    cli.main(["compare", str(a), str(b)])
    table = capsys.readouterr().out.split("Largest ratios")[1]
    assert [line.split()[0] for line in table.splitlines()[2:4]] == ["1.23e+03", "1.004"]
