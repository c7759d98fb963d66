"""Beam search, log-likelihoods, perplexity and choices.

A row is a text with prompt logprobs from the border between prompt and continuation on; results are their sums. Choices
are tokenized and scored as lm-evaluation-harness does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm.base.checks import check_choice, check_integer, refuse
from llm.calls.arguments import LoRARequests, Priority, adapters_of, check_priority, give_adapters, requests_per_row
from llm.calls.batch import BatchCall, CallOptions
from llm.engine.beams import BeamSearches
from llm.engine.engine import Engine
from llm.engine.images import no_images
from llm.engine.interrupt import InterruptGuard
from llm.engine.preprocess import Preprocessor
from llm.engine.progress import check_use_tqdm
from llm.engine.prompts import ParsedPrompt, list_prompts, parse_prompt
from llm.engine.rows import Row, check_logprobs_mode
from llm.errors import GenerationInterrupted, PromptTooLongError, ValidationError
from llm.inputs import LoRARequest
from llm.outputs import BeamSearchOutput, ChoiceOutput, LoglikelihoodOutput, PerplexityOutput, RequestOutput
from llm.progress import UseTqdm
from llm.sampling_params import BeamSearchParams, SamplingParams

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
        outputs = _run_scored(llm, rows, use_tqdm, guard)
    return [likelihood(row, output) for row, output in zip(rows, outputs, strict=True)]


def perplexity(
    llm: LLM, texts: object, stride: int | None, lora_request: LoRARequest | None, use_tqdm: UseTqdm
) -> PerplexityOutput:
    check_use_tqdm(use_tqdm)
    with InterruptGuard() as guard, llm._exclusive():
        rows, owners = perplexity_rows(llm._preprocessor, texts, stride)
        give_adapters(llm._begin(), rows, lora_request)
        outputs = _run_scored(llm, rows, use_tqdm, guard)
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
        outputs = _run_scored(llm, rows, use_tqdm, guard)
    scored = iter([likelihood(row, output) for row, output in zip(rows, outputs, strict=True)])
    return [choice_output(question, [next(scored) for _ in question.choices], normalize) for question in asked]


def _run(llm: LLM, engine: Engine, rows: list[Row], use_tqdm: UseTqdm, guard: InterruptGuard) -> list[RequestOutput]:
    """The lock is held."""
    return BatchCall(llm, rows, guard, CallOptions(use_tqdm)).run(engine)


def _run_scored(llm: LLM, rows: list[Row], use_tqdm: UseTqdm, guard: InterruptGuard) -> list[RequestOutput]:
    """Run these rows, or raise `GenerationInterrupted`."""
    outputs = _run(llm, llm._begin(), rows, use_tqdm, guard)
    if guard.requested:
        raise GenerationInterrupted(outputs)
    return outputs


def continuation_rows(preprocessor: Preprocessor, prompts: object, continuations: object) -> list[Row]:
    """One row per pair: prompt and continuation, scored from the first token of the continuation."""
    first, second = list_prompts(prompts), list_prompts(continuations)
    if len(first) == 1 and len(second) > 1:
        first = first * len(second)
    if len(first) != len(second):
        raise _bad(
            "continuations", f"there are {len(second)} continuations for {len(first)} prompts; pass as many", second
        )
    heads = preprocessor.token_ids(first, "prompts")
    tails = preprocessor.token_ids(second, "continuations", continuing=True)
    both = [index for index, pair in enumerate(zip(first, second, strict=True)) if all(map(_is_text, pair))]
    joined = preprocessor.token_ids([_text(first[index]) + _text(second[index]) for index in both], "prompts")
    whole = [head + tail for head, tail in zip(heads, tails, strict=True)]
    borders = [len(head) for head in heads]
    for index, token_ids in zip(both, joined, strict=True):
        whole[index], borders[index] = token_ids, _common(heads[index], token_ids)
    for index, (token_ids, border) in enumerate(zip(whole, borders, strict=True)):
        if border == 0:
            raise _bad("prompts", f"prompts: number {index} is empty; it needs at least one token", first[index])
        if border >= len(token_ids):
            raise _bad(
                "continuations", f"continuations: number {index} is empty; it needs at least one token", second[index]
            )
    return scored_rows(preprocessor, whole, borders)


def perplexity_rows(preprocessor: Preprocessor, texts: object, stride: int | None) -> tuple[list[Row], list[int]]:
    """(rows, for each the index of the text that it is a window of)."""
    limit = preprocessor.config.max_model_len - 1  # a row generates one token, which is ignored
    if stride is not None:
        check_integer("stride", stride, 1, limit - 1)
    windows, borders, owners = [], [], []
    for index, token_ids in enumerate(preprocessor.token_ids(list_prompts(texts), "texts")):
        if len(token_ids) < 2:
            raise _bad(
                "texts",
                f"texts: number {index} is too short; it needs two tokens, for the first is not scored",
                token_ids,
            )
        if len(token_ids) > limit and stride is None:
            raise ValidationError(
                f"text {index} has {len(token_ids)} tokens and a window holds {limit}; pass stride= (for example "
                f"{limit // 2}) to read it in windows.",
                parameter="texts",
                value=len(token_ids),
            )
        scored, end = 1, min(limit, len(token_ids))
        while scored < len(token_ids):
            start = max(0, end - limit)
            windows.append(token_ids[start:end])
            borders.append(scored - start)
            owners.append(index)
            scored, end = end, min(end + (stride or limit), len(token_ids))
    return scored_rows(preprocessor, windows, borders), owners


def likelihood(row: Row, output: RequestOutput) -> LoglikelihoodOutput:
    scored = _scored(row, output)
    return LoglikelihoodOutput(
        prompt_token_ids=row.token_ids[: row.score_from],
        token_ids=row.token_ids[row.score_from :],
        logprob=math.fsum(logprob for logprob, _ in scored),
        logprobs=[logprob for logprob, _ in scored],
        is_greedy=all(rank == 1 for _, rank in scored),
        num_cached_tokens=output.num_cached_tokens,
    )


def perplexity_of(rows: Sequence[Row], owners: Sequence[int], outputs: Sequence[RequestOutput]) -> PerplexityOutput:
    logprobs: list[list[float]] = [[] for _ in range(max(owners, default=-1) + 1)]
    for row, owner, output in zip(rows, owners, outputs, strict=True):
        logprobs[owner] += [logprob for logprob, _ in _scored(row, output)]
    count = sum(map(len, logprobs))
    total = math.fsum(value for values in logprobs for value in values)
    return PerplexityOutput(
        perplexity=math.exp(-total / count) if count else math.nan,
        per_text=[math.exp(-math.fsum(values) / len(values)) for values in logprobs],
        logprob=total,
        num_tokens=count,
    )


def scored_rows(preprocessor: Preprocessor, token_ids: Sequence[list[int]], borders: Sequence[int]) -> list[Row]:
    """A row for each list of token ids, whose tokens are scored from its border on; all share prefixes."""
    check_logprobs_mode(preprocessor.config)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in token_ids]
    rows = preprocessor.rows(prompts, params, SamplingParams) if prompts else []
    for row, border in zip(rows, borders, strict=True):
        row.score_from = border
        row.sharing = f"scoring {id(rows)}"
    return rows


def _scored(row: Row, output: RequestOutput) -> list[tuple[float, int | None]]:
    """(logprob, rank) of each scored token."""
    positions = list(output.prompt_logprobs or [])[row.score_from :]
    tokens = row.token_ids[row.score_from :]
    found = [position[token] for token, position in zip(tokens, positions, strict=True) if position is not None]
    return [(item.logprob, item.rank) for item in found]


def _is_text(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None)


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else prompt["prompt"]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common prefix."""
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


