"""From token ids to the user's `RequestOutput`: a prompt and its completions until all have finished.

Text is decoded incrementally for streaming and stop strings, and otherwise once at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from llm.engine.request import Request
from llm.engine.rows import AnyRow, RefusedRow, Row
from llm.inputs import LoRARequest
from llm.inside.capture import Activations
from llm.inside.request import Part
from llm.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput, RequestStateStats, StructuredOutcome
from llm.sampling.logprobs import TokenLogprobs
from llm.sampling_params import SamplingParams
from llm.text.tokenizer import Tokenizer

logger = logging.getLogger("llm")

_CHARACTER_TOKENS = 4  # the most bytes, and so tokens, of a character in UTF-8


class Completion:
    """One of a prompt's `n` completions while it runs.

    Attributes:
        pieces: text ready to be streamed, in order; only grows when `streaming`.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, streaming: bool, score_from: int = 1) -> None:
        self.request = request
        self.pieces: list[str] = []
        self._tokenizer = tokenizer if request.params.detokenize else None
        self._streaming = streaming
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_scores: list[list[float]] = []
        self._activations: list[Part] = []
        self._score_from = score_from
        self._stops = request.params.stop_strings
        self._text: str | None = None  # the final text, once it is known
        self._emitted = 0
        self._stream = None
        if self._tokenizer is not None and (streaming or self._stops):
            prompt = request.token_ids[: request.num_prompt_tokens]
            self._stream = self._tokenizer.stream(prompt, request.params.skip_special_tokens)

    @property
    def incremental(self) -> bool:
        """True if `push` must be called for every token."""
        return self._stream is not None

    @property
    def keeps_logprobs(self) -> bool:
        return self._wants_logprobs() or self.request.params.scores_prompt

    def add_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        self._logprobs.extend(logprobs)

    def add_activations(self, parts: list[Part]) -> None:
        self._activations.extend(parts)

    def add_prompt_logprobs(self, logprobs: list[TokenLogprobs], scores: list[list[float]]) -> None:
        """Append the logprobs of the next prompt tokens."""
        self._prompt_logprobs.extend(logprobs)
        self._prompt_scores.extend(scores)
        self.request.prompt_logprobs_from += len(logprobs)
        if self.request.prompt_logprobs_from == self.request.num_prompt_tokens - 1:
            self.request.prompt_logprobs_from = self.request.num_prompt_tokens

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | FlatLogprobs | None:
        """One entry per prompt token, None for tokens without a logprob, such as the first. After an error, entries of
        tokens that were not computed are missing."""
        if self.request.params.prompt_logprobs is None:
            return None
        scored = self._decode_positions(self._prompt_logprobs, self._score_from)
        return self._shaped([None] * self._score_from + scored)

    def prompt_scores(self) -> np.ndarray | None:
        """float32 [rows, ids]; None where `prompt_logprob_token_ids` did not ask, or not all was computed."""
        asked = self.request.params.prompt_logprob_token_ids
        if asked is None or len(asked) != len(self._prompt_scores):
            return None
        return np.array(self._prompt_scores, dtype=np.float32)

    def push(self, token: int) -> None:
        """Extend the text by a token; finishes the request if a stop string is complete."""
        request, stream = self.request, self._stream
        if stream is None or (_ended_by_token(request) and not request.params.include_stop_str_in_output):
            return
        piece = stream.push(token)
        if not self._stops:
            if piece and self._streaming:
                self._emitted += len(piece)
                self.pieces.append(piece)
            return
        new = len(piece)
        if new and request.num_output_tokens > request.params.min_tokens:
            self._find_stop(stream.text, new)
        self._emit(stream.text if self._text is None else self._text, last=self._text is not None)

    def finish(self) -> None:
        """Called when the request has ended: emit the text that was held back."""
        if self._stream is not None and self._text is None:
            self._stream.finish()
            self._text = self._stream.text
            self._emit(self._text, last=True)

    def output(self) -> CompletionOutput:
        request = self.request
        text, structured = self._final_text(), _structured_outcome(request)
        return CompletionOutput(
            index=request.sample_index,
            text=text,
            token_ids=request.output_token_ids,
            cumulative_logprob=self._cumulative_logprob(),
            logprobs=self._decode_logprobs(),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            structured=structured,
            parsed=_parsed(request, text, structured),
            activations=self._found_inside(),
        )

    def _found_inside(self) -> Activations | None:
        """None: nothing is captured, or of a stream that goes on: they come with its end."""
        inside = self.request.params.inside
        if inside is None or (self._streaming and self.request.finish_reason is None):
            return None
        return inside.activations(self._activations)

    def _find_stop(self, text: str, new: int) -> None:
        """Cut the text at the stop string that ends first; ties go to the first in the list."""
        found = [(text.find(stop, max(0, len(text) - new - len(stop) + 1)), stop) for stop in self._stops]
        complete = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if complete:
            end, start, stop = min(complete, key=lambda item: item[0])
            self._text = text[: end if self.request.params.include_stop_str_in_output else start]
            self.request.finish("stop", stop)

    def _emit(self, text: str, last: bool) -> None:
        """Emit text, except an end that may be the beginning of a stop string."""
        held = 0 if last else max((len(stop) for stop in self._stops), default=1) - 1
        ready = text[self._emitted : max(self._emitted, len(text) - held)]
        if ready and self._streaming:
            self._emitted += len(ready)
            self.pieces.append(ready)

    def _final_text(self) -> str:
        if self._text is not None or self._tokenizer is None:
            return self._text or ""
        if self._stream is not None:
            return self._stream.text  # so far
        request = self.request
        tokens = request.output_token_ids
        if not tokens:
            return ""
        if _ended_by_token(request) and not request.params.include_stop_str_in_output:
            tokens = tokens[:-1]
        prompt = request.token_ids[: request.num_prompt_tokens]
        return self._tokenizer.decode_continuation(prompt, tokens, request.params.skip_special_tokens)

    def _cumulative_logprob(self) -> float | None:
        return sum(item.logprobs[0] for item in self._logprobs) if self._wants_logprobs() else None

    def _decode_logprobs(self) -> Any:
        if not self._wants_logprobs():
            return None
        return self._shaped(self._decode_positions(self._logprobs, self.request.num_prompt_tokens))

    def _wants_logprobs(self) -> bool:
        return self.request.params.logprobs is not None or self.request.params.logprob_token_ids is not None

    def _shaped(self, positions: list[Any]) -> Any:
        """`positions`, as `FlatLogprobs` if the params say so."""
        if not self.request.params.flat_logprobs:
            return positions
        flat = FlatLogprobs()
        for position in positions:
            flat.append(position)
        return flat

    def _decode_positions(self, items: list[TokenLogprobs], first: int) -> list[dict[int, Logprob]]:
        """`first`: the position of the first item in the request."""
        return [self._decode_position(item, first + index) for index, item in enumerate(items)]

    def _decode_position(self, item: TokenLogprobs, place: int) -> dict[int, Logprob]:
        position: dict[int, Logprob] = {}
        for token, logprob, rank in zip(item.token_ids, item.logprobs, item.ranks, strict=True):
            if token not in position:
                position[token] = Logprob(logprob, rank, self._token_text(token, place))
        return position

    def _token_text(self, token: int, place: int) -> str | None:
        """The token's text; for a token with a part of a character, the character if it is complete here, else ""."""
        if self._tokenizer is None:
            return None
        text = self._tokenizer.decode([token], False)
        if not text.endswith("\ufffd"):
            return text
        before = self.request.token_ids[max(0, place - _CHARACTER_TOKENS) : place]
        return self._tokenizer.stream(before, False).push(token)


