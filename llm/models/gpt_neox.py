"""The generation of GPT-NeoX, with LayerNorms and mostly a fused QKV tensor.

GPT-NeoX and Pythia, Persimmon, GPT-J, CodeGen, BLOOM, Falcon, MPT.
"""

import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import ClassVar

import torch

from llm.errors import CheckpointError
from llm.models import decoder as d
from llm.models.gpt2 import GPT2_KEYS

_LAYER = (
    ("attention.query_key_value", "self_attn.qkv_proj"),
    ("attention.dense", "self_attn.o_proj"),
    ("mlp.dense_h_to_4h", "mlp.up_proj"),
    ("mlp.dense_4h_to_h", "mlp.down_proj"),
)


class GPTNeoXForCausalLM(d.DecoderForCausalLM):
    """GPT-NeoX and Pythia: parallel residual with two LayerNorms, partial rotary embedding, a fused QKV tensor."""

    packed_modules_mapping = d.NOTHING_PACKED
    renames = (
        *((f"gpt_neox.layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
        ("gpt_neox.embed_in", "model.embed_tokens"),
        ("gpt_neox.final_layer_norm", "model.norm"),
        ("gpt_neox", "model"),
        ("embed_out", "lm_head"),
    )
    # Causal masks that old checkpoints carry as tensors.
    ignored_weights = (
        "attention.bias",
        "attention.masked_bias",
        "attention.rotary_emb.inv_freq",
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("classifier_dropout", reader.raw.get("classifier_dropout"))
        theta = reader.positive_number("rotary_emb_base", 10000.0, above=1.0)
        rope = reader.rope(theta, default_share=reader.positive_number("rotary_pct", 0.25))
        norm, bias = d.read_layer_norm(reader), reader.boolean("attention_bias", True)
        is_parallel = reader.boolean("use_parallel_residual", True)
        return d.uniform_decoder(
            reader,
            d.AttentionConfig(d.read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qkv_by_key_head=True),
            norm,
            mlp=d.read_plain_mlp(reader, "gelu", bias=True),
            norms=d.ParallelNorms(norm, mlp_has_norm=True) if is_parallel else None,
        )


_PERSIMMON_LAYER = (
    ("self_attn.query_key_value", "self_attn.qkv_proj"),
    ("self_attn.dense", "self_attn.o_proj"),
    ("self_attn.q_layernorm", "self_attn.q_norm"),
    ("self_attn.k_layernorm", "self_attn.k_norm"),
    ("mlp.dense_h_to_4h", "mlp.up_proj"),
    ("mlp.dense_4h_to_h", "mlp.down_proj"),
)


class PersimmonForCausalLM(d.DecoderForCausalLM):
    """Persimmon: LayerNorm (on each head too), partial rotary embedding, relu squared, a fused QKV tensor."""

    packed_modules_mapping = d.NOTHING_PACKED
    renames = (
        *((f"model.layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _PERSIMMON_LAYER),
        ("model.final_layernorm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm = d.read_layer_norm(reader)
        attention = d.AttentionConfig(
            d.read_heads(reader),
            reader.rope(default_share=0.5),
            qkv_bias=True,
            out_bias=True,
            qkv_by_key_head=True,
            qk_norm=norm if reader.boolean("qk_layernorm", True) else None,
        )
        mlp = d.read_plain_mlp(reader, "relu2", bias=True)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=16384)


_GPTJ_LAYER = (
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
        *((f"transformer.h.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _GPTJ_LAYER),
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.ln_f", "model.norm"),
    )
    # Causal masks that old checkpoints carry as tensors.
    ignored_weights: ClassVar[tuple[str, ...]] = ("attn.bias", "attn.masked_bias", "attn.embed_positions")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader = reader.renamed(GPT2_KEYS)
        hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
        reader.expect("tie_word_embeddings", False)  # a tied LM head has no bias
        reader.expect("scale_attn_weights", True)
        reader.expect("rotary", True)
        norm, size = d.read_layer_norm(reader), hidden // heads
        # The next float above: the share times the size must not come out below the whole number.
        rotated = math.nextafter(reader.positive("rotary_dim", 64) / size, 2.0)
        rope = d.RopeParameters(partial_rotary_factor=rotated)
        inner, activation = reader.positive("intermediate_size", 4 * hidden), reader.string("hidden_act", "gelu_new")
        return d.uniform_decoder(
            reader,
            d.AttentionConfig(d.Heads(heads, heads, size), rope, rope_interleaved=True),
            norm,
            mlp=d.PlainMLPConfig(inner, activation, bias=True),
            norms=d.ParallelNorms(norm),
            lm_head_bias=True,
        )


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


_BLOOM_LAYER = (
    ("self_attention.query_key_value", "self_attn.qkv_proj"),
    ("self_attention.dense", "self_attn.o_proj"),
    ("mlp.dense_h_to_4h", "mlp.up_proj"),
    ("mlp.dense_4h_to_h", "mlp.down_proj"),
)
_MODEL = (
    ("h", "model.layers"),
    ("word_embeddings", "model.embed_tokens"),
    ("word_embeddings_layernorm", "model.embed_norm"),
    ("ln_f", "model.norm"),
)

_BLOOM_KEYS = {
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "seq_length": "max_position_embeddings",
}


class BloomForCausalLM(d.DecoderForCausalLM):
    """BLOOM: ALiBi, a LayerNorm after the embedding, a fused QKV tensor."""

    packed_modules_mapping = d.NOTHING_PACKED
    # The first checkpoints lack the prefix "transformer.".
    renames = tuple(
        (f"{prefix}{source}", target)
        for prefix in ("transformer.", "")
        for source, target in (*((f"h.*.{old}", f"model.layers.*.{new}") for old, new in _BLOOM_LAYER), *_MODEL)
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        # The first checkpoints have names of their own for sizes, and switches of the code that trained them.
        reader = reader.renamed(_BLOOM_KEYS)
        hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
        reader.expect("apply_residual_connection_post_layernorm", False)
        reader.expect("n_inner", 4 * hidden)
        reader.ignore("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi")
        reader.ignore("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id")
        norm = d.read_layer_norm(reader, "layer_norm_epsilon")
        attention = d.AttentionConfig(
            d.Heads(heads, heads, hidden // heads),
            qkv_bias=True,
            out_bias=True,
            qkv_by_key_head=True,
            alibi_slopes=d.alibi_slopes(heads),
        )
        mlp = d.PlainMLPConfig(4 * hidden, "gelu_new", bias=True)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, embedding_norm=norm, tied=True)


_FALCON_LAYER = (
    ("self_attention.query_key_value", "self_attn.qkv_proj"),
    ("self_attention.dense", "self_attn.o_proj"),
    ("mlp.dense_h_to_4h", "mlp.up_proj"),
    ("mlp.dense_4h_to_h", "mlp.down_proj"),
    ("ln_attn", "input_layernorm"),
    ("ln_mlp", "post_attention_layernorm"),
)


class FalconForCausalLM(d.DecoderForCausalLM):
    """Falcon: parallel residual and a fused QKV tensor; falcon-rw has ALiBi and no parallel residual."""

    packed_modules_mapping = d.NOTHING_PACKED
    renames = (
        *((f"transformer.h.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _FALCON_LAYER),
        ("transformer.h", "model.layers"),
        ("transformer.word_embeddings", "model.embed_tokens"),
        ("transformer.ln_f", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("apply_residual_connection_post_layernorm", False)
        hidden, bias = reader.positive("hidden_size"), reader.boolean("bias", False)
        rope, norm = reader.rope(), d.read_layer_norm(reader, "layer_norm_epsilon")
        is_new = reader.boolean("new_decoder_architecture", False)
        inner = reader.positive("ffn_hidden_size", 4 * hidden)
        reader.expect("ff_factor", inner // hidden)
        heads, has_alibi = _heads(reader, is_new), reader.boolean("alibi", False)
        attention = d.AttentionConfig(
            heads,
            None if has_alibi else rope,
            qkv_bias=bias,
            out_bias=bias,
            qkv_by_key_head=True,
            alibi_slopes=_slopes(heads) if has_alibi else None,
        )
        mlp, norms = d.PlainMLPConfig(inner, reader.string("activation", "gelu"), bias), _norms(reader, norm, is_new)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, norms=norms, rope=rope, tied=True)


def _heads(reader: d.ConfigReader, is_new: bool) -> d.Heads:
    """`multi_query`: one key head; the newer checkpoints say how many."""
    query = reader.positive("num_attention_heads")
    is_multi_query, named = reader.boolean("multi_query", True), reader.positive("num_kv_heads", query)
    return d.Heads(query, named if is_new or not is_multi_query else 1, reader.positive("hidden_size") // query)


def _slopes(heads: d.Heads) -> tuple[float, ...]:
    """The bias is scaled as the scores are. Its slopes are bfloat16 (in transformers so is slope times position)."""
    rounded = torch.tensor(d.alibi_slopes(heads.query), dtype=torch.float64).bfloat16()
    return tuple(slope * heads.size**-0.5 for slope in rounded.tolist())


def _norms(reader: d.ConfigReader, norm: d.NormConfig, is_new: bool) -> d.Norms:
    if not reader.boolean("parallel_attn", True):
        reader.expect("new_decoder_architecture", False)
        return d.PreNorms(norm)
    if not is_new:
        reader.expect("num_ln_in_parallel_attn", 1)
        return d.ParallelNorms(norm)
    reader.expect("num_ln_in_parallel_attn", 1, 2)
    return d.ParallelNorms(norm, mlp_has_norm=reader.integer("num_ln_in_parallel_attn", 2) == 2)


_MPT_LAYER = (
    ("attn.Wqkv", "self_attn.qkv_proj"),
    ("attn.out_proj", "self_attn.o_proj"),
    ("ffn.up_proj", "mlp.up_proj"),
    ("ffn.down_proj", "mlp.down_proj"),
    ("norm_1", "input_layernorm"),
    ("norm_2", "post_attention_layernorm"),
)

_MPT_KEYS = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}


class MptForCausalLM(d.DecoderForCausalLM):
    """MPT: ALiBi, LayerNorm without a bias, a fused QKV tensor that may be clamped."""

    packed_modules_mapping = d.NOTHING_PACKED
    renames = (
        *((f"transformer.blocks.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _MPT_LAYER),
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.norm_f", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader = reader.renamed(_MPT_KEYS)
        hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
        reader.expect("no_bias", True)
        reader.expect("expansion_ratio", 4)
        reader.expect("norm_type", "low_precision_layernorm", "layernorm")
        for key in ("embedding_fraction", "init_config", "init_device", "tokenizer_name", "verbose"):
            reader.ignore(key)
        reader.ignore("learned_pos_emb", "emb_pdrop")  # ALiBi is in their place
        return d.uniform_decoder(
            reader,
            _attention(reader, d.Heads(heads, heads, hidden // heads)),
            d.read_layer_norm(reader, "layer_norm_epsilon", has_bias=False),
            mlp=d.PlainMLPConfig(4 * hidden, "gelu"),
            tied=True,
        )


def _attention(reader: d.ConfigReader, heads: d.Heads) -> d.AttentionConfig:
    """From the object under "attn_config"."""
    inner = d.ConfigReader(reader.nested("attn_config"), "config.json, attn_config")
    inner.expect("attn_type", "multihead_attention")
    inner.expect("alibi", True)
    inner.expect("alibi_bias_max", 8)
    inner.expect("prefix_lm", False)
    inner.expect("qk_ln", False)
    inner.ignore("attn_impl", "attn_uses_sequence_id")
    config = d.AttentionConfig(
        heads,
        qkv_limit=inner.optional_number("clip_qkv"),
        scale=inner.optional_number("softmax_scale"),
        alibi_slopes=d.alibi_slopes(heads.query),
    )
    inner.finish()
    return config