def _bad(parameter: str, message: str, value: object) -> ValidationError:
    return ValidationError(f"{message}.", parameter=parameter, value=value)


# What a log-likelihood is divided by, and the harness's name of the accuracy of the label.
LENGTHS = {None: "acc", "characters": "acc_norm", "bytes": "acc_bytes"}


@dataclass(frozen=True)
class Question:
    """A prompt and its choices. `text` is None if token ids were given."""

    text: str | None
    token_ids: list[int]
    choices: list[str]


def questions(prompts: object, choices: object) -> list[Question]:
    """Raises `ValidationError` that names the first wrong prompt or list of choices."""
    given = list_prompts(prompts)
    per_prompt = _choices_of(choices, len(given))
    found = []
    for index, (prompt, own) in enumerate(zip(given, per_prompt, strict=True)):
        try:
            parsed = parse_prompt(prompt)
            no_images([parsed.media], "a choice")
        except ValidationError as error:
            raise ValidationError(f"prompt {index}: {error}", parameter="prompts", value=prompt) from error
        _check(index, parsed, own)
        found.append(Question(parsed.text if parsed.token_ids is None else None, parsed.token_ids or [], own))
    return found


def question_rows(preprocessor: Preprocessor, asked: Sequence[Question], delimiter: str) -> list[Row]:
    """One row per choice of each question, in order; those of a question share its blocks.

    A text is encoded together with `delimiter` and the choice; what comes after as many tokens as the text has alone is
    scored. Whitespace at the end of the text belongs to the choice. After token ids, the choice is encoded alone.
    """
    heads = iter(preprocessor.token_ids([item.text.rstrip() for item in asked if item.text is not None], "prompts"))
    pairs = [(item.text, delimiter + own) for item in asked for own in item.choices]
    wholes = iter(preprocessor.token_ids([text + own for text, own in pairs if text is not None], "choices"))
    alone = [own for text, own in pairs if text is None]
    tails = iter(preprocessor.token_ids(alone, "choices", continuing=True))
    token_ids, borders = [], []
    for index, question in enumerate(asked):
        head = question.token_ids if question.text is None else next(heads)
        for own in question.choices:
            tail = next(tails) if question.text is None else next(wholes)[len(head) :]
            if not head or not tail:
                refuse("choices", own, f"a text that adds a token to prompt {index}, which must have one too")
            _check_room(index, len(head) + len(tail), preprocessor.config.max_model_len)
            token_ids.append(head + tail)
            borders.append(len(head))
    return scored_rows(preprocessor, token_ids, borders)


