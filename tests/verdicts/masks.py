"""Softmax and what is put before it: masks of all kinds."""

import torch
from torch import Tensor, nn

from overflowstat import Policy
from verdicts.case import Case, calls, given

INF = float("inf")
HALF = torch.float16


class Attend(nn.Module):
    def forward(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        return (scores + attention_mask).softmax(-1)


class AttendByModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        y: Tensor = self.softmax(scores + attention_mask)
        return y


class MaskFromUser(nn.Module):
    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        y: Tensor = self.attend(scores, attention_mask=attention_mask)
        return y


class TwoMasks(nn.Module):
    """Causal and padding: each is finfo.min, and their sum is beyond."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, scores: Tensor, padding: Tensor) -> Tensor:
        lowest = torch.finfo(scores.dtype).min
        causal = torch.zeros_like(scores).masked_fill(torch.ones_like(scores).triu(1).bool(), lowest)
        mask = causal + (1 - padding) * lowest  # <- two-masks
        y: Tensor = self.inner(scores + mask)
        return y.softmax(-1)


class FullyMasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Identity()

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        scores = self.scores(x).masked_fill(is_padding, -INF)
        y: Tensor = scores.softmax(-1)  # <- fully-masked-row
        return y


class FullyMaskedLog(nn.Module):
    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        return torch.log_softmax(x.masked_fill(is_padding, -INF), dim=-1)  # <- fully-masked-log


class SoftmaxOverInfinity(nn.Module):
    """exp of one expert's bonus, which is +inf, and then softmax over that and the others."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).masked_fill(x > 1, INF)
        y: Tensor = scores.softmax(-1)  # <- softmax-over-infinity
        return y


class MaskByProduct(nn.Module):
    """0 where something is kept, by which -inf is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.inner(x)
        return x + (1 - keep) * -INF  # <- mask-by-product


class ShiftOfMasked(nn.Module):
    """A softmax by hand of a row that is -inf only."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Identity()

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        scores = self.scores(x).masked_fill(is_padding, -INF)
        shifted = scores - scores.amax(-1, keepdim=True)  # <- shift-of-masked-row
        y: Tensor = shifted.exp() / shifted.exp().sum(-1, keepdim=True)
        return y


class MaskedMax(nn.Module):
    def forward(self, mask: Tensor, scores: Tensor) -> Tensor:
        return (scores + mask).amax(-1)


class BesideAMaskThatMayCome(nn.Module):
    """The scores overflow, and the mask of -inf has no part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.max = nn.Identity(), MaskedMax()

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        scores = self.scores(x) * 1e30  # <- beside-allowed-mask
        y: Tensor = self.max(mask, scores)
        return y


PADDED = torch.tensor([[False, False, True], [True, True, True]])
ADDED = torch.tensor([0.0, 0.0, -INF])
CASES = [
    given(
        "mask-from-user",
        calls(lambda: MaskFromUser(Attend()), torch.ones(2, 3), attention_mask=ADDED),
        "attend",
        "bad-input",
        "input[attention_mask]",
    ),
    # Modules are seen as they return: the softmax before the one that was given the mask, and has added it.
    given(
        "mask-from-user-added",
        calls(lambda: MaskFromUser(AttendByModule()), torch.ones(2, 3), attention_mask=ADDED),
        "attend.softmax",
        "bad-input",
        "input[0]",
    ),
    Case(
        "two-masks",
        calls(TwoMasks, torch.ones(3, 3, dtype=HALF), torch.tensor([1.0, 1.0, 0.0], dtype=HALF)),
        "",
        "aten.add",
        "arithmetic-overflow",
        label="input[0]",
    ),
    Case("fully-masked-row", calls(FullyMasked, torch.ones(2, 3), PADDED), "", "aten._softmax", "masked-row"),
    Case("fully-masked-log", calls(FullyMaskedLog, torch.ones(2, 3), PADDED), "", "aten._log_softmax", "masked-row"),
    Case(
        "softmax-over-infinity",
        calls(SoftmaxOverInfinity, torch.tensor([[1.0, 2.0, 0.0]])),
        "",
        "aten._softmax",
        "inf-minus-inf",
    ),
    Case(
        "mask-by-product", calls(MaskByProduct, torch.ones(2, 3), (~PADDED).float()), "", "aten.mul", "zero-times-inf"
    ),
    Case(
        "beside-allowed-mask",
        calls(BesideAMaskThatMayCome, ADDED, torch.full((2, 3), 1e30)),
        "",
        "aten.mul",
        "arithmetic-overflow",
        label="input[1]",
        options={"policy": Policy(allow={"*:input[0]": "-inf"})},
    ),
    Case("shift-of-masked-row", calls(ShiftOfMasked, torch.ones(2, 3), PADDED), "", "aten.sub", "inf-minus-inf"),
]
