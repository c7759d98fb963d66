"""Nemotron-H: layers of one part each, Mamba 2, attention without positions or an ungated feed-forward.

Steps are clamped to `time_step_limit`, as in the authors' code and vLLM; transformers clamps those of prompts, and not
those of single tokens, from below at `time_step_min`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    Mamba2Config,
    MixerLayer,
    NormConfig,
    OnePart,
    PartConfig,
    PlainMLPConfig,
    read_activation,
    read_decoder,
    read_heads,
    read_step_limits,
)
from llm.models.mamba import TRAINING

# Letters of `hybrid_override_pattern`, and the names in `layers_block_type` of transformers 4 and 5.
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "linear_attention": "mamba", "full_attention": "attention"}
_KINDS |= {kind: kind for kind in _KINDS.values()}
# Of other forms of the recurrence, and of layers that there are none of.
_UNUSED = """
    use_mamba_kernels num_logits_to_keep chunk_size expand rms_norm_eps mamba_proj_bias mamba_ssm_cache_dtype topk_group
    n_group norm_topk_prob routed_scaling_factor num_nextn_predict_layers output_router_logits mtp_layers_block_type
    mtp_hybrid_override_pattern
""".split()


class NemotronHForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    renames = (
        ("backbone.embeddings", "model.embed_tokens"),
        ("backbone.layers.*.norm", "model.layers.*.input_layernorm"),
        ("backbone.norm_f", "model.norm"),
        ("backbone", "model"),
        ("model.embeddings", "model.embed_tokens"),
        ("model.layers.*.norm", "model.layers.*.input_layernorm"),
        ("model.norm_f", "model.norm"),
    )

    @classmethod
    def declines(cls, config: Mapping[str, object]) -> str | None:
        """Why transformers' code computes this model by default; None: this class does."""
        given = [config.get(key, ()) for key in ("layers_block_type", "hybrid_override_pattern")]
        return "its experts have no gate" if any("moe" in str(item) or "E" in str(item) for item in given) else None

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.ignore(*TRAINING, *_UNUSED, *(key for key in reader.raw if "moe" in key or "expert" in key))
        reader.expect("sliding_window", None)
        norm = NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5))
        bias, mlp_bias = reader.boolean("attention_bias", False), reader.boolean("mlp_bias", False)
        heads, size = (
            read_heads(reader, default_kv_heads=8, default_size=128),
            reader.positive("intermediate_size", 21504),
        )
        parts: dict[str, PartConfig] = {
            "mamba": _read_mamba(reader, norm),
            "attention": AttentionConfig(heads, qkv_bias=bias, out_bias=bias),
            "mlp": PlainMLPConfig(size, reader.string("mlp_hidden_act", "relu2"), mlp_bias),
        }
        layers = [MixerLayer(attention=parts[kind], norms=OnePart(norm)) for kind in _read_kinds(reader)]
        return read_decoder(reader, layers, norm, positions=reader.positive("max_position_embeddings", 4096))


def _read_kinds(reader: ConfigReader) -> list[str]:
    key = "layers_block_type" if "layers_block_type" in reader.raw else "hybrid_override_pattern"
    given = reader.names(key) if key == "layers_block_type" else list(reader.string(key))
    reader.ignore("hybrid_override_pattern", "num_hidden_layers")
    if not given or not _KINDS.keys() >= set(given):
        raise reader.error(key, given, f"of {', '.join(map(repr, _KINDS))}; else pass model_impl='transformers'")
    return [_KINDS[kind] for kind in given]


def _read_mamba(reader: ConfigReader, norm: NormConfig) -> Mamba2Config:
    read_activation(reader, "mamba_hidden_act")
    return Mamba2Config(
        reader.positive("mamba_num_heads", 128),
        reader.positive("mamba_head_dim", 64),
        reader.positive("n_groups", 8),
        reader.positive("ssm_state_size", 128),
        reader.positive("conv_kernel", 4),
        reader.boolean("use_conv_bias", True),
        reader.boolean("use_bias", False),
        norm.eps,
        dt_limit=read_step_limits(reader),
    )
