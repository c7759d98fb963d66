"""Which operations run their kernels and which run plain PyTorch: `LLM(compilation_config=...)`, by vLLM's rules.

`CompilationConfig` says whether each operation is on, with the reason. `CustomOp` binds the forward. There is no graph
capture, and the model is not compiled as a whole: a mode other than NONE compiles the `forward_native` of each
operation that is off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any

from llm.errors import ValidationError, nearest

BASE_MODES = ("all", "none")
# vLLM's keys that only configure graph capture and its caches. There is no capture here, so they have no effect.
HARMLESS_KEYS = frozenset(
    "cudagraph_mode cudagraph_capture_sizes cudagraph_num_of_warmups cudagraph_copy_inputs max_cudagraph_capture_size "
    "cudagraph_specialize_lora cache_dir compile_cache_save_format compile_sizes compile_ranges_split_points "
    "debug_dump_path splitting_ops use_inductor_graph_partition".split()
)
# vLLM's keys for passes over a graph; harmless if they are empty.
_HARMLESS_EMPTY = ("pass_config", "inductor_compile_config", "inductor_passes")
# Keys of older vLLM versions -> their new names.
_RENAMED = {"level": "it has become 'mode', in vLLM too", "use_inductor": "it has become 'backend', in vLLM too"}


class CompilationMode(IntEnum):
    """vLLM's modes. All but NONE do the same here: see `CompilationConfig.compiles`."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


@dataclass(frozen=True)
class CompilationConfig:
    """Which `CustomOp`s are on.

    Attributes:
        mode: NONE compiles nothing; any other compiles the `forward_native` of the operations that are off.
        backend: the compiler: "inductor", "eager" (none), or "" for the platform's choice.
        custom_ops: "all" or "none", then "+op" and "-op"; one string may hold several, separated by commas. Without
            "all" or "none" it is "none" where `mode` is not NONE and `backend` is "inductor", and "all" otherwise.
        base_is_default: "all" or "none" at the end of `custom_ops` was appended by `with_base_mode`.

    Raises:
        ValidationError: an item that is none of these, both "all" and "none", or "+op" with "-op".
    """

    mode: CompilationMode = CompilationMode.NONE
    backend: str = "inductor"
    custom_ops: tuple[str, ...] = ()
    base_is_default: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _parse_mode(self.mode))
        object.__setattr__(self, "custom_ops", _parse_ops(self.custom_ops))
        if not isinstance(self.backend, str):
            raise _invalid("backend", self.backend, "'inductor', 'eager' or ''")
        _check_contradictions(self.custom_ops)

    @classmethod
    def of(cls, value: object, *, default_backend: str = "inductor", enforce_eager: bool = False) -> CompilationConfig:
        """Parse a user's value: None, a mode (3, "NONE"), a dict of the attributes, JSON, or a `CompilationConfig`.

        Args:
            enforce_eager: the mode is NONE, whatever the value says.

        Raises:
            ValidationError: names the key that is wrong.
        """
        given = _as_dict(value)
        if not given.get("backend"):
            given["backend"] = default_backend
        if given["backend"] not in (allowed := sorted({"eager", "inductor", default_backend})):
            raise _invalid("backend", given["backend"], " or ".join(map(repr, allowed)))
        if given.get("mode") is None:
            given.pop("mode", None)
        parsed = cls(**{name: item for name, item in given.items() if name not in (*HARMLESS_KEYS, *_HARMLESS_EMPTY)})
        return replace(parsed, mode=CompilationMode.NONE) if enforce_eager else parsed

    def with_base_mode(self) -> CompilationConfig:
        """With "all" or "none" appended to `custom_ops` where neither was said, as vLLM does."""
        if any(item in BASE_MODES for item in self.custom_ops):
            return self
        return replace(self, custom_ops=(*self.custom_ops, self.base_mode), base_is_default=True)

    @property
    def base_mode(self) -> str:
        """ "all" or "none": the state of operations that `custom_ops` does not name."""
        said = [item for item in self.custom_ops if item in BASE_MODES]
        return said[0] if said else "none" if self.compiles and self.backend == "inductor" else "all"

    @property
    def compiles(self) -> bool:
        """True if the `forward_native` of each operation that is off is compiled."""
        return self.mode is not CompilationMode.NONE and self.backend != "eager"

    @property
    def mentioned(self) -> tuple[str, ...]:
        """The operations that `custom_ops` names."""
        return tuple(item[1:] for item in self.custom_ops if item not in BASE_MODES)

    def judge(self, op: str) -> tuple[bool, str]:
        """(True if the operation named `op` is on, the item that decided)."""
        for item in (f"+{op}", f"-{op}"):
            if item in self.custom_ops:
                return item.startswith("+"), item
        is_said = self.base_mode in self.custom_ops and not self.base_is_default
        decided = self.base_mode if is_said else f"{self.base_mode}, the default"
        return self.base_mode == "all", decided

    def __str__(self) -> str:
        ops = ",".join(self.custom_ops) or self.base_mode
        return f"custom_ops={ops} mode={self.mode.name} backend={self.backend}"


