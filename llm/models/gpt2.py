"""GPT-2 and those that differ from it in a few lines: SantaCoder, StarCoder, GPT-Neo, OPT."""

from dataclasses import replace

from llm.models import decoder as d

_LAYER = (
    ("ln_1", "input_layernorm"),
    ("ln_2", "post_attention_layernorm"),
    ("attn.c_attn", "self_attn.qkv_proj"),
    ("attn.c_proj", "self_attn.o_proj"),
    ("mlp.c_fc", "mlp.up_proj"),
    ("mlp.c_proj", "mlp.down_proj"),
)
_MODEL = (("wte", "model.embed_tokens"), ("wpe", "model.embed_positions"), ("ln_f", "model.norm"))


class GPT2LMHeadModel(d.DecoderForCausalLM):
    """GPT-2: learned positions, LayerNorm, biases, and weights that the checkpoint stores transposed."""

    packed_modules_mapping = d.NOTHING_PACKED
    # The first checkpoints lack the prefix "transformer.".
    renames = tuple(
        (f"{prefix}{source}", target)
        for prefix in ("transformer.", "")
        for source, target in (*((f"h.*.{old}", f"model.layers.*.{new}") for old, new in _LAYER), *_MODEL)
    )
    # Causal masks that old checkpoints store as tensors.
    ignored_weights = ("attn.bias", "attn.masked_bias")
    transposed_weights = tuple(f"{name}_proj.weight" for name in ("qkv", "o", "up", "down"))

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        hidden, heads = reader.positive("n_embd"), reader.positive("n_head")
        positions = reader.positive("n_positions", 1024)
        reader.expect("n_ctx", positions)
        reader.expect("scale_attn_weights", True)
        reader.boolean("reorder_and_upcast_attn", False)  # the scores' precision, which is float32 here anyway
        norm = d.NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5), d.LayerNorm)
        attention = d.AttentionConfig(d.Heads(heads, heads, hidden // heads), qkv_bias=True, out_bias=True)
        layer = d.LayerConfig(
            attention=attention,
            mlp=d.PlainMLPConfig(
                reader.positive("n_inner", 4 * hidden), reader.string("activation_function", "gelu_new"), bias=True
            ),
            norms=d.PreNorms(norm),
        )
        layers = [layer] * reader.positive("n_layer")
        if reader.boolean("scale_attn_by_inverse_layer_idx", False):
            scales = [attention.heads.size**-0.5 / number for number in range(1, len(layers) + 1)]
            layers = [replace(layer, attention=replace(attention, scale=scale)) for scale in scales]
        config = d.DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            max_position_embeddings=positions,
            layers=tuple(layers),
            final_norm=norm,
            learned_positions=d.LearnedPositions(positions),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        )
        reader.finish()
        return config


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """SantaCoder and StarCoder: GPT-2 with one key head."""

    transposed_weights = ()

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        hidden, heads = reader.positive("n_embd"), reader.positive("n_head")
        positions = reader.positive("n_positions", 1024)
        reader.expect("scale_attn_weights", True)
        # Softmax is float32 here anyway, and the others say how transformers' older code ran.
        for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "validate_runner_input"):
            reader.boolean(key, True)
        for key in ("inference_runner", "pre_allocate_kv_cache", "pad_key_length", "max_batch_size"):
            reader.expect(key, reader.raw.get(key))
        norm = d.NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5), d.LayerNorm)
        key_heads = 1 if reader.boolean("multi_query", True) else heads
        reader.expect("num_key_value_heads", key_heads)
        activation = reader.string("activation_function", "gelu_pytorch_tanh")
        layer = d.LayerConfig(
            attention=d.AttentionConfig(
                d.Heads(heads, key_heads, hidden // heads), qkv_bias=True, out_bias=True, qkv_by_key_head=True
            ),
            mlp=d.PlainMLPConfig(reader.positive("n_inner", 4 * hidden), activation, bias=True),
            norms=d.PreNorms(norm),
        )
        config = d.DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            max_position_embeddings=positions,
            layers=(layer,) * reader.positive("n_layer"),
            final_norm=norm,
            learned_positions=d.LearnedPositions(positions),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        )
        reader.finish()
        return config


_NEO_LAYER = (
    ("ln_1", "input_layernorm"),
    ("ln_2", "post_attention_layernorm"),
    ("attn.attention.out_proj", "self_attn.o_proj"),
    ("attn.attention", "self_attn"),
    ("mlp.c_fc", "mlp.up_proj"),
    ("mlp.c_proj", "mlp.down_proj"),
)


