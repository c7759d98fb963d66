"""The engine's configuration: the arguments (`EngineArgs`), and the decisions with their reasons (`EngineConfig`).

Owns the defaults. Every value is resolved once and then frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llm.base.checks import refuse
from llm.config.compilation import CompilationConfig as CompilationConfig
from llm.config.compilation import CompilationMode as CompilationMode
from llm.config.parts import ConfigForPlugins
from llm.config.parts import DeviceConfig as DeviceConfig
from llm.config.parts import LoadConfig as LoadConfig
from llm.config.parts import LoRAConfig as LoRAConfig
from llm.config.parts import ObservabilityConfig as ObservabilityConfig
from llm.config.parts import OffloadConfig as OffloadConfig
from llm.config.parts import ParallelConfig as ParallelConfig
from llm.config.parts import ReasoningConfig as ReasoningConfig
from llm.config.parts import StructuredOutputsConfig as StructuredOutputsConfig
from llm.config.speculative import SpeculativeConfig as SpeculativeConfig
from llm.pooling_params import PoolerConfig as PoolerConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EMBEDDED_MODEL = Path(__file__).parents[1] / "assets" / "tiny"
DEFAULT_MAX_NUM_SEQS = 256
# Enough tokens for a GEMM to run at full speed. The temporaries of larger steps are too large for malloc's heap: each
# operation maps new memory, and the page faults cost more than the larger step saves.
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_LORAS = 4
DEFAULT_MAX_LORA_RANK = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of the KV cache: quantized too, under vLLM's names.
CACHE_DTYPES = {
    **DTYPES,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
}
# vLLM's old `task` -> (runner, convert).
TASKS = {
    "auto": ("auto", "auto"),
    "generate": ("generate", "none"),
    **dict.fromkeys(("embed", "embedding"), ("pooling", "embed")),
    "classify": ("pooling", "classify"),
    **dict.fromkeys(("score", "reward"), ("pooling", "auto")),
}
GIB = 1 << 30

# For these, None means the default.
_FLAGS_OR_NONE = ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager")
_FLAGS = (*_FLAGS_OR_NONE, "skip_tokenizer_init", "use_tqdm_on_load", "disable_log_stats", "enable_lora")


@dataclass(frozen=True)
class EngineArgs:
    """The user's arguments, under vLLM's names; None: not given. `LLM.__init__` documents each."""

    model: str | Path
    tokenizer: str | Path | None = None
    dtype: str | torch.dtype = "auto"
    quantization: str | Mapping[str, object] | None = None
    calibration: Sequence[str] | None = None
    requantize: str | Mapping[str, object] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str | torch.dtype = "auto"
    enable_prefix_caching: bool = True
    mamba_block_size: int | None = None
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    seed: int | None = 0
    revision: str | None = None
    hf_overrides: Mapping[str, object] | Callable[[PretrainedConfig], PretrainedConfig] | None = None
    load_format: str = "auto"
    model_impl: str = "auto"
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    use_tqdm_on_load: bool = True
    disable_log_stats: bool = True
    max_logprobs: int = -1
    device: str = "auto"
    generation_config: str | Path = "auto"
    override_generation_config: Mapping[str, object] | None = None
    compilation_config: object = None  # parsed by `CompilationConfig.of`
    enforce_eager: bool = False
    logprobs_mode: str = "raw_logprobs"
    num_threads: int | None = None
    offload_weights: bool | None = None
    logits_processors: object = None  # loaded by `llm.sampling.logits_processors.loading`
    reasoning_config: object = None  # read by `ReasoningConfig.of`
    speculative_config: object = "auto"  # read by `SpeculativeConfig.of`
    runner: str = "auto"
    convert: str = "auto"
    task: str | None = None  # said by `runner` and `convert`, and then None
    pooler_config: object = None  # read by `PoolerConfig.of`
    enable_lora: bool = False
    max_loras: int = DEFAULT_MAX_LORAS
    max_lora_rank: int = DEFAULT_MAX_LORA_RANK
    merge_lora: str | Path | None = None
    profiler_config: object = None  # read by `ProfilerConfig.of`
    prefix_cache: str | Path | None = None

    @classmethod
    def from_user(cls, **given: Any) -> EngineArgs:
        """From `LLM`'s arguments; maps the alternative spellings of default values."""
        if given.get("max_model_len") == -1:
            given["max_model_len"] = None
        if given.get("chat_template") is not None:
            given["chat_template"] = str(given["chat_template"])
        unsaid = [name for name in _FLAGS_OR_NONE if given.get(name) is None]
        return cls(**{name: value for name, value in given.items() if name not in unsaid})

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "mamba_block_size",
            "kv_cache_memory_bytes",
            "num_threads",
            "max_loras",
            "max_lora_rank",
        ):
            check_positive(name, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                refuse(name, getattr(self, name), "True or False")
        if not isinstance(self.offload_weights, bool | None):
            refuse("offload_weights", self.offload_weights, "True, False, or None: where memory has no room for them")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            refuse("seed", self.seed, "an integer of at least 0, or None")
        if not isinstance(self.hf_overrides, Mapping | None) and not callable(self.hf_overrides):
            refuse("hf_overrides", self.hf_overrides, "a dict of config.json's keys, a callable, or None")
        if not isinstance(self.override_generation_config, Mapping | None):
            right = "a dict of generation_config.json's keys, or None"
            refuse("override_generation_config", self.override_generation_config, right)
        if not isinstance(self.generation_config, str | Path):
            refuse("generation_config", self.generation_config, "'auto', 'vllm' or a folder")
        ReasoningConfig.of(self.reasoning_config)
        SpeculativeConfig.of(self.speculative_config)
        PoolerConfig.of(self.pooler_config)
        if self.task is not None:
            self._take_task(self.task)
        choices: dict[str, tuple[str, ...]] = {"load_format": ("auto", "safetensors", "dummy")}
        choices["model_impl"] = ("auto", "native", "vllm", "transformers")
        choices["scheduling_policy"] = ("fcfs", "priority")
        choices["runner"] = ("auto", "generate", "pooling")
        choices["convert"] = ("auto", "none", "embed", "classify")
        choices["logprobs_mode"] = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                refuse(name, getattr(self, name), " or ".join(map(repr, allowed)))
        if isinstance(self.max_logprobs, bool) or not isinstance(self.max_logprobs, int) or self.max_logprobs < -1:
            refuse("max_logprobs", self.max_logprobs, "an integer of at least -1 (-1: no limit)")

    def _take_task(self, task: object) -> None:
        """Say it by `runner` and `convert`, as vLLM did before it dropped it."""
        if not isinstance(task, str) or task not in TASKS:
            refuse("task", task, f"{' or '.join(map(repr, TASKS))}, or None")
        for name, meant in zip(("runner", "convert"), TASKS[task], strict=True):
            if "auto" not in (meant, getattr(self, name)) and getattr(self, name) != meant:
                refuse(name, getattr(self, name), f"{meant!r}, or left out, with task={task!r}")
            if meant != "auto":
                object.__setattr__(self, name, meant)
        object.__setattr__(self, "task", None)

    def why(self, name: str) -> str:
        """The reason of an argument that is used as given: "default" or "asked for"."""
        default = {item.name: item.default for item in fields(self)}[name]
        return "default" if getattr(self, name) == default else "asked for"


@dataclass(frozen=True)
class ModelConfig:
    """The model.

    Attributes:
        dtype: of activations.
        weight_dtype: of stored weights.
        embedding_size: channels of a vector of `LLM.embed`, or else of hidden states.
        architectures: as config.json has them.
        pooler_config: what a pooling model makes of hidden states, from arguments and files; None: it generates.
    """

    model: str
    tokenizer: str
    model_type: str
    architecture: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    quantization: str | None
    load_format: str
    max_logprobs: int
    seed: int
    revision: str | None = None
    logprobs_mode: str = "raw_logprobs"
    model_impl: str = "native"
    runner_type: str = "generate"
    convert_type: str = "none"
    # Facts about the checkpoint, not choices: `print(llm.config)` leaves them out.
    embedding_size: int = field(default=0, repr=False)
    architectures: tuple[str, ...] = field(default=(), repr=False)
    pooler_config: PoolerConfig | None = field(default=None, repr=False)

    # Read by logits processors that were written for vLLM.
    trust_remote_code = False
    tokenizer_mode = "auto"
    tokenizer_revision = None
    is_encoder_decoder = False
    is_multimodal_model = False

    @property
    def served_model_name(self) -> str:
        return self.model

    def get_vocab_size(self) -> int:
        return self.vocab_size

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)

    def get_num_layers(self, parallel_config: object = None) -> int:
        """All of them: there is one stage."""
        return int(self.hf_text_config.num_hidden_layers)

    def get_head_size(self) -> int:
        text = self.hf_text_config
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)

    @property
    def hf_config(self) -> PretrainedConfig:
        """The model's config.json as transformers reads it, unchanged by `hf_overrides`; imports transformers."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(
            self.model, revision=self.revision, local_files_only=True, trust_remote_code=False
        )

    @property
    def hf_text_config(self) -> PretrainedConfig:
        """The part of `hf_config` that describes the language model; all of it for a text-only model."""
        return self.hf_config.get_text_config()


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache.

    Attributes:
        num_blocks: allocatable blocks per KV cache group.
        num_state_slots: how many requests can have recurrent states in memory, 0 for a model without such states.
        num_state_snapshots: how many copies of recurrent states after prefixes there can be, for prefix caching.
        mamba_block_size: tokens between two of them, a multiple of `block_size`.
    """

    block_size: int
    num_blocks: int
    kv_cache_memory_bytes: int
    kv_cache_dtype: torch.dtype
    enable_prefix_caching: bool
    num_state_slots: int = 0
    num_state_snapshots: int = 0
    mamba_block_size: int = 0

    @property
    def num_gpu_blocks(self) -> int:
        """vLLM's name of `num_blocks`."""
        return self.num_blocks


