"""Tensors and models on a CUDA device. Run by `pytest -m cuda` where there is one; skipped elsewhere."""

import numpy as np
import pytest
import torch
from device_on_cpu import DTYPES
from expected_rows import expected_row
from on_cuda import requires_cuda
from special_tensors import strided_views, with_bad
from torch import Tensor, nn

from overflowstat import DebugUnderflowOverflow, NonFiniteError, tensor_stats
from overflowstat.recorder import NativeRecorder, Recorder, RecorderName, make_recorder

pytestmark = [pytest.mark.cuda, requires_cuda]


def check(recorder: Recorder, tensors: list[Tensor]) -> None:
    """The row of each tensor on the device is that of the same elements on the CPU, strides and all."""
    on_device = [on_cuda(t) for t in tensors]
    for stats, tensor in zip(tensor_stats(on_device, recorder=recorder), tensors, strict=True):
        for field, value in expected_row(tensor).items():
            assert str(getattr(stats, field)) == str(value), (field, tensor.dtype, tensor.shape, tensor.stride())


def on_cuda(tensor: Tensor) -> Tensor:
    """The same view of the same memory there: `.cuda()` alone would make it dense."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def test_the_extension_has_cuda_kernels() -> None:
    recorder = make_recorder("native")
    assert isinstance(recorder, NativeRecorder) and "cuda" in recorder._kinds


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype_and_length(recorder: Recorder, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    lengths = [0, 1, 15, 16, 17, 1000, 100_003]
    check(recorder, [with_bad(dtype, n, bad, rng) for n in lengths for bad in ([], [0], [n - 1], [n // 2, n // 3])])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_layout(recorder: Recorder, dtype: torch.dtype) -> None:
    check(recorder, list(strided_views(dtype).values()))


def test_more_elements_than_an_int32_counts(recorder: Recorder) -> None:
    x = torch.zeros(2**31 + 77, dtype=torch.float8_e5m2, device="cuda")
    x.view(torch.uint8)[-2] = 0x7C
    stats = tensor_stats(x, recorder=recorder)
    assert (stats.numel, stats.first_bad, stats.posinf_count) == (2**31 + 77, (2**31 + 75,), 1)


def test_a_tensor_is_read_on_the_stream_that_makes_it(recorder: Recorder) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        x = torch.ones(1 << 20, device="cuda")
        for _ in range(100):
            x = x * 1.01
        stats = tensor_stats(x, recorder=recorder)
    assert stats.abs_max == x.max().item()


def test_tensors_of_both_kinds_of_memory_in_one_list(recorder: Recorder) -> None:
    rows = tensor_stats([torch.ones(3), torch.full((4,), 2.0, device="cuda"), torch.full((5,), 3)], recorder=recorder)
    assert [row.abs_max for row in rows] == [1.0, 2.0, 3]


def test_an_overflow_is_reported_as_on_the_cpu(recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        linear = nn.Linear(8, 8)
        with torch.no_grad():
            linear.weight.fill_(2.0**12)
            linear.bias.zero_()
        model = nn.Sequential(linear, nn.ReLU(), nn.Identity()).half()
        with DebugUnderflowOverflow(model.to(device), recorder=recorder_name), pytest.raises(NonFiniteError):
            model(torch.full((2, 8), 2.0, dtype=torch.float16, device=device))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "     inf      inf output" in printed[0]
