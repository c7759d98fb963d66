"""Mamba 1 and 2, Falcon Mamba, and decoders with Mamba in the place of attention or beside it.

Those are Bamba, Jamba, Falcon-H1, Nemotron-H and PLaMo 2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from llm.forward import ForwardBatch
from llm.models import decoder as d
from llm.models.deepseek import sigmoid_experts
from llm.models.qwen import predicts_second_token

# Keys for training: how the first weights are drawn, and the types and forms of transformers' own computation.
TRAINING = (
    *("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor"),
    *("fused_add_norm", "pad_vocab_size_multiple", "rescale_prenorm_residual", "residual_in_fp32"),
    *("use_mambapy", "use_falcon_mambapy", "use_associative_scan"),
)
# A recurrent state does not limit the length of a sequence; memory for token ids and a default have to.
_POSITIONS = 131_072


class MambaForCausalLM(d.DecoderForCausalLM):
    """Mamba: layers of one recurrent mixer each, without attention."""

    renames = (
        ("backbone.embeddings", "model.embed_tokens"),
        ("backbone.embedding", "model.embed_tokens"),
        ("backbone.layers.*.norm", "model.layers.*.input_layernorm"),
        ("backbone.layers.*.mixer", "model.layers.*.mamba"),
        ("backbone.norm_f", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return mamba_decoder(reader, _read_mamba(reader))


def _read_mamba(reader: d.ConfigReader, norm_eps: float | None = None) -> d.MambaConfig:
    """`norm_eps`: as in `MambaConfig`, of norms without a weight."""
    d.read_activation(reader)
    hidden = reader.positive("hidden_size")
    rank = reader.raw.get("time_step_rank", "auto")
    reader.expect("time_step_rank", rank)
    width = reader.positive("intermediate_size", int(reader.positive_number("expand", 2) * hidden))
    reader.expect("d_inner", width)
    return d.MambaConfig(
        reader.positive("state_size", 16),
        reader.positive("conv_kernel", 4),
        width,
        math.ceil(hidden / 16) if rank == "auto" else reader.positive("time_step_rank"),
        reader.boolean("use_conv_bias", True),
        reader.boolean("use_bias", False),
        norm_eps,
        norm_has_weight=False,
    )


def mamba_decoder(reader: d.ConfigReader, mixer: d.PartConfig, *, tied: bool = True) -> d.DecoderConfig:
    """One mixer over and over; the last thing that a family reads. `tied`: what a missing key means."""
    reader.ignore(*TRAINING)
    # The names of the first checkpoints, beside those of transformers.
    reader.expect("d_model", reader.positive("hidden_size"))
    reader.expect("n_layer", reader.positive("num_hidden_layers"))
    reader.expect("rms_norm", True)
    reader.expect("ssm_cfg", {})
    norm = d.NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5))
    return d.read_decoder(
        reader,
        d.LayerConfig(attention=mixer, norms=d.OnePart(norm)),
        norm,
        positions=reader.positive("max_position_embeddings", _POSITIONS),
        tied=tied,
    )


class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon Mamba: Mamba with steps, B and C normalised."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return mamba_decoder(reader, _read_mamba(reader, reader.positive_number("mixer_rms_eps", 1e-6)))


class Mamba2ForCausalLM(MambaForCausalLM):
    """Mamba 2: layers of one recurrent mixer each, without attention."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.read_activation(reader)
        mixer = read_mixer(reader, reader.positive_number("layer_norm_epsilon", 1e-5))
        width = reader.positive_number("expand", 2) * reader.positive("hidden_size", 4096)
        own = mixer.heads * mixer.head_size
        if own != width:
            wanted = f"of heads of {mixer.head_size} with {width:g} channels together"
            raise reader.error("num_heads", mixer.heads, wanted)
        reader.expect("intermediate_size", own)
        # Of other forms of the recurrence; the last is set for models whose gate comes first.
        reader.ignore("time_step_rank", "chunk_size", "norm_before_gate")
        return mamba_decoder(reader, mixer, tied=False)


