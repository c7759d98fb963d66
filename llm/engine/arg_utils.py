"""`vllm.engine.arg_utils`: a door."""

from llm.config.command_line import EngineArgs

__all__ = ["EngineArgs"]
