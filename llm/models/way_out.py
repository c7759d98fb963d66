"""What to do about an architecture that is not supported. Owns the advice in those error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Reason -> parts of architecture names that imply it.
_REASONS = {
    "this mixture of experts is not here yet": ("moe", "deepseek", "gpt_oss"),
    "it takes images, audio or video, and prompts here are text": ("conditionalgeneration", "_vl", "vision"),
    "encoders with a decoder are not here": ("t5", "bart", "pegasus"),
    "this encoder is not here yet": ("bert", "electra"),
    "these recurrent layers are not here yet": ("rwkv",),
}


def of_architecture(architectures: Iterable[str], model_type: str, families: Iterable[str]) -> str:
    """The reason why there is no such family if its name implies one, then the nearest by name, then where all are."""
    families = sorted(families)
    text = " ".join([*architectures, model_type]).lower()
    why = next((f"; {reason}" for reason, parts in _REASONS.items() if any(part in text for part in parts)), "")
    close = difflib.get_close_matches(model_type, families, n=1)
    hint = f"; the nearest by name is {close[0]}" if close else ""
    listed = f"ModelRegistry.get_supported_archs() lists the {len(families)} families there are"
    return f"{why}{hint}; {listed}, and register_model() adds your own class"


# What an architecture's name says it is for -> what runs it.
_USES = {
    "forsequenceclassification": "LLM(model, runner='pooling') classifies and scores with it",
    "rewardmodel": "the code that came with the reward model scores",
    "fortokenclassification": "LLM(model, runner='pooling').encode labels tokens with it",
    "forquestionanswering": "transformers' AutoModelForQuestionAnswering answers from a text",
    "bidirectional": "sentence-transformers embeds texts",
}
_OTHER_USE = "transformers' AutoModel gives hidden states, and sentence-transformers embeds texts"


def of_head(architecture: str, supported: str) -> str:
    """For an architecture built on a family's layers that is not its language model, `supported`."""
    name = architecture.lower()
    instead = next((use for part, use in _USES.items() if part in name), _OTHER_USE)
    return (
        f": this use of the layers is not offered, the nearest supported architecture is {supported}; {instead}, "
        f"and if the weights are a causal language model's, pass hf_overrides={{'architectures': ['{supported}']}}"
    )