def read_mixer(
    reader: d.ConfigReader, eps: float, names: tuple[str, str, str] = ("num_heads", "head_dim", "state_size")
) -> d.Mamba2Config:
    """From keys without a prefix; `names`: of those that families spell in their own way."""
    heads, size, states = names
    return d.Mamba2Config(
        reader.positive(heads, 128),
        reader.positive(size, 64),
        reader.positive("n_groups", 8),
        reader.positive(states, 128),
        reader.positive("conv_kernel", 4),
        reader.boolean("use_conv_bias", True),
        reader.boolean("use_bias", False),
        eps,
        dt_limit=d.read_step_limits(reader),
    )


class BambaForCausalLM(d.DecoderForCausalLM):
    """Bamba: Llama with Mamba 2 in the place of most attention."""

    renames = (
        ("model.layers.*.feed_forward", "model.layers.*.mlp"),
        ("model.layers.*.pre_ff_layernorm", "model.layers.*.post_attention_layernorm"),
        ("model.final_layernorm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore("num_logits_to_keep", "z_loss_coefficient")  # of transformers' own forward and of training
        rope, norm = reader.rope(default_share=0.5), d.read_rms_norm(reader, 1e-5)
        heads = d.read_heads(reader, default_kv_heads=8)
        reader.expect("attn_rotary_emb", int(heads.size * rope.partial_rotary_factor))
        attention, mamba = d.read_attention(reader, rope, heads), d.read_mamba2(reader, norm.eps)
        mlp = d.GatedMLPConfig(
            reader.positive("intermediate_size", 14336),
            reader.string("hidden_act", "silu"),
            reader.boolean("mlp_bias", False),
        )
        attends = set(reader.integers("attn_layer_indices") or ())
        mixers = [attention if index in attends else mamba for index in range(reader.positive("num_hidden_layers"))]
        return d.uniform_decoder(reader, mixers, norm, mlp=mlp, rope=rope, positions=262_144)


class JambaForCausalLM(d.DecoderForCausalLM):
    """Jamba: Mamba in the place of most attention, experts in the place of some feed-forwards."""

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
        attention, mamba = d.AttentionConfig(d.read_heads(reader, default_kv_heads=8)), _read_jamba_mamba(reader, norm)
        plain = d.GatedMLPConfig(size, activation)
        top_k, experts = reader.positive("num_experts_per_tok", 2), reader.positive("num_experts", 16)
        mixture = plain if experts == 1 else d.MoEConfig(experts, top_k, size, activation, renormalize=False)
        return d.uniform_decoder(
            reader,
            [attention if attends else mamba for attends in _every(reader, "attn", 8, 4)],
            norm,
            mlp=[mixture if mixes else plain for mixes in _every(reader, "expert", 2, 1)],
            positions=262_144,
        )


def _every(reader: d.ConfigReader, name: str, period: int, offset: int) -> list[bool]:
    """Whether each layer is one of those that come once in a period; `period` and `offset` are defaults."""
    period, offset = reader.positive(f"{name}_layer_period", period), reader.count(f"{name}_layer_offset", offset)
    return [index % period == offset for index in range(reader.positive("num_hidden_layers"))]


def _read_jamba_mamba(reader: d.ConfigReader, norm: d.NormConfig) -> d.MambaConfig:
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


@dataclass(frozen=True, kw_only=True)
class SideBySide(d.LayerConfig):
    """A layer with a recurrence beside its attention."""

    mamba: d.PartConfig

    @property
    def parts(self) -> Mapping[str, d.PartConfig]:
        return {"mamba": self.mamba, **super().parts}


class SideBySideLayer(d.PreNormLayer):
    mamba: nn.Module

    def __init__(self, layer: d.LayerConfig, norms: "ScaledSums", context: d.BuildContext, prefix: str) -> None:
        super().__init__(layer, norms, context, prefix)
        self.norms = norms

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> d.Stream:
        hidden, residual = d.add_norm(self.input_layernorm, hidden, residual)
        (first, last), (before, after) = self.norms.mamba, self.norms.attention
        states = self.mamba(hidden * first, batch) * last
        hidden = states + getattr(self, self.mixer_name)(hidden * before, batch) * after
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden, batch), residual


@dataclass(frozen=True)
class ScaledSums(d.PreNorms):
    """x + mamba(norm(x)) + attention(norm(x)), each with constants on what goes in and comes out; then the MLP."""

    layer = SideBySideLayer
    mamba: tuple[float, float]
    attention: tuple[float, float]


class FalconH1ForCausalLM(d.DecoderForCausalLM):
    """Falcon-H1: attention and Mamba 2 side by side in every layer, and constants on everything."""

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


# Letters of `hybrid_override_pattern`, and the names in `layers_block_type` of transformers 4 and 5.
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS |= {kind: kind for kind in _KINDS.values()} | {"linear_attention": "mamba", "full_attention": "attention"}
# Of other forms of the recurrence, and of layers that there are none of.
_UNUSED_BY_NEMOTRON = """
    use_mamba_kernels num_logits_to_keep chunk_size expand rms_norm_eps mamba_proj_bias mamba_ssm_cache_dtype n_group
    topk_group norm_topk_prob routed_scaling_factor num_nextn_predict_layers output_router_logits num_hidden_layers
""".split()
_UNUSED_PARTS = ("moe", "expert", "mtp", "hybrid")


class NemotronHForCausalLM(d.DecoderForCausalLM):
    """Nemotron-H: layers of one part: Mamba 2, attention without positions, a feed-forward or experts without gates.

    Steps are clamped to `time_step_limit`, as in the authors' code and vLLM; transformers clamps those of prompts, and
    not those of single tokens, from below at `time_step_min`.
    """

    renames = (
        ("backbone.embeddings", "model.embed_tokens"),
        ("backbone.layers.*.norm", "model.layers.*.input_layernorm"),
        ("backbone.norm_f", "model.norm"),
        ("backbone", "model"),
        ("model.embeddings", "model.embed_tokens"),
        ("model.layers.*.norm", "model.layers.*.input_layernorm"),
        ("model.norm_f", "model.norm"),
    )
    ignores_weight = staticmethod(predicts_second_token)

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore(
            *TRAINING, *_UNUSED_BY_NEMOTRON, *(key for key in reader.raw if any(part in key for part in _UNUSED_PARTS))
        )
        reader.expect("sliding_window", None)
        norm = d.NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5))
        heads = d.read_heads(reader, default_kv_heads=8, default_size=128)
        size, activation = reader.positive("intermediate_size", 21504), reader.string("mlp_hidden_act", "relu2")
        d.read_activation(reader, "mamba_hidden_act")
        parts: dict[str, d.PartConfig] = {
            "mamba": read_mixer(reader, norm.eps, ("mamba_num_heads", "mamba_head_dim", "ssm_state_size")),
            "attention": d.read_attention(reader, None, heads),
            "mlp": d.PlainMLPConfig(size, activation, reader.boolean("mlp_bias", False)),
        }
        kinds = _read_kinds(reader)
        parts |= {"moe": _read_experts(reader)} if "moe" in kinds else {}
        layers = [d.MixerLayer(attention=parts[kind], norms=d.OnePart(norm)) for kind in kinds]
        return d.read_decoder(reader, layers, norm, positions=reader.positive("max_position_embeddings", 4096))


