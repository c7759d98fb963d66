"""What a model of transformers needs of us, and whether the result is the same: tried without weights.

The skeleton gets stand-ins for its weights: matrices become cheap functions of each token by itself, vectors and small
tensors random values out of one shared pool, so a skeleton of any size takes little memory. Three short requests are
computed twice: each by itself by transformers' own forward with its eager attention, and together, in chunks, as the
engine will. Where the two differ the model is refused with the reason, so that no architecture is trusted by its name.
Two ways are tried in turn: all rows in one flat batch over the paged KV cache, with our attention, and row by row with
transformers' attention. Meanwhile `Called` notes which modules are called, and `Uses` whether rounding may depend on
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.forward import AttentionMetadata, ForwardBatch, LatentCacheSpec, RecurrentMetadata, RecurrentSpec, StateSpec
from llm.kernels.reference.backend import REFERENCE
from llm.models.transformers_backend.attention import (
    AttentionCall,
    Misfit,
    Trace,
    attention_layers,
    use_paged_attention,
)
from llm.models.transformers_backend.recognise import (
    PositionTable,
    Replacement,
    embedding_scale,
    is_conv1d,
    is_linear,
    is_table,
    recognise,
    replace_module,
)
from llm.models.transformers_backend.rows import CacheLayer, RowCache, RowWay, describe, new_cache
from llm.models.transformers_backend.skeleton import Passes, Skeleton, Theirs, refusing, without_warnings


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

    def use_ours(self, called: Called) -> Uses:
        """Put our operations into the skeleton; returns a recorder of the others."""
        model, embedding = self.model, self.skeleton.embedding
        if self.scale() is not None:  # else it stays transformers'
            name = next(name for name, module in model.named_modules() if module is embedding)
            model.set_submodule(name, CalledOnly(embedding))
        replacements = called.recognised()
        forget_weights(model, called.names.intersection(self.linear))
        for name, replacement in replacements.items():
            replace_module(model, name, replacement)
        for name in called.tables:
            model.set_submodule(name, PositionTable(model.get_submodule(name), 16))
        return Uses(model, self.linear, replacements, called.tables)

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
    compare(alone, _run_steps(trial.requests, specs, compute), type(model).__name__)
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
                compute = partial(rows.hidden, passes)
                found = _run_steps(trial.requests, specs, compute)
                compare(alone, found, type(model).__name__)
        except UnsupportedModelError as error:
            reasons.append(error)
            continue
        why = "transformers' code computes attention and states, row by row: rounding depends on the chunks of a prompt"
        return _layout(trial, called, why, rows=layers, way=way)
    raise reasons[0]


def _layout(trial: _Trial, called: Called, varies: str | None, **more: Theirs) -> Layout:
    used = _of_a_kind(trial.linear, called.names)
    return Layout(called.recognised(), called.tables, used, trial.scale(), varies, **more)


# Tokens of each request in each step.
_STEPS = ((7, 3, 0), (0, 1, 2), (5, 2, 1))
_BLOCK = 16
_TOLERANCE = 1e-3
Tensors = list[torch.Tensor]


def make_requests() -> Tensors:
    """Token ids int64 [N] of each request; the first few ids mean padding and the like, and some models skip them."""
    generator = torch.Generator().manual_seed(3)
    counts = [sum(step[row] for step in _STEPS) for row in range(len(_STEPS[0]))]
    return [torch.randint(5, 64, (count,), generator=generator) for count in counts]


def _run_steps(
    requests: Tensors, specs: Sequence[StateSpec], compute: Callable[[ForwardBatch], torch.Tensor]
) -> Tensors:
    """The requests' hidden states [N, H], computed together in steps; `compute` gets each step's batch."""
    states = [_state(spec, len(requests) + 1) for spec in specs]
    done = [0] * len(requests)
    parts: list[Tensors] = [[] for _ in requests]
    for step in _STEPS:
        rows = [row for row, length in enumerate(step) if length]
        hidden = compute(_batch(requests, done, step, specs, states))
        for row, part in zip(rows, hidden.split([step[row] for row in rows]), strict=True):
            parts[row].append(part)
            done[row] += len(part)
    return [torch.cat(part) for part in parts]


def _state(spec: StateSpec, blocks: int) -> tuple[torch.Tensor, ...]:
    if isinstance(spec, RecurrentSpec):
        pairs = zip(spec.shapes, spec.dtypes, strict=True)
        return tuple(torch.zeros(blocks, *shape, dtype=dtype) for shape, dtype in pairs)
    if isinstance(spec, LatentCacheSpec):
        return (torch.zeros(spec.shape(blocks, _BLOCK)),)
    return tuple(torch.zeros(shape) for shape in REFERENCE.ops.kv_cache_shapes(spec, blocks, _BLOCK))


def _batch(
    requests: Tensors,
    done: Sequence[int],
    step: Sequence[int],
    specs: Sequence[StateSpec],
    states: list[tuple[torch.Tensor, ...]],
) -> ForwardBatch:
    """The next `step[row]` tokens of each request, of which row r has block and slot r + 1."""
    rows = [row for row, length in enumerate(step) if length]
    ranges = [torch.arange(done[row], done[row] + step[row]) for row in rows]
    lengths, ends = [step[row] for row in rows], [done[row] + step[row] for row in rows]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor(ends, dtype=torch.int32)
    paged = AttentionMetadata(
        torch.tensor([[row + 1] for row in rows], dtype=torch.int32),
        torch.cat([_BLOCK * (row + 1) + positions for row, positions in zip(rows, ranges, strict=True)]),
        starts,
        seq_lens,
        _BLOCK,
        lengths,
        ends,
    )
    slots = RecurrentMetadata(torch.tensor([row + 1 for row in rows]), starts, seq_lens, lengths, ends)
    # A kernel's plan is of one window: each state has its own metadata.
    metadata = [slots if isinstance(spec, RecurrentSpec) else replace(paged) for spec in specs]
    ids = torch.cat([requests[row][positions] for row, positions in zip(rows, ranges, strict=True)])
    return ForwardBatch(ids, torch.cat(ranges), metadata, states, torch.empty(0, dtype=torch.int64))


def compare(alone: Sequence[torch.Tensor], together: Sequence[torch.Tensor], name: str) -> None:
    for expected, found in zip(alone, together, strict=True):
        size, worst = expected.abs().max().item(), (expected - found).abs().max().item()
        if not worst <= _TOLERANCE * size:  # NaN is no equality
            raise Misfit(
                f"{name} does not compute each token from its own row: in a batch of several requests its hidden "
                f"states differ from transformers' own by {worst:.1e} of {size:.1e}"
            )


class Called:
    """Which modules a forward pass calls, and which of them with one tensor alone."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names: set[str] = set()
        self._tables: dict[str, None] = {}
        self._recognised: dict[str, Replacement] | None = None
        self._widths: dict[str, int] = {}
        self._others: set[str] = set()
        self._handles: list[Theirs] = []

    def __enter__(self) -> Called:
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


