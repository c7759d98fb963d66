"""Every exception that this package raises on purpose. A message is one sentence: what was wrong, the value, what would
be right; it never contains prompt text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "EmptyPromptError",
    "EngineBusyError",
    "EngineClosedError",
    "GenerationInterrupted",
    "JobError",
    "JobInterrupted",
    "LLMError",
    "LogitsProcessorError",
    "MissingPackageError",
    "OutOfMemoryError",
    "PluginError",
    "PromptTooLongError",
    "RankError",
    "RowError",
    "SamplingError",
    "TokenOutOfRangeError",
    "UnsupportedModelError",
    "ValidationError",
    "WorkerDiedError",
]


class LLMError(Exception):
    """Base of every error of this project."""


class ValidationError(LLMError, ValueError):
    """A value that the user passed is invalid.

    Attributes:
        parameter: the name of the argument or field, as the user wrote it.
        value: what was passed.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None):
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class PromptTooLongError(ValidationError):
    """A prompt leaves no room for a generated token.

    Attributes:
        num_tokens: tokens of the prompt; at least as many where tokenizing it would have taken long.
        limit: max_model_len, which must hold them and at least one more.
    """

    def __init__(self, message: str, *, num_tokens: int = 0, limit: int = 0):
        super().__init__(message, parameter="prompts", value=num_tokens)
        self.num_tokens = num_tokens
        self.limit = limit


class EmptyPromptError(ValidationError):
    """A prompt has no token."""


class TokenOutOfRangeError(ValidationError):
    """A token id of a prompt is not in the vocabulary; `value` is the id."""


class RowError(ValidationError):
    """A row of a job raised an exception that nothing expected; the message has its type and place."""


class ArgumentError(ValidationError, TypeError):
    """A call got an argument that the function does not have."""


class CheckpointError(LLMError, ValueError):
    """A model folder cannot be loaded: a file is missing, malformed, or does not match the architecture."""


class UnsupportedModelError(LLMError, ValueError):
    """The checkpoint needs an architecture or an option that no registered model supports."""


class OutOfMemoryError(LLMError, MemoryError):
    """Something would not fit in memory, checked before allocation if possible (the KV cache, for example)."""


class PluginError(LLMError, RuntimeError):
    """A plugin cannot be loaded, or breaks the contract of `llm.plugins`; the message names it and its package.

    Attributes:
        plugin: the `llm.plugins.Plugin` whose platform failed, so that start-up may go on without it; else None.
    """

    def __init__(self, message: str, *, plugin: Any = None):
        super().__init__(message)
        self.plugin = plugin


class RankError(LLMError, RuntimeError):
    """A step of several ranks was given up.

    Attributes:
        late: the rank that did not come to it; 0: another reason.
    """

    def __init__(self, message: str, late: int = 0):
        super().__init__(message)
        self.late = late


class EngineClosedError(LLMError, RuntimeError):
    """A method was called on an `LLM` after `close()`."""


class EngineBusyError(LLMError, RuntimeError):
    """A call was made from inside another call of the same engine."""


class JobError(LLMError):
    """A job cannot go on, or its files do not fit together; what it has finished is in its journal."""


class MissingPackageError(LLMError, ImportError):
    """A feature needs a package that is not installed; the message says how to install it."""


class WorkerDiedError(LLMError, RuntimeError):
    """A worker process has ended, or was ended because it hung; the message has its number and its last words.

    Attributes:
        number: of the worker.
    """

    def __init__(self, message: str, number: int = 0):
        super().__init__(message)
        self.number = number


class SamplingError(LLMError):
    """No token can be drawn for a request: every logit is -inf, or one is NaN. Ends the request, not the call."""


class LogitsProcessorError(LLMError, RuntimeError):
    """A batch-level logits processor raised, or did not return logits; `__cause__` is its own exception."""


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during a call: the current step was finished, the call's requests were dropped, the engine is usable.

    Attributes:
        outputs: one entry per prompt, in order. Completions that had not finished have their text so far and
            finish_reason "interrupted". Of `beam_search`: None for searches that had not finished.
    """

    def __init__(self, outputs: list[Any]):
        done = sum(output is not None and getattr(output, "finished", True) for output in outputs)
        super().__init__(f"interrupted with {done} of {len(outputs)} prompts finished; all are in `.outputs`")
        self.outputs = outputs

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: in a notebook the traceback is this line."""
        return [f"{type(self).__name__}: {self} (in a notebook also `llm.last_outputs`)"]


class JobInterrupted(GenerationInterrupted):
    """Ctrl-C or SIGTERM during a job, whose journal has all that was computed.

    Attributes:
        outputs: of the rows in flight, with their text so far.
        signal: the signal's number.
    """

    def __init__(self, outputs: Sequence[object], done: int = 0, count: int = 0, signal: int = 0):
        super().__init__(list(outputs))
        self.args = (f"interrupted with {done} of {count} rows finished; run the job again with resume to go on",)
        self.signal = signal

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def is_out_of_memory(error: BaseException) -> bool:
    """True for Python's MemoryError, and for what torch, safetensors and the system raise instead."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | OSError) and "allocate memory" in str(error)
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or "" if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
