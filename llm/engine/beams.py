"""Beam search with the results of transformers' beam search.

In each step, every running beam of every prompt is a request of its own that generates one token; the prefix cache
provides the tokens that beams share.

A step of one prompt with `beam_width` w:
 1. candidates: every beam extended by every token, ranked by summed logprob; the first max(2, 1 + number of EOS) * w
    are kept, so that w of them can continue even if all others have ended;
 2. of the first w candidates those that have ended (by EOS, or all of them at the last token) join the ended
    sequences, of which the w best by score are kept;
 3. the first w candidates that have not ended continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llm.base.checks import check_integer, refuse
from llm.config.engine import ModelConfig
from llm.engine.engine import Engine
from llm.engine.preprocess import Preprocessor
from llm.engine.prompts import list_prompts
from llm.engine.rows import Row, check_logprobs_mode
from llm.engine.step import Adapter, RowImages
from llm.outputs import BeamSearchOutput, BeamSearchSequence, Logprob, RequestOutput
from llm.progress import Bar, UseTqdm
from llm.sampling.structured.structure import ConstrainedAnswer, Structure
from llm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from llm.text.tokenizer import Tokenizer

Logprobs = dict[int, Logprob]


@dataclass
class Beam:
    """A sequence: its generated tokens, the candidates' logprobs at each of them, and the sum of its own logprobs."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    score: float = 0.0


class PromptSearch:
    """The search for one prompt.

    Args:
        eos_token_ids: empty with `ignore_eos`.
        max_tokens: most tokens to generate, limited by the context length.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int], max_tokens: int) -> None:
        self.params = params
        self.eos_token_ids = eos_token_ids
        self.max_tokens = max_tokens
        self.num_candidates = max(2, 1 + len(eos_token_ids)) * params.beam_width
        self.running = [Beam()]
        self.ended: list[Beam] = []
        self.done = False

    def advance(self, logprobs: Sequence[Logprobs]) -> None:
        """Take one step; `logprobs` are those of the next token, one dict per running beam."""
        candidates = self._candidates(logprobs)
        length = len(self.running[0].tokens) + 1
        last = length == self.max_tokens
        for beam in candidates[: self.params.beam_width]:
            if last or beam.tokens[-1] in self.eos_token_ids:
                beam.score = beam.cum_logprob / length**self.params.length_penalty
                self.ended.append(beam)
        self.ended = sorted(self.ended, key=lambda beam: -beam.score)[: self.params.beam_width]
        going_on = [beam for beam in candidates if beam.tokens[-1] not in self.eos_token_ids]
        self.running = going_on[: self.params.beam_width]
        self.done = last or not self.running or self._is_settled(length)

    def _candidates(self, logprobs: Sequence[Logprobs]) -> list[Beam]:
        """The most likely continuations; ties go to the better beam, then to the lower token id."""
        grown = [
            (beam.cum_logprob + item.logprob, index, token)
            for index, (beam, tops) in enumerate(zip(self.running, logprobs, strict=True))
            for token, item in tops.items()
            if item.logprob > float("-inf")
        ]
        grown.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
        return [
            Beam([*self.running[index].tokens, token], [*self.running[index].logprobs, logprobs[index]], total)
            for total, index, token in grown[: self.num_candidates]
        ]

    def _is_settled(self, length: int) -> bool:
        """True if `beam_width` sequences have ended and, by `early_stopping`, no running one can still beat them."""
        if len(self.ended) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best_possible = self.running[0].cum_logprob / (self.max_tokens if longest else length) ** (
            self.params.length_penalty
        )
        return best_possible <= self.ended[-1].score


@dataclass
class SearchPrompt:
    """A prompt and its search. `given` is what the user passed."""

    given: object
    token_ids: list[int]
    search: PromptSearch
    cache_salt: str | None = None
    adapter: Adapter | None = None
    images: RowImages | None = None


class BeamSearches:
    """The searches of one call, stepped together.

    Args:
        prompts: whatever `LLM.generate` takes.
        concurrency_limit: most prompts searched at a time, None: all.

    Raises:
        ValidationError: names every bad prompt; or a parameter is not usable with this model.
    """

    def __init__(
        self,
        engine: Engine,
        preprocessor: Preprocessor,
        prompts: object,
        params: BeamSearchParams,
        concurrency_limit: int | None,
    ) -> None:
        config = engine.config.model_config
        check_logprobs_mode(config)
        _check(params, concurrency_limit, config)
        one_token = SamplingParams(temperature=0.0, max_tokens=1)
        rows = preprocessor.rows(prompts, one_token, SamplingParams)
        asked = params.structured_outputs
        self._structure = None if asked is None else preprocessor.structure(asked)
        eos = frozenset() if params.ignore_eos else engine.eos_token_ids
        self._tokenizer = engine.tokenizer
        self._limit = concurrency_limit or max(1, len(rows))
        self._prompts = []
        for given, row in zip(list_prompts(prompts), rows, strict=True):
            room = min(params.max_tokens, config.max_model_len - len(row.token_ids))
            _check_room(self._structure, room)
            search = PromptSearch(params, eos, room)
            self._prompts.append(SearchPrompt(given, row.token_ids, search, row.cache_salt, images=row.images))

    def give_adapters(self, adapters: Sequence[Adapter | None]) -> None:
        """One per prompt; a search without this call has none."""
        for prompt, adapter in zip(self._prompts, adapters, strict=True):
            prompt.adapter = adapter

    def run(self, generate: Callable[[list[Row]], list[RequestOutput]], use_tqdm: UseTqdm) -> None:
        """Search until every prompt is done; `generate` runs rows until they finish, and may raise."""
        make = Bar if use_tqdm is True else use_tqdm
        bar = make(total=len(self._prompts), desc="Searching", unit=" prompts", dynamic_ncols=True) if make else None
        try:
            for start in range(0, len(self._prompts), self._limit):
                active = self._prompts[start : start + self._limit]
                while active:
                    self._step(active, generate)
                    running = [prompt for prompt in active if not prompt.search.done]
                    if bar is not None:
                        bar.update(len(active) - len(running))
                    active = running
        finally:
            if bar is not None:
                bar.close()

    def outputs(self) -> list[BeamSearchOutput | None]:
        """The sequences of each prompt, None for a search that is not done."""
        return [_output(prompt, self._tokenizer) if prompt.search.done else None for prompt in self._prompts]

    def _step(self, active: list[SearchPrompt], generate: Callable[[list[Row]], list[RequestOutput]]) -> None:
        # Beams of this call share blocks even if prefix caching is off.
        sharing = f"beam search {id(self)}"
        rows = [_row(prompt, beam, sharing) for prompt in active for beam in prompt.search.running]
        outputs = iter(generate(rows))
        for prompt in active:
            found = [next(outputs).outputs[0].logprobs or [] for _ in prompt.search.running]
            beams = zip(prompt.search.running, found, strict=True)
            prompt.search.advance([self._allowed(prompt.search, beam, tops[0]) for beam, tops in beams])

    def _allowed(self, search: PromptSearch, beam: Beam, tops: Logprobs) -> Logprobs:
        """The logprobs of the tokens that the params allow as a beam's next."""
        tops = _only(tops, search.params.allowed_token_ids)
        if self._structure is None:
            return tops
        answer = ConstrainedAnswer(self._structure)
        for token in beam.tokens:
            answer.read(token)
        fits = answer.allowed(search.max_tokens - len(beam.tokens) - 1)
        return {token: item for token, item in tops.items() if fits[token]}


