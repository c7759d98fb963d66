"""What `LLM` can do beside generating: search for the likeliest texts, and say how likely given texts are.

Owns the methods, as a base class of `LLM` that has nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llm.base.checks import refuse
from llm.base.errors import GenerationInterrupted
from llm.base.names import known_names
from llm.beam_search import BeamSearchOutput, BeamSearchParams
from llm.engine.beam_search import BeamSearches
from llm.engine.interrupt import InterruptGuard
from llm.engine.preprocess import Row
from llm.engine.progress import check_use_tqdm
from llm.engine.scoring import continuation_rows, likelihood, perplexity_of, perplexity_rows
from llm.outputs import LoglikelihoodOutput, PerplexityOutput, RequestOutput


class Scoring:
    @known_names("LLM.beam_search")
    def beam_search(
        self: Any,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        priority: None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt that a beam search finds: transformers' sequences and scores.

        Args:
            prompts: as for `generate`.
            params: width, length and how sequences are scored.
            use_tqdm: a bar in prompts.
            concurrency_limit: most prompts searched at a time; None: all of them.

        Raises:
            ValidationError: names every bad prompt, before any work starts.
            GenerationInterrupted: Ctrl-C; carries the outputs of the prompts that were done.
        """
        for name, value in (("lora_request", lora_request), ("priority", priority)):
            if value is not None:
                refuse(name, value, "None")
        check_use_tqdm(use_tqdm)
        with InterruptGuard() as guard, self._exclusive():
            engine = self._begin()
            searches = BeamSearches(engine, self._preprocessor, prompts, params, concurrency_limit)
            try:
                searches.run(lambda rows: self._run(engine, rows, False, guard), use_tqdm)
            except GenerationInterrupted:
                raise GenerationInterrupted(searches.outputs()) from None
        if guard.requested:
            raise GenerationInterrupted(searches.outputs())
        return [output for output in searches.outputs() if output is not None]

    @known_names("LLM.loglikelihood")
    def loglikelihood(
        self: Any, prompts: Any, continuations: Any, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[LoglikelihoodOutput]:
        """How likely the model finds each continuation after its prompt.

        A text prompt and a text continuation are tokenized together, as they would stand in one text; where a token
        spans the border, it is scored too. Prompts that begin alike are computed once.

        Args:
            prompts: as for `generate`.
            continuations: as many, texts or token ids; or several to one prompt.
            use_tqdm: as for `generate`.

        Raises:
            ValidationError: names every bad pair, before any work starts.
            GenerationInterrupted: Ctrl-C.
        """
        check_use_tqdm(use_tqdm)
        with InterruptGuard() as guard, self._exclusive():
            rows = continuation_rows(self._preprocessor, prompts, continuations)
            outputs = _score(self, rows, use_tqdm, guard)
        return [likelihood(row, output) for row, output in zip(rows, outputs, strict=True)]

    @known_names("LLM.perplexity")
    def perplexity(
        self: Any, texts: Any, *, stride: int | None = None, use_tqdm: bool | Callable[..., Any] = True
    ) -> PerplexityOutput:
        """exp of the mean negative logprob per token; the first token of a text, which nothing precedes, is not scored.

        Args:
            texts: as prompts of `generate`.
            stride: texts that are longer than the context are read in windows that overlap, each of which scores so
                many tokens that none before it has; None: such texts are refused.
            use_tqdm: as for `generate`.

        Raises:
            ValidationError: names every bad text, before any work starts.
            GenerationInterrupted: Ctrl-C.
        """
        check_use_tqdm(use_tqdm)
        with InterruptGuard() as guard, self._exclusive():
            rows, owners = perplexity_rows(self._preprocessor, texts, stride)
            outputs = _score(self, rows, use_tqdm, guard)
        return perplexity_of(rows, owners, outputs)


def _score(
    llm: Any, rows: list[Row], use_tqdm: bool | Callable[..., Any], guard: InterruptGuard
) -> list[RequestOutput]:
    outputs: list[RequestOutput] = llm._run(llm._begin(), rows, use_tqdm, guard)
    if guard.requested:
        raise GenerationInterrupted(outputs)
    return outputs
