"""MiniCPM3: latent attention, with constants on the embedding, each part's output and the logits."""

from llm.models import decoder as d


class MiniCPM3ForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm = reader.rope(), d.read_rms_norm(reader, 1e-5)
        hidden, count = reader.positive("hidden_size"), reader.positive("num_hidden_layers")
        attention = d.read_latent_attention(
            reader,
            rope,
            q_lora_rank=768,
            kv_lora_rank=256,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=hidden // reader.positive("num_attention_heads"),
            is_neox_style=True,
        )
        mlp = d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False))
        # null says that a constant is 1.
        depth = reader.optional_number("scale_depth", 1.4)
        base = reader.optional_number("dim_model_base", 256)
        if base is not None and base <= 0:
            raise reader.error("dim_model_base", base, "a positive number or null")
        layer = d.LayerConfig(
            attention=attention,
            mlp=mlp,
            norms=d.ScaledPreNorms(norm, 1.0 if depth is None else depth / count**0.5),
        )
        return d.read_decoder(
            reader,
            [layer] * count,
            norm,
            positions=d.longest_sequence(reader, rope, 32_768),
            tied=True,
            embedding_multiplier=reader.number("scale_emb", 12.0),
            logits_divisor=1.0 if base is None else hidden / base,
        )
