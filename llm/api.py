"""class LLM: the whole public surface, thin. It validates, delegates to the engine, and keeps calls from colliding."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from llm import env
from llm.arguments import check_arguments
from llm.config import EngineArgs, EngineConfig
from llm.engine.build import build_engine
from llm.engine.engine import Engine, EngineStats
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState
from llm.engine.preprocess import Preprocessor, Row
from llm.engine.progress import Progress
from llm.errors import EngineBusyError, EngineClosedError, GenerationInterrupted, LLMError, ValidationError
from llm.outputs import RequestOutput
from llm.platforms import select_platform
from llm.sampling_params import SamplingParams

logger = logging.getLogger("llm")

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "tiny"

Message = dict[str, Any]


class LLM:
    """A language model in this process.

    Args:
        model: a folder in Hugging Face's layout, or a hub name; without it the small embedded model.
        tokenizer: folder or hub name of another tokenizer.
        dtype: type of activations: "auto" or "float32" on a CPU. Weights stay as stored.
        quantization: None in this release.
        max_model_len: most tokens of prompt and output together; None: as many as the model and the memory allow.
        max_num_seqs: most rows computed in one step.
        max_num_batched_tokens: most tokens computed in one step.
        block_size: tokens per KV cache block.
        kv_cache_memory_bytes: KV budget; None: what can be used, at most half of what is free.
        kv_cache_dtype: "auto" (the checkpoint's type), "float32", "bfloat16" or "float16".
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
        device: "auto" or "cpu".
        compilation_config, logits_processors: not in this release; None only.
        generation_config: "auto": generation_config.json supplies the defaults when `generate` gets no params; "vllm":
            neutral defaults.
        verbose: log what was decided and what became of arguments that have no effect here.
        **kwargs: vLLM's other arguments; `llm.arguments.ARGUMENTS` says of each whether it is accepted or refused.

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
        device: str = "auto",
        compilation_config: Any = None,
        logits_processors: Any = None,
        generation_config: str = "auto",
        verbose: bool = False,
        **kwargs: Any,
    ) -> None:
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._dropped: list[PromptState] = []
        _refuse_unless_none("compilation_config", compilation_config)
        _refuse_unless_none("logits_processors", logits_processors)
        _set_log_level(verbose)
        notes = check_arguments(kwargs)
        args = EngineArgs(
            model=str(model),
            tokenizer=None if tokenizer is None else str(tokenizer),
            dtype=dtype,
            quantization=quantization,
            max_model_len=None if max_model_len == -1 else max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=enable_prefix_caching is not False,
            enable_chunked_prefill=enable_chunked_prefill is not False,
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
        )
        built = build_engine(args)
        self._engine = built.engine
        self._default_params = built.default_params
        self._preprocessor = Preprocessor(built.engine.config.model_config, built.engine.tokenizer)
        self.config: EngineConfig = built.engine.config
        self.startup = built.startup
        if verbose:
            for note in notes:
                logger.info(note)
            logger.info("resolved configuration\n%s", self.config)

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
        with self._call() as engine:
            rows = self._preprocessor.rows(prompts, sampling_params, self.get_default_sampling_params)
            return self._run(engine, rows, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
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
        with self._call() as engine:
            options = dict(chat_template_kwargs or {})
            options |= {
                "chat_template": chat_template,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "tools": tools,
            }
            prompts = self._render(_list_conversations(messages), options)
            rows = self._preprocessor.tokenized(prompts, sampling_params, self.get_default_sampling_params)
            return self._run(engine, rows, use_tqdm)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the completion's text piece by piece. Leaving the loop early drops the row and frees its blocks.

        Other calls work while the stream is suspended. Raises as `generate`; `n` must be 1.
        """
        for state in self.stream_state(prompt, sampling_params):
            pieces = state.completions[0].pieces
            while pieces:
                yield pieces.pop(0)

    def stream_state(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[PromptState]:
        """As `stream`, but yields the request's state whenever there is new text, and once when it has ended."""
        with self._call() as engine:
            rows = self._preprocessor.rows(prompt, sampling_params, self.get_default_sampling_params)
            if len(rows) != 1 or rows[0].params.n != 1:
                raise ValidationError(
                    f"stream takes one prompt and n=1, got {len(rows)} prompts; use generate() for more.",
                    parameter="prompt",
                    value=len(rows),
                )
            state = engine.add(rows[0], streaming=True)
        try:
            while not state.finished:
                with self._call() as engine, InterruptGuard() as guard:
                    if not state.finished:
                        engine.step()
                    if guard.requested:
                        raise GenerationInterrupted([None])
                if state.completions[0].pieces:
                    yield state
            if state.completions[0].request.finish_reason == "abort":
                raise LLMError("the stream was dropped because another call on this LLM failed; start it again.")
            yield state
        finally:
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

    @property
    def stats(self) -> EngineStats:
        """Steps, tokens and seconds since start, the model's share apart from the engine's own."""
        return self._open_engine().stats

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, and nothing done, while a stream is suspended."""
        with self._call() as engine:
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
        select_platform("cpu")[0].release_memory()

    def __enter__(self) -> LLM:
        self._open_engine()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._engine is None:
            return "LLM(closed)"
        return f"LLM({self.config.model_config.model!r}, max_model_len={self.config.model_config.max_model_len})"

    def _run(self, engine: Engine, rows: list[Row], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        prompts: list[PromptState] = []
        # The guard comes first: a Ctrl-C while rows are being added must not leave some of them behind.
        with InterruptGuard() as guard:
            try:
                for row in rows:
                    prompts.append(engine.add(row))
                _run_with_progress(engine, prompts, use_tqdm, guard)
            except BaseException:
                engine.abort(prompts)
                raise
            outputs = [prompt.output() for prompt in prompts]
        if guard.requested:
            raise GenerationInterrupted(outputs)
        return outputs

    def _render(
        self, conversations: list[list[Message]], options: dict[str, Any]
    ) -> list[tuple[str | None, list[int]]]:
        tokenizer = self._open_engine().tokenizer
        if tokenizer is None:
            raise ValidationError(
                "chat needs a tokenizer: skip_tokenizer_init=True.", parameter="skip_tokenizer_init", value=True
            )
        texts = [tokenizer.render_chat(conversation, **options) for conversation in conversations]
        return list(zip(texts, tokenizer.encode_rendered(texts), strict=True))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time: other threads wait, a call from inside a call is refused."""
        if self._owner == threading.get_ident():
            raise EngineBusyError("this LLM is in the middle of a call; a callback cannot call it again.")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    @contextmanager
    def _call(self) -> Iterator[Engine]:
        with self._exclusive():
            engine = self._open_engine()
            self._abort_dropped(engine)
            yield engine

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise EngineClosedError("this LLM is closed; make a new one.")
        return self._engine

    def _drop(self, state: PromptState) -> None:
        """End a stream's row. A generator can be collected in the middle of any call, so the work may have to wait."""
        if state.finished or self._engine is None:
            return
        self._dropped.append(state)
        if self._lock.acquire(blocking=False):
            try:
                self._abort_dropped(self._engine)
            finally:
                self._lock.release()

    def _abort_dropped(self, engine: Engine) -> None:
        while self._dropped:
            engine.abort([self._dropped.pop()])


def _run_with_progress(
    engine: Engine, prompts: list[PromptState], use_tqdm: bool | Callable[..., Any], guard: InterruptGuard
) -> None:
    progress = Progress(prompts, use_tqdm)

    def between_steps() -> None:
        progress.update()
        if guard.requested:
            finished = [prompt.output() if prompt.finished else None for prompt in prompts]
            raise GenerationInterrupted(finished)

    try:
        engine.run(prompts, between_steps)
    finally:
        progress.close()


def _list_conversations(messages: Sequence[Any]) -> list[list[Message]]:
    if isinstance(messages, Sequence) and messages and not isinstance(messages, str):
        if all(isinstance(message, Mapping) for message in messages):
            messages = [messages]
        if all(_is_conversation(item) for item in messages):
            return [list(item) for item in messages]
    raise ValidationError(
        "messages must be a non-empty list of {'role': ..., 'content': ...}, or a list of such lists.",
        parameter="messages",
        value=type(messages).__name__,
    )


def _is_conversation(item: Any) -> bool:
    return (
        isinstance(item, list | tuple)
        and bool(item)
        and all(isinstance(message, Mapping) and "role" in message for message in item)
    )


def _refuse_unless_none(name: str, value: Any) -> None:
    if value is not None and value != [] and value != {}:
        raise ValidationError(
            f"{name} is not supported in this release, got {value!r}; leave it out.", parameter=name, value=value
        )


def _set_log_level(verbose: bool) -> None:
    level = env.get_choice("LLM_LOG_LEVEL", ("DEBUG", "INFO", "WARNING", "ERROR"), "INFO" if verbose else "WARNING")
    logger.setLevel(level)
    if verbose and not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
