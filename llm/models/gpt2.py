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
# GPT-2's names of keys -> those of later families.
GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
}
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
        reader = reader.renamed(GPT2_KEYS)
        reader.expect("n_ctx", reader.positive("max_position_embeddings", 1024))
        reader.boolean("reorder_and_upcast_attn", False)  # the scores' precision, which is float32 here anyway
        attention = d.AttentionConfig(_heads(reader), qkv_bias=True, out_bias=True)
        layers = [attention] * reader.positive("num_hidden_layers")
        if reader.boolean("scale_attn_by_inverse_layer_idx", False):
            size = attention.heads.size
            layers = [replace(attention, scale=size**-0.5 / number) for number in range(1, len(layers) + 1)]
        return _decoder(reader, layers, "gelu_new")


def _heads(reader: d.ConfigReader, key_heads: int | None = None) -> d.Heads:
    """`key_heads`: None: as many as query heads."""
    heads = reader.positive("num_attention_heads")
    return d.Heads(heads, key_heads or heads, reader.positive("hidden_size") // heads)


def _decoder(
    reader: d.ConfigReader, attention: d.AttentionConfig | list[d.AttentionConfig], activation: str
) -> d.DecoderConfig:
    """GPT-2's decoder around its attention; `activation`: the default."""
    reader.expect("scale_attn_weights", True)
    inner = reader.positive("intermediate_size", 4 * reader.positive("hidden_size"))
    return d.uniform_decoder(
        reader,
        attention,
        d.read_layer_norm(reader),
        mlp=d.PlainMLPConfig(inner, reader.string("hidden_act", activation), bias=True),
        positions=1024,
        learned_positions=d.LearnedPositions(reader.positive("max_position_embeddings", 1024)),
        tied=True,
    )


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """SantaCoder and StarCoder: GPT-2 with one key head."""

    transposed_weights = ()

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader = reader.renamed(GPT2_KEYS)
        # Softmax is float32 here anyway, and the others say how transformers' older code ran.
        for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "validate_runner_input"):
            reader.boolean(key, True)
        for key in ("inference_runner", "pre_allocate_kv_cache", "pad_key_length", "max_batch_size"):
            reader.expect(key, reader.raw.get(key))
        heads = _heads(reader, 1 if reader.boolean("multi_query", True) else None)
        reader.expect("num_key_value_heads", heads.key_value)
        attention = d.AttentionConfig(heads, qkv_bias=True, out_bias=True, qkv_by_key_head=True)
        return _decoder(reader, attention, "gelu_pytorch_tanh")


_NEO_LAYER = (
    ("ln_1", "input_layernorm"),
    ("ln_2", "post_attention_layernorm"),
    ("attn.attention.out_proj", "self_attn.o_proj"),
    ("attn.attention", "self_attn"),
    ("mlp.c_fc", "mlp.up_proj"),
    ("mlp.c_proj", "mlp.down_proj"),
)

_NEO_KEYS = {
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
}


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
        reader = reader.renamed(_NEO_KEYS)
        reader.ignore("resid_dropout", "embed_dropout")
        hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
        positions = reader.positive("max_position_embeddings", 2048)
        attention = d.AttentionConfig(d.Heads(heads, heads, hidden // heads), out_bias=True, scale=1.0)
        activation, inner = reader.string("hidden_act", "gelu_new"), reader.positive("intermediate_size", 4 * hidden)
        return d.uniform_decoder(
            reader,
            d.with_windows(attention, _windows(reader)),
            d.read_layer_norm(reader),
            mlp=d.PlainMLPConfig(inner, activation, bias=True),
            learned_positions=d.LearnedPositions(positions),
            tied=True,
        )


def _windows(reader: d.ConfigReader) -> list[int | None]:
    """The window of each layer, from `attention_layers`, or as transformers writes them: ([kinds, repeats], ...)."""
    count, window = reader.positive("num_hidden_layers"), reader.positive("window_size", 256)
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
