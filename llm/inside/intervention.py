"""What a user asks to be changed inside the model.

A change is computed from the activations of its own request alone, and in a way that does not depend on how many
positions a step has: a function, and what sums over channels, gets one position at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from llm.base.checks import check_integer, is_real, refuse
from llm.base.text import show
from llm.errors import ValidationError
from llm.inside.names import Positions, Site, check_positions, numbers

Values = torch.Tensor | np.ndarray | Sequence[float]


@dataclass(frozen=True)
class Place:
    """Where an activation is, for a function that changes it.

    Attributes:
        site: its name.
        position: of the token in its request.
        num_prompt_tokens: of the request.
        token_id: the token at the position.
        chosen: at `experts.weights`, the experts' numbers, int64 [top_k]; else None.
    """

    site: str
    position: int
    num_prompt_tokens: int
    token_id: int
    chosen: torch.Tensor | None = None


class Change(Protocol):
    """How activations change; `x` is float32 [positions, *shape of the site], one `Place` for each position."""

    def of(self, site: Site, positions: Positions, num_prompt: int) -> Change:
        """As it is for one request with so many prompt tokens; raises `ValidationError` where it does not fit."""

    def __call__(self, x: torch.Tensor, places: Sequence[Place]) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class Intervention:
    """A change of activations at sites and positions of one request; make one by the class methods.

    `llm.generate(prompts, interventions=[...])`, or of one request
    `SamplingParams(extra_args={"interventions": [...]})`.
    Several are applied in their order; a capture of the same site sees what they leave. A request with interventions
    shares no cached blocks, and nothing of its answer is drafted.

    Attributes:
        sites: as in `Capture`.
        positions: as in `Capture`.
    """

    sites: str | Sequence[str]
    change: Change
    positions: Positions = "all"

    def __post_init__(self) -> None:
        names = [self.sites] if isinstance(self.sites, str) else self.sites
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            refuse("sites", self.sites, "the name of a site, or a list of them")
        if not callable(self.change):
            refuse("change", self.change, "one of the changes that the class methods of Intervention make")
        check_positions(self.positions)

    @classmethod
    def add(
        cls, sites: str | Sequence[str], vector: Values, scale: float = 1.0, positions: Positions = "all"
    ) -> Intervention:
        """x + scale * vector, of a site's shape: steering."""
        _check_number("scale", scale)
        return cls(sites, _Add(_tensor("vector", vector) * scale), positions)

    @classmethod
    def scale(cls, sites: str | Sequence[str], factor: float, positions: Positions = "all") -> Intervention:
        """x * factor; 0 leaves a part out."""
        _check_number("factor", factor)
        return cls(sites, _Scale(float(factor)), positions)

    @classmethod
    def project_out(cls, sites: str | Sequence[str], direction: Values, positions: Positions = "all") -> Intervention:
        """x without its component along `direction`, of a site's shape."""
        given = _tensor("direction", direction)
        length = float(given.double().norm())
        if not length > 0:
            refuse("direction", direction, "a vector that is not zero")
        return cls(sites, _ProjectOut(given / length), positions)

    @classmethod
    def replace(cls, sites: str | Sequence[str], values: Values, positions: Positions = "all") -> Intervention:
        """Activations of another prompt: `values` of a site's shape, or with a row for each of `positions`, which are
        then numbers, a slice, "last" or "prompt"."""
        return cls(sites, _Replace(_tensor("values", values)), positions)

    @classmethod
    def zero_head(cls, layer: int, head: int | Sequence[int], positions: Positions = "all") -> Intervention:
        """Leave heads out of a layer's attention."""
        check_integer("layer", layer, -(1 << 20))
        heads = [head] if isinstance(head, int) else list(head)
        for item in heads:
            check_integer("head", item, 0)
        return cls(f"layers.{layer}.attention.heads", _ZeroHeads(tuple(heads)), positions)

    @classmethod
    def zero_expert(cls, layer: int, expert: int | Sequence[int], positions: Positions = "all") -> Intervention:
        """Leave experts out of a layer's sum, where the router chooses them; the weights of the others stay."""
        check_integer("layer", layer, -(1 << 20))
        experts = [expert] if isinstance(expert, int) else list(expert)
        for item in experts:
            check_integer("expert", item, 0)
        return cls(f"layers.{layer}.experts.weights", _ZeroExperts(tuple(experts)), positions)

    @classmethod
    def function(
        cls,
        sites: str | Sequence[str],
        function: Callable[[torch.Tensor, Place], torch.Tensor],
        positions: Positions = "all",
    ) -> Intervention:
        """Any `function(activation, place)`: float32 of the site's shape at one position -> the same shape."""
        if not callable(function):
            refuse("function", function, "a callable that takes an activation and a Place")
        return cls(sites, _Function(function), positions)


