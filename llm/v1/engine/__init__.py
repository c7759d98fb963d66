"""`vllm.v1.engine`: see `llm.v1`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
