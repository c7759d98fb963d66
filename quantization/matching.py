"""Which layers a pattern matches, and the check that the shards of a fused layer agree.

Names are dotted paths. A pattern is a name, `re:<regular expression>` matched from the start of the name (as in
compressed-tensors), or, in a user's arguments, a glob with `*`.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from llm.base.text import clip
from llm.errors import CheckpointError

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
