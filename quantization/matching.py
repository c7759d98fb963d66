"""Which layers a pattern means, and that the shards of a fused layer agree.

Names are dotted paths. A pattern is a name, `re:<regular expression>` matched from the start of the name (as
compressed-tensors does), or, where the user writes it, a glob with `*`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from llm.base.errors import CheckpointError

T = TypeVar("T")


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` means the layer `name`."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or ("*" in pattern and fnmatchcase(name, pattern))


def columns_of(layer: Any) -> int:
    """K of a linear layer or an embedding table, as far as this rank holds it."""
    return layer.embedding_dim if layer.quant_kind == "embedding" else layer.input_size_per_partition


def agreed(prefix: str, names: Sequence[str], find: Callable[[str], T]) -> T:
    """What `find` says of every shard; raises `CheckpointError` when shards differ."""
    found = [find(name) for name in names]
    for name, value in zip(names, found, strict=True):
        if value != found[0]:
            if found[0] is None or value is None:
                raise CheckpointError(
                    f"Detected some but not all shards of {prefix} are quantized. All shards of fused layers to have "
                    f"the same precision ({names[0]}: {found[0] or 'unquantized'}, {name}: {value or 'unquantized'})."
                )
            raise CheckpointError(
                f"Not all shards of {prefix} are quantized with same quant type: {names[0]} uses {found[0]}, "
                f"{name} uses {value}."
            )
    return found[0]
