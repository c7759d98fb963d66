"""The progress of one call: its bar, or the user's callable.

Owns what is counted, and how often it is shown. The time left is an estimate, with bounds: `llm.engine.lengths`.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from tqdm import tqdm

from llm.base.bar import Bar, UseTqdm
from llm.engine.lengths import Lengths, ToCome
from llm.engine.output import PromptState
from llm.engine.request import Request
from llm.errors import ValidationError
from llm.progress import GenerationProgress

_REFRESH_SECONDS = 0.1
# A refresh reads all running requests. This many times its duration must pass before the next: 0.1% of the time.
_REFRESH_COST_FACTOR = 1000
# Rows that have ended are forgotten after so many new ones, however long the next refresh takes.
_COUNTED_EVERY = 1024
# A shorter call shows no bar.
_DELAY_SECONDS = 0.5
_RATE_VARIES = 0.1
_BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} tokens{postfix}"


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
    """Counts prompts and tokens, and shows them.

    Args:
        use_tqdm: False: nothing is counted or shown; True: `Bar`, once the call takes longer. A callable that takes
            tqdm's arguments (`total=`, `desc=`, ...) makes the bar; any other gets a `GenerationProgress`.
        rows: of the call; those that are neither added nor settled are not known yet.
    """

    def __init__(self, use_tqdm: UseTqdm, rows: int) -> None:
        self._use = use_tqdm if rows else False
        self._counts = GenerationProgress(rows)
        self._added = 0
        self._waiting: deque[PromptState] = deque()
        self._active: list[PromptState] = []
        self._most: Counter[int] = Counter()  # of the waiting requests: the most tokens that each may generate
        self._lengths = Lengths()
        self._seen = _Tokens()
        self._ended = _Tokens()
        self._now = _Tokens()
        self._steps = 0
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
            for request in _requests(state):
                self._seen.add(request.num_prompt_tokens, 1, 0)
                self._most[_most(request)] += 1
            if self._added % _COUNTED_EVERY == 0:
                self._count()

    def settle(self, failed: bool) -> None:
        """A row that needs no run: it was refused, or its answer is known."""
        self._added += 1
        self._counts = replace(self._counts, done=self._counts.done + 1, failed=self._counts.failed + failed)

    def expect(self, more: int) -> None:
        """So many prompts more than were known."""
        self._counts = replace(self._counts, rows=self._counts.rows + more)

    def update(self, force: bool = False) -> None:
        """Called after each step; shows what there is, at most ten times a second."""
        self._steps += 1
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
        self._bar.total = progress.expected_tokens
        self._bar.set_postfix_str(str(progress), refresh=False)
        # A preempted request computes its prompt again: the bar waits and does not go back.
        shown, self._shown = self._shown, max(progress.tokens, self._shown)
        if isinstance(self._bar, Bar):
            self._bar.n = self._shown
            self._bar.refresh()
        else:
            self._bar.update(self._shown - shown)

    def _make_bar(self, progress: GenerationProgress) -> tqdm:
        options: dict[str, object] = {"desc": "Generating", "unit": " tokens", "dynamic_ncols": True}
        options["total"] = progress.expected_tokens
        if callable(self._use):
            made: tqdm = self._use(**options)
            return made
        return Bar(**options, bar_format=_BAR_FORMAT, leave=False)

    def _progress(self, now: float, finished: bool) -> GenerationProgress:
        self._count()
        counts, done = self._counts, self._now.prompt + self._now.generated
        running = sum(any(item.num_computed_tokens > 0 for item in _requests(state)) for state in self._active)
        found = replace(
            counts,
            running=running,
            waiting=counts.rows - counts.done - running,
            tokens=done,
            prompt_tokens=self._now.prompt,
            generated_tokens=self._now.generated,
            cached_tokens=self._now.cached,
            seconds=now - self._started,
            finished=finished,
        )
        if counts.done == counts.rows:
            return replace(found, expected_tokens=done, seconds_left=(0.0, 0.0))
        if not self._seen.requests:
            return found
        prompts, bounds = self._to_come()
        left = self._seconds_left(found, prompts, bounds)
        return replace(found, expected_tokens=round(done + prompts + bounds[1].all), seconds_left=left)

    def _count(self) -> None:
        """Follow the prompts that have started and those that have ended."""
        while self._waiting and _has_started(self._waiting[0]):
            state = self._waiting.popleft()
            self._active.append(state)
            for request in _requests(state):
                self._most[_most(request)] -= 1
        active = self._active
        self._active = [state for state in active if not state.finished]
        for state in active if len(self._active) < len(active) else ():
            if state.finished:
                self._end(state)
        self._now = _Tokens(self._ended.prompt, 0, self._ended.cached, self._ended.generated)
        for request in (item for state in self._active for item in _requests(state)):
            self._now.add_done(request)

    def _end(self, state: PromptState) -> None:
        reasons = [request.finish_reason for request in _requests(state)]
        if "abort" in reasons:  # another call failed: it will be queued again
            self._added -= 1
            for request in _requests(state):
                self._seen.add(-request.num_prompt_tokens, -1, 0)
            return
        for request in _requests(state):
            self._ended.add_done(request)
            self._lengths.add(request.num_output_tokens, request.finish_reason != "length")
        counts = self._counts
        failed, cut = counts.failed + ("error" in reasons), counts.stopped_by_length + ("length" in reasons)
        self._counts = replace(counts, done=counts.done + 1, failed=failed, stopped_by_length=cut)

    def _to_come(self) -> tuple[float, tuple[ToCome, ToCome, ToCome]]:
        """(prompt tokens, generated tokens) to come, of rows that are not known yet too: they are like the others."""
        requests = [item for state in self._active for item in _requests(state) if item.finish_reason is None]
        running = [(item.num_output_tokens, _most(item)) for item in requests]
        unseen = self._counts.rows - self._added
        waiting = +self._most
        usual = round(max([most for _, most in running] + list(waiting), default=0))
        each = self._seen.prompt / self._seen.requests
        prompts = max(0.0, self._seen.prompt - self._now.prompt) + unseen * each
        return prompts, self._lengths.to_come(running, waiting, usual, unseen)

    def _seconds_left(
        self, found: GenerationProgress, prompts: float, bounds: tuple[ToCome, ToCome, ToCome]
    ) -> tuple[float, float] | None:
        """At about the rate so far; but no request is faster than a token in a step."""
        computed = found.tokens - found.cached_tokens
        if computed <= 0 or not found.seconds:
            return None
        low, _, high = bounds
        second, step = found.seconds / computed, found.seconds / max(1, self._steps)
        prompts *= 1.0 - found.prefix_hit_share
        least, most = (prompts + low.all) * second, max((prompts + high.all) * second, high.longest * step)
        return least * (1.0 - _RATE_VARIES), most * (1.0 + _RATE_VARIES)


class _Tokens:
    """Sums over requests."""

    def __init__(self, prompt: int = 0, requests: int = 0, cached: int = 0, generated: int = 0) -> None:
        self.prompt, self.requests, self.cached, self.generated = prompt, requests, cached, generated

    def add(self, prompt: int, requests: int, cached: int) -> None:
        self.prompt += prompt
        self.requests += requests
        self.cached += cached

    def add_done(self, request: Request) -> None:
        """What has been computed of a request; a preempted one has what it had before."""
        has_all = request.num_output_tokens > 0 or request.finish_reason is not None
        prompt = request.num_prompt_tokens if has_all else min(request.num_computed_tokens, request.num_prompt_tokens)
        self.add(prompt, 1, min(prompt, request.num_cached_tokens or 0))
        self.generated += request.num_output_tokens


def _requests(state: PromptState) -> list[Request]:
    return [completion.request for completion in state.completions]


def _most(request: Request) -> int:
    return request.max_total_tokens - request.num_prompt_tokens


def _has_started(state: PromptState) -> bool:
    return any(item.num_computed_tokens > 0 or item.finish_reason is not None for item in _requests(state))


def _makes_bars(function: Callable[..., object]) -> bool:
    """True if `function` takes tqdm's arguments."""
    try:
        inspect.signature(function).bind(total=1, desc="", unit="", dynamic_ncols=True)
    except (TypeError, ValueError):  # ValueError: of a function in C nothing is known
        return False
    return True
