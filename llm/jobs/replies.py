"""What the replies to a job's conversations hold: content, reasoning and tool calls.

Owns the readers: of conversations with tools and without, and of those that must call.
"""

from __future__ import annotations

from llm.engine.preprocess import Preprocessor
from llm.outputs import RequestOutput
from llm.replies.choice import ToolChoice
from llm.replies.reader import ReplyReader


class Replies:
    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        self._readers: dict[tuple[bool, bool], ReplyReader] = {}

    def read(self, output: RequestOutput, choice: ToolChoice, has_tools: bool) -> None:
        """Fill `content`, `reasoning` and `tool_calls` of its completions."""
        kind = choice.forces, has_tools
        if kind not in self._readers:
            self._readers[kind] = self._preprocessor.reply_reader(None, choice.parser("auto"), has_tools)
        self._readers[kind].read([output], choice)
