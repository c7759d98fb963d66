"""The parameters of `LLM.beam_search`, under vLLM's names. What it returns is in `llm/outputs.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm.base.checks import check_flag, check_integer, check_real, is_real, refuse
from llm.base.names import known_fields

if TYPE_CHECKING:
    from llm.structured_params import StructuredOutputsParams

_MOST_PENALTY = 100.0  # length ** penalty stays a float
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


@known_fields({"n": "beam_width sequences are returned"})
@dataclass
class BeamSearchParams:
    """The parameters of a beam search.

    The score of a sequence is the sum of the logprobs of its generated tokens / (their number, EOS included) **
    `length_penalty`: the score of transformers and of vLLM.

    Args:
        beam_width: number of sequences kept at each step, and returned.
        max_tokens: maximum number of generated tokens.
        ignore_eos: do not stop at the model's EOS.
        temperature: 0.0 only, because beams are ranked by the model's own logprobs.
        length_penalty: above 0 favours long sequences (scores are negative), below 0 short ones.
        include_stop_str_in_output: keep the EOS that ended a sequence in its `tokens` and `text`.
        structured_outputs: only answers of this form are searched; logprobs are not renormalised.
        watermarking: None only.
        skip_special_tokens: leave special tokens out of `text`.
        allowed_token_ids: the only token ids that beams may be extended by; logprobs are not renormalised over them.
        early_stopping: when the search of a prompt ends, as in transformers. True: once `beam_width` sequences have
            ended. False: also when the best running beam, at its current length, scores no better than the worst
            finished one. "never": as False, but with `length_penalty` above 0 at the maximum length of the beam.

    Raises:
        ValidationError: a field is out of its range (`.parameter`, `.value`).
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: None = None
    allowed_token_ids: list[int] | None = None
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field again (the object is mutable); raises `ValidationError`."""
        for name in ("beam_width", "max_tokens"):
            check_integer(name, getattr(self, name), 1)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        check_real("length_penalty", self.length_penalty, -_MOST_PENALTY, _MOST_PENALTY)
        if not is_real(self.temperature) or self.temperature != 0:
            refuse("temperature", self.temperature, "0.0, as beams are ranked by the model's own logprobs")
        if self.watermarking is not None:
            refuse("watermarking", self.watermarking, "None in a beam search")
        if self.structured_outputs is not None and self.ignore_eos:
            refuse("ignore_eos", True, "False with structured_outputs, for an answer ends where it is complete")
        early = self.early_stopping
        if not isinstance(early, bool) and not (isinstance(early, str) and early == "never"):
            refuse("early_stopping", self.early_stopping, "True, False or 'never'")
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, list | tuple) or not self.allowed_token_ids:
                refuse("allowed_token_ids", self.allowed_token_ids, "None or a list of at least one token id")
            for token in self.allowed_token_ids:
                check_integer("allowed_token_ids", token, 0)
