"""`LLM.generate` and `LLM.chat`: what may go in, and what comes out."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from embedded import GREEDY, PROMPTS, SAMPLED, assert_idle, copy_model, engine_of, open_llm, run, tokens

from llm import LLM, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from llm.errors import UnsupportedModelError, ValidationError

LONG = "In the beginning God created the heaven and the earth, and the earth was without form, and void. " * 3


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm() as llm:
        yield llm


@pytest.fixture(autouse=True)
def idle_afterwards(llm: LLM) -> Iterator[None]:
    yield
    assert_idle(llm)


def ids_of(llm: LLM, text: str) -> list[int]:
    [ids] = engine_of(llm).tokenizer.encode([text])
    return ids


# What goes in


def prompt_forms(text: str, ids: list[int]) -> dict[str, Any]:
    return {
        "str": text,
        "ids": ids,
        "tuple of ids": tuple(ids),
        "numpy ids": list(np.array(ids)),
        "dict with text": {"prompt": text},
        "TextPrompt": TextPrompt(prompt=text),
        "dict with ids": {"prompt_token_ids": ids},
        "TokensPrompt": TokensPrompt(prompt_token_ids=ids, prompt=text),
        "dict with both, ids None": {"prompt": text, "prompt_token_ids": None},
    }


@pytest.mark.parametrize("form", prompt_forms("", []))
def test_every_form_of_a_prompt_gives_the_same_answer(llm: LLM, form: str) -> None:
    ids = ids_of(llm, PROMPTS[0])
    prompt = prompt_forms(PROMPTS[0], ids)[form]
    [expected] = run(llm, PROMPTS[0])
    for outputs in (run(llm, prompt), run(llm, [prompt]), run(llm, (prompt,))):
        assert len(outputs) == 1
        assert outputs[0].outputs == expected.outputs
        assert outputs[0].prompt_token_ids == ids
        assert {type(token) for token in outputs[0].prompt_token_ids} == {int}
        assert outputs[0].prompt in (None, PROMPTS[0])


@pytest.mark.parametrize("column", [np.array, torch.tensor, pd.Series])
def test_columns_of_tables_are_lists(llm: LLM, column: Any) -> None:
    ids = ids_of(llm, PROMPTS[0])
    expected = tokens(run(llm, [ids, PROMPTS[1]]))
    assert tokens(run(llm, column(ids))) == expected[:1]
    assert tokens(run(llm, [column(ids), {"prompt_token_ids": column(ids)}])) == expected[:1] * 2
    if column is not torch.tensor:
        assert tokens(run(llm, column(PROMPTS[:2]))) == expected


def test_a_mixed_list_comes_back_in_order(llm: LLM) -> None:
    forms = list(prompt_forms(PROMPTS[1], ids_of(llm, PROMPTS[1])).values())
    mixed = [PROMPTS[0], *forms, PROMPTS[2], {"prompt": PROMPTS[0]}]
    outputs = run(llm, mixed)
    first, second, third = tokens(run(llm, PROMPTS))
    assert tokens(outputs) == [first, *[second] * len(forms), third, first]
    assert first != second != third  # or the order could not be seen


def test_order_does_not_depend_on_who_finishes_first(llm: LLM) -> None:
    lengths = [9, 1, 5, 2, 12, 3]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = run(llm, [PROMPTS[index % 3] for index in range(6)], params)
    assert [len(ids) for ids in tokens(outputs)] == lengths
    assert [output.prompt for output in outputs] == [PROMPTS[index % 3] for index in range(6)]
    assert [int(output.request_id) for output in outputs] == sorted(int(output.request_id) for output in outputs)


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert run(llm, []) == []
    assert llm.generate([], use_tqdm=True) == []
    assert llm.generate([], [], use_tqdm=False) == []


def test_more_rows_than_fit_a_step() -> None:
    with open_llm(max_num_seqs=2, max_num_batched_tokens=8) as small, open_llm() as large:
        prompts = PROMPTS * 3
        assert tokens(run(small, prompts)) == tokens(run(large, prompts))
        assert engine_of(small).stats.steps > engine_of(large).stats.steps


def test_the_callers_params_are_never_changed(llm: LLM) -> None:
    params = SamplingParams(
        n=2, temperature=0.8, max_tokens=5, stop=["zzz"], stop_token_ids=[7, 9], logprobs=1, extra_args={"a": [1]}
    )
    before = copy.deepcopy(params)
    outputs = run(llm, PROMPTS, params)
    assert params == before
    assert run(llm, PROMPTS[0], [params])[0].outputs != outputs[0].outputs  # no seed crept in
    assert params == before
    params.n = 3
    assert params != before  # the comparison sees a change


def test_a_list_of_messages_or_prompts_is_not_changed(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [5, 6, 7]}, [8, 9, 10]]
    conversation = [{"role": "user", "content": "Who was Moses?"}]
    before = copy.deepcopy((prompts, conversation))
    outputs = run(llm, prompts)
    llm.chat(conversation, GREEDY, use_tqdm=False)
    outputs[1].prompt_token_ids.append(3)
    assert (prompts, conversation) == before


# Seeds and samples


def test_every_row_records_a_seed_with_which_it_can_be_replayed_alone(llm: LLM) -> None:
    outputs = run(llm, PROMPTS * 2, SAMPLED)
    seeds = [output.seed for output in outputs]
    assert len(set(seeds)) == len(seeds)
    for output in outputs:
        again, other = (run(llm, output.prompt, SamplingParams(max_tokens=12, seed=seed)) for seed in (output.seed, 1))
        assert again[0].outputs == output.outputs
        assert again[0].seed == output.seed
        assert other[0].outputs != output.outputs  # the seed matters


def test_derived_seeds_come_from_the_engines_seed_and_the_call() -> None:
    def two_calls(seed: int | None) -> list[list[int]]:
        with open_llm(seed=seed) as llm:
            return [*tokens(run(llm, PROMPTS, SAMPLED)), *tokens(run(llm, PROMPTS, SAMPLED))]

    first = two_calls(0)
    assert two_calls(0) == first
    assert two_calls(1) != first
    assert two_calls(None) != two_calls(None)
    assert first[:3] != first[3:]


def test_n_completions_differ_and_are_replayed_together(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=12)
    [output] = run(llm, PROMPTS[0], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    [again] = run(llm, PROMPTS[0], SamplingParams(n=3, max_tokens=12, seed=output.seed))
    assert again.outputs == output.outputs
    [alone] = run(llm, PROMPTS[0], SamplingParams(max_tokens=12, seed=output.seed))
    assert alone.outputs == output.outputs[:1]


def test_global_generators_are_left_alone(llm: LLM) -> None:
    import random

    import torch

    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    run(llm, PROMPTS, SAMPLED)
    assert states() == before
    torch.rand(1)
    assert states() != before  # a draw would be seen


# Logprobs


@contextmanager
def defaults(dtype: torch.dtype = torch.float32, device: str | None = None) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def settings_now() -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu"), np.geterr()


OF_THE_PROGRAM: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": lambda: defaults(torch.float64),
    "bfloat16": lambda: defaults(torch.bfloat16),
    "meta": lambda: defaults(device="meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "numpy raises": lambda: np.errstate(all="raise"),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("setting", OF_THE_PROGRAM)
def test_settings_of_the_program_change_no_answer_and_stay(llm: LLM, setting: str) -> None:
    """They crashed the process once: a kernel wrote float32 into what PyTorch had made bfloat16."""
    many = {"top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "logprobs": 2, "prompt_logprobs": 1, "seed": 3}
    params = [GREEDY, SamplingParams(max_tokens=8, **many), SamplingParams(max_tokens=8, seed=4)]

    def answers(llm: LLM) -> list[Any]:
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in run(llm, PROMPTS, params)]

    with open_llm(quantization="w4a16") as other:
        expected = answers(llm), answers(other)
    with OF_THE_PROGRAM[setting]():
        before = settings_now()
        with open_llm(quantization="w4a16") as other:
            assert (answers(llm), answers(other)) == expected
            assert (
                float(other.quantization_report(["In the beginning"], prompts=[], speed=False).layers[0].weight_snr) > 9
            )
        assert settings_now() == before
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("count", [0, 1, 4])
def test_logprobs(llm: LLM, count: int) -> None:
    [output] = run(llm, PROMPTS[0], SamplingParams(max_tokens=6, logprobs=count, seed=5, ignore_eos=True))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 6
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(position)) == token  # the drawn token comes first
        assert count <= len(position) <= count + 1
        ranks = [entry.rank for entry in position.values()]
        assert set(ranks) - {position[token].rank} == set(range(1, count + 1)) - {position[token].rank}
        ordered = sorted(position.values(), key=lambda entry: entry.rank)
        assert all(a.logprob >= b.logprob for a, b in pairwise(ordered))
        assert all(entry.logprob <= 0 for entry in ordered)
        assert position[token].decoded_token == llm.get_tokenizer().decode([token])
    total = sum(next(iter(position.values())).logprob for position in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total)


def test_all_logprobs_sum_to_one_and_greedy_takes_the_first(llm: LLM) -> None:
    [output] = run(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=1, logprobs=-1))
    [position] = output.outputs[0].logprobs or []
    assert len(position) == llm.config.model_config.vocab_size
    assert sum(np.exp(entry.logprob) for entry in position.values()) == pytest.approx(1.0, abs=1e-4)
    assert position[output.outputs[0].token_ids[0]].rank == 1


def test_no_logprobs_unless_asked(llm: LLM) -> None:
    [output] = run(llm, PROMPTS[0])
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


# How rows end


def with_stops(stop: Any, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop, **options)


@pytest.fixture(scope="module")
def whole(llm: LLM) -> RequestOutput:
    """What the first prompt gives without any stop."""
    return run(llm, PROMPTS[0], with_stops(None))[0]


def pieces_of(llm: LLM, output: RequestOutput) -> list[str]:
    """The text each token adds; together they are the text (the model writes ASCII here)."""
    ids = output.outputs[0].token_ids
    texts = [engine_of(llm).tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    return [after[len(before) :] for before, after in pairwise(texts)]


def test_stop_string_across_tokens(llm: LLM, whole: RequestOutput) -> None:
    text, pieces = whole.outputs[0].text, pieces_of(llm, whole)
    start = len("".join(pieces[:4]))
    stop = text[start - 2 : start + 2]  # the end of one token and the beginning of the next
    assert not any(stop in piece for piece in pieces)
    cut = text.index(stop)
    [output] = run(llm, PROMPTS[0], with_stops(stop))
    assert output.outputs[0].text == text[:cut]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    [kept] = run(llm, PROMPTS[0], with_stops([stop], include_stop_str_in_output=True))
    assert kept.outputs[0].text == text[: cut + len(stop)]
    assert kept.outputs[0].token_ids == output.outputs[0].token_ids
    assert len(output.outputs[0].token_ids) < len(whole.outputs[0].token_ids)


def test_the_stop_string_that_is_complete_first_wins(llm: LLM, whole: RequestOutput) -> None:
    text = whole.outputs[0].text
    early, late = text[3:6], text[text.index(text[3:6]) + 5 :][:6]
    long_around_early = text[2:9]
    for stops in ([late, early], [early, late], [long_around_early, early], [early, long_around_early]):
        [output] = run(llm, PROMPTS[0], with_stops(stops))
        assert output.outputs[0].stop_reason == early
        assert output.outputs[0].text == text[: text.index(early)]


def test_min_tokens_holds_back_stop_strings_and_tokens(llm: LLM, whole: RequestOutput) -> None:
    ids, text = whole.outputs[0].token_ids, whole.outputs[0].text
    stop = text[1:3]
    [early] = run(llm, PROMPTS[0], with_stops(stop))
    [late] = run(llm, PROMPTS[0], with_stops(stop, min_tokens=9))
    assert len(early.outputs[0].token_ids) < 9 <= len(late.outputs[0].token_ids)
    assert late.outputs[0].text.startswith(text[: text.index(stop) + len(stop)])
    [early] = run(llm, PROMPTS[0], with_stops(None, stop_token_ids=[ids[2]]))
    [late] = run(llm, PROMPTS[0], with_stops(None, stop_token_ids=[ids[2]], min_tokens=9))
    assert len(early.outputs[0].token_ids) <= 3
    assert len(late.outputs[0].token_ids) >= 9
    assert ids[2] not in late.outputs[0].token_ids[:8]


def test_stop_tokens_end_the_row_and_leave_the_text(llm: LLM, whole: RequestOutput) -> None:
    ids = whole.outputs[0].token_ids
    first = ids.index(ids[5])
    [output] = run(llm, PROMPTS[0], with_stops(None, stop_token_ids=[ids[5]]))
    completion = output.outputs[0]
    assert completion.token_ids == ids[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[5])
    assert completion.text == "".join(pieces_of(llm, whole)[:first])
    [kept] = run(llm, PROMPTS[0], with_stops(None, stop_token_ids=[ids[5]], include_stop_str_in_output=True))
    assert kept.outputs[0].text == "".join(pieces_of(llm, whole)[: first + 1])


def test_length_is_the_reason_without_a_stop(llm: LLM, whole: RequestOutput) -> None:
    assert (whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == ("length", None)
    assert len(whole.outputs[0].token_ids) == 12
    assert whole.finished
    assert whole.outputs[0].finished()


def test_without_max_tokens_the_room_is_filled() -> None:
    with open_llm(max_model_len=40) as llm:
        [output] = run(llm, PROMPTS[0], SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 40
    assert output.outputs[0].finish_reason == "length"


def test_eos_comes_from_generation_config_too(llm: LLM, whole: RequestOutput, tmp_path: Path) -> None:
    ids = whole.outputs[0].token_ids
    eos = ids[4]
    folder = copy_model(tmp_path / "model", generation_config={"eos_token_id": [0, eos]})
    with open_llm(folder) as other:
        [output] = run(other, PROMPTS[0])
        completion = output.outputs[0]
        assert completion.token_ids == ids[: ids.index(eos) + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert completion.text == "".join(pieces_of(llm, whole)[: ids.index(eos)])
        [ignored] = run(other, PROMPTS[0], with_stops(None))
        assert ignored.outputs == whole.outputs
        [held] = run(other, PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, min_tokens=12))
        assert eos not in held.outputs[0].token_ids[:-1]


def test_detokenize_false_gives_ids_only(llm: LLM, whole: RequestOutput) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    [output] = run(llm, PROMPTS[0], params)
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids


def test_without_a_tokenizer(llm: LLM, whole: RequestOutput) -> None:
    with open_llm(skip_tokenizer_init=True) as bare:
        [output] = run(bare, whole.prompt_token_ids, with_stops(None, logprobs=1))
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids
        assert output.outputs[0].text == ""
        assert {entry.decoded_token for entry in (output.outputs[0].logprobs or [{}])[0].values()} == {None}
        with pytest.raises(ValidationError, match="stream yields text, and there is none without a tokenizer"):
            next(iter(bare.stream(whole.prompt_token_ids, with_stops(None))))


# The prefix cache


def test_num_cached_tokens(llm: LLM) -> None:
    llm.reset_prefix_cache()
    cold, warm = run(llm, LONG)[0], run(llm, LONG)[0]
    size = llm.config.cache_config.block_size
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (len(warm.prompt_token_ids) - 1) // size * size > 0
    assert warm.outputs == cold.outputs
    assert llm.reset_prefix_cache()
    assert run(llm, LONG)[0].num_cached_tokens == 0


def test_the_prefix_cache_can_be_turned_off() -> None:
    with open_llm(enable_prefix_caching=False) as llm:
        assert [run(llm, LONG)[0].num_cached_tokens for _ in range(2)] == [0, 0]


# Chat


CONVERSATION = [
    {"role": "user", "content": "Who was Moses?"},
    {"role": "assistant", "content": "A prophet."},
    {"role": "user", "content": "And Abraham?"},
]


def test_the_embedded_template_renders_every_message_or_refuses(llm: LLM) -> None:
    system, user, answer = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
    [prompt] = llm.render_chat([system, user, answer, user])
    assert prompt["prompt"] == "<|bos|><|user|>s\nu<|end|><|assistant|>a<|end|><|user|>u<|end|><|assistant|>"
    for conversation in ([system], [system, answer], [user, system, user], [{"role": "tool", "content": "t"}]):
        with pytest.raises(ValidationError, match="knows the roles user and assistant"):
            llm.render_chat(conversation)


def test_chat_is_generate_on_the_rendered_template(llm: LLM) -> None:
    text = llm.get_tokenizer().apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    ids = llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    [output] = llm.chat(CONVERSATION, GREEDY, use_tqdm=False)
    assert output.prompt == text
    assert output.prompt_token_ids == ids
    assert output.outputs == run(llm, ids)[0].outputs
    assert text != llm.get_tokenizer().apply_chat_template(CONVERSATION, tokenize=False)  # the prompt for an answer


def test_many_conversations_are_answered_in_order(llm: LLM) -> None:
    conversations = [CONVERSATION, CONVERSATION[:1], CONVERSATION]
    outputs = llm.chat(conversations, [GREEDY, SamplingParams(temperature=0, max_tokens=3), GREEDY], use_tqdm=False)
    alone = [llm.chat(conversation, GREEDY, use_tqdm=False)[0] for conversation in conversations]
    assert [output.prompt for output in outputs] == [output.prompt for output in alone]
    assert outputs[0].outputs == outputs[2].outputs == alone[0].outputs
    assert outputs[1].outputs[0].token_ids == alone[1].outputs[0].token_ids[:3]


def test_a_rendered_conversation_can_be_streamed(llm: LLM) -> None:
    [prompt] = llm.render_chat(CONVERSATION)
    assert "".join(llm.stream(prompt, GREEDY)) == llm.chat(CONVERSATION, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_a_template_of_the_call_replaces_the_models(llm: LLM) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{{ mark }}{% endfor %}"
    [output] = llm.chat(
        *(CONVERSATION, GREEDY), chat_template=template, chat_template_kwargs={"mark": "!"}, use_tqdm=False
    )
    assert output.prompt == "Who was Moses?!A prophet.!And Abraham?!"


# Defaults of the model


PARTS = [{"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "art thou?"}]}]


@pytest.mark.parametrize(
    "template, prompt",
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "Who\nart thou?"),
        ("{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}", "[Who\nart thou?]"),
        (
            "{%- for m in messages -%}{%- for p in m['content'] -%}<{{ p.text }}>{%- endfor %}{% endfor %}",
            "<Who><art thou?>",
        ),
        ("{% for m in messages %}{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endfor %}", "Whoart thou?"),
    ],
)
def test_content_in_parts_of_text_is_rendered_as_the_template_takes_it(llm: LLM, template: str, prompt: str) -> None:
    (rendered,) = llm.render_chat(PARTS, chat_template=template)
    assert rendered["prompt"] == prompt
    assert isinstance(PARTS[0]["content"], list)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text", 3])
def test_content_that_is_not_text_is_refused(llm: LLM, part: Any) -> None:
    with pytest.raises(ValidationError, match=r"content of a message .* got a part of type|this model reads no images"):
        llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)


def test_no_conversation_has_no_answer(llm: LLM) -> None:
    assert list(llm.chat([])) == [] == list(llm.generate([]))
    for messages, fault in (
        ([[]], "conversation 0 is empty"),
        ([[{"role": "user"}]], "conversation 0 has no 'content'"),
    ):
        with pytest.raises(ValidationError, match=fault):
            llm.chat(messages)


def test_arguments_that_the_template_does_not_read_are_told_once(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    template = "{% if enable_thinking is defined %}...{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    for _ in range(2):
        for name in ("enable_thinking", "enable_thinkng"):
            llm.render_chat(CONVERSATION, chat_template=template, chat_template_kwargs={name: False})
    [told] = caplog.messages
    assert told == "chat_template_kwargs ['enable_thinkng'] are given, and the chat template does not read them."


def test_chat_template_kwargs_are_a_dict(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="chat_template_kwargs must be a dict"):
        llm.chat(CONVERSATION, GREEDY, chat_template_kwargs=["mark"], use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", ["</s>", [[1]], [1, None], True])
def test_an_eos_that_is_no_token_id_is_an_error_before_loading(tmp_path: Path, file: str, eos: Any) -> None:
    name = file.removesuffix(".json")
    folder = copy_model(tmp_path / "model", **{name: {"eos_token_id": eos}})
    with pytest.raises(UnsupportedModelError, match=f"^{file}: eos_token_id is .*must be a token id or a list"):
        LLM(folder)


def test_generation_config_supplies_defaults_when_no_params_are_given(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.8, "top_k": 7, "max_new_tokens": 9, "eos_token_id": None}
    folder = copy_model(tmp_path / "model", generation_config=given)
    expected = SamplingParams(temperature=0.6, top_p=0.8, top_k=7, max_tokens=9)
    with open_llm(folder) as llm:
        assert llm.get_default_sampling_params() == expected
        said = llm.llm_engine.model_config.get_diff_sampling_param()
        assert said == {"temperature": 0.6, "top_p": 0.8, "top_k": 7, "max_tokens": 9}
        assert SamplingParams(**said) == expected
        [output] = llm.generate(PROMPTS[0], use_tqdm=False)
        same, plain = (
            run(llm, PROMPTS[0], SamplingParams(max_tokens=9, seed=output.seed, **options))
            for options in ({"temperature": 0.6, "top_p": 0.8, "top_k": 7}, {})
        )
        assert same[0].outputs == output.outputs
        assert plain[0].outputs != output.outputs  # params that were given are taken as they are
        llm.get_default_sampling_params().temperature = 2.0
        assert llm.get_default_sampling_params() == expected
    with open_llm(folder, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.model_config.get_diff_sampling_param() == {}


# Plain data


def reachable_types(root: object) -> set[type]:
    """Types of everything that `root` keeps alive, classes and modules aside."""
    found: dict[int, object] = {}
    pending = [root]
    while pending:
        item = pending.pop()
        if id(item) not in found and not isinstance(item, type) and type(item).__name__ != "module":
            found[id(item)] = item
            pending.extend(gc.get_referents(item))
    return {type(item) for item in found.values()}


def test_a_field_of_a_completion_is_pointed_to(llm: LLM) -> None:
    [output] = run(llm, PROMPTS[:1])
    with pytest.raises(AttributeError, match=r"RequestOutput has no 'text'; its completions have: outputs\[0\]\.text"):
        output.text  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match=r"RequestOutput has no 'txt'\.$"):
        output.txt  # type: ignore[attr-defined] # noqa: B018
    assert not hasattr(output, "text") and copy.deepcopy(output) == output


def test_outputs_are_plain_data(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=4, logprobs=2, stop="zzz")
    outputs = run(llm, PROMPTS, params)
    assert pickle.loads(pickle.dumps(outputs)) == outputs
    plain = {"list", "dict", "str", "int", "float", "bool", "NoneType", "tuple", "frozenset"}
    ours = {"RequestOutputs", "RequestOutput", "CompletionOutput", "Logprob", "SamplingParams", "RequestOutputKind"}
    ours |= {"RequestStateStats"}
    assert {kind.__name__ for kind in reachable_types(outputs)} <= plain | ours
    assert "Engine" in {kind.__name__ for kind in reachable_types(llm)}  # the walk finds what is there


def test_outputs_keep_no_model_alive() -> None:
    with open_llm() as llm:
        outputs = run(llm, PROMPTS)
        kept = weakref.ref(engine_of(llm)), weakref.ref(engine_of(llm).runner.states[0][0])
    del llm
    assert [reference() for reference in kept] == [None, None]
    assert len(outputs) == 3


def test_deleting_the_last_reference_frees_the_memory_at_once() -> None:
    llm = LLM()
    held = [*engine_of(llm).runner.model.parameters(), *engine_of(llm).runner.states[0]]
    assert all(tensor.numel() for tensor in held)
    gc.disable()
    try:
        del llm
    finally:
        gc.enable()
    assert not any(tensor.numel() for tensor in held)


# The object itself


def test_repr_and_context() -> None:
    with open_llm(max_model_len=64) as llm:
        assert "max_model_len=64" in repr(llm)
        assert llm.startup["load weights"] > 0
    assert repr(llm) == "LLM(closed)"
    assert "max_model_len" in repr(llm.config)  # what was decided can still be read
