"""EXAONE 4 and K-EXAONE."""

from dataclasses import replace

from llm.models import decoder as d
from llm.models.deepseek import sigmoid_experts


class Exaone4ForCausalLM(d.DecoderForCausalLM):
    """EXAONE 4: post-norms and QK norm per head; in models with windows, full-attention layers have no rope."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm = reader.rope(), d.read_rms_norm(reader, 1e-5)
        return d.uniform_decoder(reader, _attention(reader, rope, norm), norm, norms=d.PostNorms(norm), rope=rope)


def _attention(reader: d.ConfigReader, rope: d.RopeParameters, norm: d.NormConfig) -> list[d.AttentionConfig]:
    """Of each layer; in models with windows, a layer without one has no rope."""
    window = reader.optional_positive("sliding_window", 4096)
    attention = d.AttentionConfig(d.read_heads(reader), rope, qk_norm=norm)
    parts = d.with_windows(attention, _windows(reader, window))
    return [replace(part, rope=None) if window and part.sliding_window is None else part for part in parts]


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
        reader = reader.renamed({"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"})
        reader.ignore("num_nextn_predict_layers")
        rope, norm = reader.rope(), d.read_rms_norm(reader, 1e-5)
        sparse, dense = sigmoid_experts(reader, 64, 8, 1024, groups=1, best=1, scale=2.5), d.read_gated_mlp(reader)
        kinds = d.layers_with_experts(reader, reader.count("first_k_dense_replace", 1))
        mlp = [sparse if is_sparse else dense for is_sparse in kinds]
        return d.uniform_decoder(reader, _attention(reader, rope, norm), norm, mlp=mlp, rope=rope)