class PromptState:
    """A prompt and its completions, until all have finished."""

    def __init__(self, request_id: str, row: Row, completions: Sequence[Completion]) -> None:
        self.request_id = request_id
        self.row = row
        self.completions = completions

    @property
    def finished(self) -> bool:
        return all(completion.request.finish_reason is not None for completion in self.completions)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.row.prompt,
            prompt_token_ids=self.row.token_ids,
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            num_cached_tokens=self.completions[0].request.num_cached_tokens or 0,
            seed=self.row.seed,
            prompt_logprobs=self.completions[0].prompt_logprobs(),
            prompt_token_id_logprobs=self.completions[0].prompt_scores(),
            params=_plain(self.row.params),
            metrics=_metrics(self.completions[0].request),
            index=self.row.index,
            num_dropped_tokens=self.row.num_dropped_tokens,
            lora_request=_lora_request(self.row),
        )

    def known_outputs(self) -> list[list[int]]:
        """The tokens of each completion for `Row.known_outputs`; empty with logprobs, which are not kept.

        Of a completion that has ended, the last token is left out: drawn again, it ends it again.
        """
        if any(completion.keeps_logprobs for completion in self.completions):
            return []
        requests = [completion.request for completion in self.completions]
        has_ended = [item.finish_reason not in (None, "abort") for item in requests]
        return [
            item.output_token_ids[:-1] if ended else item.output_token_ids
            for item, ended in zip(requests, has_ended, strict=True)
        ]

    def last_output(self) -> RequestOutput:
        """As `output`, of a call that ends early: completions that have not ended by themselves are "interrupted"."""
        output = self.output()
        for own in output.outputs:
            if own.finish_reason is None or own.finish_reason == "abort":
                own.finish_reason = "interrupted"
                own.text = own.text.rstrip("\ufffd")  # the beginning of a character
                output.finished = False
        return output


