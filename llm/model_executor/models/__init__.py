"""`vllm.model_executor.models`: of what is there only the layers that are registered operations here."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
