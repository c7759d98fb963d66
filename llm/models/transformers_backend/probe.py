"""What a model of transformers needs of us, and whether the result is the same: tried without weights.

Owns `Layout`, the findings, and `probe`. The skeleton gets stand-ins for its weights (`stubs.py`). Three short requests
are computed twice: each by itself by transformers' own forward with its eager attention, and together, in chunks, in
one flat batch with our operations over a paged KV cache, as the engine will. Where the two differ the model is refused
with the reason, so that no architecture is trusted by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from llm.forward import AttentionMetadata, ForwardBatch
from llm.kernels.reference.backend import REFERENCE
from llm.models.transformers_backend.interface import AttentionCall, choose_attention, use_paged_attention
from llm.models.transformers_backend.invariance import Uses
from llm.models.transformers_backend.passes import Passes
from llm.models.transformers_backend.recognise import Replacement, embedding_scale, recognise
from llm.models.transformers_backend.skeleton import Skeleton, refusing, without_warnings
from llm.models.transformers_backend.stubs import stub_weights
from llm.models.transformers_backend.tables import PositionTable, is_table
from llm.models.transformers_backend.theirs import Theirs
from llm.models.transformers_backend.trace import Misfit, Trace

# Tokens of each request, and how many of each are in each step.
_STEPS = ((7, 3, 0), (0, 1, 2), (5, 2, 1))
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Layout:
    """What was found out about a model of transformers.

    Attributes:
        calls: its attention calls, in order; each has a state.
        replacements: module -> the operation of ours that has its values.
        tables: modules that compute something from positions alone.
        linear: paths of its linear layers.
        embedding_scale: a factor on the embedding; None: the module does more.
        varies: why its answers may depend on the batch; None: our kernels compute every sum.
    """

    calls: tuple[AttentionCall, ...]
    replacements: Mapping[str, Replacement]
    tables: tuple[str, ...]
    linear: tuple[str, ...]
    embedding_scale: float | None
    varies: str | None


def probe(skeleton: Skeleton, longest: int) -> Layout:
    """The layout of a fresh skeleton, which is of no use afterwards. Raises `Misfit` with the reason."""
    model = skeleton.model
    with torch.no_grad(), without_warnings(), refusing(f"{type(model).__name__} cannot be tried"):
        linear = stub_weights(model)
        passes = Passes(model, skeleton.base)
        trace = Trace(model, longest)
        generator = torch.Generator().manual_seed(3)
        counts = [sum(step[row] for step in _STEPS) for row in range(len(_STEPS[0]))]
        requests = [torch.randint(0, 64, (count,), generator=generator) for count in counts]
        with trace.recording(), _Calls(model) as called:
            model(input_ids=requests[0][None])
        if not trace.calls:
            raise Misfit(f"{type(model).__name__} does not use transformers' attention interface")
        alone = [passes.hidden(ids, torch.arange(len(ids))) for ids in requests]
        uses = _use_ours(model, linear, called)
        together = _flat(model, passes, trace.calls, requests, uses)
        _compare(alone, together, type(model).__name__)
        scale = embedding_scale(skeleton.embedding)  # type: ignore[arg-type]
    used = _of_a_kind(linear, called.names)
    return Layout(tuple(trace.calls), called.recognised(), called.tables, used, scale, uses.reason())


class _Calls:
    """Which modules a forward pass calls, and which of them with one tensor alone."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names: set[str] = set()
        self._tables: dict[str, None] = {}
        self._recognised: dict[str, Replacement] | None = None
        self._widths: dict[str, int] = {}
        self._others: set[str] = set()
        self._handles: list[Theirs] = []

    def __enter__(self) -> _Calls:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._noting(name), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _noting(self, name: str) -> Theirs:
        def note(module: nn.Module, args: tuple[Theirs, ...], kwargs: dict[str, Theirs], output: object) -> None:
            self.names.add(name)
            if is_table(module, args, kwargs, output):
                self._tables[name] = None
            if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                self._widths[name] = args[0].shape[-1]
            else:
                self._others.add(name)

        return note

    @property
    def tables(self) -> tuple[str, ...]:
        """Modules that compute something from positions alone."""
        return tuple(self._tables)

    def recognised(self) -> dict[str, Replacement]:
        """Module -> our operation with its values; of the modules as they were at the first call."""
        if self._recognised is None:
            self._recognised = self._recognise()
        return self._recognised

    def _recognise(self) -> dict[str, Replacement]:
        known: dict[int, Replacement | None] = {}
        found = {}
        for name, width in self._widths.items():
            module = self._model.get_submodule(name)
            if name in self._others or "forward" in vars(module):
                continue
            if id(module) not in known:
                known[id(module)] = recognise(module, width)
            replacement = known[id(module)]
            if replacement is not None:
                found[name] = replacement
        return found


