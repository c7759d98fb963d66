"""The model runner: builds its model, and computes steps with it on its device.

It has the weights, the tensors of the caches, the persistent batch and the sampler. It gets a `SchedulerOutput` and
returns a `RunnerOutput`; both are plain data, so the runner can be a worker in another process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

from llm.base.construction import IN_MEMORY, PhaseTimes, WeightPlace, constructing_for
from llm.base.library_settings import library_defaults, serial_pytorch
from llm.base.watch import Watch
from llm.config.engine import CacheConfig, EngineConfig, SpeculativeConfig
from llm.engine.boundary import CachePart, Captured, LayerReport, Loaded, ModelCost, ProfileRow, RunnerPlan
from llm.engine.step import NO_SLOT, Adapter, NewRow, RunnerOutput, SchedulerOutput
from llm.errors import LLMError, OutOfMemoryError, ValidationError
from llm.explain import Explanation, explain_runner
from llm.forward import (
    SLOTS,
    ForwardBatch,
    KVCacheSpec,
    PagedSpec,
    RecurrentSpec,
    StateSpec,
    all_roll_back,
    group_states,
)
from llm.inside.names import Site
from llm.kernels.select import backend_for
from llm.layers.attention import attention_backend
from llm.layers.parallel import SINGLE, TensorParallel
from llm.loading.adapters.folder import AdapterFolder
from llm.loading.adapters.targets import MergedTensors
from llm.loading.checkpoint import Checkpoint
from llm.loading.gguf.source import GgufSource
from llm.loading.loader import load_dummy_weights, load_weights, weights_changed
from llm.loading.saved_formats import read_weight
from llm.loading.shared_weights import SharedWeights
from llm.loading.source import ModelSource, Tensors, UpdatedTensors
from llm.loading.weight_file import WeightFile
from llm.loading.weight_map import Target, WeightMap, stored_name
from llm.models.eagle3 import Eagle3ForCausalLM
from llm.models.vision.inputs import sees_both_ways
from llm.models.vision.language import feature_multiplier
from llm.models.vision.tower import VisionTower
from llm.platforms.interface import Platform
from llm.quantization.base import QuantizationConfig
from llm.quantization.on_load import ActivationStatistics, OnlineConfig
from llm.runner.adapters import ModelAdapters
from llm.runner.ahead import StepAhead, in_order, without
from llm.runner.batch import InputBatch, StepInput
from llm.runner.images import ImageRows, TowerTensors
from llm.runner.inside import ModelInside, layers_of
from llm.runner.inspection import (
    ExpertCounter,
    InputObserver,
    LayerCapture,
    count_model,
    far_from_stored,
    held_otherwise,
    layer_noise,
    layer_reports,
    what_varies,
)
from llm.runner.kv_cache import CacheRows, allocate_kv_caches, allocate_recurrent_states
from llm.runner.logit_rows import LogitRowReader, Unread
from llm.runner.pooler import Pooler
from llm.runner.profile import RunnerProfile
from llm.runner.recorded import RecordedSteps, Scores
from llm.runner.speculation.head import HeadSource, PlacedHead, own_blocks
from llm.runner.speculation.proposer import Proposer, propose
from llm.runner.speculation.speculator import make_proposer
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling.logits_processors.pipeline import LogitsProcessors
from llm.sampling.sampler import ForcedSampler, Sampler
from llm.sampling_params import SamplingParams

logger = logging.getLogger("llm")

R = TypeVar("R")
# Logits are computed for as many logit rows at a time as fit in this many bytes.
_LOGITS_BYTES = 64 << 20
# Of a device's memory, 1 / this stays free beside what was measured.
_KEPT_FREE = 50


class ModelRunner:
    """Runs a model (see `llm.models.interface.CausalLM`) on this process's device; `load` builds the model.

    A platform may name a subclass in `Platform.get_model_runner_cls`. A subclass may override each of `place_model`,
    `allocate_kv_caches`, `prepare_batch`, `extend_context`, `forward` and `compute_logits`.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.backend = backend_for(platform)
        self.tp = SINGLE
        self.model: Any = None
        self.states: list[tuple[torch.Tensor, ...]] = []
        # None: no step is recorded.
        self.recorded: RecordedSteps | None = None
        # None: `enable_lora` is off.
        self.adapters: ModelAdapters | None = None
        # Where the weights are, if a file has some.
        self.offloaded = ""
        # Drafts from the model's hidden states, from a checkpoint of its own; None: there is none.
        self.head: Eagle3ForCausalLM | None = None
        # None: a batch row samples one token per step.
        self.proposer: Proposer | None = None
        self._unused_proposer: Proposer | None = None  # while drafting is off
        # None: the model generates.
        self.pooler: Pooler | None = None
        # None: the next step has not been started.
        self._ahead: StepAhead | None = None
        # None: no step is started before its plan has come.
        self._watch: Watch | None = None

    def load(self, plan: RunnerPlan) -> Loaded:
        """Build the model, load its weights and allocate its caches; called once, before anything else.

        Raises:
            ValidationError, CheckpointError: the weights do not fit the model, or the model does not fit the arguments.
            OutOfMemoryError: the weights or the caches cannot be allocated.
        """
        self.plan = plan
        with library_defaults(plan.config.num_threads):
            return self._load(plan)

    @library_defaults()
    def close(self) -> None:
        """Free weights and caches even while they are referenced, as by the traceback of the last error."""
        self.set_drafting(True)
        if self.proposer is not None:
            self.proposer.close()
        if self.adapters is not None:
            self.adapters.close()
        self.images.close()
        states = [tensor for state in self.states for tensor in state]
        modules = [self.model] if self.head is None else [self.model, self.head]
        weights = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        for tensor in (*weights, *states):
            tensor.data = torch.empty(0, device=tensor.device)
        self.model = self.head = self.recorded = self.proposer = self.pooler = self.adapters = None
        self._ahead = self._watch = None
        self.states = []
        self.backend.clear()
        self.platform.release_memory()

    # --- Steps. ---

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        """Compute the scheduled tokens and sample for the batch rows whose last known token was computed."""
        with library_defaults(self.plan.config.num_threads), self.platform.inference_mode():
            self._load_adapters(plan)
            changes = self.batch.update(plan)
            self.images.update(plan, self.batch)
            drafts = {self.batch.index[request_id]: own for request_id, own in plan.draft_token_ids.items()}
            self.processors.update_state(changes, drafts)
            if self.proposer is not None:
                self.proposer.update(plan)
            if not plan.num_scheduled_tokens:
                return RunnerOutput()
            started = perf_counter()
            result = RunnerOutput()
            goes_on = plan.goes_on and self._may_run_ahead()
            early, plan = self._take_ahead(plan)
            if early is not None and not plan.num_scheduled_tokens:
                self._take([early], goes_on, result)
                result.model_seconds = perf_counter() - started
                return result
            step = self.batch.build(plan)
            batch = self.prepare_batch(step)
            batch = self.images.apply(step, self.batch, batch)
            inside = self.inside.step(step, self.batch, self.backend.upload)
            batch.inside = inside
            self.extend_context(batch, plan)
            self._copy_states((new.restored_slot, new.slot) for new in plan.new_rows if new.restored_slot)
            if inside is None:
                hidden = self.forward(batch)
            else:
                with inside.entered():
                    hidden = self.forward(batch)
                hidden = inside.after(hidden, self._logits_of)
                result.activations = inside.activations
            self._copy_states(plan.snapshots)
            if self.pooler is not None:
                self._pool(self.pooler, hidden, step, result)
            else:
                self._read(hidden, step, early, goes_on, result)
            if self.proposer is not None:
                seconds = perf_counter() - started
                result.draft_token_ids = propose(
                    self.proposer, self.batch, step, hidden, result, self._vocab_size, seconds
                )
            result.model_seconds = perf_counter() - started
            return result

    def set_drafting(self, is_on: bool) -> None:
        """Draft tokens or not, between calls; a model without a proposer never does."""
        if is_on != (self.proposer is not None):
            self.proposer, self._unused_proposer = self._unused_proposer, self.proposer
            if self.proposer is not None:
                self.proposer.reset()  # it was not told which rows have left

    def force_answer(self, answer: Sequence[int]) -> None:
        """Give every row these tokens from now on, whatever is sampled: for measurements; if empty, their own."""
        own = Sampler(self.plan.config.model_config.logprobs_mode, self.backend)
        self.sampler = ForcedSampler(own, answer) if answer else own

    @library_defaults()
    def set_processors(self, classes: Sequence[type[LogitsProcessor]]) -> None:
        """Replace the custom processors, between steps; the new ones get the batch's rows as added."""
        self._ahead = None
        self.processors.set_custom(classes, self.batch.added_rows())

    def end_call(self) -> None:
        """Release what is held only during a call."""
        self._ahead = None
        self.processors.end_call()

    def reset(self) -> None:
        """Remove every batch row and reset the processors, after a failed step."""
        self._ahead = None
        self.batch.clear()
        self.images.clear()
        self.processors.forget_rows()
        if self.pooler is not None:
            self.pooler.forget()
        if self.proposer is not None:
            self.proposer.reset()

    # --- What a platform's runner may override. ---

    def place_model(self, model: Any) -> Any:
        """Move to the platform's device what is not there: matrices were made there, and filled as they were read."""
        if self.platform.device.type != "cpu":
            _move(model, self.platform.device)
        return model

    def allocate_kv_caches(
        self, specs: Sequence[PagedSpec], num_blocks: int, block_size: int
    ) -> list[tuple[torch.Tensor, ...]]:
        """The tensors of each paged state, in the attention backend's layout; called once, and again for a head."""

        def shapes(spec: KVCacheSpec, num_blocks: int, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
            backend = attention_backend(self.platform, spec.head_size)
            return backend.kv_cache_shapes(self.platform, spec, num_blocks, block_size)

        return allocate_kv_caches(specs, num_blocks, block_size, shapes, self.backend)

    def prepare_batch(self, step: StepInput) -> ForwardBatch:
        """The step's batch, with each state and the metadata of its group."""
        batch = step.forward_batch
        by_group = batch.metadata
        batch.metadata = [by_group[group] for group in self._group_of_state]
        batch.states = self.states
        return batch

    def extend_context(self, batch: ForwardBatch, plan: SchedulerOutput) -> None:
        """Set `batch.extensions` to what the platform's layers and attention backend need for the step."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [N, H] of the step's tokens; the next step may overwrite them."""
        reads_experts = batch.adapter_ids is not None and self.adapters is not None and self.adapters.change_experts
        hidden = None if self.recorded is None or reads_experts else self.recorded.run(batch)
        if hidden is not None:
            return hidden
        return self.model.forward(batch) if self.adapters is None else self._compute(batch)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, H] -> float32 [rows, vocab]."""
        return self.model.compute_logits(hidden)

    # --- Rows of its caches, between steps. ---

    def cache_parts(self) -> list[CachePart]:
        """Every tensor of every state; see `CacheRows`."""
        return self._cache_rows.parts()

    def read_cache(self, part: int, rows: Sequence[int]) -> torch.Tensor:
        """A copy of these blocks or slots, [rows, *shape]; `part` counts the tensors as `cache_parts` does."""
        return self._cache_rows.read(part, rows)

    def write_cache(self, part: int, rows: Sequence[int], values: torch.Tensor) -> None:
        """Set these blocks or slots."""
        self._cache_rows.write(part, rows, values)

    # --- Queries about the model. ---

    def check_adapter(self, path: str) -> str:
        """The digest of an adapter's files.

        Raises:
            ValidationError: `enable_lora` is off. CheckpointError: the adapter cannot be used with this model.
        """
        if self.adapters is None:
            raise ValidationError(
                "lora_request needs LLM(..., enable_lora=True).", parameter="lora_request", value=path
            )
        return self.adapters.check(path)

    def describe(self) -> Explanation:
        """What computes the model's layers, and why."""
        runner = type(self), self.platform, self.backend
        return explain_runner(*runner, self.model, self.plan.config, self.offloaded)

    def layer_reports(self) -> list[LayerReport]:
        """Every layer with a weight, in the model's order."""
        return layer_reports(self.model, self.plan.config.model_config.weight_dtype)

    def save(self, path: str | Path, format: str) -> Path:
        """See `LLM.save_quantized`."""
        from llm.loading.save import save_quantized

        return save_quantized(self.model, self.targets, self._saved_from(), self.plan.hf_config, path, format)

    def _saved_from(self) -> Path:
        """The folder whose other files are saved too."""
        if isinstance(self.plan.source, GgufSource):
            raise LLMError(f"{self.plan.source.path} is in GGUF already, and is not written in another format.")
        return self.plan.source.folder

    def sites(self) -> dict[str, Site]:
        """The places where activations can be read or changed, in the order of computing.

        Raises:
            ValidationError: it generates nothing.
        """
        if self.plan.pooling is not None:
            raise ValidationError("the inside of a model is open where it generates text.", parameter="capture")
        return self.inside.sites()

    def cost(self) -> ModelCost:
        """What a step reads and computes."""
        return count_model(self.model, self.plan.config.cache_config.kv_cache_dtype, self.plan.kv_cache_specs)

    def weight_names(self) -> list[str]:
        """The checkpoint's tensors that the model has."""
        return list(self.targets)

    def read_weight(self, name: str) -> torch.Tensor:
        """See `llm.loading.saved_formats.read_weight`."""
        return read_weight(self.model, self.targets, name)

    def replace_weights(self, source: ModelSource) -> None:
        """Load the model anew from a checkpoint of the same architecture; if that fails, nothing has changed.

        Raises:
            ValidationError: a file has some of the weights, or drafts are made with the model's hidden states.
            CheckpointError, OutOfMemoryError: as `load`.
        """
        self._check_replaceable()
        plan = replace(self.plan, source=source)
        with library_defaults(plan.config.num_threads):
            model, targets = self._loaded_again(plan)
            self._detach_model()
            old, self.model, self.targets, self.plan = self.model, model, targets, plan
            _free(old)
            self._attach_model(self._config)

    def sleep(self, level: int) -> None:
        """Give back the memory of the caches, and with level 2 that of the weights."""
        if level == 2:
            self._check_replaceable()
        self._detach_model()
        self.images.close()
        for tensor in (tensor for state in self.states for tensor in state):
            tensor.data = torch.empty(0, device=tensor.device)
        self.states = []
        if level == 2:
            _free(self.model)
            self.model = None
        self.backend.clear()
        self.platform.release_memory()

    def wake_up(self) -> None:
        """Fetch what `sleep` has given back; weights are read again from where they came."""
        with library_defaults(self.plan.config.num_threads):
            if self.model is None:
                self.model, self.targets = self._loaded_again(self.plan)
            self._allocate_caches(self._config)
            self._attach_model(self._config)

    def _check_replaceable(self) -> None:
        drafting = self.plan.config.speculative_config
        if self.offloaded or not self.plan.has_weights or (drafting is not None and drafting.has_head):
            raise ValidationError(
                "weights are read again where all of them are in memory, are a checkpoint's (not load_format='dummy'), "
                "and no head drafts from the model's hidden states.",
                parameter="weights",
            )

    def _loaded_again(self, plan: RunnerPlan) -> tuple[Any, Mapping[str, Target]]:
        """The model of a plan and the targets of its checkpoint's tensors."""
        with serial_pytorch():
            model = build_model(plan, self.platform)
            targets = fill_model(plan, self.platform, model)
        return self.place_model(model), targets

    @library_defaults()
    def apply_model(self, function: Callable[[torch.nn.Module], R]) -> R:
        """`function(model)`. It may change the model: recorded steps are dropped. Layers made in it have kernels."""
        try:
            with torch.no_grad(), constructing(self.plan, self.platform):
                return function(self.model)
        finally:
            self._ahead = None
            if self._watch is not None:
                self._watch = Watch(self.model.modules())
            weights_changed(self.model)
            self.inside = ModelInside(self.model, self._vocab_size, self.plan.config.cache_config.kv_cache_dtype)
            if self.recorded is not None:
                self.recorded = self._new_recorded()

    def start_profile(self) -> None:
        """Start timing every operation."""
        self._profile = RunnerProfile(self, self.plan.config.cache_config.kv_cache_dtype)

    def stop_profile(self) -> list[ProfileRow]:
        """The table of exclusive times since `start_profile`."""
        rows = self._profile.stop()
        del self._profile
        return rows

    # --- Inputs and outputs of its layers. ---

    def start_observing(self) -> None:
        """Start collecting statistics of each linear layer's inputs."""
        self._observer = InputObserver(self.model, self.platform.device)

    def stop_observing(self) -> dict[str, ActivationStatistics]:
        """Statistics of each linear layer's inputs since `start_observing`, by dotted path."""
        statistics = self._observer.stop()
        del self._observer
        return statistics

    def start_counting_experts(self) -> None:
        """From now on count the tokens of each expert."""
        self._counter = ExpertCounter(self.model)

    def stop_counting_experts(self) -> dict[str, list[int]]:
        """Tokens by expert since `start_counting_experts`, by the path of the layer; {}: there are no experts."""
        counts = self._counter.stop()
        del self._counter
        return counts

    def start_capturing(self, names: Sequence[str], limit_bytes: int) -> list[str]:
        """Start keeping inputs and outputs of linear layers, for `take_captured` after each step.

        Returns the captured layers: the first of `names` that together need at most `limit_bytes` per step.
        """
        tokens = self.plan.config.scheduler_config.max_num_batched_tokens
        self._capture = LayerCapture(self.model, names, tokens, limit_bytes)
        return self._capture.names

    def take_captured(self) -> Captured:
        """(input, output) of each captured layer since the last call."""
        return self._capture.take()

    def stop_capturing(self) -> None:
        self._capture.stop()
        del self._capture

    @library_defaults()
    def layer_noise(self, captured: Captured) -> dict[str, tuple[float, float]]:
        """Per layer: (sum of squares of the captured outputs, of this model's errors on the captured inputs)."""
        with self.platform.inference_mode():
            return layer_noise(self.model, captured)

    # --- Loading. ---

    def _load(self, plan: RunnerPlan) -> Loaded:
        times = PhaseTimes()
        self.platform.set_device(plan.device_index)
        with times.phase("build model"):
            self.platform.import_kernels()
            place = weight_place(plan, self.platform)
            model = build_model(plan, self.platform, place, self.tp)
            varies = what_varies(model) if plan.config.invariant else None
            head = None if plan.head is None else build_model(plan.head.plan, self.platform)
        with times.phase("load weights"), serial_pytorch():
            if plan.head is not None:
                fill_model(plan.head.plan, self.platform, head)
            self.targets = fill_model(plan, self.platform, model, place)
            self.offloaded = place.where()
            far = far_from_stored(model)
            if far:
                logger.warning("%s: %s.", plan.config.model_config.model, far)
            held = "; ".join(filter(None, (held_otherwise(model, plan.config.quant_config), far)))
            loaded = Loaded(varies, held, times, self.offloaded, place.shared_bytes())
        with times.phase("allocate KV cache"):
            self.model = self.place_model(model)
            if plan.head is not None:
                self.head = self.place_model(head)
                self.model.tapped = plan.head.taps
            config = loaded.applied_to(plan.config)
            if plan.measures_cache and config.cache_config.num_blocks and plan.draft is None and plan.head is None:
                loaded = self._measured(loaded, config)
                config = loaded.applied_to(plan.config)
                self.plan = replace(plan, config=config)
            self._allocate(config)
        self._config = config
        return loaded

    def _measured(self, loaded: Loaded, config: EngineConfig) -> Loaded:
        """With as many blocks as fit beside what a step at the largest batch needs, where the platform can tell that.

        Raises:
            OutOfMemoryError: the step, or one sequence of `max_model_len`, does not fit.
        """
        cache, scheduler, drafting = config.cache_config, config.scheduler_config, config.speculative_config
        if drafting is not None and drafting.has_head:
            return loaded
        slots = sum(spec.bytes_per_request() for spec in self.plan.kv_cache_specs)
        slot_bytes = slots * (cache.num_state_slots + cache.num_state_snapshots)
        block_bytes = (cache.kv_cache_memory_bytes - slot_bytes) // cache.num_blocks
        self._allocate(replace(config, speculative_config=None, lora_config=None))
        self.recorded = None
        tokens = scheduler.max_num_batched_tokens
        try:
            needed = self.platform.memory_of(lambda: self._largest_step(config, tokens))
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"a step of max_num_batched_tokens={tokens} does not fit beside the weights; lower it or max_num_seqs."
            ) from error
        self.states = []
        del self._cache_rows, self.batch, self.processors, self.sampler
        self.backend.clear()
        self.platform.release_memory()
        if needed is None:
            return loaded
        free = self.platform.memory_free()
        per_sequence = -(-config.model_config.max_model_len // cache.block_size)
        left = free - needed - slot_bytes - self.platform.memory_total() // _KEPT_FREE
        blocks = min(scheduler.max_num_seqs * per_sequence, left // max(1, block_bytes))
        if blocks < per_sequence:
            raise OutOfMemoryError(
                f"a sequence of max_model_len={config.model_config.max_model_len} needs {per_sequence * block_bytes} "
                f"bytes of KV cache, and a step of {tokens} tokens leaves {max(0, left)}; lower max_model_len or "
                "max_num_batched_tokens."
            )
        reason = f"measured: {free} bytes are free beside the weights, and a step of {tokens} tokens needs {needed}"
        return replace(loaded, num_blocks=blocks, blocks_reason=reason, slot_bytes=slot_bytes)

    def _largest_step(self, config: EngineConfig, tokens: int) -> None:
        """Compute so many tokens of as many rows as there may be, or as the planned blocks hold, and sample."""
        cache, groups = config.cache_config, len(group_states(self.plan.kv_cache_specs)[0])
        rows = min(config.scheduler_config.max_num_seqs, tokens, cache.num_blocks, cache.num_state_slots or tokens)
        length = max(1, min(tokens // rows, config.model_config.max_model_len - 1))
        per_row = -(-length // cache.block_size)
        rows = max(1, min(rows, cache.num_blocks // per_row))
        added = [
            NewRow(
                f"profile-{row}",
                token_ids=[0] * length,
                num_prompt_tokens=length,
                num_computed_tokens=0,
                blocks=[list(range(1 + row * per_row, 1 + (row + 1) * per_row))] * groups,
                slot=row + 1 if cache.num_state_slots else NO_SLOT,
                restored_slot=NO_SLOT,
                params=SamplingParams(temperature=1.0, max_tokens=1),
                seed=0,
                sample_index=0,
                prompt_logprobs_from=length,
            )
            for row in range(rows)
        ]
        self.execute(SchedulerOutput({row.request_id: length for row in added}, added))
        self.execute(SchedulerOutput(removed=[row.request_id for row in added]))

    def _allocate(self, config: EngineConfig) -> None:
        """Allocate everything that a step needs besides the model."""
        specs, cache = self.plan.kv_cache_specs, config.cache_config
        groups, self._group_of_state = group_states(specs)
        self._allocate_caches(config)
        self.batch = InputBatch(
            config.scheduler_config.max_num_seqs,
            config.model_config.max_model_len,
            len(groups),
            cache.block_size,
            self.backend.upload,
            shares_memory=self.backend.shares_host_memory,
            has_slots=cache.num_state_slots > 0,
            rolls_back=all_roll_back(specs),
        )
        windows_only = sees_both_ways(self.plan.hf_config) == "windows"
        both_ways = [
            None if group == SLOTS or (windows_only and getattr(spec, "sliding_window", None) is None) else group
            for group, spec in zip(self._group_of_state, specs, strict=True)
        ]
        text = self.plan.hf_config.get("text_config")
        pad = text.get("pad_token_id") if isinstance(text, Mapping) else None
        pad = pad if isinstance(pad, int) and 0 <= pad < config.model_config.vocab_size else 0
        multiplier = feature_multiplier(self.plan.hf_config, self.plan.architecture)
        hidden_size = int(getattr(self.plan.architecture, "hidden_size", 0))
        dtype, device = config.model_config.dtype, self.platform.device
        self.images = ImageRows(self._make_tower, both_ways, multiplier, pad, hidden_size, dtype, device)
        self._vocab_size = config.model_config.vocab_size
        self._logit_rows_at_once = max(1, _LOGITS_BYTES // (4 * self._vocab_size))
        custom = self.plan.logits_processors
        self.processors = LogitsProcessors(config, device, custom, self.backend)
        self.sampler = Sampler(config.model_config.logprobs_mode, self.backend)
        self._attach_model(config)

    def _allocate_caches(self, config: EngineConfig) -> None:
        cache = config.cache_config
        try:
            self.states = self._allocate_states(self.plan.kv_cache_specs, cache)
        except MemoryError as error:  # only if the user set the budget: ours is within free memory
            raise OutOfMemoryError(
                f"kv_cache_memory_bytes={cache.kv_cache_memory_bytes} cannot be allocated; lower it, max_num_seqs or "
                "max_model_len."
            ) from error
        self._cache_rows = CacheRows(self.platform, self.plan, self.states, self._group_of_state)

    def _attach_model(self, config: EngineConfig) -> None:
        """Make what refers to the model's modules."""
        self.inside = ModelInside(self.model, self._vocab_size, self.plan.config.cache_config.kv_cache_dtype)
        if config.lora_config is not None:
            self.adapters = ModelAdapters(self.model, config.lora_config, self.backend)
        if self.plan.pooling is not None:
            self.pooler = Pooler(self.plan.pooling, self.model, self.backend)
        elif self._may_record(config):
            self.recorded = self._new_recorded()
        self._watch = Watch(self.model.modules()) if config.scheduler_config.async_scheduling else None
        self.proposer = make_proposer(config.speculative_config, self.plan, self._draft_runner, self._make_head)

    def _detach_model(self) -> None:
        """Let go of what refers to the model's modules, and to the caches."""
        self._ahead = None
        self.set_drafting(True)
        if self.proposer is not None:
            self.proposer.close()
        if self.adapters is not None:
            self.adapters.close()
        self.proposer = self.adapters = self.pooler = self.recorded = self._watch = None

    def _allocate_states(self, specs: Sequence[StateSpec], cache: CacheConfig) -> list[tuple[torch.Tensor, ...]]:
        paged = [spec for spec in specs if isinstance(spec, PagedSpec)]
        recurrent = [spec for spec in specs if isinstance(spec, RecurrentSpec)]
        config, blocks, size = self.plan.config.speculative_config, cache.num_blocks + 1, cache.block_size
        own = own_blocks(config.num_speculative_tokens, size) if config is not None and config.has_head else 0
        last = len(paged) - (own > 0)
        tensors = self.allocate_kv_caches(paged[:last], blocks, size)
        if own:
            tensors += self.allocate_kv_caches(paged[last:], blocks + own, size)
        in_blocks = iter(tensors)
        slots = cache.num_state_slots + cache.num_state_snapshots
        in_slots = iter(allocate_recurrent_states(recurrent, slots + 1, self.backend))
        return [next(in_blocks if isinstance(spec, PagedSpec) else in_slots) for spec in specs]

    def _make_tower(self) -> VisionTower:
        """The model's vision tower, with its weights; read when the first picture comes."""
        whole = self.plan.config.quant_config
        quant_config = whole.of_tower if isinstance(whole, OnlineConfig) else None
        types = self.plan.config.model_config
        own = None if types.dtype == torch.float32 else types.dtype  # that transformers' modules compute in
        with serial_pytorch(), library_defaults(self.plan.config.num_threads), torch.inference_mode(False):
            with constructing(self.plan, self.platform), _explain_memory_errors():
                tower = VisionTower(self.plan.hf_config, types.weight_dtype, quant_config)
            try:
                tensors = TowerTensors(self.plan.source.tensors(), tower, own)
                shows = self.plan.show_progress
                load_weights(tower, tensors, show_progress=shows, quant_config=quant_config, store_as=own)
            finally:
                self.plan.source.close()
            return self.place_model(tower)

    def _draft_runner(self) -> ModelRunner:
        """The runner of a draft model, not loaded."""
        return type(self)(self.platform)

    def _make_head(self, config: SpeculativeConfig) -> HeadSource:
        """What drafts with the model's head, or one with a checkpoint of its own; it has the last of the states."""
        group, first = self._group_of_state[-1], self.plan.config.cache_config.num_blocks + 1
        if self.head is None:
            head = PlacedHead(
                *(self.model.mtp, self.model.embed, self.compute_logits, self.states, group, first), reads_taps=False
            )
        else:
            own, embedding = self.head, self.model if self.head.embed_tokens is None else self.head
            head = PlacedHead(
                *(own, embedding.embed, own.compute_logits, self.states[-1:], group, first), reads_taps=True
            )
        most = config.num_speculative_tokens
        return HeadSource(self._placed(head), self.sampler, self.backend.upload, most, f"of the {config.method} head")

    def _placed(self, head: PlacedHead) -> PlacedHead:
        """What computes the head."""
        return head

    def _may_record(self, config: EngineConfig) -> bool:
        """Whether steps may be recorded with these arguments."""
        if not self.backend.records or (self.backend.records_kernels_only and not config.invariant):
            return False
        if self.tp.communicator is not None and not self.tp.communicator.is_recorded:
            return False
        return not config.offload_config.offload_weights  # a recorded step would not fetch experts from the file

    def _new_recorded(self) -> RecordedSteps:
        is_plain = self.adapters is None or not self.adapters.change_head
        records_head = is_plain and type(self).compute_logits is ModelRunner.compute_logits
        return RecordedSteps(
            self.model,
            self.backend,
            self.batch.max_blocks,
            parts=layers_of(self.model),
            computing=None if self.adapters is None else self.adapters.tokens.of,
            forward=None if self.adapters is None else self._compute,
            compute_logits=self.compute_logits if records_head else None,
            vocab_size=self._vocab_size,
            rolls_back=all_roll_back(self.plan.kv_cache_specs),
            repeats=self.tp.size == 1,
        )

    # --- Parts of a step. ---

    def _load_adapters(self, plan: SchedulerOutput) -> None:
        """Load the adapters of new rows. Recorded steps read the matrices that were there, so they are dropped."""
        for row in plan.new_rows:
            if row.adapter is not None:
                self._load_adapter(row.adapter_slot, row.adapter)

    def _load_adapter(self, slot: int, adapter: Adapter) -> None:
        if self.adapters is not None and self.adapters.load(slot, adapter) and self.recorded is not None:
            self.recorded = self._new_recorded()

    def _copy_states(self, slots: Iterable[tuple[int, int]]) -> None:
        """Copy all recurrent states of a slot to another; (from, to) pairs."""
        for source, target in slots:
            for state, group in zip(self.states, self._group_of_state, strict=True):
                for tensor in state if group == SLOTS else ():
                    tensor[target] = tensor[source]

    def _compute(self, batch: ForwardBatch) -> torch.Tensor:
        """`model.forward`; its layers read the batch's adapters meanwhile."""
        forward: Callable[[ForwardBatch], torch.Tensor] = self.model.forward
        if self.adapters is None:
            return forward(batch)
        return self.adapters.compute(lambda: forward(batch), batch.adapter_ids)

    def _reader(self) -> LogitRowReader:
        return LogitRowReader(
            batch=self.batch,
            sampler=self.sampler,
            processors=self.processors,
            compute_logits=self._logits_of,
            logit_rows_at_once=self._logit_rows_at_once,
            scores=self._scores,
            backend=self.backend,
        )

    def _read(
        self, hidden: torch.Tensor, step: StepInput, early: Unread | None, goes_on: bool, result: RunnerOutput
    ) -> None:
        """Sample and score the step's logit rows from the hidden states [N, H], and read what was started early.

        `goes_on`: start the next step before anything is read.
        """
        logit_rows, unread = step.logit_rows, [] if early is None else [early]
        if logit_rows.num_sampled < len(hidden):  # otherwise these are all, in order
            hidden = self.backend.ops.select_rows(hidden, step.forward_batch.logits_indices)
        starts = goes_on and logit_rows.drafts is None and logit_rows.num_sampled == len(logit_rows.rows)
        if starts:
            unread.append(self._reader().start(hidden, logit_rows.rows, logit_rows.positions))
        self._take(unread, starts, result)
        if not starts:
            self._reader().read(hidden, logit_rows, result)
        self.batch.settle(step)

    # --- The step after this one (see `ahead.py`). ---

    def _may_run_ahead(self) -> bool:
        """True if nothing but its tokens has to be known of the next step of these rows, and nothing looks at steps."""
        return (
            self._watch is not None
            and not self._watch()
            and type(self).extend_context is ModelRunner.extend_context
            and type(self.sampler) is Sampler
            and self.processors.is_idle()
            and not self.processors.custom
            and self.proposer is None
            and not self.batch.has_slots  # recurrent states would have changed for nothing
            and all(params.inside is None for params in self.batch.params)
        )

    def _take_ahead(self, plan: SchedulerOutput) -> tuple[Unread | None, SchedulerOutput]:
        """What was started of the plan before it came, and what is left to compute of it."""
        ahead, self._ahead = self._ahead, None
        known = {} if ahead is None else ahead.rows_of(plan, self.batch)
        if ahead is None or not known:
            return None, plan
        plan = without(plan, {ahead.request_ids[row] for row in known.values()})
        is_all = not plan.num_scheduled_tokens and list(known.values()) == list(range(len(ahead.request_ids)))
        early = ahead.of(known, self.backend.upload, is_all)
        self.batch.advance(early.rows)
        return early, plan

    def _take(self, unread: list[Unread], goes_on: bool, result: RunnerOutput) -> None:
        """Read sampled tokens. `goes_on`: the step that computes them is started before, of all batch rows."""
        if goes_on:
            self._ahead = self._start_ahead(*in_order(unread, self.backend.upload))
        for part in unread:
            self._reader().take(part.rows, part.finish(), result)

    def _start_ahead(self, positions: np.ndarray, tokens: torch.Tensor) -> StepAhead | None:
        """Start the step after the one that computed these positions, int64 [rows], of all rows, from the tokens that
        it samples, int64 [rows]; None: it was not."""
        step = self.batch.build_next(positions + 1, tokens)
        if step is None:
            return None
        hidden = self.forward(self.prepare_batch(step))
        unread = self._reader().start(hidden, step.logit_rows.rows, step.logit_rows.positions)
        return StepAhead(list(self.batch.request_ids), unread)

    def _logits_of(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """`compute_logits` of logit rows of these batch rows."""
        if self.adapters is None:
            return self.compute_logits(hidden)
        with self.adapters.logit_rows.of(self.batch.adapters_of(rows)):
            return self.compute_logits(hidden)

    def _scores(self, hidden: torch.Tensor) -> Scores | None:
        """What a recorded step gives in place of `compute_logits`; None: it was not recorded, or is patched."""
        if self.recorded is None or "compute_logits" in vars(self.model):
            return None
        return self.recorded.scores(hidden)

    def _pool(self, pooler: Pooler, hidden: torch.Tensor, step: StepInput, result: RunnerOutput) -> None:
        """Pool the hidden states [N, H] of the step's rows; those whose last token was computed have a result."""
        if not self.backend.shares_host_memory:
            hidden = torch.from_numpy(*self.backend.download(hidden.float()))
        batch, start, done = self.batch, 0, set(step.logit_rows.rows.tolist())
        finished = {}
        for row, count in zip(step.rows.tolist(), step.counts.tolist(), strict=True):
            own = batch.pooling[row]
            if own is None:
                raise RuntimeError("a row of a pooling model says nothing of what is pooled")
            pooler.add(batch.request_ids[row], own, int(batch.num_computed[row]), hidden[start : start + count])
            start += count
            if row in done:
                finished[batch.request_ids[row]] = own
        result.pooled = pooler.finish(finished)
        batch.settle(step)


def _free(model: torch.nn.Module) -> None:
    """Free its tensors even while they are referenced."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = torch.empty(0, device=tensor.device)


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Parameters and buffers that are elsewhere go to the device; shared ones stay shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in moved:
                    own = tensor.detach().to(device)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = torch.nn.Parameter(own, requires_grad=False) if is_parameter else own
                held[name] = moved[id(tensor)]  # type: ignore[assignment]


def weight_place(plan: RunnerPlan, platform: Platform) -> WeightPlace:
    """Where the weights are kept: in memory, in a file that memory has no room for, or in one of several processes."""
    offload = plan.config.offload_config
    if offload.offload_weights:
        return WeightFile(Path(offload.offload_folder), offload.resident_weight_bytes, platform.release_memory)
    if plan.shared_weights is not None:
        return SharedWeights(plan.shared_weights, platform.release_memory)
    return IN_MEMORY


def constructing(plan: RunnerPlan, platform: Platform, place: WeightPlace = IN_MEMORY) -> AbstractContextManager[None]:
    """Layers constructed inside this context are bound as those of the plan's model."""
    may_round = plan.store_as is torch.bfloat16
    dtype = plan.config.model_config.dtype
    return constructing_for(
        platform, plan.config.compilation_config, may_round=may_round, weights=place, activations=dtype
    )


def build_model(
    plan: RunnerPlan, platform: Platform, place: WeightPlace = IN_MEMORY, tp: TensorParallel = SINGLE
) -> Any:
    """The part of the model of rank `tp`, with empty weights; raises `ValidationError` for a setting of the user that
    matched no layer."""
    quant_config = plan.config.quant_config
    if isinstance(quant_config, OnlineConfig) and quant_config.tower is not None:
        _check_has_tower(plan)
    if quant_config is not None:
        renames = getattr(plan.model_class, "renames", ())
        names = plan.source.tensors().tensors if plan.has_weights else ()
        modules = {name.rpartition(".")[0] for name in names}
        quant_config.packed_modules_mapping = getattr(plan.model_class, "packed_modules_mapping", {})
        quant_config.apply_mapper(lambda name: stored_name(name, renames, modules))
        if plan.has_weights:
            quant_config.describe_tensors({name: info.shape for name, info in plan.source.tensors().tensors.items()})
    with constructing(plan, platform, place), _explain_memory_errors():
        if quant_config is not None:
            with torch.device("meta"):
                quant_config.share_bits(lambda: plan.model_class(plan.architecture, plan.build_options(SINGLE)))
        model = plan.model_class(plan.architecture, plan.build_options(tp))
        if quant_config is not None:
            quant_config.check_used()
            quant_config.prepare_model(model)
        place.divide(model, plan.config.offload_config.planned_weight_bytes)
        return model


def _check_has_tower(plan: RunnerPlan) -> None:
    if not isinstance(plan.hf_config.get("vision_config"), Mapping):
        raise ValidationError(
            "quantization has a scheme for a vision tower, which this model does not have; leave out 'tower'.",
            parameter="quantization",
        )


def fill_model(
    plan: RunnerPlan, platform: Platform, model: Any, place: WeightPlace = IN_MEMORY
) -> Mapping[str, Target]:
    """Load the weights or make random ones. Returns the target of each checkpoint tensor, empty for random weights."""
    adapter = None if plan.merge_lora is None else AdapterFolder(plan.merge_lora)
    # What is packed goes to the device, or to its place: the host's memory holds one layer.
    packs_early = place.packs_early or platform.device.type != "cpu"
    try:
        if not plan.has_weights:
            if not place.is_slow:
                _check_dummy_weights_fit(model, platform.memory_free())
            with _explain_memory_errors():
                load_dummy_weights(model, plan.config.model_config.seed, pack_early=packs_early)
            return {}
        stored = plan.source.tensors()
        tensors = _in_order(stored, plan.config.quant_config, model)
        targets = load_weights(
            model,
            tensors if adapter is None else MergedTensors(tensors, adapter, model),
            show_progress=plan.show_progress,
            quant_config=plan.config.quant_config,
            store_as=plan.store_as,
            pack_early=packs_early,
        )
        if tensors is stored:
            return targets
        # What is saved has the order of the checkpoint, whatever order it was read in.
        places = {name: place for place, name in enumerate(stored.tensors)}
        return dict(sorted(targets.items(), key=lambda item: places.get(item[0], len(places))))
    finally:
        if adapter is not None:
            adapter.close()
        plan.source.close()
        if plan.config.quant_config is not None:
            plan.config.quant_config.end_loading()
        place.close()


def _in_order(tensors: Tensors, config: QuantizationConfig | None, model: torch.nn.Module) -> Tensors:
    """Layer by layer, where statistics of their inputs are computed so."""
    in_order = isinstance(config, OnlineConfig) and config.statistics.in_order
    if not in_order or not isinstance(tensors, Checkpoint | UpdatedTensors):
        return tensors
    layers = [f"model.layers.{index}" for index, _ in enumerate(model.get_submodule("model.layers").children())]
    parts = WeightMap(model).by_part(tensors.tensors, layers)
    # The embedding comes last: what it takes while it is quantized is not needed beside the texts.
    return tensors.parts([*(parts[layer] for layer in layers), parts[""]])


@contextmanager
def _explain_memory_errors() -> Iterator[None]:
    """Turn PyTorch's failed allocations, which are plain RuntimeErrors, into ours."""
    try:
        yield
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise OutOfMemoryError("the model's weights cannot be allocated: there is not enough memory.") from error


def _check_dummy_weights_fit(model: Any, free: int) -> None:
    """Called before weights are written. Weights that are quantized on load are on the meta device and count as 0."""
    needed = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    if needed > free:
        raise OutOfMemoryError(f"the model's weights take {needed} bytes and {free} are free.")
