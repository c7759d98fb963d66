"""PLaMo 2: Mamba 2's recurrence and attention in turn, with norms in front of and behind every part."""

from dataclasses import replace

from llm.models import decoder as d

_NORMS = (
    ("pre_mixer_norm", "input_layernorm"),
    ("post_mixer_norm", "post_attention_layernorm"),
    ("pre_mlp_norm", "pre_feedforward_layernorm"),
    ("post_mlp_norm", "post_feedforward_layernorm"),
    *((f"mixer.{name}_weight", f"self_attn.{name}_norm.weight") for name in "qk"),
    *((f"mixer.{name}_norm_weight", f"self_attn.{name}_norm.weight") for name in ("B", "C", "dt")),
)
# Of another form of the recurrence, and of images and evaluation, which must be off.
_UNUSED = "mamba_chunk_size image_feature_size image_proj_type fp8_accum_dtype".split()
_OFF = {"image_token_id": None, "eval_attention_n_bit": None, "eval_mlp_n_bit": None, "linear_type": "normal"}


class Plamo2ForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.NOTHING_PACKED  # checkpoints have the matrices together
    renames = (
        *((f"model.layers.layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _NORMS),
        ("model.layers.layers.*.mixer", "model.layers.*.self_attn"),
        ("model.layers.layers", "model.layers"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore(*_UNUSED)
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
