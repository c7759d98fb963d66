"""Checks of single values a user passed: each raises a `ValidationError` with one sentence, or returns nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

from llm.base.errors import ValidationError


def refuse(name: str, value: Any, right: str) -> NoReturn:
    raise ValidationError(f"{name} must be {right}, got {value!r}.", parameter=name, value=value)


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    right = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        refuse(name, value, right)


def check_real(name: str, value: Any, low: float, high: float) -> None:
    if not is_real(value) or not low <= value <= high:  # NaN is on no side
        refuse(name, value, f"a number from {low:g} to {high:g}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        refuse(name, value, "True or False")


def check_strings(name: str, values: Iterable[Any]) -> None:
    for text in values:
        if not isinstance(text, str) or not text:
            refuse(name, text, "a non-empty string, or a list of them")


def is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain_number(value: Any) -> Any:
    """NumPy's numbers as Python's; anything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def as_list(name: str, value: Any, right: str) -> list[Any]:
    """Any iterable but text and mappings, as a new list of plain numbers; [] for None."""
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        refuse(name, value, right)
    return [plain_number(item) for item in value]


def copy_containers(value: Any) -> Any:
    """Lists and dicts copied all the way down, whatever they hold shared."""
    if type(value) is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    return [copy_containers(item) for item in value] if type(value) is list else value
