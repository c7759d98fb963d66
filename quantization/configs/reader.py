"""Strict, typed reading of a quantization description: a missing key or a wrong type is an error of one sentence."""

from __future__ import annotations

from collections.abc import Mapping

from llm.base.text import list_names, show
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
