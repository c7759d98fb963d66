"""Jamba: Mamba in the place of most attention, experts in the place of some feed-forwards."""

import math

from llm.models import decoder as d
from llm.models.mamba import TRAINING


class JambaForCausalLM(d.DecoderForCausalLM):
    renames = (
        ("model.layers.*.feed_forward.router", "model.layers.*.mlp.gate"),
        ("model.layers.*.feed_forward", "model.layers.*.mlp"),
        ("model.layers.*.pre_ff_layernorm", "model.layers.*.post_attention_layernorm"),
        ("model.final_layernorm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        reader.ignore(*TRAINING, "use_mamba_kernels", "num_logits_to_keep", "calc_logits_for_entire_prompt")
        norm, size = d.read_rms_norm(reader), reader.positive("intermediate_size", 14336)
        activation = reader.string("hidden_act", "silu")
        attention, mamba = d.AttentionConfig(d.read_heads(reader, default_kv_heads=8)), _read_mamba(reader, norm)
        plain = d.GatedMLPConfig(size, activation)
        top_k, experts = reader.positive("num_experts_per_tok", 2), reader.positive("num_experts", 16)
        mixture = plain if experts == 1 else d.MoEConfig(experts, top_k, size, activation, renormalize=False)
        count = reader.positive("num_hidden_layers")
        attends, mixes = _every(reader, "attn", 8, 4), _every(reader, "expert", 2, 1)
        layers = [
            d.LayerConfig(
                attention=attention if index % attends[0] == attends[1] else mamba,
                mlp=mixture if index % mixes[0] == mixes[1] else plain,
                norms=d.PreNorms(norm),
            )
            for index in range(count)
        ]
        return d.read_decoder(reader, layers, norm, positions=reader.positive("max_position_embeddings", 262_144))


def _every(reader: d.ConfigReader, name: str, period: int, offset: int) -> tuple[int, int]:
    """Of layers that are the same: every how many, and the first."""
    return reader.positive(f"{name}_layer_period", period), reader.count(f"{name}_layer_offset", offset)


def _read_mamba(reader: d.ConfigReader, norm: d.NormConfig) -> d.MambaConfig:
    d.read_activation(reader)
    hidden = reader.positive("hidden_size")
    reader.expect("mamba_inner_layernorms", True)
    rank = reader.raw.get("mamba_dt_rank", "auto")
    reader.ignore("mamba_dt_rank")
    return d.MambaConfig(
        reader.positive("mamba_d_state", 16),
        reader.positive("mamba_d_conv", 4),
        reader.positive("mamba_expand", 2) * hidden,
        math.ceil(hidden / 16) if rank == "auto" else reader.positive("mamba_dt_rank"),
        reader.boolean("mamba_conv_bias", True),
        reader.boolean("mamba_proj_bias", False),
        norm.eps,
    )
