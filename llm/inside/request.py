"""The captures and interventions of one request, resolved against the sites of a model; attention patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from llm.base.checks import check_integer, refuse
from llm.errors import ValidationError
from llm.inside.capture import Activations, Capture
from llm.inside.intervention import Change, Intervention
from llm.inside.names import Positions, Scoring, Site, check_within, matching, most, wanted

# Keys of `SamplingParams.extra_args`.
CAPTURE, INTERVENTIONS = "capture", "interventions"
_CAPTURE_RIGHT = "a Capture, the name of a site, or a list of these"
# Arguments of calls.
Captures = Capture | str | Sequence[Capture | str] | None
Interventions = Intervention | Sequence[Intervention] | None
# Of one request in one step: (site, positions int64 [N], values [N, *shape]).
Part = tuple[str, np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class InsideRequest:
    """The captures and interventions of one request.

    Attributes:
        captures: site -> the capture that reads it.
        reads: site -> (positions, dtype) that are read of the model for them; any of the positions is meant.
        changes: site -> (positions, change), in their order.
        sites: of the model, those of all these.
        num_prompt: the request's prompt tokens.
    """

    captures: Mapping[str, Capture] = field(default_factory=dict)
    reads: Mapping[str, tuple[Sequence[Positions], str]] = field(default_factory=dict)
    changes: Mapping[str, Sequence[tuple[Positions, Change]]] = field(default_factory=dict)
    sites: Mapping[str, Site] = field(default_factory=dict)
    num_prompt: int = 0

    def for_prompt(self, num_prompt: int) -> InsideRequest:
        """As it is for a request with so many prompt tokens; raises `ValidationError` where it does not fit."""
        for capture in self.captures.values():
            check_within(capture.positions, num_prompt)
        changes: dict[str, list[tuple[Positions, Change]]] = {}
        for name, own in self.changes.items():
            for positions, change in own:
                check_within(positions, num_prompt)
                fitted = change.of(self.sites[name], positions, num_prompt)
                changes.setdefault(name, []).append((positions, fitted))
        return replace(self, changes=changes, num_prompt=num_prompt)

    @cached_property
    def alike(self) -> list[tuple[list[str], Sequence[Positions], str, Sequence[tuple[Positions, Change]]]]:
        """(sites, what is read, its dtype, changes): sites of which the same is asked stand together."""
        found: dict[object, list[str]] = {}
        for name in {**self.reads, **self.changes}:
            positions, dtype = self.reads.get(name, ((), "float32"))
            same = name if name in self.changes else (*map(id, positions), dtype)
            found.setdefault(same, []).append(name)
        return [
            (names, *self.reads.get(names[0], ((), "float32")), self.changes.get(names[0], ()))
            for names in found.values()
        ]

    @property
    def limit_bytes(self) -> int:
        return min((capture.limit_bytes for capture in self.captures.values()), default=0)

    def max_bytes(self, num_prompt: int, num_generated: int) -> int:
        """What its activations take at most."""
        total = 0
        for name, (positions, dtype) in self.reads.items():
            site = self.sites[name]
            width = 8 if site.dtype == "int64" else np.dtype(dtype).itemsize
            total += site.size * width * max(most(own, num_prompt, num_generated) for own in positions)
        for name, capture in self.captures.items():
            if self.sites[name].scoring is not None:
                heads = len(capture.heads or range(self.sites[name].shape[0]))
                count = most(capture.positions, num_prompt, num_generated)
                total += 4 * heads * count * (num_prompt + num_generated)
        return total

    def check_size(self, num_prompt: int, num_generated: int) -> None:
        """Raise `ValidationError` if the activations of this request alone may take more than its limit."""
        size = self.max_bytes(num_prompt, num_generated)
        if self.captures and size > self.limit_bytes:
            raise ValidationError(too_large("this prompt", size, self.limit_bytes), parameter=CAPTURE, value=size)

    def activations(self, parts: Sequence[Part]) -> Activations:
        """What was captured in all steps. A position that was computed again, after a preemption, has the same bits."""
        found = Activations()
        by_site: dict[str, list[Part]] = {}
        for part in parts:
            by_site.setdefault(part[0], []).append(part)
        sites = self.sites
        read = {name: _joined(by_site.get(name, []), sites[name], dtype) for name, (_, dtype) in self.reads.items()}
        for name, capture in self.captures.items():
            scoring = sites[name].scoring
            positions, values = read[name if scoring is None else name.replace(".pattern", ".query")]
            own = wanted(capture.positions, positions, self.num_prompt)
            positions, values = positions[own], values[own]
            if scoring is not None:
                values = pattern(values, positions, read[name.replace(".pattern", ".key")][1], scoring, capture.heads)
            found.positions[name] = positions
            found[name] = values if values.dtype == np.int64 else values.astype(capture.dtype, copy=False)
        return found


def _joined(parts: Sequence[Part], site: Site, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(positions, values) of all steps, in order, each once."""
    kind = site.dtype if site.dtype == "int64" else dtype
    positions = np.concatenate([np.empty(0, np.int64), *(part[1] for part in parts)])
    values = np.concatenate([np.empty((0, *site.shape), kind), *(part[2] for part in parts)])
    positions, first = np.unique(positions, return_index=True)
    return positions, values[first]


def too_large(what: str, size: int, limit: int) -> str:
    return (
        f"the activations of {what} may take {size:,} bytes, and limit_bytes is {limit:,}; capture fewer sites or "
        "positions, set max_tokens, use dtype='float16', or raise Capture(limit_bytes=)."
    )


