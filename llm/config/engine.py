"""The engine's configuration: what was asked for (`LLMArgs`), and what was decided, with reasons (`EngineConfig`).

`VllmConfig` and its parts have vLLM's names, for plugins and logits processors that read them; parts whose values are
fixed here say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llm.base.checks import check_integer, refuse
from llm.config.compilation import CompilationConfig as CompilationConfig
from llm.config.compilation import CompilationMode as CompilationMode
from llm.errors import ValidationError, nearest
from llm.pooling_params import PoolerConfig as PoolerConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
    """A name for the annotations of operations written for vLLM; nothing here has one."""


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
    """The texts around a model's reasoning, for `thinking_token_budget`; "": the tokens `<think>` and `</think>`.

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


# --- Speculation. ---

METHODS = ("ngram", "draft_model", "mtp", "eagle3")
# vLLM's older names, one per family.
_ALIASES = {f"{family}_mtp": "mtp" for family in ("deepseek", "glm4_moe", "qwen3_next", "qwen3_5")}
_WITH_MODEL = ("draft_model", "eagle3")
# A step with eight tokens of a row reads the weights once, as one with a single token does.
DEFAULT_NUM_SPECULATIVE_TOKENS = 7
MOST_SPECULATIVE_TOKENS = 63  # with the row's last token, as many as a recorded step has
# vLLM's keys that ask for nothing at these values -> what to do instead.
_HARMLESS: dict[str, tuple[tuple[object, ...], str]] = {
    "draft_tensor_parallel_size": ((None, 1), "a model runs on one device"),
    "disable_padded_drafter_batch": ((None, False, True), ""),
    "enforce_eager": ((None, False, True), ""),
    "rejection_sample_method": ((None, "strict"), "drafts are compared with the token that is drawn, which is exact"),
    "revision": ((None,), "pass a local folder as model"),
    "moe_backend": ((None, "auto"), "the platform chooses the kernels"),
    "attention_backend": ((None, "auto"), "the platform chooses the kernels"),
}
_ELSEWHERE = {
    "eagle": "heads of EAGLE 1 and 2 are not read",
    "medusa": "Medusa heads are not read",
    "suffix": "method='ngram' finds the longest repeated suffix",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """What drafts tokens for the model to verify. Answers do not depend on it.

    Attributes:
        method: "ngram": the tokens that followed the longest earlier occurrence of the last tokens, and the tokens that
            a grammar forces. "draft_model": a smaller model with the same tokenizer. "mtp": the layer for multi-token
            prediction of the model's own checkpoint; of several the first. "eagle3": an EAGLE-3 head that was trained
            for the model.
        num_speculative_tokens: most drafts of a request in a step. Fewer are drafted where the times of the steps so
            far and the request's accepted drafts say that more would cost more than they give.
        prompt_lookup_min: shortest repeated suffix that is continued.
        prompt_lookup_max: None; accepted from vLLM's users: the longest repeated suffix is at least as long.
        model: the draft model or the EAGLE-3 head, as in `LLM`.
        quantization: of that, as in `LLM`.
        is_default: True if the user did not choose.
    """

    method: str = "ngram"
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    prompt_lookup_min: int = 2
    prompt_lookup_max: int | None = None
    model: str | None = None
    quantization: str | None = None
    is_default: bool = False

    @property
    def has_head(self) -> bool:
        """A head reads the target's hidden states."""
        return self.method in ("mtp", "eagle3")

    def __str__(self) -> str:
        who = self.method if self.model is None else f"{self.method} {self.model}"
        return f"{who}, at most {self.num_speculative_tokens} drafts"

    @classmethod
    def of(cls, given: object) -> SpeculativeConfig | None:
        """From what the user passed: "auto", None, a dict or a `SpeculativeConfig`; None: nothing is drafted."""
        if isinstance(given, SpeculativeConfig):
            return given
        if given is None or given == {}:
            return None
        if given == "auto":
            return cls(is_default=True)
        if not isinstance(given, Mapping):
            refuse("speculative_config", given, "'auto', None, or a dict such as {'method': 'ngram'}")
        return cls._read({str(key): value for key, value in given.items()})

    @classmethod
    def _read(cls, given: dict[str, Any]) -> SpeculativeConfig:
        known = [item.name for item in fields(cls) if item.name != "is_default"]
        for name in [name for name in given if name not in known]:
            if name not in _HARMLESS:
                right = f"one of {', '.join(known)}.{nearest(name, known)}"
                raise ValidationError(f"speculative_config has the key {name!r}; it takes {right}", value=name)
            harmless, instead = _HARMLESS[name]
            if given.pop(name) not in harmless:
                raise ValidationError(f"speculative_config[{name!r}] is refused: {instead}.", value=name)
        if given.get("model") in ("ngram", "[ngram]") and given.get("method", "ngram") == "ngram":
            given["model"], given["method"] = None, "ngram"  # vLLM's older name of the method
        given.setdefault("method", "draft_model" if given.get("model") is not None else "ngram")
        given["method"] = _ALIASES.get(str(given["method"]), given["method"])
        config = cls(**given)
        config._check()
        return config

    def _check(self) -> None:
        if self.method not in METHODS:
            instead = _ELSEWHERE.get(str(self.method), "it is unknown")
            choice = ", ".join(map(repr, METHODS[:-1])) + f" or {METHODS[-1]!r}"
            raise ValidationError(f"speculative_config method={self.method!r}: {instead}; use {choice}.")
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_SPECULATIVE_TOKENS)
        check_integer("prompt_lookup_min", self.prompt_lookup_min, 1)
        if self.prompt_lookup_max is not None:
            check_integer("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min)
        if (self.method in _WITH_MODEL) != (self.model is not None):
            right = "the folder of what drafts, with method='draft_model' or 'eagle3' only"
            refuse("speculative_config['model']", self.model, right)


# --- Arguments of an engine. ---

EMBEDDED_MODEL = Path(__file__).parents[1] / "assets" / "tiny"
DEFAULT_MAX_NUM_SEQS = 256
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
class LLMArgs:
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
    async_scheduling: bool | None = None
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
    data_parallel_size: int = 1
    devices: object = None  # read by `llm.replicas.placement`
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None  # read by `llm.replicas.placement`
    offload_weights: bool | None = None
    logits_processors: object = None  # loaded by `llm.sampling.logits_processors.pipeline`
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
    limit_mm_per_prompt: Mapping[str, object] | None = None  # read by `llm.text.images.MediaLimits`
    allowed_local_media_path: str | Path | None = None
    mm_processor_kwargs: Mapping[str, object] | None = None

    @classmethod
    def from_user(cls, **given: Any) -> LLMArgs:
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
            "tensor_parallel_size",
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
        if not isinstance(self.mm_processor_kwargs, Mapping | None):
            refuse(
                "mm_processor_kwargs", self.mm_processor_kwargs, "a dict of the image processor's arguments, or None"
            )
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
        choices: dict[str, tuple[object, ...]] = {"load_format": ("auto", "safetensors", "dummy")}
        choices["model_impl"] = ("auto", "native", "vllm", "transformers")
        choices["scheduling_policy"] = ("fcfs", "priority")
        choices["async_scheduling"] = (None, False, True)
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
        sampling_defaults: what generation_config.json and `override_generation_config` say of SamplingParams' fields.
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
    sampling_defaults: dict[str, object] = field(default_factory=dict, repr=False)

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

    def get_diff_sampling_param(self) -> dict[str, object]:
        """vLLM's name for `sampling_defaults`; a copy."""
        return dict(self.sampling_defaults)

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
    """`scheduling_policy`: "fcfs": first come, first served; "priority": the lowest `priority` of a request first.
    `async_scheduling`: a device starts the next step before the host has read this one's tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = False

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
        replicas: how many processes have the whole model, with this config each; 0: it is in this process.
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
    replicas: int = 0
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)

    def __repr__(self) -> str:
        lines = [self._line("device", self.device), self._line("invariant", self.invariant)]
        lines.append(self._line("num_threads", self.num_threads or torch.get_num_threads()))
        if self.replicas:
            lines.append(self._line("replicas", self.replicas))
        lines.append(self._line("tensor_parallel_size", self.parallel_config.tensor_parallel_size))
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
