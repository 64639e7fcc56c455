"""The models that benchmarks/overhead.py watches: made from configurations, with random weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["CASES", "Case"]

VOCABULARY = 32_000


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    """Positional, as every watcher here sees them."""
    trains: bool = True
    generates: bool = False
    """A forward of a few tokens, as one of many in a generation loop: weights are watched on change, too."""


def tokens(batch: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, VOCABULARY, (batch, length)),)


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=VOCABULARY))


class PositionalT5(nn.Module):
    """Encoder and decoder over the same tokens, given by position."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5Model

        # The shape of flan-t5-small.
        config = T5Config(
            vocab_size=VOCABULARY, d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_heads=6,
            feed_forward_proj="gated-gelu", use_cache=False,
        )  # fmt: skip
        self.t5 = T5Model(config)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.t5(input_ids=ids, decoder_input_ids=ids).last_hidden_state
        return output


def llama(layers: int, width: int, inner: int, heads: int, vocabulary: int = VOCABULARY) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            vocab_size=vocabulary, num_hidden_layers=layers, hidden_size=width, intermediate_size=inner,
            num_attention_heads=heads, num_key_value_heads=heads, use_cache=False,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralModel

    return MixtralModel(
        MixtralConfig(
            vocab_size=VOCABULARY, num_hidden_layers=4, hidden_size=256, intermediate_size=512,
            num_attention_heads=8, num_key_value_heads=4, num_local_experts=8, use_cache=False,
        )
    )  # fmt: skip


class Residual(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        changes = stride != 1 or channels != out
        self.around = nn.Conv2d(channels, out, 1, stride, bias=False) if changes else nn.Identity()
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.body(x) + self.around(x))
        return y


def residual_network() -> nn.Module:
    """The shape of a ResNet-18."""
    blocks = [Residual(a, b, s) for a, b, s in [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]]
    more = [Residual(width, width, 1) for width in (64, 128, 256, 512)]
    stages = [block for pair in zip(blocks, more, strict=True) for block in pair]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


CASES = [
    Case("bert-base, 4 x 128", bert, lambda: tokens(4, 128)),
    Case("T5 gated-gelu, 4 x 128", PositionalT5, lambda: tokens(4, 128)),
    Case("Llama 8 x 512, 4 x 128", lambda: llama(8, 512, 1376, 8), lambda: tokens(4, 128)),
    Case("Llama 24 x 64, 317 small modules, 1 x 32", lambda: llama(24, 64, 172, 4), lambda: tokens(1, 32)),
    Case("CNN as ResNet-18, 4 x 3 x 128 x 128", residual_network, lambda: (torch.randn(4, 3, 128, 128),)),
    Case("Mixtral-like, 8 experts, 4 x 128", mixtral, lambda: tokens(4, 128)),
    Case(
        "Llama 8 x 512, 1 x 4, generation",
        lambda: llama(8, 512, 1376, 8),
        lambda: tokens(1, 4),
        trains=False,
        generates=True,
    ),
]
