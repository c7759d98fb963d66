"""`vllm.logger`: loggers below `llm`, whose level `LLM_LOG_LEVEL` and `LLM(verbose=True)` set."""

from __future__ import annotations

import logging


def init_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)
