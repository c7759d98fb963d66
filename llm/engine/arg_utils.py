"""`vllm.engine.arg_utils`: a re-export."""

from llm.config.command_line import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
