"""`Bar`, the progress bar of this project: tqdm's own, in a terminal or a notebook, leaving nothing behind."""

from __future__ import annotations

import threading
import warnings

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm draws text, and would advise to install them.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm


class Bar(tqdm):
    """A bar without tqdm's monitor thread, and without its lock of multiprocessing, which can start a process."""

    monitor_interval = 0
    _lock = threading.RLock()
