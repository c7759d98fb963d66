"""Which of some answers a prompt is likeliest to be followed by, tokenized and scored as lm-evaluation-harness does.

Owns the border between a prompt and an answer, and the probabilities. `llm.engine.scoring` has the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llm.base.checks import refuse
from llm.engine.preprocess import Preprocessor
from llm.engine.prompts import ParsedPrompt, list_prompts, parse_prompt
from llm.engine.rows import Row
from llm.engine.scoring import scored_rows
from llm.errors import PromptTooLongError, ValidationError
from llm.outputs import ChoiceOutput, LoglikelihoodOutput

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
