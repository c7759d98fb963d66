"""The engine's configuration: what was asked (`EngineArgs`), what was decided (`EngineConfig`), and why.

Owns defaults and the decisions that need only numbers (memory, lengths, batch sizes). Everything is resolved once,
frozen, and carries its reason; nothing is changed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from llm.compilation import CompilationConfig as CompilationConfig
from llm.compilation import CompilationMode as CompilationMode
from llm.config_parts import ConfigForPlugins
from llm.config_parts import DeviceConfig as DeviceConfig
from llm.config_parts import LoadConfig as LoadConfig
from llm.config_parts import ObservabilityConfig as ObservabilityConfig
from llm.config_parts import ParallelConfig as ParallelConfig
from llm.config_parts import StructuredOutputsConfig as StructuredOutputsConfig
from llm.errors import OutOfMemoryError, ValidationError

DEFAULT_MAX_NUM_SEQS = 256
# Enough rows for a GEMM to run at full speed. The temporaries of larger steps are too large for the heap: the C library
# maps them anew for every operation, and fetching their pages costs more than the larger step saves.
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
DEFAULT_BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB = 1 << 30
_BYTES_PER_ID = 4


@dataclass(frozen=True)
class EngineArgs:
    """What the user asked, under vLLM's names; None: not said. `LLM.__init__` documents each."""

    model: str | Path
    tokenizer: str | Path | None = None
    dtype: Any = "auto"
    quantization: Any = None
    calibration: Sequence[str] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: Any = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    seed: int | None = 0
    revision: str | None = None
    hf_overrides: Mapping[str, Any] | None = None
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    use_tqdm_on_load: bool = True
    max_logprobs: int = -1
    device: str = "auto"
    generation_config: str = "auto"
    compilation_config: Any = None
    logprobs_mode: str = "raw_logprobs"
    logits_processors: Any = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes"):
            check_positive(name, getattr(self, name))
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "skip_tokenizer_init", "use_tqdm_on_load"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "True or False")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise _invalid("seed", self.seed, "an integer of at least 0, or None")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise _invalid("hf_overrides", self.hf_overrides, "a dict of config.json's keys, or None")
        choices = {"load_format": ("auto", "safetensors", "dummy"), "generation_config": ("auto", "vllm")}
        choices["logprobs_mode"] = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise _invalid(name, getattr(self, name), " or ".join(map(repr, allowed)))
        if isinstance(self.max_logprobs, bool) or not isinstance(self.max_logprobs, int) or self.max_logprobs < -1:
            raise _invalid("max_logprobs", self.max_logprobs, "an integer of at least -1 (-1: no limit)")

    def why(self, name: str) -> str:
        """The reason of an argument that is taken as it is."""
        default = {item.name: item.default for item in fields(self)}[name]
        return "default" if getattr(self, name) == default else "asked for"


@dataclass(frozen=True)
class ModelConfig:
    """`dtype` is the type of activations; `weight_dtype` that of stored weights."""

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

    # What logits processors written for vLLM ask of it.
    trust_remote_code = False
    tokenizer_mode = "auto"
    tokenizer_revision = None
    runner_type = "generate"
    is_encoder_decoder = False
    is_multimodal_model = False

    def get_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def hf_config(self) -> Any:
        """transformers' object of the model's config.json as it stands there; imports transformers."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(
            self.model, revision=self.revision, local_files_only=True, trust_remote_code=False
        )

    @property
    def hf_text_config(self) -> Any:
        """Of `hf_config` the part that describes the language model: all of it, where there is nothing else."""
        return self.hf_config.get_text_config()


@dataclass(frozen=True)
class CacheConfig:
    """`num_blocks` counts the blocks of one KV group that can be handed out."""

    block_size: int
    num_blocks: int
    kv_cache_memory_bytes: int
    kv_cache_dtype: torch.dtype
    enable_prefix_caching: bool


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True


@dataclass(frozen=True)
class EngineConfig(ConfigForPlugins):
    """Everything that was decided. `print(llm.config)` shows each value with its reason.

    Attributes:
        invariant: whether answers are bit-identical however requests were batched.
        reasons: field name -> why it has its value.
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

    def __repr__(self) -> str:
        lines = [self._line("device", self.device), self._line("invariant", self.invariant)]
        for part in (self.model_config, self.cache_config, self.scheduler_config, self.compilation_config):
            lines += [self._line(item.name, getattr(part, item.name)) for item in fields(part)]
        return "\n".join(lines)

    def _line(self, name: str, value: Any) -> str:
        shown = f"{value / GIB:.3f} GiB" if name.endswith("_bytes") else _shown(value)
        reason = self.reasons.get(name)
        return f"{name:<24} {shown}" + (f"  ({reason})" if reason else "")


# Under this name a logits processor written for vLLM imports it.
VllmConfig = EngineConfig


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "[]"
    return value.name if isinstance(value, CompilationMode) else str(value).removeprefix("torch.")


@dataclass(frozen=True)
class MemoryPlan:
    """What the KV budget allows. `num_blocks` as in `CacheConfig`; `reasons` by field name."""

    max_model_len: int
    num_blocks: int
    kv_cache_memory_bytes: int
    reasons: dict[str, str]


