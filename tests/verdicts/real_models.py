"""Models of transformers, made to overflow by the scale of a weight."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations import moe
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


def t5_residual() -> tuple[nn.Module, Run]:
    """25000 more in each layer: the sum itself is beyond float16 in the third, in what generation runs once."""
    torch.manual_seed(0)
    config: Any = transformers.T5Config(
        vocab_size=16, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, feed_forward_proj="gated-gelu"
    )
    config.update({"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1})
    model: Any = transformers.T5ForConditionalGeneration(config)
    model.half().eval()
    for i in range(3):
        wo = model.get_submodule(f"encoder.block.{i}.layer.1.DenseReluDense.wo")
        given: list[Any] = []
        handle = wo.register_forward_pre_hook(lambda module, args, given=given: given.append(args[0].float()))
        with torch.no_grad():
            model.encoder(input_ids=TOKENS)
            first = given[0][0, 0]
            wo.weight.copy_((first / first.dot(first) * 25000).expand_as(wo.weight))
        handle.remove()
    return model, lambda: model.generate(TOKENS, max_new_tokens=3)


def mixtral() -> tuple[nn.Module, Run]:
    """The gate of an expert times what goes up in it."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model: Any = transformers.MixtralModel(config)
    model.half().eval()
    weight = model.get_parameter("layers.0.mlp.experts.gate_up_proj")
    with torch.no_grad():
        weight.mul_(2000 / weight.abs().max())
    return model, lambda: model(input_ids=TOKENS, use_cache=False)


CASES = [
    Case(
        "t5-residual",
        t5_residual,
        "encoder.block.2.layer.1",
        "aten.add",
        "arithmetic-overflow",
        source=line_of(modeling_t5.T5LayerFF.forward, "hidden_states = hidden_states + self.dropout(forwarded_states)"),
    ),
    Case(
        "mixtral-expert",
        mixtral,
        "layers.0.mlp.experts",
        "aten.mul",
        "arithmetic-overflow",
        source=line_of(moe._default_apply_gate, "return self.act_fn(gate) * up  # (S, intermediate_dim)"),
    ),
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
