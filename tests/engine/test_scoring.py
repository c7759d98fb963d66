"""`LLM.loglikelihood` and `LLM.perplexity`: transformers' float32 logprobs of given texts, prefixes computed once."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded import assert_idle, engine_of, open_llm
from tiny_models import TINY_MODELS, VOCAB, make_prompts, one_thread, reference_logprobs, tiny_checkpoint

from llm import LLM, BeamSearchParams, GenerationInterrupted, ValidationError

MODELS = ("llama", "gemma3", "gpt2")
TOLERANCE = 1e-4
PROMPTS = make_prompts(TINY_MODELS["llama"])
TAILS = [prompt[::-1][:7] for prompt in PROMPTS]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LLM]]:
    folder = tiny_checkpoint(request.param, tmp_path_factory)
    engine = {"block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 64}
    with one_thread(), LLM(folder, skip_tokenizer_init=True, **engine) as llm:
        yield folder, llm


@pytest.fixture(scope="module")
def embedded() -> Iterator[LLM]:
    with open_llm(kv_cache_dtype="float32", max_model_len=128) as llm:
        yield llm


def expected(folder: Path, prompt: list[int], tail: list[int]) -> list[float]:
    return [float(line[token]) for line, token in zip(reference_logprobs(folder, prompt, tail), tail, strict=True)]


def worst(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def rounding(llm: LLM) -> float:
    """How far answers in other batches may be: not at all, but where PyTorch computes."""
    return 0.0 if llm.config.invariant else TOLERANCE / 10


def test_loglikelihood_is_transformers(model: tuple[Path, LLM]) -> None:
    folder, llm = model
    outputs = llm.loglikelihood(PROMPTS, TAILS, use_tqdm=False)
    for prompt, tail, output in zip(PROMPTS, TAILS, outputs, strict=True):
        theirs = expected(folder, prompt, tail)
        assert (output.prompt_token_ids, output.token_ids) == (prompt, tail)
        assert worst(output.logprobs, theirs) < TOLERANCE
        assert output.logprob == pytest.approx(sum(theirs), abs=len(tail) * TOLERANCE)
        # The negative control: after another prompt, or scored one token off, it would be noticed.
        assert worst([*output.logprobs[1:], 0.0], theirs) > TOLERANCE
        assert worst(output.logprobs, expected(folder, [*prompt[:-1], prompt[-1] % 250 + 3], tail)) > TOLERANCE
    assert_idle(llm)


def test_alone_is_batched_and_caching_changes_nothing(model: tuple[Path, LLM]) -> None:
    llm = model[1]
    together = llm.loglikelihood(PROMPTS, TAILS, use_tqdm=False)
    for prompt, tail, output in zip(PROMPTS, TAILS, together, strict=True):
        llm.reset_prefix_cache()
        alone = llm.loglikelihood([prompt], [tail], use_tqdm=False)[0]
        again = llm.loglikelihood([prompt], [tail], use_tqdm=False)[0]
        assert alone.num_cached_tokens == 0
        # Up to the last full block before the token whose logits are the first that are needed.
        assert again.num_cached_tokens == (len(prompt) - 1) // 4 * 4
        assert worst(alone.logprobs, output.logprobs) <= rounding(llm)
        assert worst(alone.logprobs, again.logprobs) <= rounding(llm)
        assert alone.is_greedy == output.is_greedy


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_greedy_continuations_are_known_as_such(model: tuple[Path, LLM]) -> None:
    llm = model[1]
    greedy = llm.generate([PROMPTS[2]], use_tqdm=False, sampling_params=_greedy(6))[0].outputs[0].token_ids
    other = [*greedy[:-1], greedy[-1] % 250 + 3]
    outputs = llm.loglikelihood(PROMPTS[2], [greedy, other, [greedy[0]]], use_tqdm=False)
    assert [output.is_greedy for output in outputs] == [True, False, True]


def _greedy(count: int) -> Any:
    from llm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("caching", [True, False])
def test_choices_share_their_prompt(caching: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_checkpoint("llama", tmp_path_factory)
    prompt = PROMPTS[-1]
    with one_thread(), LLM(folder, skip_tokenizer_init=True, block_size=4, enable_prefix_caching=caching) as llm:
        before = llm.stats().tokens
        llm.loglikelihood(prompt, [[token] for token in range(20, 30)], use_tqdm=False)
        assert llm.stats().tokens - before <= len(prompt) + 1 + 9 * 5


def test_perplexity_is_transformers(model: tuple[Path, LLM]) -> None:
    folder, llm = model
    texts = PROMPTS[1:]
    output = llm.perplexity(texts, use_tqdm=False)
    logprobs = [expected(folder, text[:1], text[1:]) for text in texts]
    assert output.num_tokens == sum(len(text) - 1 for text in texts)
    assert output.logprob == pytest.approx(sum(map(sum, logprobs)), abs=output.num_tokens * TOLERANCE)
    per_text = [math.exp(-sum(values) / len(values)) for values in logprobs]
    assert output.per_text == pytest.approx(per_text, rel=2 * TOLERANCE)
    assert float(output) == pytest.approx(math.exp(-output.logprob / output.num_tokens))
    alone = llm.perplexity([texts[0]], use_tqdm=False).perplexity
    assert alone == pytest.approx(output.per_text[0], rel=rounding(llm), abs=0)


@pytest.mark.parametrize("stride", [1, 20, 62])
def test_a_long_text_is_read_in_windows(model: tuple[Path, LLM], stride: int) -> None:
    folder, llm = model
    text = [token % (VOCAB - 3) + 3 for token in range(7, 7 + 11 * 90, 11)]
    with pytest.raises(ValidationError, match="text 0 has 90 tokens and a window holds 63; pass stride="):
        llm.perplexity([text], use_tqdm=False)
    output = llm.perplexity([text], stride=stride, use_tqdm=False)
    total, scored = sum(expected(folder, text[:1], text[1:63])), 63
    while scored < len(text):
        end = min(scored + stride, len(text))
        total += sum(expected(folder, text[end - 63 : scored], text[scored:end]))
        scored = end
    assert output.num_tokens == len(text) - 1
    assert output.logprob == pytest.approx(total, abs=len(text) * TOLERANCE)


def test_texts_are_tokenized_together(embedded: LLM) -> None:
    tokenizer = embedded.get_tokenizer()
    for prompt, tail in (
        ("And the LORD said", " unto Moses"),
        ("In the begin", "ning"),
        ("The king", " of Israel, and"),
    ):
        output = embedded.loglikelihood(prompt, tail, use_tqdm=False)[0]
        whole = tokenizer(prompt + tail)["input_ids"]
        assert output.prompt_token_ids + output.token_ids == whole
        assert tokenizer.decode(output.token_ids).endswith(tail.strip())
        ids = embedded.loglikelihood([output.prompt_token_ids], [output.token_ids], use_tqdm=False)[0]
        assert worst(ids.logprobs, output.logprobs) <= rounding(embedded)
    # A token across the border belongs to what is scored.
    spanning = embedded.loglikelihood("And Mos", "es said", use_tqdm=False)[0]
    assert spanning.prompt_token_ids + spanning.token_ids == tokenizer("And Moses said")["input_ids"]
    mixed = embedded.loglikelihood(["And Moses"], [{"prompt_token_ids": [300, 301]}], use_tqdm=False)[0]
    assert mixed.token_ids == [300, 301]
    continued = embedded.loglikelihood([[5, 6]], [" said"], use_tqdm=False)[0]
    assert continued.token_ids == tokenizer(" said", add_special_tokens=False)["input_ids"]


def test_likely_texts_are_likely(embedded: LLM) -> None:
    good, bad = embedded.loglikelihood("And the LORD said unto", [" Moses", " zqx7"], use_tqdm=False)
    assert good.logprob > bad.logprob + 5
    sense, nonsense = embedded.perplexity(["And the LORD said unto Moses", "xq zz7 kkp ww"], use_tqdm=False).per_text
    assert sense * 10 < nonsense


@pytest.mark.parametrize(
    ("method", "arguments", "parameter"),
    [
        ("loglikelihood", (["a", "b"], ["c", "d", "e"]), "continuations"),
        ("loglikelihood", (["a", "b"], ["c", ""]), "continuations"),
        ("loglikelihood", (["a", 5], ["c", "d"]), "prompts"),
        ("loglikelihood", (["a"], [7.5]), "continuations"),
        ("loglikelihood", (["a"], [[9999]]), "prompts"),
        ("loglikelihood", (["a"], [[5] * 200]), "prompts"),
        ("perplexity", ([[5]],), "texts"),
        ("perplexity", (5,), "prompts"),
        ("perplexity", ([[5] * 200],), "texts"),
    ],
)
def test_bad_calls(embedded: LLM, method: str, arguments: Any, parameter: str) -> None:
    with pytest.raises(ValidationError) as error:
        getattr(embedded, method)(*arguments, use_tqdm=False)
    assert error.value.parameter == parameter
    assert "\n" not in str(error.value)
    assert_idle(embedded)


@pytest.mark.parametrize("stride", [0, 127, 1.5])
def test_bad_stride(embedded: LLM, stride: Any) -> None:
    with pytest.raises(ValidationError, match="stride"):
        embedded.perplexity(["And the LORD"], stride=stride, use_tqdm=False)


def test_logits_are_no_logprobs() -> None:
    with open_llm(logprobs_mode="raw_logits") as llm:
        for call in (
            lambda: llm.loglikelihood("And the", " LORD", use_tqdm=False),
            lambda: llm.perplexity("And the LORD", use_tqdm=False),
            lambda: llm.beam_search("And the", BeamSearchParams(beam_width=2, max_tokens=2)),
        ):
            with pytest.raises(ValidationError, match="logprobs_mode"):
                call()


def test_nothing_is_no_error(embedded: LLM) -> None:
    assert embedded.loglikelihood([], [], use_tqdm=False) == []
    assert embedded.perplexity([], use_tqdm=False).num_tokens == 0


@pytest.mark.usefixtures("ctrl_c")
def test_an_interruption_leaves_nothing_behind(embedded: LLM) -> None:
    runner = engine_of(embedded).runner
    execute = runner.execute

    def interrupted(plan: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return execute(plan)

    runner.execute = interrupted
    try:
        with pytest.raises(GenerationInterrupted):
            embedded.loglikelihood("And the", [" LORD"] * 3, use_tqdm=False)
    finally:
        runner.execute = execute
    assert_idle(embedded)
