"""Falcon: parallel residual and a fused QKV tensor; falcon-rw has ALiBi and no parallel residual."""

import torch

from llm.models import decoder as d

_LAYER = (
    ("self_attention.query_key_value", "self_attn.qkv_proj"),
    ("self_attention.dense", "self_attn.o_proj"),
    ("mlp.dense_h_to_4h", "mlp.up_proj"),
    ("mlp.dense_4h_to_h", "mlp.down_proj"),
    ("ln_attn", "input_layernorm"),
    ("ln_mlp", "post_attention_layernorm"),
)


class FalconForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.NOTHING_PACKED
    renames = (
        *((f"transformer.h.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
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
        layer = d.LayerConfig(
            attention=d.AttentionConfig(
                heads,
                None if has_alibi else rope,
                qkv_bias=bias,
                out_bias=bias,
                qkv_by_key_head=True,
                alibi_slopes=_slopes(heads) if has_alibi else None,
            ),
            mlp=d.PlainMLPConfig(inner, reader.string("activation", "gelu"), bias),
            norms=_norms(reader, norm, is_new),
        )
        return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope), tied=True)


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
