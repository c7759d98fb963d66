"""What to do about an architecture that is not supported. Owns the advice in that error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Reason -> parts of architecture names that imply it.
_REASONS = {
    "mixtures of experts are not here yet": ("moe", "mixtral", "deepseek", "gpt_oss"),
    "it takes images, audio or video, and prompts here are text": ("conditionalgeneration", "_vl", "vision"),
    "only text generation is offered": ("bert", "forsequenceclassification", "t5"),
    "recurrent layers are not here yet": ("mamba", "rwkv", "qwen3_next"),
}


def of_architecture(architectures: Iterable[str], model_type: str, families: Iterable[str]) -> str:
    """The reason why there is no such family if its name implies one, then the family nearest by name, then all."""
    families = sorted(families)
    text = " ".join([*architectures, model_type]).lower()
    why = next((f"; {reason}" for reason, parts in _REASONS.items() if any(part in text for part in parts)), "")
    close = difflib.get_close_matches(model_type, families, n=1)
    hint = f"; the nearest by name is {close[0]}" if close else ""
    return f"{why}{hint}; supported are {', '.join(families)}, and register_model() adds your own class"