def notes(value: object) -> list[str]:
    """One note for each key of `value` (as `CompilationConfig.of` takes it) that has no effect here."""
    keys = [key for key in _as_dict(value) if key in HARMLESS_KEYS]
    return [f"compilation_config: {key} changes nothing: there is no graph capture." for key in keys]


def _as_dict(value: object) -> dict[str, Any]:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _invalid("compilation_config", value, f"valid JSON ({error})") from error
    if value is None:
        return {}
    if isinstance(value, CompilationConfig):
        return {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, Mapping):
        _check_keys(value)
        return dict(value)
    if isinstance(value, int | str) and not isinstance(value, bool):
        return {"mode": value}
    raise _invalid("compilation_config", value, "a dict such as {'custom_ops': ['none']}, a mode of 0 to 3, or None")


def _check_keys(value: Mapping[str, object]) -> None:
    keys = [item.name for item in fields(CompilationConfig) if item.name != "base_is_default"]
    known = {*keys, *HARMLESS_KEYS}
    for key, item in value.items():
        if key in known or (key in _HARMLESS_EMPTY and not item):
            continue
        if key in _HARMLESS_EMPTY:
            raise _invalid(key, item, "left empty, for no graph is captured that a pass could change")
        hint = f"; {_RENAMED[key]}." if key in _RENAMED else f".{nearest(str(key), known)} Known: {', '.join(keys)}."
        raise ValidationError(f"compilation_config has no key {key!r}{hint}", parameter="compilation_config", value=key)


def _parse_mode(value: object) -> CompilationMode:
    names = {mode.name: mode for mode in CompilationMode} | {str(int(mode)): mode for mode in CompilationMode}
    if not isinstance(value, bool) and str(value).upper() in names:
        return names[str(value).upper()]
    if isinstance(value, CompilationMode):
        return value
    raise _invalid("mode", value, "0 to 3 or one of " + ", ".join(mode.name for mode in CompilationMode))


def _parse_ops(value: object) -> tuple[str, ...]:
    """Items in order; a string, alone or in a list, may hold several."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Iterable) or isinstance(items, Mapping):
        raise _invalid("custom_ops", value, "a list such as ['none', '+rms_norm']")
    parsed: list[str] = []
    for item in items:
        if not isinstance(item, str):
            raise _invalid("custom_ops", item, "a list of strings")
        parsed += [part.strip() for part in item.split(",")]
    for part in parsed:
        if part not in BASE_MODES and not (part[:1] in ("+", "-") and part[1:].isidentifier()):
            raise _invalid("custom_ops", part, "made of 'all', 'none', '+op' and '-op'")
    return tuple(parsed)


def _check_contradictions(items: tuple[str, ...]) -> None:
    if sum(item in BASE_MODES for item in items) > 1:
        raise _invalid("custom_ops", list(items), "given one of 'all' and 'none', once")
    both = sorted({item[1:] for item in items if item[0] == "+"} & {item[1:] for item in items if item[0] == "-"})
    if both:
        raise _invalid("custom_ops", list(items), f"either '+' or '-' for {', '.join(both)}")


def _invalid(name: str, value: object, right: str) -> ValidationError:
    where = "" if name == "compilation_config" else "compilation_config: "
    return ValidationError(f"{where}{name} must be {right}, got {value!r}.", parameter=name, value=value)
