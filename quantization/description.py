"""Reading a quantization description: typed fields, which layers its patterns match, and shards that must agree.

A missing key or a wrong type is an error of one sentence. Names of layers are dotted paths. A pattern is a name,
`re:<regular expression>` matched from the start of the name (as in compressed-tensors), or, in a user's arguments, a
glob with `*`.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from llm.base.text import clip, list_names, show
from llm.errors import CheckpointError

_LARGEST = 2**31 - 1


class Fields:
    """One JSON object of a description. A key whose value is null counts as absent.

    Args:
        given: the parsed JSON value.
        where: its name in error messages.
        known: the keys that are allowed; None: any.

    Raises:
        CheckpointError: it is no object, or has unknown keys; in methods: a value has the wrong type.
    """

    def __init__(self, given: object, where: str, known: frozenset[str] | None = None) -> None:
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise CheckpointError(f"{where} is {show(given)}, must be an object.")
        self.where = where
        self.given: Mapping[str, object] = {key: value for key, value in given.items() if value is not None}
        unknown = [] if known is None else sorted(self.given.keys() - known)
        if unknown:
            raise CheckpointError(f"{where} has keys that are not understood: {list_names(unknown)}.")

    def integer(self, key: str, default: int) -> int:
        value = self.given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST:
            raise self.error(key, "an integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key, 0) if key in self.given else None

    def boolean(self, key: str, default: bool) -> bool:
        value = self.given.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def string(self, key: str, default: str) -> str:
        value = self.given.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def optional_string(self, key: str) -> str | None:
        return self.string(key, "") if key in self.given else None

    def names(self, key: str) -> tuple[str, ...]:
        """A list of strings, () if absent."""
        value = self.given.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of names")
        return tuple(value)

    def part(self, key: str, known: frozenset[str] | None = None) -> Fields | None:
        """The object under `key`, None if absent."""
        return Fields(self.given[key], f"{self.where}.{key}", known) if key in self.given else None

    def error(self, key: str, right: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} is {show(self.given.get(key))}, must be {right}.")


# --- Names of layers. ---

T = TypeVar("T")
# Escapes, character classes, openings of groups, counted repetitions; then single characters.
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:P<\w+>|<?[=!:])|\(|\{\d*,?\d*\}|.", re.DOTALL)
_NAME_LENGTH = 64
_MOST_WAYS = 2.0**24
_SECONDS = 0.25


def matches(name: str, pattern: str) -> bool:
    """True if `pattern` matches the layer `name`."""
    if pattern.startswith("re:"):
        return _match(pattern[3:], name)
    return name == pattern or ("*" in pattern and fnmatchcase(name, pattern))


def _match(pattern: str, name: str) -> bool:
    """`re.match` in bounded time; raises `CheckpointError` for a pattern that is invalid or takes too long."""
    started = time.thread_time()
    found = _compiled(pattern).match(name) is not None
    if time.thread_time() - started > _SECONDS:
        raise CheckpointError(f"the pattern re:{clip(pattern)} takes too long to match; write it without repetitions.")
    return found


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern that can match a name in few enough ways: `re` backtracks through all of them."""
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"the pattern re:{clip(pattern)} is no regular expression: {clip(str(error))}."
        ) from error
    if _ways(pattern) > _MOST_WAYS:
        raise CheckpointError(
            f"the pattern re:{clip(pattern)} repeats too much: repetitions may not be nested, and not more than four."
        )
    return compiled


def _ways(pattern: str) -> float:
    """Upper bound on the ways a pattern can match a name of about 64 characters; infinite for nested repetitions.

    The k-th repetition multiplies by 64 / k, an optional part by 2, alternatives by their number.
    """
    ways, repetitions, open_groups, closed = 1.0, 0, [_Group()], None
    for token in _TOKENS.findall(pattern):
        group = open_groups[-1]
        if token.startswith("("):
            open_groups.append(_Group())
        elif token == ")" and len(open_groups) > 1:
            closed = open_groups.pop()
            ways *= closed.alternatives
            open_groups[-1].varies |= closed.varies or closed.alternatives > 1
            continue
        elif token == "|":
            group.alternatives += 1
        elif token == "?":
            ways, group.varies = ways * 2, True
        elif token in ("*", "+") or (token.startswith("{") and len(token) > 1):
            if closed is not None and (closed.varies or closed.alternatives > 1):
                return float("inf")
            repetitions += 1
            ways, group.varies = ways * _NAME_LENGTH / repetitions, True
        closed = None
    return ways * open_groups[0].alternatives


@dataclass
class _Group:
    """A group of a pattern: `varies` if a part of it can match in several ways; the number of its alternatives."""

    varies: bool = False
    alternatives: int = 1


def columns_of(layer: Any) -> int:
    """This rank's columns K of a linear layer or an embedding table."""
    return layer.embedding_dim if layer.quant_kind == "embedding" else layer.input_size_per_partition


def agreed(prefix: str, names: Sequence[str], find: Callable[[str], T]) -> T:
    """The result of `find`, the same for every shard; raises `CheckpointError` if shards differ."""
    found = [find(name) for name in names]
    for name, value in zip(names, found, strict=True):
        if value != found[0]:
            if found[0] is None or value is None:
                raise CheckpointError(
                    f"some but not all shards of {prefix} are quantized, and a fused layer has one form "
                    f"({names[0]}: {found[0] or 'unquantized'}, {name}: {value or 'unquantized'})."
                )
            raise CheckpointError(
                f"Not all shards of {prefix} are quantized in the same form: {names[0]} has {found[0]}, {name} {value}."
            )
    return found[0]
