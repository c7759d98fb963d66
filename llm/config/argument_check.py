"""The check of keyword arguments that the called method has no parameter for.

Owns the check of a constructor's (honoured arguments are checked by the code that honours them), and the table of those
that belong elsewhere.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import fields

from llm.base import suggestions as elsewhere
from llm.config.arguments import ARGUMENTS
from llm.errors import ArgumentError, ValidationError, nearest
from llm.sampling_params import SamplingParams

# Keyword arguments that methods do not have -> what to do instead; see `llm.base.names`.
CALLS: dict[str, str] = {
    **{
        item.name: f"it is a field of SamplingParams: pass sampling_params=SamplingParams({item.name}=...)"
        for item in fields(SamplingParams)
    },
    **elsewhere.CALLS,
}

_HONOURED = [name for name, argument in ARGUMENTS.items() if argument.status == "honoured"]
_SECRETS = frozenset({"hf_token"})  # never shown in a message


def check_arguments(extra: Mapping[str, object]) -> list[str]:
    """Check constructor arguments that are no parameter of `LLM`.

    Returns:
        One note per accepted argument, "name: why it changes nothing", shown under `verbose`.

    Raises:
        ValidationError: a refused value.
        ArgumentError: a name that neither vLLM nor this library has.
        TypeError: an honoured name, which `LLM` should have as a parameter: a bug here, not the user's mistake.
    """
    return [note for name, value in extra.items() if (note := _judge(name, value))]


def _judge(name: str, value: object) -> str:
    """The note for one argument, "" when there is none."""
    argument = ARGUMENTS.get(name)
    if argument is None:
        if instead := elsewhere.CONSTRUCTOR.get(name):
            raise ArgumentError(f"LLM has no argument {name!r}; {instead}.", parameter=name, value=value)
        hint = nearest(name, _HONOURED) or nearest(name, ARGUMENTS) or f" It takes {', '.join(_HONOURED)}."
        raise ArgumentError(f"LLM has no argument {name!r}, and neither has vLLM's.{hint}", parameter=name, value=value)
    if argument.status == "honoured":
        raise TypeError(f"{name!r} is a parameter of LLM itself, which should have taken it")
    if argument.status == "accepted":
        return "" if value is None else f"{name}: {argument.note}"
    if not any(_equal(value, harmless) for harmless in argument.harmless):
        shown = "..." if name in _SECRETS else " ".join(reprlib.repr(value).split())
        raise ValidationError(f"{name}={shown} is refused: {argument.note}", parameter=name, value=value)
    return ""


def _equal(value: object, harmless: object) -> bool:
    """`value == harmless` as one bool; False if the comparison has no single result (an array of several elements)."""
    try:
        return bool(value == harmless)
    except (TypeError, ValueError, RuntimeError):
        return False
