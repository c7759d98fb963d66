"""The time of each operation of a live runner.

While a profile runs, the operations of the runner's model are patched; afterwards the patches are
removed. Patched are each layer's `quant_method.apply`, `CustomOp`s, attention backends and all other modules without
children. Time that a model spends elsewhere is "between operations". A patch costs about a microsecond per call. On a
device that computes asynchronously the times would be those of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from llm.base.custom_op import CustomOp
from llm.engine.boundary import Phase, ProfileRow, pairs
from llm.engine.step import RunnerOutput, SchedulerOutput
from llm.layers.attention import Attention
from llm.layers.latent_attention import LatentAttention
from llm.layers.moe import FusedMoE
from llm.runner.batch import InputBatch, StepInput
from llm.runner.inspection import attention_cost, matrix_sizes, stored_tensors

OPERATION, MODEL, ENGINE = "operation", "model", "engine"
PREFILL, DECODE = "prefill", "decode"

_ABSENT = object()

# The cost of a call, from its positional arguments.
Work = Callable[[tuple[object, ...]], Phase]
P = ParamSpec("P")
R = TypeVar("R")


class Recorder:
    """Exclusive time by table row: a stack holds, for each call in progress, the time of the calls inside it.

    Args:
        synchronize: waits for what was queued on the device.

    Attributes:
        spans: the positions (start, end) that each request computes in the current step.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self.rows: dict[str, ProfileRow] = {}
        self.phase = PREFILL
        self.spans: list[tuple[int, int]] = []
        self._attention: dict[int | None, tuple[int, int]] = {}
        self._inside = [0.0]

    def wrap(self, function: Callable[P, R], name: str, kind: str, work: Work | None = None) -> Callable[P, R]:
        row = self.rows.setdefault(name, ProfileRow(name, kind))
        inside = self._inside

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            inside.append(0.0)
            started = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._synchronize()
                seconds = perf_counter() - started
                time = row.prefill if self.phase == PREFILL else row.decode
                time.calls += 1
                time.seconds += seconds - inside.pop()
                inside[-1] += seconds
                if work is not None:
                    time.work += work(args)

        return timed

    def begin_step(self, plan: SchedulerOutput) -> None:
        """A step is prefill if any of its requests computes more than one token besides drafts."""
        drafts, counts = plan.draft_token_ids, plan.num_scheduled_tokens
        known = (count - len(drafts.get(request_id, ())) for request_id, count in counts.items())
        self.phase = PREFILL if any(count > 1 for count in known) else DECODE

    def note_spans(self, spans: list[tuple[int, int]]) -> None:
        self.spans = spans
        self._attention.clear()

    def seen(self, window: int | None) -> tuple[int, int]:
        """(query-key pairs, keys that any query attends to) of the current step."""
        if window not in self._attention:
            every = sum(pairs(start, end, window) for start, end in self.spans)
            keys = sum(end if window is None else min(end, end - start + window - 1) for start, end in self.spans)
            self._attention[window] = (every, keys)
        return self._attention[window]


class RunnerProfile:
    """Patches a model runner, until `stop`.

    Args:
        runner: has `platform`, `model`, `batch`, `sampler`, `recorded` and `execute`.
        kv_cache_dtype: of its caches.
    """

    def __init__(self, runner: Any, kv_cache_dtype: torch.dtype) -> None:
        self._recorder = recorder = Recorder(runner.platform.synchronize)
        self._stack = ExitStack()
        patch = self._stack.enter_context
        # Replayed steps call no operations: they are off.
        patch(replaced(runner, "recorded", None))
        patch(replaced(runner.batch, "build", _noting_spans(runner.batch, recorder)))
        for target, attribute, name, work in _operations(runner.model, kv_cache_dtype, recorder):
            patch(replaced(target, attribute, recorder.wrap(getattr(target, attribute), name, OPERATION, work)))
        patch(_matrices(runner.model, recorder))
        for target, attribute, name, kind in (
            (runner.model, "forward", "between operations", MODEL),
            (runner.model, "compute_logits", "between operations", MODEL),
            (runner, "sampler", "sampler", OPERATION),
            (runner.batch, "update", "batch: rows in and out", ENGINE),
            (runner.batch, "build", "batch: input of a step", ENGINE),
            (runner.batch, "append", "batch: sampled tokens", ENGINE),
            (runner.batch, "settle", "batch: counts of a step", ENGINE),
        ):
            patch(replaced(target, attribute, recorder.wrap(getattr(target, attribute), name, kind)))
        patch(replaced(runner, "execute", _beginning_steps(runner.execute, recorder)))

    def stop(self) -> list[ProfileRow]:
        """Remove the patches; the table rows. What is left of the time of `execute` is its own."""
        self._stack.close()
        return [row for row in self._recorder.rows.values() if row.prefill.calls or row.decode.calls]


