"""class LLM: the whole public surface, thin. It validates, delegates to the engine, and keeps calls from colliding."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from llm.base.checks import check_flag
from llm.base.errors import (
    EngineBusyError,
    EngineClosedError,
    GenerationInterrupted,
    LLMError,
    ValidationError,
    nearest,
)
from llm.base.names import known_names
from llm.config import compilation, env
from llm.config.arguments import CALLS, check_arguments
from llm.config.elsewhere import METHODS
from llm.config.engine import EngineArgs, EngineConfig
from llm.engine.engine import Engine, EngineStats
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState, warn_of_errors
from llm.engine.preprocess import Preprocessor, Row
from llm.engine.progress import Progress, check_use_tqdm
from llm.explain import Explanation
from llm.inputs import TokensPrompt
from llm.outputs import RequestOutput
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling.logits_processors.loading import load_logits_processor, qualified_name
from llm.sampling_params import SamplingParams
from llm.scoring import Scoring
from llm.startup.build import build_engine

if TYPE_CHECKING:
    from llm.quantize.report import QuantizationReport

logger = logging.getLogger("llm")

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "tiny"


class LLM(Scoring):
    """A language model in this process.

    Args:
        model: a folder in Hugging Face's layout, or a hub name; without it the small embedded model.
        tokenizer: folder or hub name of another tokenizer.
        dtype: "auto" or "float32": weights stay as they are stored; "bfloat16" or "float16" ("half"): matrices are
            stored in it. A CPU computes in float32, but a processor with matrix tiles (AMX) rounds what goes into a
            matrix product to bfloat16 where "bfloat16" was asked for: prompts and batches take two thirds of the time.
        quantization: "w8a8", "w4a8", "w8a16", "w4a16": quantize the weights while they are read; a dict says it per
            layer (`llm.quantization.configs.online`). None: as the checkpoint says. A quantized checkpoint's own format
            may be named: "compressed-tensors", "ascend" (ModelSlim).
        calibration: texts that are run through the unquantized model first, to see what goes into each layer: they make
            4-bit weights better, and "w8a8_static" needs them.
        max_model_len: most tokens of prompt and output together; None: as many as the model and the memory allow.
        max_num_seqs: most rows computed in one step.
        max_num_batched_tokens: most tokens computed in one step.
        block_size: tokens per KV cache block.
        kv_cache_memory_bytes: KV budget; None: what can be used, at most half of what is free.
        kv_cache_dtype: "auto" (the weights' type), "float32", "bfloat16" or "float16".
        enable_prefix_caching: prompts that begin alike share what was computed.
        enable_chunked_prefill: long prompts are computed over several steps.
        seed: rows without a seed of their own get one derived from this; None: from the operating system.
        revision: of a hub model.
        hf_overrides: keys of config.json to replace; None as a value removes one.
        load_format: "auto" and "safetensors" read safetensors; "dummy" makes random weights, for measuring.
        skip_tokenizer_init: no tokenizer; prompts are token ids and outputs have no text.
        chat_template: replaces the model's own; text, or the path of a file.
        use_tqdm_on_load: a bar when loading takes more than two seconds.
        max_logprobs: most logprobs a request may ask for; -1: no limit.
        logprobs_mode: what logprobs report: "raw_logprobs" or "raw_logits", of the model, or "processed_logprobs" or
            "processed_logits", after penalties, processors, temperature and cuts.
        device: "auto", "cpu", or the name of a platform plugin.
        compilation_config: which operations run their kernels and which plain PyTorch: a dict such as
            `{"custom_ops": ["none", "+rms_norm"]}`, or a mode; see `llm.config.compilation.CompilationConfig`.
        logits_processors: `LogitsProcessor` classes, or "module:Class" strings that name them; those of installed
            packages (entry points in `llm.logits_processors`) are loaded before them.
        generation_config: "auto": generation_config.json supplies the defaults when `generate` gets no params; "vllm":
            neutral defaults.
        verbose: log what was decided and what became of arguments that have no effect here.
        **kwargs: vLLM's other arguments; `llm.config.arguments.ARGUMENTS` says of each what becomes of it.

    Attributes:
        config: what was decided, with reasons; `print(llm.config)`.
        startup: seconds per phase of start-up.

    Raises:
        ValidationError: an argument is wrong. CheckpointError: the model cannot be loaded. UnsupportedModelError: its
        architecture is unknown. OutOfMemoryError: the KV budget holds not one sequence.
    """

    def __init__(
        self,
        model: str | Path = EMBEDDED_MODEL,
        *,
        tokenizer: str | Path | None = None,
        dtype: Any = "auto",
        quantization: Any = None,
        calibration: Sequence[str] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_dtype: Any = "auto",
        enable_prefix_caching: bool | None = True,
        enable_chunked_prefill: bool | None = True,
        seed: int | None = 0,
        revision: str | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        load_format: str = "auto",
        skip_tokenizer_init: bool = False,
        chat_template: str | Path | None = None,
        use_tqdm_on_load: bool = True,
        max_logprobs: int = -1,
        logprobs_mode: str = "raw_logprobs",
        device: str = "auto",
        compilation_config: Any = None,
        logits_processors: Any = None,
        generation_config: str = "auto",
        verbose: bool = False,
        **kwargs: Any,
    ) -> None:
        self._engine: Engine | None = None
        self._lock = threading.RLock()
        self._dropped: list[PromptState] = []
        check_flag("verbose", verbose)
        env.warn_of_unknown()
        _set_log_level(verbose)
        notes = check_arguments(kwargs)
        args = EngineArgs(
            model=model,
            tokenizer=tokenizer,
            dtype=dtype,
            quantization=quantization,
            calibration=calibration,
            max_model_len=None if max_model_len == -1 else max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=True if enable_prefix_caching is None else enable_prefix_caching,
            enable_chunked_prefill=True if enable_chunked_prefill is None else enable_chunked_prefill,
            seed=seed,
            revision=revision,
            hf_overrides=hf_overrides,
            load_format=load_format,
            skip_tokenizer_init=skip_tokenizer_init,
            chat_template=None if chat_template is None else str(chat_template),
            use_tqdm_on_load=use_tqdm_on_load,
            max_logprobs=max_logprobs,
            device=device,
            generation_config=generation_config,
            compilation_config=compilation_config,
            logprobs_mode=logprobs_mode,
            logits_processors=logits_processors,
        )
        self._args = args
        built = build_engine(args)
        self._engine = built.engine
        self._default_params = built.default_params
        self._is_quantized = built.plan.is_quantized
        self._preprocessor = Preprocessor(
            built.engine.config.model_config, built.engine.tokenizer, built.engine.eos_token_ids
        )
        self._preprocessor.logits_processors = built.plan.logits_processors
        self.config: EngineConfig = built.engine.config
        self.startup = built.startup
        if verbose:
            for note in (*notes, *compilation.notes(compilation_config)):
                logger.info(note)
            logger.info("resolved configuration\n%s", self.config)

    @known_names("LLM.generate", CALLS)
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; outputs come back in the order of the prompts.

        Args:
            prompts: a string, token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}`, or a list of any of these.
            sampling_params: one for all rows, or one per row; None: the model's defaults.
            use_tqdm: a progress bar in tokens; False prints nothing; a callable makes the bar.

        Raises:
            ValidationError: names every bad row, before any work starts.
            GenerationInterrupted: Ctrl-C; a KeyboardInterrupt that carries the finished outputs.
        """
        _refuse_unless_none("lora_request", lora_request)
        _refuse_unless_none("priority", priority)
        check_use_tqdm(use_tqdm)
        # The guard comes first: Ctrl-C must not leave a lock held or a part of the rows behind.
        with InterruptGuard() as guard, self._exclusive():
            engine = self._begin()
            rows = self._preprocessor.rows(prompts, sampling_params, self.get_default_sampling_params)
            outputs = self._run(engine, rows, use_tqdm, guard)
        if guard.requested:
            raise GenerationInterrupted(outputs)
        return outputs

    @known_names("LLM.chat", CALLS)
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: None = None,
        priority: None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of `{"role", "content"}`) or many (a list of such lists).

        The model's chat template, given `chat_template_kwargs`, turns each into a prompt; then as `generate`.
        """
        _refuse_unless_none("lora_request", lora_request)
        _refuse_unless_none("priority", priority)
        prompts = self.render_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    @known_names("LLM.render_chat", CALLS)
    def render_chat(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[TokensPrompt]:
        """What `chat` gives to `generate`, one prompt per conversation; `stream` takes one of them too."""
        self._open_engine()
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        return self._preprocessor.render_chat(messages, options, chat_template_kwargs or {})

    @known_names("LLM.stream", {**CALLS, "use_tqdm": "a stream shows no bar"})
    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the completion's text piece by piece. Leaving the loop early drops the row and frees its blocks.

        Other calls work while the stream is suspended. Raises as `generate`, and whatever ended the row with an error
        of its own; `n` must be 1.
        """
        for state in self.stream_state(prompt, sampling_params):
            pieces = state.completions[0].pieces
            while pieces:
                yield pieces.pop(0)
            error = state.completions[0].request.error
            if error is not None:
                raise error

    @known_names("LLM.stream_state", CALLS)
    def stream_state(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[PromptState]:
        """As `stream`, but yields the request's state whenever there is new text, and once when it has ended."""
        state: PromptState | None = None
        try:
            with InterruptGuard() as guard, self._exclusive():
                engine = self._begin()
                rows = self._preprocessor.rows(prompt, sampling_params, self.get_default_sampling_params)
                state = engine.add(_only_row(rows), streaming=True)
            while not guard.requested and not state.finished:
                with InterruptGuard() as guard, self._exclusive():
                    engine = self._begin()
                    if not state.finished:
                        engine.step()
                if state.completions[0].pieces and not guard.requested:
                    yield state
            self._open_engine().end_call()
            if guard.requested:
                raise GenerationInterrupted([state.output() if state.finished else None])
            if state.completions[0].request.finish_reason == "abort":
                self._open_engine()
                raise LLMError("the stream was dropped because another call on this LLM failed; start it again.")
            yield state
        finally:
            if state is not None:
                self._drop(state)

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers' class."""
        engine = self._open_engine()
        if engine.tokenizer is None:
            raise ValidationError(
                "there is no tokenizer: skip_tokenizer_init=True.", parameter="skip_tokenizer_init", value=True
            )
        return engine.tokenizer.huggingface()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given no params; a copy."""
        return self._default_params.clone()

    def explain(self) -> Explanation:
        """What every operation, pluggable layer and quant method of the model is, and why; print it, or see it as HTML
        in a notebook."""
        return self._open_engine().runner.describe()

    def add_logits_processor(self, processor: type[LogitsProcessor] | str) -> None:
        """Load another logits processor, a class or `"module:Class"`, for the calls that follow.

        One of the same module and name is replaced: redefine a class in a notebook cell, add it again, try it. A
        suspended stream goes on with the new one. Raises as `LLM(logits_processors=...)`.
        """
        added = load_logits_processor(processor)
        with self._exclusive():
            self._begin()
            current = self.logits_processors
            names = [qualified_name(kind) for kind in current]
            if qualified_name(added) in names:
                current[names.index(qualified_name(added))] = added
            else:
                current.append(added)
            self._set_logits_processors(current)

    def remove_logits_processor(self, processor: type[LogitsProcessor] | str) -> None:
        """Unload a logits processor, named as it was loaded or by its class; `ValidationError` if it is not loaded."""
        with self._exclusive():
            self._begin()
            current = self.logits_processors
            name = processor if isinstance(processor, str) else qualified_name(processor)
            kept = [kind for kind in current if qualified_name(kind) != name]
            if len(kept) == len(current):
                loaded = ", ".join(map(qualified_name, current)) or "none"
                raise ValidationError(
                    f"{name} is not loaded; loaded are: {loaded}.", parameter="processor", value=processor
                )
            self._set_logits_processors(kept)

    @property
    def logits_processors(self) -> list[type[LogitsProcessor]]:
        """The loaded classes, in the order they are applied."""
        self._open_engine()
        return list(self._preprocessor.logits_processors)

    def _set_logits_processors(self, classes: list[type[LogitsProcessor]]) -> None:
        self._open_engine().runner.set_processors(classes)
        self._preprocessor.logits_processors = classes

    @known_names("LLM.quantization_report")
    def quantization_report(
        self,
        texts: Sequence[str] = (),
        *,
        prompts: Sequence[Any] | None = None,
        against: str | Path | None = None,
        speed: bool = True,
    ) -> QuantizationReport:
        """What quantization changed: per layer, and for the model as a whole against the unquantized one.

        The unquantized model is opened beside this one while it is measured. Speed is of this machine, now.

        Args:
            texts: for perplexity, agreement, and the noise of each layer's outputs.
            prompts: for greedy agreement over 64 tokens; None: 64 pieces of the texts.
            against: folder of the unquantized model; needed when the checkpoint was quantized already.
            speed: measure tokens per second with and without.
        """
        from llm.quantize.report import make_report

        engine = self._open_engine()
        plain = replace(self._args, quantization=None, calibration=None)
        if against is not None:
            plain = replace(plain, model=against)
        has_plain = against is not None or not self._is_quantized
        return make_report(self, engine, (lambda: LLM._of(plain)) if has_plain else None, texts, prompts, speed)

    @classmethod
    def _of(cls, args: EngineArgs) -> LLM:
        return cls(**{item.name: getattr(args, item.name) for item in fields(args)})

    @known_names("LLM.save_quantized")
    def save_quantized(self, path: str | Path, format: str = "compressed-tensors") -> Path:
        """Write the quantized model as a new folder that vLLM, transformers (with compressed-tensors) and we load.

        vLLM 0.32 has no kernel for 8-bit weights under float activations on a CPU: for it, on a CPU, save "w8a8",
        "w4a8", or "w4a16" in groups of 128 with `lm_head=None`.

        Args:
            path: of the folder, which must not exist; it appears when it is complete.
            format: "compressed-tensors" or "modelslim".

        Raises:
            ValidationError: the model is not quantized, `path` exists, or the format is unknown.
            LLMError: a layer has no form in the format, or the disk is full.
        """
        with self._exclusive():
            return self._begin().runner.save(path, format)

    @property
    def stats(self) -> EngineStats:
        """Steps, tokens and seconds since start, the model's share apart from the engine's own."""
        return self._open_engine().stats

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, and nothing done, while a stream is suspended."""
        with self._exclusive():
            engine = self._begin()
            if engine.scheduler.has_unfinished():
                return False
            engine.scheduler.blocks.reset_prefix_cache()
            return True

    def close(self) -> None:
        """Free weights and KV cache, whatever still refers to this object. Harmless when called again."""
        with self._exclusive():
            if self._engine is None:
                return
            self._engine.close()
            self._engine = None
            del self._preprocessor  # it holds the tokenizer
            self._dropped.clear()

    def __enter__(self) -> LLM:
        self._open_engine()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The model's parts refer to each other: without this, `del llm` frees nothing until Python looks for cycles.
        if getattr(self, "_engine", None) is not None and not sys.is_finalizing():
            self.close()

    if not TYPE_CHECKING:  # a type checker would take every name for one we have

        def __getattr__(self, name: str) -> Any:
            """What vLLM's has and this one has not, told in a sentence."""
            instead = METHODS.get(name)
            hint = f"; {instead}." if instead else f".{nearest(name, dir(type(self)))}"
            raise AttributeError(f"LLM has no {name!r}{hint}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled or copied; build one in each process that needs one.")

    def __repr__(self) -> str:
        if self._engine is None:
            return "LLM(closed)"
        return f"LLM({self.config.model_config.model!r}, max_model_len={self.config.model_config.max_model_len})"

    def _run(
        self, engine: Engine, rows: list[Row], use_tqdm: bool | Callable[..., Any], guard: InterruptGuard
    ) -> list[RequestOutput]:
        prompts: list[PromptState] = []
        try:
            for row in rows:
                prompts.append(engine.add(row))
            with closing(Progress(prompts, use_tqdm)) as progress:
                engine.run(prompts, self._between_steps(engine, prompts, progress, guard))
            outputs = [prompt.output() for prompt in prompts]
            warn_of_errors(outputs)
            return outputs
        except GenerationInterrupted:
            engine.abort(prompts)
            raise
        except BaseException:  # of a callback, of the user's own signal handler, of a second Ctrl-C: anywhere
            guard.end()
            engine.reset()
            raise
        finally:
            self._abort_dropped(engine)

    def _between_steps(
        self, engine: Engine, prompts: list[PromptState], progress: Progress, guard: InterruptGuard
    ) -> Callable[[], None]:
        def between_steps() -> None:
            self._abort_dropped(engine)
            progress.update()
            if guard.requested:
                guard.end()
                raise GenerationInterrupted([prompt.output() if prompt.finished else None for prompt in prompts])

        return between_steps

    def _exclusive(self) -> Any:
        """The lock of a call: those of other threads wait, one from inside a call is refused.

        It is entered by `with` itself, not by a function of ours: no signal can come in between and leave it locked.
        """
        if self._is_in_call():
            raise EngineBusyError("this LLM is in the middle of a call; a callback cannot call it again.")
        return self._lock

    def _is_in_call(self) -> bool:
        """Whether this thread is inside a call."""
        lock: Any = self._lock
        return lock._is_owned()

    def _begin(self) -> Engine:
        """What every call starts with; the lock is held."""
        engine = self._open_engine()
        self._abort_dropped(engine)
        return engine

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise EngineClosedError("this LLM is closed; make a new one.")
        return self._engine

    def _drop(self, state: PromptState) -> None:
        """End a stream's row. A generator can be collected in the middle of any call, so the work may have to wait."""
        if state.finished:
            return
        self._dropped.append(state)
        with InterruptGuard() as guard:
            if not self._is_in_call() and self._lock.acquire(blocking=False):
                try:
                    if self._engine is not None:
                        self._abort_dropped(self._engine)
                        self._engine.end_call()
                finally:
                    self._lock.release()
        if guard.requested:
            raise KeyboardInterrupt

    def _abort_dropped(self, engine: Engine) -> None:
        while self._dropped:
            engine.abort([self._dropped.pop()])


def _only_row(rows: list[Row]) -> Row:
    if len(rows) != 1:
        raise ValidationError(
            f"stream takes one prompt, got {len(rows)}; use generate() for many.", parameter="prompt", value=len(rows)
        )
    if rows[0].params.n != 1:
        raise ValidationError(
            f"stream takes n=1, got {rows[0].params.n}; use generate() for more.", parameter="n", value=rows[0].params.n
        )
    return rows[0]


def _refuse_unless_none(name: str, value: Any) -> None:
    if value is not None and value != [] and value != {}:
        raise ValidationError(
            f"{name} is not supported in this release, got {value!r}; leave it out.", parameter=name, value=value
        )


def _set_log_level(verbose: bool) -> None:
    """LLM_LOG_LEVEL first, then `verbose`; with neither, the program's own settings stand (Python shows warnings)."""
    if env.get("LLM_LOG_LEVEL") is not None or verbose:
        logger.setLevel(env.get_choice("LLM_LOG_LEVEL", ("DEBUG", "INFO", "WARNING", "ERROR"), "INFO"))
    if verbose and not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
