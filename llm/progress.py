"""What a long call has done so far: the argument of a callable passed as `use_tqdm`. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationProgress:
    """Where a call, or a job, is. `str` is the line behind the bar.

    Attributes:
        rows: prompts of the call; one with `n` completions is one row.
        done, running, waiting: rows that have ended, are computed, and have not started or were preempted.
        failed, stopped_by_length: of those done, how many have an error, and how many ended at their most tokens.
        not_run: of those done, how many needed no run: they were refused, or an earlier run had answered them.
        prompt_tokens, generated_tokens: so far, those from the prefix cache included.
        cached_tokens: of `prompt_tokens`, taken from the prefix cache.
        seconds: since the start.
        finished: the call has ended: this is the last report.
    """

    rows: int
    done: int = 0
    running: int = 0
    waiting: int = 0
    failed: int = 0
    stopped_by_length: int = 0
    not_run: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    finished: bool = False

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def expected_tokens(self) -> int | None:
        """`tokens` at the end, if the other rows are like those so far; None: no row has been run to its end."""
        if self.done == self.rows:
            return self.tokens
        ran = self.done - self.not_run
        return round(self.tokens / ran * (self.rows - self.not_run)) if ran else None

    @property
    def seconds_left(self) -> float | None:
        """At the rate of the rows so far, as tqdm estimates it; None: no row has been run to its end."""
        if self.done == self.rows:
            return 0.0
        ran = self.done - self.not_run
        return self.seconds / ran * (self.rows - self.done) if ran else None

    @property
    def prefix_hit_share(self) -> float:
        """Share of the prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Computed prompt tokens, without those from the prefix cache."""
        return (self.prompt_tokens - self.cached_tokens) / self.seconds if self.seconds else 0.0

    @property
    def generated_tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        parts = [f"rows {self.done}/{self.rows} done, {self.running} running", f"{self.tokens:,} tokens"]
        parts += self._counts()
        if self.seconds_left is not None and not self.finished:
            parts.append(f"{_time(self.seconds)} so far, {_time(self.seconds_left)} left")
        return ", ".join(parts)

    def summary(self) -> str:
        """The line that stays after the bar."""
        kinds = f"{self.prompt_tokens:,} prompt and {self.generated_tokens:,} generated tokens"
        return ", ".join([f"{self.done:,}/{self.rows:,} rows done in {_time(self.seconds)}", kinds, *self._counts()])

    def _counts(self) -> list[str]:
        counts = {"waiting": self.waiting, "failed": self.failed, "stopped by length": self.stopped_by_length}
        parts = [f"{count} {name}" for name, count in counts.items() if count]
        if self.cached_tokens:
            parts.append(f"prefix hits {self.prefix_hit_share:.0%}")
        rates = self.prompt_tokens_per_second, self.generated_tokens_per_second
        return [*parts, "in {:,.0f} + out {:,.0f} tokens/s".format(*rates)]


def _time(seconds: float) -> str:
    """Two digits are as many as an estimate has."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min" if seconds > 600 else f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
