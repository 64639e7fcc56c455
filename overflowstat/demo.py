"""`python -m overflowstat demo`: a small model in float16 that overflows as mT5 famously does, and the report of it."""

import torch
from torch import Tensor, nn

from .errors import NonFiniteError
from .monitor import Monitor

__all__ = ["run"]

WIDTH = 64


class GatedFeedForward(nn.Module):
    """wo(gelu(wi_0(x)) * wi_1(x)): the product of two activations is what grows."""

    def __init__(self) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.wi_1 = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.wo = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wo(self.dropout(nn.functional.gelu(self.wi_0(x)) * self.wi_1(x)))
        return y


class FeedForwardLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.DenseReluDense = GatedFeedForward()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.DenseReluDense(self.layer_norm(x)))
        return y


class Encoder(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(100, WIDTH)
        self.block = nn.ModuleList([FeedForwardLayer() for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        for block in self.block:
            x = block(x)
        y: Tensor = self.final_layer_norm(x)
        return y


SEED = 0


def overflowing_model() -> tuple[Encoder, Tensor]:
    """A float16 model in training mode whose last feed-forward ends at 96 % of what float16 holds.

    That holds for the dropout masks that torch.manual_seed(SEED) gives; the dropout after it divides by 0.9.
    """
    torch.manual_seed(SEED)
    model, tokens = Encoder().half(), torch.randint(100, (4, 16))
    wo = model.block[-1].get_submodule("DenseReluDense.wo")
    largest: list[Tensor] = []
    handle = wo.register_forward_hook(lambda module, args, output: largest.append(output.abs().max()))
    torch.manual_seed(SEED)
    with torch.no_grad():
        model(tokens)
        wo.get_parameter("weight").mul_(0.96 * torch.finfo(torch.float16).max / largest[0].float())
    handle.remove()
    return model, tokens


def run() -> int:
    model, tokens = overflowing_model()
    print("A float16 encoder of three gated feed-forward blocks, in training mode, with Monitor(model):")
    Monitor(model, max_frames_to_save=6)
    torch.manual_seed(SEED)
    try:
        model(tokens)
    except NonFiniteError as error:
        print(f"The forward raised {type(error).__name__}, a ValueError, with the {len(error.frames)} frames above.")
        return 0
    print("Nothing overflowed, which this demo exists to show.")
    return 1
