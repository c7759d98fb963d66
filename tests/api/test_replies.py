"""Tool calls and reasoning: read from replies in the form of the model's template, and accepted in histories."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from embedded import assert_idle, open_llm

from llm import (
    LLM,
    AsyncLLM,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    ValidationError,
)
from llm.async_llm import EngineThread
from llm.engine.engine import Engine
from llm.jobs.requests import JobAdapters
from llm.jobs.worker import PieceRows, RowWorker
from llm.outputs import CompletionOutput, ToolCall
from llm.text.open_calls import certain_arguments, closed, rest_of
from llm.text.replies import ReplyReader, ToolChoice, read_harmony
from llm.text.tool_calls import typed, types_of
from llm.text.tool_forms import FORMS, form_of

ARGUMENTS = {"city": "Jericho", "walls": [1, {"deep": "}</tool"}]}
CALL = json.dumps({"name": "weather", "arguments": ARGUMENTS})
LLAMA = json.dumps({"name": "weather", "parameters": ARGUMENTS})
BODY = json.dumps(ARGUMENTS)
NAMES = ("calls begin", "calls end", "call begin", "call end", "sep")
D = {name: f"<｜tool▁{name.replace(' ', '▁')}｜>" for name in NAMES}  # noqa: RUF001
V3 = f"{D['call begin']}function{D['sep']}weather\n```json\n{BODY}\n```{D['call end']}"
V31 = f"{D['call begin']}weather{D['sep']}{BODY}{D['call end']}"
ONE = [("weather", ARGUMENTS)]


QWEN3 = "<function=weather>\n<parameter=city>\nJericho\n</parameter>\n<parameter=walls>\n[1]\n</parameter>\n</function>"
GLM = (
    "weather\n<arg_key>city</arg_key>\n<arg_value>Jericho</arg_value>\n"
    "<arg_key>walls</arg_key><arg_value>[1]</arg_value>"
)
SEED = "<function=weather><parameter=city>Jericho</parameter>\n<parameter=walls> [1]\n</parameter></function>"
STEP = (
    '<steptml:invoke name="weather"><steptml:parameter name="city">Jericho</steptml:parameter>'
    '<steptml:parameter name="walls"> [1] </steptml:parameter></steptml:invoke>'
)
STEP_CALL = f"<｜tool_call_begin｜>function<｜tool_sep｜>weather\n{STEP}<｜tool_call_end｜>"  # noqa: RUF001
KIMI = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{BODY}<|tool_call_end|>"
MINIMAX = (
    '<invoke name="weather">\n<parameter name="city">Jericho</parameter>\n<parameter name="walls">[1]</parameter>\n'
)
SCHEMA = {"properties": {"city": {"type": "string"}, "walls": {"type": "array"}}}
TEXTS = [("weather", {"city": "Jericho", "walls": [1]})]
PYTHON = 'weather(city="Jericho", walls=[1])'
VALUES = [("f", {"a": -1500.0, "b": 31, "c": [1, 2], "d": 3, "e": [4]})]
NESTED = [("f", {"a": {"b": [None, True], "c": {}}, "d": "A\né'\\d"})]
NO_CALLS = [
    *(
        "",
        "1",
        "f",
        "f(1)",
        "f(a=b)",
        "f(a=1+1)",
        "f(a=open('x'))",
        "f(a=1, a=2)",
        "f(a=1e999)",
        "f(a={1: 2})",
        "f(a=b'x')",
    ),
    *(
        "f(a=1)(b=2)",
        "f(a='x",
        "f(a='x\ny')",
        "f(a='\\xZZ')",
        "f(a=01)",
        "lambda: f()",
        "f(a=inf)",
        "f(**a)",
        "f(a=[1)]",
    ),
    f"f(a={'9' * 5000})",
]
NAMELESS = sorted(FORMS.keys() - {"gpt_oss"})


READ: list[Any] = [
    ("hermes", f"I look.\n<tool_call>\n{CALL}\n</tool_call>", "I look.\n", ONE),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "\n", ONE * 2),
    ("hermes", f"<tool_call>{CALL}", "", ONE),
    ("hermes", f"<tool_call>{{bad</tool_call><tool_call>{CALL}</tool_call>", "<tool_call>{bad</tool_call>", ONE),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", None, []),
    ("hermes", "<tool_call>I think so</tool_call>", None, []),
    ("longcat", f"So:<longcat_tool_call>\n{CALL}\n</longcat_tool_call>", "So:", ONE),
    ("granite", f"<|tool_call|> [{CALL}, {CALL}] Well.", " Well.", ONE * 2),
    ("granite", f"<tool_call>[{CALL}]", "", ONE),
    ("granite_20b_fc", f"<function_call> {CALL}<function_call> {CALL}", "", ONE * 2),
    ("internlm", f"Yes.<|action_start|><|plugin|>\n{LLAMA}<|action_end|>\n", "Yes.\n", ONE),
    ("phi4_mini_json", f"Yes. functools[{CALL},{CALL}]", "Yes. ", ONE * 2),
    ("phi4_mini_json", f"<|tool_call|>[{CALL}]<|/tool_call|>", "", ONE),
    ("phi4_mini_json", "functools[] and functools [x]", None, []),
    ("jamba", f"<tool_calls>[{CALL}]</tool_calls>", "", ONE),
    ("nemotron_json", f"<TOOLCALL>[{CALL}]</TOOLCALL>", "", ONE),
    ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", "", ONE * 2),
    ("llama3_json", f"I ask: {LLAMA} ;\n{CALL} for {{it}}.", "I ask:  for {it}.", ONE * 2),
    ("llama3_json", '{"name": "Moses"}', None, []),
    ("llama3_json", '{"name": "f", "parameters": {"a": ', None, []),
    ("llama3_json", '{"a":[' * 20_000, None, []),
    ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", "", ONE * 2),
    ("mistral", f"Yes.[TOOL_CALLS]weather[ARGS]{BODY}[TOOL_CALLS]weather{BODY}", "Yes.", ONE * 2),
    ("mistral", f"[TOOL_CALLS][{CALL}", None, []),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{BODY}[TOOL_CALLS]{{", "[TOOL_CALLS]{", ONE),
    ("deepseek", f"{D['calls begin']}{V3}\n{V3}{D['calls end']}", "\n", ONE * 2),
    ("deepseek", f"Well.{D['calls begin']}{V31}{D['calls end']}", "Well.", ONE),
    ("deepseek", f"{D['calls begin']}{V31[:-40]}", None, []),
    ("kimi_k2", f"So.<|tool_calls_section_begin|>{KIMI}{KIMI}<|tool_calls_section_end|>", "So.", ONE * 2),
    ("qwen3_coder", f"So:<tool_call>\n{QWEN3}\n</tool_call>\n<tool_call>{QWEN3}</tool_call>", "So:\n", TEXTS * 2),
    ("qwen3_coder", f"{QWEN3}\n", "\n", TEXTS),
    ("qwen3_coder", QWEN3.replace("\n</parameter>\n<p", "\n<p"), "", TEXTS),
    ("qwen3_coder", f"<tool_call>{QWEN3.removesuffix('</function>')}</tool_call>", "", TEXTS),
    ("qwen3_coder", f"<tool_call>{QWEN3[:-30]}", None, []),
    ("qwen3_coder", "<tool_call><function=rest>\n</function></tool_call>", "", [("rest", {})]),
    ("glm45", f"So:<tool_call>{GLM}\n</tool_call>", "So:", TEXTS),
    ("glm45", "<tool_call>rest\n</tool_call><tool_call>rest</tool_call>", "", [("rest", {})] * 2),
    ("glm45", f"<tool_call>{GLM[:-30]}", None, []),
    ("glm45", f"<tool_call>{GLM}", None, []),
    ("seed_oss", f"<seed:tool_call>{SEED}</seed:tool_call>", "", TEXTS),
    ("minimax_m2", f"So.<minimax:tool_call>\n{MINIMAX}</invoke>\n</minimax:tool_call>", "So.\n\n", TEXTS),
    ("minimax_m2", f"<minimax:tool_call>\n{MINIMAX}", None, []),
    ("step3", f"<｜tool_calls_begin｜>{STEP_CALL}{STEP_CALL}<｜tool_calls_end｜>", "", TEXTS * 2),  # noqa: RUF001
    ("step3", f"<｜tool_calls_begin｜><｜tool_call_begin｜>{STEP[:-20]}", None, []),  # noqa: RUF001
    ("pythonic", f"[{PYTHON}, rest()]", "", [*TEXTS, ("rest", {})]),
    ("pythonic", f"I look [1]: [{PYTHON}] <|python_end|>", "I look [1]:  ", TEXTS),
    ("pythonic", "[f(a=-1.5e3, b=0x1F, c=(1, 2,), d=(3), e=(4,),)]", "", VALUES),
    ("pythonic", "[f(a={'b': [None, true], \"c\": {}}, d='\\x41\\n\\u00e9\\'\\d')]", "", NESTED),
    ("pythonic", '[f(a="""one\n"two"\n""")]', "", [("f", {"a": 'one\n"two"\n'})]),
    ("pythonic", "[my-app.search(q='}')]", "", [("my-app.search", {"q": "}"})]),
    ("pythonic", "[weather(city=31000, walls='[1]')]", "", [("weather", {"city": "31000", "walls": [1]})]),
    *(("pythonic", f"[{text}]", None, []) for text in NO_CALLS),
    ("pythonic", "[f(a=" * 20_000, None, []),
    ("pythonic", f"[f(a={'[' * 100_000}", None, []),
    ("llama3_json", f"[{PYTHON}]", "", TEXTS),
    ("llama3_json", "as in [f(x=1)]", None, []),
    ("lfm2", f"So:<|tool_call_start|>[{PYTHON}, rest()]<|tool_call_end|>!", "So:!", [*TEXTS, ("rest", {})]),
    ("lfm2", f"<|tool_call_start|>[{CALL}]<|tool_call_end|>", "", ONE),
    ("lfm2", f"<|tool_call_start|>[{PYTHON}", None, []),
    (
        "lfm2",
        "<|tool_call_start|>[f(a='<|tool_call_end|>')]<|tool_call_end|>",
        "",
        [("f", {"a": "<|tool_call_end|>"})],
    ),
    ("olmo3", f"<function_calls>\n{PYTHON}\nrest()\n</function_calls>.", ".", [*TEXTS, ("rest", {})]),
    ("olmo3", "<function_calls>rest(a=null)\nrest(", "\nrest(", [("rest", {"a": None})]),
    ("olmo3", '<function_calls>f(a="""' * 20_000, None, []),
    ("gemma3", f"Well.\n```tool_code\nprint({PYTHON})\n```", "Well.\n", TEXTS),
    ("gemma3", "```tool_code\nprint(x)\n```", None, []),
    *((form, "In the beginning { was", None, []) for form in NAMELESS),
]


