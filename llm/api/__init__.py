"""`LLM`, the public class: its construction and generating in `facade`, its other methods in files of their own."""

from llm.api.facade import EMBEDDED_MODEL as EMBEDDED_MODEL
from llm.api.facade import LLM as LLM
