"""`vllm.distributed.parallel_state`."""

from typing import TYPE_CHECKING

from llm.base.command_line import cleanup_dist_env_and_memory
from llm.base.missing import missing_names

__all__ = ["cleanup_dist_env_and_memory"]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
