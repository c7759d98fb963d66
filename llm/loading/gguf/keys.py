"""GGUF metadata of one architecture, typed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llm.base.text import show
from llm.errors import CheckpointError
from llm.loading.gguf.container import Value

_MOST_LISTED = 1 << 14


class Metadata:
    """The keys of one architecture, typed; raises `CheckpointError` for a value of another type."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self.all = metadata
        self.architecture = metadata.get("general.architecture")

    def get(self, key: str) -> Value | None:
        return self.all.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A number, or a list of one number for every layer."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and 0 < value.size <= _MOST_LISTED and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "an integer, the same for all layers")
        return value

    def of_layers(self, key: str) -> list[int]:
        """A list of one number for every layer; of a number, that many times."""
        value, count = self.get(key), self.integer("block_count")
        if not 0 < count <= _MOST_LISTED:
            raise self.error("block_count", count, f"an integer from 1 to {_MOST_LISTED}")
        if isinstance(value, np.ndarray) and value.dtype.kind in "iub" and value.size == count:
            return [int(each) for each in value]
        return [self.integer(key)] * count

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, value, "a number")
        # A float32 of a decimal number: 1e-05 rather than 9.999999747378752e-06, as config.json has it.
        return float(str(np.float32(value))) if isinstance(value, float) else float(value)

    def error(self, key: str, value: object, right: str) -> CheckpointError:
        shown = "an array" if isinstance(value, np.ndarray | list) else show(value)
        return CheckpointError(f"GGUF metadata: {self.architecture}.{key} is {shown}, must be {right}.")