def _check(params: BeamSearchParams, concurrency_limit: object, config: ModelConfig) -> None:
    if not isinstance(params, BeamSearchParams):
        refuse("params", type(params).__name__, "a BeamSearchParams")
    params.validate()
    if concurrency_limit is not None:
        check_integer("concurrency_limit", concurrency_limit, 1)
    if not isinstance(params.structured_outputs, StructuredOutputsParams | None):
        refuse("structured_outputs", params.structured_outputs, "a StructuredOutputsParams or None")
    for token in params.allowed_token_ids or ():
        if token >= config.vocab_size:
            refuse("allowed_token_ids", token, f"below the vocabulary size {config.vocab_size}")
    if config.max_logprobs != -1 and 2 * params.beam_width > config.max_logprobs:
        right = f"at most {config.max_logprobs // 2}: a step asks for 2 * beam_width logprobs"
        refuse("beam_width", params.beam_width, f"{right}, and max_logprobs is {config.max_logprobs}")


def _check_room(structure: Structure | None, room: int) -> None:
    needed = None if structure is None else structure.tokens_needed
    if needed is not None and needed > room:
        right = f"at least the {needed} tokens that an answer to structured_outputs can need"
        refuse("max_tokens", room, right)


def _output(prompt: SearchPrompt, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """The sequences of a finished search, the best first."""
    return BeamSearchOutput([_sequence(prompt, beam, tokenizer) for beam in prompt.search.ended])


def _row(prompt: SearchPrompt, beam: Beam, sharing: str) -> Row:
    search = prompt.search
    is_limited = search.params.allowed_token_ids is not None or search.params.structured_outputs is not None
    count = -1 if is_limited else search.num_candidates
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=count, detokenize=False, ignore_eos=True)
    row = Row(None, [*prompt.token_ids, *beam.tokens], params, seed=0, sharing=sharing, cache_salt=prompt.cache_salt)
    row.adapter, row.images = prompt.adapter, prompt.images
    return row


def _only(tops: Logprobs, allowed: Sequence[int] | None) -> Logprobs:
    if allowed is None:
        return tops
    return {token: tops[token] for token in sorted(set(allowed))}


def _sequence(prompt: SearchPrompt, beam: Beam, tokenizer: Tokenizer | None) -> BeamSearchSequence:
    params = prompt.search.params
    eos = beam.tokens[-1] if beam.tokens[-1] in prompt.search.eos_token_ids else None
    generated = beam.tokens if eos is None or params.include_stop_str_in_output else beam.tokens[:-1]
    tokens = [*prompt.token_ids, *generated]
    return BeamSearchSequence(
        orig_prompt=prompt.given,
        tokens=tokens,
        logprobs=[_decoded(tops, tokenizer) for tops in beam.logprobs],
        lora_request=None if prompt.adapter is None else prompt.adapter.request,
        cum_logprob=beam.cum_logprob,
        text=None if tokenizer is None else tokenizer.decode(tokens, params.skip_special_tokens),
        finish_reason="length" if eos is None else "stop",
        stop_reason=eos,
        score=beam.score,
    )


def _decoded(tops: Mapping[int, Logprob], tokenizer: Tokenizer | None) -> Logprobs:
    if tokenizer is None:
        return dict(tops)
    return {token: Logprob(item.logprob, item.rank, tokenizer.decode([token], False)) for token, item in tops.items()}
