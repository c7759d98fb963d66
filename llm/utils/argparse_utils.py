"""`vllm.utils.argparse_utils`."""

from llm.base.command_line import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
