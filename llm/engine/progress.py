"""The progress bar of one call.

Owns what the bar counts: prompt and generated tokens, so that it moves during long requests. The total and the time
left are estimates that improve as requests finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from llm.base.bar import Bar, UseTqdm
from llm.base.errors import ValidationError
from llm.engine.output import PromptState
from llm.engine.request import Request

_REFRESH_SECONDS = 0.1
# A refresh reads every request. This many times its duration must pass before the next, so that large calls stay fast.
_REFRESH_COST_FACTOR = 200


def check_use_tqdm(use_tqdm: object) -> None:
    """Raise `ValidationError` unless it is a bool or a callable."""
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise ValidationError(
            f"use_tqdm must be True, False or a callable that makes a bar, got {use_tqdm!r}.",
            parameter="use_tqdm",
            value=use_tqdm,
        )


class Progress:
    """A bar over the tokens of some prompts.

    Args:
        use_tqdm: False: nothing is printed; True: `tqdm.auto`; a callable makes the bar (`total=`, `desc=`, ...).
    """

    def __init__(self, prompts: Sequence[PromptState], use_tqdm: UseTqdm) -> None:
        self._requests = [completion.request for prompt in prompts for completion in prompt.completions]
        self._bar: Any = None
        self._shown = 0
        self._next = 0.0
        if use_tqdm is not False and prompts:
            make = Bar if use_tqdm is True else use_tqdm
            self._bar = make(total=self._estimate()[1], desc="Generating", unit=" tokens", dynamic_ncols=True)

    def update(self, force: bool = False) -> None:
        """Refresh the bar, at most ten times a second."""
        if self._bar is None or (not force and monotonic() < self._next):
            return
        started = monotonic()
        done, total = self._estimate()
        finished = sum(request.finish_reason is not None for request in self._requests)
        running = sum(request.finish_reason is None and request.num_computed_tokens > 0 for request in self._requests)
        self._bar.total = total
        self._bar.set_postfix_str(f"rows {finished}/{len(self._requests)} done, {running} running", refresh=False)
        # A preempted request computes its prompt again: the bar waits and does not go back.
        self._bar.update(max(0, done - self._shown))
        self._shown = max(done, self._shown)
        now = monotonic()
        self._next = now + max(_REFRESH_SECONDS, _REFRESH_COST_FACTOR * (now - started))

    def close(self) -> None:
        if self._bar is not None:
            self.update(force=True)
            self._bar.close()

    def _estimate(self) -> tuple[int, int]:
        """(tokens done, tokens expected); an unfinished request is expected to be as long as finished ones."""
        finished = [request.num_output_tokens for request in self._requests if request.finish_reason is not None]
        typical = sum(finished) / len(finished) if finished else None
        done = sum(_tokens_done(request) for request in self._requests)
        return done, round(sum(_tokens_expected(request, typical) for request in self._requests))


def _tokens_done(request: Request) -> int:
    # A finished request's last token is never computed; a preempted request starts over and keeps its output.
    if request.finish_reason is not None:
        return request.num_tokens
    return min(max(request.num_computed_tokens, request.num_output_tokens), request.num_tokens)


def _tokens_expected(request: Request, typical: float | None) -> float:
    if request.finish_reason is not None:
        return request.num_tokens
    most = request.max_total_tokens - request.num_prompt_tokens
    output = most if typical is None else min(most, max(typical, request.num_output_tokens + 1))
    return request.num_prompt_tokens + output
