"""Arguments that calls have in common, checked before any work starts: `lora_request`, `priority`, captures, and those
of vLLM that have no effect here, whose neutral values are accepted and others refused.

`llm.base.suggestions` has the messages; the runner checks an adapter's files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from llm.base.checks import check_integer, refuse
from llm.base.suggestions import ASKS_NOTHING
from llm.base.text import show
from llm.engine.engine import Engine
from llm.engine.rows import AnyRow, Row
from llm.engine.step import Adapter
from llm.errors import ValidationError
from llm.inputs import LoRARequest
from llm.inside.request import CAPTURE, INTERVENTIONS, too_large
from llm.sampling_params import SamplingParams

logger = logging.getLogger("llm")

Priority = int | Sequence[int] | None
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
R = TypeVar("R", bound=AnyRow)
P = TypeVar("P")
_RIGHT = "a LoRARequest, a list with one or None per prompt, or None"


def give_adapters(engine: Engine, rows: Sequence[R], given: LoRARequests) -> Sequence[R]:
    """Set the adapters of a call's rows, and return these.

    Raises:
        ValidationError: `given` is neither, has another length, or adapters are not enabled. CheckpointError: an
            adapter cannot be used with the model.
    """
    adapters = adapters_of(engine, given, len(rows))
    for row, adapter in zip(rows, adapters, strict=True):
        if isinstance(row, Row):
            row.adapter = adapter
    return rows


def adapters_of(engine: Engine, given: LoRARequests, count: int) -> list[Adapter | None]:
    """The checked adapter of each of `count` prompts."""
    per_row = requests_per_row(given, count)
    known: dict[str, Adapter] = {}
    found: list[Adapter | None] = []
    for request in per_row:
        if request is not None and request.lora_path not in known:
            known[request.lora_path] = Adapter(request, engine.runner.check_adapter(request.lora_path))
        # Rows keep the request that they were given: two names may stand for one folder.
        found.append(None if request is None else Adapter(request, known[request.lora_path].digest))
    return found


def requests_per_row(given: LoRARequests, count: int) -> Sequence[LoRARequest | None]:
    """The request of each of `count` prompts; raises `ValidationError` if `given` is wrong, or of another length."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        refuse("lora_request", given, _RIGHT)
    for request in given:
        if request is not None and not isinstance(request, LoRARequest):
            refuse("lora_request", request, _RIGHT)
    if given and len(given) != count:
        raise ValidationError(
            f"there are {len(given)} lora_request for {count} prompts; pass one for all, or one or None for each.",
            parameter="lora_request",
            value=show(given),
        )
    return given or [None] * count


def with_inside(params: P, capture: object, interventions: object, default: Callable[[], SamplingParams]) -> P:
    """The params of a call's rows with its captures and interventions, in the place of their own."""
    own = {key: value for key, value in ((CAPTURE, capture), (INTERVENTIONS, interventions)) if value is not None}
    if not own:
        return params
    given = default() if params is None else params
    if isinstance(given, SamplingParams):
        return cast(P, _with_args(given, own))
    if isinstance(given, Sequence) and all(isinstance(item, SamplingParams) for item in given):
        known = {id(item): _with_args(item, own) for item in given}
        return cast(P, [known[id(item)] for item in given])
    return params  # the caller refuses them


def _with_args(params: SamplingParams, own: Mapping[str, object]) -> SamplingParams:
    copied = params.clone()
    copied.extra_args = {**(copied.extra_args or {}), **own}
    return copied


def check_captured(rows: Sequence[AnyRow]) -> None:
    """Tell how much memory the activations of a call take at most.

    Raises:
        ValidationError: more than the limit of a `Capture`.
    """
    asked = [(row, row.params.inside) for row in rows if isinstance(row, Row) and row.params.inside is not None]
    asked = [(row, own) for row, own in asked if own.captures]
    if not asked:
        return
    size = sum(own.max_bytes(len(row.token_ids), row.params.max_tokens or 0) * row.params.n for row, own in asked)
    limit = min(own.limit_bytes for _, own in asked)
    logger.info("activations of %d prompts take up to %s bytes", len(asked), f"{size:,}")
    if size > limit:
        said = too_large(f"{len(asked)} prompts", size, limit)
        raise ValidationError(said, parameter="capture", value=size)


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
