"""Chat templates of strangers: limits of time and memory, and the same text as transformers' where they are kept."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llm.errors import ValidationError
from llm.llm import EMBEDDED_MODEL
from llm.text import chat_template
from llm.text.chat_template import PROCESS, TemplateProcess, _compile, _theirs, is_plain, names_read
from llm.text.tokenizer import Tokenizer

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
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = ns.x, ns.x %}{% endfor %}{{ ns.x == ns.x ~ 1 }}"
    "{{ ns.x|string }}",
    "{% set a = [1, messages] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
    "{% set a = {'a': messages} %}" + "{% set a = {'a': a, 'b': a} %}" * 60 + "{{ a|tojson }}",
    "{% macro m(a) %}{% set b = [a, a] %}{% if b|string|length %}{{ m(b) }}{% endif %}{% endmacro %}{{ m([tools]) }}",
    "{% set n = '9' * 4000 %}{{ (n|int ** 4000) // (n|int ** 3999 + 1) }}",
    "{{ '{0:>99999}' * 100000 }}{{ ('{0:>99999}' * 100000).format(1) }}",
    "{{ '%99999d' * 100000 }}{{ ('%99999d' * 100000) % ([1] * 100000) }}",
    "{% set f = '%999999999d' %}{% set n = 'a' %}{{ f % 7 }}{{ f % 8 }}{{ f % 9 }}",
    "{{ 'a'.encode().ljust(10**10) }}",
    "{{ ('a' * 10**7).encode().hex(' ') * 99 }}",
    "{{ ([[1] * 3000] * 3000 * 9)|sum(start=[]) }}",
    "{{ [[[[1]]]]|tojson(indent='x' * 10**9) }}",
    "{{ [messages]|tojson(separators=('a' * 10**9, ':')) }}",
    "{{ strftime_now('%c' * 16000000) }}",
    "{{ " + "~".join(["1"] * 200_000) + " }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 100_000 + "1 }}",
    "{{ " + "[" * 500 + "]" * 500 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000 + "{{ 1 // 0 }}",
    "{% for m in messages * 9999 %}{% for n in messages * 9999 %}{{ m == n }}{% endfor %}{% endfor %}",
    "{{ range(99999)|map('string')|map('replace', '', 'a' * 99999)|list }}",
    "{{ dict.fromkeys(range(99999)|map('string'), 'a' * 9999)|tojson * 9 }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ cycler(*range(99999)).items * 99999 }}",
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


TOOLS = [{"type": "function", "function": {"name": "f"}}]


def render(template: str, **options: Any) -> str:
    return Tokenizer(EMBEDDED_MODEL).render_chat(MESSAGES, chat_template="{# #}" + template, **options)


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Iterator[None]:
    """So that a test takes a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llm.text.chat_template._SECONDS", 0.1)
        patch.setattr(chat_template, "CPU_SECONDS", 0.25)
        patch.setattr(chat_template, "MOST_CHARACTERS", 1 << 20)
        patch.setattr(chat_template, "MEMORY_BYTES", 1 << 28)
        PROCESS.close()
        yield
        PROCESS.close()


@pytest.mark.parametrize("template", HOSTILE, ids=lambda text: text[:40])
def test_a_hostile_template_ends_soon(template: str) -> None:
    started, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Exception) as caught:
        render(template)
    assert time.process_time() - started < 2.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 400_000  # KB
    assert len(str(caught.value)) < 1500 and not isinstance(caught.value, MemoryError)
    assert render("{{ messages[0].content * 2 }}") == "Hi Hi "  # the next one is rendered


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 10**(10**8) }}", "it takes more than 0.25 seconds"),
        ("{{ 'a' * 10**10 }}", "it needs more than"),
        ("{{ 'a' * (2**20 + 1) }}", "it makes more than 1048576 characters"),
        ("x" * (1 << 21), "it has 2097157 characters"),
    ],
)
def test_the_limit_is_one_sentence(template: str, said: str) -> None:
    with pytest.raises(ValidationError, match=r"the chat template is not rendered: .*; pass another") as caught:
        render(template)
    assert said in str(caught.value) and caught.value.parameter == "chat_template"


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\\n' + m['content']|trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
    "[INST]{{ m.content }}[/INST]{% endfor %}",
    "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text ~ m.content %}{% endfor %}"
    "{{ ns.text.split('</think>')[-1].lstrip('\\n') }}{{ strftime_now('%d %b %Y')[:0] }}",
    "{% macro show(tool) %}{{ tool.function.name }}: {{ tool.function|tojson(indent=4) }}{% endmacro %}"
    "{% for tool in tools %}{{ show(tool) }}{% endfor %}{{ {'output': messages[0].content}|tojson }}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    "{% for a in range(messages|length) %}{{ a }}{% endfor %}",
)


