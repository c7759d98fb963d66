"""Computes one step.

Owns the weights, the KV tensors, the persistent batch and the sampler. It is told what to do by a `SchedulerOutput` and
answers with a `RunnerOutput`; both are plain data, so a worker in another process could stand here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from llm.config import EngineConfig
from llm.engine.batch import InputBatch, StepInput
from llm.engine.kv_cache import allocate_kv_caches, group_layers
from llm.engine.scheduler import SchedulerOutput
from llm.forward import KVCacheSpec
from llm.sampling.sampler import Sampler, SamplerOutput, TokenLogprobs

# Logits are computed for so many bytes of rows at a time.
_LOGITS_BYTES = 64 << 20


@dataclass
class RunnerOutput:
    """What a step produced.

    Attributes:
        sampled_token_ids: request id -> the tokens it sampled this step; rows still in their prompt are absent.
        logprobs: request id -> one `TokenLogprobs` per sampled token, for requests that asked.
        model_seconds: time in forward, LM head and sampler; the rest of the step is the engine's own.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    model_seconds: float = 0.0


class ModelRunner:
    """Runs `model` (see `llm.models.interface.CausalLM`) on this process's device."""

    def __init__(self, model: Any, specs: Sequence[KVCacheSpec], config: EngineConfig) -> None:
        self.model = model
        cache = config.cache_config
        groups, self._group_of_layer = group_layers(specs)
        self.kv_caches = allocate_kv_caches(specs, cache.num_blocks + 1, cache.block_size)
        self.batch = InputBatch(
            config.scheduler_config.max_num_seqs, config.model_config.max_model_len, len(groups), cache.block_size
        )
        self.sampler = Sampler()
        self._rows_per_logits_chunk = max(1, _LOGITS_BYTES // (4 * config.model_config.vocab_size))

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        """Compute the scheduled tokens and draw from the rows that reached their last known token."""
        self.batch.update(plan)
        if not plan.num_scheduled_tokens:
            return RunnerOutput()
        step = self.batch.build(plan)
        started = perf_counter()
        hidden = self._forward(step)
        outputs = self._sample(hidden, step)
        model_seconds = perf_counter() - started
        return self._collect(step, outputs, model_seconds)

    def reset(self) -> None:
        """Forget every row, after a step that failed half way."""
        self.batch.clear()

    def close(self) -> None:
        """Free weights and caches whoever still refers to them: the traceback of an error can, until the next one."""
        caches = [tensor for layer in self.kv_caches for tensor in layer]
        for tensor in (*self.model.parameters(), *self.model.buffers(), *caches):
            tensor.data = torch.empty(0)
        self.model = None
        self.kv_caches = []

    def _forward(self, step: StepInput) -> torch.Tensor:
        """Hidden states [L, H] of the tokens whose logits are needed."""
        batch = step.forward_batch
        by_group = batch.attention
        batch.attention = [by_group[group] for group in self._group_of_layer]
        batch.kv_caches = self.kv_caches
        hidden = self.model.forward(batch)
        return hidden.index_select(0, batch.logits_indices)

    def _sample(self, hidden: torch.Tensor, step: StepInput) -> list[SamplerOutput]:
        """LM head and sampler, over chunks of rows."""
        rows = step.sampled_rows
        outputs = self.batch.num_tokens[rows] - self.batch.num_prompt_tokens[rows]
        size = self._rows_per_logits_chunk
        return [
            self.sampler(
                self.model.compute_logits(hidden[start : start + size]),
                self.batch.sampling,
                rows[start : start + size],
                outputs[start : start + size],
            )
            for start in range(0, len(rows), size)
        ]

    def _collect(self, step: StepInput, outputs: list[SamplerOutput], model_seconds: float) -> RunnerOutput:
        tokens: list[int] = []
        result = RunnerOutput(model_seconds=model_seconds)
        request_ids = [self.batch.request_ids[row] for row in step.sampled_rows.tolist()]
        for output in outputs:
            for line, logprobs in output.logprobs.items():
                result.logprobs[request_ids[len(tokens) + line]] = [logprobs]
            tokens.extend(output.tokens.tolist())
        self.batch.advance(step, tokens)
        result.sampled_token_ids = {request_id: [token] for request_id, token in zip(request_ids, tokens, strict=True)}
        return result
