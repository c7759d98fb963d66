"""What scripts for vLLM pass along: what asks for nothing passes, what asks for more gets a sentence with a way out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from embedded import GREEDY, PROMPTS, assert_idle, open_llm, run, tokens

from llm import LLM, BeamSearchParams, SamplingParams, ValidationError
from llm.config import CompilationConfig, env
from llm.config.arguments import check_arguments
from llm.engine import preprocess
from llm.sampling.logits_processors import builtin

MESSAGES = [{"role": "user", "content": "Who was Abraham?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64) as opened:
        yield opened


HARMLESS: list[Callable[[LLM], Any]] = [
    lambda llm: llm.generate(PROMPTS, GREEDY, use_tqdm=False, priority=[2, 0, -1]),
    lambda llm: llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[], priority=(1, 1, 1)),
    lambda llm: llm.generate(PROMPTS, GREEDY, use_tqdm=False, mm_processor_kwargs=None, tokenization_kwargs=None),
    lambda llm: llm.generate(PROMPTS, GREEDY, use_tqdm=False, tokenization_kwargs={}),
    lambda llm: run(llm, [{"prompt": text, "multi_modal_data": None, "multi_modal_uuids": None} for text in PROMPTS]),
    lambda llm: run(llm, [{"prompt": text, "prompt_token_ids": None, "prompt_embeds": None} for text in PROMPTS]),
]


@pytest.mark.parametrize("call", HARMLESS)
def test_what_asks_for_nothing_changes_nothing(llm: LLM, call: Callable[[LLM], Any]) -> None:
    assert tokens(call(llm)) == tokens(run(llm, PROMPTS))


def test_chat_takes_what_scripts_pass_along(llm: LLM) -> None:
    passed = llm.chat(
        MESSAGES,
        GREEDY,
        use_tqdm=False,
        priority=[3],
        chat_template_content_format="auto",
        mm_processor_kwargs=None,
        tokenization_kwargs=None,
    )
    assert tokens(passed) == tokens(llm.chat(MESSAGES, GREEDY, use_tqdm=False))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm.generate(PROMPTS, GREEDY, priority=[1]), "1 values of priority for 3 prompts"),
        (lambda llm: llm.generate("x", GREEDY, priority=["high"]), "priority must be an integer"),
        (lambda llm: llm.beam_search(PROMPTS, BeamSearchParams(2, 2), priority=[1]), "1 values of priority for 3"),
        (lambda llm: llm.chat(MESSAGES, GREEDY, priority=[1, 2]), "2 values of priority for 1 prompts"),
        (lambda llm: llm.chat(MESSAGES, chat_template_content_format="openai"), "must be 'auto', got 'openai': "),
        (lambda llm: llm.generate("x", mm_processor_kwargs={"fps": 1}), "this model reads no images"),
        (lambda llm: llm.generate("x", lora_request="adapter"), "must be a LoRARequest"),
        (lambda llm: llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}}), "this model reads no images"),
    ],
)
def test_what_asks_for_more_is_refused(llm: LLM, call: Callable[[LLM], Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        call(llm)
    assert_idle(llm)


@pytest.mark.parametrize("value", [{"backend": "auto"}, {"backend": "guidance"}, {}, None])
def test_the_backend_that_is_used_anyway_may_be_named(value: Any) -> None:
    assert check_arguments({"structured_outputs_config": value}) == []


def test_another_backend_is_refused() -> None:
    with pytest.raises(ValidationError, match="structured_outputs_config"):
        check_arguments({"structured_outputs_config": {"backend": "xgrammar"}})


def test_keys_of_a_compilation_config() -> None:
    assert CompilationConfig.of({"pass_config": {}, "mode": 0}) == CompilationConfig.of({"mode": 0})
    with pytest.raises(ValidationError, match="pass_config must be left empty"):
        CompilationConfig.of({"pass_config": {"fuse_norm_quant": True}})
    with pytest.raises(ValidationError, match="no key 'level'; it has become 'mode'"):
        CompilationConfig.of({"level": 3})


def test_variables_of_vllm_are_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    env._warn_of_vllms.cache_clear()
    with caplog.at_level(logging.WARNING, "llm"):
        env.warn_of_unknown()
        env.warn_of_unknown()
    [message] = [record.getMessage() for record in caplog.records if "VLLM_" in record.getMessage()]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING, VLLM_LOGGING_LEVEL (here LLM_LOG_LEVEL)" in message


def test_answers_without_max_tokens_are_noted_once(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def notes(params: SamplingParams) -> int:
        caplog.clear()
        run(llm, PROMPTS[:2], params)
        return sum("max_tokens is not given" in record.getMessage() for record in caplog.records)

    preprocess._note_open_ends.cache_clear()
    with caplog.at_level(logging.WARNING, "llm"):
        assert notes(SamplingParams(temperature=0, max_tokens=20)) == 0
        assert notes(SamplingParams(temperature=0)) == 1
        assert notes(SamplingParams(temperature=0)) == 0


def test_of_stop_strings_that_end_together_the_first_in_the_list_wins(llm: LLM) -> None:
    text = run(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0].text
    long, short = text[3:9], text[6:9]
    assert text.index(short) == 6
    for stops in ([long, short], [short, long]):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stops)
        output = run(llm, PROMPTS[0], params)[0].outputs[0]
        assert (output.stop_reason, output.text) == (stops[0], text[: text.index(stops[0])])
        assert "".join(llm.stream(PROMPTS[0], params)) == output.text


@pytest.mark.parametrize("name", [name for name in vars(builtin) if name.endswith("LogitsProcessor")])
def test_a_built_in_processor_that_no_row_uses_changes_nothing(llm: LLM, name: str) -> None:
    kind = getattr(builtin, name)
    if kind.__module__ != builtin.__name__ or getattr(kind, "__abstractmethods__", None):
        return
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    processor = kind(llm.config, torch.device("cpu"), False)
    processor.update_state(None)
    assert torch.equal(processor.apply(logits.clone()), logits)


def test_only_prompts_of_one_salt_share_what_was_computed(llm: LLM) -> None:
    def cached(salt: str | None, text: str = PROMPTS[1] * 3) -> int:
        return run(llm, {"prompt": text, "cache_salt": salt})[0].num_cached_tokens

    llm.reset_prefix_cache()
    assert (cached(None), cached("mine"), cached("yours")) == (0, 0, 0)
    assert min(cached(None), cached("mine"), cached("yours")) > 0
    assert tokens(run(llm, {"prompt": PROMPTS[1], "cache_salt": "mine"})) == tokens(run(llm, PROMPTS[1]))


def test_a_beam_search_keeps_to_the_salt(llm: LLM) -> None:
    llm.reset_prefix_cache()
    llm.beam_search({"prompt": PROMPTS[1] * 3, "cache_salt": "mine"}, BeamSearchParams(2, 2))
    assert run(llm, PROMPTS[1] * 3)[0].num_cached_tokens == 0
    assert run(llm, {"prompt": PROMPTS[1] * 3, "cache_salt": "mine"})[0].num_cached_tokens > 0


@pytest.mark.parametrize("salt", ["", 3])
def test_a_salt_is_a_text(llm: LLM, salt: Any) -> None:
    with pytest.raises(ValidationError, match="'cache_salt' must be"):
        run(llm, {"prompt": "x", "cache_salt": salt})
    with pytest.raises(ValidationError, match="cache_salt must be left out"):
        llm.perplexity([{"prompt": PROMPTS[0], "cache_salt": "mine"}])