def _of_a_kind(linear: Sequence[str], called: set[str]) -> tuple[str, ...]:
    """The linear layers that are called, and those with the same path but for numbers: experts without a token."""

    def kind(name: str) -> str:
        return ".".join("*" if part.isdecimal() else part for part in name.split("."))

    kinds = {kind(name) for name in called}
    return tuple(name for name in linear if kind(name) in kinds)


_FIXED = frozenset(
    """
    view _unsafe_view reshape transpose permute unsqueeze squeeze expand clone copy_ _to_copy select slice split
    split_with_sizes index index_select gather embedding cat stack alias detach lift_fresh unbind t arange full zeros
    ones empty zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full scalar_tensor fill_
    add sub mul neg div rsub abs clamp clamp_min clamp_max maximum minimum where masked_fill floor round relu sqrt
    eq ne lt le gt ge bitwise_not bitwise_and bitwise_or logical_not logical_and logical_or constant_pad_nd repeat
    chunk flip roll tril triu _local_scalar_dense item is_nonzero remainder fmod sign all any view_as_real
    view_as_complex narrow contiguous add_ mul_ sub_ div_ _reshape_alias as_strided diff new_empty_strided unfold
    empty_strided
    """.split()
)


class Uses:
    """Which other operations a forward pass uses.

    Args:
        model: runs on stand-ins for its weights.
        own: paths of the modules that our kernels compute.
    """

    def __init__(self, model: nn.Module, *own: Iterable[str]) -> None:
        self._own = [model.get_submodule(name) for names in own for name in names]
        self._inside = 0
        self._found: dict[str, None] = {}

    def reason(self) -> str | None:
        """Why answers may depend on the batch; None: they do not."""
        if not self._found:
            return None
        return f"transformers' code calls PyTorch's {', '.join(self._found)}, whose rounding may depend on the batch"

    @contextmanager
    def watching(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Record what is computed outside of our modules and of the attention `layers`."""
        handles = []
        for module in {id(module): module for module in (*self._own, *layers)}.values():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave))
        try:
            with _Watch(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, *_: object) -> None:
        self._inside += 1

    def _leave(self, *_: object) -> None:
        self._inside -= 1

    def note(self, func: Theirs, args: tuple[Theirs, ...]) -> None:
        name = func.overloadpacket.__name__
        if self._inside or name in _FIXED or (name == "pow" and args[1] in (2, 2.0)) or _is_outer(name, args):
            return
        self._found[name] = None


def _is_outer(name: str, args: tuple[Theirs, ...]) -> bool:
    """A product of a column with a row: each result is one product."""
    return name in ("mm", "bmm") and args[0].shape[-1] == 1


class _Watch(TorchDispatchMode):
    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self._uses = uses

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in `llm.kernels.cpu.program`: True would make torch import its compiler.
        return False

    def __torch_dispatch__(self, func: Theirs, types: Theirs, args: Theirs = (), kwargs: Theirs = None) -> Theirs:
        self._uses.note(func, args)
        return func(*args, **(kwargs or {}))


_POOL = 1 << 22
_EMBEDDED = 64


def stub_weights(model: nn.Module) -> list[str]:
    """Give `model` values; returns the paths of its linear layers."""
    generator = torch.Generator().manual_seed(0)
    pool = 0.1 * torch.randn(_POOL, generator=generator)
    linear, values = [], _Values(pool)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            _stub_embedding(module, values)
            continue
        if is_linear(module):
            linear.append(name)
            _patch(module, _linear_stub(module, generator))
        elif any(parameter.numel() > _POOL for parameter in module.parameters(recurse=False)):
            _patch(module, _keeps_shape)
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                is_small = parameter.numel() <= _POOL
                module._parameters[key] = values.of(parameter) if is_small else _unreadable(parameter)
    return linear


def forget_weights(model: nn.Module, names: Iterable[str]) -> None:
    """Take the values of these linear layers away: a model that reads a weight without calling the layer fails now.

    Loaded, the weight of a layer that is called is packed for our kernels.
    """
    for name in names:
        module: Theirs = model.get_submodule(name)
        module.weight = _unreadable(module.weight)


def _unreadable(parameter: nn.Parameter) -> nn.Parameter:
    """NaN in the memory of one number: a result that it enters is equal to none. A meta tensor would not do: a product
    of one with a CPU tensor raises nothing."""
    value = torch.full((), torch.nan) if parameter.is_floating_point() else torch.zeros((), dtype=parameter.dtype)
    return nn.Parameter(value.expand(parameter.shape), requires_grad=False)


class CalledOnly(Patchable):
    """In the place of an embedding: a model that reads rows of its weight without calling it fails now."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.called = embedding
        self.weight = torch.zeros(())  # it has a type and a device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.called(ids)


class _Values:
    """The same values for the same parameter: some are shared by modules."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        # The key's parameter is kept: its id is not given to another one.
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._next = 0

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Around 1 for vectors, which are mostly norms', and of the size of a trained weight for the others."""
        if id(parameter) not in self._made:
            count = parameter.numel()
            self._next = (self._next + 976) % (_POOL - count + 1)
            values = self._pool[self._next : self._next + count].view(parameter.shape)
            if not parameter.is_floating_point():
                values = torch.zeros(parameter.shape, dtype=parameter.dtype)
            elif parameter.dim() == 1:
                values = 1 + values
            made = nn.Parameter(values.to(parameter.dtype), requires_grad=False)
            self._made[id(parameter)] = parameter, made
        return self._made[id(parameter)][1]


def _patch(module: nn.Module, function: Callable[..., Theirs]) -> None:
    module.forward = function


def _linear_stub(module: nn.Module, generator: torch.Generator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Each output channel is one input channel times a factor."""
    weight: Theirs = module.weight
    outputs, inputs = reversed(weight.shape) if is_conv1d(module) else weight.shape
    if outputs > _POOL or inputs > _POOL:
        raise UnsupportedModelError(f"a matrix of {outputs} x {inputs} is no model's.")
    channels = torch.randint(max(1, inputs), (outputs,), generator=generator)
    factors = torch.randn(outputs, generator=generator)
    return lambda x: x[..., channels] * factors


def _stub_embedding(module: nn.Embedding, values: _Values) -> None:
    """A table of a few rows, each for many ids."""
    rows = min(_EMBEDDED, module.num_embeddings)
    module.weight = values.of(nn.Parameter(torch.empty(rows, module.embedding_dim, device="meta")))

    def within(_: nn.Module, arguments: tuple[Theirs, ...]) -> tuple[Theirs, ...]:
        return tuple(item % rows if isinstance(item, torch.Tensor) else item for item in arguments)

    module.register_forward_pre_hook(within)


def _keeps_shape(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Of modules with large tensors of their own, which are experts: their output is shaped like their input."""
    return 0.5 * x
