"""What the engine knows of a runner: the calls of `Runner`, and the plain data that they exchange.

All of it can be pickled, so a runner can be another process. The data of a step are in `step.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from llm.base.types import JsonObject
from llm.config.engine import EngineConfig
from llm.engine.step import RunnerOutput, SchedulerOutput
from llm.explain import Explanation
from llm.forward import StateSpec
from llm.inside.names import Site
from llm.layers.parallel import TensorParallel
from llm.loading.sentence_transformers import SentenceModules
from llm.loading.source import ModelSource
from llm.models.interface import BuildOptions
from llm.quantization.on_load import ActivationStatistics
from llm.sampling.logits_processors.interface import LogitsProcessor

QWEN3_RERANKER = "qwen3_reranker"
QWEN3_VL_RERANKER = "qwen3_vl_reranker"
TOKENS = "ALL"  # the pooling type that keeps every token's vector
R = TypeVar("R")
# Dotted path of a layer -> its inputs and its output, float [N, columns] each.
Captured = dict[str, tuple[tuple[torch.Tensor, ...], torch.Tensor]]


class Runner(Protocol):
    """What engine and facade call; `llm.runner.model_runner.ModelRunner` implements it in this process.

    A runner owns the weights, the KV caches, the persistent batch, the sampler and the logits processors. No code
    outside a runner reads them.
    """

    # --- Life cycle. ---

    def load(self, plan: RunnerPlan) -> Loaded: ...
    def close(self) -> None: ...

    # --- Steps. ---

    def execute(self, plan: SchedulerOutput) -> RunnerOutput: ...
    def set_drafting(self, is_on: bool) -> None: ...
    def force_answer(self, answer: Sequence[int]) -> None: ...
    def set_processors(self, classes: Sequence[type[LogitsProcessor]]) -> None: ...
    def end_call(self) -> None: ...
    def reset(self) -> None: ...

    # --- Rows of its caches, between steps. ---

    def cache_parts(self) -> list[CachePart]: ...
    def read_cache(self, part: int, rows: Sequence[int]) -> torch.Tensor: ...
    def write_cache(self, part: int, rows: Sequence[int], values: torch.Tensor) -> None: ...

    # --- Queries about the model. ---

    def check_adapter(self, path: str) -> str: ...
    def describe(self) -> Explanation: ...
    def layer_reports(self) -> list[LayerReport]: ...
    def save(self, path: str | Path, format: str) -> Path: ...
    def cost(self) -> ModelCost: ...
    def sites(self) -> dict[str, Site]: ...
    def weight_names(self) -> list[str]: ...
    def read_weight(self, name: str) -> torch.Tensor: ...
    def replace_weights(self, source: ModelSource) -> None: ...
    def sleep(self, level: int) -> None: ...
    def wake_up(self) -> None: ...
    def apply_model(self, function: Callable[[torch.nn.Module], R]) -> R: ...
    def start_profile(self) -> None: ...
    def stop_profile(self) -> list[ProfileRow]: ...

    # --- Inputs and outputs of its layers. ---

    def start_observing(self) -> None: ...
    def stop_observing(self) -> dict[str, ActivationStatistics]: ...
    def start_counting_experts(self) -> None: ...
    def stop_counting_experts(self) -> dict[str, list[int]]: ...
    def start_capturing(self, names: Sequence[str], limit_bytes: int) -> list[str]: ...
    def take_captured(self) -> Captured: ...
    def stop_capturing(self) -> None: ...
    def layer_noise(self, captured: Captured) -> dict[str, tuple[float, float]]: ...


@dataclass(frozen=True)
class RunnerPlan:
    """Everything a runner needs to build and load its model; made by `llm.setup.plan`.

    Attributes:
        platform: name of the platform to compute on, as `select_platform` takes it.
        model_class: see `llm.models.interface.CausalLM`.
        architecture: what `model_class.read_config` returned.
        hf_config: config.json without its quantization config.
        kv_cache_specs: this rank's part of each state of the model's layers.
        has_weights: False: do not load weights from `source`, make random ones.
        store_as: the type that float matrices are converted to; None: the checkpoint's.
        is_quantized: the checkpoint is quantized.
        logits_processors: custom ones, in order.
        rank, tp_size: this runner's place in a tensor-parallel group.
        device_index: which of the platform's devices it uses.
        pooling: what a pooling model makes of hidden states; None: the model generates.
        merge_lora: the folder of the adapter that is added to the weights; None: there is none.
        shared_weights: the descriptor of a file that has the weights of several processes once; None: there is none.
        measures_cache: the number of blocks is found by a step at the largest batch, on a platform that can tell.
        draft: the plan of the model that drafts tokens; None: there is none.
        head: that of a head with a checkpoint of its own; None: there is none.
    """

    config: EngineConfig
    platform: str
    source: ModelSource
    model_class: Any
    architecture: Any
    hf_config: JsonObject
    kv_cache_specs: tuple[StateSpec, ...]
    has_weights: bool = True
    store_as: torch.dtype | None = None
    is_quantized: bool = False
    show_progress: bool = False
    logits_processors: tuple[type[LogitsProcessor], ...] = ()
    rank: int = 0
    tp_size: int = 1
    device_index: int = 0
    measures_cache: bool = False
    draft: RunnerPlan | None = None
    head: DraftHeadPlan | None = None
    pooling: PoolingPlan | None = None
    merge_lora: Path | None = None
    shared_weights: int | None = None

    def build_options(self, tp: TensorParallel) -> BuildOptions:
        model = self.config.model_config
        return BuildOptions(model.max_model_len, model.weight_dtype, self.config.quant_config, tp)


@dataclass(frozen=True)
class Loaded:
    """A runner's report after loading its model.

    Attributes:
        varies: why answers may depend on the batch although the kernels are batch-invariant; None: they do not.
        held: what `llm.config` says of how weights are held; "": nothing.
        seconds: time per phase, in order.
        offloaded: where the weights are, if a file has some of them; "": all are in memory.
        shared_bytes: of weights that other processes have in the same memory.
        num_blocks, blocks_reason, slot_bytes: of the KV cache, where they were measured, and the bytes of states that
            are not in blocks; None: they are as planned.
    """

    varies: str | None = None
    held: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    offloaded: str = ""
    shared_bytes: int = 0
    num_blocks: int | None = None
    blocks_reason: str = ""
    slot_bytes: int = 0

    def applied_to(self, config: EngineConfig) -> EngineConfig:
        """The config, completed with what is known only after the model is built."""
        reasons, cache = dict(config.reasons), config.cache_config
        if self.num_blocks is not None:
            per_block = (cache.kv_cache_memory_bytes - self.slot_bytes) // max(1, cache.num_blocks)
            size = self.slot_bytes + self.num_blocks * per_block
            reasons["num_blocks"] = reasons["kv_cache_memory_bytes"] = self.blocks_reason
            config = replace(
                config, cache_config=replace(cache, num_blocks=self.num_blocks, kv_cache_memory_bytes=size)
            )
        if self.held:
            reasons["quantization"] = f"{reasons['quantization']}; {self.held}"
        if self.offloaded:
            reasons["resident_weight_bytes"] = self.offloaded
        if self.varies is None:
            return replace(config, reasons=reasons)
        reasons["invariant"], speculation = self.varies, config.speculative_config
        if speculation is not None and speculation.is_default:
            reasons["speculative_config"], speculation = "default; answers depend on the batch", None
        return replace(config, invariant=False, reasons=reasons, speculative_config=speculation)


@dataclass(frozen=True)
class DraftHeadPlan:
    """A head that drafts from the model's hidden states; its own state is the last of the model's `kv_cache_specs`.

    Attributes:
        plan: from which it is built and loaded.
        taps: the layers of the model whose input it reads.
    """

    plan: RunnerPlan
    taps: tuple[int, ...]


@dataclass(frozen=True)
class PoolingPlan:
    """What a pooling model makes of hidden states; plain data.

    Attributes:
        task: "embed" or "classify".
        is_causal: tokens see those before them only, so that a prompt can be computed in chunks.
        modules: of an embedder.
        activation: of class logits: "softmax", "sigmoid" or "identity".
        labels: the classes' names.
        sizes: the Matryoshka sizes of a vector; (): not said.
        dimensions: channels of a vector that are kept unless a call says otherwise; None: all.
        hidden_size: of the model.
        by_token: the classifier is for every token, not for a pooled hidden state.
        default_task: of `LLM.encode`; "": every token's.
        recipe: how pairs are asked, `QWEN3_RERANKER` or `QWEN3_VL_RERANKER`; "": the tokenizer joins them.
    """

    task: str
    is_causal: bool
    modules: SentenceModules
    activation: str = "softmax"
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    dimensions: int | None = None
    hidden_size: int = 0
    recipe: str = ""
    by_token: bool = False
    default_task: str = ""

    @property
    def size(self) -> int:
        """Channels of a vector, or classes."""
        if self.task == "classify":
            return len(self.labels)
        return self.modules.dense[-1].outputs if self.modules.dense else self.hidden_size


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        scheme: "" when it is not quantized.
        bytes_before, bytes_after: size of its weight, scales included.
        weight_snr: signal-to-noise ratio of the quantized weight in decibels; None: the original is not known.
        output_snr: the same of its outputs on the texts, given the unquantized layer's inputs.
        kind: "linear", "embedding", or "moe" for all experts of a layer.
        is_compensated: calibration moved the weights so that outputs keep more; weight_snr is then lower than it was.
    """

    name: str
    scheme: str
    bytes_before: int
    bytes_after: int
    weight_snr: float | None = None
    output_snr: float | None = None
    kind: str = "linear"
    is_compensated: bool = False


