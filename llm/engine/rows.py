"""One prompt as a row: its length checked or cut, and the defaults of its params that depend on it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from llm.base.checks import refuse
from llm.config.engine import ModelConfig
from llm.engine.prompts import ParsedPrompt
from llm.engine.step import Adapter, PoolingRow, RowImages
from llm.errors import EmptyPromptError, PromptTooLongError, TokenOutOfRangeError, ValidationError
from llm.sampling_params import SamplingParams
from llm.text.tokenizer import Tokenizer

ON_TOO_LONG = ("error", "truncate_left", "truncate_middle", "skip")
# A prompt that is cut, of a request without max_tokens, leaves this share of the context for the answer.
_SHARE_OF_ANSWER = 4
# Characters; a shorter text is tokenized in a fraction of a second.
_LONG_TEXT = 1 << 18


@dataclass
class Row:
    """One prompt, ready to be added to the engine. `params` is a copy of the caller's, with all defaults resolved.

    Rows with equal `sharing` share blocks even if prefix caching is off; rows with different `cache_salt` never do.

    Attributes:
        index: its place among the prompts of the call.
        score_from: at least 1, the first prompt token that gets a logprob, if `prompt_logprobs` is set.
        num_dropped_tokens: how many of the prompt's tokens were cut.
        pooling: what a pooling model makes of the prompt; None: the prompt is continued.
        adapter: what is added to the model's layers for it; None: nothing is.
        priority: a lower one runs first, with `scheduling_policy="priority"`.
        images: the prompt's pictures; None: it has none.
        known_outputs: tokens of each completion that an earlier run generated; this one continues after them.
    """

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    seed: int
    sharing: str | None = None
    score_from: int = 1
    cache_salt: str | None = None
    index: int = 0
    num_dropped_tokens: int = 0
    known_outputs: Sequence[Sequence[int]] = ()
    pooling: PoolingRow | None = None
    adapter: Adapter | None = None
    priority: int = 0
    images: RowImages | None = None


@dataclass
class RefusedRow:
    """A prompt that is not run. `finish_reason` is "error", or "skipped" for `on_too_long="skip"`."""

    index: int
    error: ValidationError
    prompt: str | None = None
    finish_reason: str = "error"


AnyRow = Row | RefusedRow


def rows_only(rows: Sequence[AnyRow]) -> list[Row]:
    return [row for row in rows if isinstance(row, Row)]


@dataclass(frozen=True)
class RowMaker:
    """Makes the rows of one call.

    Attributes:
        call: counts calls; rows without a seed derive theirs from it.
        on_too_long: one of `ON_TOO_LONG`.
    """

    config: ModelConfig
    call: int
    on_too_long: str = "error"

    def make(self, text: str | None, token_ids: list[int], params: SamplingParams, index: int) -> Row:
        """Resolves the defaults in `params`, which is the row's own copy.

        Raises:
            ValidationError: the prompt is empty, too long or not of the vocabulary, or has no room for the answer.
        """
        given = len(token_ids)
        token_ids = self._fitted(_kept(token_ids, params, self.config.max_model_len), params)
        _check_vocabulary(token_ids, self.config.vocab_size)
        _check_scored(token_ids, params)
        _resolve_length(params, self.config.max_model_len - len(token_ids))
        if params.seed is None:
            origin = f"derived from the engine's seed {self.config.seed}, call {self.call}, row {index}"
            params.set_from(origin, seed=derive_seed(self.config.seed, self.call, index))
        dropped = given - len(token_ids)
        return Row(text, token_ids, params, params.seed or 0, index=index, num_dropped_tokens=dropped)

    def _fitted(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The tokens of a prompt that is not empty, cut to the context if they are too many and may be cut."""
        limit = self.config.max_model_len
        _check_any(token_ids)
        if len(token_ids) < limit:
            return token_ids
        if self.on_too_long in ("error", "skip"):
            raise _too_long(len(token_ids), limit)
        keep = max(1, limit - min(_answer_room(params, limit), limit - 1))
        head = 0 if self.on_too_long == "truncate_left" else (keep + 1) // 2
        return token_ids[:head] + token_ids[len(token_ids) - (keep - head) :]


