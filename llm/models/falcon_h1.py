"""Falcon-H1: attention and Mamba 2 side by side in every layer, and constants on everything."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from llm.forward import ForwardBatch
from llm.models import decoder as d
from llm.models.mamba import TRAINING


@dataclass(frozen=True, kw_only=True)
class SideBySide(d.LayerConfig):
    """A layer with a recurrence beside its attention."""

    mamba: d.PartConfig

    @property
    def parts(self) -> Mapping[str, d.PartConfig]:
        return {"mamba": self.mamba, **super().parts}


@dataclass(frozen=True)
class ScaledSums(d.Norms):
    """x + mamba(norm(x)) + attention(norm(x)), each with constants on what goes in and comes out; then the MLP."""

    norm: d.NormConfig
    mamba: tuple[float, float]
    attention: tuple[float, float]

    def build(self, layer: d.LayerConfig, context: d.BuildContext, prefix: str) -> d.DecoderLayer:
        return SideBySideLayer(layer, self, context, prefix)


class SideBySideLayer(d.PreNormLayer):
    mamba: nn.Module

    def __init__(self, layer: d.LayerConfig, norms: ScaledSums, context: d.BuildContext, prefix: str) -> None:
        super().__init__(layer, norms.norm, context, prefix)
        self.norms = norms

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> d.Stream:
        hidden, residual = d.add_norm(self.input_layernorm, hidden, residual)
        (first, last), (before, after) = self.norms.mamba, self.norms.attention
        states = self.mamba(hidden * first, batch) * last
        hidden = states + getattr(self, self.mixer_name)(hidden * before, batch) * after
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden, batch), residual


class FalconH1ForCausalLM(d.DecoderForCausalLM):
    renames = (
        ("model.layers.*.feed_forward", "model.layers.*.mlp"),
        ("model.layers.*.pre_ff_layernorm", "model.layers.*.post_attention_layernorm"),
        ("model.final_layernorm", "model.norm"),
    )
    # The constants of config.json, as a tensor.
    ignored_weights = (*d.DecoderForCausalLM.ignored_weights, "mamba.mup_vector")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore(*TRAINING, "num_logits_to_keep", "mlp_expansion_factor", "attn_layer_indices")
        reader.expect("mamba_use_mlp", True)
        rope, norm = reader.rope(), d.read_rms_norm(reader, 1e-5)
        heads, key = d.read_heads(reader, default_kv_heads=8), reader.number("key_multiplier", 1.0)
        attention = d.read_attention(reader, rope, heads, scale=heads.size**-0.5 * key)
        mamba = d.read_mamba2(
            reader,
            norm.eps if reader.boolean("mamba_rms_norm", False) else None,
            width=reader.optional_positive("mamba_d_ssm", 1024),
            norm_before_gate=reader.boolean("mamba_norm_before_gate", True),
            multipliers=reader.numbers("ssm_multipliers", (1.0,) * 5),
        )
        reader.expect("projectors_bias", mamba.bias)
        size, activation = reader.positive("intermediate_size", 14336), reader.string("hidden_act", "silu")
        gate, down = reader.numbers("mlp_multipliers", (1.0, 1.0))
        mlp = d.GatedMLPConfig(size, activation, reader.boolean("mlp_bias", False), gate, down)
        norms = ScaledSums(
            norm,
            mamba=(reader.number("ssm_in_multiplier", 1.0), reader.number("ssm_out_multiplier", 1.0)),
            attention=(reader.number("attention_in_multiplier", 1.0), reader.number("attention_out_multiplier", 1.0)),
        )
        return d.read_decoder(
            reader,
            SideBySide(attention=attention, mamba=mamba, mlp=mlp, norms=norms),
            norm,
            positions=d.longest_sequence(reader, rope, 8192),
            embedding_multiplier=reader.number("embedding_multiplier", 1.0),
            logits_divisor=1.0 / reader.positive_number("lm_head_multiplier", 1.0),
        )
