"""`tokenization_kwargs`: prompts are cut as transformers' tokenizers cut them, and what is not taken is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from embedded import assert_idle, copy_model, open_llm
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from llm import LLM, SamplingParams, ValidationError

TEXT = "In the beginning God created the heaven and the earth."
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Its tokenizer puts special tokens around a text."""
    folder = copy_model(tmp_path_factory.mktemp("model") / "marked")
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    marks = [(text, tokenizer.token_to_id(text)) for text in special_texts(tokenizer)]
    assert len(marks) == 2
    tokenizer.post_processor = TemplateProcessing(single=f"{marks[0][0]} $A {marks[1][0]}", special_tokens=marks)
    tokenizer.save(path)
    with open_llm(folder, max_model_len=24) as opened:
        yield opened
        assert_idle(opened)


def special_texts(tokenizer: Tokenizer) -> list[str]:
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special][:2]


def prompt_ids(llm: LLM, prompt: Any = TEXT, **options: Any) -> list[int] | None:
    [output] = llm.generate(prompt, ONE, use_tqdm=False, tokenization_kwargs=options)
    return output.prompt_token_ids


def test_it_is_told_how_many_tokens_were_cut(llm: LLM) -> None:
    whole, ids = len(prompt_ids(llm) or ()), list(range(5, 15))
    for options, text, kept in (
        ({"truncate_prompt_tokens": 4}, 4, 4),
        ({"truncation": True, "max_length": 6}, 6, 6),
        ({}, whole, 10),
    ):
        outputs = llm.generate([TEXT, ids], ONE, use_tqdm=False, tokenization_kwargs=options)
        assert [output.num_dropped_tokens for output in outputs] == [whole - text, 10 - kept]
    [output] = llm.chat(
        [{"role": "user", "content": TEXT}],
        ONE,
        use_tqdm=False,
        chat_template="{{ messages[0].content }}",
        tokenization_kwargs={"add_special_tokens": True, "truncate_prompt_tokens": 5},
    )
    assert output.num_dropped_tokens == whole - 5
    [output] = llm.generate(
        TEXT, SamplingParams(max_tokens=1, truncate_prompt_tokens=3), tokenization_kwargs={"truncate_prompt_tokens": 7}
    )
    assert (len(output.prompt_token_ids or ()), output.num_dropped_tokens) == (3, whole - 3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("limit", [3, 6, 23])
def test_texts_are_cut_as_by_transformers(llm: LLM, side: str, special: bool, limit: int) -> None:
    tokenizer = llm.get_tokenizer()
    tokenizer.truncation_side = side
    expected = tokenizer(TEXT, truncation=True, max_length=limit, add_special_tokens=special)["input_ids"]
    whole = tokenizer(TEXT, add_special_tokens=special)["input_ids"]
    assert len(expected) == min(limit, len(whole))
    cut = {"truncation_side": side, "add_special_tokens": special}
    assert prompt_ids(llm, truncation=True, max_length=limit, **cut) == expected
    assert prompt_ids(llm, truncate_prompt_tokens=limit, **cut) == expected
    # Nothing of it stays.
    assert prompt_ids(llm) == tokenizer(TEXT)["input_ids"]


def test_without_a_side_the_first_tokens_are_cut(llm: LLM) -> None:
    assert prompt_ids(llm, truncate_prompt_tokens=4) == prompt_ids(
        llm, truncate_prompt_tokens=4, truncation_side="left"
    )
    ids = list(range(5, 15))
    assert prompt_ids(llm, ids, truncate_prompt_tokens=4) == ids[-4:]
    assert prompt_ids(llm, ids, truncation=True, max_length=4, truncation_side="right") == ids[:4]
    assert prompt_ids(llm, ids, truncation=False, max_length=None, add_special_tokens=False) == ids


@pytest.mark.parametrize("options", [{"truncation": True}, {"truncate_prompt_tokens": -1}])
def test_without_a_length_room_for_one_token_is_left(llm: LLM, options: dict[str, Any]) -> None:
    long = " ".join([TEXT] * 9)
    with pytest.raises(ValidationError, match="max_model_len is 24"):
        prompt_ids(llm, long)
    assert len(prompt_ids(llm, long, **options) or ()) == 23


def test_chats_are_cut_too(llm: LLM) -> None:
    messages = [{"role": "user", "content": TEXT}]
    plain = "{{ messages[0].content }}"

    def chat(**options: Any) -> list[int] | None:
        [output] = llm.chat(messages, ONE, use_tqdm=False, chat_template=plain, tokenization_kwargs=options)
        return output.prompt_token_ids

    assert chat(truncate_prompt_tokens=3) == (prompt_ids(llm, add_special_tokens=False) or [])[-3:]
    assert chat(add_special_tokens=True) == prompt_ids(llm) != chat()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_len": 3}, "no key 'max_len'; it takes add_special_tokens, .*Did you mean 'max_length'"),
        ({"padding": True}, "no key 'padding'"),
        ({"max_length": 3}, "given together with truncation=True, got 3"),
        ({"truncation": "longest_first"}, "must be True or False, got 'longest_first'"),
        ({"truncation": True, "max_length": 0}, r"\['max_length'\] must be an integer of at least 1"),
        ({"truncation": True, "truncate_prompt_tokens": 3}, "left out where truncation is given"),
        ({"truncate_prompt_tokens": True}, "must be an integer of at least 1, got True"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "both"}, "'right', got 'both'"),
        ({"add_special_tokens": 1}, "must be True or False, got 1"),
        ({"truncate_prompt_tokens": 1}, "as many as the tokenizer adds"),
        ([], "must be a dict or None"),
    ],
)
def test_what_is_not_taken_is_named(llm: LLM, options: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        llm.generate(TEXT, ONE, use_tqdm=False, tokenization_kwargs=options)
    with pytest.raises(ValidationError, match=said):
        llm.chat(
            [{"role": "user", "content": TEXT}],
            ONE,
            use_tqdm=False,
            chat_template="{{ messages[0].content }}",
            tokenization_kwargs={"add_special_tokens": True, **options} if isinstance(options, dict) else options,
        )
