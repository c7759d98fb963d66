"""class LLM: construction, its end, and the lock that serialises calls.

Owns one engine. Thin: it validates and delegates. Its other methods are in the other files of this folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from llm.api.access import Access
from llm.api.chat import Chat
from llm.api.choices import Choices
from llm.api.generation import BatchCall, CallOptions, Generation
from llm.api.iteration import Iteration
from llm.api.jobs import Jobs
from llm.api.planning import Planning
from llm.api.pooling import Pooling
from llm.api.prefix_caching import PrefixCaching, check_prefix_cache
from llm.api.processors import Processors
from llm.api.profiling import ProfilerConfig, Profiling
from llm.api.ranking import Ranking
from llm.api.reports import Reports
from llm.api.scoring import Scoring
from llm.api.streaming import Streaming
from llm.api.verifying import Verifying
from llm.base.bar import UseTqdm
from llm.base.checks import check_flag
from llm.base.fair_lock import FairLock
from llm.base.forks import renew, tell_of_forks
from llm.base.suggestions import METHODS
from llm.config import compilation, env
from llm.config.arguments import check_arguments
from llm.config.engine import (
    DEFAULT_MAX_LORA_RANK,
    DEFAULT_MAX_LORAS,
    EMBEDDED_MODEL,
    EngineArgs,
    EngineConfig,
    ModelConfig,
    ReasoningConfig,
    SpeculativeConfig,
)
from llm.engine.engine import Engine
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState
from llm.engine.preprocess import Preprocessor
from llm.engine.rows import AnyRow
from llm.errors import (
    EngineBusyError,
    EngineClosedError,
    ValidationError,
    nearest,
)
from llm.loading.overrides import Overrides
from llm.logger import init_logger, set_log_level
from llm.outputs import RequestOutput
from llm.sampling_params import SamplingParams
from llm.setup.build import BuiltEngine, build_engine

if TYPE_CHECKING:
    import torch

    from llm.api.llm_engine import LLMEngine

logger = init_logger("llm")
# Of what is local in `LLM.__init__`, all but its settings.
_NO_SETTINGS = ("self", "verbose", "kwargs")


class LLM(
    Generation,
    Iteration,
    Jobs,
    Chat,
    Scoring,
    Choices,
    Streaming,
    Pooling,
    Ranking,
    Processors,
    Planning,
    PrefixCaching,
    Reports,
    Verifying,
    Profiling,
    Access,
):
    """A language model in this process.

    Args:
        model: a folder in Hugging Face's layout, or a hub name; default: the small embedded model.
        tokenizer: folder or hub name of another tokenizer.
        dtype: "auto" or "float32": weights keep their stored type; "bfloat16" or "float16" ("half"): matrices are
            converted to it. A CPU computes in float32, except that with "bfloat16" a processor with AMX rounds the
            inputs of GEMMs to bfloat16: prefill and batches then take two thirds of the time.
        quantization: "w8a8", "w4a8", "w8a16", "w4a16", "fp8", "mxfp4", "nf4", or GGUF's "q8_0", "q4_0", "q4_k":
            quantize the weights while they are loaded; a dict chooses per layer (`llm.quantization.configs.online`).
            None: as the checkpoint says. The format of a quantized checkpoint may be named: "compressed-tensors",
            "gptq", "awq" and others.
        calibration: texts that are first run through the unquantized model to collect statistics of each layer's
            inputs. They improve 4-bit weights, and "w8a8_static" needs them.
        requantize: as `quantization`, for a checkpoint that is quantized already (GGUF, GPTQ, AWQ and others): "w4a8"
            multiplies int8 activations, which is faster. `quantization_report` says how far the weights move.
        max_model_len: most tokens of prompt and output together; None: as many as model and memory allow.
        max_num_seqs: most requests computed in one step.
        max_num_batched_tokens: most tokens computed in one step.
        block_size: tokens per KV cache block.
        kv_cache_memory_bytes: size of the KV cache; None: what is useful, at most half of the free memory.
        kv_cache_dtype: "auto" (dtype if given, else the weights'), "float32", "bfloat16", "float16"; or "int8" or
            "fp8_e4m3" ("fp8"), with a scale per token and KV head: about twice the context in the same memory.
        enable_prefix_caching: prompts with a common prefix share its KV cache.
        mamba_block_size: a prefix of a model with recurrent states is shared up to a multiple of so many tokens. None
            chooses by what a copy of the states takes.
        enable_chunked_prefill: long prompts are computed over several steps.
        scheduling_policy: "fcfs": requests run in the order in which they come; "priority": those of the lowest
            `priority` first, and these are the last to be recomputed when memory is short. No answer depends on it.
        seed: requests without a seed get one derived from this; None: from the operating system.
        revision: of a hub model.
        hf_overrides: keys of config.json to replace; None as a value removes one. Or a callable that takes the config,
            as transformers reads it, and returns it changed.
        load_format: "auto" and "safetensors" read safetensors; "dummy" makes random weights, for benchmarks.
        model_impl: "native": a class of this package, or a registered one; "transformers": the modeling code of the
            installed transformers, with the layers and the KV cache of this package; "auto": native if there is one.
        skip_tokenizer_init: no tokenizer; prompts are token ids and outputs have no text.
        chat_template: replaces the model's; text, or the path of a file.
        use_tqdm_on_load: show a bar if loading takes more than two seconds.
        max_logprobs: most logprobs that a request may set; -1: no limit.
        logprobs_mode: what logprobs report: the model's "raw_logprobs" or "raw_logits", or "processed_logprobs" or
            "processed_logits", after penalties, processors, temperature and cuts.
        num_threads: threads that compute, at most the processors this process may use; None:
            `torch.get_num_threads()` at each step.
        offload_weights: weights that memory has no room for are kept in a file and read when they are used, which is
            slow; None: if they do not fit; True: all of them; False: refuse what does not fit.
            The file is in LLM_OFFLOAD_FOLDER, by default in the cache folder. `llm.config` says what is where.
        device: "auto", "cpu", or the name of a platform plugin.
        enforce_eager: nothing is compiled, whatever `compilation_config` says.
        compilation_config: which operations run their kernels and which plain PyTorch: a dict such as
            `{"custom_ops": ["none", "+rms_norm"]}`, or a mode; see `llm.config.compilation.CompilationConfig`.
        logits_processors: `LogitsProcessor` classes, or "module:Class" strings that name them; those of installed
            packages (entry points in `llm.logits_processors`) are loaded before them.
        generation_config: "auto": generation_config.json has the defaults if `generate` gets no params; "vllm": neutral
            defaults. Or a folder with another generation_config.json.
        override_generation_config: its keys to replace, `{"temperature": 0.5}`.
        speculative_config: what drafts tokens that the model then verifies, several in a step; answers do not depend on
            it. `{"method": "ngram"}`: repeated text and forced tokens of a grammar; "auto": the same, but nothing where
            drafts could change an answer; `{"model": folder}`: a smaller model with the same tokenizer; None: nothing.
            See `llm.config.engine.SpeculativeConfig`.
        reasoning_config: `{"reasoning_start_str": ..., "reasoning_end_str": ...}`, the texts around reasoning where
            they are not the tokens <think> and </think>; for `thinking_token_budget`.
        runner: "generate" or "pooling": text is generated, or hidden states become vectors, classes or scores (`embed`,
            `classify`, `score`); "auto": what the checkpoint is for.
        convert: of a pooling model: "embed" or "classify", whatever head the checkpoint has; "auto": as it says.
            vLLM's old `task` says both: "generate", "embed", "classify"; "score" and "reward": runner="pooling".
        pooler_config: `{"pooling_type": "MEAN", "normalize": True, "dimensions": 256}` in place of what the files say;
            see `llm.config.PoolerConfig`.
        enable_lora: rows can have adapters (LoRA, in PEFT's layout): `lora_request=LoRARequest(name, number, folder)`
            of a call, or a list with one or None per row. They are loaded when they are first used.
        max_loras: how many adapters are in memory at a time; rows with further ones wait, least recently used ones go.
        max_lora_rank: the largest rank of an adapter.
        merge_lora: the folder of an adapter that is added to the weights while they are loaded, before `quantization`.
        profiler_config: `{"profiler": "torch", "torch_profiler_dir": folder}`, for `start_profile` and `stop_profile`.
        prefix_cache: a folder of `save_prefix_cache`, of this model and these settings: what it has of a prompt is not
            computed again. All weights are read once more, to compare their fingerprint.
        verbose: log all decisions and the arguments that have no effect here.
        **kwargs: vLLM's other arguments; `llm.config.arguments.ARGUMENTS` says how each is handled.

    Attributes:
        config: all decisions with their reasons; `print(llm.config)`.
        startup: seconds per phase of start-up.

    Raises:
        ValidationError: an argument is wrong. CheckpointError: the model cannot be loaded. UnsupportedModelError: its
        architecture is unknown. OutOfMemoryError: the KV cache cannot hold one sequence.
    """

    def __init__(
        self,
        model: str | Path = EMBEDDED_MODEL,
        *,
        tokenizer: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        quantization: str | Mapping[str, object] | None = None,
        calibration: Sequence[str] | None = None,
        requantize: str | Mapping[str, object] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_dtype: str | torch.dtype = "auto",
        enable_prefix_caching: bool | None = True,
        mamba_block_size: int | None = None,
        enable_chunked_prefill: bool | None = True,
        enforce_eager: bool | None = False,
        scheduling_policy: str = "fcfs",
        seed: int | None = 0,
        revision: str | None = None,
        hf_overrides: Overrides = None,
        load_format: str = "auto",
        model_impl: str = "auto",
        skip_tokenizer_init: bool = False,
        chat_template: str | Path | None = None,
        use_tqdm_on_load: bool = True,
        max_logprobs: int = -1,
        logprobs_mode: str = "raw_logprobs",
        num_threads: int | None = None,
        offload_weights: bool | None = None,
        device: str = "auto",
        compilation_config: object = None,
        logits_processors: object = None,
        generation_config: str | Path = "auto",
        override_generation_config: Mapping[str, object] | None = None,
        reasoning_config: ReasoningConfig | Mapping[str, str] | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, object] | str | None = "auto",
        runner: str = "auto",
        convert: str = "auto",
        pooler_config: object = None,
        enable_lora: bool = False,
        max_loras: int = DEFAULT_MAX_LORAS,
        max_lora_rank: int = DEFAULT_MAX_LORA_RANK,
        merge_lora: str | Path | None = None,
        profiler_config: object = None,
        prefix_cache: str | Path | None = None,
        verbose: bool = False,
        **kwargs: Any,
    ) -> None:
        self._start({key: value for key, value in locals().items() if key not in _NO_SETTINGS}, verbose, kwargs)

    def _start(self, given: Mapping[str, Any], verbose: bool, others: Mapping[str, object]) -> None:
        """`given`: the arguments of `__init__` by name; `others`: those it has no parameter for."""
        self._engine: Engine | None = None
        self._lock = FairLock()
        self._stepwise: LLMEngine | None = None
        self._is_torn = False  # this process was forked in the middle of another thread's call
        tell_of_forks(self)
        self._dropped: list[PromptState] = []
        check_flag("verbose", verbose)
        env.check_values()
        env.warn_of_unknown()
        set_log_level(verbose)
        notes = [*check_arguments(others), *compilation.notes(given["compilation_config"])]
        self._args = EngineArgs.from_user(**given, task=others.get("task"))
        self._profiler_config = ProfilerConfig.of(self._args.profiler_config)
        check_prefix_cache(self._args.prefix_cache)
        self._take(build_engine(self._args))
        self._fill_prefix_cache()
        for note in (*notes, f"resolved configuration\n{self.config}") if verbose else ():
            logger.info(note)

    @classmethod
    def from_engine_args(cls, engine_args: object) -> LLM:
        """`LLM(**vars(engine_args))`, for an `EngineArgs`."""
        return cls(**vars(engine_args))

    def _take(self, built: BuiltEngine) -> None:
        self._engine = built.engine
        self._default_params = built.default_params
        self._pooling = built.plan.pooling
        self._is_quantized = built.plan.is_quantized
        self._source = built.plan.source if built.plan.has_weights else None
        self.config: EngineConfig = built.engine.config
        self.startup: Mapping[str, float] = built.startup
        self._preprocessor = Preprocessor(self.config.model_config, built.engine.tokenizer, built.engine.eos_token_ids)
        self._preprocessor.reasoning = self.config.reasoning_config
        self._preprocessor.logits_processors = built.plan.logits_processors

    @property
    def llm_engine(self) -> LLMEngine:
        """vLLM's engine of that name, over this model: its configs, and requests step by step."""
        from llm.api.llm_engine import LLMEngine

        if self._stepwise is None:
            self._stepwise = LLMEngine(self)
        return self._stepwise

    @property
    def model_config(self) -> ModelConfig:
        """`config.model_config`."""
        return self.config.model_config

    def get_tokenizer(self) -> Any:
        """The tokenizer as an object of transformers."""
        engine = self._open_engine()
        if engine.tokenizer is None:
            raise ValidationError(
                "there is no tokenizer: skip_tokenizer_init=True.", parameter="skip_tokenizer_init", value=True
            )
        return engine.tokenizer.huggingface()

    def get_default_sampling_params(self) -> SamplingParams:
        """The params that `generate` uses if it gets none; a copy."""
        return self._default_params.clone()

    def close(self) -> None:
        """Free weights and KV cache even while this object is referenced. May be called again."""
        with self._exclusive():
            if self._engine is None:
                return
            self._engine.close()
            self._engine = None
            del self._preprocessor  # it refers to the tokenizer
            self._dropped.clear()

    def __enter__(self) -> LLM:
        self._open_engine()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Bound here: at interpreter exit this module's own names may be gone before the last LLM is.
    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # The model has reference cycles: without this, `del llm` frees nothing until the garbage collector runs.
        if not is_exiting() and getattr(self, "_engine", None) is not None:
            self.close()

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """Raise an error for an attribute that only vLLM's LLM has, with what to do instead."""
            instead = METHODS.get(name)
            hint = f"; {instead}." if instead else f".{nearest(name, dir(type(self)))}"
            raise AttributeError(f"LLM has no {name!r}{hint}", name=name, obj=self)

    def _open_another(self, args: EngineArgs) -> LLM:
        """It begins without a prompt cache, which is this model's."""
        return type(self)(**{item.name: getattr(args, item.name) for item in fields(args)} | {"prefix_cache": None})

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled or copied; build one in each process that needs one.")

    def __repr__(self) -> str:
        if self._engine is None:
            return "LLM(closed)"
        return f"LLM({self.config.model_config.model!r}, max_model_len={self.config.model_config.max_model_len})"

    def _run(
        self, engine: Engine, rows: Sequence[AnyRow], use_tqdm: UseTqdm, guard: InterruptGuard
    ) -> list[RequestOutput]:
        return BatchCall(self, rows, guard, CallOptions(use_tqdm)).run(engine)

    def _exclusive(self) -> AbstractContextManager[object]:
        """The lock of a call: calls of other threads wait in turn, a call from inside a call is refused."""
        if self._is_in_call():
            raise EngineBusyError("this LLM is in the middle of a call; a callback cannot call it again.")
        return self._lock

    def _is_in_call(self) -> bool:
        """True if this thread is inside a call."""
        return self._lock._is_owned()

    def _begin(self) -> Engine:
        """The beginning of every call; the lock is held."""
        engine = self._open_engine()
        if self._is_torn:
            engine.reset()
            self._is_torn = False
        self._abort_dropped(engine)
        return engine

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise EngineClosedError("this LLM is closed; make a new one.")
        return self._engine

    def after_fork(self) -> None:
        """In a forked child: the call of another thread has ended in the middle, and nobody cleans up after it."""
        self._is_torn = renew(self._lock) or self._is_torn

    def _abort_if_idle(self) -> None:
        """Abort dropped streams now; if a call is running, it will abort them."""
        if self._is_torn or self._is_in_call() or not self._lock.acquire(blocking=False):
            return
        try:
            if self._engine is not None:
                self._abort_dropped(self._engine)
                self._engine.end_call()
        finally:
            self._lock.release()

    def _abort_dropped(self, engine: Engine) -> None:
        while self._dropped:
            engine.abort([self._dropped.pop()])
