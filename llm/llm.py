"""class LLM: a language model in this process, with all of its public methods.

What they do is in `llm.calls`. The class has the engine, and the lock by which one call at a time uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from llm.base.checks import MISSING, check_flag, check_integer, known_names, wrong_names
from llm.base.locks import FairLock, renew, tell_of_forks
from llm.base.suggestions import ASKS_NOTHING, METHODS
from llm.base.types import JsonObject
from llm.calls import scoring, whole_model
from llm.calls.arguments import LoRARequests, Priority, check_asks_nothing, give_adapters, with_inside
from llm.calls.batch import BatchCall, CallOptions, OnOutput, prompt_rows
from llm.calls.chat import ChatOptions
from llm.calls.flow import Flow, prompt_batches
from llm.calls.pooling import Params, PoolingCall
from llm.calls.report import ExpertLoad, Profiler, llm_as_html, measure_load
from llm.calls.stream import ChatStream, stream_states, stream_text
from llm.config import compilation, env
from llm.config.arguments import CALLS, check_arguments
from llm.config.engine import (
    DEFAULT_MAX_LORA_RANK,
    DEFAULT_MAX_LORAS,
    EngineConfig,
    LLMArgs,
    ModelConfig,
    ReasoningConfig,
    SpeculativeConfig,
)
from llm.config.engine import EMBEDDED_MODEL as EMBEDDED_MODEL
from llm.engine.engine import Engine
from llm.engine.images import images_of
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState
from llm.engine.pooling_rows import Prefix
from llm.engine.preprocess import Preprocessor
from llm.engine.stats import LLMStats
from llm.errors import EngineBusyError, EngineClosedError, ValidationError, nearest
from llm.explain import Explanation
from llm.inputs import LoRARequest, PromptType, TokensPrompt
from llm.inside.capture import Capture
from llm.inside.names import Site
from llm.inside.request import Captures, Interventions
from llm.loading.source import Overrides
from llm.logger import init_logger, set_log_level
from llm.outputs import (
    BeamSearchOutput,
    ChoiceOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    LoglikelihoodOutput,
    Metric,
    PerplexityOutput,
    PoolingOutput,
    PoolingRequestOutput,
    PoolingRequestOutputs,
    RequestOutput,
    RequestOutputs,
    RerankResult,
    ScoringRequestOutput,
)
from llm.pooling_params import PoolingParams
from llm.progress import UseTqdm
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling_params import BeamSearchParams, SamplingParams
from llm.setup.build import build_engine

if TYPE_CHECKING:
    import pandas
    import torch

    from llm.inside.experiments import Metric as PatchMetric
    from llm.jobs.job import JobSummary
    from llm.llm_engine import LLMEngine
    from llm.setup.preview import ModelPlan
    from llm.tools.compare import Comparison
    from llm.tools.quantization_report import QuantizationReport
    from llm.tools.verify import SelfCheck, Verification

logger = init_logger("llm")
R = TypeVar("R")
# What `stream` has no argument for -> what to do instead.
_STREAM_INSTEAD = {
    **CALLS,
    **{name: instead for name, (_, instead) in ASKS_NOTHING.items()},
    "tokenization_kwargs": "tokenize with LLM.get_tokenizer() and pass token ids",
    "capture": "pieces of text have no activations; call stream_state or generate_iter",
}


class LLM:
    """A language model in this process.

    Args:
        model: a folder in Hugging Face's layout, or a hub name; default: the small embedded model.
        tokenizer: folder or hub name of another tokenizer.
        dtype: "auto" or "float32": weights keep their stored type; "bfloat16" or "float16" ("half"): matrices are
            converted to it. A CPU computes in float32, except that with "bfloat16" a processor with AMX or a fast
            AVX-512 BF16 rounds the inputs of GEMMs to bfloat16, with the second those of weight-only GEMMs too: prefill
            and batches then take two thirds of the time.
        quantization: "w8a8", "w4a8", "w8a16", "w4a16", "fp8", "mxfp4", "nf4", or GGUF's "q8_0", "q4_0", "q4_k":
            quantize the weights while they are loaded; a dict chooses per layer (`llm.quantization.on_load`).
            None: as the checkpoint says. The format of a quantized checkpoint may be named: "compressed-tensors",
            "gptq", "awq" and others.
        calibration: texts that are run through the unquantized layers, one after the other, to collect statistics of
            their inputs; "auto": texts that the model writes. They improve 4-bit weights, and "w8a8_static" needs them.
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
        async_scheduling: a device starts a step before the host has read the tokens of the one before; None and True:
            where the step needs nothing else of it. Processors, drafts and recurrent states turn it off.
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
        data_parallel_size: how many processes of this machine have the whole model each, "replicas", and share the rows
            of every call. Answers are the same; a replica that dies loses nothing. They share the processors and the
            memory, or have a GPU each.
        devices: of the replicas: `["cuda:0", "cuda:1"]`; sets of processors, `[{0, 1}, {2, 3}]`; or "all": every GPU,
            or else every NUMA node. With `tensor_parallel_size` GPUs are those of its ranks, replica by replica.
        tensor_parallel_size: how many processes of this machine share the model, "ranks": each has its part of the
            weights and of the KV cache, and `num_threads` threads, by default an equal share of them, or a GPU. Answers
            have the bits of one process.
        distributed_executor_backend: "ray": replicas, with their ranks, are on the machines of a Ray cluster, each on
            one that has room for them; None, "uni", "mp": on this machine.
        offload_weights: weights that memory has no room for are kept in a file and read when they are used, which is
            slow; None: if they do not fit; True: all of them; False: refuse what does not fit.
            The file is in LLM_OFFLOAD_FOLDER, by default in the cache folder. `llm.config` says what is where.
        device: "auto", "cpu", "cuda", "rocm", "xpu", "mps" or the name of a platform plugin; "cuda:1": one of several.
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
            they are not the tokens `<think>` and `</think>`; for `thinking_token_budget`.
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
        limit_mm_per_prompt: most images of a prompt, and their largest size: `{"image": 4}`, or `{"image": {"count": 4,
            "width": 2048, "height": 2048}}`.
        allowed_local_media_path: the folder below which files that conversations name must be; None: they name none.
        mm_processor_kwargs: arguments of the model's image processor for all prompts.
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
        async_scheduling: bool | None = None,
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
        data_parallel_size: int = 1,
        devices: object = None,
        tensor_parallel_size: int = 1,
        distributed_executor_backend: str | None = None,
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
        limit_mm_per_prompt: Mapping[str, object] | None = None,
        allowed_local_media_path: str | Path | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
        verbose: bool = False,
        **kwargs: Any,
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in ("self", "verbose", "kwargs")}
        self._engine: Engine | None = None
        self._lock = FairLock()
        self._needs_reset = False  # this process was forked in the middle of another thread's call
        tell_of_forks(self)
        self._dropped: list[PromptState] = []  # of streams that were left early, to be aborted when no call is running
        self._unfinished: BatchCall | Flow | None = None  # the last call that was interrupted or failed
        self._stepwise: LLMEngine | None = None
        check_flag("verbose", verbose)
        env.check_values()
        env.warn_of_unknown()
        set_log_level(verbose)
        notes = [*check_arguments(kwargs), *compilation.notes(compilation_config)]
        self._args = LLMArgs.from_user(**given, task=kwargs.get("task"))
        self._profiler = Profiler(self._args.profiler_config)
        if prefix_cache is not None:
            from llm.prefix_cache import load_cache_into, read_manifest

            read_manifest(prefix_cache)  # refused before the model is loaded
        built = build_engine(self._args)
        self._engine = built.engine
        self._default_params = built.default_params
        self._pooling = built.plan.pooling  # what the model makes of hidden states; None: it generates
        self._is_quantized = built.plan.is_quantized  # the checkpoint, so the unquantized model is not available
        self._source = built.plan.source if built.plan.has_weights else None  # of the weights; None: they are random
        self._weights = ""  # their fingerprint, once it was needed
        self._is_asleep = False
        self._may_have_changed = False  # a callable got the model, and may have changed its weights
        self.config: EngineConfig = built.engine.config
        self.startup: Mapping[str, float] = built.startup
        self._preprocessor = Preprocessor(self.config.model_config, built.engine.tokenizer, built.engine.eos_token_ids)
        self._preprocessor.reasoning = self.config.reasoning_config
        self._preprocessor.logits_processors = built.plan.logits_processors
        hidden_size = int(getattr(built.plan.architecture, "hidden_size", 0))
        self._preprocessor.images = (
            images_of(built.plan.source.folder, built.plan.hf_config, self._args, hidden_size)
            if built.plan.has_weights
            else None
        )
        self._preprocessor.sites = built.engine.runner.sites
        if prefix_cache is not None:
            load_cache_into(self, prefix_cache)
        for note in (*notes, f"resolved configuration\n{self.config}") if verbose else ():
            logger.info(note)

    @classmethod
    def from_engine_args(cls, engine_args: object) -> LLM:
        """`LLM(**vars(engine_args))`, for an `EngineArgs`."""
        return cls(**vars(engine_args))

    def generate(
        self,
        prompts: object = MISSING,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Priority = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        on_too_long: str = "error",
        on_interrupt: str = "raise",
        on_output: OnOutput | None = None,
        checkpoint: str | Path | None = None,
        capture: Captures = None,
        interventions: Interventions = None,
        **unknown: NoReturn,
    ) -> RequestOutputs:
        """Complete one prompt or many; there is an output for each, in the order of the prompts.

        Args:
            prompts: a string, token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}`, or a list of any of these.
                Their key `"multi_modal_data": {"image": ...}` has an image, or a list of them: PIL images, paths, bytes
                of files, arrays, tensors; and `"video"` the frames of one, `(frames, {"fps": 2.0})`, or a list of such.
            sampling_params: one for all prompts, or one per prompt; None: the model's defaults.
            lora_request: the adapter of all prompts, or a list with one or None for each (`enable_lora`).
            use_tqdm: a progress bar in tokens, and a line when it ends, if the call takes more than half a second;
                False prints nothing. A callable that takes tqdm's arguments makes the bar; any other is called with a
                `llm.progress.GenerationProgress` at most ten times a second, and when the call ends.
            priority: an integer for all prompts, or one each: with `LLM(scheduling_policy="priority")` the lowest run
                first, else they have no effect. No answer depends on them.
            mm_processor_kwargs: arguments of the image processor.
            tokenization_kwargs: `add_special_tokens`; `truncation` with `max_length`, or `truncate_prompt_tokens`, with
                `truncation_side` ("left", the first tokens are cut, or "right").
            on_error: "raise" names every bad prompt before any is run; "return" puts the error into its output
                (`output.error`) and runs the others.
            on_too_long: "error"; "skip": the prompt is not run; "truncate_left" (its first tokens) or "truncate_middle"
                cut it until max_tokens fit, or a quarter of the context where it is None (`num_dropped_tokens`).
            on_interrupt: Ctrl-C raises `GenerationInterrupted` with what there is of each output; "return" returns it.
            on_output: called with each output as it ends.
            checkpoint: a file that keeps each output: the same call in a new process goes on where this one was ended.
            capture: activations to return in `output.activations`: a `Capture`, or the name of a site (`llm.sites()`).
            interventions: `Intervention`s, changes of activations. Both are in the place of those in `extra_args`.

        Raises ValidationError, CheckpointError (of an adapter), GenerationInterrupted: see `on_error`, `on_interrupt`.
        """
        if unknown or prompts is MISSING:
            raise wrong_names("LLM.generate", LLM.generate, unknown, CALLS)
        options = CallOptions(use_tqdm, on_error, on_too_long, on_interrupt, on_output, checkpoint)
        # The guard comes first: Ctrl-C must not leave a lock held or some of the rows queued.
        with InterruptGuard() as guard, self._exclusive():
            engine = self._begin()
            prompts = self._preprocessor.with_processor_options(prompts, mm_processor_kwargs)
            default = self.get_default_sampling_params
            params = with_inside(sampling_params, capture, interventions, default)
            rows = prompt_rows(self, prompts, params, tokenization_kwargs, options, priority)
            give_adapters(engine, rows, lora_request)
            outputs = BatchCall(self, rows, guard, options).run(engine)
        options.raise_interrupt(guard, outputs)
        return outputs

    @known_names("LLM.generate_iter", CALLS)
    def generate_iter(
        self,
        prompts: object,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        ordered: bool = False,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        on_too_long: str = "error",
        capture: Captures = None,
        interventions: Interventions = None,
    ) -> Iterator[RequestOutput]:
        """Complete the prompts of an iterable, and yield each output as it ends; `output.index` is its prompt's place.

        Prompts are read and tokenized in batches, ahead of the engine; memory does not grow with their number. Leaving
        the loop early drops the rows in flight. Other calls may run between two outputs.

        Args:
            prompts: an iterable (a generator, a column of a table, a file, whose lines are prompts) of prompts as
                `generate` takes them, or one prompt.
            sampling_params: one for all, or an iterable with one per prompt; None: the model's defaults.
            ordered: yield in the order of the prompts.
            lora_request: the adapter of all prompts, or an iterable with one or None per prompt.
            tokenization_kwargs: as for `generate`.
            on_error: as for `generate`. With "raise", a bad prompt, or an error of the iterable, is raised after the
                outputs of all prompts before it.
            on_too_long: as for `generate`.
            capture: as for `generate`; each prompt is checked against `limit_bytes` by itself.
            interventions: as for `generate`.

        Raises:
            ValidationError: a prompt or an argument is wrong.
            GenerationInterrupted: Ctrl-C; with what there is of the rows in flight.
        """
        check_flag("ordered", ordered)
        batches = prompt_batches(
            self,
            prompts,
            sampling_params,
            lora_request,
            tokenization_kwargs,
            on_error,
            on_too_long,
            capture,
            interventions,
        )
        return iter(Flow(self, batches, ordered=ordered))

    @known_names("LLM.chat", CALLS)
    def chat(
        self,
        messages: Sequence[object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: LoRARequests = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        on_too_long: str = "error",
        on_interrupt: str = "raise",
        on_output: OnOutput | None = None,
        tool_parser: str | None = "auto",
        tool_choice: str | JsonObject | None = None,
        parallel_tool_calls: bool = True,
        capture: Captures = None,
        interventions: Interventions = None,
    ) -> RequestOutputs:
        """Answer one conversation (a list of `{"role", "content"}`), or each of a list of conversations.

        The chat template renders them, with `chat_template_kwargs`, to prompts for `generate`. Replies have `content`,
        `reasoning` and, with `tools`, `tool_calls`, in the form (`tool_parser`) that the template teaches.
        Contents may have parts of type "image_pil", "image_url", `data:` or a file below `allowed_local_media_path`,
        and "video", the list of its frames.
        `tool_choice` is OpenAI's: of "required" or a function the reply is JSON of the schemas, without reasoning."""
        check_asks_nothing(chat_template_content_format=chat_template_content_format)
        self._open_engine()
        options = ChatOptions.of(locals())
        default = self.get_default_sampling_params
        asked = options.conversations(self._preprocessor, messages, sampling_params, default, on_too_long)
        outputs = self.generate(
            asked.prompts,
            asked.params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            on_error=on_error,
            on_too_long=on_too_long,
            on_interrupt=on_interrupt,
            on_output=asked.before(on_output),
            capture=capture,
            interventions=interventions,
        )
        return asked.read(outputs)

    @known_names("LLM.render_chat", CALLS)
    def render_chat(
        self,
        messages: Sequence[object],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[TokensPrompt]:
        """The prompts that `chat` passes to `generate`, one per conversation; `stream` also accepts one."""
        self._open_engine()
        options = ChatOptions.of(locals())
        return options.prompts(self._preprocessor, messages)

    @known_names("LLM.stream", {**_STREAM_INSTEAD, "use_tqdm": "a stream shows no bar"})
    def stream(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        interventions: Interventions = None,
    ) -> Iterator[str]:
        """Yield the completion's text piece by piece. Leaving the loop early drops the request and frees its blocks.

        Other calls may run while the stream is suspended. Raises as `generate`, and the error that ended the request if
        there is one; `n` must be 1.
        """
        params = with_inside(sampling_params, None, interventions, self.get_default_sampling_params)
        return stream_text(self, prompt, params, lora_request)

    @known_names("LLM.stream_chat", {**CALLS, "use_tqdm": "a stream shows no bar"})
    def stream_chat(
        self,
        messages: Sequence[object],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        tool_parser: str | None = "auto",
        tool_choice: str | JsonObject | None = None,
        parallel_tool_calls: bool = True,
        capture: Captures = None,
        interventions: Interventions = None,
    ) -> ChatStream:
        """As `stream`, for one conversation; the arguments are those of `chat`. After the last piece, `output` of what
        is returned has `content`, `reasoning`, `tool_calls` and `activations`; the pieces are all that is generated."""
        self._open_engine()
        options = ChatOptions.of(locals())
        default = self.get_default_sampling_params
        asked = options.conversations(self._preprocessor, messages, sampling_params, default)
        params = with_inside(asked.params, capture, interventions, default)
        return ChatStream(stream_states(self, asked.prompts, params, lora_request), asked.read_one)

    @known_names("LLM.stream_state", {name: said for name, said in _STREAM_INSTEAD.items() if name != "capture"})
    def stream_state(
        self,
        prompt: object,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | None = None,
        capture: Captures = None,
        interventions: Interventions = None,
    ) -> Generator[PromptState, None, None]:
        """As `stream`, but yields the prompt's state whenever there is new text, and once at the end; then its
        `output()` has the activations."""
        params = with_inside(sampling_params, capture, interventions, self.get_default_sampling_params)
        return stream_states(self, prompt, params, lora_request)

    @known_names("LLM.run")
    def run(
        self,
        input: str | Path,
        output: str | Path,
        sampling_params: SamplingParams | None = None,
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        lora_modules: Mapping[str, str | Path] | None = None,
        column: str | None = None,
        template: str | None = None,
        resume: bool = False,
        shard: str | None = None,
        on_error: str = "return",
        on_too_long: str = "error",
        row_params: bool = False,
        image_column: str | None = None,
        video_column: str | None = None,
        use_tqdm: UseTqdm = True,
        capture: Capture | None = None,
        capture_to: str | Path | None = None,
        capture_format: str = "safetensors",
    ) -> JobSummary:
        """Answer the rows of a file into another; after Ctrl-C, SIGTERM, a crash or a full disk, `resume=True` goes on.

        Input: OpenAI's batch format (JSONL; chat completions, completions, embeddings), or JSONL, CSV or Parquet with a
        prompt per row. The output has a row for each, in order; it appears when it is complete, and is to the byte that
        of a run that nothing interrupted. Until then the answers are in OUTPUT.journal. Seeds are derived from the row.
        A model that pools answers with vectors, classes, or scores of pairs (columns text_1 and text_2).

        Args:
            sampling_params: of all rows, and of a batch where a body says nothing; None: the model's defaults.
            pooling_params: the same for a model that pools.
            lora_request: the adapter of all rows (`enable_lora`).
            lora_modules: folders of adapters by name; a row of a batch names one as its `model`, another row in a
                column lora_name, and those that name none or the model have none.
            column: which has the prompts; None: "prompt", or else "messages", conversations.
            template: makes the prompt from columns: "Translate: {text}".
            resume: go on with the journal of an interrupted run.
            shard: "i/n" answers every n-th row from the i-th on, from 0; `python -m llm merge OUTPUT` joins the parts.
            on_error: "return" answers bad rows with an error; "raise" refuses the input, and names them.
            on_too_long: as for `generate`.
            image_column: has a row's image, or a list of them: paths below the input's folder, base64 or bytes.
            video_column: has a row's video, the list of its frames, each such an image; vLLM's URL of frames; or
                {"video": frames, "metadata": {"fps": 2.0}}; or a list of such videos.
            row_params: columns with the names of parameters (max_tokens, temperature, ...) are those of their rows.
            capture: activations of all rows; each is checked against `limit_bytes` by itself.
            capture_to: the folder that gets them, a file for each row, counted from 0.
            capture_format: "safetensors", or "arrow", a table with a record for each position (`llm.jobs.tables`).

        Raises:
            JobError: a file is wrong, or cannot be written; or the journal is of another model or setting.
            JobInterrupted: Ctrl-C or SIGTERM; the journal has everything, half answers too.
        """
        from llm.jobs.job import RunOptions, run_job

        options = RunOptions(
            column=column,
            template=template,
            resume=resume,
            shard=shard,
            on_error=on_error,
            on_too_long=on_too_long,
            row_params=row_params,
            use_tqdm=use_tqdm,
            image_column=image_column,
            video_column=video_column,
            capture=capture,
            capture_to=None if capture_to is None else Path(capture_to),
            capture_format=capture_format,
        )
        return run_job(self, input, output, options, sampling_params, pooling_params, lora_modules, lora_request)

    @property
    def last_outputs(self) -> RequestOutputs | None:
        """What there was of each output when a call last was interrupted or failed; None: that has not happened."""
        return None if self._unfinished is None else RequestOutputs(self._unfinished.outputs())

    @known_names("LLM.embed")
    def embed(
        self,
        prompts: object,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> PoolingRequestOutputs[EmbeddingRequestOutput]:
        """The vector of each prompt; `.to_numpy()` of the result is float32 [prompts, size].

        Args:
            prompts: as for `generate`.
            use_tqdm: a progress bar in tokens; False prints nothing; a callable makes the bar.
            pooling_params: `dimensions`, `use_activation`, `truncate_prompt_tokens`; one, or one per prompt.
            lora_request: as for `generate`.
            tokenization_kwargs: as for `generate`.
            prompt_name: the name of the model's prompt that precedes each text, such as "query"; None: its default.
            prompt: that prompt itself.

        Raises:
            ValidationError: names every bad prompt, before any work starts; or the model has no vectors.
            GenerationInterrupted: Ctrl-C; with the outputs so far.
        """
        call = PoolingCall(self, pooling_params, use_tqdm, lora_request, tokenization_kwargs)
        return call.embed(prompts, Prefix(prompt_name, prompt))

    @known_names("LLM.classify")
    def classify(
        self,
        prompts: object,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> PoolingRequestOutputs[ClassificationRequestOutput]:
        """The probability of each class, per prompt. Arguments and errors are those of `embed`."""
        return PoolingCall(self, pooling_params, use_tqdm, lora_request, tokenization_kwargs).classify(prompts)

    @known_names("LLM.encode")
    def encode(
        self,
        prompts: object,
        pooling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> PoolingRequestOutputs[PoolingRequestOutput[PoolingOutput]]:
        """`outputs.data` of each prompt, a float32 tensor.

        Args:
            pooling_task: "token_embed" or "token_classify": [tokens, size], a vector or the classes of every token;
                "embed" or "classify": [size]. None: the task of `pooler_config`, or else of every token.

        Further arguments and errors are those of `embed`.
        """
        call = PoolingCall(self, pooling_params, use_tqdm, lora_request, tokenization_kwargs)
        return call.encode(prompts, pooling_task)

    @known_names("LLM.reward")
    def reward(
        self,
        prompts: object,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> PoolingRequestOutputs[PoolingRequestOutput[PoolingOutput]]:
        """The reward of each prompt, a conversation with its answer: `outputs.data` are the logits, [classes].

        Arguments and errors are those of `embed`.
        """
        params = PoolingParams(use_activation=False)
        return PoolingCall(self, params, use_tqdm, lora_request, tokenization_kwargs).reward(prompts)

    @known_names("LLM.score")
    def score(
        self,
        data_1: object,
        data_2: object,
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        instruction: str | None = None,
        chat_template: str | Path | None = None,
    ) -> PoolingRequestOutputs[ScoringRequestOutput]:
        """How well two texts fit each other; `.to_numpy()` of the result is float32 [pairs].

        A classifier of one class reads both texts of a pair, of an embedder it is the cosine of two vectors.

        Args:
            data_1: a text, such as a query, for all of `data_2`; or as many. Embedders and Qwen3-VL rerankers also take
                `{"content": [part, ...]}` with texts, images and videos, as in conversations, or prompts with images.
            data_2: texts, or such.
            instruction: of a Qwen3 or Qwen3-VL reranker, what makes a document fit.
            chat_template: of a classifier, how it is asked in words: a template of messages with the roles "query",
                "document" and, with an instruction, "system".

        Further arguments and errors are those of `embed`.
        """
        call = PoolingCall(self, pooling_params, use_tqdm, lora_request, tokenization_kwargs)
        return call.score(data_1, data_2, instruction, chat_template)

    @known_names("LLM.rerank")
    def rerank(
        self,
        query: str | Mapping[str, object],
        documents: Sequence[str | Mapping[str, object]],
        *,
        top_n: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        instruction: str | None = None,
        chat_template: str | Path | None = None,
    ) -> list[RerankResult]:
        """The documents by `score`, the best first; of equal ones the earlier.

        Args:
            top_n: how many of them; None: all.

        Further arguments and errors are those of `score`.
        """
        if top_n is not None:
            check_integer("top_n", top_n, 1)
        call = PoolingCall(self, pooling_params, use_tqdm, lora_request, tokenization_kwargs)
        return call.rerank(query, documents, top_n, instruction, chat_template)

    @known_names("LLM.beam_search")
    def beam_search(
        self,
        prompts: object,
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
        priority: Priority = None,
    ) -> list[BeamSearchOutput]:
        """Beam search for the most likely continuations of each prompt: transformers' sequences and scores.

        Args:
            prompts: as for `generate`.
            params: beam width, maximum length and scoring.
            lora_request: as for `generate`.
            use_tqdm: a progress bar that counts prompts.
            concurrency_limit: maximum number of prompts searched at a time; None: all.

        Raises:
            ValidationError: names every bad prompt, before any work starts.
            GenerationInterrupted: Ctrl-C; carries the outputs of finished prompts.
        """
        return scoring.beam_search(self, prompts, params, lora_request, use_tqdm, concurrency_limit, priority)

    @known_names("LLM.loglikelihood")
    def loglikelihood(
        self,
        prompts: object,
        continuations: object,
        *,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = True,
    ) -> list[LoglikelihoodOutput]:
        """The log-likelihood of each continuation after its prompt.

        A text prompt and a text continuation are tokenized as one text; a token that spans the border is scored too.
        Common prefixes of prompts are computed once.

        Args:
            prompts: as for `generate`.
            continuations: one per prompt, texts or token ids; or several for one prompt.
            lora_request: the adapter of all pairs, or a list with one or None for each.
            use_tqdm: as for `generate`.

        Raises:
            ValidationError: names every bad pair, before any work starts.
            GenerationInterrupted: Ctrl-C.
        """
        return scoring.loglikelihood(self, prompts, continuations, lora_request, use_tqdm)

    @known_names("LLM.perplexity")
    def perplexity(
        self,
        texts: object,
        *,
        stride: int | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: UseTqdm = True,
    ) -> PerplexityOutput:
        """exp of the mean negative logprob per token. The first token of a text has no context and is not scored.

        Args:
            texts: as prompts of `generate`.
            stride: texts longer than the context are scored in overlapping windows, each of which scores this many
                further tokens; None: such texts are refused.
            lora_request: the adapter of all texts.
            use_tqdm: as for `generate`.

        Raises:
            ValidationError: names every bad text, before any work starts.
            GenerationInterrupted: Ctrl-C.
        """
        return scoring.perplexity(self, texts, stride, lora_request, use_tqdm)

    @known_names("LLM.classify_choices")
    def classify_choices(
        self,
        prompts: object,
        choices: object,
        *,
        normalize: str | None = None,
        delimiter: str = " ",
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = True,
    ) -> list[ChoiceOutput]:
        """The likeliest of some answers to each prompt, and the probability of each answer.

        All prompts and choices are one batch; a prompt is computed once, whatever the number of its choices. Nothing is
        generated, so every prompt gets a label, and the probabilities of its choices sum to 1.

        A choice's score is the log-likelihood of its tokens after the prompt, divided by its length if `normalize` says
        so; the label has the highest score, and the probabilities are the softmax of the scores. Tokens, scores and
        labels are those of lm-evaluation-harness: the label counts in its `acc` (None), `acc_norm` ("characters") or
        `acc_bytes` ("bytes").

        Args:
            prompts: as for `generate`; of a conversation, `render_chat(messages)`, with delimiter="".
            choices: texts, the same for all prompts, or one list of texts per prompt.
            normalize: divide by the number of "characters" or "bytes" of the choice, without the delimiter: long
                choices are less likely because they are long. Such probabilities rank choices, but are not those of
                the model.
            delimiter: between prompt and choice, the harness's `target_delimiter`.
            lora_request: as for `generate`.
            use_tqdm: as for `generate`.

        Raises:
            ValidationError: names the first bad prompt or choice, before any work starts.
            GenerationInterrupted: Ctrl-C.
        """
        return scoring.classify_choices(self, prompts, choices, normalize, delimiter, lora_request, use_tqdm)

    @classmethod
    def plan(
        cls,
        model: str | Path = EMBEDDED_MODEL,
        *,
        calibrate: bool = False,
        image: str | None = None,
        **arguments: object,
    ) -> ModelPlan:
        """What `LLM(model, **arguments)` would take and allow on this machine now; no weight is read.

        Weights in bytes for each quantization, bytes of the KV cache, how many sequences of which length fit, and if
        the model does not fit the smallest change that makes it. A draft model is not counted.

        Args:
            calibrate: measure this machine for a second, for the highest speed to expect, and remember it; without,
                the speed follows from what was measured last, if anything was.
            image: a size such as "1024x768", for the tokens of an image, and how many prompts with one fit.
            **arguments: of `LLM`.

        Raises:
            ValidationError, CheckpointError, UnsupportedModelError: as `LLM(...)` would.
        """
        return whole_model.plan(model, calibrate, arguments, image)

    @classmethod
    def compare(
        cls,
        model: str | Path,
        schemes: Sequence[str | None],
        texts: Sequence[str],
        *,
        speed: bool = True,
        **arguments: object,
    ) -> Comparison:
        """One model in several quantizations: bytes, perplexity with its interval, speed; a table, a DataFrame
        (`to_pandas()`) and a picture (`plot()`). One is loaded at a time.

        Args:
            schemes: names of `quantization=`, of a quantized checkpoint (a GGUF file) of `requantize=`; None or "none":
                as the checkpoint has it.
            texts: for perplexity; the more, the narrower its interval.
            speed: measure tokens per second on this machine now.
            **arguments: of `LLM`, for all of them.
        """
        return whole_model.compare(cls, model, schemes, texts, speed, arguments)

    @known_names("LLM.verify")
    def verify(self, texts: Sequence[str], *, against: str | Path | None = None) -> Verification:
        """transformers' float32 model beside this one, at every token of some texts; imports transformers.

        Where quantization, dtype or the KV cache's type round more than float32 does, the model is opened once more
        without them, so that the report shows what they explain. Memory holds transformers' model beside this one.

        Args:
            texts: a few hundred tokens are enough.
            against: folder of the unquantized model; needed if the checkpoint is quantized, or is a GGUF file.

        Raises:
            ValidationError: there is no folder that transformers can read, or no text.
            OutOfMemoryError: there is no room for transformers' model.
        """
        return whole_model.verify(self, texts, against)

    @known_names("LLM.selfcheck")
    def selfcheck(self) -> SelfCheck:
        """The same requests alone, batched, in another order, in chunks, preempted, and with prefix hits: are tokens
        and logprobs the same bits? Takes some hundred steps, and clears the prefix cache.

        Raises:
            ValidationError: a stream is suspended.
        """
        return whole_model.selfcheck(self)

    def explain(self) -> Explanation:
        """The implementation of every operation, pluggable layer and quant method of the model, and why; prints as text
        and shows as HTML in a notebook."""
        return self._open_engine().runner.describe()

    def stats(self) -> LLMStats:
        """Requests, tokens, prefix hits, accepted drafts, preemptions and seconds since the start, and memory now."""
        return self._open_engine().all_stats()

    def get_metrics(self) -> list[Metric]:
        """vLLM's metrics of this LLM: gauges of now, counters and histograms of the requests that have ended."""
        engine = self._open_engine()
        config = engine.config
        return engine.ended.snapshot(engine.gauges(), config.model_config.model)

    @known_names("LLM.quantization_report")
    def quantization_report(
        self,
        texts: Sequence[str] = (),
        *,
        prompts: Sequence[PromptType] | None = None,
        against: str | Path | None = None,
        speed: bool = True,
    ) -> QuantizationReport:
        """The effect of quantization per layer, and on the whole model compared with the unquantized one.

        The unquantized model is loaded in addition to this one while it is measured. Speed is that of this machine now.

        Args:
            texts: for perplexity, agreement, and the noise of each layer's outputs.
            prompts: for greedy agreement over 64 tokens; None: 64 pieces of the texts.
            against: folder of the unquantized model; needed if the checkpoint is quantized. With `requantize` the model
                is compared with the checkpoint as it is.
            speed: measure tokens per second of both models.
        """
        return whole_model.quantization_report(self, texts, prompts, against, speed)

    @known_names("LLM.expert_load")
    def expert_load(self, texts: Sequence[str]) -> ExpertLoad:
        """How many tokens of the texts each expert of each layer computes; a heat map in a notebook.

        Raises:
            ValidationError: the model has no experts, or there is no text.
        """
        with self._exclusive():
            return measure_load(self._begin(), texts)

    @known_names("LLM.save_quantized")
    def save_quantized(self, path: str | Path, format: str = "compressed-tensors") -> Path:
        """Write the quantized model to a new folder that vLLM, transformers (with compressed-tensors) and we can load;
        or to a GGUF file, for llama.cpp and us.

        vLLM 0.32 has no CPU kernel for 8-bit weights with float activations. For vLLM on a CPU, save "w8a8", "w4a8", or
        "w4a16" in groups of 128 with `lm_head=None`.

        Args:
            path: of the folder (with "gguf" of the file, which ends in .gguf), which must not exist; it appears only
                when it is complete.
            format: "compressed-tensors", "modelslim", "gptq" (w4a16 and w8a16), "bitsandbytes" (nf4) or "gguf" (q8_0,
                q4_0, q4_k, and mxfp4 with lm_head="q8_0").

        Raises:
            ValidationError: the model is not quantized, `path` exists, or the format is unknown.
            LLMError: the format cannot store a layer's scheme, or the disk is full.
        """
        with self._exclusive():
            return self._begin().runner.save(path, format)

    @known_names("LLM.sites")
    def sites(self) -> dict[str, Site]:
        """The places inside the model that `capture` and `interventions` name, with the shape of one position's
        activation, in the order of computing.

        Raises:
            ValidationError: the model makes vectors or classes, or is divided over several processes.
        """
        return self._open_engine().runner.sites()

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The checkpoint's tensors by name, as the model has them now: matrices as float32 values, dequantized."""
        return whole_model.Weights(self)

    @known_names("LLM.update_weights")
    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace tensors of the checkpoint; the model is then what loading such a checkpoint gives, bit for bit.

        It is loaded anew beside the old one, packed and quantized with the settings of this LLM, and replaces it when
        it is complete: if anything fails, nothing has changed. What is cached of prompts is dropped.

        Args:
            tensors: by the checkpoint's names, of its shapes.

        Raises:
            ValidationError: a name or a shape is not the checkpoint's, a stream is suspended, some weights are in a
                file (`offload_weights`), or a head drafts from hidden states.
            OutOfMemoryError: there is no room for two models.
        """
        whole_model.update_weights(self, tensors)

    @known_names("LLM.load_weights")
    def load_weights(self, path: str | Path) -> None:
        """As `update_weights`, with all weights of another checkpoint, whose config.json says the same of the model."""
        whole_model.load_new_weights(self, path)

    @known_names("LLM.sleep")
    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: 1: the KV cache; 2: the weights too, which are then read again.

        What is cached of prompts is dropped. vLLM's level 1 moves weights from a device to the host; here they stay.
        """
        whole_model.sleep(self, level)

    @known_names("LLM.wake_up")
    def wake_up(self) -> None:
        """Fetch the memory that `sleep` gave back. Does nothing where nothing sleeps."""
        whole_model.wake_up(self)

    @known_names("LLM.logit_lens")
    def logit_lens(self, prompt: PromptType, token: str | int | None = None) -> pandas.DataFrame:
        """What the LM head makes of the residual stream behind each layer: a row per layer, a column per token.

        Cells are the likeliest next token, with its probability in `.attrs["values"]`; or, with a `token` (an id, or a
        text, whose first token counts), the probability of that. A heat map in a notebook; one batched call.
        """
        from llm.inside.experiments import logit_lens

        return logit_lens(self, prompt, token)

    @known_names("LLM.patch")
    def patch(
        self,
        clean: PromptType,
        corrupted: PromptType,
        sites: str | Sequence[str] = "layers.*.output",
        metric: PatchMetric = None,
    ) -> pandas.DataFrame:
        """Activation patching: `corrupted` with one activation of `clean` in it, at each site and each token.

        A row per site and a column per token; cells are the metric of the logits behind the prompt, `.attrs["clean"]`
        and `.attrs["corrupted"]` those of the prompts themselves. A heat map in a notebook; one batched call.

        Args:
            clean: a prompt with as many tokens as `corrupted`.
            corrupted: the prompt that is computed.
            sites: as in `Capture`.
            metric: logits float32 [vocab] -> float; or (answer, wrong answer), the difference of the logits of their
                first tokens; None: the logprob of the likeliest answer to `clean`.

        Raises:
            ValidationError: the prompts differ in length.
        """
        from llm.inside.experiments import patch

        return patch(self, clean, corrupted, sites, metric)

    @known_names("LLM.apply_model")
    def apply_model(self, func: Callable[[torch.nn.Module], R]) -> list[R]:
        """[func(model)]; `func` may read and change the model.

        Packed weights are not in the checkpoint's layout. The prefix cache and recorded steps are dropped, because the
        model may have changed.

        Raises:
            EngineBusyError: called from inside a call.
            ValidationError: `func` is not callable, or a stream is suspended, whose answer could change midway.
        """
        return whole_model.apply_model(self, func)

    @known_names("LLM.collective_rpc")
    def collective_rpc(
        self,
        method: str | Callable[..., R],
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> list[R]:
        """[method(worker, *args, **kwargs)] with the only `Worker`; its `get_model()` returns the model.

        Args:
            method: a callable, or the name of one of the worker's methods.
            timeout: None only, because the call runs in this process.
        """
        return whole_model.collective_rpc(self, method, timeout, args, kwargs)

    def add_logits_processor(self, processor: type[LogitsProcessor] | str) -> None:
        """Load a logits processor, a class or `"module:Class"`, for the following calls.

        It replaces a loaded class with the same module and name, so a notebook can redefine a class and add it again. A
        suspended stream continues with the new one. Raises as `LLM(logits_processors=...)`.
        """
        whole_model.add_logits_processor(self, processor)

    def remove_logits_processor(self, processor: type[LogitsProcessor] | str) -> None:
        """Unload a logits processor, given by name or class; raises `ValidationError` if it is not loaded."""
        whole_model.remove_logits_processor(self, processor)

    @property
    def logits_processors(self) -> list[type[LogitsProcessor]]:
        """The loaded classes, in the order they are applied."""
        self._open_engine()
        return list(self._preprocessor.logits_processors)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. While a stream is suspended, does nothing and returns False."""
        with self._exclusive():
            engine = self._begin()
            if engine.scheduler.has_unfinished():
                return False
            engine.reset_prefix_cache()
            return True

    @known_names("LLM.save_prefix_cache")
    def save_prefix_cache(self, path: str | Path) -> Path:
        """Write what the prefix cache has into a new folder, for `LLM(model, prefix_cache=folder)` in another process.

        Prompts that begin with the same tokens are then not computed again; answers are the same to the bit. The folder
        is bound to the weights, the settings that change their results, the block size and each row's adapter and
        `cache_salt`. It has the tokens of the prompts. At most what fits the KV cache is in it.

        Args:
            path: of the folder, which must not exist; it appears only when it is complete.

        Raises:
            ValidationError: nothing is cached, caching is off, `path` exists, or the weights are not a checkpoint's.
            LLMError: the disk is full.
        """
        from llm.prefix_cache import save_cache_of

        return save_cache_of(self, path)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record all that this thread computes until `stop_profile`, with `LLM(profiler_config=...)`.

        Args:
            profile_prefix: the beginning of the trace's file name.

        Raises:
            ValidationError: there is no `profiler_config`, or it is recording.
        """
        self._open_engine()
        self._profiler.start(profile_prefix)

    def stop_profile(self) -> Path:
        """Write the trace into `torch_profiler_dir` and return its file, which https://ui.perfetto.dev shows.

        Raises:
            ValidationError: `start_profile` was not called. LLMError: the trace cannot be written.
        """
        return self._profiler.stop()

    @property
    def llm_engine(self) -> LLMEngine:
        """vLLM's engine of that name, over this model: its configs, and requests step by step."""
        from llm.llm_engine import LLMEngine

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
            if self._preprocessor.images is not None:
                self._preprocessor.images.close()
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

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled or copied; build one in each process that needs one.")

    def __repr__(self) -> str:
        if self._engine is None:
            return "LLM(closed)"
        return f"LLM({self.config.model_config.model!r}, max_model_len={self.config.model_config.max_model_len})"

    def _repr_html_(self) -> str:
        """For notebooks: the model, what it takes of the memory, and the phases of start-up."""
        if self._engine is None:
            return "<p>LLM(closed)</p>"
        return llm_as_html(self._engine.config, self._engine.all_stats(), self.startup)

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
        if self._is_asleep:
            raise EngineClosedError("this LLM sleeps; call wake_up() first.")
        if self._needs_reset or engine.needs_reset:
            engine.reset()
            self._needs_reset = False
        self._abort_dropped(engine)
        return engine

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise EngineClosedError("this LLM is closed; make a new one.")
        return self._engine

    def after_fork(self) -> None:
        """In a forked child: the call of another thread has ended in the middle, and nobody cleans up after it."""
        self._needs_reset = renew(self._lock) or self._needs_reset

    def _abort_if_idle(self) -> None:
        """Abort dropped streams now; if a call is running, it will abort them."""
        if self._needs_reset or self._is_in_call() or not self._lock.acquire(blocking=False):
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

    # A method whose names are bound here: at interpreter exit this module's own may be gone before the last stream is.
    def _drop(self, *states: PromptState, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """End a stream's requests. A generator can be collected during any call, so aborting them may have to wait."""
        if is_exiting() or all(state.finished for state in states):
            return
        self._dropped.extend(states)
        with InterruptGuard() as guard:
            self._abort_if_idle()
        if guard.requested:
            raise KeyboardInterrupt