def replace_module(model: nn.Module, name: str, replacement: Replacement) -> nn.Module:
    """Put our operation in the place of a module of the model, with its parameters."""
    kept, own = model.get_submodule(name), replacement.build()
    for key, parameter in kept.named_parameters(recurse=False):
        setattr(own, key, parameter)
    model.set_submodule(name, own)
    return own


def _use_ours(model: nn.Module, linear: Sequence[str], called: _Calls) -> Uses:
    """Put our operations into the skeleton; returns a recorder of the others."""
    replacements = called.recognised()
    for name, replacement in replacements.items():
        replace_module(model, name, replacement)
    for name in called.tables:
        model.set_submodule(name, PositionTable(model.get_submodule(name), 16))
    return Uses(model, linear, replacements, called.tables)


def _of_a_kind(linear: Sequence[str], called: set[str]) -> tuple[str, ...]:
    """The linear layers that are called, and those with the same path but for numbers: experts without a token."""

    def kind(name: str) -> str:
        return ".".join("*" if part.isdecimal() else part for part in name.split("."))

    kinds = {kind(name) for name in called}
    return tuple(name for name in linear if kind(name) in kinds)


def _flat(
    model: nn.Module, passes: Passes, calls: Sequence[AttentionCall], requests: Sequence[torch.Tensor], uses: Uses
) -> list[torch.Tensor]:
    """The requests' hidden states [N, H], computed together in steps, as the engine does."""
    layers = [
        call.layer(index, getattr(model.get_submodule(call.module), call.sinks) if call.sinks else None)
        for index, call in enumerate(calls)
    ]
    states = [_state(call, len(requests)) for call in calls]
    paged = use_paged_attention(model, layers)
    done = [0] * len(requests)
    parts: list[list[torch.Tensor]] = [[] for _ in requests]
    for step in _STEPS:
        batch, rows = _batch(requests, done, step, len(calls), states)
        paged.start(batch)
        with uses.watching(layers):
            hidden = passes.hidden(batch.input_ids, batch.positions)
            passes.logits(hidden)
        for row, part in zip(rows, hidden.split([step[row] for row in rows]), strict=True):
            parts[row].append(part)
            done[row] += len(part)
    choose_attention(model, "eager")
    return [torch.cat(part) for part in parts]


def _state(call: AttentionCall, rows: int) -> tuple[torch.Tensor, ...]:
    shapes = REFERENCE.op("kv_cache_shapes")(call.spec(torch.float32), rows + 1, 16)
    return tuple(torch.zeros(shape) for shape in shapes)


def _batch(
    requests: Sequence[torch.Tensor],
    done: Sequence[int],
    step: Sequence[int],
    count: int,
    states: list[tuple[torch.Tensor, ...]],
) -> tuple[ForwardBatch, list[int]]:
    """The next `step[row]` tokens of each request, of which row r has block r + 1; and the rows with any."""
    rows = [row for row, length in enumerate(step) if length]
    ranges = [torch.arange(done[row], done[row] + step[row]) for row in rows]
    lengths, ends = [step[row] for row in rows], [done[row] + step[row] for row in rows]
    metadata = AttentionMetadata(
        torch.tensor([[row + 1] for row in rows], dtype=torch.int32),
        torch.cat([16 * (row + 1) + positions for row, positions in zip(rows, ranges, strict=True)]),
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        torch.tensor(ends, dtype=torch.int32),
        16,
        lengths,
        ends,
    )
    ids = torch.cat([requests[row][positions] for row, positions in zip(rows, ranges, strict=True)])
    none = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(ids, torch.cat(ranges), [replace(metadata) for _ in range(count)], states, none), rows


def _compare(alone: Sequence[torch.Tensor], together: Sequence[torch.Tensor], name: str) -> None:
    for expected, found in zip(alone, together, strict=True):
        size, worst = expected.abs().max().item(), (expected - found).abs().max().item()
        if not worst <= _TOLERANCE * size:  # NaN is no equality
            raise Misfit(
                f"{name} does not compute each token from its own row: in a batch of several requests its hidden "
                f"states differ from transformers' own by {worst:.1e} of {size:.1e}"
            )
