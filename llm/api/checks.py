"""Checks of vLLM's call arguments that have no effect here: neutral values are accepted, others are refused.

Owns the checks; `llm.base.suggestions` has the messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm.base.checks import check_integer
from llm.base.suggestions import ASKS_NOTHING
from llm.base.text import show
from llm.engine.rows import AnyRow, Row
from llm.errors import ValidationError

Priority = int | Sequence[int] | None


def check_asks_nothing(**given: object) -> None:
    """Raise `ValidationError` for the first argument whose value needs a feature that is not here."""
    for name, value in given.items():
        harmless, instead = ASKS_NOTHING[name]
        if value not in harmless:
            raise ValidationError(
                f"{name} must be {harmless[0]!r}, got {show(value)}: {instead}.", parameter=name, value=value
            )


def give_priority(rows: Sequence[AnyRow], priority: Priority) -> None:
    """Set the priority of each row; raises `ValidationError` as `check_priority`."""
    for row, value in zip(rows, check_priority(priority, len(rows)), strict=True):
        if isinstance(row, Row):
            row.priority = value


def check_priority(priority: Priority, count: int) -> Sequence[int]:
    """The priority of each of `count` prompts, from one integer for all, one per prompt, or None."""
    if priority is None:
        return [0] * count
    if isinstance(priority, int):
        check_integer("priority", priority, -(2**63), 2**63 - 1)
        return [priority] * count
    if isinstance(priority, str) or not isinstance(priority, Sequence):
        raise ValidationError(
            f"priority must be an integer, a list of one per prompt, or None, got {type(priority).__name__}.",
            parameter="priority",
            value=priority,
        )
    for value in priority:
        check_integer("priority", value, -(2**63), 2**63 - 1)
    if len(priority) != count:
        raise ValidationError(
            f"there are {len(priority)} values of priority for {count} prompts; pass one for each.",
            parameter="priority",
            value=priority,
        )
    return priority
