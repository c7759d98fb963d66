"""How a model is quantized: the user's argument against the checkpoint's own description.

Where the two contradict each other, that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llm.base.text import show
from llm.base.types import JsonObject
from llm.errors import CheckpointError, UnsupportedModelError, ValidationError, nearest
from llm.loading.model_files import read_json
from llm.loading.resolve import schemes_instead
from llm.quantization.base import QuantizationConfig
from llm.quantization.on_load import RECIPES, OnlineConfig
from llm.quantization.registry import ALIASES, get_quantization_config, plugin_configs, quantization_methods
from llm.quantization.requantize import RequantizeConfig

_DESCRIPTION_BYTES = 256 << 20
# Keys of config.json under which checkpoints describe how they were quantized.
CONFIG_KEYS = ("quantization_config", "compression_config")
# Other names of such schemes, for the suggestion in the error for an unknown name.
_OTHER_NAMES = {"int8": "w8a8", "8bit": "w8a8", "int4": "w4a16", "4bit": "w4a16"}
_OTHER_NAMES |= {"q4_k_m": "q4_k", "q4_k_s": "q4_k"}
_OTHER_NAMES |= {"fp8_per_channel": "fp8", "fp8_per_tensor": "fp8", "fp8_per_block": "fp8", "mxfp8": "fp8"}
# A key that the first generation of ModelSlim writes into config.json; the description file says the same per tensor.
_MODELSLIM_NOTE = "quantize"
_GGUF = "gguf"  # whose `quantization_config` is made of the file


@dataclass(frozen=True)
class Resolved:
    """How the model is quantized.

    Attributes:
        config: picks a method per layer; None: nothing is quantized.
        name: shown by `llm.config`.
        reason: why this was chosen.
        on_load: True if float weights are quantized while they are read.
        found: True if the checkpoint describes itself as quantized.
    """

    config: QuantizationConfig | None
    name: str | None
    reason: str
    on_load: bool = False
    found: bool = False


@dataclass(frozen=True)
class _Found:
    """A checkpoint's own description: the format, the file that names it, its content."""

    name: str
    source: str
    description: JsonObject


def resolve_quantization(
    asked: object, calibration: Sequence[str] | None, folder: Path, hf_config: Mapping[str, object]
) -> Resolved:
    """Decide whether and how the model is quantized.

    Args:
        asked: `LLM(quantization=...)`: None, a name, the dict form, or a `QuantizationConfig`.
        calibration: `LLM(calibration=...)`.
        folder: of the model.
        hf_config: config.json as read.

    Raises:
        ValidationError: an unknown name, or one that contradicts the checkpoint.
        UnsupportedModelError: the checkpoint's format is not supported.
    """
    user = ALIASES.get(asked.lower(), asked.lower()) if isinstance(asked, str) else asked
    found = _detect(folder, hf_config, user if isinstance(user, str) else None)
    is_found = found is not None and found.name == user  # "fp8" is both a format and a scheme
    named = isinstance(user, str) and user in RECIPES and user not in plugin_configs()
    on_load = isinstance(user, Mapping) or (named and not is_found)
    if calibration and not on_load:
        raise ValidationError(
            "calibration applies when weights are quantized on load: pass quantization='w4a16' or another of "
            f"{', '.join(RECIPES)} with it.",
            parameter="calibration",
            value=calibration,
        )
    if isinstance(user, QuantizationConfig):
        return Resolved(user, user.get_name(), "asked for")
    if user is None or is_found:
        return _as_found(found, folder, hf_config)
    if found is not None:
        again = f" pass requantize={show(user)} to quantize it again," if on_load else ""
        raise ValidationError(
            f"quantization={show(asked)} contradicts the checkpoint: it is quantized as {show(found.name)} "
            f"({found.source}); leave quantization out to use it,{again} or pass the unquantized checkpoint.",
            parameter="quantization",
            value=asked,
        )
    if on_load and isinstance(user, str | Mapping):
        config = OnlineConfig.parse(user, calibration)
        reason = "asked for; weights are quantized while they are read"
        if (config.calibration or config.own_texts) and not config.uses_calibration:
            reason += "; the calibration texts were not run, as they change nothing in this scheme"
        return Resolved(config, config.get_name(), reason, True)
    name = _checked_name(asked, user)
    return _without_description(asked, name, folder, hf_config)


def requantized(found: Resolved, asked: str | Mapping[str, object]) -> Resolved:
    """The checkpoint's layers in the schemes of `LLM(requantize=...)`; raises `ValidationError` where it has none."""
    if found.config is None or not found.found:
        raise ValidationError(
            f"requantize={show(asked)} is for a quantized checkpoint, and this one is not; pass "
            f"quantization={show(asked)}.",
            parameter="requantize",
            value=asked,
        )
    try:
        online = OnlineConfig.parse(asked)
    except ValidationError as error:
        message = str(error).replace("quantization=", "requantize=", 1)
        raise ValidationError(message, parameter="requantize", value=asked) from error
    if online.bits is not None:
        raise ValidationError(
            f"requantize={show(asked)} has bits, which are shared out over an unquantized checkpoint; name the layers "
            'that need 8 bits: layers={"*.down_proj": "w8a16"}.',
            parameter="requantize",
            value=asked,
        )
    reason = f"{found.reason}; asked for requantize={show(asked)}: the error is in quantization_report"
    return replace(found, config=RequantizeConfig(found.config, online), reason=reason)


