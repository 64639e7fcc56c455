"""The tensors of checkpoints on disk, one at a time, and nothing else that such files may hold."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .capture import is_tensor
from .errors import CheckpointError

__all__ = ["Stored", "files_of", "stored_tensors"]

SAFETENSORS = ".safetensors"
TORCH = (".bin", ".pt", ".pth", ".ckpt")
INDEX = ".index.json"
DEEPEST = 32  # of structures in a torch file; a checkpoint that holds itself ends, too


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint."""

    file: Path
    name: str
    """Its key; of one deeper in a structure as "optimizer.state[0].exp_avg"."""
    load: Callable[[], Tensor]
    """Reads it, or maps it where that can be; before the next one is asked for."""


def files_of(path: str | os.PathLike[str]) -> list[tuple[Path, frozenset[str]]]:
    """The files that hold the tensors of a checkpoint: a file, the shards of an index, or those of a folder.

    Of each the names of the tensors that an index says are in it. One that several indexes name is there as often.

    Of a folder: what its index names; else its safetensors files; else its torch files. Index files of Hugging Face
    (`*.safetensors.index.json`) name their shards, which must lie in the same folder.

    Raises:
        CheckpointError: there is none, or an index is not what it should be.
    """
    path = Path(path)
    with _told(path):
        if path.is_dir():
            for suffix in (SAFETENSORS, *TORCH):
                if indexes := sorted(path.glob(f"*{suffix}{INDEX}")):
                    return [shard for index in indexes for shard in _shards(index)]
                if files := sorted(each for each in path.glob(f"*{suffix}") if each.is_file()):
                    return [(file, frozenset()) for file in files]
            raise CheckpointError(
                f"{path}: no checkpoint is in this folder: none of *{', *'.join((SAFETENSORS, *TORCH))}"
            )
        if path.name.endswith(INDEX):
            return _shards(path)
        if not path.is_file():
            raise CheckpointError(f"{path}: {'no file to read' if path.exists() else 'no such file or folder'}")
    return [(path, frozenset())]


def _shards(index: Path) -> list[tuple[Path, frozenset[str]]]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted({os.fspath(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of a checkpoint, which maps tensors to files") from error
    for name in names:
        if name != os.path.basename(name) or name in ("", os.curdir, os.pardir) or "\\" in name or "\0" in name:
            raise CheckpointError(f"{index}: names {name!r}, which is not a file beside it; nothing was read")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{index}: {missing[0]}{more} is missing; download the checkpoint again")
    tensors: dict[str, set[str]] = {name: set() for name in names}
    for tensor, name in weight_map.items():
        tensors[name].add(tensor)
    return [(index.parent / name, frozenset(tensors[name])) for name in names]


def stored_tensors(file: Path, expected: Collection[str] = ()) -> Iterator[Stored]:
    """Those of one file, in its order. None of them is read before its `load`, which holds no other.

    Torch files are loaded with `weights_only=True`, so that no code in them runs, and mapped where their format allows
    it (that of torch 1.6 and newer); an older one is read whole.

    Args:
        file: by its suffix one of safetensors, or else of torch.
        expected: names that an index says are in the file. Of safetensors only: a torch file may hold under such a name
            what is no tensor.

    Raises:
        CheckpointError: the file is damaged, holds code, lacks a tensor, or is no checkpoint. Also from `load`.
    """
    with _told(file):
        if file.suffix == SAFETENSORS:
            yield from _of_safetensors(file, expected)
        else:
            yield from (Stored(file, name, tensor.detach) for name, tensor in _of_torch(file))


def _of_safetensors(file: Path, expected: Collection[str]) -> Iterator[Stored]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(f"{file}: reading it needs safetensors: pip install safetensors") from error
    with safe_open(file, framework="pt") as opened:

        def load(name: str) -> Callable[[], Tensor]:
            def read() -> Tensor:
                with _told(file):
                    tensor: Tensor = opened.get_tensor(name)
                    return tensor

            return read

        names = opened.keys()
        if absent := sorted(set(expected).difference(names)):
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise CheckpointError(f"{file}: has no tensor {absent[0]!r}{more}, which its index says is there")
        for name in names:
            yield Stored(file, name, load(name))


def _of_torch(file: Path) -> Iterator[tuple[str, Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old formats and typed storages
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{file}: holds pickled code, which is not run, or is no checkpoint; where it is yours, save the "
                "model's state_dict() and scan that"
            ) from error
    yield from _tensors("", loaded, 0)


def _is_zip(file: Path) -> bool:
    """As torch.save writes it, and can map it, since 1.6."""
    with file.open("rb") as opened:
        return opened.read(4) == b"PK\x03\x04"


def _tensors(name: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if is_tensor(value):
        yield name or "the tensor", value
    elif depth < DEEPEST and isinstance(value, Mapping):
        for key, item in value.items():
            inner = str(key) if isinstance(key, str) else f"[{key}]"
            yield from _tensors(f"{name}.{inner}" if name and isinstance(key, str) else name + inner, item, depth + 1)
    elif depth < DEEPEST and isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item, depth + 1)


@contextmanager
def _told(file: Path) -> Iterator[None]:
    """What libraries raise of a file is one line, and names it."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from error
    except Exception as error:
        raise CheckpointError(f"{file}: damaged, cut short, or no checkpoint ({_in_short(error)})") from error


def _in_short(error: Exception) -> str:
    """Without the advice that torch gives, to load the file with the code in it."""
    first = str(error).partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
