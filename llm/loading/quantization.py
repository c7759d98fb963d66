"""How a model will be quantized: what the user asked against what the checkpoint says of itself.

Owns detection, the order of precedence, and the errors when the two contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm.base.errors import CheckpointError, UnsupportedModelError, ValidationError, nearest
from llm.loading.checkpoint import read_json
from llm.quantization.base import QuantizationConfig
from llm.quantization.configs.online import RECIPES, OnlineConfig
from llm.quantization.registry import ALIASES, get_quantization_config, plugin_configs, quantization_methods

_DESCRIPTION_BYTES = 256 << 20
# Keys of config.json under which checkpoints describe how they were quantized.
CONFIG_KEYS = ("quantization_config", "compression_config")
# What others call such schemes, for the sentence on names that are not known.
_OTHER_NAMES = {"int8": "w8a8", "8bit": "w8a8", "q8_0": "w8a16", "int4": "w4a16", "4bit": "w4a16", "q4_0": "w4a16"}
# A note of ModelSlim's first generation in config.json; the description file says the same, per tensor.
_MODELSLIM_NOTE = "quantize"


@dataclass(frozen=True)
class Resolved:
    """How the model is quantized.

    Attributes:
        config: picks a method per layer; None: nothing is quantized.
        name: what `llm.config` shows.
        reason: why.
        on_load: float weights are quantized while they are read.
        found: the checkpoint says itself that it is quantized.
    """

    config: QuantizationConfig | None
    name: str | None
    reason: str
    on_load: bool = False
    found: bool = False


@dataclass(frozen=True)
class _Found:
    """What a checkpoint says: the format, where it says so, and its words."""

    name: str
    source: str
    description: dict[str, Any]


def resolve_quantization(
    asked: Any, calibration: Sequence[str] | None, folder: Path, hf_config: Mapping[str, Any]
) -> Resolved:
    """Decide.

    Args:
        asked: `LLM(quantization=...)`: None, a name, the dict form, or a `QuantizationConfig`.
        calibration: `LLM(calibration=...)`.
        folder: of the model.
        hf_config: config.json as read.

    Raises:
        ValidationError: a name nobody knows, or one that contradicts the checkpoint.
        UnsupportedModelError: the checkpoint is quantized in a way that is not computed.
    """
    user = ALIASES.get(asked.lower(), asked.lower()) if isinstance(asked, str) else asked
    found = _detect(folder, hf_config, user if isinstance(user, str) else None)
    on_load = isinstance(user, Mapping) or (isinstance(user, str) and user in RECIPES and user not in plugin_configs())
    if calibration and not on_load:
        raise ValidationError(
            "calibration applies when weights are quantized on load: pass quantization='w4a16' or another of "
            f"{', '.join(RECIPES)} with it.",
            parameter="calibration",
            value=calibration,
        )
    if isinstance(user, QuantizationConfig):
        return Resolved(user, user.get_name(), "asked for")
    if user is None:
        return _as_found(found, folder, hf_config)
    if found is not None and (on_load or found.name != user):
        raise ValidationError(
            f"quantization={asked!r} contradicts the checkpoint: it is quantized as {found.name!r} ({found.source}); "
            "leave quantization out to use it, or pass the unquantized checkpoint.",
            parameter="quantization",
            value=asked,
        )
    if on_load:
        config = OnlineConfig.parse(user, calibration)
        reason = "asked for; weights are quantized while they are read"
        if config.calibration and not config.uses_calibration:
            reason += "; the calibration texts were not run, as they change nothing at 8 bits"
        return Resolved(config, config.get_name(), reason, True)
    _check_known(asked, user)
    if found is not None:
        return _as_found(found, folder, hf_config)
    return _without_description(asked, user, folder, hf_config)


def _detect(folder: Path, hf_config: Mapping[str, Any], user: str | None) -> _Found | None:
    """Plugins claim a checkpoint first, then ModelSlim by its file, then what config.json names."""
    said, key = _quantization_config(hf_config)
    for name, config_class in plugin_configs().items():
        claimed = config_class.override_quantization_method(said, user)
        if claimed is not None:
            return _Found(claimed, f"claimed by the plugin for {name!r}", said)
        for file in _present(folder, config_class.get_config_filenames()):
            return _Found(name, file.name, read_json(file, limit_bytes=_DESCRIPTION_BYTES))
    for name in quantization_methods():
        for file in _present(folder, get_quantization_config(name).get_config_filenames()):
            return _Found(name, file.name, read_json(file, limit_bytes=_DESCRIPTION_BYTES))
    if not said:
        return None
    name = str(said.get("quant_method", "")).lower()
    return _Found(ALIASES.get(name, name), f"config.json's {key}", said)


def _quantization_config(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    nested = hf_config.get("text_config")
    for place in (hf_config, nested if isinstance(nested, Mapping) else {}):
        for key in CONFIG_KEYS:
            value = place.get(key)
            if isinstance(value, Mapping):
                return dict(value), key
            if value is not None:
                raise CheckpointError(f"config.json: {key} is {value!r}, must be an object.")
    return {}, ""


def _present(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The first file of the folder that a pattern names, as a list of one; several of equal rank are an error."""
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


def _as_found(found: _Found | None, folder: Path, hf_config: Mapping[str, Any]) -> Resolved:
    if found is None:
        return Resolved(None, None, "the checkpoint is not quantized")
    if found.name not in quantization_methods():
        named = repr(found.name) if found.name else "without a quant_method"
        raise UnsupportedModelError(
            f"the checkpoint is quantized as {named} ({found.source}), which is not computed; use the unquantized "
            f"checkpoint with quantization={' or '.join(map(repr, RECIPES))}. "
            f"Known: {', '.join(quantization_methods())}."
        )
    config = get_quantization_config(found.name).from_config(found.description)
    config.maybe_update_config(str(folder), hf_config)
    return Resolved(config, found.name, found.source, found=True)


def _check_known(asked: Any, user: Any) -> None:
    known = (*quantization_methods(), *RECIPES)
    if user not in known:
        meant = _OTHER_NAMES.get(str(user), str(user))
        raise ValidationError(
            f"quantization={asked!r} is not known.{nearest(meant, known)} Known: {', '.join(known)}, or a dict "
            "with 'scheme'.",
            parameter="quantization",
            value=asked,
        )


def _without_description(asked: Any, user: str, folder: Path, hf_config: Mapping[str, Any]) -> Resolved:
    """A format was named and the checkpoint says nothing: only a plugin can do with that."""
    if user in plugin_configs():
        config = get_quantization_config(user).from_config({})
        config.maybe_update_config(str(folder), hf_config)
        return Resolved(config, user, "asked for")
    files = ", ".join(sorted(file.name for file in folder.glob("*.json"))) or "none"
    wanted = get_quantization_config(user).get_config_filenames()
    missing = f"no {wanted[0]} (JSON files there: {files})" if wanted else "no quantization_config in config.json"
    raise ValidationError(
        f"quantization={asked!r} needs a checkpoint in that format, and {folder} has {missing}; pass the quantized "
        f"checkpoint, or quantize this one on load with {', '.join(map(repr, RECIPES))}.",
        parameter="quantization",
        value=asked,
    )


def without_quantization_keys(hf_config: Mapping[str, Any], resolved: Resolved) -> dict[str, Any]:
    """config.json for the model family, which knows nothing of quantization."""
    dropped = {*CONFIG_KEYS, *([_MODELSLIM_NOTE] if resolved.name == "ascend" else [])}
    return {key: value for key, value in hf_config.items() if key not in dropped}
