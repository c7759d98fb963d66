"""The language model in a multimodal checkpoint: prompts are text, so the other parts are neither built nor loaded.

Here are its nested config.json and the names of the weights; what the language model is, is its family's.
"""

from collections.abc import Mapping
from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, Renames


class TextPart:
    """Before a family's class among the bases: the names of the weights, first releases and transformers 5 alike."""

    renames: ClassVar[Renames] = (
        ("language_model.model", "model"),
        ("language_model.lm_head", "lm_head"),
        ("model.language_model", "model"),
    )
    left_out: ClassVar[tuple[str, ...]] = (
        "vision_tower",
        "multi_modal_projector",
        "model.vision_tower",
        "model.multi_modal_projector",
        "visual",
        "model.visual",
        "vision_model",
        "model.vision_model",
        "model.embed_vision",
        "model.audio_tower",
        "model.embed_audio",
    )
    # Keys beside "text_config" that are about the other parts; what the keys mean that "text_config" lacks.
    others: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, object]] = {}

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        family = cls.__mro__[cls.__mro__.index(TextPart) + 1]
        return read_text_part(reader, family, cls.defaults, cls.others)


def in_text_part(renames: Renames) -> Renames:
    """A family's renames for the names that its weights have in a multimodal checkpoint."""
    outer = ("language_model.model", "model.language_model")
    return tuple(
        (f"{prefix}.{source.removeprefix('model.')}", target) for source, target in renames for prefix in outer
    )


def read_text_part(
    reader: ConfigReader, family: type[DecoderForCausalLM], defaults: Mapping[str, object], others: tuple[str, ...]
) -> DecoderConfig:
    """The config of `family`, from the object under "text_config".

    Args:
        defaults: what the keys mean that the object lacks.
        others: keys beside it that are about the other parts.
    """
    outside = {key: reader.raw[key] for key in ("tie_word_embeddings",) if key in reader.raw}
    text = {**defaults, **outside, **reader.nested("text_config")}
    config = family.read_config(ConfigReader(_with_one_position(text), "config.json, text_config"))
    for key in (*outside, *others, "vision_config"):
        reader.expect(key, reader.raw.get(key))
    reader.finish()
    return config


def _with_one_position(raw: Mapping[str, object]) -> dict[str, object]:
    """Multimodal ropes are ordinary ones, whose sections follow three positions (temporal, vertical, horizontal)."""
    found = dict(raw)
    for key in ("rope_parameters", "rope_scaling"):
        rope = found.get(key)
        if isinstance(rope, Mapping):
            found[key] = {name: "default" if value == "mrope" else value for name, value in rope.items()}
    return found