def _tensor(name: str, values: Values) -> torch.Tensor:
    try:
        found = torch.as_tensor(values).detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValidationError(f"{name} must be numbers, got {show(values)}: {error}", parameter=name) from error
    if not bool(found.isfinite().all()):
        refuse(name, "values that are not finite", "finite")
    return found.contiguous()


def _check_number(name: str, value: object) -> None:
    if not is_real(value) or not np.isfinite(value):
        refuse(name, value, "a finite number")


def _check_shape(name: str, values: torch.Tensor, site: Site) -> None:
    if tuple(values.shape) != site.shape:
        refuse(name, f"{list(values.shape)}", f"of the shape of {site.name}, {list(site.shape)}")


@dataclass(frozen=True, eq=False)
class _Add:
    vector: torch.Tensor

    def of(self, site: Site, positions: Positions, num_prompt: int) -> Change:
        _check_shape("vector", self.vector, site)
        return self

    def __call__(self, x: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
        return x + self.vector.to(x.device)


@dataclass(frozen=True)
class _Scale:
    factor: float

    def of(self, site: Site, positions: Positions, num_prompt: int) -> Change:
        return self

    def __call__(self, x: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
        return x * self.factor


@dataclass(frozen=True, eq=False)
class _ProjectOut:
    unit: torch.Tensor

    def of(self, site: Site, positions: Positions, num_prompt: int) -> Change:
        _check_shape("direction", self.unit, site)
        return self

    def __call__(self, x: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
        unit = self.unit.to(x.device)
        return torch.stack([row - unit * (row * unit).sum() for row in x])


@dataclass(frozen=True, eq=False)
class _Replace:
    """`rows`: position -> row of `values`; None: all positions have the same."""

    values: torch.Tensor
    rows: Mapping[int, int] | None = None

    def of(self, site: Site, positions: Positions, num_prompt: int) -> Change:
        if tuple(self.values.shape) == site.shape:
            return self
        if tuple(self.values.shape[1:]) != site.shape:
            _check_shape("values", self.values, site)
        listed = numbers(positions, num_prompt)
        if listed is None:
            refuse("positions", positions, "numbers, a slice, 'last' or 'prompt' where values have a row for each")
        if len(self.values) != len(listed):
            refuse("values", f"{len(self.values)} rows", f"of one row, or of {len(listed)}, one for each position")
        return _Replace(self.values, {position: row for row, position in enumerate(listed)})

    def __call__(self, x: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
        if self.rows is None:
            return self.values.to(x.device).expand_as(x)
        return self.values[[self.rows[place.position] for place in places]].to(x.device)


@dataclass(frozen=True)
class _ZeroHeads:
    heads: tuple[int, ...]

    def of(self, site: Site, positions: Positions, num_prompt: int) -> Change:
        for head in self.heads:
            check_integer("head", head, 0, site.shape[0] - 1)
        return self

    def __call__(self, x: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
        x = x.clone()
        x[:, list(self.heads)] = 0
        return x


@dataclass(frozen=True)
class _ZeroExperts:
    """An expert that the router never chooses changes nothing."""

    experts: tuple[int, ...]

    def of(self, site: Site, positions: Positions, num_prompt: int) -> Change:
        return self

    def __call__(self, x: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
        chosen = torch.stack([place.chosen for place in places if place.chosen is not None])
        return x.masked_fill(torch.isin(chosen, torch.tensor(self.experts, device=chosen.device)), 0.0)


@dataclass(frozen=True, eq=False)
class _Function:
    function: Callable[[torch.Tensor, Place], torch.Tensor]

    def of(self, site: Site, positions: Positions, num_prompt: int) -> Change:
        return self

    def __call__(self, x: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
        found = []
        for row, place in zip(x, places, strict=True):
            changed = self.function(row.clone(), place)
            if not isinstance(changed, torch.Tensor) or changed.shape != row.shape:
                got = f"{list(changed.shape)}" if isinstance(changed, torch.Tensor) else type(changed).__name__
                raise ValidationError(
                    f"the function of an intervention at {place.site} must return a tensor of shape {list(row.shape)}, "
                    f"got {got}.",
                    parameter="function",
                )
            found.append(changed.to(row))
        return torch.stack(found)
