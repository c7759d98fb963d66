"""Checks of vLLM's call arguments that have no effect here: neutral values are accepted, others are refused.

Owns the checks; `llm.config.elsewhere` has the messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm.base.checks import check_integer
from llm.base.errors import ValidationError
from llm.base.text import show
from llm.config.elsewhere import ASKS_NOTHING


def check_asks_nothing(**given: object) -> None:
    """Raise `ValidationError` for the first argument whose value needs a feature that is not here."""
    for name, value in given.items():
        harmless, instead = ASKS_NOTHING[name]
        if value not in harmless:
            raise ValidationError(
                f"{name} must be {harmless[0]!r}, got {show(value)}: {instead}.", parameter=name, value=value
            )


def check_priority(priority: Sequence[int] | None, count: int) -> None:
    """One integer per prompt, or None. The order of execution changes no answer, so the values are not used."""
    if priority is None:
        return
    if isinstance(priority, str) or not isinstance(priority, Sequence):
        raise ValidationError(
            f"priority must be a list of one integer per prompt, or None, got {type(priority).__name__}.",
            parameter="priority",
            value=priority,
        )
    for value in priority:
        check_integer("priority", value, -(2**63))
    if len(priority) != count:
        raise ValidationError(
            f"there are {len(priority)} values of priority for {count} prompts; pass one for each.",
            parameter="priority",
            value=priority,
        )
