"""The table of what is public: every name with its signature, one a line. `test_promises.py` holds the tree against it.

    python tests/public_names.py > tests/fixtures/public_names.txt      # at a release, and only then

What is in the table: the names of `llm`, and the contract of plugins (`llm.plugins`): parameters with
their defaults, methods, properties, and fields of dataclasses. Types of parameters are no part of it.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import is_typeddict

import llm

FIXTURE = Path(__file__).parent / "fixtures" / "public_names.txt"
CONTRACT = (
    "llm.forward.KVCacheSpec",
    "llm.forward.StateSpec",
    "llm.kernels.backend.Backend",
    "llm.layers.attention.AttentionBackend",
    "llm.layers.custom_op.CustomOp",
    "llm.models.registry.register_model",
    "llm.platforms.interface.Platform",
    "llm.quantization.registry.register_quantization_config",
    "llm.sampling.logits_processors.interface.LogitsProcessor",
)


def default(value: object) -> str:
    """A default as text that no Python version and no address changes."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Path):
        return repr(value.name)
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    text = repr(value)
    return type(value).__name__ if "<" in text else text


def parameters(function: object) -> str:
    """`(self, prompts, *, use_tqdm=True)`; "" where Python tells no signature."""
    try:
        found = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    empty = inspect.Parameter.empty
    plain = [
        p.replace(annotation=empty, default=empty if p.default is empty else _Text(default(p.default)))
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


class _Text:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def members(owner: type) -> Iterator[str]:
    """The methods and properties that this package's classes in its line of bases define."""
    seen: dict[str, object] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.partition(".")[0] == "llm":
            seen.update(vars(base))
    for name, member in sorted(seen.items()):
        if name.startswith("_"):
            continue
        if isinstance(member, classmethod | staticmethod):
            yield f"{name}{parameters(member.__func__)}"
        elif inspect.isfunction(member):
            yield f"{name}{parameters(member)}"
        elif isinstance(member, property) or hasattr(member, "__get__"):
            yield name


def described(name: str, what: object) -> Iterator[str]:
    if not isinstance(what, type):
        yield f"{name}{parameters(what) if callable(what) else ''}"
        return
    if issubclass(what, enum.Enum):
        yield f"{name}: {', '.join(member.name for member in what)}"
        return
    if is_typeddict(what):
        yield f"{name}: {', '.join(sorted(what.__annotations__))}"
        return
    own = any("__init__" in vars(base) for base in what.__mro__ if base.__module__.partition(".")[0] == "llm")
    yield f"{name}{parameters(what) if own else ''}"
    yield from (f"{name}.{member}" for member in members(what))


def table() -> list[str]:
    found = {name: getattr(llm, name) for name in llm._PUBLIC} | {place: resolve_name(place) for place in CONTRACT}
    return [line for name in sorted(found) for line in described(name, found[name])]


if __name__ == "__main__":
    print("\n".join(table()))
