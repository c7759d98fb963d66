"""What one request asks of the inside of a model: its captures and interventions, resolved for that model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llm.base.checks import refuse
from llm.errors import ValidationError
from llm.inside.capture import Activations, Capture
from llm.inside.intervention import Change, Intervention
from llm.inside.names import Site, matching
from llm.inside.positions import Positions, check_within, most

# Keys of `SamplingParams.extra_args`.
CAPTURE, INTERVENTIONS = "capture", "interventions"
_CAPTURE_RIGHT = "a Capture, the name of a site, or a list of these"
# Arguments of calls.
Captures = Capture | str | Sequence[Capture | str] | None
Interventions = Intervention | Sequence[Intervention] | None
# Of one request in one step: (site, positions int64 [N], values [N, *shape]).
Part = tuple[str, np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Asked:
    """The captures and interventions of one request.

    Attributes:
        captures: site -> (positions, dtype).
        changes: site -> (positions, change), in their order.
        sites: of the model, those that are captured.
    """

    captures: Mapping[str, tuple[Positions, str]] = field(default_factory=dict)
    changes: Mapping[str, Sequence[tuple[Positions, Change]]] = field(default_factory=dict)
    sites: Mapping[str, Site] = field(default_factory=dict)
    limit_bytes: int = 0

    def for_prompt(self, num_prompt: int) -> Asked:
        """As it is for a request with so many prompt tokens; raises `ValidationError` where it does not fit."""
        for positions, _ in self.captures.values():
            check_within(positions, num_prompt)
        changes: dict[str, list[tuple[Positions, Change]]] = {}
        for name, own in self.changes.items():
            for positions, change in own:
                check_within(positions, num_prompt)
                fitted = change.of(self.sites[name], positions, num_prompt)
                changes.setdefault(name, []).append((positions, fitted))
        return replace(self, changes=changes)

    def max_bytes(self, num_prompt: int, num_generated: int) -> int:
        """What its activations take at most."""
        total = 0
        for name, (positions, dtype) in self.captures.items():
            site = self.sites[name]
            width = 8 if site.dtype == "int64" else np.dtype(dtype).itemsize
            total += site.size * width * most(positions, num_prompt, num_generated)
        return total

    def activations(self, parts: Sequence[Part]) -> Activations:
        """What was captured in all steps. A position that was computed again, after a preemption, has the same bits."""
        found = Activations()
        by_site: dict[str, list[Part]] = {}
        for part in parts:
            by_site.setdefault(part[0], []).append(part)
        for name, (_, dtype) in self.captures.items():
            own, site = by_site.get(name, []), self.sites[name]
            kind = site.dtype if site.dtype == "int64" else dtype
            positions = np.concatenate([np.empty(0, np.int64), *(part[1] for part in own)])
            values = np.concatenate([np.empty((0, *site.shape), kind), *(part[2] for part in own)])
            found.positions[name], first = np.unique(positions, return_index=True)
            found[name] = values[first]
        return found


def asks(extra_args: Mapping[str, object] | None) -> bool:
    """Whether these args of a request have a capture or an intervention."""
    return any((extra_args or {}).get(key) is not None for key in (CAPTURE, INTERVENTIONS))


def resolve(extra_args: Mapping[str, object], sites: Mapping[str, Site]) -> Asked:
    """What they ask of a model with these sites.

    Raises:
        ValidationError: they are none, or name a site that the model has not.
    """
    captures: dict[str, tuple[Positions, str]] = {}
    limits = []
    for capture in _captures(extra_args.get(CAPTURE)):
        limits.append(capture.limit_bytes)
        for name in matching(capture.sites, sites):
            if name in captures:
                raise ValidationError(
                    f"{name} is captured twice; name it in one Capture.", parameter=CAPTURE, value=name
                )
            captures[name] = capture.positions, capture.dtype
    changes: dict[str, list[tuple[Positions, Change]]] = {}
    for intervention in _interventions(extra_args.get(INTERVENTIONS)):
        for name in matching(intervention.sites, sites):
            if not sites[name].can_change:
                raise ValidationError(f"{name} can be captured and not changed.", parameter=INTERVENTIONS, value=name)
            changes.setdefault(name, []).append((intervention.positions, intervention.change))
    own = {name: site for name, site in sites.items() if name in captures or name in changes}
    return Asked(captures, changes, own, min(limits, default=0))


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
