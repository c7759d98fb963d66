"""Checks of what a user passed, single values and argument names: an error of one sentence, or nothing."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from numbers import Integral, Real
from typing import Any, NoReturn, ParamSpec, TypeGuard, TypeVar

from llm.base.text import show
from llm.errors import ArgumentError, ValidationError, nearest

_LONGEST_LIST = 1 << 20
_DEEPEST = 200
_MOST_VALUES = 1 << 20


def refuse(name: str, value: object, right: str) -> NoReturn:
    """Raise `ValidationError`: `name` must be `right`, got `value`."""
    raise ValidationError(f"{name} must be {right}, got {show(value)}.", parameter=name, value=value)


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    right = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        refuse(name, value, right)


def check_real(name: str, value: object, low: float, high: float) -> None:
    if not is_real(value) or not low <= value <= high:  # false for NaN
        refuse(name, value, f"a number from {low:g} to {high:g}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        refuse(name, value, "True or False")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        refuse(name, value, " or ".join(map(repr, choices)))


def check_strings(name: str, values: Iterable[object]) -> None:
    for text in values:
        if not isinstance(text, str) or not text:
            refuse(name, text, "a non-empty string, or a list of them")


def is_real(value: object) -> TypeGuard[float]:
    """True for a float and an int that fits one, False for a bool."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float)


def plain_number(value: Any) -> Any:
    """A NumPy number as Python's int or float; anything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def as_list(name: str, value: object, right: str) -> list[Any]:
    """An iterable as a new list, NumPy numbers as Python's; [] for None. Text and mappings are refused."""
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        refuse(name, value, right)
    try:  # a tensor of no dimensions has a length and raises when it is asked for it
        count = len(value) if isinstance(value, Sized) else 0
    except TypeError:
        refuse(name, value, right)
    if count > _LONGEST_LIST:
        refuse(name, value, f"{right} (at most {_LONGEST_LIST})")
    items = [plain_number(item) for item in itertools.islice(value, _LONGEST_LIST + 1)]
    if len(items) > _LONGEST_LIST:
        refuse(name, value, f"{right} (at most {_LONGEST_LIST})")
    return items


def check_containers(name: str, value: object) -> None:
    """Refuse lists and dicts that nest too deeply, hold themselves, or have too many values, shared ones counted each
    time."""
    left: list[tuple[object, int]] = [(value, 1)]
    count = 0
    while left:
        container, depth = left.pop()
        if type(container) is not dict and type(container) is not list:
            continue
        count += len(container)
        if depth > _DEEPEST or count > _MOST_VALUES:
            limit = f"nested more than {_DEEPEST} deep" if depth > _DEEPEST else f"of more than {_MOST_VALUES} values"
            raise ValidationError(f"{name} are {limit}, or hold themselves; pass plain data.", parameter=name)
        inner = container.values() if isinstance(container, dict) else container
        left += [(item, depth + 1) for item in inner]


def copy_containers(name: str, value: Any) -> Any:
    """A deep copy of lists and dicts, which are checked. What they hold is shared, not copied."""
    check_containers(name, value)
    return _copied(value)


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
_NOWHERE: Mapping[str, str] = {}

# Stands for "no default" in a function that checks the names of its arguments itself.
MISSING: object = object()


def known_names(what: str, instead: Mapping[str, str] = _NOWHERE) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that checks the names of keyword arguments before the function is called.

    Args:
        what: the function's name in messages.
        instead: a name that the function does not have -> what to do instead.

    Raises, when the function is called: ArgumentError.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise _unknown(what, name, kwargs[name], known, instead)
            return function(*args, **kwargs)

        return checked

    return decorate


def wrong_names(
    what: str, function: Callable[..., object], unknown: Mapping[str, object], instead: Mapping[str, str] = _NOWHERE
) -> TypeError:
    """The error of `known_names`, for a function that takes `**unknown: NoReturn`; unlike the decorator, it adds no
    frame to a call.

    Args:
        unknown: the arguments that the function does not have; empty: one whose default is `MISSING` was not given.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [item.name for item in parameters if item.name != "self" and item.kind is not item.VAR_KEYWORD]
    for name, value in unknown.items():
        return _unknown(what, name, value, known, instead)
    needed = next(item.name for item in parameters if item.default is MISSING)
    return TypeError(f"{what}() missing 1 required positional argument: {needed!r}")


def known_fields(instead: Mapping[str, str] = _NOWHERE) -> Callable[[C], C]:
    """`known_names` for the constructor of a dataclass."""

    def decorate(cls: C) -> C:
        cls.__init__ = known_names(cls.__name__, instead)(cls.__init__)  # type: ignore[misc]
        return cls

    return decorate


def _unknown(what: str, name: str, value: object, known: list[str], instead: Mapping[str, str]) -> ArgumentError:
    if name in instead:
        message = f"{what} has no argument {name!r}; {instead[name]}."
    else:
        message = f"{what} has no argument {name!r}.{nearest(name, known) or ' It takes ' + ', '.join(known) + '.'}"
    return ArgumentError(message, parameter=name, value=value)
