"""`LLM`, the public class: its construction and generating in `facade`, its other methods in files of their own."""

from llm.api.facade import LLM as LLM
from llm.config.command_line import EMBEDDED_MODEL as EMBEDDED_MODEL
