"""The methods of `LLM` for beam search, log-likelihood and perplexity.

Owns the methods, as a base class of `LLM` without state.
"""

from __future__ import annotations

from llm.api.adapters import LoRARequests, adapters_of, give_adapters
from llm.api.checks import Priority, check_priority
from llm.api.host import Host
from llm.base.bar import UseTqdm
from llm.base.checks import known_names
from llm.engine.beams import BeamSearches
from llm.engine.interrupt import InterruptGuard
from llm.engine.progress import check_use_tqdm
from llm.engine.rows import Row
from llm.engine.scoring import continuation_rows, likelihood, perplexity_of, perplexity_rows
from llm.errors import GenerationInterrupted
from llm.inputs import LoRARequest
from llm.outputs import BeamSearchOutput, LoglikelihoodOutput, PerplexityOutput, RequestOutput
from llm.sampling_params import BeamSearchParams


class Scoring:
    @known_names("LLM.beam_search")
    def beam_search(
        self: Host,
        prompts: object,
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
        priority: Priority = None,
    ) -> list[BeamSearchOutput]:
        """Beam search for the most likely continuations of each prompt: transformers' sequences and scores.

        Args:
            prompts: as for `generate`.
            params: beam width, maximum length and scoring.
            lora_request: as for `generate`.
            use_tqdm: a progress bar that counts prompts.
            concurrency_limit: maximum number of prompts searched at a time; None: all.

        Raises:
            ValidationError: names every bad prompt, before any work starts.
            GenerationInterrupted: Ctrl-C; carries the outputs of finished prompts.
        """
        check_use_tqdm(use_tqdm)
        with InterruptGuard() as guard, self._exclusive():
            engine = self._begin()
            searches = BeamSearches(engine, self._preprocessor, prompts, params, concurrency_limit)
            check_priority(priority, len(searches.outputs()))
            searches.give_adapters(adapters_of(engine, lora_request, len(searches.outputs())))
            try:
                searches.run(lambda rows: self._run(engine, rows, False, guard), use_tqdm)
            except GenerationInterrupted:
                raise GenerationInterrupted(searches.outputs()) from None
        if guard.requested:
            raise GenerationInterrupted(searches.outputs())
        return [output for output in searches.outputs() if output is not None]

    @known_names("LLM.loglikelihood")
    def loglikelihood(
        self: Host,
        prompts: object,
        continuations: object,
        *,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = True,
    ) -> list[LoglikelihoodOutput]:
        """The log-likelihood of each continuation after its prompt.

        A text prompt and a text continuation are tokenized as one text; a token that spans the border is scored too.
        Common prefixes of prompts are computed once.

        Args:
            prompts: as for `generate`.
            continuations: one per prompt, texts or token ids; or several for one prompt.
            lora_request: the adapter of all pairs, or a list with one or None for each.
            use_tqdm: as for `generate`.

        Raises:
            ValidationError: names every bad pair, before any work starts.
            GenerationInterrupted: Ctrl-C.
        """
        check_use_tqdm(use_tqdm)
        with InterruptGuard() as guard, self._exclusive():
            rows = continuation_rows(self._preprocessor, prompts, continuations)
            give_adapters(self._begin(), rows, lora_request)
            outputs = score_rows(self, rows, use_tqdm, guard)
        return [likelihood(row, output) for row, output in zip(rows, outputs, strict=True)]

    @known_names("LLM.perplexity")
    def perplexity(
        self: Host,
        texts: object,
        *,
        stride: int | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: UseTqdm = True,
    ) -> PerplexityOutput:
        """exp of the mean negative logprob per token. The first token of a text has no context and is not scored.

        Args:
            texts: as prompts of `generate`.
            stride: texts longer than the context are scored in overlapping windows, each of which scores this many
                further tokens; None: such texts are refused.
            lora_request: the adapter of all texts.
            use_tqdm: as for `generate`.

        Raises:
            ValidationError: names every bad text, before any work starts.
            GenerationInterrupted: Ctrl-C.
        """
        check_use_tqdm(use_tqdm)
        with InterruptGuard() as guard, self._exclusive():
            rows, owners = perplexity_rows(self._preprocessor, texts, stride)
            give_adapters(self._begin(), rows, lora_request)
            outputs = score_rows(self, rows, use_tqdm, guard)
        return perplexity_of(rows, owners, outputs)


def score_rows(llm: Host, rows: list[Row], use_tqdm: UseTqdm, guard: InterruptGuard) -> list[RequestOutput]:
    """Run rows of `llm.engine.scoring`, or raise `GenerationInterrupted`; the lock is held."""
    outputs = llm._run(llm._begin(), rows, use_tqdm, guard)
    if guard.requested:
        raise GenerationInterrupted(outputs)
    return outputs
