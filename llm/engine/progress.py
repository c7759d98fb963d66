"""The progress of one call: its bar, or the user's callable."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from tqdm import tqdm

from llm.engine.output import PromptState
from llm.engine.request import Request
from llm.errors import ValidationError
from llm.progress import Bar, GenerationProgress, UseTqdm

_REFRESH_SECONDS = 0.1
# A refresh reads all running requests. This many times its duration must pass before the next: 0.1% of the time.
_REFRESH_COST_FACTOR = 1000
# Rows that have ended are forgotten after so many new ones, however long the next refresh takes.
_COUNTED_EVERY = 1024
# A shorter call shows no bar.
_DELAY_SECONDS = 0.5
_BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}{postfix}"


def check_use_tqdm(use_tqdm: object) -> None:
    """Raise `ValidationError` unless it is a bool or a callable."""
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise ValidationError(
            f"use_tqdm must be True, False or a callable that makes a bar or takes a GenerationProgress, got "
            f"{use_tqdm!r}.",
            parameter="use_tqdm",
            value=use_tqdm,
        )


class Progress:
    """Counts rows and tokens, and shows them.

    Args:
        use_tqdm: False: nothing is counted or shown; True: `Bar`, once the call takes longer. A callable that takes
            tqdm's arguments (`total=`, `desc=`, ...) makes the bar; any other gets a `GenerationProgress`.
        rows: of the call; those that are neither added nor settled are not known yet.
    """

    def __init__(self, use_tqdm: UseTqdm, rows: int) -> None:
        self._use = use_tqdm if rows else False
        self._counts = GenerationProgress(rows)  # of the rows that have ended
        self._added = 0
        self._waiting: deque[PromptState] = deque()
        self._active: list[PromptState] = []
        self._started = monotonic()
        self._next = 0.0
        self._bar: tqdm | None = None
        self._shown = 0
        self._takes_counts = callable(use_tqdm) and not _makes_bars(use_tqdm)

    def add(self, state: PromptState) -> None:
        """A prompt that was queued; prompts start in this order."""
        if self._use is not False:
            self._added += 1
            self._waiting.append(state)
            if self._added % _COUNTED_EVERY == 0:
                self._count()

    def settle(self, failed: bool) -> None:
        """A row that needs no run: it was refused, or its answer is known."""
        counts = self._counts
        self._counts = replace(
            counts, done=counts.done + 1, not_run=counts.not_run + 1, failed=counts.failed + bool(failed)
        )

    def expect(self, more: int) -> None:
        """So many prompts more than were known."""
        self._counts = replace(self._counts, rows=self._counts.rows + more)

    def update(self, force: bool = False) -> None:
        """Called after each step; shows what there is, at most ten times a second."""
        started = monotonic()
        if self._use is False or (not force and started < self._next):
            return
        if self._use is True and self._bar is None and started - self._started < _DELAY_SECONDS:
            return
        self._show(self._progress(started, finished=False))
        now = monotonic()
        self._next = now + max(_REFRESH_SECONDS, _REFRESH_COST_FACTOR * (now - started))

    def close(self) -> None:
        if self._use is False or (self._use is True and self._bar is None):
            return
        last = self._progress(monotonic(), finished=True)
        self._show(last)
        if isinstance(self._bar, Bar):
            self._bar.end_with(last.summary())
        elif self._bar is not None:
            self._bar.close()

    def _show(self, progress: GenerationProgress) -> None:
        if self._takes_counts and callable(self._use):
            self._use(progress)
            return
        if self._bar is None:
            self._bar = self._make_bar(progress)
        self._bar.total = progress.rows
        self._bar.set_postfix_str(str(progress), refresh=False)
        shown, self._shown = self._shown, progress.done
        if isinstance(self._bar, Bar):
            self._bar.n = progress.done
            self._bar.refresh()
        else:
            self._bar.update(progress.done - shown)

    def _make_bar(self, progress: GenerationProgress) -> tqdm:
        options = {"desc": "Generating", "unit": " rows", "dynamic_ncols": True, "total": progress.rows}
        if callable(self._use):
            made: tqdm = self._use(**options)
            return made
        return Bar(**options, bar_format=_BAR_FORMAT, leave=False)

    def _progress(self, now: float, finished: bool) -> GenerationProgress:
        self._count()
        found = replace(self._counts, seconds=now - self._started, finished=finished)
        for request in (item for state in self._active for item in _requests(state)):
            found = _with_tokens_of(request, found)
        running = sum(any(item.num_computed_tokens > 0 for item in _requests(state)) for state in self._active)
        return replace(found, running=running, waiting=found.rows - found.done - running)

    def _count(self) -> None:
        """Follow the prompts that have started and those that have ended."""
        while self._waiting and _has_started(self._waiting[0]):
            self._active.append(self._waiting.popleft())
        active = self._active
        self._active = [state for state in active if not state.finished]
        for state in active if len(self._active) < len(active) else ():
            if state.finished:
                self._end(state)

    def _end(self, state: PromptState) -> None:
        reasons = [request.finish_reason for request in _requests(state)]
        if "abort" in reasons:  # another call failed: it will be queued again
            return
        counts = self._counts
        for request in _requests(state):
            counts = _with_tokens_of(request, counts)
        failed, cut = counts.failed + ("error" in reasons), counts.stopped_by_length + ("length" in reasons)
        self._counts = replace(counts, done=counts.done + 1, failed=failed, stopped_by_length=cut)


def _with_tokens_of(request: Request, counts: GenerationProgress) -> GenerationProgress:
    """`counts` and what has been computed of a request; a preempted one has what it had before."""
    has_all = request.num_output_tokens > 0 or request.finish_reason is not None
    prompt = request.num_prompt_tokens if has_all else min(request.num_computed_tokens, request.num_prompt_tokens)
    return replace(
        counts,
        prompt_tokens=counts.prompt_tokens + prompt,
        cached_tokens=counts.cached_tokens + min(prompt, request.num_cached_tokens or 0),
        generated_tokens=counts.generated_tokens + request.num_output_tokens,
    )


def _requests(state: PromptState) -> list[Request]:
    return [completion.request for completion in state.completions]


def _has_started(state: PromptState) -> bool:
    return any(item.num_computed_tokens > 0 or item.finish_reason is not None for item in _requests(state))


def _makes_bars(function: Callable[..., object]) -> bool:
    """True if `function` takes tqdm's arguments."""
    try:
        inspect.signature(function).bind(total=1, desc="", unit="", dynamic_ncols=True)
    except (TypeError, ValueError):  # ValueError: of a function in C nothing is known
        return False
    return True
