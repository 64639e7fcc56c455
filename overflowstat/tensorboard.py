"""Frames as curves of TensorBoard."""

from math import inf, isnan, nan
from typing import Protocol

from .frames import Frame
from .report import OwnStyle, Report
from .stats import TensorStats
from .wording import module_text

__all__ = ["TensorBoardSink"]


class Writer(Protocol):
    """What is used of a SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...

    def add_text(self, tag: str, text_string: str, global_step: int) -> object: ...


class TensorBoardSink:
    """Two curves a module, over the number of the batch: the largest and the smallest magnitude of what it gives.

        >>> from torch.utils.tensorboard import SummaryWriter
        >>> Monitor(model, sinks=[Printer(), TensorBoardSink(SummaryWriter("runs/1"))])

    They are called `abs max/encoder.block.0` and `abs min/encoder.block.0`, of gradients `grad abs max/...`; of a
    module that is called several times in a batch, the extremes of all calls. Where there is a NaN both are NaN, as in
    a report. Reports are texts, by the name `overflowstat`. The writer stays open.

    Cost: some 30 microseconds a curve and batch; `Monitor(every_n=...)` makes it less.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar` and `add_text`.
    """

    every_frame = True

    def __init__(self, writer: Writer) -> None:
        for method in ("add_scalar", "add_text"):
            if not callable(getattr(writer, method, None)):
                raise TypeError(f"writer={writer!r}: must be a SummaryWriter, not {type(writer).__name__}")
        self._writer = writer
        self._batch_number = 0
        self._extremes: dict[tuple[str, str], tuple[float, float]] = {}
        """(smallest, largest) by "" or "grad " and the module's name, of the batch that is running."""

    def frame(self, frame: Frame, traced: bool) -> None:
        if frame.is_recompute:  # it was seen
            return
        if frame.batch_number != self._batch_number:
            self.flush()
            self._batch_number = frame.batch_number
        for line in frame.lines:
            grad = "grad " * line.label.startswith("grad ")
            is_output = line.label.startswith(f"{grad}output")
            if is_output and isinstance(line.content, TensorStats) and line.content.numel:
                self._add((grad, frame.module), line.content)

    def _add(self, curve: tuple[str, str], found: TensorStats) -> None:
        low, high = self._extremes.get(curve, (inf, 0.0))
        if found.has_nan or isnan(low):
            self._extremes[curve] = nan, nan
        else:
            self._extremes[curve] = min(low, float(found.abs_min)), max(high, float(found.abs_max))

    def report(self, report: Report) -> None:
        self.flush()
        text = "".join(f"    {line}\n" for line in OwnStyle().detected(report).splitlines())  # as Markdown has code
        self._writer.add_text("overflowstat", text, report.batch_number)

    def flush(self) -> None:
        """Write the batch that has ended."""
        for (grad, module), (low, high) in self._extremes.items():
            self._writer.add_scalar(f"{grad}abs max/{module_text(module)}", high, self._batch_number)
            self._writer.add_scalar(f"{grad}abs min/{module_text(module)}", low, self._batch_number)
        self._extremes.clear()