@pytest.mark.parametrize(("form", "text", "rest", "calls"), READ)
def test_calls_are_read_and_what_is_malformed_stays_in_the_text(
    form: str, text: str, rest: str | None, calls: list[Any]
) -> None:
    assert FORMS[form].read(text, {"weather": SCHEMA}) == (text if rest is None else rest, calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, " 01 \n", " 01 \n"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/name"}, "17", "17"),
        ({"type": "integer"}, "7.0", 7),
        ({"type": "integer"}, " 123456789012345678901 ", 123456789012345678901),
        ({"type": "number"}, "7", 7),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, "many", "many"),
        ({"type": "array"}, '["a", {"b": null}]', ["a", {"b": None}]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "nobody", "nobody"),
        ({"type": ["string", "integer"]}, "[1]", "[1]"),
        ({"const": 4}, "4", 4),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "True", "True"),
        ({}, '"quoted"', '"quoted"'),
        (None, "plain", "plain"),
    ],
)
def test_texts_have_the_types_of_the_schema(schema: object, text: str, value: object) -> None:
    root = {"properties": {"a": schema}, "$defs": {"name": {"type": "string"}}}
    found = typed(text, types_of(root)("a"))
    assert found == value and type(found) is type(value)


def test_harmony_has_channels_and_recipients() -> None:
    analysis = "<|channel|>analysis<|message|>The user asks.<|end|>"
    call = f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{BODY}"
    assert read_harmony(analysis + call) == ("", "The user asks.", ONE)
    early = f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{BODY}<|call|>"
    assert read_harmony(analysis + early) == ("", "The user asks.", ONE)
    final = "<|start|>assistant<|channel|>final<|message|>It rains."
    assert read_harmony(analysis + final) == ("It rains.", "The user asks.", [])
    assert "{bad" in read_harmony(call.replace(BODY, "{bad"))[0]
    assert read_harmony("plain") == ("plain", None, [])


