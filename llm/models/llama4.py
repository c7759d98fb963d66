"""Llama 4."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from llm.models import decoder as d
from llm.models.text_part import TextPart, in_text_part

_LAYER = "model.layers.*"


class Llama4ForCausalLM(d.DecoderForCausalLM):
    """Layers without rope among layers that attend within chunks, and experts whose inputs are weighted."""

    renames: ClassVar[d.Renames] = (
        (f"{_LAYER}.feed_forward.router", f"{_LAYER}.mlp.gate"),
        (f"{_LAYER}.feed_forward.shared_expert", f"{_LAYER}.mlp.shared_experts"),
        (f"{_LAYER}.feed_forward", f"{_LAYER}.mlp"),
    )
    # Experts' matrices are stored as [inputs, outputs].
    stacked_weights: ClassVar[Mapping[str, d.Cut]] = {
        "experts.gate_up_proj": lambda part: d.gate_and_up(part.t()),
        "experts.down_proj": lambda part: d.down(part.t()),
    }

    @classmethod
    def declines(cls, config: Mapping[str, object]) -> str | None:
        """Why transformers' code computes this model by default; None: this class does."""
        text = config.get("text_config")
        best = (text if isinstance(text, Mapping) else config).get("num_experts_per_tok", 1)
        return None if best == 1 else "each of a token's experts has an input of its own"

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        reader.ignore("for_llm_compressor")
        rope, norm = reader.rope(500_000.0), d.read_rms_norm(reader, 1e-5)
        dense, sparse = _feed_forwards(reader)
        count, full = reader.positive("num_hidden_layers", 48), _attention(reader, norm.eps)
        interval = reader.positive("no_rope_layer_interval", 4)
        # An empty list is none.
        has_rope = reader.integers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
        every = reader.positive("interleave_moe_layer_step", 1)
        chosen = reader.integers("moe_layers")
        with_experts = set(range(every - 1, count, every) if chosen is None else chosen)
        chunks = _chunks(reader, has_rope)
        if len(has_rope) != count:
            raise reader.error("no_rope_layers", has_rope, f"{count} of 0 or 1")
        use_qk_norm = reader.boolean("use_qk_norm", True)
        rotated = replace(
            full, rope=rope, query_scale=None, qk_norm=replace(norm, has_weight=False) if use_qk_norm else None
        )

        def layer(index: int) -> d.LayerConfig:
            attention = replace(rotated if has_rope[index] else full, attention_chunk=chunks[index])
            mlp = sparse if index in with_experts else dense
            return d.LayerConfig(attention=attention, mlp=mlp, norms=d.PreNorms(norm))

        return d.read_decoder(
            reader, map(layer, range(count)), norm, positions=d.longest_sequence(reader, rope, 131_072)
        )


def _attention(reader: d.ConfigReader, eps: float) -> d.AttentionConfig:
    """Of a layer without rope."""
    scale = d.QueryScale(reader.number("attn_scale", 0.1), reader.positive("floor_scale", 8192), first=1)
    return d.read_attention(
        reader,
        None,
        d.read_heads(reader, default_kv_heads=8, default_size=128),
        rope_interleaved=True,
        qk_norm_after_rope=True,
        query_scale=scale if reader.boolean("attn_temperature_tuning", True) else None,
    )


def _chunks(reader: d.ConfigReader, has_rope: list[int]) -> list[int | None]:
    """The chunk within which each layer attends; None: it attends to all."""
    size = reader.optional_positive("attention_chunk_size", 8192)
    default = ["chunked_attention" if rotates else "full_attention" for rotates in has_rope]
    kinds = reader.names("layer_types") or default
    if len(kinds) != len(default) or set(kinds) - {"chunked_attention", "full_attention"}:
        raise reader.error("layer_types", kinds, f"{len(default)} of 'full_attention' or 'chunked_attention'")
    if "chunked_attention" in kinds and (size is None or size < 1):
        raise reader.error("attention_chunk_size", size, "an integer of at least 1, for layers of chunked_attention")
    return [size if kind == "chunked_attention" else None for kind in kinds]


def _feed_forwards(reader: d.ConfigReader) -> tuple[d.PartConfig, d.PartConfig]:
    """(of layers without experts, of those with)."""
    activation, inner = reader.string("hidden_act", "silu"), reader.positive("intermediate_size", 8192)
    reader.expect("num_experts_per_tok", 1)  # with more, each expert of a token would have an input of its own
    return d.GatedMLPConfig(reader.positive("intermediate_size_mlp", 16384), activation), d.MoEConfig(
        reader.positive("num_local_experts", 16),
        1,
        inner,
        activation,
        renormalize=False,
        scoring="sigmoid",
        weight_on_input=True,
        shared_size=inner,
    )


_OTHERS = ("boi_token_index", "eoi_token_index", "image_token_index")


class Llama4ForConditionalGeneration(TextPart, Llama4ForCausalLM):
    """Llama 4 multimodal (Scout, Maverick): its language model."""

    renames = (*in_text_part(Llama4ForCausalLM.renames), *TextPart.renames)
    others = _OTHERS
