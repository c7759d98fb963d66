"""Scoring given texts: rows with prompt logprobs for a part of their prompt, and the sums of those logprobs.

Owns the border between a prompt and its continuation, the windows of texts longer than the context, and the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llm.base.checks import check_integer, refuse
from llm.config.engine import ModelConfig
from llm.engine.preprocess import Preprocessor
from llm.engine.prompts import list_prompts
from llm.engine.rows import Row
from llm.errors import ValidationError
from llm.outputs import LoglikelihoodOutput, PerplexityOutput, RequestOutput
from llm.sampling_params import SamplingParams


def check_logprobs_mode(config: ModelConfig) -> None:
    """Raise `ValidationError` if `logprobs_mode` would return logits where logprobs are needed."""
    if not config.logprobs_mode.endswith("logprobs"):
        refuse("logprobs_mode", config.logprobs_mode, "'raw_logprobs' or 'processed_logprobs' to score texts")


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
