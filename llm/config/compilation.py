"""Which operations run their own kernels and which plain PyTorch: `LLM(compilation_config=...)`, by vLLM's rules.

Owns `CompilationConfig`: parsing, contradictions, and for each operation the verdict with its reason. Does not own the
binding, which is `CustomOp`'s. Nothing is captured or compiled as a whole: a mode other than NONE compiles the native
forward of each operation that is turned off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from llm.base.errors import ValidationError, nearest

BASE_MODES = ("all", "none")
# vLLM's keys that only steer graph capture and its caches; there is no capture here, so they change no answer.
HARMLESS_KEYS = frozenset(
    "cudagraph_mode cudagraph_capture_sizes cudagraph_num_of_warmups cudagraph_copy_inputs max_cudagraph_capture_size "
    "cudagraph_specialize_lora cache_dir compile_cache_save_format compile_sizes compile_ranges_split_points "
    "debug_dump_path splitting_ops use_inductor_graph_partition".split()
)


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
        mode: NONE computes as written; any other compiles the `forward_native` of the operations that are off.
        backend: what compiles: "inductor", "eager" (nothing does), or "" for the platform's own choice.
        custom_ops: "all" or "none", then "+op" and "-op"; one string may hold several, separated by commas. Without
            "all" or "none" it is "none" where `mode` is not NONE and `backend` is "inductor", and "all" otherwise.

    Raises:
        ValidationError: an item that is none of these, both "all" and "none", or "+op" with "-op".
    """

    mode: CompilationMode = CompilationMode.NONE
    backend: str = "inductor"
    custom_ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _parse_mode(self.mode))
        object.__setattr__(self, "custom_ops", _parse_ops(self.custom_ops))
        if not isinstance(self.backend, str):
            raise _invalid("backend", self.backend, "'inductor', 'eager' or ''")
        _check_contradictions(self.custom_ops)

    @classmethod
    def of(cls, value: Any, *, default_backend: str = "inductor") -> CompilationConfig:
        """From what a user passes: None, a mode (3, "NONE"), a dict of the attributes, JSON, or a `CompilationConfig`.

        Raises `ValidationError` naming the key that is wrong.
        """
        given = _as_dict(value)
        if not given.get("backend"):
            given["backend"] = default_backend
        if given["backend"] not in (allowed := sorted({"eager", "inductor", default_backend})):
            raise _invalid("backend", given["backend"], " or ".join(map(repr, allowed)))
        if given.get("mode") is None:
            given.pop("mode", None)
        return cls(**{name: item for name, item in given.items() if name not in HARMLESS_KEYS})

    @property
    def base_mode(self) -> str:
        """ "all" or "none": what holds for an operation that `custom_ops` does not name."""
        said = [item for item in self.custom_ops if item in BASE_MODES]
        return said[0] if said else "none" if self.compiles and self.backend == "inductor" else "all"

    @property
    def compiles(self) -> bool:
        """Whether the operations that are off have their `forward_native` compiled, one by one."""
        return self.mode is not CompilationMode.NONE and self.backend != "eager"

    @property
    def mentioned(self) -> tuple[str, ...]:
        """The operations that `custom_ops` names."""
        return tuple(item[1:] for item in self.custom_ops if item not in BASE_MODES)

    def judge(self, op: str) -> tuple[bool, str]:
        """(whether the operation named `op` is on, which item decided)."""
        for item in (f"+{op}", f"-{op}"):
            if item in self.custom_ops:
                return item.startswith("+"), item
        decided = self.base_mode if self.base_mode in self.custom_ops else f"{self.base_mode}, the default"
        return self.base_mode == "all", decided

    def __str__(self) -> str:
        ops = ",".join(self.custom_ops) or self.base_mode
        return f"custom_ops={ops} mode={self.mode.name} backend={self.backend}"


def notes(value: Any) -> list[str]:
    """What became of the keys of `value` (as `CompilationConfig.of` takes it) that have no effect here."""
    keys = [key for key in _as_dict(value) if key in HARMLESS_KEYS]
    return [f"compilation_config: {key} changes nothing: there is no graph capture." for key in keys]


def _as_dict(value: Any) -> dict[str, Any]:
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
        known = {item.name for item in fields(CompilationConfig)} | HARMLESS_KEYS
        for key in value:
            if key not in known:
                names = ", ".join(item.name for item in fields(CompilationConfig))
                raise ValidationError(
                    f"compilation_config has no key {key!r}.{nearest(str(key), known)} Known: {names}.",
                    parameter="compilation_config",
                    value=key,
                )
        return dict(value)
    if isinstance(value, int | str) and not isinstance(value, bool):
        return {"mode": value}
    raise _invalid("compilation_config", value, "a dict such as {'custom_ops': ['none']}, a mode of 0 to 3, or None")


def _parse_mode(value: Any) -> CompilationMode:
    names = {mode.name: mode for mode in CompilationMode} | {str(int(mode)): mode for mode in CompilationMode}
    if not isinstance(value, bool) and str(value).upper() in names:
        return names[str(value).upper()]
    if isinstance(value, CompilationMode):
        return value
    raise _invalid("mode", value, "0 to 3 or one of " + ", ".join(mode.name for mode in CompilationMode))


def _parse_ops(value: Any) -> tuple[str, ...]:
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


def _invalid(name: str, value: Any, right: str) -> ValidationError:
    where = "" if name == "compilation_config" else "compilation_config: "
    return ValidationError(f"{where}{name} must be {right}, got {value!r}.", parameter=name, value=value)
