"""What docs/compiled.md shows is what happens. It reads with the recorder that is built."""

from pathlib import Path

import pytest
from documents import code
from running import python, write

FILE = "docs/compiled.md"


def test_every_example_is_run_here() -> None:
    assert len(code(FILE, "python")) == 3


def test_a_compiled_model_is_watched_where_it_runs_eagerly_after_all(tmp_path: Path) -> None:
    _, eagerly, _ = code(FILE, "python")
    given = "import torch\nfrom overflowstat import Monitor\nmodel = torch.nn.ReLU()\nx = torch.tensor(torch.inf)\n"
    write(tmp_path, "example.py", given + eagerly)
    ended = python(tmp_path, "example.py")
    assert "first in the model itself (ReLU), input[0]: 1 of 1 is +inf" in ended.output
    assert "NonFiniteError" in ended.errors and ended.status != 0


@pytest.mark.slow
@pytest.mark.parametrize("is_watched_in_part", [False, True])
def test_the_example_names_the_module_also_where_it_is_excluded(tmp_path: Path, is_watched_in_part: bool) -> None:
    first, _, some_layers = code(FILE, "python")
    if is_watched_in_part:
        imports, watch = some_layers.rsplit("\n\n", 1)
        first = imports + "\n" + first.replace("Monitor(model)", watch.strip())
    write(tmp_path, "example.py", first)
    ended = python(tmp_path, "example.py")
    assert ended.status == 0, ended.errors
    reported, _, module = ended.output.rstrip("\n").rpartition("\n")
    first_bad = "the model itself (Sequential), output: " if is_watched_in_part else "2 (Linear), output: some of 32"
    assert f"inf in batch 0, first in {first_bad}" in reported
    assert module == "2", "which the verdict finds in any case"