def plan_memory(
    *,
    bytes_per_token: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int | None,
    longest: int,
    requested_bytes: int | None,
    free_bytes: int,
) -> MemoryPlan:
    """Choose the KV budget and, when `max_model_len` is None, the longest sequence that fits it.

    Args:
        bytes_per_token: of all layers together.
        longest: the most positions the model was made for.
        requested_bytes: `kv_cache_memory_bytes`, or None.
        free_bytes: what is free once the weights are loaded.

    Raises:
        ValidationError: `max_model_len` is beyond what the model was made for.
        OutOfMemoryError: not even one sequence fits; says what would.
    """
    if max_model_len is not None and max_model_len > longest:
        raise _invalid("max_model_len", max_model_len, f"at most {longest}, what the model was made for")
    block_bytes = bytes_per_token * block_size
    per_sequence = -(-(max_model_len or longest) // block_size)
    useful = max_num_seqs * per_sequence * block_bytes
    budget, reason = _kv_budget(requested_bytes, useful, free_bytes)
    num_blocks = min(budget, useful) // block_bytes
    least = 1 if max_model_len is None else per_sequence
    if num_blocks < least:
        what = f"one block ({block_size} tokens)" if max_model_len is None else f"max_model_len={max_model_len}"
        holds = least * block_bytes
        within_reach = requested_bytes is not None or holds <= free_bytes
        smaller = ", or lower block_size" if block_size > DEFAULT_BLOCK_SIZE and max_model_len is None else ""
        raise OutOfMemoryError(
            f"a sequence of {what} needs {holds} bytes of KV cache and the budget is {budget} ({reason}); "
            f"{_what_would_fit(num_blocks * block_size, holds if within_reach else None)}{smaller}."
        )
    reasons = {
        "kv_cache_memory_bytes": f"{reason}; memory is touched when used",
        "num_blocks": f"{block_bytes:,} bytes each",
    }
    if max_model_len is not None:
        reasons["max_model_len"] = "asked for"
        return MemoryPlan(max_model_len, num_blocks, num_blocks * block_bytes, reasons)
    fitted = min(longest, num_blocks * block_size)
    reasons["max_model_len"] = (
        "what the model was made for"
        if fitted == longest
        else f"the KV budget holds no longer sequence; the model was made for {longest}"
    )
    return MemoryPlan(fitted, num_blocks, num_blocks * block_bytes, reasons)


def _kv_budget(requested: int | None, useful: int, free: int) -> tuple[int, str]:
    if requested is not None:
        return requested, "asked for"
    if useful <= free // 2:
        return useful, "all that max_num_seqs sequences of max_model_len can use"
    return free // 2, f"half of the {free / GIB:.2f} GiB that are free beside the weights"


def _what_would_fit(tokens: int, holds: int | None) -> str:
    """`tokens`: the longest sequence that fits; `holds`: the budget that would be enough, None: more than is free."""
    ways = [f"max_model_len={tokens} would fit"] if tokens else []
    ways.append("free memory" if holds is None else f"kv_cache_memory_bytes={holds} would be enough")
    return ", or ".join(ways)


def plan_scheduler(args: EngineArgs, max_model_len: int, free_bytes: int) -> tuple[SchedulerConfig, dict[str, str]]:
    """Batch sizes and their reasons.

    Raises:
        ValidationError: whole prompts would not fit a step.
        OutOfMemoryError: the token ids of so many rows, which are kept, would not fit `free_bytes`.
    """
    row_bytes = _BYTES_PER_ID * max_model_len
    if args.max_num_seqs is not None and args.max_num_seqs * row_bytes > free_bytes:
        raise OutOfMemoryError(
            f"max_num_seqs={args.max_num_seqs} rows of {max_model_len} token ids need "
            f"{args.max_num_seqs * row_bytes} bytes and {free_bytes} are free; lower it."
        )
    reasons = {name: args.why(name) for name in ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill")}
    tokens = args.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    if not args.enable_chunked_prefill and tokens < max_model_len:
        if args.max_num_batched_tokens is not None:
            right = f"at least max_model_len ({max_model_len}) when enable_chunked_prefill=False"
            raise _invalid("max_num_batched_tokens", tokens, right)
        tokens = max_model_len
        reasons["max_num_batched_tokens"] = "max_model_len, for enable_chunked_prefill=False"
    config = SchedulerConfig(args.max_num_seqs or DEFAULT_MAX_NUM_SEQS, tokens, args.enable_chunked_prefill)
    return config, reasons


def resolve_dtype(
    name: str, value: Any, auto: torch.dtype, allowed: tuple[torch.dtype, ...]
) -> tuple[torch.dtype, str]:
    """A dtype given as "auto", a name or a torch.dtype -> (dtype, reason); raises `ValidationError`."""
    if value == "auto":
        return auto, "auto"
    known = {**DTYPES, "float": torch.float32, "half": torch.float16}
    dtype = value if isinstance(value, torch.dtype) else known.get(value)
    if dtype not in allowed:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in allowed))
        raise _invalid(name, value, f"'auto' or one of {names}")
    return dtype, "asked for"


def check_positive(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise _invalid(name, value, "an integer of at least 1, or None")


def _invalid(name: str, value: Any, right: str) -> ValidationError:
    return ValidationError(f"{name} must be {right}, got {value!r}.", parameter=name, value=value)
