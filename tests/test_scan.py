"""Checkpoints on disk: what is bad in them, what a narrower format loses, and files that are not what they seem."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from overflowstat.checkpoint import files_of, stored_tensors
from overflowstat.cli import main
from overflowstat.commands import scan as command
from overflowstat.errors import CheckpointError
from overflowstat.narrowing import FORMATS
from overflowstat.scan import scan

NAN, INF = math.nan, math.inf


def save_new(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path)


def save_old(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


SAVED: dict[str, tuple[str, Callable[[dict[str, Tensor], Path], object]]] = {
    "safetensors": ("model.safetensors", save_file),
    "torch": ("model.pt", save_new),
    "torch before 1.6": ("pytorch_model.bin", save_old),
}


@pytest.mark.parametrize("kind", SAVED)
def test_all_tensors_of_a_file_are_read(kind: str, tmp_path: Path) -> None:
    name, save = SAVED[kind]
    tensors = {
        "a": torch.tensor([[1.0, NAN], [-INF, 7e4]]),
        "b": torch.tensor([1.0, INF, INF], dtype=torch.bfloat16),
        "ids": torch.arange(3),
        "none": torch.zeros(0, 4),
    }
    save(tensors, tmp_path / name)
    result = scan([tmp_path])
    assert {tensor.name: tensor.found for tensor in result.tensors} == {
        "a": {"nan": 1, "inf": 1, "fp16-overflow": 1, "fp8_e4m3-overflow": 1, "fp8_e5m2-overflow": 1},
        "b": {"inf": 2},
        "ids": {},
        "none": {},
    }
    assert result.bytes == 4 * 4 + 3 * 2 + 3 * 8 and result.elements == 10
    assert result.total("inf") == (2, 3) and result.total("fp16-flush") == (0, 0)


def test_what_is_deep_in_a_torch_file_is_named_by_its_path(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "step.ckpt")
    names = [stored.name for stored in stored_tensors(tmp_path / "step.ckpt")]
    assert names[:2] == ["model.weight", "model.bias"]
    assert "optimizer.state[0].exp_avg" in names and "optimizer.state[1].exp_avg_sq" in names


def test_a_sharded_checkpoint_is_read_by_its_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1-of-2.safetensors")
    save_file({"b": torch.tensor([NAN])}, tmp_path / "model-2-of-2.safetensors")
    save_file({"other": torch.ones(2)}, tmp_path / "adapter.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}))
    for path in (tmp_path, index):
        assert [tensor.name for tensor in scan([path]).tensors] == ["a", "b"]
    assert [tensor.name for tensor in scan([index, tmp_path, tmp_path / "model-1-of-2.safetensors"]).tensors] == [
        "a",
        "b",
    ]
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2-of-2\.safetensors is missing"):
        scan([index])


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "a\0b", 3]
)
def test_an_index_names_files_of_its_folder_only(name: object, tmp_path: Path) -> None:
    save_file({"secret": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"index\.json: (names|not an index)"):
        files_of(folder)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_an_index_names_tensors_that_are_there(suffix: str, tmp_path: Path) -> None:
    save = save_file if suffix == ".safetensors" else save_new
    save({"a": torch.ones(2)}, tmp_path / f"m-1{suffix}")
    save({"b": torch.ones(2), "more": torch.ones(2)}, tmp_path / f"m-2{suffix}")
    index = tmp_path / f"m{suffix}.index.json"
    places = {"a": f"m-1{suffix}", "b": f"m-2{suffix}"}
    index.write_text(json.dumps({"weight_map": places}))
    assert [tensor.name for tensor in scan([index]).tensors] == ["a", "b", "more"]
    for lost, told in (
        ({"c": f"m-2{suffix}"}, "'c', which"),
        ({"c": f"m-2{suffix}", "a": f"m-2{suffix}"}, "'a' and 1 more, which"),
    ):
        index.write_text(json.dumps({"weight_map": places | lost}))
        if suffix == ".bin":  # whose entries may be no tensors
            assert len(scan([index]).tensors) >= 2
            continue
        for paths in ([index], [tmp_path / f"m-2{suffix}", tmp_path]):
            with pytest.raises(CheckpointError, match=f"m-2.safetensors: has no tensor {told} its index says"):
                scan(paths)


@pytest.mark.parametrize("kind", ["index", "safetensors", "torch", "numbers"])
def test_a_checkpoint_without_any_tensor_is_not_well(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "index":
        path = tmp_path / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": {}}))
    elif kind == "safetensors":
        path = tmp_path / "x.safetensors"
        save_file({}, path)
    else:
        path = tmp_path / "x.pt"
        torch.save({} if kind == "torch" else {"epoch": 3, "losses": [0.5, NAN]}, path)
    assert main(["scan", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"overflowstat scan: {path}: no tensor is in it, so nothing was judged\n"
    save_file({"a": torch.ones(1)}, tmp_path / "good.safetensors")
    assert main(["scan", str(path), str(tmp_path / "good.safetensors")]) == 0


def test_tensors_are_loaded_when_they_are_asked_for(tmp_path: Path) -> None:
    save_file({str(i): torch.full((4,), float(i)) for i in range(3)}, tmp_path / "x.safetensors")
    stored = stored_tensors(tmp_path / "x.safetensors")
    assert {each.name: each.load().tolist() for each in stored} == {"0": [0.0] * 4, "1": [1.0] * 4, "2": [2.0] * 4}


class Code:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


def broken(kind: str, folder: Path) -> Path:
    whole = folder / "whole.safetensors"
    save_file({"a": torch.ones(1000)}, whole)
    torch.save({"a": torch.ones(1000)}, folder / "whole.pt")
    path = folder / ("x.pt" if "torch" in kind or kind in ("code", "script", "empty") else "x.safetensors")
    if kind == "code":
        torch.save({"a": Code(folder / "ran")}, path)
    elif kind == "script":
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    elif kind == "text":
        path.write_text("hello, this is no checkpoint at all")
    elif kind == "empty":
        path.touch()
    elif kind == "a folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes((folder / f"whole{path.suffix}").read_bytes()[: 40 if "header" in kind else 1500])
    return path


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "kind",
    [
        "code",
        "script",
        "text",
        "empty",
        "missing",
        "a folder",
        "cut",
        "cut in its header",
        "cut torch",
        "header of torch",
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_and_status_2(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = broken(kind, tmp_path)
    assert main(["scan", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(path) in err
    assert not (tmp_path / "ran").exists()


def run(*arguments: str) -> int:
    return main(["scan", *arguments])


@pytest.mark.parametrize(
    ("fail_on", "status"),
    [
        (None, 0),
        ("none", 0),
        ("fp16-overflow", 1),
        ("nan,fp8-overflow", 1),
        ("fp8_e5m2-overflow", 1),
        ("bf16-overflow", 0),
        ("fp16-flush", 1),
    ],
)
def test_the_status_is_1_where_there_is_what_is_named(
    fail_on: str | None, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"large": torch.tensor([1e5]), "small": torch.tensor([1e-9, 1.0])}, tmp_path / "x.safetensors")
    arguments = [] if fail_on is None else ["--fail-on", fail_on]
    assert run(str(tmp_path), *arguments) == status
    assert run(str(tmp_path), "--formats", "none", *arguments) == status  # what is named is judged in any case
    out = capsys.readouterr().out
    assert "\nlarge: float32, shape [1]; abs max 1e+05; fp16-overflow 1" in out
    assert ("\nsmall: " in out) == (fail_on == "fp16-flush")


def test_nan_and_inf_fail_by_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in (NAN, INF, -INF):
        save_file({"x": torch.tensor([value])}, tmp_path / "x.safetensors")
        assert run(str(tmp_path)) == 1
    assert "x: 1 of 1 is -inf, first at [0]" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--fail-on", "nam"], ["--formats", "fp4"], ["--top", "-1"], []])
def test_arguments_that_make_no_sense_are_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(*arguments, *(["x"] if arguments else []))
    assert left.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_the_list_is_short_unless_all_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({f"t{i}": torch.tensor([NAN]) for i in range(5)} | {"good": torch.ones(1)}, tmp_path / "x.safetensors")
    run(str(tmp_path), "--top", "2")
    out = capsys.readouterr().out
    assert "and 3 more" in out and "good" not in out and out.count("is nan") == 2
    run(str(tmp_path), "--all")
    out = capsys.readouterr().out
    assert "good: float32" in out and out.count("is nan") == 5


def test_names_never_reach_the_terminal_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a\n\x1b[31m\u202e": torch.tensor([NAN])}, tmp_path / "x.safetensors")
    run(str(tmp_path))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\u202e" not in out and "a\\n\\x1b[31m\\u202e: 1 of 1 is nan" in out


def test_one_of_each_is_one_and_sizes_have_their_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    run(str(tmp_path))
    assert capsys.readouterr().out.startswith("1 tensor of 1 file, 1 number, 4 B: float32\n")
    torch.save({"a": torch.zeros(1).expand(10**12), "b": torch.ones(2)}, tmp_path / "large.pt")
    run(str(tmp_path / "large.pt"))
    assert capsys.readouterr().out.startswith("2 tensors of 1 file, 1000000000002 numbers, 4 TB: float32\n")


def test_json_is_valid_and_has_every_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(
        {"a": torch.tensor([NAN, 1e5]), "b": torch.zeros(0), "c": torch.tensor([INF])}, tmp_path / "x.safetensors"
    )
    assert run(str(tmp_path), "--json", "--fail-on", "fp16-overflow") == 1

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows["a"]["finite_abs_max"] == 1e5 and rows["a"]["fp16"] == {"overflows": 1, "flushed": 0}
    assert rows["b"]["abs_min"] is None and rows["c"]["finite_abs_max"] is None and rows["c"]["posinf_count"] == 1
    assert found["failed_on"] == ["fp16-overflow"] and found["total"]["nan"] == {"tensors": 1, "elements": 1}


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"s": torch.ones(2, 2).to_sparse(), "w": torch.ones(2)}, tmp_path / "x.pt")
    assert run(str(tmp_path)) == 0
    assert "not read: s (sparse_coo)" in capsys.readouterr().out


def test_the_command_knows_all_formats() -> None:
    assert tuple(FORMATS) == command.FORMATS
