"""`LLM(hf_overrides=...)`: keys of config.json to replace, or a callable that changes transformers' config.

Owns what a callable comes to: the keys that it changed, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from llm.base.types import JsonObject
from llm.errors import ValidationError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Overrides = Mapping[str, object] | Callable[["PretrainedConfig"], "PretrainedConfig"] | None


def resolve_overrides(given: Overrides, raw: JsonObject) -> JsonObject:
    """Keys to replace in `raw`, the decoded config.json; raises `ValidationError` if a callable returns no config."""
    if not callable(given):
        return dict(given or {})
    from transformers import PretrainedConfig

    config = _config_class(raw).from_dict(dict(raw))
    before = config.to_dict()
    changed = given(config)
    if not isinstance(changed, PretrainedConfig):
        raise ValidationError(
            f"hf_overrides must be a callable that returns the config it was given, got {type(changed).__name__}.",
            parameter="hf_overrides",
            value=given,
        )
    return _changes(before, changed.to_dict(), raw)


def _config_class(raw: JsonObject) -> type[PretrainedConfig]:
    from transformers import CONFIG_MAPPING, PretrainedConfig

    known = raw.get("model_type")
    return CONFIG_MAPPING[known] if isinstance(known, str) and known in CONFIG_MAPPING else PretrainedConfig


def _changes(before: JsonObject, after: JsonObject, raw: JsonObject) -> JsonObject:
    """The keys whose values differ; None for one that is gone. Of a nested object, what `raw` has and its changes."""
    found: JsonObject = {}
    for key in before | after:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        nested = raw.get(key)
        if isinstance(old, dict) and isinstance(new, dict) and isinstance(nested, dict):
            new = {**nested, **_changes(old, new, nested)}
        found[key] = new
    return found
