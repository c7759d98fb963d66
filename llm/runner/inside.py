"""The runner's side of captures and interventions: a step in which some rows read or change activations.

Such a step is not recorded, but replayed where it was, in the layers that nothing is asked of (`llm.runner.recorded`).
Only the modules with a site that a row of the step asks for are stepped into: their `forward` is replaced on the object
for the length of the forward pass. These are not torch's hooks, which are counted: what looks for hooks
(`llm.base.watch`) would search the whole model again in the steps after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from llm.inside.intervention import Change, Place
from llm.inside.names import FINAL, LOGITS, Site, wanted
from llm.inside.request import InsideRequest, Part
from llm.inside.sites import Hook, Take, final_sites, find_hooks
from llm.models.decoder import DecoderForCausalLM, DecoderLayer
from llm.runner.batch import InputBatch, StepInput

Upload = Callable[[np.ndarray], torch.Tensor]
Forward = Callable[..., object]
# (hidden states [N, H], their batch rows) -> logits float32 [N, vocab].
ComputeLogits = Callable[[torch.Tensor, np.ndarray], torch.Tensor]


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """The layers that all sites of a model are in, but those behind the last; none: they are not known."""
    if not isinstance(model, DecoderForCausalLM):
        return ()
    return [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]


class ModelInside:
    """The sites of a model, found when somebody asks for them."""

    def __init__(self, model: nn.Module, vocab_size: int, cache_dtype: torch.dtype) -> None:
        self._model, self._vocab_size, self._cache_dtype = model, vocab_size, cache_dtype

    @cached_property
    def _hooks(self) -> Mapping[str, Hook]:
        return find_hooks(self._model, self._cache_dtype)

    @cached_property
    def _final(self) -> list[Site]:
        return list(final_sites(self._model, self._vocab_size))

    def sites(self) -> dict[str, Site]:
        """In the order of computing."""
        return {site.name: site for site in [*(hook.site for hook in self._hooks.values()), *self._final]}

    def step(self, step: StepInput, batch: InputBatch, upload: Upload) -> StepInside | None:
        """What the rows of a step ask for at its positions; None: nothing."""
        work: dict[str, list[RowWork]] = {}
        first = 0
        for row, count in zip(step.rows.tolist(), step.counts.tolist(), strict=True):
            request: InsideRequest | None = batch.params[row].inside
            if request is not None:
                start = int(batch.num_computed[row])
                at = np.arange(start, start + count)
                for name, own in _row_work(request, batch, row, first, at):
                    work.setdefault(name, []).append(own)
            first += count
        if not work:
            return None
        sites = self.sites()
        return StepInside(work, [hook for name, hook in self._hooks.items() if name in work], sites, upload)


@dataclass
class RowWork:
    """What one row does at one site in a step.

    Attributes:
        first: index of the row's first token among the step's.
        positions: int64 [N], of the tokens that are captured or changed.
        captured: bool [N].
        changes: bool [N] each, in their order.
    """

    request_id: str
    row: int
    first: int
    start: int
    num_prompt: int
    token_ids: np.ndarray
    positions: np.ndarray
    captured: np.ndarray
    dtype: str = "float32"
    changes: Sequence[tuple[np.ndarray, Change]] = ()

    @property
    def tokens(self) -> np.ndarray:
        """Indices among the step's tokens."""
        return self.positions - self.start + self.first

    @property
    def read(self) -> tuple[str, np.ndarray]:
        return self.request_id, self.positions


def _row_work(
    request: InsideRequest, batch: InputBatch, row: int, first: int, at: np.ndarray
) -> Iterator[tuple[str, RowWork]]:
    """(site, work); sites of which the same is asked share theirs."""
    num_prompt = int(batch.num_prompt_tokens[row])
    for names, positions, dtype, places in request.alike:
        captured = np.logical_or.reduce([np.zeros(len(at), bool), *(wanted(own, at, num_prompt) for own in positions)])
        changes = [(wanted(where, at, num_prompt), change) for where, change in places]
        any_of = np.logical_or.reduce([captured, *(mask for mask, _ in changes)])
        if not any_of.any():
            continue
        own = np.flatnonzero(any_of)
        work = RowWork(
            request_id=batch.request_ids[row],
            row=row,
            first=first,
            start=int(at[0]),
            num_prompt=num_prompt,
            token_ids=batch.token_ids[row],
            positions=at[own],
            captured=captured[own],
            dtype=dtype,
            changes=[(mask[own], change) for mask, change in changes if mask.any()],
        )
        yield from ((name, work) for name in names)


class Readers(NamedTuple):
    """Rows that are read together, with the positions of each and the step's tokens of all; and the other rows."""

    rows: list[tuple[str, np.ndarray]]
    tokens: torch.Tensor
    dtype: str
    others: Sequence[RowWork]


def _as(values: torch.Tensor, dtype: str) -> torch.Tensor:
    return values.to(getattr(torch, dtype)) if values.is_floating_point() else values


