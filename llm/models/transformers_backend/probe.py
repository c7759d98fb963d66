"""What a model of transformers needs of us, and whether the result is the same: tried without weights.

Owns `Layout`, the findings, and `probe`. The skeleton gets stand-ins for its weights (`stubs.py`). Three short requests
are computed twice: each by itself by transformers' own forward with its eager attention, and together, in chunks, as
the engine will. Where the two differ the model is refused with the reason, so that no architecture is trusted by its
name. Two ways are tried in turn: all rows in one flat batch over the paged KV cache, with our attention, and row by row
with transformers' attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch, StateSpec
from llm.models.transformers_backend.interface import AttentionCall, attention_layers, use_paged_attention
from llm.models.transformers_backend.invariance import Uses
from llm.models.transformers_backend.observe import Called, of_a_kind, use_ours
from llm.models.transformers_backend.passes import Passes
from llm.models.transformers_backend.recognise import Replacement, embedding_scale
from llm.models.transformers_backend.rows import CacheLayer, RowCache, RowWay, describe, new_cache
from llm.models.transformers_backend.skeleton import Skeleton, refusing, without_warnings
from llm.models.transformers_backend.stubs import CalledOnly, stub_weights
from llm.models.transformers_backend.theirs import Theirs
from llm.models.transformers_backend.trace import Misfit, Trace
from llm.models.transformers_backend.trial import Tensors, compare, make_requests, run_steps


@dataclass(frozen=True)
class Layout:
    """What was found out about a model of transformers.

    Attributes:
        replacements: module -> the operation of ours that has its values.
        tables: modules that compute something from positions alone.
        linear: paths of its linear layers.
        embedding_scale: a factor on the embedding; None: the module does more.
        varies: why its answers may depend on the batch; None: our kernels compute every sum.
        calls: its attention calls, in order; each has a state.
        rows: where it runs row by row instead, the layers of its cache.
        way: how a row is computed then.
    """

    replacements: Mapping[str, Replacement]
    tables: tuple[str, ...]
    linear: tuple[str, ...]
    embedding_scale: float | None
    varies: str | None
    calls: tuple[AttentionCall, ...] = ()
    rows: tuple[CacheLayer, ...] = ()
    way: RowWay = field(default_factory=RowWay)

    def states(self, dtype: torch.dtype) -> list[StateSpec]:
        """The specs of its states, in order; `dtype`: of keys and values."""
        return [*(call.spec(dtype) for call in self.calls), *(spec for row in self.rows for spec in row.specs(dtype))]


def probe(build: Callable[[], Skeleton], longest: int) -> Layout:
    """The layout of the model that `build` makes. Raises `UnsupportedModelError` with the reasons."""
    reasons = []
    for attempt in (_try_flat, _try_rows):
        skeleton = build()
        what = f"{type(skeleton.model).__name__} cannot be tried"
        try:
            with torch.no_grad(), without_warnings(), refusing(what):
                return attempt(_Trial(skeleton, longest))
        except UnsupportedModelError as error:
            reasons.append(str(error))
    raise UnsupportedModelError(f"in one batch, {reasons[0]}; row by row, {reasons[1]}")


class _Trial:
    """A skeleton with stand-ins for its weights, and transformers' own answers."""

    def __init__(self, skeleton: Skeleton, longest: int) -> None:
        self.skeleton, self.model = skeleton, skeleton.model
        self.linear = stub_weights(self.model)
        self.passes = Passes(self.model, skeleton.base)
        self.requests = make_requests()
        self.trace = Trace(self.model, longest)

    def whole(self) -> None:
        """One pass to the logits."""
        ids = self.requests[0]
        self.passes.whole(ids, torch.arange(len(ids)))

    def alone(self) -> Tensors:
        """Hidden states of each request by itself, at the positions that the model gives it."""
        with self.passes.without_positions():
            return [self.passes.hidden(ids, torch.arange(len(ids))) for ids in self.requests]

    def together(self, specs: Sequence[StateSpec], compute: Callable[[ForwardBatch], torch.Tensor]) -> Tensors:
        return run_steps(self.requests, specs, compute)

    def use_ours(self, called: Called) -> Uses:
        """Put our operations into the skeleton; returns a recorder of the others."""
        embedding = self.skeleton.embedding
        if self.scale() is not None:  # else it stays transformers'
            name = next(name for name, module in self.model.named_modules() if module is embedding)
            self.model.set_submodule(name, CalledOnly(embedding))
        return use_ours(self.model, self.linear, called)

    def scale(self) -> float | None:
        return embedding_scale(self.skeleton.embedding)  # type: ignore[arg-type]


def _try_flat(trial: _Trial) -> Layout:
    model, passes, trace = trial.model, trial.passes, trial.trace
    with trace.recording(), Called(model) as called:
        trial.whole()
    if not trace.calls:
        raise Misfit(f"{type(model).__name__} does not use transformers' attention interface")
    alone = trial.alone()
    uses = trial.use_ours(called)
    layers = attention_layers(model, trace.calls)
    paged = use_paged_attention(model, layers)

    def compute(batch: ForwardBatch) -> torch.Tensor:
        paged.start(batch)
        with uses.watching(layers):
            hidden = passes.hidden(batch.input_ids, batch.positions)
            passes.logits(hidden)
        return hidden

    specs = [call.spec(torch.float32) for call in trace.calls]
    compare(alone, trial.together(specs, compute), type(model).__name__)
    return _layout(trial, called, uses.reason(), calls=tuple(trace.calls))


def _try_rows(trial: _Trial) -> Layout:
    model, passes = trial.model, trial.passes
    with Called(model) as called:
        trial.whole()
    alone = trial.alone()
    trial.use_ours(called)
    cache = new_cache(model.config)
    passes.hidden(trial.requests[0], torch.arange(len(trial.requests[0])), cache=cache)
    layers = describe(cache)
    specs = [spec for layer in layers for spec in layer.specs(torch.float32)]
    if not specs:
        raise Misfit(f"{type(model).__name__} keeps nothing in transformers' cache")
    reasons = []
    for way in (RowWay(), RowWay(names_positions=False), RowWay(one_by_one=True), RowWay(False, True)):
        rows = RowCache(layers, model.config, way)
        try:
            with refusing("its cache cannot be continued"):
                found = trial.together(specs, lambda batch, rows=rows: rows.hidden(passes, batch))  # type: ignore[misc]
                compare(alone, found, type(model).__name__)
        except UnsupportedModelError as error:
            reasons.append(error)
            continue
        why = "transformers' code computes attention and states, row by row: rounding depends on the chunks of a prompt"
        return _layout(trial, called, why, rows=layers, way=way)
    raise reasons[0]


def _layout(trial: _Trial, called: Called, varies: str | None, **more: Theirs) -> Layout:
    used = of_a_kind(trial.linear, called.names)
    return Layout(called.recognised(), called.tables, used, trial.scale(), varies, **more)
