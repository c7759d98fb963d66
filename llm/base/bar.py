"""`Bar`, this project's progress bar: tqdm's, without its thread and process, and without widgets in a notebook."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from tqdm import TqdmWarning, tqdm

from llm.base.forks import renewed_in_children

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