@dataclass
class StepInside:
    """A step with captures or interventions; `activations` has what was captured, by request."""

    work: Mapping[str, Sequence[RowWork]]
    hooks: Sequence[Hook]
    sites: Mapping[str, Site]
    upload: Upload
    activations: dict[str, list[Part]] = field(default_factory=dict)
    # (site, rows with the positions that are theirs, values of all of these)
    _captured: list[tuple[str, list[tuple[str, np.ndarray]], torch.Tensor]] = field(default_factory=list)
    _readers: dict[tuple[int, ...], Readers] = field(default_factory=dict)
    # See `llm.forward.Inside`.
    replayed: dict[nn.Module, Forward] = field(default_factory=dict)
    _is_suspended: bool = False
    # Which of the step's tokens the model computes at a time, where it does not compute all at once.
    _span: slice | None = None

    @property
    def modules(self) -> list[nn.Module]:
        return [hook.module for hook in self.hooks]

    def on_tokens(self, span: slice) -> None:
        self._span = span

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the model's modules stop at the sites."""
        before: list[tuple[dict[str, object], object]] = []
        entered: set[nn.Module] = set()
        try:
            for hook in self.hooks:
                own, inner = vars(hook.module), hook.module.forward
                if hook.module not in entered:
                    entered.add(hook.module)
                    inner = partial(self._compute, hook.module, inner)
                before.append((own, own.get("forward")))
                own["forward"] = partial(self._stop_at, hook, inner)
            yield
        finally:
            for own, forward in reversed(before):
                if forward is None:
                    del own["forward"]
                else:
                    own["forward"] = forward

    def _stop_at(self, hook: Hook, forward: Forward, *args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs) if self._is_suspended else hook.run(forward, self.visit, args, kwargs)

    def _compute(self, module: nn.Module, forward: Forward, *args: object, **kwargs: object) -> object:
        """The module's own forward, or what computes it in a recorded step."""
        return self.replayed.get(module, forward)(*args, **kwargs)

    def after(self, hidden: torch.Tensor, compute_logits: ComputeLogits) -> torch.Tensor:
        """The sites behind the forward pass; returns the hidden states [N, H], changed or not."""
        self._span = None
        found = self.visit(self.sites[FINAL], len(hidden), lambda tokens: hidden[tokens])
        if found is not None:
            hidden = hidden.index_copy(0, *found)
        for own in self.work.get(LOGITS, ()):
            batch_rows = np.full(len(own.positions), own.row)
            logits = compute_logits(hidden[self.upload(own.tokens)], batch_rows)
            self._captured.append((LOGITS, [own.read], logits.to(getattr(torch, own.dtype))))
        for name, rows, values in self._captured:
            array, first = values.cpu().numpy(), 0
            for request_id, own_positions in rows:
                part = name, own_positions, array[first : first + len(own_positions)]
                self.activations.setdefault(request_id, []).append(part)
                first += len(own_positions)
        return hidden

    def visit(
        self, site: Site, tokens: int, take: Take, chosen: Take | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`llm.inside.sites.Visit`."""
        span = self._span or slice(0, tokens)
        if span.stop - span.start != tokens:
            raise RuntimeError(f"{site.name} was computed for {tokens} tokens of {span.stop - span.start}")
        changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        work = self.work.get(site.name, ())
        if self._span is None:
            readers = self._readers_of(work)
            if readers.rows:
                # `take` copies: nobody writes into it.
                self._captured.append((site.name, readers.rows, _as(take(readers.tokens), readers.dtype)))
            work = readers.others
        for own in work:
            here = np.flatnonzero((own.tokens >= span.start) & (own.tokens < span.stop))
            if not len(here):
                continue
            indices = self.upload(own.tokens[here] - span.start)
            x = take(indices)
            if own.changes:
                ids = None if chosen is None else chosen(indices)
                x = self._change(site, own, here, x.float(), ids)
                changed.append((indices, x))
            kept = np.flatnonzero(own.captured[here])
            if len(kept):
                values = x if len(kept) == len(here) else x[self.upload(kept)]
                # What is put back is copied again.
                row = own.request_id, own.positions[here[kept]]
                self._captured.append((site.name, [row], _as(values, own.dtype)))
        if not changed:
            return None
        return torch.cat([indices for indices, _ in changed]), torch.cat([values for _, values in changed])

    def _readers_of(self, work: Sequence[RowWork]) -> Readers:
        """The rows that are only read, which are so together; sites where the same rows are read share them."""
        key = tuple(map(id, work))
        if key not in self._readers:
            plain = [own for own in work if not own.changes]
            same = [own for own in plain if own.dtype == plain[0].dtype]
            tokens = np.concatenate([np.empty(0, np.int64), *(own.tokens for own in same)])
            others = [own for own in work if not any(own is one for one in same)]
            dtype = same[0].dtype if same else "float32"
            self._readers[key] = Readers([own.read for own in same], self.upload(tokens), dtype, others)
        return self._readers[key]

    def _change(
        self, site: Site, own: RowWork, here: np.ndarray, x: torch.Tensor, chosen: torch.Tensor | None
    ) -> torch.Tensor:
        """`x` of the positions `here` of a row, after its interventions."""
        for mask, change in own.changes:
            at = np.flatnonzero(mask[here])
            if not len(at):
                continue
            indices = self.upload(at)
            places = [
                Place(
                    site.name,
                    int(own.positions[here[index]]),
                    own.num_prompt,
                    int(own.token_ids[own.positions[here[index]]]),
                    None if chosen is None else chosen[index],
                )
                for index in at.tolist()
            ]
            x = x.index_copy(0, indices, change(x[indices], places).float())
        return x