def test_the_form_is_that_of_the_template() -> None:
    for name, form in FORMS.items():
        for marks in form.marks:
            assert form_of(f"... {' '.join(marks)} ...") == name
    assert form_of("{{ messages }}") is None and form_of("<|python_tag|> [func_name1(a=1)]") == "pythonic"


QWEN = (
    "{% if tools %}{{ tools|tojson }}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if thinks %}<think>\n{% endif %}{# </think> #}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASK = [{"role": "user", "content": "Does it rain?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=512) as opened:
        yield opened


def answer(llm: LLM, text: str, **options: Any) -> Any:
    """The reply to `ASK`, which is `text` whatever the model would say."""
    params = SamplingParams(max_tokens=300, temperature=0, structured_outputs=StructuredOutputsParams(choice=[text]))
    given: dict[str, Any] = {"chat_template": QWEN, "tools": TOOLS, "use_tqdm": False} | options
    return llm.chat(ASK, params, **given)[0].outputs[0]


def test_chat_reads_calls_and_reasoning(llm: LLM) -> None:
    text = f"<think>Rain?</think>\n\nI look.<tool_call>{CALL}</tool_call>"
    told: list[Any] = []
    own = answer(llm, text, on_output=lambda output: told.append(output.outputs[0].tool_calls))
    assert own.text == text and (own.reasoning, own.content) == ("Rain?", "I look.")
    assert own.tool_calls == [ToolCall("weather", ARGUMENTS, "call00000")] and told == [own.tool_calls]
    assert own.to_message() == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": BODY}}],
    }
    plain = answer(llm, text, tool_parser=None)
    assert plain.tool_calls == [] and plain.content == f"I look.<tool_call>{CALL}</tool_call>"
    assert answer(llm, text, tools=None).tool_calls == []
    inside = answer(llm, "Rain?</think>No.", chat_template_kwargs={"thinks": True})
    assert (inside.reasoning, inside.content) == ("Rain?", "No.")
    unfinished = answer(llm, "Rain", chat_template_kwargs={"thinks": True})
    assert (unfinished.reasoning, unfinished.content) == ("Rain", "")
    neither = answer(llm, " It rains. ")
    assert (neither.reasoning, neither.content, neither.tool_calls) == (None, " It rains. ", [])
    named = answer(llm, LLAMA, tool_parser="llama3_json")
    assert named.tool_calls[0].arguments == ARGUMENTS and named.to_message()["content"] is None
    with pytest.raises(ValidationError, match="tool_parser must be 'auto' or 'gpt_oss'"):
        answer(llm, "x", tool_parser="qwen")


def test_arguments_that_are_texts_have_the_types_of_the_tool(llm: LLM) -> None:
    """Streamed and whole."""
    template = QWEN.replace("<tool_call>", "<tool_call><function=")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", **SCHEMA}}}]
    text = f"So:\n<tool_call>\n{QWEN3.replace('Jericho', '17')}\n</tool_call>"
    whole = answer(llm, text, chat_template=template, tools=tools)
    assert whole.tool_calls == [ToolCall("weather", {"city": "17", "walls": [1]}, "call00000")]
    assert whole.content == "So:"
    params = SamplingParams(max_tokens=300, temperature=0, structured_outputs=StructuredOutputsParams(choice=[text]))
    stream = llm.stream_chat(ASK, params, chat_template=template, tools=tools)
    assert "".join(stream) == text and stream.output is not None
    assert vars(stream.output.outputs[0]) == vars(whole)


