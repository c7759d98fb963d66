"""`python -m llm chat`: the conversation, its commands, Ctrl-C, and pipes."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from embedded import assert_idle, open_llm

from llm import LLM, SamplingParams
from llm.cli import main
from llm.tools.chat import ChatLoop


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_num_seqs=1, max_model_len=256) as llm:
        yield llm


def lines(*given: str) -> Callable[[str], str | None]:
    waiting = iter(given)
    return lambda prompt: next(waiting, None)


def chat(llm: LLM, *given: str, system: str = "") -> ChatLoop:
    loop = ChatLoop(llm, system)
    loop.params = SamplingParams(temperature=0, max_tokens=6)
    loop.run(lines(*given))
    return loop


def texts_of(loop: ChatLoop) -> list[str]:
    return [message["content"] for message in loop.messages]


def test_answers_are_those_of_the_whole_conversation(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    loop = chat(llm, "Who was king?", "", "And then?", system="Speak.")
    assert [message["role"] for message in loop.messages] == ["user", "assistant"] * 2
    messages = [{"role": "system", "content": "Speak."}, *loop.messages[:3]]
    [expected] = llm.chat([dict(message) for message in messages], loop.params, use_tqdm=False)
    assert texts_of(loop)[3] == expected.outputs[0].text
    assert capsys.readouterr().out == "\n".join([*texts_of(loop)[1::2], ""])


def test_the_commands(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["One", "/reset", "/system Be brief.", "/params max_tokens=2 stop=x", "Two", "/help", "/nope"]
    loop = chat(llm, *given, "/exit", "Three")
    assert texts_of(loop)[0] == "Two" and len(loop.messages) == 2 and loop._system == "Be brief."
    assert (loop.params.max_tokens, loop.params.stop) == (2, ["x"])
    err = capsys.readouterr().err
    assert "error: /nope is no command" in err and "Ctrl-C stops" in err
    assert "the model is told first: Be brief.\n" in err


def test_system_says_what_the_model_is_told(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    loop = chat(llm, "One", "/system Be brief.", "/system")
    assert loop._system == "" and len(loop.messages) == 2
    err = capsys.readouterr().err
    assert err == "the model is told from the next answer on: Be brief.\nthe model is told nothing first\n"


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (['"""', "/system no", "", "two  ", '"""', "three"], ["/system no\n\ntwo", "three"]),
        (['"""one', 'two"""', '"""three"""'], ["one\ntwo", "three"]),
        (['"""one', "two"], ["one\ntwo"]),
        (['"""', '"""', "four"], ["four"]),
    ],
)
def test_texts_of_several_lines(llm: LLM, given: list[str], texts: list[str]) -> None:
    loop = chat(llm, *given)
    assert texts_of(loop)[::2] == texts and loop._system == ""


@pytest.mark.parametrize("line", ["/params x", "/params nope=1", "/params max_tokens=-3", "far too long " * 200])
def test_a_mistake_is_one_line_and_the_chat_goes_on(llm: LLM, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    loop = chat(llm, line, "Hello")
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert texts_of(loop)[0] == "Hello" and len(loop.messages) == 2
    assert loop.params.max_tokens == 6


class Terminal(io.StringIO):
    """Sends Ctrl-C at the third piece."""

    def write(self, text: str) -> int:
        self.pieces = getattr(self, "pieces", 0) + bool(text.strip())
        if self.pieces == 3 and text.strip():
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_the_answer_and_keeps_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = ChatLoop(llm)
    loop.params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", screen)
        loop.run(lines("Who was king?", "/params max_tokens=3", "Go on"))
    assert len(loop.messages) == 4  # it went on
    stopped = texts_of(loop)[1]
    whole = llm.chat([{"role": "user", "content": "Who was king?"}], loop.params.clone(), use_tqdm=False)
    assert 0 < len(stopped) < 200 and stopped.startswith(whole[0].outputs[0].text[:4])
    assert_idle(llm)


def test_piped_input_gives_the_answers_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('Hello\n"""And\nthen?"""\n/params seed=1\n'))
    assert main(["chat", "--seed", "1", "--temperature", "0", "--max-tokens", "3"]) == 0
    told = capsys.readouterr()
    assert told.out.count("\n") == 2 and ">" not in told.out
    assert "temperature=0" in told.err and "max_tokens=3" in told.err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--temperature", "3"], "temperature must be"),
        (["--max-tokens", "0"], "max_tokens must be"),
        (["--requantize", "w4a8"], "requantize"),
    ],
)
def test_a_wrong_option_is_one_sentence(option: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *option]) != 0
    assert said in capsys.readouterr().err
