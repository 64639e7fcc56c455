"""Models of transformers, made to overflow by the scale of a weight."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5

from verdicts.case import Case, Run, line_of

TOKENS = torch.arange(3, 9).reshape(1, 6)


def t5() -> tuple[nn.Module, Run]:
    """Gated GELU: the product of both branches is beyond float16, and neither branch is."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=16, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    model: Any = transformers.T5EncoderModel(config)
    model.half().eval()
    dense = model.get_submodule("encoder.block.1.layer.1.DenseReluDense")
    with torch.no_grad():
        for name in ("wi_0", "wi_1"):
            weight = dense.get_submodule(name).get_parameter("weight")
            weight.mul_(400 / weight.abs().max())
    return model, lambda: model(input_ids=TOKENS)


def llama() -> tuple[nn.Module, Run]:
    """Queries and keys so large that their products are beyond float16 before they are scaled."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config._attn_implementation = "eager"
    model: Any = transformers.LlamaModel(config)
    model.half().eval()
    attention = model.get_submodule("layers.1.self_attn")
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            weight = attention.get_submodule(name).get_parameter("weight")
            weight.mul_(400 / weight.abs().max())
    return model, lambda: model(input_ids=TOKENS, use_cache=False)


CASES = [
    Case(
        "t5-gated-gelu",
        t5,
        "encoder.block.1.layer.1.DenseReluDense",
        "aten.mul",
        "arithmetic-overflow",
        label="input[0]",
        source=line_of(modeling_t5.T5DenseGatedActDense.forward, "hidden_states = hidden_gelu * hidden_linear"),
    ),
    Case(
        "llama-attention",
        llama,
        "layers.1.self_attn",
        "aten.bmm",
        "accumulation-overflow",
        label="input[0]",
        source=line_of(
            modeling_llama.eager_attention_forward,
            "attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling",
        ),
    ),
]