def _check_scored(token_ids: Sequence[int], params: SamplingParams) -> None:
    """One list of ids for each prompt token after the start, all as long as the longest."""
    if params.prompt_logprob_token_ids is None:
        return
    start, given = params.prompt_logprob_start or 0, params.prompt_logprob_token_ids
    wanted = max(0, len(token_ids) - 1 - start)
    if len(given) != wanted:
        raise ValidationError(
            f"prompt_logprob_token_ids has {len(given)} rows and must have {wanted}: one for each of the prompt's "
            f"{len(token_ids)} tokens after the first {start + 1} (prompt_logprob_start + 1).",
            parameter="prompt_logprob_token_ids",
        )
    longest = max(map(len, given))
    params.prompt_logprob_token_ids = [[*row, *[-1] * (longest - len(row))] for row in given]


def refuse_too_long(prompt: ParsedPrompt, tokenizer: Tokenizer, limit: int) -> ParsedPrompt:
    """The prompt, refused if its text takes long to tokenize and cannot fit."""
    if prompt.token_ids is not None or prompt.text is None or len(prompt.text) < _LONG_TEXT:
        return prompt
    fewest = tokenizer.fewest_tokens(prompt.text)
    return prompt if fewest < limit else prompt._replace(token_ids=[], error=_too_long(fewest, limit, "at least "))


def _too_long(count: int, limit: int, bound: str = "") -> PromptTooLongError:
    message = (
        f"the prompt has {bound}{count} tokens and max_model_len is {limit}, which must hold at least one generated "
        "token too; shorten it, raise max_model_len or pass on_too_long."
    )
    return PromptTooLongError(message, num_tokens=count, limit=limit)


def derive_seed(engine_seed: int, call: int, row: int) -> int:
    """The seed of a row without one: a function of the engine's seed and the indices of call and row."""
    digest = hashlib.sha256(f"{engine_seed}/{call}/{row}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _kept(token_ids: list[int], params: SamplingParams, limit: int) -> list[int]:
    """What `truncate_prompt_tokens` keeps."""
    keep = params.truncate_prompt_tokens
    if keep == -1:
        keep = max(1, limit - (params.max_tokens or 1))
    return token_ids if keep is None else token_ids[-keep:]


def _answer_room(params: SamplingParams, limit: int) -> int:
    """The tokens that a prompt which has to be cut leaves for its answer."""
    if params.max_tokens is not None:
        return params.max_tokens
    needed = 0 if params.structure is None else params.structure.tokens_needed or 0
    return max(limit // _SHARE_OF_ANSWER, needed, params.min_tokens, 1)


def check_prompt(token_ids: list[int], vocab_size: int) -> None:
    """Raise `ValidationError` for a prompt without tokens, or with one that is not of the vocabulary."""
    _check_any(token_ids)
    _check_vocabulary(token_ids, vocab_size)


def _check_any(token_ids: list[int]) -> None:
    if not token_ids:
        raise EmptyPromptError(
            "the prompt is empty; it needs at least one token.", parameter="prompts", value=token_ids
        )


def _check_vocabulary(token_ids: list[int], vocab_size: int) -> None:
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise TokenOutOfRangeError(
            f"token id {wrong} is outside the vocabulary, 0 to {vocab_size - 1}.", parameter="prompts", value=wrong
        )


def _resolve_length(params: SamplingParams, room: int) -> None:
    """Make `max_tokens` a number that fits in `room`, the tokens that the prompt leaves."""
    if params.min_tokens > room:
        refuse("min_tokens", params.min_tokens, f"at most the room that the prompt leaves ({room})")
    if params.max_tokens is None:
        params.set_from("what the prompt leaves of max_model_len", max_tokens=room)
    elif params.max_tokens > room:
        given = f"given as {params.max_tokens}; the prompt leaves no more of max_model_len"
        params.set_from(given, max_tokens=room)
    needed = None if params.structure is None else params.structure.tokens_needed
    if needed is not None and needed > (params.max_tokens or room):
        raise ValidationError(
            f"an answer to structured_outputs needs up to {needed} tokens and there is room for {params.max_tokens}; "
            "raise max_tokens or shorten the prompt.",
            parameter="max_tokens",
            value=params.max_tokens,
        )


def check_logprobs_mode(config: ModelConfig) -> None:
    """Raise `ValidationError` if `logprobs_mode` would return logits where logprobs are needed."""
    if not config.logprobs_mode.endswith("logprobs"):
        refuse("logprobs_mode", config.logprobs_mode, "'raw_logprobs' or 'processed_logprobs' to score texts")
