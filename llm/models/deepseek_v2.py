"""DeepSeek V2: latent attention, dense layers first, then experts of which the best groups take part."""

from __future__ import annotations

from collections.abc import Sequence

from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    MoEConfig,
    PartConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_latent_attention,
    read_rms_norm,
)
from llm.models.decoder.multi_token import MultiTokenConfig
from llm.models.reading_experts import ignore_training

_MOST_FURTHER_LAYERS = 64


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        # transformers reads neither of them otherwise.
        reader.expect("scoring_func", "softmax")
        reader.expect("norm_topk_prob", False)
        rope = reader.rope()
        method, groups, best = _groups(reader)
        experts = MoEConfig(
            reader.positive("n_routed_experts", 64),
            reader.positive("num_experts_per_tok"),
            reader.positive("moe_intermediate_size", 1407),
            reader.string("hidden_act", "silu"),
            renormalize=False,
            groups=groups if method == "group_limited_greedy" else 1,
            topk_group=best if method == "group_limited_greedy" else 1,
            routed_scaling_factor=reader.number("routed_scaling_factor", 1.0),
            shared_size=shared_size(reader, 2, 1407),
        )
        first = reader.integer("first_k_dense_replace", 0)
        return deepseek_decoder(reader, rope, read_latent_attention(reader, rope), experts, dense_first(reader, first))


def _groups(reader: ConfigReader) -> tuple[str, int, int]:
    method = reader.string("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise reader.error("topk_method", method, "'greedy' or 'group_limited_greedy'")
    return method, reader.positive("n_group", 1), reader.positive("topk_group", 1)


def shared_size(reader: ConfigReader, count: int, size: int) -> int:
    """Channels of the experts that every token has, which are one feed-forward; the arguments are defaults."""
    return reader.positive("n_shared_experts", count) * reader.positive("moe_intermediate_size", size)


def dense_first(reader: ConfigReader, first: int) -> list[bool]:
    """Which layers have experts: all but the first."""
    return [index >= first for index in range(reader.positive("num_hidden_layers"))]


def deepseek_decoder(
    reader: ConfigReader,
    rope: RopeParameters,
    attention: PartConfig | Sequence[PartConfig],
    experts: MoEConfig,
    is_sparse: list[bool],
    eps: float = 1e-6,
    positions: int = 2048,
) -> DecoderConfig:
    """A decoder in which the layers of `is_sparse` have `experts`, the others a feed-forward; `attention` is one for
    all layers or one each; `positions`: what a missing `max_position_embeddings` means."""
    ignore_training(reader)
    for key in ("aux_loss_alpha", "seq_aux", "ep_size"):  # of training
        reader.expect(key, reader.raw.get(key))
    reader.expect("moe_layer_freq", 1)
    reader.expect("mlp_bias", False)
    further = reader.integer("num_nextn_predict_layers", 0)
    if not 0 <= further <= _MOST_FURTHER_LAYERS:
        raise reader.error("num_nextn_predict_layers", further, f"an integer from 0 to {_MOST_FURTHER_LAYERS}")
    norm = read_rms_norm(reader, eps)
    activation = reader.string("hidden_act", "silu")
    dense: PartConfig = experts
    reader.ignore("intermediate_size")  # where all layers have experts it is not needed, nor always there
    if not all(is_sparse):
        dense = GatedMLPConfig(reader.positive("intermediate_size"), activation)
    parts = [attention] * len(is_sparse) if isinstance(attention, PartConfig) else attention
    predicting = LayerConfig(attention=parts[-1], mlp=experts, norms=PreNorms(norm))
    return read_decoder(
        reader,
        [
            LayerConfig(attention=part, mlp=experts if sparse else dense, norms=PreNorms(norm))
            for part, sparse in zip(parts, is_sparse, strict=True)
        ],
        norm,
        positions=longest_sequence(reader, rope, positions),
        layers_left_out=further,
        multi_token=MultiTokenConfig(predicting, norm, f"model.layers.{len(is_sparse)}", True) if further else None,
    )
