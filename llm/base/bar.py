"""`Bar`, the progress bar of this project: tqdm's own, in a terminal or a notebook, leaving nothing behind."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from typing import Any

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm draws text, and would advise to install them.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm


class Bar(tqdm):
    """A bar without tqdm's monitor thread, and without its lock of multiprocessing, which can start a process.

    Where it cannot be drawn, there is none: a terminal that went away, or a full disk behind `2> file`, does not end
    the call whose progress it shows.
    """

    monitor_interval = 0
    _lock = threading.RLock()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if sys.stderr is None:
            kwargs["disable"] = True
        super().__init__(*args, **kwargs)

    def display(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().display(*args, **kwargs)
        except OSError:
            self.disable = True
            return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()