def _detect(folder: Path, hf_config: Mapping[str, object], user: str | None) -> _Found | None:
    """Detect the format: claimed by a plugin, else ModelSlim by its file, else the one that config.json names, else the
    one whose own file is there."""
    said, key = _quantization_config(hf_config)
    for name, config_class in plugin_configs().items():
        claimed = config_class.override_quantization_method(said, user)
        if claimed is not None:
            return _Found(claimed, f"claimed by the plugin for {name!r}", said)
        for file in _present(folder, config_class.get_config_filenames()):
            return _Found(name, file.name, read_json(file, limit_bytes=_DESCRIPTION_BYTES))
    for name in quantization_methods():
        config_class = get_quantization_config(name)
        if said and not config_class.file_decides:
            continue
        for file in _present(folder, config_class.get_config_filenames()):
            return _Found(name, file.name, read_json(file, limit_bytes=_DESCRIPTION_BYTES))
    if not said:
        return None
    given = said.get("quant_method")
    if not isinstance(given, str | None):
        raise CheckpointError(f"config.json's {key}: quant_method is {show(given)}, must be a string.")
    name = (given or "").lower()
    source = "the types of its tensors" if name == _GGUF else f"config.json's {key}"
    return _Found(ALIASES.get(name, name), source, said)


def _quantization_config(hf_config: Mapping[str, object]) -> tuple[JsonObject, str]:
    nested = hf_config.get("text_config")
    for place in (hf_config, nested if isinstance(nested, Mapping) else {}):
        for key in CONFIG_KEYS:
            value = place.get(key)
            if isinstance(value, Mapping):
                return dict(value), key
            if value is not None:
                raise CheckpointError(f"config.json: {key} is {show(value)}, must be an object.")
    return {}, ""


def _present(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The file that the first matching pattern names, as a list of one; [] if none. Several matches are an error."""
    for pattern in patterns:
        files = sorted(folder.glob(pattern))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise CheckpointError(
                f"{folder} has several quantization descriptions ({names}); keep the one that applies."
            )
        if files:
            return files
    return []


def _as_found(found: _Found | None, folder: Path, hf_config: Mapping[str, object]) -> Resolved:
    if found is None:
        return Resolved(None, None, "the checkpoint is not quantized")
    if found.name not in quantization_methods():
        said = f"the checkpoint is quantized as {show(found.name)} ({found.source}), which is not computed"
        if not found.name:
            said = f"{found.source} names no quant_method"
        schemes = schemes_instead(found.name) or " or ".join(map(repr, RECIPES))
        raise UnsupportedModelError(
            f"{said}; use the unquantized checkpoint with quantization={schemes}. "
            f"Known: {', '.join(quantization_methods())}."
        )
    config = get_quantization_config(found.name).from_config(found.description)
    config.maybe_update_config(str(folder), hf_config)
    return Resolved(config, found.name, found.source, found=True)


def _checked_name(asked: object, user: object) -> str:
    """`user` if it names a known format or scheme; raises `ValidationError` otherwise."""
    known = tuple(dict.fromkeys((*quantization_methods(), *RECIPES)))
    if not isinstance(user, str) or user not in known:
        if isinstance(user, str) and user not in _OTHER_NAMES and (schemes := schemes_instead(user)):
            raise ValidationError(
                f"quantization={show(asked)} is a format that is not computed; pass the unquantized checkpoint with "
                f"quantization={schemes}, which quantizes it while it is read.",
                parameter="quantization",
                value=asked,
            )
        meant = _OTHER_NAMES.get(str(user), str(user))
        raise ValidationError(
            f"quantization={show(asked)} is not known.{nearest(meant, known)} Known: {', '.join(known)}, or a dict "
            "with 'scheme'.",
            parameter="quantization",
            value=asked,
        )
    return user


def _without_description(asked: object, user: str, folder: Path, hf_config: Mapping[str, object]) -> Resolved:
    """A format was named and the checkpoint has no description: only a plugin supports that."""
    if user in plugin_configs():
        config = get_quantization_config(user).from_config({})
        config.maybe_update_config(str(folder), hf_config)
        return Resolved(config, user, "asked for")
    files = ", ".join(sorted(file.name for file in folder.glob("*.json"))) or "none"
    config_class = get_quantization_config(user)
    missing = "no quantization_config in config.json"
    if config_class.file_decides:
        missing = f"no {config_class.get_config_filenames()[0]} (JSON files there: {files})"
    raise ValidationError(
        f"quantization={show(asked)} needs a checkpoint in that format, and {folder} has {missing}; pass the quantized "
        f"checkpoint, or quantize this one on load with {', '.join(map(repr, RECIPES))}.",
        parameter="quantization",
        value=asked,
    )


def without_quantization_keys(hf_config: Mapping[str, object], resolved: Resolved) -> JsonObject:
    """config.json without the keys of quantization, for the model family."""
    dropped = {*CONFIG_KEYS, *([_MODELSLIM_NOTE] if resolved.name == "ascend" else [])}
    return {key: value for key, value in hf_config.items() if key not in dropped}
