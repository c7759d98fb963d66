"""GPT-J and CodeGen."""

import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import ClassVar

import torch

from llm.errors import CheckpointError
from llm.models import decoder as d

_LAYER = (
    ("ln_1", "input_layernorm"),
    ("attn.q_proj", "self_attn.q_proj"),
    ("attn.k_proj", "self_attn.k_proj"),
    ("attn.v_proj", "self_attn.v_proj"),
    ("attn.out_proj", "self_attn.o_proj"),
    ("mlp.fc_in", "mlp.up_proj"),
    ("mlp.fc_out", "mlp.down_proj"),
)


class GPTJForCausalLM(d.DecoderForCausalLM):
    """GPT-J: parallel residual with one LayerNorm, interleaved partial rotary embedding, a bias on the logits."""

    packed_modules_mapping = d.QKV_PACKED
    renames = (
        *((f"transformer.h.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.ln_f", "model.norm"),
    )
    # Causal masks that old checkpoints carry as tensors.
    ignored_weights: ClassVar[tuple[str, ...]] = ("attn.bias", "attn.masked_bias", "attn.embed_positions")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        hidden, heads = reader.positive("n_embd"), reader.positive("n_head")
        reader.expect("tie_word_embeddings", False)  # a tied LM head has no bias
        reader.expect("scale_attn_weights", True)
        reader.expect("rotary", True)
        norm = d.NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5), d.LayerNorm)
        size = hidden // heads
        # The next float above: the share times the size must not come out below the whole number.
        rotated = math.nextafter(reader.positive("rotary_dim", 64) / size, 2.0)
        rope = d.RopeParameters(partial_rotary_factor=rotated)
        activation = reader.string("activation_function", "gelu_new")
        layer = d.LayerConfig(
            attention=d.AttentionConfig(d.Heads(heads, heads, size), rope, rope_interleaved=True),
            mlp=d.PlainMLPConfig(reader.positive("n_inner", 4 * hidden), activation, bias=True),
            norms=d.ParallelNorms(norm),
        )
        config = d.DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            max_position_embeddings=reader.positive("n_positions", 2048),
            layers=(layer,) * reader.positive("n_layer"),
            final_norm=norm,
            lm_head_bias=True,
        )
        reader.finish()
        return config


_FUSED = ".attn.qkv_proj."
_PARTS = 4


class CodeGenForCausalLM(GPTJForCausalLM):
    """CodeGen: GPT-J with one tensor of queries, values and keys, in four parts as it was trained on four devices."""

    packed_modules_mapping = d.NOTHING_PACKED
    renames = (
        ("transformer.h.*.attn.qkv_proj", "model.layers.*.self_attn.qkv_proj"),
        *GPTJForCausalLM.renames,
    )
    # Causal masks that old checkpoints carry as tensors.
    ignored_weights = ("attn.causal_mask", "attn.embed_positions")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore("n_ctx")  # `n_positions` is the longest sequence
        return super().read_config(reader)

    def __init__(self, config: d.DecoderConfig, options: d.BuildOptions) -> None:
        super().__init__(config, options)
        self.merge_weights = partial(_in_order)


def _in_order(
    tensors: Iterator[tuple[str, torch.Tensor]], names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors, the fused ones with all queries, all keys, all values."""
    for name, tensor in tensors:
        yield name, _separated(name, tensor) if _FUSED in name else tensor


def _separated(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not name.endswith(".weight") or tensor.dim() != 2 or tensor.shape[0] % (3 * _PARTS):
        raise CheckpointError(
            f"tensor {name} has shape {list(tensor.shape)}: of CodeGen's fused tensors only weights [3 * hidden_size, "
            f"hidden_size] are read; load a checkpoint that is not quantized, and quantize it with quantization=."
        )
    queries, values, keys = tensor.unflatten(0, (_PARTS, 3, -1)).unbind(1)
    return torch.cat([part.flatten(0, 1) for part in (queries, keys, values)])
