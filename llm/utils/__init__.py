"""`vllm.utils`: what scripts with a command line import."""

from typing import TYPE_CHECKING

from llm.base.command_line import FlexibleArgumentParser, random_uuid
from llm.base.missing import missing_names
from llm.plugins import resolve_obj_by_qualname

__all__ = ["FlexibleArgumentParser", "random_uuid", "resolve_obj_by_qualname"]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