def has_inside_args(extra_args: Mapping[str, object] | None) -> bool:
    """Whether these args of a request have a capture or an intervention."""
    return any((extra_args or {}).get(key) is not None for key in (CAPTURE, INTERVENTIONS))


def resolve(extra_args: Mapping[str, object], sites: Mapping[str, Site]) -> InsideRequest:
    """What they ask of a model with these sites.

    Raises:
        ValidationError: they are none, or name a site that the model has not.
    """
    captures: dict[str, Capture] = {}
    for capture in _captures(extra_args.get(CAPTURE)):
        for name in matching(capture.sites, sites):
            if name in captures:
                raise ValidationError(
                    f"{name} is captured twice; name it in one Capture.", parameter=CAPTURE, value=name
                )
            if not sites[name].can_capture:
                raise ValidationError(f"{name} cannot be captured: {sites[name].note}.", parameter=CAPTURE, value=name)
            for head in capture.heads or ():
                check_integer("heads", head, 0, sites[name].shape[0] - 1)
            captures[name] = capture
    reads = _reads(captures, sites)
    changes: dict[str, list[tuple[Positions, Change]]] = {}
    for intervention in _interventions(extra_args.get(INTERVENTIONS)):
        for name in matching(intervention.sites, sites):
            if not sites[name].can_change:
                why = f": {note}" if (note := sites[name].note) else ""
                raise ValidationError(
                    f"{name} can be captured and not changed{why}.", parameter=INTERVENTIONS, value=name
                )
            changes.setdefault(name, []).append((intervention.positions, intervention.change))
    own = {name: site for name, site in sites.items() if name in {**captures, **reads, **changes}}
    return InsideRequest(captures, reads, changes, own)


def _reads(captures: Mapping[str, Capture], sites: Mapping[str, Site]) -> dict[str, tuple[list[Positions], str]]:
    """What is read: of a pattern the queries that are asked for, and all keys."""
    found: dict[str, tuple[list[Positions], str]] = {}
    for name, capture in captures.items():
        asked: list[tuple[str, Positions, str]] = [(name, capture.positions, capture.dtype)]
        if sites[name].scoring is not None:
            start = name.removesuffix("pattern")
            asked = [(f"{start}query", capture.positions, "float32"), (f"{start}key", "all", "float32")]
        for source, positions, dtype in asked:
            before, kind = found.get(source, ([], dtype))
            found[source] = [*before, positions], dtype if kind == dtype else "float32"
    return found


def _captures(given: object) -> list[Capture]:
    items = given if isinstance(given, list | tuple) else [] if given is None else [given]
    found: list[Capture] = []
    for item in items:
        if not isinstance(item, Capture | str):
            refuse(CAPTURE, item, _CAPTURE_RIGHT)
        found.append(Capture(item) if isinstance(item, str) else item)
    return found


def _interventions(given: object) -> list[Intervention]:
    items = given if isinstance(given, list | tuple) else [] if given is None else [given]
    found: list[Intervention] = []
    for item in items:
        if not isinstance(item, Intervention):
            refuse(INTERVENTIONS, item, "an Intervention, or a list of them")
        found.append(item)
    return found


def pattern(
    queries: np.ndarray, positions: np.ndarray, keys: np.ndarray, scoring: Scoring, heads: Sequence[int] | None = None
) -> np.ndarray:
    """float32 [N, heads, keys]: rows sum to 1, and to less where a head has a sink.

    Args:
        queries: float32 [N, all heads, size], at `positions`, int64 [N].
        keys: float32 [positions from 0 on, KV heads, size]; those up to the last of `positions` are weighed.
        heads: which heads; None: all.
    """
    chosen = list(range(queries.shape[1]) if heads is None else heads)
    length = int(positions.max(initial=-1)) + 1
    rounded = torch.from_numpy(np.ascontiguousarray(keys[:length])).to(getattr(torch, scoring.cache_dtype)).double()
    found = np.zeros((len(queries), len(chosen), length), dtype=np.float32)
    query_heads_per_key = max(1, queries.shape[1] // scoring.num_kv_heads)
    for place, head in enumerate(chosen):
        own = torch.from_numpy(queries[:, head]).double()
        scores = own @ rounded[:, head // query_heads_per_key].T * scoring.scale
        found[:, place] = _weights(scores, torch.from_numpy(positions), head, scoring).float().numpy()
    return found


def _weights(scores: torch.Tensor, positions: torch.Tensor, head: int, scoring: Scoring) -> torch.Tensor:
    """The softmax of one head's scores, float64 [N, keys]."""
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    behind = positions[:, None] - torch.arange(scores.shape[1])
    if scoring.alibi_slopes is not None:
        scores = scores - float(scoring.alibi_slopes[head]) * behind
    seen = behind >= 0
    if scoring.sliding_window is not None:
        seen &= behind < scoring.sliding_window
    if scoring.attention_chunk is not None:
        chunk = scoring.attention_chunk
        seen &= positions[:, None] // chunk == torch.arange(scores.shape[1]) // chunk
    scores = scores.masked_fill(~seen, -torch.inf)
    if scoring.sinks is None:
        return scores.softmax(-1)
    sink = scores.new_full((len(scores), 1), float(scoring.sinks[head]))
    return torch.cat([scores, sink], dim=-1).softmax(-1)[:, :-1]