class GPTNeoForCausalLM(d.DecoderForCausalLM):
    """GPT-Neo: GPT-2 with a window in every other layer, scores that are not scaled, and no bias on q, k and v."""

    packed_modules_mapping = d.QKV_PACKED
    renames = (
        *((f"transformer.h.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _NEO_LAYER),
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.wpe", "model.embed_positions"),
        ("transformer.ln_f", "model.norm"),
    )
    # Causal masks that old checkpoints carry as tensors.
    ignored_weights = ("attn.attention.bias", "attn.attention.masked_bias")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        hidden, heads = reader.positive("hidden_size", 2048), reader.positive("num_heads", 16)
        reader.ignore("resid_dropout", "embed_dropout")
        positions, norm = (
            reader.positive("max_position_embeddings", 2048),
            d.read_layer_norm(reader, "layer_norm_epsilon"),
        )
        mlp = d.PlainMLPConfig(
            reader.positive("intermediate_size", 4 * hidden), reader.string("activation_function", "gelu_new"), True
        )

        def layer(window: int | None) -> d.LayerConfig:
            attention = d.AttentionConfig(
                d.Heads(heads, heads, hidden // heads), sliding_window=window, out_bias=True, scale=1.0
            )
            return d.LayerConfig(attention=attention, mlp=mlp, norms=d.PreNorms(norm))

        config = d.DecoderConfig(
            vocab_size=reader.positive("vocab_size", 50257),
            hidden_size=hidden,
            max_position_embeddings=positions,
            layers=tuple(map(layer, _windows(reader))),
            final_norm=norm,
            learned_positions=d.LearnedPositions(positions),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        )
        reader.finish()
        return config


def _windows(reader: d.ConfigReader) -> list[int | None]:
    """The window of each layer, from `attention_layers`, or as transformers writes them: ([kinds, repeats], ...)."""
    count, window = reader.positive("num_layers", 24), reader.positive("window_size", 256)
    reader.ignore("attention_types")
    kinds = reader.names("attention_layers")
    if kinds is None:
        given = reader.raw.get("attention_types", [[["global", "local"], count // 2]])
        try:
            kinds = [kind for names, repeats in given for kind in names * min(int(repeats), count)]
        except (TypeError, ValueError):
            kinds = []
    if len(kinds) != count or set(kinds) - {"global", "local"}:
        raise reader.error("attention_types", kinds, f"{count} of 'global' or 'local', as [[kinds, repeats], ...]")
    return [window if kind == "local" else None for kind in kinds]


# Position 0 is row 2 of the table, because of the padding ids in its training code.
_POSITION_OFFSET = 2


class OPTForCausalLM(d.DecoderForCausalLM):
    """OPT: learned positions, LayerNorm, biases everywhere, a plain MLP."""

    packed_modules_mapping = d.QKV_PACKED
    renames = (
        ("model.decoder.layers.*.self_attn.out_proj", "model.layers.*.self_attn.o_proj"),
        ("model.decoder.layers.*.self_attn_layer_norm", "model.layers.*.input_layernorm"),
        ("model.decoder.layers.*.final_layer_norm", "model.layers.*.post_attention_layernorm"),
        ("model.decoder.layers.*.fc1", "model.layers.*.mlp.up_proj"),
        ("model.decoder.layers.*.fc2", "model.layers.*.mlp.down_proj"),
        ("model.decoder.final_layer_norm", "model.norm"),
        ("model.decoder", "model"),
        ("decoder", "model"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
        positions = reader.positive("max_position_embeddings", 2048)
        # Only opt-350m normalises the sums, has no final norm, and a narrower embedding.
        is_pre_norm = reader.boolean("do_layer_norm_before", True)
        width = reader.positive("word_embed_proj_dim", hidden)
        reader.expect("layer_norm_elementwise_affine", True)
        reader.expect("_remove_final_layer_norm", False)
        for key in ("dropout", "layerdrop", "init_std", "activation_dropout"):
            reader.expect(key, reader.raw.get(key))
        bias = reader.boolean("enable_bias", True)
        norm = d.NormConfig(1e-5, d.LayerNorm)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(d.Heads(heads, heads, hidden // heads), qkv_bias=bias, out_bias=bias),
            mlp=d.PlainMLPConfig(reader.positive("ffn_dim"), reader.string("activation_function", "relu"), bias=bias),
            norms=d.PreNorms(norm) if is_pre_norm else d.NormedSums(norm),
        )
        return d.read_decoder(
            reader,
            layer,
            norm if is_pre_norm else None,
            positions=positions,
            tied=True,
            embedding_size=None if width == hidden else width,
            learned_positions=d.LearnedPositions(positions + _POSITION_OFFSET, offset=_POSITION_OFFSET),
        )
