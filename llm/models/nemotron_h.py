"""Nemotron-H: layers of one part each, Mamba 2, attention without positions, a feed-forward or experts without gates.

Steps are clamped to `time_step_limit`, as in the authors' code and vLLM; transformers clamps those of prompts, and not
those of single tokens, from below at `time_step_min`.
"""

from dataclasses import replace

from llm.models import decoder as d
from llm.models.deepseek import sigmoid_experts
from llm.models.mamba import TRAINING, read_mixer
from llm.models.qwen3_next import predicts_second_token

# Letters of `hybrid_override_pattern`, and the names in `layers_block_type` of transformers 4 and 5.
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS |= {kind: kind for kind in _KINDS.values()} | {"linear_attention": "mamba", "full_attention": "attention"}
# Of other forms of the recurrence, and of layers that there are none of.
_UNUSED = """
    use_mamba_kernels num_logits_to_keep chunk_size expand rms_norm_eps mamba_proj_bias mamba_ssm_cache_dtype n_group
    topk_group norm_topk_prob routed_scaling_factor num_nextn_predict_layers output_router_logits num_hidden_layers
""".split()
_UNUSED_PARTS = ("moe", "expert", "mtp", "hybrid")


class NemotronHForCausalLM(d.DecoderForCausalLM):
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
        reader.ignore(*TRAINING, *_UNUSED, *(key for key in reader.raw if any(part in key for part in _UNUSED_PARTS)))
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
