"""What families with experts spell alike: keys of config.json, and names of weights."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder.moe import MoEConfig

# Mixtral's names: w1 is the gate, w3 the value, w2 goes down.
W1_W2_W3 = (
    ("model.layers.*.block_sparse_moe.experts.*.w1", "model.layers.*.mlp.experts.*.gate_proj"),
    ("model.layers.*.block_sparse_moe.experts.*.w2", "model.layers.*.mlp.experts.*.down_proj"),
    ("model.layers.*.block_sparse_moe.experts.*.w3", "model.layers.*.mlp.experts.*.up_proj"),
    ("model.layers.*.block_sparse_moe", "model.layers.*.mlp"),
)


def ignore_training(reader: ConfigReader) -> None:
    """Keys of the router that matter when a model is trained."""
    for key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef"):
        reader.expect(key, reader.raw.get(key))


def sparse_layers(reader: ConfigReader) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th but those in `mlp_only_layers`."""
    count = reader.positive("num_hidden_layers")
    step = reader.positive("decoder_sparse_step", 1)
    dense = set(reader.integers("mlp_only_layers") or ())
    return [(index + 1) % step == 0 and index not in dense for index in range(count)]


def layers_with_experts(reader: ConfigReader, first: int) -> list[bool]:
    """Which layers have experts, from `mlp_layer_types`; without it, all but the `first` ones."""
    count, kinds = reader.positive("num_hidden_layers"), reader.names("mlp_layer_types")
    if kinds is None:
        return [index >= first for index in range(count)]
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise reader.error("mlp_layer_types", kinds, f"{count} of 'dense' or 'sparse'")
    return [kind == "sparse" for kind in kinds]


def qwen_experts(reader: ConfigReader, count: int = 512, best: int = 10) -> MoEConfig:
    """Qwen's, with a shared expert that has a gate; `count` and `best` are defaults."""
    ignore_training(reader)
    return MoEConfig(
        reader.positive("num_experts", count),
        reader.positive("num_experts_per_tok", best),
        reader.positive("moe_intermediate_size", 512),
        reader.string("hidden_act", "silu"),
        renormalize=reader.boolean("norm_topk_prob", True),
        shared_size=reader.positive("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
