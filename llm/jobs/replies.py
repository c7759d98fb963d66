"""What the replies to a job's conversations hold: content, reasoning and tool calls.

Owns one reader for conversations with tools, and one for those without.
"""

from __future__ import annotations

from llm.engine.preprocess import Preprocessor
from llm.outputs import RequestOutput
from llm.replies.choice import ToolChoice
from llm.replies.reader import ReplyReader


class Replies:
    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        self._readers: dict[bool, ReplyReader] = {}

    def read(self, output: RequestOutput, choice: ToolChoice, has_tools: bool) -> None:
        """Fill `content`, `reasoning` and `tool_calls` of its completions."""
        if has_tools not in self._readers:
            self._readers[has_tools] = self._preprocessor.reply_reader(None, "auto", has_tools)
        self._readers[has_tools].read([output], choice)
