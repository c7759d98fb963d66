"""EXAONE 4 and K-EXAONE."""

from llm.models import decoder as d


class Exaone4ForCausalLM(d.DecoderForCausalLM):
    """EXAONE 4: post-norms and QK norm per head; in models with windows, full-attention layers have no rope."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm, heads = reader.rope(), d.read_rms_norm(reader, 1e-5), d.read_heads(reader)
        window = reader.optional_positive("sliding_window", 4096)
        mlp = d.read_gated_mlp(reader)

        def layer(size: int | None) -> d.LayerConfig:
            rotates = size is not None or window is None
            attention = d.AttentionConfig(heads, rope if rotates else None, size, qk_norm=norm)
            return d.LayerConfig(attention=attention, mlp=mlp, norms=d.PostNorms(norm))

        layers = [layer(size) for size in _windows(reader, window)]
        return d.read_decoder(reader, layers, norm, positions=d.longest_sequence(reader, rope))


def _windows(reader: d.ConfigReader, window: int | None) -> list[int | None]:
    """`sliding_window_pattern` is a number n, every nth layer sees all, or "LLLG", letters for local and global."""
    count, given = reader.positive("num_hidden_layers"), reader.raw.get("sliding_window_pattern", 4)
    if isinstance(given, str):
        pattern = reader.string("sliding_window_pattern")
        if set(pattern) - set("LG") or not pattern:
            raise reader.error("sliding_window_pattern", pattern, "a number, or letters L and G")
        local = [pattern[index % len(pattern)] == "L" for index in range(count)]
    else:
        every = reader.integer("sliding_window_pattern", 4)
        local = [every > 0 and (index + 1) % every != 0 for index in range(count)]
    return d.layer_windows(reader, count, window, [window is not None and is_local for is_local in local])


_BIAS = "e_score_correction_bias"


class ExaoneMoeForCausalLM(d.DecoderForCausalLM):
    """K-EXAONE: EXAONE 4's attention under norms before each part, with DeepSeek V3's experts."""

    renames = ((f"model.layers.*.mlp.{_BIAS}", f"model.layers.*.mlp.gate.{_BIAS}"),)
    left_out = ("mtp",)  # layers that predict a second token

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        reader.ignore("num_nextn_predict_layers")
        reader.expect("scoring_func", "sigmoid")
        reader.expect("topk_method", "noaux_tc")
        rope, norm, heads = reader.rope(), d.read_rms_norm(reader, 1e-5), d.read_heads(reader)
        window = reader.optional_positive("sliding_window", 4096)
        activation, inner = reader.string("hidden_act", "silu"), reader.positive("moe_intermediate_size", 1024)
        dense = d.GatedMLPConfig(reader.positive("intermediate_size"), activation)
        sparse = d.MoEConfig(
            reader.positive("num_experts", 64),
            reader.positive("num_experts_per_tok", 8),
            inner,
            activation,
            renormalize=reader.boolean("norm_topk_prob", True),
            scoring="sigmoid",
            correction_bias=True,
            groups=reader.positive("n_group", 1),
            topk_group=reader.positive("topk_group", 1),
            routed_scaling_factor=reader.number("routed_scaling_factor", 2.5),
            shared_size=inner * reader.positive("num_shared_experts", 1),
        )

        def layer(size: int | None, is_sparse: bool) -> d.LayerConfig:
            rotates = size is not None or window is None
            attention = d.AttentionConfig(heads, rope if rotates else None, size, qk_norm=norm)
            return d.LayerConfig(attention=attention, mlp=sparse if is_sparse else dense, norms=d.PreNorms(norm))

        kinds = d.layers_with_experts(reader, reader.count("first_k_dense_replace", 1))
        layers = map(layer, _windows(reader, window), kinds)
        return d.read_decoder(reader, layers, norm, positions=d.longest_sequence(reader, rope))