@dataclass(frozen=True)
class SchedulerConfig:
    """`scheduling_policy`: "fcfs": first come, first served; "priority": the lowest `priority` of a request first."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"

    # Read by scripts that were written for vLLM.
    async_scheduling = False

    @property
    def policy(self) -> str:
        """vLLM's name of `scheduling_policy`."""
        return self.scheduling_policy


@dataclass(frozen=True)
class EngineConfig(ConfigForPlugins):
    """Every decision. `print(llm.config)` shows each value with its reason.

    Attributes:
        invariant: True if answers are bit-identical however requests are batched.
        reasons: field name -> why it has its value.
        num_threads: threads that compute; None: `torch.get_num_threads()` at each step.
        reasoning_config: the texts around reasoning where they were given.
        speculative_config: what drafts tokens; None: nothing does.
        lora_config: adapters that rows can have; None: `enable_lora` is off.
        quant_config: the `llm.quantization.base.QuantizationConfig` of the weights, None when they are floats.
    """

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    device: str
    invariant: bool
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    reasons: dict[str, str] = field(default_factory=dict)
    quant_config: Any = None
    num_threads: int | None = None
    reasoning_config: ReasoningConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    offload_config: OffloadConfig = field(default_factory=OffloadConfig)
    lora_config: LoRAConfig | None = None

    def __repr__(self) -> str:
        lines = [self._line("device", self.device), self._line("invariant", self.invariant)]
        lines.append(self._line("num_threads", self.num_threads or torch.get_num_threads()))
        for part in (self.model_config, self.cache_config, self.scheduler_config, self.compilation_config):
            for item in (item for item in fields(part) if item.repr):
                lines.append(self._line(item.name, getattr(part, item.name)))
                if item.name == "quantization" and self.quant_config is not None:
                    types = self.quant_config.computed_with()
                    lines += [f"  {name:<22} {text}" for name, text in types.items()]
        lines.append(self._line("speculative_config", self.speculative_config or "off"))
        shown = fields(self.offload_config) if self.offload_config.offload_weights else fields(self.offload_config)[:1]
        lines += [self._line(item.name, getattr(self.offload_config, item.name)) for item in shown]
        if self.lora_config is None:
            lines.append(self._line("lora_config", "off"))
        else:
            lines += [self._line(item.name, getattr(self.lora_config, item.name)) for item in fields(self.lora_config)]
        return "\n".join(lines)

    def _line(self, name: str, value: object) -> str:
        shown = f"{value / GIB:.3f} GiB" if isinstance(value, int) and name.endswith("_bytes") else _shown(value)
        reason = self.reasons.get(name)
        return f"{name:<24} {shown}" + (f"  ({reason})" if reason else "")


# vLLM's name, which logits processors import.
VllmConfig = EngineConfig


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "[]"
    return value.name if isinstance(value, CompilationMode) else str(value).removeprefix("torch.")


def check_positive(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        refuse(name, value, "an integer of at least 1, or None")
