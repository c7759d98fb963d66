"""Unknown keyword arguments of a function or dataclass: an error that names the nearest known one.

Owns the decorators. Python's TypeError names no alternative and has no attribute for the argument's name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from llm.errors import ArgumentError, nearest

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
_NOWHERE: Mapping[str, str] = {}

# Stands for "no default" in a function that checks the names of its arguments itself.
MISSING: object = object()


def known_names(what: str, elsewhere: Mapping[str, str] = _NOWHERE) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that checks the names of keyword arguments before the function is called.

    Args:
        what: the function's name in messages.
        elsewhere: a name that the function does not have -> what to do instead.

    Raises, when the function is called: ArgumentError.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise _unknown(what, name, kwargs[name], known, elsewhere)
            return function(*args, **kwargs)

        return checked

    return decorate


def wrong_names(
    what: str, function: Callable[..., object], unknown: Mapping[str, object], elsewhere: Mapping[str, str] = _NOWHERE
) -> TypeError:
    """The error of `known_names`, for a function that takes `**unknown: NoReturn`; unlike the decorator, it adds no
    frame to a call.

    Args:
        unknown: the arguments that the function does not have; empty: one whose default is `MISSING` was not given.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [item.name for item in parameters if item.name != "self" and item.kind is not item.VAR_KEYWORD]
    for name, value in unknown.items():
        return _unknown(what, name, value, known, elsewhere)
    needed = next(item.name for item in parameters if item.default is MISSING)
    return TypeError(f"{what}() missing 1 required positional argument: {needed!r}")


def known_fields(elsewhere: Mapping[str, str] = _NOWHERE) -> Callable[[C], C]:
    """`known_names` for the constructor of a dataclass."""

    def decorate(cls: C) -> C:
        cls.__init__ = known_names(cls.__name__, elsewhere)(cls.__init__)  # type: ignore[misc]
        return cls

    return decorate


def _unknown(what: str, name: str, value: object, known: list[str], elsewhere: Mapping[str, str]) -> ArgumentError:
    if name in elsewhere:
        message = f"{what} has no argument {name!r}; {elsewhere[name]}."
    else:
        message = f"{what} has no argument {name!r}.{nearest(name, known) or ' It takes ' + ', '.join(known) + '.'}"
    return ArgumentError(message, parameter=name, value=value)