def output_without_run(row: AnyRow) -> RequestOutput:
    """The output of a prompt that was refused, or whose turn never came: one completion without tokens."""
    if isinstance(row, RefusedRow):
        own = CompletionOutput(0, "", [], finish_reason=row.finish_reason, error=row.error)
        return RequestOutput(f"refused-{row.index}", row.prompt, [], [own], finished=True, index=row.index)
    own = CompletionOutput(0, "", [], finish_reason="interrupted")
    return RequestOutput(
        f"waiting-{row.index}",
        row.prompt,
        row.token_ids,
        [own],
        seed=row.seed,
        params=_plain(row.params),
        index=row.index,
        num_dropped_tokens=row.num_dropped_tokens,
        lora_request=_lora_request(row),
    )


def _lora_request(row: Row) -> LoRARequest | None:
    return None if row.adapter is None else row.adapter.request


def warn_of_errors(outputs: Sequence[RequestOutput]) -> None:
    """Log one warning for all completions that ended with an error."""
    ended = (item for output in outputs for item in output.outputs if item.finish_reason == "error")
    errors = [item.error for item in ended if item.error is not None]
    if errors:
        kind, message = type(errors[0]).__name__, " ".join(str(errors[0]).split())
        what = "1 completion" if len(errors) == 1 else f"{len(errors)} completions"
        logger.warning("%s ended with finish_reason='error'; the first with %s: %s", what, kind, message)


def _metrics(request: Request) -> RequestStateStats:
    """A copy, because a stream's output may be taken before the request ends."""
    names = ("num_preemptions", "num_drafted_tokens", "num_accepted_tokens")
    return RequestStateStats(**vars(request.metrics) | {name: getattr(request, name) for name in names})


def _plain(params: SamplingParams) -> SamplingParams:
    """The params without what they were compiled to: an output has plain data only."""
    if params.structure is not None or params.inside is not None:
        params = params.copy_validated()
        params.structure = params.inside = None
    return params


def _structured_outcome(request: Request) -> StructuredOutcome | None:
    structure = request.params.structure
    return None if structure is None else structure.outcome(request.params, request.output_token_ids)


def _parsed(request: Request, text: str, outcome: StructuredOutcome | None) -> object:
    """The answer as data, once it has ended complete."""
    asked = request.params.structured_outputs
    if asked is None or outcome is None or not outcome.complete or request.finish_reason is None:
        return None
    return asked.parse(text)


def _ended_by_token(request: Request) -> bool:
    """True if the last token is an EOS or stop token, which is not in the text."""
    if request.finish_reason != "stop" or isinstance(request.stop_reason, str):
        return False
    return request.token_ids[-1] in request.eos_token_ids or request.stop_reason is not None
