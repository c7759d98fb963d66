"""`vllm.engine.arg_utils`: a re-export."""

from llm.config.command_line import EngineArgs

__all__ = ["EngineArgs"]
