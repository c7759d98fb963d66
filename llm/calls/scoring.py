"""Beam search, log-likelihoods, perplexity and choices: batch calls over the rows that `llm.engine` makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm.base.checks import check_choice, refuse
from llm.calls.arguments import LoRARequests, Priority, adapters_of, check_priority, give_adapters, requests_per_row
from llm.calls.batch import BatchCall, CallOptions
from llm.engine.beams import BeamSearches
from llm.engine.engine import Engine
from llm.engine.interrupt import InterruptGuard
from llm.engine.progress import check_use_tqdm
from llm.engine.rows import Row
from llm.engine.scoring import (
    LENGTHS,
    choice_output,
    continuation_rows,
    likelihood,
    perplexity_of,
    perplexity_rows,
    question_rows,
    questions,
)
from llm.errors import GenerationInterrupted
from llm.inputs import LoRARequest
from llm.outputs import BeamSearchOutput, ChoiceOutput, LoglikelihoodOutput, PerplexityOutput, RequestOutput
from llm.progress import UseTqdm
from llm.sampling_params import BeamSearchParams

if TYPE_CHECKING:
    from llm.llm import LLM


def beam_search(
    llm: LLM,
    prompts: object,
    params: BeamSearchParams,
    lora_request: LoRARequests,
    use_tqdm: UseTqdm,
    concurrency_limit: int | None,
    priority: Priority,
) -> list[BeamSearchOutput]:
    check_use_tqdm(use_tqdm)
    with InterruptGuard() as guard, llm._exclusive():
        engine = llm._begin()
        searches = BeamSearches(engine, llm._preprocessor, prompts, params, concurrency_limit)
        check_priority(priority, len(searches.outputs()))
        searches.give_adapters(adapters_of(engine, lora_request, len(searches.outputs())))
        try:
            searches.run(lambda rows: _run(llm, engine, rows, False, guard), use_tqdm)
        except GenerationInterrupted:
            raise GenerationInterrupted(searches.outputs()) from None
    if guard.requested:
        raise GenerationInterrupted(searches.outputs())
    return [output for output in searches.outputs() if output is not None]


def loglikelihood(
    llm: LLM, prompts: object, continuations: object, lora_request: LoRARequests, use_tqdm: UseTqdm
) -> list[LoglikelihoodOutput]:
    check_use_tqdm(use_tqdm)
    with InterruptGuard() as guard, llm._exclusive():
        rows = continuation_rows(llm._preprocessor, prompts, continuations)
        give_adapters(llm._begin(), rows, lora_request)
        outputs = _scored(llm, rows, use_tqdm, guard)
    return [likelihood(row, output) for row, output in zip(rows, outputs, strict=True)]


def perplexity(
    llm: LLM, texts: object, stride: int | None, lora_request: LoRARequest | None, use_tqdm: UseTqdm
) -> PerplexityOutput:
    check_use_tqdm(use_tqdm)
    with InterruptGuard() as guard, llm._exclusive():
        rows, owners = perplexity_rows(llm._preprocessor, texts, stride)
        give_adapters(llm._begin(), rows, lora_request)
        outputs = _scored(llm, rows, use_tqdm, guard)
    return perplexity_of(rows, owners, outputs)


def classify_choices(
    llm: LLM,
    prompts: object,
    choices: object,
    normalize: str | None,
    delimiter: str,
    lora_request: LoRARequests,
    use_tqdm: UseTqdm,
) -> list[ChoiceOutput]:
    check_use_tqdm(use_tqdm)
    if normalize is not None:
        check_choice("normalize", normalize, [str(name) for name in LENGTHS if name])
    if not isinstance(delimiter, str):
        refuse("delimiter", delimiter, "a text")
    with InterruptGuard() as guard, llm._exclusive():
        engine = llm._begin()
        asked = questions(prompts, choices)
        rows = question_rows(llm._preprocessor, asked, delimiter)
        adapters = requests_per_row(lora_request, len(asked))
        per_choice = [own for own, item in zip(adapters, asked, strict=True) for _ in item.choices]
        give_adapters(engine, rows, per_choice)
        outputs = _scored(llm, rows, use_tqdm, guard)
    scored = iter([likelihood(row, output) for row, output in zip(rows, outputs, strict=True)])
    return [choice_output(question, [next(scored) for _ in question.choices], normalize) for question in asked]


def _run(llm: LLM, engine: Engine, rows: list[Row], use_tqdm: UseTqdm, guard: InterruptGuard) -> list[RequestOutput]:
    """The lock is held."""
    return BatchCall(llm, rows, guard, CallOptions(use_tqdm)).run(engine)


def _scored(llm: LLM, rows: list[Row], use_tqdm: UseTqdm, guard: InterruptGuard) -> list[RequestOutput]:
    """Run rows of `llm.engine.scoring`, or raise `GenerationInterrupted`."""
    outputs = _run(llm, llm._begin(), rows, use_tqdm, guard)
    if guard.requested:
        raise GenerationInterrupted(outputs)
    return outputs
