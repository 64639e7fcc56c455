"""Several operations give what is not finite, and one of them is the cause: the others do no harm, or come later."""

import torch
from torch import Tensor, nn

from verdicts.case import Case, calls

INF = float("inf")


class FirstRow(nn.Module):
    """One storage, of which a part is given that another operation made."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.zeros(2, 2)
        rows[0] = x.log()  # <- first-row
        rows[1] = 1 / x
        return rows[0]


class BothRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.zeros(2, 2)
        rows[0] = x.log()  # <- both-rows
        rows[1] = 1 / x
        return rows


class RowWrittenOver(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.zeros(2, 2)
        rows[0] = x.log()
        rows[0] = 0
        rows[1] = 1 / x  # <- row-written-over
        return rows


class Column(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        columns = torch.zeros(2, 2)
        columns[:, 0] = x.log()
        columns[:, 1] = 1 / x  # <- column
        return columns[:, 1]


class OneBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        left = x.log()
        right = 1 / x  # <- one-branch
        return torch.where(x <= 0, right, left)


class OneOfStack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        left = x.log()
        right = x.clamp(min=1e-30).reciprocal().square()  # <- one-of-stack
        return torch.stack([left, right])[1]


class OverflowBesideMask(nn.Module):
    """-inf is in the mask, and elsewhere in the product for another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Identity()

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        scores: Tensor = self.scores(x).masked_fill(is_padding, -INF)
        scores = scores * 1e30  # <- overflow-beside-mask
        return scores.amin(-1)


class LaterOfTwo(nn.Module):
    """An overflow in what bears the harmless logarithm of 0 elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x.log(), x + 1e30])
        both = both.square()  # <- later-of-two
        return both[2:]


class ByItem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        total: float = self.inner(x).exp().sum().item()  # <- by-item
        return x * total


class InPlaceTwice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[0] = y[0] / 0  # <- in-place-twice
        y[1:].log_()
        return y


ZEROS = torch.zeros(2)
PADDED = torch.tensor([[False, False, True], [False, False, False]])
CASES = [
    Case("first-row", calls(FirstRow, ZEROS), "", "aten.log", "domain"),
    Case("both-rows", calls(BothRows, ZEROS), "", "aten.log", "domain"),
    Case("row-written-over", calls(RowWrittenOver, ZEROS), "", "aten.reciprocal", "division-by-zero"),
    Case("column", calls(Column, ZEROS), "", "aten.reciprocal", "division-by-zero"),
    Case("one-branch", calls(OneBranch, torch.tensor([0.0, 1.0])), "", "aten.reciprocal", "division-by-zero"),
    Case("one-of-stack", calls(OneOfStack, torch.tensor([0.0, 1.0])), "", "aten.pow", "arithmetic-overflow"),
    Case(
        "overflow-beside-mask",
        calls(OverflowBesideMask, torch.tensor([[1.0, 1.0, 1.0], [-1e30, 1.0, 1.0]]), PADDED),
        "",
        "aten.mul",
        "arithmetic-overflow",
    ),
    Case("later-of-two", calls(LaterOfTwo, ZEROS), "", "aten.pow", "arithmetic-overflow"),
    Case("by-item", calls(ByItem, torch.full((2,), 100.0)), "", "aten.exp", "arithmetic-overflow"),
    Case("in-place-twice", calls(InPlaceTwice, torch.tensor([1.0, 0.0])), "", "aten.div", "division-by-zero"),
]