HARMONY = (
    "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>final<|message|> It rains. <|end|>"
    f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{BODY}<|call|>"
)
CASES = [*((form, text) for form, text, *_ in READ), ("gpt_oss", HARMONY)]
REPLIES = [
    f"<think>\nRain?\n\nOr <sun>\n</think>\n\n I look. <tool_call>{CALL}</tool_call> Well. ",
    f"I look.\n<tool_call>{CALL}</tool_call>",
    " It rains [1], {so} far. ",
    "<think>Rain",
    f"<think>Rain? I look.\n<tool_call>{CALL}</tool_call>",
    "<thin ice",
    "",
]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(("form", "text"), [(None, ""), *((form, text) for form, text in CASES if len(text) < 2000)])
def test_what_is_certain_of_a_part_of_a_reply_stays(form: str | None, text: str, thinks: bool, llm: LLM) -> None:
    around = ("<think>", "</think>") if thinks else None
    reader = ReplyReader(llm._preprocessor.tokenizer, frozenset(), form, None, around)  # type: ignore[arg-type]
    choice = ToolChoice(functions={"weather": SCHEMA, "f": {}})
    for reply in (*REPLIES, f"<think>Rain?</think>\n{text}", f"So. {text}", text):

        def read(end: int, reason: str | None, reply: str = reply) -> tuple[str, str, list[ToolCall]]:
            own = CompletionOutput(0, reply[:end], [], finish_reason=reason, stop_reason="x")
            reader.read([RequestOutput("0", "", [1], [own], finished=reason is not None)], choice)
            return own.reasoning or "", own.content or "", own.tool_calls or []

        *whole, calls = read(len(reply), "stop")
        for end in range(0, len(reply), 1 + len(reply) // 60):
            *parts, begun = read(end, None)
            for part, final in zip(parts, whole, strict=True):
                assert final.startswith(part), (reply[:end], part, final)
            for one, final in zip(begun, calls, strict=False):
                is_open = one is begun[-1]
                assert one.name == final.name and (is_open or one == final), (reply[:end], begun, calls)
                written = final.to_dict()["function"]["arguments"]
                assert written.startswith(certain_arguments(one.arguments)), (reply[:end], begun, calls)
            assert len(begun) <= len(calls) or len(begun) == 1, "a call that did not end may have been told"


FIRST = {"gpt_oss": (HARMONY, ONE[0])} | {
    form: (text, calls[0]) for form, text, _, calls in reversed(READ) if calls and calls[0] in (*ONE, *TEXTS)
}


@pytest.mark.parametrize("form", sorted(FIRST.keys() - {"gemma3"}))
def test_calls_are_told_as_they_are_written(form: str) -> None:
    """JSON by pieces of texts, others argument by argument; Gemma 3's calls stand in another."""
    text, call = FIRST[form]
    reader = ReplyReader(None, frozenset(), form, None, None)  # type: ignore[arg-type]
    choice = ToolChoice(functions={"weather": SCHEMA})
    begun = [reader._begun(text[:end], choice) for end in range(len(text) + 1)]
    pieces = {certain_arguments(calls[0][1]) for calls in begun if calls}
    assert len(pieces) > (10 if call in ONE else 1), pieces
    assert begun[-1][0] == call


def test_what_follows_arguments_that_were_told() -> None:
    """Also of an argument that is written twice, which has its last value."""
    for told, arguments in (
        ("", {"a": 1}),
        ('{"a": ', {"a": 1}),
        ('{"a": "x', {"a": "y"}),
        ('{"a": [1, {"b": "x', {"a": 2}),
        ('{"a": 12', {"a": "\ud83d\ude00"}),
    ):
        assert json.loads(told + rest_of(told, arguments)) == arguments
    assert list(closed('{"a": ' + "[" * 100_000, 0, False)) == []
    for text, certain in (("a\\", '{"a": "a\\\\'), ("\ud83d", '{"a": "'), ('"}', '{"a": "')):
        assert certain_arguments({"a": text}) == certain


def test_a_stream_tells_what_is_certain(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the whole at the end, as `chat` reads it; what is no call is told as it comes."""
    tell = EngineThread._tell

    def patient(self: EngineThread, engine: Engine) -> None:
        """A caller that has not read what it was told, on a busy machine, is told of several tokens at once."""
        while any(call.outputs for call in self._live.values()):
            time.sleep(0.0001)
        tell(self, engine)

    monkeypatch.setattr(EngineThread, "_tell", patient)

    async def told(engine: AsyncLLM, text: str) -> list[Any]:
        constraint = StructuredOutputsParams(choice=[text])
        params = SamplingParams(max_tokens=300, temperature=0, structured_outputs=constraint)
        return [output async for output in engine.chat(ASK, params, chat_template=QWEN, tools=TOOLS)]

    with AsyncLLM(llm) as engine:
        for text in REPLIES[:-1]:
            *parts, last = asyncio.run(told(engine, text))
            assert vars(last.outputs[0]) == vars(answer(llm, text))
            shown = {(part.outputs[0].reasoning or "", part.outputs[0].content) for part in parts}
            assert len(shown) > 3 or "<th" not in text or len(text) < 12


def test_a_call_ends_reasoning_that_nothing_else_ended(llm: LLM) -> None:
    own = answer(llm, f"<think>Rain? I look.\n<tool_call>{CALL}</tool_call>")
    assert own.tool_calls == [ToolCall("weather", ARGUMENTS, "call00000")]
    assert (own.reasoning, own.content) == ("Rain? I look.", "")
    thinks = answer(llm, f"I look.<tool_call>{CALL}</tool_call>", chat_template_kwargs={"thinks": True})
    assert (thinks.reasoning, len(thinks.tool_calls)) == ("I look.", 1)
    drafted = answer(llm, f"<think>Perhaps <tool_call>{CALL}</tool_call>?</think>No.")
    assert drafted.tool_calls == [] and drafted.content == "No."


def test_a_call_that_is_not_read_is_told(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    answer(llm, "It rains.")
    assert caplog.text == ""
    for _ in range(2):
        assert answer(llm, "functools[{bad").tool_calls == []
    assert caplog.text.count("a reply has 'functools[', as tool calls have, and is no call in the form hermes") == 1
    answer(llm, '[weather("Jericho")]')  # what the argument is for is not said
    assert caplog.text.count("a reply has '[weather(', as tool calls have") == 1
    caplog.clear()
    answer(llm, "It rains.", chat_template=QWEN.replace("<tool_call>", ""))
    assert "how this model writes tool calls is not known" in caplog.text
    assert answer(llm, "functools[x", tools=None).tool_calls == []


def test_a_history_as_openai_writes_it(llm: LLM) -> None:
    reply = {"role": "assistant", "content": None, "tool_calls": [ToolCall("weather", ARGUMENTS, "a").to_dict()]}
    result = {"role": "tool", "tool_call_id": "a", "content": "rain"}
    [prompt] = llm.render_chat([*ASK, reply, result], chat_template=QWEN, tools=TOOLS)
    assert prompt["prompt"].endswith("assistant:Jerichotool:rain")
    own = {**reply, "tool_calls": [ToolCall("weather", ARGUMENTS, "a")]}
    assert llm.render_chat([*ASK, own, result], chat_template=QWEN, tools=TOOLS) == [prompt]
    for message, said in (
        ({"role": "assistant", "content": None}, "got None in one of the role 'assistant'"),
        ({"role": "assistant", "tool_calls": "f"}, "must be a list of calls"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "must be ToolCalls, or"),
    ):
        with pytest.raises(ValidationError, match=said):
            llm.render_chat([*ASK, message], chat_template=QWEN)


def test_tools_that_the_template_ignores_are_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match=r"tools must be left out: this model's chat template.*tool_choice='requ"):
        llm.chat(ASK, tools=TOOLS, use_tqdm=False)
    llm.render_chat(ASK, chat_template=QWEN, tools=TOOLS)


MESSAGES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + MESSAGES
ONLY_USERS = "{% for m in messages if m.role == 'user' %}[user]{{ m.content|trim }}{% endfor %}"
TOLD = 'You can call these functions:\n{"name": "weather", "parameters": {"type": "object"}}\n'


@pytest.mark.parametrize(
    ("template", "messages", "before", "after"),
    [
        (MESSAGES, ASK, "[system]", "[user]Does it rain?"),
        (MESSAGES, [{"role": "system", "content": "Be brief."}, *ASK], "[system]Be brief.\n\n", "[user]Does it rain?"),
        (NO_SYSTEM, ASK, "[user]", "\n\nDoes it rain?"),
        (ONLY_USERS, [{"role": "user", "content": [{"type": "text", "text": "Rain?"}]}], "[user]", "\nRain?"),
    ],
)
def test_a_call_is_required_of_a_template_without_tools(
    llm: LLM, template: str, messages: list[Any], before: str, after: str
) -> None:
    for choice in ("required", named("weather")):
        params, given = SamplingParams(max_tokens=60, seed=4), {"chat_template": template, "tools": TOOLS}
        [output] = llm.chat(messages, params, tool_choice=choice, use_tqdm=False, **given)
        assert output.outputs[0].tool_calls[0].name == "weather" and output.prompt is not None
        assert output.prompt.startswith(before + TOLD) and output.prompt.endswith("and nothing else." + after)
        stream = llm.stream_chat(messages, params, tool_choice=choice, **given)
        assert "".join(stream) == output.outputs[0].text and stream.output is not None
        assert stream.output.prompt == output.prompt
    with pytest.raises(ValidationError, match="shows neither tools nor a system message"):
        llm.chat(messages, params, chat_template="{{ 1 }}", tools=TOOLS, tool_choice="required", use_tqdm=False)


def test_a_call_is_required_in_a_job_with_a_template_without_tools(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": ASK, "tools": TOOLS, "tool_choice": "required"}) + "\n")
    llm.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", SamplingParams(max_tokens=60), use_tqdm=False)
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert row["error"] is None and row["tool_calls"][0]["function"]["name"] == "weather"


TREE = {"type": "object", "properties": {"under": {"$ref": "#"}}, "additionalProperties": False}
DAYS = {
    "properties": {"day": {"$ref": "#/$defs/day"}, "tree": {"$ref": "#/definitions/tree"}},
    "required": ["day", "tree"],
    "additionalProperties": False,
    "$defs": {"day": {"enum": ["today", "tomorrow"]}},
    "definitions": {"tree": {"const": {"$ref": "#"}}},
}
TWO = [
    {"type": "function", "function": {"name": "forecast", "parameters": DAYS}},
    {"type": "function", "function": {"name": "climb", "parameters": TREE}},
    {"type": "function", "function": {"name": "rest"}},
]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(llm: LLM, choice: Any, count: int = 1, **options: Any) -> list[Any]:
    params = SamplingParams(max_tokens=options.pop("max_tokens", 200), n=count, seed=4)
    given: dict[str, Any] = {"chat_template": QWEN, "tools": TWO, "use_tqdm": False, "tool_choice": choice} | options
    return llm.chat(ASK, params, **given)[0].outputs


ORDER = {
    "type": "object",
    "properties": {
        "what": {"type": "string", "description": "any text"},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "to": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["what", "size", "to"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"day": {"const": "today"}},
            "required": ["day"],
            "additionalProperties": False,
        }
    },
}
PLAIN = [
    {"type": "function", "function": {"name": "order", "parameters": {**ORDER, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "rest"}},
]
CALLS: dict[str, Any] = {"tools": PLAIN, "max_tokens": 320}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_is_required_is_written_in_the_form_of_the_template(llm: LLM, form: str) -> None:
    """By a model that was never trained to call; what is read is what was written, and fits the schema."""
    template = "{{ tools[0].function.name if tools }}{# " + " ".join(FORMS[form].marks[0]) + " #}"
    (own,) = called(llm, "required" if form == "mistral" else named("order"), 1, **CALLS, chat_template=template)
    assert own.finish_reason == "stop" and own.structured.guaranteed and own.content == ""
    assert any(begin in own.text for begin in (*FORMS[form].begins, "[order(")) and own.tool_calls
    for call in own.tool_calls:
        assert call.name in ("order", "rest") and call.arguments.keys() <= ORDER["properties"].keys()
        if call.name == "order":
            given = call.arguments
            assert isinstance(given["what"], str) and given["size"] in ("small", "large")
            assert given["to"] == {"day": "today"} and given.get("count", 1) in range(1, 10)
            assert given.get("note") is None or isinstance(given["note"], str)


@pytest.mark.parametrize(
    ("mark", "written"), [("", '[TOOL_CALLS][{"name": "rest"'), ("[ARGS]", "[TOOL_CALLS]rest[ARGS]{")]
)
def test_mistrals_older_and_newer_form(llm: LLM, mark: str, written: str) -> None:
    template = "{{ tools[0].function.name if tools }}{# [TOOL_CALLS]" + mark + " #}"
    (own,) = called(llm, "required", tools=TWO[2:], chat_template=template, parallel_tool_calls=False)
    assert own.text.startswith(written) and own.tool_calls[0].name == "rest"


@pytest.mark.parametrize("form", ["qwen3_coder", "hermes", "pythonic", "olmo3"])
def test_several_calls_may_be_written_where_one_is_required(llm: LLM, form: str) -> None:
    template = "{{ tools[0].function.name if tools }}{# " + " ".join(FORMS[form].marks[0]) + " #}"
    rests = [{"type": "function", "function": {"name": name}} for name in ("rest", "sleep")]
    found = called(llm, "required", 8, chat_template=template, tools=rests)
    assert {call.name for own in found for call in own.tool_calls} <= {"rest", "sleep"}
    assert max(len(own.tool_calls) for own in found) > 1 and all(own.tool_calls for own in found)
    (own,) = called(llm, "required", 1, chat_template=template, tools=rests, parallel_tool_calls=False)
    assert len(own.tool_calls) == 1


def test_schemas_that_texts_between_tags_cannot_keep_are_written_as_json(llm: LLM) -> None:
    template = QWEN.replace("<tool_call>", "<tool_call><function=")
    long = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[ab]{3}$"}}, "required": ["code"]}
    tools = [{"type": "function", "function": {"name": "enter", "parameters": {**long, "additionalProperties": False}}}]
    (own,) = called(llm, "required", chat_template=template, tools=tools, parallel_tool_calls=False)
    assert json.loads(own.text) == [{"name": "enter", "parameters": own.tool_calls[0].arguments}]
    assert set(own.tool_calls[0].arguments["code"]) <= {"a", "b"}


def test_a_call_as_python_has_pythons_constants(llm: LLM) -> None:
    """Of a template that teaches Python; what Python writes in another way than JSON is written as JSON, whole."""
    properties = {"wet": {"type": "boolean"}, "why": {"type": ["null", "integer"]}, "mood": {"enum": [True, "dry"]}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    template = "{{ tools[0].function.name if tools }}{# [func_name1( #}"

    def calls(schema: Any) -> list[Any]:
        tools = [{"type": "function", "function": {"name": "rain", "parameters": schema}}]
        return called(llm, "required", 4, chat_template=template, tools=tools, parallel_tool_calls=False)

    for required in (["wet", "mood"], []):
        for own in calls({**schema, "required": required}):
            assert own.text.startswith("[rain(") and set(required) <= own.tool_calls[0].arguments.keys()
            assert "true" not in own.text and "false" not in own.text and "null" not in own.text
            assert jsonschema.Draft202012Validator(schema).is_valid(own.tool_calls[0].arguments)
            assert eval(own.text, {"rain": dict}) == [own.tool_calls[0].arguments]  # what Python reads
    nested = {"type": "object", "properties": {"wet": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}}
    assert all(json.loads(own.text)[0]["name"] == "rain" for own in calls({**nested, "required": ["wet"]}))


def test_a_call_that_is_required_fits_a_schema(llm: LLM) -> None:
    """As JSON, where no form is known, of a model that was never trained to call."""
    template = QWEN.replace("<tool_call>", "")
    given: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"thinks": True}}
    found = called(llm, "required", 8, parallel_tool_calls=False, **given)
    calls = [own.tool_calls[0] for own in found]
    assert {len(own.tool_calls) for own in found} == {1} and {own.content for own in found} == {""}
    assert {own.reasoning for own in found} == {None} and {own.finish_reason for own in found} == {"stop"}
    assert len({call.name for call in calls}) > 1 and {call.name for call in calls} <= {"forecast", "climb", "rest"}
    for own, call in zip(found, calls, strict=True):
        assert json.loads(own.text) == [{"name": call.name, "parameters": call.arguments}]
        if call.name == "forecast":
            assert call.arguments["day"] in ("today", "tomorrow") and call.arguments["tree"] == {"$ref": "#"}
        else:
            assert call.arguments.keys() <= ({"under"} if call.name == "climb" else set())
    several = called(llm, "required", 8, chat_template=template)
    assert all(own.tool_calls for own in several) and any(len(own.tool_calls) > 1 for own in several)


def test_a_function_that_is_named_is_called(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    for own in called(llm, named("forecast"), 2, chat_template=QWEN.replace("<tool_call>", "")):
        (call,) = own.tool_calls
        assert json.loads(own.text) == call.arguments and call.arguments["day"] in ("today", "tomorrow")
        assert (own.content, call.name, call.id) == ("", "forecast", "call00000")
    (rests,) = called(llm, named("rest"), chat_template=QWEN.replace("<tool_call>", ""))
    assert "how this model writes tool calls" not in caplog.text
    assert (rests.text, rests.tool_calls[0].arguments) == ("{}", {})
    json_only: dict[str, Any] = {"chat_template": QWEN.replace("<tool_call>", ""), "tool_choice": named("weather")}
    cut = llm.chat(ASK, SamplingParams(max_tokens=2), tools=TOOLS, use_tqdm=False, **json_only)
    assert cut[0].outputs[0].tool_calls in ([], [ToolCall("weather", {}, "call00000")])
    for choice, said in (
        (named("forcast"), "names 'forcast', which is none of the tools. Did you mean 'forecast'"),
        ("must", "tool_choice must be 'auto', 'none', 'required' or"),
    ):
        with pytest.raises(ValidationError, match=said):
            called(llm, choice)
    for options, said in (
        ({"tools": None}, "tools must be given where tool_choice asks for a call"),
        ({"tools": [{"name": "f"}]}, "tools must be functions with names of their own"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be True or False"),
    ):
        with pytest.raises(ValidationError, match=said):
            called(llm, "required", **options)
    with pytest.raises(ValidationError, match="structured_outputs must be None where tool_choice asks"):
        answer(llm, "x", tool_choice="required")


def test_of_parallel_calls_the_first_is_kept(llm: LLM) -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{LLAMA}</tool_call>"
    assert len(answer(llm, text).tool_calls) == 2
    assert len(answer(llm, text, parallel_tool_calls=False).tool_calls) == 1
    assert answer(llm, text, tool_choice="none").tool_calls == []


def test_streamed_and_gathered_chats_call_as_chat_does(llm: LLM) -> None:
    choices: list[Any] = ["required", named("forecast"), "none"]
    params = SamplingParams(max_tokens=120, seed=4)
    given: dict[str, Any] = {"chat_template": QWEN, "tools": TWO, "parallel_tool_calls": False}
    expected = [llm.chat(ASK, params, use_tqdm=False, tool_choice=choice, **given)[0].outputs[0] for choice in choices]
    assert [len(own.tool_calls) for own in expected[:2]] == [1, 1]

    for choice, own in zip(choices, expected, strict=True):
        stream = llm.stream_chat(ASK, params, tool_choice=choice, **given)
        assert stream.output is None
        assert "".join(stream) == own.text and stream.output is not None
        assert vars(stream.output.outputs[0]) == vars(own)
    with pytest.raises(ValidationError, match="names 'forcast', which is none of the tools"):
        llm.stream_chat(ASK, params, tool_choice=named("forcast"), **given)
    with pytest.raises(ValidationError, match="stream takes one prompt, got 2"):
        next(llm.stream_chat([ASK, ASK], params, **given))
    left = llm.stream_chat(ASK, SamplingParams(max_tokens=90, ignore_eos=True), chat_template=QWEN)
    next(left)
    del left
    assert_idle(llm)

    async def gather() -> list[list[RequestOutput]]:
        async def told(choice: Any, kind: RequestOutputKind) -> list[RequestOutput]:
            own = dataclasses.replace(params, output_kind=kind)
            return [output async for output in engine.chat(ASK, own, tool_choice=choice, **given)]

        kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA)
        return await asyncio.gather(*(told(choice, kind) for choice in choices for kind in kinds))

    with AsyncLLM(llm) as engine:
        for index, outputs in enumerate(asyncio.run(asyncio.wait_for(gather(), 600))):
            whole, last = expected[index // 2], outputs[-1].outputs[0]
            assert (last.tool_calls, last.content, last.reasoning) == (whole.tool_calls, whole.content, whole.reasoning)
            assert "".join(output.outputs[0].text for output in outputs if index % 2) in ("", whole.text)
            assert index % 2 or last.text == whole.text
        wrong = engine.chat(ASK, params, tool_choice="must", **given)
        with pytest.raises(ValidationError, match="tool_choice must be 'auto', 'none', 'required' or"):
            asyncio.run(asyncio.wait_for(anext(wrong), 600))


def test_chats_of_a_job_have_tools_and_reasoning(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's message is that of `LLM.chat`."""
    text = f"<think>Rain?</think>\n\nI look.<tool_call>{CALL}</tool_call>"
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"rain": True}}}}
    bodies: list[dict[str, Any]] = [
        {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": TOOLS, "tool_choice": "none", "reasoning_effort": "low"},
        {"tools": TOOLS, "response_format": schema},
        {"tools": TWO, "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": TWO, "tool_choice": named("forecast")},
        {"tools": TOOLS, "tool_choice": "must"},
        {"tools": "weather"},
        {"tools": TOOLS, "tool_choice": "required", "response_format": schema},
    ]
    chats = [
        {"custom_id": str(index), "url": "/v1/chat/completions", "body": {"messages": ASK, **body}}
        for index, body in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    tokenizer = llm._preprocessor.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer.huggingface(), "chat_template", QWEN)
    params = SamplingParams(max_tokens=300, temperature=0, structured_outputs=StructuredOutputsParams(choice=[text]))
    llm.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", params, use_tqdm=False)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    first, second, third = (line["response"]["body"]["choices"][0] for line in found[:3])
    chatted = answer(llm, text)
    assert first["message"] == {**chatted.to_message(), "reasoning": "Rain?"} and first["finish_reason"] == "tool_calls"
    assert first["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": BODY}
    assert second["message"]["content"] == f"I look.<tool_call>{CALL}</tool_call>" and second["finish_reason"] == "stop"
    assert json.loads(third["message"]["content"]) == {"rain": True} and "tool_calls" not in third["message"]
    required, asked = (line["response"]["body"]["choices"][0] for line in found[3:5])
    assert required["finish_reason"] == "tool_calls" and len(required["message"]["tool_calls"]) == 1
    assert (asked["finish_reason"], asked["message"]["content"]) == ("stop", None)
    assert asked["message"]["tool_calls"][0]["function"]["name"] == "forecast"
    refused = ("tool_choice must be", "tools must be a list", "response_format must be left out")
    for line, said in zip(found[5:], refused, strict=True):
        assert said in line["error"]["message"]


def test_rows_with_conversations_have_what_their_replies_hold(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in each kind of file, and in rows of Ray's; calls only after the first 1024 rows decided the types."""
    parquet = pytest.importorskip("pyarrow.parquet")
    text = f"<think>Rain?</think>\n\nI look.<tool_call>{CALL}</tool_call>"
    tokenizer = llm._preprocessor.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer.huggingface(), "chat_template", QWEN)
    monkeypatch.setattr("llm.jobs.tables._PARQUET_ROWS", 1)
    said = SamplingParams(max_tokens=300, temperature=0, structured_outputs=StructuredOutputsParams(choice=[text]))
    rows = [{"messages": ASK, "tools": tools} for tools in ("", json.dumps(TOOLS))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("out.jsonl", "out.csv", "out.parquet"):
        llm.run(tmp_path / "in.jsonl", tmp_path / name, said, use_tqdm=False)
    without, found = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": BODY}}
    assert list(found)[2:6] == ["generated_text", "content", "reasoning", "tool_calls"]
    assert list(found.values())[2:6] == [text, "I look.", "Rain?", [call]]
    assert (without["tool_calls"], without["reasoning"]) == (None, "Rain?")
    cells = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [cell["tool_calls"] for cell in cells] == [None, [call]] and cells[1]["reasoning"] == "Rain?"
    csv_rows = list(csv.DictReader((tmp_path / "out.csv").open(encoding="utf-8", newline="")))
    assert json.loads(csv_rows[1]["tool_calls"]) == [call] and csv_rows[0]["tool_calls"] == ""
    pieces, given = PieceRows(params=said, base=said, adapters=JobAdapters(), id_column="id", seed=0), [*rows]
    given.append({"messages": ASK, "tools": TOOLS})
    assert [row["tool_calls"] for row in RowWorker(llm, pieces, "error").answers(given)] == [None, [call], [call]]
    with (tmp_path / "in.csv").open("w", newline="") as file:  # a conversation and a choice as JSON
        writer = csv.writer(file)
        writer.writerow(["messages", "tools", "tool_choice"])
        writer.writerow([json.dumps(ASK), json.dumps(TWO), json.dumps(named("rest"))])
        writer.writerow([json.dumps(ASK), json.dumps(TWO), "must"])
    llm.run(tmp_path / "in.csv", tmp_path / "named.jsonl", SamplingParams(max_tokens=80, n=2), use_tqdm=False)
    rests, wrong = map(json.loads, (tmp_path / "named.jsonl").read_text().splitlines())
    assert [calls[0]["function"]["name"] for calls in rests["tool_calls"]] == ["rest", "rest"]
    assert "tool_choice must be" in wrong["error"] and wrong["tool_calls"] == [None]
