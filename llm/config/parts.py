"""Sub-configs that logits processors and plugins written for vLLM read, and whose values are fixed here.

Owns no decision: one device in one process, no adapters. Decisions are in `llm.config.engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from llm.base.checks import refuse


@dataclass(frozen=True)
class DeviceConfig:
    device_type: str

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.device_type)


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    world_size: int = 1
    rank: int = 0
    data_parallel_rank: int = 0
    nnodes: int = 1
    node_rank: int = 0
    enable_expert_parallel: bool = False
    distributed_executor_backend: str = "uni"


@dataclass(frozen=True)
class MultiModalConfig:
    """Of no model here: prompts are text. For the annotations of operations written for vLLM."""


@dataclass(frozen=True)
class LoadConfig:
    load_format: str = "auto"
    download_dir: None = None


@dataclass(frozen=True)
class OffloadConfig:
    """Where the weights are.

    Attributes:
        offload_weights: False: in memory; True: in a file what memory has no room for, read when it is used.
        offload_folder: of that file; "" without one.
        resident_weight_bytes: most bytes of weights that stay in memory beside the file.
        planned_weight_bytes: of all weights, as far as the checkpoint tells; 0 for random weights.
    """

    offload_weights: bool = False
    offload_folder: str = ""
    resident_weight_bytes: int = 0
    planned_weight_bytes: int = 0


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """JSON is generated without whitespace, so whitespace cannot repeat without end."""

    backend: str = "guidance"
    disable_any_whitespace: bool = True
    disable_additional_properties: bool = False
    reasoning_parser: str = ""
    enable_in_reasoning: bool = False


@dataclass(frozen=True)
class ReasoningConfig:
    """The texts around a model's reasoning, for `thinking_token_budget`; "": the tokens <think> and </think>.

    `LLM.chat` reads reasoning by them; a `reasoning_parser` is not used.
    """

    reasoning_parser: str = ""
    reasoning_start_str: str = ""
    reasoning_end_str: str = ""

    @classmethod
    def of(cls, given: object) -> ReasoningConfig | None:
        """From what the user passed: a dict of the fields, a `ReasoningConfig` or None."""
        if given is None or isinstance(given, ReasoningConfig):
            return given
        names = [item.name for item in fields(cls)]
        right = f"a dict of {', '.join(names)}, each a text, or None"
        if not isinstance(given, Mapping) or not given.keys() <= set(names):
            refuse("reasoning_config", given, right)
        if not all(isinstance(text, str) for text in given.values()):
            refuse("reasoning_config", given, right)
        return cls(**given)


@dataclass(frozen=True)
class ObservabilityConfig:
    otlp_traces_endpoint: None = None
    collect_detailed_traces: None = None
    show_hidden_metrics_for_version: None = None
    kv_cache_metrics: bool = False


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters that rows can have, for `enable_lora=True`.

    Attributes:
        max_loras: how many are in memory, and so in one step, at a time; rows with further ones wait.
        max_lora_rank: the largest rank of one.
        lora_memory_bytes: what `max_loras` adapters of that rank for every matrix but experts' take at most.
    """

    max_loras: int
    max_lora_rank: int
    lora_memory_bytes: int = 0


class ConfigForPlugins:
    """Base of `EngineConfig`: attributes of vLLM's config that are fixed here."""

    parallel_config = ParallelConfig()
    structured_outputs_config = StructuredOutputsConfig()
    observability_config = ObservabilityConfig()
    watermark_config = None
    diffusion_config = None
    kv_transfer_config = None
    kv_events_config = None
    ec_transfer_config = None
    weight_transfer_config = None
    instance_id = ""

    @property
    def additional_config(self) -> dict[str, object]:
        """Options for a plugin: there are none, so a new, empty dict."""
        return {}

    @property
    def device_config(self) -> DeviceConfig:
        return DeviceConfig(self.device)  # type: ignore[attr-defined]

    @property
    def load_config(self) -> LoadConfig:
        return LoadConfig(self.model_config.load_format)  # type: ignore[attr-defined]
