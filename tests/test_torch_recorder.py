"""What the plain-torch recorder promises of its cost: no host sync a tensor, and no copy of a large one."""

import subprocess
import sys

import pytest
import torch
from expected_rows import expected_row
from torch.utils._python_dispatch import TorchDispatchMode

from overflowstat import tensor_stats, torch_recorder
from overflowstat.recorder import make_recorder


class CountsFetches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would wait for an accelerator: values read one by one, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fetches: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            self.fetches.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_recorder, "_results_are_at_hand", lambda device: False)


MIXED = [
    torch.tensor([1.0, float("nan"), -float("inf")], dtype=torch.float16),
    torch.arange(200_000, dtype=torch.float32),
    torch.arange(10).view(2, 5).mT,
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, complex(float("inf"), 0)]),
    torch.ones(3, 1).expand(3, 4),
    torch.tensor([3, 2**64 - 1], dtype=torch.uint64),
]


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_a_list_is_fetched_at_once_and_nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[torch.Size] = []
    tolist = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> list[object]:
        fetched.append(self.shape)
        values: list[object] = tolist(self)
        return values

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    with CountsFetches() as mode:
        tensor_stats(MIXED, recorder=make_recorder("torch"))
    assert mode.fetches == [] and len(fetched) == 1


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_rows_are_the_same_where_results_are_not_at_hand() -> None:
    for stats, tensor in zip(tensor_stats(MIXED, recorder=make_recorder("torch")), MIXED, strict=True):
        expected = expected_row(tensor)
        assert {field: getattr(stats, field) for field in expected} == expected


def test_fetches_are_counted_at_all() -> None:
    with CountsFetches() as mode:
        MIXED[0].isnan().any().item()
    assert len(mode.fetches) == 1


@pytest.mark.parametrize("layout", ["", ".mT", "[:, ::2]"], ids=["dense", "transposed", "strided"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_extra_memory_is_small_for_a_large_tensor(recorder_name: str, dtype: str, layout: str) -> None:
    """In a process of its own, whose peak of resident memory is then what the reading added to the tensor."""
    megabytes = 256
    script = f"""
import resource, torch
from overflowstat import tensor_stats
from overflowstat.recorder import make_recorder
recorder = make_recorder({recorder_name!r})
torch.set_num_threads(1)
x = torch.ones({megabytes << 10}, 1024 // torch.{dtype}.itemsize, dtype=torch.{dtype}){layout}
tensor_stats(x[:100], recorder=recorder)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
assert tensor_stats(x, recorder=recorder).abs_max == 1
print((peak() - before) / 1024)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(run.stdout) < megabytes / 16


@pytest.mark.parametrize("threads", [1, 2])
def test_a_gigabyte_is_read_with_less_than_4_megabytes_more(threads: int) -> None:
    """By the native pass, on the CPU; in a process of its own, as above."""
    script = f"""
import resource, torch
from overflowstat import tensor_stats
torch.set_num_threads({threads})
x = torch.ones(1 << 18, 1 << 10)
tensor_stats(x[:1000], recorder="native")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
assert tensor_stats(x, recorder="native").numel == 1 << 28
print((peak() - before) / 1024)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 4