def _read_kinds(reader: d.ConfigReader) -> list[str]:
    key = "layers_block_type" if "layers_block_type" in reader.raw else "hybrid_override_pattern"
    given = reader.names(key) if key == "layers_block_type" else list(reader.string(key))
    if not given or not _KINDS.keys() >= set(given):
        raise reader.error(key, given, f"of {', '.join(map(repr, _KINDS))}")
    return [_KINDS[kind] for kind in given]


def _read_experts(reader: d.ConfigReader) -> d.MoEConfig:
    """DeepSeek V3's choice of experts that have no gate, in front of which hidden states may be projected."""
    reader.expect("n_shared_experts", 1)
    return replace(
        sigmoid_experts(reader, 8, 2, 7688, groups=1, best=1, scale=1.0),
        activation=reader.string("mlp_hidden_act", "relu2"),
        shared_size=reader.positive("moe_shared_expert_intermediate_size", 7688),
        shared_bias=reader.boolean("mlp_bias", False),
        latent_size=reader.optional_positive("moe_latent_size"),
    )


_NORMS = (
    ("pre_mixer_norm", "input_layernorm"),
    ("post_mixer_norm", "post_attention_layernorm"),
    ("pre_mlp_norm", "pre_feedforward_layernorm"),
    ("post_mlp_norm", "post_feedforward_layernorm"),
    *((f"mixer.{name}_weight", f"self_attn.{name}_norm.weight") for name in "qk"),
    *((f"mixer.{name}_norm_weight", f"self_attn.{name}_norm.weight") for name in ("B", "C", "dt")),
)
# Of another form of the recurrence, and of images and evaluation, which must be off.
_UNUSED_BY_PLAMO = "mamba_chunk_size image_feature_size image_proj_type fp8_accum_dtype".split()
_OFF = {"image_token_id": None, "eval_attention_n_bit": None, "eval_mlp_n_bit": None, "linear_type": "normal"}


