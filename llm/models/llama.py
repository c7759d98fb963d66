"""Llama 1 to 3, and models that differ from them in a few lines."""

from llm.models import decoder as d


class LlamaForCausalLM(d.DecoderForCausalLM):
    """Llama 1 to 3, and the models with the same config.json."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        mlp = d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False))
        return d.uniform_decoder(reader, d.read_attention(reader, reader.rope()), d.read_rms_norm(reader), mlp=mlp)


class ArceeForCausalLM(d.DecoderForCausalLM):
    """Arcee's AFM: Llama with an MLP without a gate, and relu squared."""

    packed_modules_mapping = d.QKV_PACKED

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        mlp = d.read_plain_mlp(reader, "relu2", bias=reader.boolean("mlp_bias", False))
        attention, norm = d.read_attention(reader, reader.rope()), d.read_rms_norm(reader, 1e-5)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=4096)


class HeliumForCausalLM(d.DecoderForCausalLM):
    """Helium: Llama with an interleaved rotary embedding."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=20, default_size=128),
            reader.rope(100_000.0),
            rope_interleaved=True,
            qkv_bias=reader.boolean("attention_bias", False),
        )
        mlp = d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False))
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader, 1e-8), mlp=mlp, positions=4096)


class SeedOssForCausalLM(d.DecoderForCausalLM):
    """Seed-OSS: Llama with a QKV bias."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("residual_dropout", reader.raw.get("residual_dropout"))
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=8, default_size=128),
            reader.rope(),
            qkv_bias=reader.boolean("attention_bias", True),
            out_bias=reader.boolean("attention_out_bias", False),
        )
        mlp = d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False))
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader), mlp=mlp, positions=524288)


class SmolLM3ForCausalLM(d.DecoderForCausalLM):
    """SmolLM3: Llama in which some layers, every fourth by default, have no rope."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm, heads = reader.rope(2_000_000.0), d.read_rms_norm(reader), d.read_heads(reader, default_kv_heads=4)
        count = reader.positive("num_hidden_layers")
        interval = reader.positive("no_rope_layer_interval", 4)
        has_rope = reader.integers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
        mlp = d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False))

        def layer(window: int | None, rotates: int) -> d.LayerConfig:
            attention = d.read_attention(reader, rope if rotates else None, heads, sliding_window=window)
            return d.LayerConfig(attention=attention, mlp=mlp, norms=d.PreNorms(norm))

        return d.read_decoder(
            reader,
            map(layer, _windows(reader, count, has_rope), has_rope),
            norm,
            positions=d.longest_sequence(reader, rope, 32768),
            tied=True,
        )


def _windows(reader: d.ConfigReader, count: int, has_rope: list[int]) -> list[int | None]:
    """The sliding window of each layer: with `use_sliding_window`, layers without rope have one."""
    window = reader.optional_positive("sliding_window")
    use = reader.boolean("use_sliding_window", False)
    reader.integer("max_window_layers", count)  # transformers does not read it either
    sliding = [use and window is not None and not rotates for rotates in has_rope]
    return d.layer_windows(reader, count, window if use else None, sliding)