def measured_weights(reports: Iterable[LayerReport]) -> list[tuple[str, float]]:
    """(name, signal-to-noise) of the layers whose weights tell how far answers are from the unquantized ones."""
    return [(item.name, item.weight_snr) for item in reports if item.weight_snr is not None and not item.is_compensated]


@dataclass(frozen=True)
class CachePart:
    """One tensor of a state, as rows.

    Attributes:
        group: whose blocks a row is of; `SLOTS`: a row is of a slot.
        shape: of a row.
        dtype: an integer type of the same width: rows are copied as bits.
    """

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Rates:
    """The machine's rates: bytes read per second, float32 operations per second (a multiply-add is two)."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Phase:
    """The cost of one phase (prefill or decode) of a workload."""

    operations: int = 0
    bytes_read: int = 0

    def __add__(self, other: Phase) -> Phase:
        return Phase(self.operations + other.operations, self.bytes_read + other.bytes_read)

    def floor_seconds(self, rates: Rates) -> float:
        return max(self.operations / rates.operations_per_s, self.bytes_read / rates.bytes_per_s)


@dataclass(frozen=True)
class AttentionCost:
    """One attention layer: operations per query-key pair, KV cache bytes per token, sliding window."""

    operations_per_pair: int
    bytes_per_token: int
    window: int | None


@dataclass(frozen=True)
class ModelCost:
    """The sizes of a model.

    Attributes:
        parameters: elements of all weights, a tied table once.
        linear_weights: elements of the linear layers' weights that each token meets.
        head_weights: elements of the LM head's weight.
        bytes_per_step: stored bytes that each step reads, whatever its batch size: all but an untied embedding and
            the experts that a token does not choose.
        chosen_bytes: those of them of the experts that a token chooses: others than the step before read.
        weight_bytes: stored bytes of all weights.
        attention: number of layers of each kind of attention.
        state_bytes: of one request's recurrent states in all layers.
        arithmetic: (kind of weight, activations) of the GEMMs that round their activations.
    """

    parameters: int
    linear_weights: int
    head_weights: int
    bytes_per_step: int
    weight_bytes: int
    attention: Counter[AttentionCost] = field(default_factory=Counter)
    state_bytes: int = 0
    arithmetic: frozenset[tuple[str, str]] = frozenset()
    chosen_bytes: int = 0

    def operations(self, spans: list[tuple[int, int]], sampled: int) -> int:
        """Operations for requests that compute positions start to end - 1 and sample `sampled` tokens in all."""
        tokens = sum(end - start for start, end in spans)
        scores = sum(
            count * layer.operations_per_pair * pairs(*span, layer.window)
            for layer, count in self.attention.items()
            for span in spans
        )
        return 2 * (self.linear_weights * tokens + self.head_weights * sampled) + scores

    def kv_bytes(self, spans: list[tuple[int, int]]) -> int:
        """KV cache bytes read when these positions are computed one by one."""
        return sum(
            count * layer.bytes_per_token * pairs(*span, layer.window)
            for layer, count in self.attention.items()
            for span in spans
        )


def pairs(start: int, end: int, window: int | None) -> int:
    """Query-key pairs of positions start to end - 1; position p attends to min(p + 1, window) keys."""
    bend = end if window is None else min(max(window, start), end)
    triangle = (bend * (bend + 1) - start * (start + 1)) // 2
    return triangle + (end - bend) * (window or 0)


@dataclass
class PhaseTime:
    """One table row in one phase. A step is prefill if any of its requests computes more than one token."""

    calls: int = 0
    seconds: float = 0.0
    work: Phase = field(default_factory=Phase)


@dataclass
class ProfileRow:
    """A table row. `kind`: "operation", "model" (between operations) or "engine" (scheduler, batches, outputs)."""

    name: str
    kind: str
    prefill: PhaseTime = field(default_factory=PhaseTime)
    decode: PhaseTime = field(default_factory=PhaseTime)

    @property
    def seconds(self) -> float:
        return self.prefill.seconds + self.decode.seconds