class Plamo2ForCausalLM(d.DecoderForCausalLM):
    """PLaMo 2: Mamba 2's recurrence and attention in turn, with norms in front of and behind every part."""

    packed_modules_mapping = d.NOTHING_PACKED  # checkpoints have the matrices together
    renames = (
        *((f"model.layers.layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _NORMS),
        ("model.layers.layers.*.mixer", "model.layers.*.self_attn"),
        ("model.layers.layers", "model.layers"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore(*_UNUSED_BY_PLAMO)
        for key, value in _OFF.items():
            reader.expect(key, value)
        norm = d.read_rms_norm(reader, kind=d.GemmaRMSNorm)
        size, count = reader.positive("hidden_size_per_head", 128), reader.positive("num_hidden_layers", 32)
        heads = reader.positive("num_attention_heads", 32)
        attention = d.AttentionConfig(
            d.Heads(heads, reader.positive("num_key_value_heads", 4), size), qk_norm=norm, qk_norm_over="own head"
        )
        scanning, rank = reader.positive("mamba_num_heads", 64), max(64, reader.positive("hidden_size", 4096) // 16)
        states, kernel = reader.positive("mamba_d_state", 64), reader.positive("mamba_d_conv", 4)
        mamba = d.Plamo2MambaConfig(scanning, size, states, kernel, rank, norm.eps)
        mlp = d.GatedMLPConfig(reader.positive("intermediate_size", 13312))
        behind = replace(norm, weight_offset=0.2), replace(norm, weight_offset=5**-1.5)
        mixers = [
            replace(attention, rope=rope, sliding_window=window) if is_attention else mamba
            for is_attention, (rope, window) in zip(_attends(reader, count), _sights(reader, count), strict=True)
        ]
        layers = [d.LayerConfig(attention=mixer, mlp=mlp, norms=d.PreAndPostNorms(norm, *behind)) for mixer in mixers]
        return d.read_decoder(
            reader, layers, norm, positions=reader.positive("max_position_embeddings", 2048), tied=True
        )


def _attends(reader: d.ConfigReader, count: int) -> list[bool]:
    """Which layers have attention: one in `mamba_step`, and the last of a model with too few layers for that."""
    step = reader.positive("mamba_step", 2)
    if not reader.boolean("mamba_enabled", True):
        return [True] * count
    if step == 1:
        raise reader.error("mamba_step", step, "above 1")
    middle = step // 2
    return [index == count - 1 if count <= middle else index % step == middle for index in range(count)]


def _sights(reader: d.ConfigReader, count: int) -> list[tuple[d.RopeParameters, int | None]]:
    """The rope of each layer and its window: a token sees so many before it, all in layers of `full_attention_idx`."""
    window, full = reader.positive("attention_window_size", 2048), reader.integers("full_attention_idx") or []
    reader.expect("sliding_window", window)  # the same again, for vLLM
    rope = reader.rope()
    local = replace(rope, theta=reader.positive_number("rope_local_theta", rope.theta, above=1.0))
    return [(rope, None) if index in full else (local, window + 1) for index in range(count)]
