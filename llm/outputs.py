"""What `LLM.generate` returns: plain data that never references the engine.

Owns the output types under vLLM's names. Keeping one in `Out[3]` or pickling it keeps no model alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Logprob:
    """The log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm, float32 log-softmax of the raw logits.
        rank: 1 for the likeliest token of the vocabulary.
        decoded_token: the token as text, None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of one prompt.

    Attributes:
        index: which of the prompt's `n` completions this is.
        text: the generated text ("" with `detokenize=False`).
        token_ids: the generated ids, a stop token included.
        cumulative_logprob: sum over the generated tokens; None unless logprobs were asked for.
        logprobs: per generated token a dict from id to `Logprob`, the sampled token first.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the stop string or stop token id that ended it; None for EOS and length.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """Everything about one prompt.

    Attributes:
        request_id: unique within the engine.
        prompt: the text, None when token ids were given.
        prompt_token_ids: the ids that were computed, special tokens included.
        outputs: `n` completions, by index.
        finished: True in what `generate` returns.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        seed: the seed the draws used, given or derived; with it the row can be replayed alone.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    seed: int | None = None
    prompt_logprobs: None = None
    metrics: None = None