def _noting_spans(batch: InputBatch, recorder: Recorder) -> Callable[[SchedulerOutput], StepInput]:
    build = batch.build

    def noted(plan: SchedulerOutput) -> StepInput:
        starts = {request_id: int(batch.num_computed[batch.index[request_id]]) for request_id in batch.index}
        counts = plan.num_scheduled_tokens
        recorder.note_spans([(starts[request_id], starts[request_id] + count) for request_id, count in counts.items()])
        return build(plan)

    return noted


def _beginning_steps(
    execute: Callable[[SchedulerOutput], RunnerOutput], recorder: Recorder
) -> Callable[[SchedulerOutput], RunnerOutput]:
    def begun(plan: SchedulerOutput) -> RunnerOutput:
        recorder.begin_step(plan)
        return execute(plan)

    return begun


def _operations(
    model: nn.Module, kv_cache_dtype: torch.dtype, recorder: Recorder
) -> Iterator[tuple[object, str, str, Work | None]]:
    """(target, attribute, table row, work) of every operation except GEMMs with weights, see `_matrices`."""
    for module in model.modules():
        if isinstance(module, Attention):
            work = _attention_work(module, kv_cache_dtype, recorder)
            yield module.backend, "attend", "attention", work
            yield module.backend, "write", "KV cache", None
        elif isinstance(module, LatentAttention):
            yield module, "forward", "attention", _attention_work(module, kv_cache_dtype, recorder)
        elif isinstance(module, CustomOp) and not module.is_layer:
            yield module, "forward", module.name, None
        elif getattr(module, "quant_kind", "") == "embedding":
            yield module, "forward", "embedding", None
        elif not hasattr(module, "quant_kind") and not any(True for _ in module.children()):
            yield module, "forward", type(module).__name__, None


@contextmanager
def _matrices(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Patch the `apply` of every quant method but those of single experts: their layer computes all of them."""
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    inside = {id(part) for layer in layers for expert in layer.experts for part in expert.modules()}
    modules = [module for module in model.modules() if id(module) not in inside]
    methods = {id(method): method for module in modules if (method := getattr(module, "quant_method", None))}
    with ExitStack() as stack:
        for method in methods.values():
            stack.enter_context(replaced(method, "apply", _by_layer(method.apply, recorder)))
        yield


def _by_layer(apply: Callable[..., torch.Tensor], recorder: Recorder) -> Callable[..., torch.Tensor]:
    """Layers may share a method, so the table row depends on its first argument, the layer."""
    timed: dict[int, Callable[..., torch.Tensor]] = {}

    def called(layer: nn.Module, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if id(layer) not in timed:
            timed[id(layer)] = recorder.wrap(apply, _matrix_name(layer), OPERATION, _matrix_work(layer))
        return timed[id(layer)](layer, x, *args, **kwargs)

    return called


def _matrix_name(layer: nn.Module) -> str:
    """The table row of a layer, shared by layers with the same role and shape."""
    kind, prefix = getattr(layer, "quant_kind", ""), getattr(layer, "prefix", "")
    role = "lm head" if kind == "embedding" else f"{kind} {prefix.rpartition('.')[2]}"
    sizes = matrix_sizes(layer)
    return f"{role} {sizes[0]} -> {sizes[1]}" if sizes else role


def _matrix_work(layer: nn.Module) -> Work | None:
    if isinstance(layer, FusedMoE):
        return _experts_work(layer)
    sizes = matrix_sizes(layer)
    if sizes is None:
        return None
    per_row, stored = 2 * sizes[0] * sizes[1], sum(tensor.nbytes for tensor in stored_tensors(layer))

    def work(args: tuple[object, ...]) -> Phase:
        x = args[1]
        rows = x.shape[:-1].numel() if isinstance(x, torch.Tensor) else 0
        return Phase(per_row * rows, stored)

    return work


def _experts_work(layer: FusedMoE) -> Work:
    """Of the experts that a token chooses; several tokens may share some, so what is read is an upper bound."""
    per_row = 2 * 3 * layer.hidden_size * layer.intermediate_size_per_partition
    stored = sum(tensor.nbytes for part in layer.modules() for tensor in stored_tensors(part)) // layer.num_experts

    def work(args: tuple[object, ...]) -> Phase:
        x = args[1]
        chosen = layer.top_k * (x.shape[:-1].numel() if isinstance(x, torch.Tensor) else 0)
        return Phase(per_row * chosen, stored * min(chosen, layer.num_experts))

    return work


def _attention_work(layer: Attention | LatentAttention, kv_cache_dtype: torch.dtype, recorder: Recorder) -> Work:
    cost = attention_cost(layer, kv_cache_dtype)

    def work(args: tuple[object, ...]) -> Phase:
        every, keys = recorder.seen(cost.window)
        return Phase(cost.operations_per_pair * every, cost.bytes_per_token * keys)

    return work


@contextmanager
def replaced(target: object, attribute: str, value: object) -> Iterator[None]:
    """Patch an attribute of one instance; at the end restore it, or delete it if the instance had none."""
    before = vars(target).get(attribute, _ABSENT)
    setattr(target, attribute, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(target, attribute)
        else:
            setattr(target, attribute, before)
