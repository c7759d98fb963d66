"""The environment variables this project reads, in one table.

A malformed value raises. Values are read at each call, so a notebook can set one before `LLM(...)`.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os

from llm.errors import ValidationError

VARIABLES: dict[str, str] = {
    "LLM_LOG_LEVEL": "logging level of the `llm` logger: DEBUG, INFO, WARNING (default) or ERROR",
    "LLM_CPU_ISA": "CPU kernels: avx2, avx512, amx or another that `python -m llm doctor` shows; none: PyTorch",
    "LLM_PLATFORM": "the platform to use, whatever is detected: cpu, cuda, rocm, xpu, tpu, or the name of a plugin",
    "LLM_PLUGINS": "plugins that may be loaded, names separated by commas; unset: all that are installed, empty: none",
    "LLM_PLUGIN_ERRORS": "raise (default): a plugin that fails is an error; warn: it is left out, with a warning",
    "LLM_OFFLOAD_FOLDER": "where weights are kept that memory has no room for (default: ~/.cache/offline-llm/weights)",
    "LLM_WORKER_TIMEOUT": "seconds that a worker process may compute nothing in the middle of its work (default: 300)",
    "HF_HUB_OFFLINE": "1: never touch the network, resolve hub names from the local cache only",
}

# vLLM's variables -> what to do here instead; `warn_of_unknown` also warns of its other variables.
_VLLMS = {
    "VLLM_LOGGING_LEVEL": "LLM_LOG_LEVEL",
    "VLLM_PLUGINS": "LLM_PLUGINS",
    "VLLM_TARGET_DEVICE": "LLM_PLATFORM",
    "VLLM_CPU_KVCACHE_SPACE": "LLM(kv_cache_memory_bytes=...)",
}

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
PLUGIN_ERRORS = ("RAISE", "WARN")

# From this difflib ratio on, a name counts as a misspelt one of the table.
_MISSPELT = 0.75


def check_values() -> None:
    """Raise `ValidationError` for a malformed value of a variable that is read only later, or by huggingface_hub. Who
    reads one of the others always checks it."""
    get_bool("HF_HUB_OFFLINE")
    get_seconds("LLM_WORKER_TIMEOUT", 1.0)
    get_choice("LLM_LOG_LEVEL", LOG_LEVELS, "INFO")
    get_choice("LLM_PLUGIN_ERRORS", PLUGIN_ERRORS, "RAISE")
    folder = get("LLM_OFFLOAD_FOLDER")
    while folder and not os.path.isdir(folder):  # it is made when it is needed
        if os.path.lexists(folder):
            message = f"LLM_OFFLOAD_FOLDER={get('LLM_OFFLOAD_FOLDER')!r} is in or at {folder!r}, which is no folder."
            raise ValidationError(message, parameter="LLM_OFFLOAD_FOLDER", value=folder)
        folder = os.path.dirname(folder)


def warn_of_unknown() -> None:
    """Warn, once per name and process, of vLLM's variables and of those that look like misspelt ones of the table."""
    for name in os.environ:
        if name.startswith("LLM_") and name not in VARIABLES:
            _warn_of(name)
    if vllms := tuple(sorted(name for name in os.environ if name.startswith("VLLM_"))):
        _warn_of_vllms(vllms)


@functools.cache
def _warn_of(name: str) -> None:
    """Warn only of close matches: other programs have LLM_* variables too."""
    if close := difflib.get_close_matches(name, VARIABLES, n=1, cutoff=_MISSPELT):
        logging.getLogger("llm").warning("the environment variable %s is not known; did you mean %s?", name, close[0])


@functools.cache
def _warn_of_vllms(names: tuple[str, ...]) -> None:
    shown = ", ".join(f"{name} (here {_VLLMS[name]})" if name in _VLLMS else name for name in names)
    logging.getLogger("llm").warning("environment variables of vLLM are set and not read here: %s.", shown)


def get(name: str) -> str | None:
    """Return the raw value of a variable of `VARIABLES`, None when unset or empty."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not in llm.config.env.VARIABLES")
    return os.environ.get(name) or None


def get_list(name: str) -> tuple[str, ...] | None:
    """Return a variable that holds names separated by commas, None when unset; empty is a list of none."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not in llm.config.env.VARIABLES")
    raw = os.environ.get(name)
    return None if raw is None else tuple(part.strip() for part in raw.split(",") if part.strip())


def get_bool(name: str) -> bool:
    """Return a 0/1 variable; anything else raises `ValidationError`."""
    raw = (get(name) or "0").strip().lower()
    if raw in {"1", "true", "yes", "on"}:
        return True
    if raw in {"0", "false", "no", "off"}:
        return False
    raise ValidationError(f"{name}={raw!r} is not a yes or no; use 1 or 0.", parameter=name, value=raw)


def get_seconds(name: str, default: float) -> float:
    """Return a variable that is a number above 0; anything else raises `ValidationError`."""
    raw = get(name)
    try:
        seconds = default if raw is None else float(raw)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise ValidationError(f"{name}={raw!r} is not a number of seconds above 0.", parameter=name, value=raw)
    return seconds


def get_choice(name: str, choices: tuple[str, ...], default: str) -> str:
    """Return the one of `choices` that a variable names, in any case; anything else raises `ValidationError`."""
    raw = get(name) or default
    named = [choice for choice in choices if choice.lower() == raw.strip().lower()]
    if not named:
        message = f"{name}={raw!r} is not known; use one of {', '.join(choices)}."
        raise ValidationError(message, parameter=name, value=raw)
    return named[0]
