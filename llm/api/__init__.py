"""`LLM`, the public class: construction and `generate` in `facade.py`, groups of other methods in the other files."""

from llm.api.facade import LLM as LLM
from llm.config.engine import EMBEDDED_MODEL as EMBEDDED_MODEL
