"""The progress of a long call: what a callable passed as `use_tqdm` gets, and this project's bar.

The bar is tqdm's, without its thread and process, and without widgets in a notebook.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tqdm import TqdmWarning, tqdm

from llm.base.locks import renewed_in_children


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


with warnings.catch_warnings():
    # Other libraries import it later: in a notebook without ipywidgets it would advise installing them.
    warnings.simplefilter("ignore", TqdmWarning)
    import tqdm.auto as _imported_silently  # noqa: F401

# Whether to show a bar; a callable makes it and takes tqdm's arguments, or takes a GenerationProgress.
UseTqdm = bool | Callable[..., Any]


class Display(Protocol):
    """What IPython's `display` returns: an output of a cell that can be changed."""

    def update(self, data: dict[str, str], *, raw: bool) -> None: ...


class Bar(tqdm):
    """tqdm's bar without its monitor thread and without its multiprocessing lock, which can start a process.

    In a notebook it is one line of text that is replaced: a saved notebook has the last one, and no dead widget. A bar
    that cannot be drawn disables itself: a closed terminal or a full disk behind `2> file` does not end the call.
    """

    monitor_interval = 0
    _lock = renewed_in_children(threading.RLock())
    _cell: Display | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._make_cell = _notebook_display()
        if self._make_cell is not None:
            kwargs.update(file=io.StringIO(), dynamic_ncols=False, ncols=160, mininterval=0.5)
        elif sys.stderr is None:
            kwargs["disable"] = True
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        try:
            if self._make_cell is None:
                return super().display(msg, pos)
            self._write(str(self) if msg is None else msg)
        except OSError:
            self.disable = True
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()

    def end_with(self, line: str) -> None:
        """Close it and leave `line` in its place."""
        was_disabled = self.disable
        self.close()
        with contextlib.suppress(OSError):
            if self._make_cell is not None:
                self._write(line)
            elif not was_disabled and sys.stderr is not None:
                print(line, file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        data = {"text/plain": text}
        if self._cell is not None:
            self._cell.update(data, raw=True)
        elif text and self._make_cell is not None:
            self._cell = self._make_cell(data)


def _notebook_display() -> Callable[[dict[str, str]], Display] | None:
    """A function that shows an output in the cell that runs; None outside a notebook."""
    ipython = sys.modules.get("IPython")
    shell = getattr(ipython, "get_ipython", lambda: None)()
    if ipython is None or not hasattr(shell, "kernel"):
        return None
    show: Callable[..., Display] = ipython.display.display
    return lambda data: show(data, raw=True, display_id=True)
