"""The language model in a checkpoint of a family that reads images and has no class of its own here.

config.json is read with transformers' config class, which knows what its missing keys mean; the object under
"text_config" names the language model's family. Its class, with the names that weights have in such a checkpoint, is
made here: `Images_LlamaForCausalLM` is that of Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import nn

from llm.base.text import show
from llm.base.types import JsonObject
from llm.errors import UnsupportedModelError
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM
from llm.models.text_part import TextPart, in_text_part, read_text_part
from llm.models.transformers_backend.skeleton import Theirs

_PREFIX = "Images_"
# The name of a language model's config in transformers -> the family whose class reads it.
_SAME = {
    "deepseek_ocr2_text": "deepseek_v2",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "paddleocr_vl_text": "llama",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Families whose language model in transformers multiplies its embeddings after features are among them.
_MULTIPLIES_FEATURES = ("granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "granite_swa", "hyperclovax")
_made: dict[str, type] = {}


class ReadsImages(TextPart):
    """Before a family's class among the bases."""

    renames = (
        ("language_model.model.encoder", "model"),  # of Qianfan-OCR as transformers saves it
        ("model.language_model.lm_head", "lm_head"),
        *TextPart.renames,
        ("model.text_model", "model"),
        ("language_model", "model"),
    )

    def ignores_weight(self, name: str) -> bool:
        """Those of the other parts: the vision tower, which reads them, is as strict."""
        segments = name.split(".")
        own = {own for own, _ in cast("nn.Module", self).named_children()} - {"model"}
        own |= {own for own, _ in cast("nn.Module", self).get_submodule("model").named_children()}
        while len(segments) > 1 and segments[0] in ("model", "language_model", "text_model"):
            segments.pop(0)
        return segments[0] not in own


def language_family(raw: dict[str, Theirs]) -> str:
    """The model_type of the language model in a decoded config.json; "": it names none."""
    text = raw.get("text_config")
    named = text.get("model_type") if isinstance(text, dict) else None
    if isinstance(named, str):
        return _SAME.get(named, named)
    found = _theirs(raw)
    return _SAME.get(found.model_type, found.model_type)


def feature_multiplier(raw: JsonObject, architecture: object) -> float:
    """What features of pictures are multiplied by before they enter the first layer. `raw`: the decoded config.json."""
    found = float(getattr(architecture, "embedding_multiplier", 1.0))
    if found == 1.0 or not isinstance(raw.get("vision_config"), Mapping):
        return 1.0
    return found if language_family(dict(raw)) in _MULTIPLIES_FEATURES else 1.0


def class_of(family: str) -> type | None:
    """The class for the language model of this family in such a checkpoint; None: the family has no class here."""
    from llm.models.registry import resolve_model_cls

    try:
        own = resolve_model_cls([], family)
    except UnsupportedModelError:
        return None
    return _made_of(own) if issubclass(own, DecoderForCausalLM) else None


def _made_of(own: type[DecoderForCausalLM]) -> type:
    name = f"{_PREFIX}{own.__name__}"
    if name not in _made:

        def read_config(cls: type, reader: ConfigReader) -> DecoderConfig:
            return _read(own, reader)

        _made[name] = type(
            name,
            (ReadsImages, own),
            {
                "__module__": __name__,
                "__doc__": f"{own.__name__} in a checkpoint that reads images.",
                "renames": (*in_text_part(own.renames), *ReadsImages.renames),
                "read_config": classmethod(read_config),
            },
        )
    return _made[name]


def __getattr__(name: str) -> type:
    """The classes by name, so that they can be pickled."""
    from llm.models.registry import class_named

    own = class_named(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if own is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _made_of(own)


def _read(own: type[DecoderForCausalLM], reader: ConfigReader) -> DecoderConfig:
    text = _theirs(reader.raw).to_dict()
    known = {key: value for key, value in text.items() if value is not None}
    known |= {"model_type": language_family(reader.raw)}
    known |= {**reader.nested("text_config")} | {"model_type": known["model_type"]}
    if reader.family == "paligemma":
        for key in ("use_bidirectional_attention", "num_image_tokens"):  # of prompts with pictures, see inputs.py
            known.pop(key, None)
    if reader.family == "glm_ocr":
        known["attention_bias"] = False
    if reader.family == "paddleocr_vl":
        known["attention_bias"] = known["mlp_bias"] = known.pop("use_bias", False)
    if reader.family == "deepseek_ocr2":
        kinds = known.pop("mlp_layer_types", None) or ["sparse"]
        known |= {"use_mla": False, "first_k_dense_replace": kinds.index("sparse") if "sparse" in kinds else len(kinds)}
        if "dense" in kinds[known["first_k_dense_replace"] :]:
            raise reader.error("text_config.mlp_layer_types", kinds, "dense layers first")
    if reader.family == "qwen3_vl_moe":
        known["norm_topk_prob"] = True  # in transformers its router always does
    outside = {key: reader.raw[key] for key in ("tie_word_embeddings",) if key in reader.raw}
    left = {"model_type": reader.family, "text_config": known, **outside}
    return read_text_part(ConfigReader(left), own, {}, ())


def _theirs(raw: Theirs) -> Theirs:
    """transformers' config of the language model."""
    from transformers import AutoConfig, PreTrainedConfig

    from llm.models.transformers_backend.skeleton import refusing, without_warnings

    given = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map", "quantization_config")}
    with refusing("transformers cannot read config.json"), without_warnings():
        config: Theirs = AutoConfig.for_model(raw["model_type"], **PreTrainedConfig._decode_special_floats(given))
        found = config.get_text_config(decoder=True)
    if found is config:
        raise UnsupportedModelError(f"config.json of {show(raw['model_type'])} has no config of a language model.")
    return found
