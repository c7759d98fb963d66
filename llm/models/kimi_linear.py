"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others, and experts."""

from collections.abc import Mapping
from typing import ClassVar

from llm.models import decoder as d
from llm.models.deepseek import sigmoid_experts

# Names of keys in published files -> DeepSeek V3's.
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_router_activation_func": "scoring_func",
}
# Of heads that latents have not, and of rope, which there is none of.
_UNUSED = "num_key_value_heads head_dim qk_head_dim rope_theta rope_scaling rope_parameters use_grouped_topk".split()


class KimiLinearForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **d.DecoderForCausalLM.packed_modules_mapping,
        "conv1d": ["q_conv1d", "k_conv1d", "v_conv1d"],
    }
    renames = d.W1_W2_W3

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        spelled = {_NAMES[key]: key for key in reader.decoded if key in _NAMES}
        reader = d.ConfigReader({_NAMES.get(key, key): value for key, value in reader.decoded.items()}, spelled=spelled)
        d.ignore_training(reader)
        reader.ignore(*_UNUSED)
        for key, value in {"mla_use_nope": True, "moe_layer_freq": 1, "num_nextn_predict_layers": 0}.items():
            reader.expect(key, value)
        norm, count = d.read_rms_norm(reader, 1e-5), reader.positive("num_hidden_layers")
        nested = reader.nested("linear_attn_config")
        attention, linear = _latent(reader), _delta(reader, nested, norm.eps)
        attended = nested.get("full_attn_layers")  # the first layer is 1
        default = [index + 1 in attended if isinstance(attended, list) else index % 4 == 3 for index in range(count)]
        mlps = {
            "dense": d.GatedMLPConfig(reader.positive("intermediate_size", 9216), reader.string("hidden_act", "silu")),
            "sparse": sigmoid_experts(reader, 256, 8, 1024, groups=1, best=1, scale=2.446),
        }
        first = reader.count("first_k_dense_replace", 1)
        kinds = reader.names("mlp_layer_types") or ["dense" if index < first else "sparse" for index in range(count)]
        if len(kinds) != count or not mlps.keys() >= set(kinds):
            raise reader.error("mlp_layer_types", kinds, f"{count} of 'dense' or 'sparse'")
        layers = [
            d.LayerConfig(attention=attention if attends else linear, mlp=mlps[kind], norms=d.PreNorms(norm))
            for attends, kind in zip(d.attending_layers(reader, count, default), kinds, strict=True)
        ]
        return d.read_decoder(reader, layers, norm, positions=reader.positive("max_position_embeddings", 1_048_576))


def _latent(reader: d.ConfigReader) -> d.LatentAttentionConfig:
    sizes = (("kv_lora_rank", 512), ("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128))
    latent, plain, shared, value = (reader.positive(*size) for size in sizes)
    heads, rank = reader.positive("num_attention_heads", 32), reader.optional_positive("q_lora_rank")
    bias = reader.boolean("attention_bias", False)
    return d.LatentAttentionConfig(heads, rank, latent, plain, shared, value, None, bias)


def _delta(reader: d.ConfigReader, nested: Mapping[str, object], eps: float) -> d.GatedDeltaConfig:
    """From `linear_attn_config` of published files, or from transformers' keys."""
    inner = d.ConfigReader({key: value for key, value in nested.items() if isinstance(value, int)})
    heads = inner.positive("num_heads", reader.positive("linear_num_heads", 32))
    size = inner.positive("head_dim", reader.positive("linear_head_dim", 128))
    kernel = inner.positive("short_conv_kernel_size", reader.positive("linear_conv_kernel_dim", 4))
    return d.GatedDeltaConfig("kimi", d.DeltaHeads(heads, heads, size, size), kernel, eps, activation="sigmoid")
