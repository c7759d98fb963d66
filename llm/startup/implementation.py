"""Which code computes a model: a class of this package (or a registered one), or transformers' own.

Owns `model_impl`. `llm.models.registry` has the classes, `llm.models.transformers_backend` runs transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llm.base.checks import refuse
from llm.errors import UnsupportedModelError
from llm.models.config_reader import ConfigReader
from llm.models.registry import resolve_model_cls, resolve_pooling_cls


@dataclass(frozen=True)
class Implementation:
    """A model class; `name`: "native" or "transformers", `why`: it was chosen for this reason."""

    model_class: Any
    name: str
    why: str


def choose_implementation(
    reader: ConfigReader, model_impl: str, *, is_gguf: bool, pools: bool = False
) -> Implementation:
    """The class for a config.json, read or not; raises `UnsupportedModelError` if there is none.

    `pools`: for one whose hidden states are pooled, which needs no head of the checkpoint's architecture.
    """
    if pools:
        if model_impl == "transformers":
            refuse("model_impl", model_impl, "'auto' or 'native' for a pooling model")
        return Implementation(resolve_pooling_cls(reader.family), "native", "the class of config.json's model_type")
    if model_impl == "transformers":
        if is_gguf:
            refuse("model_impl", model_impl, "'auto' for a GGUF file, whose tensors have other names")
        return _of_transformers("asked for")
    try:
        native = resolve_model_cls(reader.names("architectures") or [], reader.family)
    except UnsupportedModelError:
        if model_impl != "auto" or is_gguf or not _may_run_on_transformers(reader):
            raise
        return _of_transformers(f"no class of this package for {reader.family}")
    declined = _declined(native, reader)
    if declined is not None and model_impl == "auto" and not is_gguf and _may_run_on_transformers(reader):
        return _of_transformers(f"{native.__name__} leaves this one: {declined}")
    reason = "registered for config.json's architectures or model_type"
    return Implementation(native, "native", f"asked for; {reason}" if model_impl != "auto" else reason)


def _declined(native: type, reader: ConfigReader) -> str | None:
    """Why a native class computes some models of its family and not this one; None: it computes it."""
    declines: Callable[[Mapping[str, object]], str | None] | None = getattr(native, "declines", None)
    return None if declines is None else declines(reader.raw)


def _of_transformers(why: str) -> Implementation:
    from llm.models.transformers_backend.model import TransformersForCausalLM

    return Implementation(TransformersForCausalLM, "transformers", why)


def _may_run_on_transformers(reader: ConfigReader) -> bool:
    """True for a causal language model of transformers; other uses of its layers are refused with the native reason."""
    from llm.models.transformers_backend.model import known_to_transformers

    name = known_to_transformers(reader.family)
    return name is not None and name in (reader.names("architectures") or [name])
