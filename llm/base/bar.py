"""`Bar`, this project's progress bar: tqdm's, without its thread and process."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm draws text, and would advise installing them.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

# Whether to show a bar; a callable makes it and takes tqdm's arguments.
UseTqdm = bool | Callable[..., tqdm]


class Bar(tqdm):
    """tqdm's bar without its monitor thread and without its multiprocessing lock, which can start a process.

    A bar that cannot be drawn disables itself: a closed terminal or a full disk behind `2> file` does not end the call.
    """

    monitor_interval = 0
    _lock = threading.RLock()

    def __init__(self, *args: object, **kwargs: object) -> None:
        if sys.stderr is None:
            kwargs["disable"] = True
        super().__init__(*args, **kwargs)

    def display(self, *args: object, **kwargs: object) -> bool:
        try:
            return super().display(*args, **kwargs)
        except OSError:
            self.disable = True
            return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()
