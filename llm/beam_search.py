"""What goes into `LLM.beam_search` and what comes out: plain data, under vLLM's names.

Does not own the search: see `llm/engine/beam_search.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from llm.errors import ValidationError
from llm.outputs import Logprob

_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


@dataclass
class BeamSearchParams:
    """How to search.

    A sequence's score is the sum of its tokens' logprobs / (how many they are, EOS included) ** `length_penalty`, the
    prompt's tokens not counted: the score of transformers and of vLLM.

    Args:
        beam_width: sequences kept at each step, and returned.
        max_tokens: most tokens to generate.
        ignore_eos: do not end at the model's EOS.
        temperature: 0.0 only, for beams are ranked by the model's own logprobs.
        length_penalty: above 0 long sequences are favoured (scores are negative), below 0 short ones.
        include_stop_str_in_output: keep the EOS that ended a sequence in its `tokens` and `text`.
        structured_outputs, watermarking: None only.
        skip_special_tokens: leave special tokens out of `text`.
        allowed_token_ids: the only token ids that beams may grow by; logprobs are not renormalised over them.
        early_stopping: when a prompt's search ends, as in transformers. True: once `beam_width` sequences have ended;
            False: also when the best running beam, at its present length, scores no better than the worst ended one;
            "never": with `length_penalty` above 0, the best running beam is given the length it could at most reach.

    Raises:
        ValidationError: a field is out of its range (`.parameter`, `.value`).
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    skip_special_tokens: bool = True
    watermarking: Any = None
    allowed_token_ids: list[int] | None = None
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field again (the object is mutable); raises `ValidationError`."""
        for name in ("beam_width", "max_tokens"):
            if not _is_integer(getattr(self, name)) or getattr(self, name) < 1:
                _refuse(name, getattr(self, name), "an integer of at least 1")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) < float("inf"):
            _refuse("length_penalty", penalty, "a finite number")
        if self.temperature != 0:
            _refuse("temperature", self.temperature, "0.0, for beams are ranked by the model's own logprobs")
        for name in ("structured_outputs", "watermarking"):
            if getattr(self, name) is not None:
                _refuse(name, getattr(self, name), "None in a beam search")
        if self.early_stopping not in (True, False, "never") or (
            self.early_stopping in (0, 1) and not isinstance(self.early_stopping, bool)
        ):
            _refuse("early_stopping", self.early_stopping, "True, False or 'never'")
        allowed = self.allowed_token_ids
        if allowed is not None and (not isinstance(allowed, list | tuple) or not allowed):
            _refuse("allowed_token_ids", allowed, "None or a list of at least one token id")
        for token in allowed or ():
            if not _is_integer(token) or token < 0:
                _refuse("allowed_token_ids", token, "a list of token ids")


@dataclass
class BeamSearchSequence:
    """One sequence that a search found.

    Attributes:
        orig_prompt: the prompt as it was passed.
        tokens: the prompt's ids and the generated ones, without the EOS unless `include_stop_str_in_output`.
        logprobs: per generated token, an EOS included, the logprobs that the search looked at.
        cum_logprob: sum over the generated tokens, an EOS included.
        score: `cum_logprob` / (number of generated tokens, an EOS included) ** length_penalty.
        text: `tokens` as text; None without a tokenizer.
        finish_reason: "stop" or "length".
        stop_reason: the id of the EOS that ended it, None for "length".
    """

    orig_prompt: Any
    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    lora_request: None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float = 0.0


@dataclass
class BeamSearchOutput:
    """A prompt's sequences, the best score first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse(name: str, value: Any, right: str) -> NoReturn:
    raise ValidationError(f"{name} must be {right}, got {value!r}.", parameter=name, value=value)