def choice_output(question: Question, scored: Sequence[LoglikelihoodOutput], normalize: str | None) -> ChoiceOutput:
    logprobs = [item.logprob for item in scored]
    scores = [logprob / _length(own, normalize) for logprob, own in zip(logprobs, question.choices, strict=True)]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    probabilities = [weight / math.fsum(weights) for weight in weights]
    index = scores.index(top)
    return ChoiceOutput(
        label=question.choices[index],
        index=index,
        probability=probabilities[index],
        choices=question.choices,
        probabilities=probabilities,
        logprobs=logprobs,
        num_tokens=[len(item.token_ids) for item in scored],
        num_cached_tokens=[item.num_cached_tokens for item in scored],
    )


def _length(choice: str, normalize: str | None) -> int:
    if normalize is None:
        return 1
    return len(choice) if normalize == "characters" else len(choice.encode())


def _choices_of(choices: object, count: int) -> list[list[str]]:
    """The choices of each prompt: one list for all, or a list for each."""
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        refuse("choices", choices, "a list of texts, or one such list per prompt")
    if all(isinstance(item, str) for item in choices):
        return [list(choices)] * count
    lists = [list(item) for item in choices if isinstance(item, Sequence) and not isinstance(item, str)]
    if len(lists) != len(choices):
        refuse("choices", choices, "a list of texts, or one such list per prompt")
    if len(lists) != count:
        message = f"there are {len(lists)} lists of choices for {count} prompts; pass one for all, or one for each."
        raise ValidationError(message, parameter="choices", value=len(lists))
    return lists


def _check(index: int, prompt: ParsedPrompt, choices: list[str]) -> None:
    if prompt.cache_salt is not None:
        refuse("cache_salt", prompt.cache_salt, "left out where texts are scored")
    for own in choices:
        if not isinstance(own, str) or not own:
            refuse("choices", own, f"texts that are not empty (those of prompt {index})")
    if len(set(choices)) != len(choices) or not choices:
        refuse("choices", choices, f"different texts, at least one (those of prompt {index})")


def _check_room(index: int, count: int, limit: int) -> None:
    if count >= limit:
        message = f"prompt {index} and its choice have {count} tokens, and max_model_len is {limit}; shorten it."
        raise PromptTooLongError(message, num_tokens=count, limit=limit)
