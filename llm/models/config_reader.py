"""Strict, typed reading of config.json.

Every key is read by the family, or known not to matter for inference, or an error that names it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from llm.base.text import clip, list_names, show
from llm.errors import UnsupportedModelError
from llm.layers.rotary import RECIPES, RopeParameters

T = TypeVar("T")
_REQUIRED: Any = object()

# Keys of config.json that do not change what a decoder of any family computes at inference.
_HARMLESS = frozenset(
    """
    model_type architectures dtype torch_dtype transformers_version _name_or_path _model_name_or_path use_cache
    bos_token_id eos_token_id pad_token_id unk_token_id attention_dropout pretraining_tp output_attentions
    output_hidden_states initializer_range
    return_dict is_encoder_decoder id2label label2id problem_type chunk_size_feed_forward tokenizer_class
    _attn_implementation _attn_implementation_autoset gradient_checkpointing torchscript name_or_path unsloth_version
    unsloth_fixed task_specific_params prefix finetuning_task mlp_dropout hidden_dropout resid_pdrop embd_pdrop
    attn_pdrop language_model_type use_bfloat16 tf_legacy_loss
    auto_map cache_implementation _num_labels is_llama_config transformers.js_config pruned_heads is_decoder
    max_sequence_length model_max_length cross_attention_hidden_size decoder_start_token_id sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    num_labels classifier_dropout sentence_transformers sbert_ce_default_activation_function
    matryoshka_dimensions is_matryoshka classifier_from_token is_original_qwen3_reranker method
    """.split()
)

# Keys that generate() of older transformers read from config.json; now they are in generation_config.json.
_GENERATION = frozenset(
    """
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()
)

