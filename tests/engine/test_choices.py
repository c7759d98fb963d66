"""`LLM.classify_choices`: labels and probabilities from log-likelihoods, tokenized as lm-evaluation-harness does."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from embedded import open_llm
from same_answers import same_values

from llm import LLM, ChoiceOutput, ValidationError
from llm.errors import PromptTooLongError

PROMPTS = ["In the beginning God created the", "And he said unto ", "The LORD is my\n"]
CHOICES = ["heaven", "shepherd of the flock", "Moses", "x"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64, block_size=4, max_num_seqs=8) as opened:
        yield opened


def harness(llm: LLM, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The harness's rule in its own words, on transformers' tokenizer."""
    encode = llm.get_tokenizer().encode
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation, context = context[-spaces:] + continuation, context[:-spaces]
    before = encode(context)
    return before, encode(context + continuation)[len(before) :]


def classify(llm: LLM, *args: object, **options: object) -> list[ChoiceOutput]:
    return llm.classify_choices(*args, use_tqdm=False, **options)  # type: ignore[arg-type]


def test_scores_are_log_likelihoods_and_probabilities_their_softmax(llm: LLM) -> None:
    outputs = classify(llm, PROMPTS, CHOICES)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        pairs = [harness(llm, prompt, " " + choice) for choice in CHOICES]
        scored = llm.loglikelihood([head for head, _ in pairs], [tail for _, tail in pairs], use_tqdm=False)
        assert same_values(output.logprobs, [item.logprob for item in scored])
        assert output.num_tokens == [len(tail) for _, tail in pairs] and max(output.num_tokens) > 1
        total = math.fsum(map(math.exp, output.logprobs))
        assert output.probabilities == pytest.approx([math.exp(value) / total for value in output.logprobs])
        assert math.fsum(output.probabilities) == pytest.approx(1)
        assert output.index == max(range(len(CHOICES)), key=output.logprobs.__getitem__)
        assert (output.label, output.probability) == (CHOICES[output.index], output.probabilities[output.index])


@pytest.mark.parametrize(("normalize", "length"), [("characters", len), ("bytes", lambda text: len(text.encode()))])
def test_normalized_scores_are_per_length(llm: LLM, normalize: str, length: object) -> None:
    choices = [*CHOICES, "שָׁלוֹם"]  # more bytes than characters
    [plain] = classify(llm, PROMPTS[0], choices)
    [output] = classify(llm, PROMPTS[0], choices, normalize=normalize)
    scores = [value / length(choice) for value, choice in zip(plain.logprobs, choices, strict=True)]  # type: ignore[operator]
    total = math.fsum(map(math.exp, scores))
    assert output.logprobs == plain.logprobs
    assert output.probabilities == pytest.approx([math.exp(value) / total for value in scores])
    assert output.label == choices[scores.index(max(scores))]
    # The negative control: characters, bytes and nothing are not the same.
    assert output.probabilities != pytest.approx(plain.probabilities, rel=1e-3)


def test_a_prompt_is_computed_once_and_alone_is_batched(llm: LLM) -> None:
    prompt = " ".join(PROMPTS[0] for _ in range(4))
    llm.reset_prefix_cache()
    before = llm.stats().tokens
    [output] = classify(llm, [prompt], CHOICES)
    whole = [len(harness(llm, prompt, " " + choice)[0]) + 1 for choice in CHOICES]
    assert llm.stats().tokens - before < max(whole) + len(CHOICES) * 8 < sum(whole)
    assert min(output.num_cached_tokens[1:]) > 0
    llm.reset_prefix_cache()
    alone = [classify(llm, [prompt], [choice])[0].logprobs[0] for choice in CHOICES]
    assert same_values(alone, output.logprobs)


def test_choices_and_prompts_of_other_kinds(llm: LLM) -> None:
    own = [["a", "b c"], ["d"], ["e", "f", "g"]]
    outputs = classify(llm, PROMPTS, own)
    assert [output.choices for output in outputs] == own and outputs[1].probabilities == [1.0]
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    tail = llm.get_tokenizer().encode(" heaven", add_special_tokens=False)
    [output] = classify(llm, [{"prompt_token_ids": ids}], ["heaven", "x"])
    assert same_values(output.logprobs[:1], [llm.loglikelihood([ids], [tail], use_tqdm=False)[0].logprob])
    [glued] = classify(llm, PROMPTS[0], ["heaven", "x"], delimiter="")
    assert glued.logprobs != output.logprobs
    assert classify(llm, [], CHOICES) == []


@pytest.mark.parametrize(
    ("prompts", "choices", "said"),
    [
        (["a"], "b", "choices must be a list of texts"),
        (["a"], [], "choices must be a list of texts"),
        (["a"], ["b", 3], "choices must be a list of texts"),
        (["a", "b"], [["c"]], "1 lists of choices for 2 prompts"),
        (["a"], [["c", "c"]], r"different texts, at least one \(those of prompt 0\)"),
        (["a"], [[""]], r"not empty \(those of prompt 0\)"),
        (["a", {"no": 1}], ["c"], "prompt 1: the keys of a prompt"),
        (["a", []], ["c"], "adds a token to prompt 1"),
    ],
)
def test_mistakes_are_told(llm: LLM, prompts: object, choices: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        classify(llm, prompts, choices)


def test_more_mistakes_are_told(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"prompt 1 and its choice have \d+ tokens, and max_model_len is 64"):
        classify(llm, ["a", "b " * 70], CHOICES)
    with pytest.raises(ValidationError, match="normalize must be 'characters' or 'bytes', got 'tokens'"):
        classify(llm, ["a"], CHOICES, normalize="tokens")
    with pytest.raises(ValidationError, match="delimiter must be a text"):
        classify(llm, ["a"], CHOICES, delimiter=None)