@pytest.mark.parametrize("template", PLAIN)
def test_plain_templates_start_no_process(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_start", lambda: pytest.fail("a process was started"))
    PROCESS.close()
    assert is_plain(_theirs(), template) and _compile(template).plain is not None
    test_the_text_is_transformers(template)
    assert names_read(template) <= {"messages", "tools", "add_generation_prompt", "rest", *_theirs().globals}


@pytest.mark.parametrize("template", [*HARMLESS, *PLAIN])
def test_the_other_process_renders_as_transformers(template: str) -> None:
    data: dict[str, Any] = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "add_generation_prompt": True,
        "bos_token": "<s>\ud800",
    }
    assert PROCESS.render(template, data) == _theirs().from_string(template).render(**data)
    assert names_read("{{ 2 ** messages }}" + template) == names_read(template) | {"messages"}


def test_a_plain_template_that_does_much_is_rendered_all_the_same() -> None:
    """Its limits here are small, because the other process has its own."""
    many = [{"role": "user", "content": "x" * 999}] * 300
    template = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t }}"
    )
    assert is_plain(_theirs(), template)
    tokenizer = Tokenizer(EMBEDDED_MODEL)
    assert tokenizer.render_chat(many, chat_template=template) == "x" * 999 * 300
    assert PROCESS.pid is not None  # 45 million characters were made on the way


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{ 2 ** 2 // 0 }}", ZeroDivisionError),
        ("{{ 2 ** 'a' }}", TypeError),
        ("{{ raise_exception('x' * 2) }}", Exception),
    ],
)
def test_what_a_template_raises_is_raised_here(template: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as theirs:
        _theirs().from_string(template).render()
    with pytest.raises(type(theirs.value)) as caught:
        PROCESS.render(template, {})
    assert str(caught.value) == str(theirs.value)


def test_the_process_is_isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SECRET", "x")
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(3)")
    own = TemplateProcess()
    assert own.render("{{ 2 ** 2 }}", {}) == "4" and own.pid is not None
    if sys.platform == "linux":
        entries = Path(f"/proc/{own.pid}/environ").read_bytes().split(b"\0")
        assert not [entry for entry in entries if entry.startswith((b"SECRET", b"PYTHON"))]
        assert "libtorch" not in Path(f"/proc/{own.pid}/maps").read_text()
        assert len(os.listdir(f"/proc/{own.pid}/fd")) == 3
    pid = own.pid
    own.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_was_killed_is_started_again() -> None:
    own = TemplateProcess()
    assert own.render("{{ 2 ** 2 }}", {}) == "4" and own.pid is not None
    os.kill(own.pid, signal.SIGKILL)
    while own._process is not None and own._process.poll() is None:
        time.sleep(0.01)
    assert own.render("{{ 2 ** 3 }}", {}) == "8"
    own.close()


def test_threads_and_forks_ask_one_process() -> None:
    own = TemplateProcess()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: own.render("{{ 2 ** n }}" + "x" * n, {"n": n}), range(99)))
    assert found == [f"{2**n}" + "x" * n for n in range(99)]
    parents = own.pid
    held = threading.Thread(target=own.render, args=("{{ 3 ** (10 ** 6) % 7 }}", {}))
    held.start()
    pid = os.fork()
    if pid == 0:
        try:
            fits = own.render("{{ 2 ** 2 }}", {}) == "4" and own.pid != parents
            own.close()
            os._exit(0 if fits else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    held.join()
    assert own.render("{{ 2 ** 3 }}", {}) == "8" and own.pid == parents
    own.close()


@pytest.mark.parametrize("end", ["pass", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_is_left(end: str) -> None:
    """Neither at exit nor where the parent is killed, while a template is rendered and while none is."""
    code = f"""
import threading
from llm.text.chat_template import PROCESS
print(PROCESS.render('{{{{ 2 ** 2 }}}}', {{}}), PROCESS.pid, flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    text, pid = done.stdout.split()
    assert text == "4"
    ended = time.monotonic() + 600
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1]:
        assert time.monotonic() < ended
        time.sleep(0.01)


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