# Keys of config.json that turn a variant on -> the values that turn it off.
_OFF: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "lm_head_bias": (False,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
}

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts")
# Far above any model's: each layer and expert takes memory before weights are read.
_MOST = {**dict.fromkeys((*LAYER_KEYS, "num_layers"), 10_000), **dict.fromkeys(_EXPERT_KEYS, 4096)}
_LARGEST_SIZE = 2**40
_LARGEST_ID = 2**31 - 1
_LARGEST_NUMBER = 1e30

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ConfigReader:
    """Reads one config.json; `finish()` raises for keys that were not read.

    Args:
        raw: the decoded file, `hf_overrides` applied; a key whose value is None counts as absent.
        file: its name in error messages.
        spelled: keys that were renamed -> their names in the file, for error messages.

    Attributes:
        raw: the keys with a value; `decoded` has those that are null too, as whoever writes the file again needs it,
            and `given` is their names.
    """

    def __init__(
        self, raw: Mapping[str, Any], file: str = "config.json", spelled: Mapping[str, str] | None = None
    ) -> None:
        self._file = file
        self._spelled = spelled or {}
        self.decoded = dict(raw)
        self.given = frozenset(raw)
        self.raw = {key: value for key, value in raw.items() if value is not None}
        self.family = clip(str(self.raw.get("model_type", "?")), 60)
        self._read: set[str] = set()

    def renamed(self, names: Mapping[str, str]) -> ConfigReader:
        """A reader of the same file by other names: `names` has the file's name of a key -> the one to read it by.

        Raises:
            UnsupportedModelError: the file has a key by both names, with different values.
        """
        found = {key: value for key, value in self.decoded.items() if key not in names}
        spelled = {key: name for name, key in names.items() if key not in self.decoded}
        for name, key in names.items():
            if name not in self.decoded:
                continue
            value = self.decoded[name]
            if value is not None and found.get(key) not in (None, value):
                raise self.error(name, value, f"{show(found[key])}, as {key} is")
            if found.get(key) is None:
                found[key], spelled[key] = value, name
        reader = ConfigReader(found, self._file, {**self._spelled, **spelled})
        reader._read = {names.get(key, key) for key in self._read}
        return reader

    def integer(self, key: str, default: int = _REQUIRED) -> int:
        return self._get(key, int, default)

    def count(self, key: str, default: int = _REQUIRED) -> int:
        """An integer from 0 on."""
        if (value := self.integer(key, default)) < 0:
            raise self.error(key, value, "an integer of at least 0")
        return value

    def boolean(self, key: str, default: bool = _REQUIRED) -> bool:
        return self._get(key, bool, default)

    def string(self, key: str, default: str = _REQUIRED) -> str:
        return self._get(key, str, default)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A finite number."""
        value = self._get(key, (int, float), default)
        if not abs(value) <= _LARGEST_NUMBER:  # false for NaN
            raise self.error(key, value, "a finite number")
        return float(value)

    def positive_number(self, key: str, default: float = _REQUIRED, above: float = 0.0) -> float:
        value = self.number(key, default)
        if value <= above:
            raise self.error(key, value, f"a number above {above:g}")
        return value

    def positive(self, key: str, default: int = _REQUIRED) -> int:
        """An integer from 1 to a limit far above any model's."""
        value, most = self.integer(key, default), _MOST.get(key, _LARGEST_SIZE)
        if not 1 <= value <= most:
            raise self.error(key, value, f"an integer from 1 to {most}")
        return value

    def nested(self, key: str) -> Mapping[str, object]:
        """The object `key`, nulls included; empty if absent."""
        self._read.add(key)
        value = self.raw.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, value, "an object")
        return value

    def layers(self) -> int:
        """The number of layers in the file; 0 if it has no known key for it."""
        raw = {key: value for key in LAYER_KEYS if (value := self._of_model(key, None)) is not None}
        reader = ConfigReader(raw, self._file)  # a second reader: the key must not count as read by the family
        return next((reader.positive(key) for key in raw), 0)

    def expect(self, key: str, *allowed: object) -> None:
        """The key, if present, must have one of these values: others would change what is computed."""
        self._read.add(key)
        if key in self.raw and self.raw[key] not in allowed:
            raise self.error(key, self.raw[key], " or ".join(map(repr, allowed)))

    def dtype(self) -> torch.dtype:
        """Storage type of the checkpoint's weights; float32 if the file does not say."""
        name = str(self._of_model("dtype", self._of_model("torch_dtype", "float32"))).removeprefix("torch.")
        if name not in _DTYPES:
            raise self.error("dtype", name, " or ".join(_DTYPES))
        return _DTYPES[name]

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """An integer, or None if the file has null; `default` if the key is absent."""
        if key not in self.given:
            self._read.add(key)
            return default
        return self.integer(key) if key in self.raw else None

    def optional_positive(self, key: str, default: int | None = None) -> int | None:
        """As `optional_integer`, from 1 on."""
        value = self.optional_integer(key, default)
        return value if value is None else self.positive(key, value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """As `optional_integer`."""
        if key not in self.given:
            self._read.add(key)
            return default
        return self.number(key) if key in self.raw else None

    def ignore(self, *keys: str) -> None:
        """Keys that change nothing that is computed."""
        self._read.update(keys)

    def numbers(self, key: str, default: Sequence[float]) -> tuple[float, ...]:
        """As many finite numbers as `default` has, which a missing key stands for."""
        values: list[float] = self.raw.get(key, list(default))
        self._read.add(key)
        if not isinstance(values, list) or len(values) != len(default) or not all(map(_is_number, values)):
            raise self.error(key, values, f"a list of {len(default)} numbers")
        return tuple(float(item) for item in values)

    def names(self, key: str) -> list[str] | None:
        """A list of strings, None if absent."""
        return self._list(key, str)

    def integers(self, key: str) -> list[int] | None:
        """A list of integers, None if absent."""
        return self._list(key, int)

    def rope(
        self,
        default_theta: float = 10000.0,
        layer_type: str | None = None,
        *,
        default_share: float = 1.0,
        default_scaling: Mapping[str, object] = MappingProxyType({}),
        others: Container[str] = (),
    ) -> RopeParameters:
        """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (earlier versions).

        Args:
            layer_type: the entry of `rope_parameters` to read, for models with one per type of layer.
            default_share: `partial_rotary_factor`, if the file does not say.
            default_scaling: `rope_parameters`, if the file has neither these nor `rope_scaling`.
            others: keys of `rope_parameters` that the family reads itself.
        """
        self._read |= {"rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"}
        name = "rope_parameters" if "rope_parameters" in self.raw else "rope_scaling"
        parameters = self.raw.get(name, default_scaling)
        if layer_type is not None and isinstance(parameters, Mapping):
            name, parameters = f"{name}, {layer_type}", parameters.get(layer_type, {})
        if not isinstance(parameters, Mapping):
            raise self.error(name, parameters, "an object")
        parameters = {key: value for key, value in parameters.items() if key not in others}
        outer = {"rope_theta": default_theta, "partial_rotary_factor": default_share} | self.raw
        defaults = {key: outer[key] for key in ("rope_theta", "partial_rotary_factor")}
        self._read.add("partial_rotary_factor")
        file = f"{self._file}, {name}" if parameters else self._file
        return _read_rope(ConfigReader(defaults | parameters, file), self)

    def eos_token_ids(self) -> tuple[int, ...]:
        """`eos_token_id`, one id or a list of them; generation_config.json has the same key."""
        value = self._of_model("eos_token_id", [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item <= _LARGEST_ID for item in ids):
            raise self.error("eos_token_id", value, "a token id or a list of them")
        return tuple(ids)

    def finish(self) -> None:
        """Raise `UnsupportedModelError` if there are keys that were not read."""
        for key in (key for key in _OFF if key not in self._read):
            self.expect(key, *_OFF[key])
        left = sorted(self._spelled.get(key, key) for key in set(self.raw) - self._read - _HARMLESS - _GENERATION)
        if left:
            part = self._file.partition(", ")[2].replace(", ", ".")
            where = self._file if part else f"config.json of this {self.family} model"
            way = f"{part} without them in hf_overrides" if part else f"hf_overrides={{{show(left[0])}: None, ...}}"
            raise UnsupportedModelError(
                f"{where} has keys that are not understood: {list_names(left)}; if they do not change what is "
                f"computed, pass {way}."
            )

    def _of_model(self, key: str, default: object) -> Any:
        """A key that the file of a multimodal model may have in `text_config` instead."""
        text = self.raw.get("text_config")
        return self.raw.get(key, text.get(key, default) if isinstance(text, Mapping) else default)

    def _list(self, key: str, kind: type[T]) -> list[T] | None:
        self._read.add(key)
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.error(key, value, f"a list of {kind.__name__}")
        return value

    def error(self, key: str, value: object, right: str) -> UnsupportedModelError:
        name = self._spelled.get(key, key)
        return UnsupportedModelError(f"{self._file}: {name} is {show(value)}, must be {clip(right)}.")

    def _get(self, key: str, kind: Any, default: Any) -> Any:
        self._read.add(key)
        value = self.raw.get(key, default)
        if value is _REQUIRED:
            whose = f"which {self.family} models need" if "model_type" in self.raw else "which is needed"
            raise UnsupportedModelError(f"{self._file} has no {self._spelled.get(key, key)}, {whose}.")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, value, f"of type {getattr(kind, '__name__', 'number')}")
        return value


def _read_rope(reader: ConfigReader, model: ConfigReader) -> RopeParameters:
    """One set of rope parameters; `model` is the whole config.json, where some families have the original length."""
    kind = reader.string("rope_type", reader.string("type", "default"))
    # Phi-3's first releases had two other names for longrope.
    kind = "longrope" if kind == "su" or (kind == "yarn" and model.family == "phi3") else kind
    if kind not in RECIPES:
        raise reader.error("rope_type", kind, " or ".join(map(repr, RECIPES)))
    longest = model.count("max_position_embeddings", 0)
    original = reader.positive("original_max_position_embeddings", longest or 1)
    original = model.positive("original_max_position_embeddings", original)
    ratio = longest / original if longest else 1.0
    has_ratio = kind in ("yarn", "deepseek_yarn", "longrope")
    default_factor = ratio if has_ratio else (1.0 if kind in ("default", "proportional") else _REQUIRED)
    rope = RopeParameters(
        theta=reader.positive_number("rope_theta", above=1.0),
        rope_type=kind,
        factor=reader.positive_number("factor", default_factor),
        partial_rotary_factor=reader.positive_number("partial_rotary_factor"),
        max_position_embeddings=longest,
        original_max_position_embeddings=original,
        low_freq_factor=reader.positive_number("low_freq_factor", 1.0),
        high_freq_factor=reader.positive_number("high_freq_factor", 4.0),
        attention_factor=reader.optional_number("attention_factor"),
        mscale=reader.optional_number("mscale"),
        mscale_all_dim=reader.optional_number("mscale_all_dim"),
        beta_fast=_turns(reader, "beta_fast", 32.0),
        beta_slow=_turns(reader, "beta_slow", 1.0),
        truncate=reader.boolean("truncate", True),
        short_factor=_numbers(reader, "short_factor"),
        long_factor=_numbers(reader, "long_factor"),
        mrope_section=tuple(reader.integers("mrope_section") or ()),
        mrope_interleaved=reader.boolean("mrope_interleaved", False),
    )
    reader.finish()
    if has_ratio and original < 2:
        raise model.error("original_max_position_embeddings", original, f"an integer of at least 2 for {kind}")
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise reader.error("low_freq_factor", rope.low_freq_factor, "less than high_freq_factor")
    return rope


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= _LARGEST_NUMBER


def _turns(reader: ConfigReader, key: str, default: float) -> float:
    """A number of rotations of YaRN; in some files 0 means the default."""
    return reader.positive_number(key, default) if reader.number(key, default) else default


def _numbers(reader: ConfigReader, key: str) -> tuple[float, ...]:
    values = reader.raw.get(key, [])
    reader.expect(key, values)
    if not isinstance(values, list) or not all(
        isinstance(item, int | float) and 0 < item <= _LARGEST_NUMBER for item in values
    ):
        raise reader.error(key, values, "a list of positive numbers")
    return tuple(map(float, values))
