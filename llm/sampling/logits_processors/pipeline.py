"""All processors of an engine, in the order of their stages.

The built-in ones, and those of loaded classes (given as classes, as `"module:Class"`, or installed as entry points),
which can be added and removed between calls.
`is_argmax_invariant()` is read once, here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from llm import plugins
from llm.base.checks import refuse
from llm.errors import LogitsProcessorError, ValidationError
from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE
from llm.sampling.logits_processors.builtin import (
    AllowedTokensLogitsProcessor,
    BadWordsLogitsProcessor,
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    PenaltiesLogitsProcessor,
    ThinkingBudgetLogitsProcessor,
)
from llm.sampling.logits_processors.interface import (
    AdapterLogitsProcessor,
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessors,
)
from llm.sampling.structured.processor import StructuredOutputsLogitsProcessor

if TYPE_CHECKING:
    from llm.config.engine import VllmConfig


class LogitsProcessors:
    """Instances by stage; `llm.sampling.sampler` lists the steps between the stages.

    Attributes:
        grammar: applied before the raw logprobs are taken.
        non_argmax_invariant: allowed tokens, bad words, min tokens, bias, custom ones, the requests' own, penalties,
            the thinking budget.
        argmax_invariant: after the temperature: min_p, then custom ones.
        _following: those to tell of a step in which no row came or left: the custom ones, and those with a row.
    """

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        custom: Sequence[type[LogitsProcessor]] = (),
        backend: Backend = REFERENCE,
    ) -> None:
        self._config = config
        self._backend = backend
        self._device = device
        self._custom = list(custom)
        self._is_stale = False
        self.rebuild()

    def forget_rows(self) -> None:
        """The batch is empty: construct all instances again before the next step."""
        self._is_stale = True

    def rebuild(self) -> None:
        """Construct every instance again, for an empty batch."""
        self._is_stale = False
        if "_structured" in vars(self):
            self.end_call()
        before: list[type[LogitsProcessor]] = [
            AllowedTokensLogitsProcessor,
            BadWordsLogitsProcessor,
            MinTokensLogitsProcessor,
            LogitBiasLogitsProcessor,
        ]
        self._structured = StructuredOutputsLogitsProcessor(self._config, self._device, self._backend.pins)
        self.grammar: list[LogitsProcessor] = [self._structured]
        custom = [self._make(kind) for kind in self._custom]
        invariant = [bool(processor.is_argmax_invariant()) for processor in custom]
        self.non_argmax_invariant = [
            *(self._make(kind) for kind in before),
            *(processor for processor, skip in zip(custom, invariant, strict=True) if not skip),
            self._make(RequestLogitsProcessors),
            self._make(PenaltiesLogitsProcessor),
            self._make(ThinkingBudgetLogitsProcessor),
        ]
        self.argmax_invariant = [
            MinPLogitsProcessor(self._config, self._device, self._backend.pins, self._backend),
            *(processor for processor, skip in zip(custom, invariant, strict=True) if skip),
        ]
        self._following = list(self.all)

    @property
    def custom(self) -> list[type[LogitsProcessor]]:
        """The loaded classes, in order."""
        return list(self._custom)

    def set_custom(self, custom: Sequence[type[LogitsProcessor]], rows: Sequence[AddedRequest]) -> None:
        """Replace the loaded classes; the new instances get the batch's `rows` as added.

        If a constructor or `update_state` raises, the old instances stay.
        """
        before = dict(self.__dict__)
        try:
            self._custom = list(custom)
            self.rebuild()
            if rows:
                self.update_state(BatchUpdate(len(rows), [], list(rows), []))
        except BaseException:
            self.__dict__.update(before)
            raise

    @property
    def all(self) -> Iterator[LogitsProcessor]:
        return chain(self.grammar, self.non_argmax_invariant, self.argmax_invariant)

    def end_call(self) -> None:
        """Release what is held during a call: threads."""
        self._structured.end_call()

    def is_idle(self) -> bool:
        """True if no processor would change anything in this step."""
        return all(processor.is_idle() for processor in self._following)

    def update_state(self, batch_update: BatchUpdate | None, drafts: Mapping[int, Sequence[int]] | None = None) -> None:
        """Call every processor's `update_state`; raises `LogitsProcessorError` if one raises.

        `drafts`: batch row -> the tokens drafted after its last one.
        """
        if self._is_stale:
            self.rebuild()
        self._structured.drafts = drafts or {}
        if batch_update is not None:
            self._following = list(self.all)
        for processor in self._following:
            try:
                processor.update_state(batch_update)
            except Exception as error:
                raise _failed(processor, "update_state", error) from error
        if batch_update is not None:
            # A built-in one that is idle stays so until rows come, and learns nothing from a step without changes.
            own = [item for item in self._following if type(item) in self._custom or not item.is_idle()]
            self._following = own

    def forced(self, row: int) -> list[int]:
        """The next tokens of a batch row, as far as they were drafted and its grammar leaves no other, whatever the
        logits are: no other processor is active.
        """
        active = [item for item in self._following if type(item) in self._custom or not item.is_idle()]
        return self._structured.forced(row) if active == [self._structured] else []

    def apply(
        self,
        stage: Sequence[LogitsProcessor],
        logits: torch.Tensor,
        rows: np.ndarray,
        batch_size: int,
        errors: dict[int, Exception],
    ) -> torch.Tensor:
        """Apply the processors of a stage, except idle ones.

        Args:
            logits: float32 [L, vocab], one logit row per batch row that samples; changed in place or not.
            rows: int64 [L], increasing, the batch row of each logit row.
            batch_size: number of batch rows, sampling or not.
            errors: logit row -> its exception; entries are added.

        Raises:
            LogitsProcessorError: a processor raised, or did not return logits of the same shape.
        """
        active = [processor for processor in stage if not processor.is_idle()]
        if not active:
            return logits
        partial = len(rows) != batch_size
        logit_rows = {int(row): logit_row for logit_row, row in enumerate(rows)}
        if partial:
            index = self._backend.upload(rows)
            whole = logits.new_zeros(batch_size, logits.shape[1]).index_copy_(0, index, logits)
        else:
            whole = logits
        for processor in active:
            if isinstance(processor, AdapterLogitsProcessor):
                processor.drawing = logit_rows
            whole = _apply_one(processor, whole)
            _take_row_errors(processor, logit_rows, errors)
        return whole.index_select(0, index) if partial else whole

    def _make(self, kind: type[LogitsProcessor]) -> LogitsProcessor:
        return kind(self._config, self._device, self._backend.pins)


def _apply_one(processor: LogitsProcessor, logits: torch.Tensor) -> torch.Tensor:
    try:
        after = processor.apply(logits)
    except Exception as error:
        raise _failed(processor, "apply", error) from error
    if not isinstance(after, torch.Tensor) or after.shape != logits.shape:
        found = f"shape {tuple(after.shape)}" if isinstance(after, torch.Tensor) else type(after).__name__
        name = type(processor).__name__
        raise LogitsProcessorError(f"{name}.apply must return logits of shape {tuple(logits.shape)}, got {found}.")
    return after


def _take_row_errors(processor: LogitsProcessor, logit_rows: dict[int, int], errors: dict[int, Exception]) -> None:
    own: dict[int, Exception] | None = getattr(processor, "row_errors", None)
    if own:
        errors.update({logit_rows[row]: error for row, error in own.items() if row in logit_rows})
        own.clear()


def _failed(processor: LogitsProcessor, method: str, error: Exception) -> LogitsProcessorError:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return LogitsProcessorError(
        f"the logits processor {type(processor).__qualname__} raised in {method}(), which has all rows of a "
        f"step ({reason})."
    )


class LogitsProcessorLoadError(ValidationError, RuntimeError):
    """The module of a logits processor cannot be imported; `__cause__` is the error it raised."""


def load_logits_processors(given: object) -> list[type[LogitsProcessor]]:
    """The installed classes, then those of `LLM(logits_processors=...)`.

    Args:
        given: a list of classes and of `"module:Class"` strings (nested classes by dots), or None.

    Raises:
        ValidationError: an item is neither, or is no subclass of `LogitsProcessor`.
        LogitsProcessorLoadError: a module cannot be imported. Also a RuntimeError.
        PluginError: an entry point cannot be imported, or is no subclass of it. Also a RuntimeError.
    """
    if given is None:
        given = []
    if isinstance(given, str | type) or not isinstance(given, Sequence):
        refuse("logits_processors", given, "a list of classes or 'module:Class' strings")
    return [*_installed(), *(load_logits_processor(item) for item in given)]


def load_logits_processor(item: object) -> type[LogitsProcessor]:
    """One class, given as a class or as `"module:Class"`; raises the same errors as `load_logits_processors`."""
    if isinstance(item, str):
        return _by_name(item)
    if not isinstance(item, type):
        refuse("logits_processors", item, "a class or a 'module:Class' string")
    if not issubclass(item, LogitsProcessor):
        raise ValidationError(
            f"{item.__name__} is not a subclass of LogitsProcessor (of llm.v1.sample.logits_processor).",
            parameter="logits_processors",
            value=item,
        )
    return item


def qualified_name(kind: type) -> str:
    """`module:Class`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _installed() -> list[type[LogitsProcessor]]:
    found = plugins.load(plugins.installed(plugins.LOGITS_PROCESSORS)).items()
    kinds = (plugins.guarded(plugin, "cannot be used", load_logits_processor, item) for plugin, item in found)
    return [kind for kind in kinds if kind is not None]


def _by_name(name: str) -> type[LogitsProcessor]:
    module_name, separator, path = name.partition(":")
    if not (module_name and separator and path) or ":" in path:
        refuse("logits_processors", name, "'module:Class' strings")
    try:
        found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise _unloadable(f"the logits processor {name!r}", error) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            refuse("logits_processors", name, f"names of existing classes ({module_name} has no {path})")
        found = getattr(found, attribute)
    if not isinstance(found, type):
        refuse("logits_processors", name, f"names of classes ({path} is {type(found).__name__})")
    return load_logits_processor(found)


def _unloadable(what: str, error: BaseException) -> LogitsProcessorLoadError:
    message = f"{what} cannot be imported ({type(error).__name__}: {error})."
    return LogitsProcessorLoadError(message, parameter="logits_processors", value=what)
