"""Chat templates of strangers: limits of time and size, and the same text as transformers' where they are kept."""

from __future__ import annotations

import time
from typing import Any

import pytest

from llm.api import EMBEDDED_MODEL
from llm.base.errors import ValidationError
from llm.tokenizer import Tokenizer

LOOP = "{% for a in range(99999) %}"
HOSTILE = (
    "{{ 10**(10**8) }}",
    "{{ (10**1000)**1000 }}",
    "{% set ns = namespace(x=99) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    LOOP * 3 + "{% endfor %}" * 3,
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "{{ '%09999999999d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '{:>9999999999}'.format('a') }}",
    "{{ '{:>{}}'.format('a', 10**10) }}",
    "{{ '%09999999999d'|format(1) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a'|indent(10**10, true) }}",
    "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
    "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "{{ range(99999)|join('b' * 10**6) }}",
    "{{ ('b' * 10**6).join(range(99999)|map('string')|list) }}",
    "{{ [1]|tojson(indent=10**10) }}",
    "{{ [1]|batch(10**10, 'x')|list }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [0, 1] recursive %}{{ loop([0, 1]) }}{% endfor %}",
    LOOP + "{{ range(99999)|sum }}{% endfor %}",
    "{{ lipsum(n=10**9) }}",
    "{{ range(10**9) }}",
    "x" * (1 << 21),
)
HARMLESS = (
    "{{ '-' * 20 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 'a' + 'b' }}{{ 'a' ~ 1 ~ missing }}",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
    "{{ m.role ~ m['content']|trim }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m|tojson(indent=2) }}{% else %}none{% endfor %}",
    "{{ messages|map(attribute='content')|join(', ')|upper }}{{ 'a-b'.replace('-', '+').split('+')[0] }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ '%s and %05.1f' % ('x', 2) }}{{ '{:>5}'.format('r') }}{{ 'x'|center(9) }}",
    "{% macro m(a, name='x') %}[{{ a }}{{ name }}]{% endmacro %}{{ m(1, name=2) }}{{ dict(a=1)|tojson }}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}{{ tools|tojson if tools }}{{ bos_token }}",
    "{% for key, value in messages[0]|dictsort %}{{ key }}={{ value|default('') }}{% endfor %}"
    "{{ [1, 2, 3]|batch(2)|list }}",
)
MESSAGES: list[Any] = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "{{ x }}"}]


def render(template: str, **options: Any) -> str:
    return Tokenizer(EMBEDDED_MODEL).render_chat(MESSAGES, chat_template="{# #}" + template, **options)


@pytest.mark.parametrize("template", HOSTILE, ids=lambda text: text[:40])
def test_a_hostile_template_ends_soon(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm.chat_template._SECONDS", 0.3)
    started = time.thread_time()
    with pytest.raises(Exception) as caught:
        render(template)
    assert time.thread_time() - started < 3
    assert len(str(caught.value)) < 500 and not isinstance(caught.value, MemoryError)


def test_the_limit_is_one_sentence() -> None:
    with pytest.raises(ValidationError, match=r"the chat template is not rendered: it computes a number"):
        render("{{ 10**(10**8) }}")


@pytest.mark.parametrize("template", HARMLESS, ids=lambda text: text[:40])
def test_the_text_is_transformers(template: str) -> None:
    options: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "add_generation_prompt": True,
    }
    template = "{# #}" + template
    theirs = Tokenizer(EMBEDDED_MODEL).huggingface()
    expected = theirs.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, **options)
    assert render(template, **options) == render(template, **options) == expected


def test_the_last_message_can_be_continued() -> None:
    theirs = Tokenizer(EMBEDDED_MODEL).huggingface()
    options: dict[str, Any] = {"chat_template": HARMLESS[1], "continue_final_message": True}
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert Tokenizer(EMBEDDED_MODEL).render_chat(MESSAGES, **options) == expected
