"""`vllm.logger`: loggers below `llm`, whose level `LLM_LOG_LEVEL` and `LLM(verbose=True)` set."""

from __future__ import annotations

import logging

from llm.config import env


def init_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)


def set_log_level(verbose: bool) -> None:
    """LLM_LOG_LEVEL first, then `verbose`; with neither, the program's settings apply (Python shows warnings)."""
    logger = logging.getLogger("llm")
    if env.get("LLM_LOG_LEVEL") is not None or verbose:
        logger.setLevel(env.get_choice("LLM_LOG_LEVEL", env.LOG_LEVELS, "INFO"))
    if verbose and not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
