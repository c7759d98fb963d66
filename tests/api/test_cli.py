"""`python -m llm generate`: what a user at a terminal sees."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from embedded import ROOT, copy_model, open_llm, run

from llm import SamplingParams, cli
from llm.base.command_line import ENGINE_FLAGS
from llm.cli import main

PROMPT = "In the beginning"
CLOSING = re.compile(r"^\[(\d+) tokens?, (\d+\.\d) tokens/s, finish reason: (\w+)\]\n$")
SHORT = ["--max-tokens", "6", "--temperature", "0"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def expected(prompt: str = PROMPT, max_tokens: int = 6) -> str:
    with open_llm() as llm:
        return run(llm, prompt, SamplingParams(temperature=0, max_tokens=max_tokens))[0].outputs[0].text


def test_text_then_one_closing_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, *SHORT]) == 0
    out, err = capsys.readouterr()
    assert out == f"{PROMPT}{expected()}\n"
    closing = CLOSING.match(err)
    assert closing
    assert closing.groups()[0::2] == ("6", "length")
    assert float(closing[2]) > 0


def test_from_an_empty_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", PROMPT, "--seed", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(PROMPT)
    assert len(out) > len(PROMPT) + 20
    assert CLOSING.match(err)
    assert list(tmp_path.iterdir()) == []


def stdin_of(data: bytes) -> TextIOWrapper:
    return TextIOWrapper(BytesIO(data), encoding="utf-8")


def test_the_prompt_may_come_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin_of(PROMPT.encode() + b"\n"))
    assert main(["generate", "-", *SHORT]) == 0
    assert capsys.readouterr().out == f"{PROMPT}{expected()}\n"  # the last newline ends the input, not the prompt


def test_chat_prints_the_answer_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Who was Moses?", "--chat", *SHORT]) == 0
    with open_llm() as llm:
        message = {"role": "user", "content": "Who was Moses?"}
        [output] = llm.chat([message], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert capsys.readouterr().out == f"{output.outputs[0].text}\n"


def test_options_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    word = expected()[:8].split()[0]
    assert main(["generate", PROMPT, *SHORT, "--stop", "#", "--stop", word]) == 0
    out, err = capsys.readouterr()
    assert word not in out.removeprefix(PROMPT)
    assert "finish reason: stop" in err
    sampled = ["generate", PROMPT, "--max-tokens", "8", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01"]
    answers = []
    for seed in ("3", "3", "4"):
        main([*sampled, "--temperature", "1.5", "--seed", seed])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


OPTIONS: dict[str, tuple[list[str], Any]] = {
    "max_tokens": (["--max-tokens", "7"], 7),
    "temperature": (["--temperature", "0.3"], 0.3),
    "top_k": (["--top-k", "11"], 11),
    "top_p": (["--top-p", "0.7"], 0.7),
    "min_p": (["--min-p", "0.05"], 0.05),
    "seed": (["--seed", "9"], 9),
    "stop": (["--stop", "a", "--stop", "b"], ["a", "b"]),
    "extra_args": (["--extra-args", '{"x": 1}'], {"x": 1}),
}
ENGINE_OPTIONS: dict[str, tuple[list[str], Any]] = {
    "model": (["--model", "folder"], "folder"),
    "seed": (["--seed", "9"], 9),
    "logits_processors": (["--logits-processors", "a:B", "--logits_processors", "c:D", "e:F"], ["a:B", "c:D", "e:F"]),
    "compilation_config": (["--compilation-config", '{"mode": 3}'], {"mode": 3}),
}
_SAMPLES = {"int": (["99"], 99), "text": (["x"], "x"), "value": (["x"], "x"), "flag": ([], True)}
for flag, (kind, _, _) in ENGINE_FLAGS.items():
    if flag not in ENGINE_OPTIONS:
        ENGINE_OPTIONS[flag] = [f"--{flag.replace('_', '-')}", *_SAMPLES[kind][0]], _SAMPLES[kind][1]


class Opened(Exception):
    """`LLM(...)` was called with these arguments."""


def opened_with(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def record(model: Any, **given: Any) -> None:
        raise Opened({"model": model, **given})

    monkeypatch.setattr("llm.llm.LLM", record)
    with pytest.raises(Opened) as caught:
        main(arguments)
    return caught.value.args[0]


def test_every_option_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone changes the argument of its name and no other; none is left out here."""
    model = SimpleNamespace(get_default_sampling_params=lambda: SamplingParams(temperature=0.5, top_k=5))
    parse = cli._parser().parse_args
    default = cli._sampling_params(model, parse(["generate", "x"]))  # type: ignore[arg-type]
    for name, (arguments, value) in OPTIONS.items():
        params = cli._sampling_params(model, parse(["generate", "x", *arguments]))  # type: ignore[arg-type]
        assert getattr(params, name) == value != getattr(default, name)
        assert params == dataclasses.replace(default, **{name: value})
    plain = opened_with(["generate", "x"], monkeypatch)
    for name, (arguments, value) in ENGINE_OPTIONS.items():
        assert opened_with(["generate", "x", *arguments], monkeypatch) == {**plain, name: value} != plain
    listed = {action.dest for action in next(p for p in parsers(cli._parser()) if "generate" in p.prog)._actions}
    assert {name.removeprefix("LLM.") for name in listed} == {
        *(*OPTIONS, *ENGINE_OPTIONS, "help", "prompt", "chat"),
    }


@pytest.mark.parametrize(
    "command", [["generate", "x"], ["chat"], ["explain"], ["run", "IN", "OUT"], ["serve", "--port", "0"]]
)
def test_commands_take_the_same_arguments_of_llm(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that are shown, those that are not, those that vLLM has besides, in both spellings."""
    if command[0] == "run":
        (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
        command = ["run", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    plain = opened_with(command, monkeypatch)
    given = ["--max_num_seqs", "5", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.5", "--block-size=32"]
    given += ["--no-enable-chunked-prefill", "--enforce_eager", "--hf-overrides", '{"a": [1]}', "--dtype", "float32"]
    expected = {"max_num_seqs": 5, "enable_prefix_caching": False, "gpu_memory_utilization": 0.5, "block_size": 32}
    expected |= {"enable_chunked_prefill": False, "enforce_eager": True, "hf_overrides": {"a": [1]}, "dtype": "float32"}
    assert opened_with([*command, *given], monkeypatch) == {**plain, **expected}


def test_vllms_short_options_and_keys_of_objects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = opened_with(["explain"], monkeypatch)
    for line, expected in (
        ("-tp 2 -q w8a8 -dp=3", {"tensor_parallel_size": 2, "quantization": "w8a8", "data_parallel_size": 3}),
        ("-ep org/model -pp 1", {"model": "org/model", "enable_expert_parallel": True, "pipeline_parallel_size": 1}),
        ("--trust-remote-code org/model", {"model": "org/model", "trust_remote_code": True}),
        ("-O3", {"optimization_level": 3}),
        (
            "--hf_overrides.rope_scaling.factor 2 --hf-overrides.a x",
            {"hf_overrides": {"rope_scaling": {"factor": 2}, "a": "x"}},
        ),
        ("--hf-overrides.a+ 1 --hf-overrides.a+=b,c", {"hf_overrides": {"a": [1, "b", "c"]}}),
        ("--speculative-config.method=ngram", {"speculative_config": {"method": "ngram"}}),
    ):
        assert opened_with(["explain", *line.split()], monkeypatch) == {**plain, **expected}, line
    for line, said in (
        ("--hf-overrides {} --hf-overrides.a 1", "--hf-overrides and --hf-overrides.a exclude each other"),
        ("--hf-overrides.a 1 --hf-overrides.a.b 1", "--hf-overrides has both a value and keys of a."),
    ):
        assert main(["explain", *line.split()]) == 1 and said in capsys.readouterr().err


def test_an_option_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "x"], ["doctor"], ["serve"]):
        with pytest.raises(SystemExit):
            main([*command, "--max-modle-len", "3"])
        assert "unrecognized arguments: --max-modle-len" in capsys.readouterr().err


def test_the_options_of_explain_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = opened_with(["explain"], monkeypatch)
    assert opened_with(["explain", "folder"], monkeypatch) == {**plain, "model": "folder"}
    assert opened_with(["explain", "--dummy"], monkeypatch) == {**plain, "load_format": "dummy"}
    assert opened_with(["explain", "--quantization", "w4a8"], monkeypatch) == {**plain, "quantization": "w4a8"}
    none = {**plain, "compilation_config": {"custom_ops": "none,+rms_norm"}}
    assert opened_with(["explain", "--compilation-config.custom_ops", "none,+rms_norm"], monkeypatch) == none


def test_without_a_seed_answers_differ(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        main(["generate", PROMPT, "--max-tokens", "20", "--temperature", "1.5"])
    first, second = capsys.readouterr().out.removeprefix(PROMPT).split(f"\n{PROMPT}")
    assert first != second.rstrip("\n")


def test_one_token_is_not_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--max-tokens", "1"]) == 0
    assert capsys.readouterr().err.startswith("[1 token, ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([PROMPT, "--model", "/no/such/folder"], "'/no/such/folder' does not exist"),
        ([PROMPT, "--model", ""], "model must be"),
        ([PROMPT, "--max-tokens", "0"], "max_tokens must be an integer of at least 1, got 0"),
        ([PROMPT, "--temperature", "7"], "temperature must be"),
        ([PROMPT, "--seed", "-5"], "seed must be"),
        ([PROMPT, "--stop", ""], "stop must be"),
        ([PROMPT, "--max-model-len", "5000"], "max_model_len must be at most 2048"),
        ([PROMPT, "--max-model-len", "3"], "max_model_len is 3"),
        (["\udcff"], "U+DCFF"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["generate", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""  # not even the prompt
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("data, message", [(b"\xff\xfe", "not text: byte 0"), (b"", "standard input is empty")])
def test_bad_input(
    data: bytes, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A tokenizer that adds nothing, so that no text is no prompt.
    model = copy_model(tmp_path / "model")
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"post_processor": None}))
    monkeypatch.setattr(sys, "stdin", stdin_of(data))
    assert main(["generate", "-", "--model", str(model)]) == 1
    assert message in capsys.readouterr().err


def test_chat_with_a_model_that_has_no_template(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = copy_model(tmp_path / "model", tokenizer_config={"chat_template": None})
    assert main(["generate", "Who?", "--chat", "--model", str(model)]) == 1
    assert capsys.readouterr().err.startswith("error: this model's tokenizer has no chat template")


@pytest.mark.parametrize("arguments", [[], ["generate"], ["write"], ["generate", "a", "--max-tokens", "many"]])
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m llm")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["generate", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "generate" in out
    assert "(default: 128)" in out
    assert "offline-llm 0." in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_narrow_terminal_encoding_does_not_stop_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["generate", "Ω", *SHORT]) == 0
    screen.seek(0)
    assert screen.read().startswith("?")


def started(*arguments: str) -> subprocess.Popen[bytes]:
    return started_python("-m", "llm", "generate", PROMPT, *arguments)


def started_python(*arguments: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """A shell without job control starts `command &` with SIGINT ignored, and so does cron; children inherit it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


SCRIPT = """
from llm import LLM, SamplingParams
for piece in LLM().stream("In the beginning", SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)):
    print(end=piece, flush=True)
print("[done]")
"""


@pytest.mark.usefixtures("in_the_background")
@pytest.mark.parametrize("way", ["command", "script"])
def test_what_runs_in_the_background_ignores_ctrl_c(way: str) -> None:
    """The Ctrl-C is meant for what runs in the foreground of the same terminal."""
    command = ["-m", "llm", "generate", PROMPT, "--max-tokens", "150", "--temperature", "0"]
    process = started_python(*(command if way == "command" else ["-c", SCRIPT]))
    assert process.stdout and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 0, err.decode()
    assert b"interrupted" not in err.lower() and (b"[done]" in out if way == "script" else b"finish reason" in err)


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    process = started("--max-tokens", "2000")
    assert process.stdout and process.stderr
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_no_traceback() -> None:
    process = started("--max-tokens", "2000", "--temperature", "2", "--seed", "1")
    assert process.stdout and process.stderr
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert err == b"\ninterrupted\n"
    assert process.returncode == 130


def test_a_defect_of_ours_is_not_dressed_up_as_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_sampling_params", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["generate", PROMPT])


@pytest.mark.parametrize("command", [["generate"], ["chat", "folder"], ["run", "in.jsonl", "out.jsonl"]])
def test_several_logits_processors_in_one_option(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    rest = ["--logits_processors", "a:B", "c.d:E", *(["a: prompt"] if command == ["generate"] else [])]
    assert opened_with([*command, *rest], monkeypatch)["logits_processors"] == ["a:B", "c.d:E"]


def test_a_full_disk_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Closing it flushes what it holds, as Python's exit does.
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["generate", PROMPT, *SHORT]) == 1
    assert capsys.readouterr().err == "error: No space left on device.\n"


def test_a_logits_processor_and_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """What a request of vLLM's server carries in `vllm_xargs`; the option may come before the prompt, and again."""
    loaded = ["--logits_processors", "documented_processors:DummyLogitsProcessor"]
    more = ["--logits-processors", "documented_processors:WrappedPerReqLogitsProcessor"]
    assert main(["generate", *SHORT, *more, *loaded, PROMPT, "--extra-args", '{"target_token": 67}']) == 0
    with open_llm() as llm:
        forced = (
            run(llm, PROMPT, SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[67]))[0].outputs[0].text
        )
    assert capsys.readouterr().out == f"{PROMPT}{forced}\n"
    assert main(["generate", PROMPT, *SHORT, *loaded, "--extra-args", '{"target_token": "a"}']) == 1
    assert "target_token" in capsys.readouterr().err
    assert main(["generate", PROMPT, "--extra-args", "{"]) == 1
    assert "--extra-args must be JSON" in capsys.readouterr().err


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Those of the commands, and of their commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def greedy_options(parser: argparse.ArgumentParser) -> list[str]:
    """Options that take as many values as follow, and so a positional argument that comes after them."""
    positional = [action for action in parser._actions if not action.option_strings]
    options = [action for action in parser._actions if action.option_strings and action.nargs in ("+", "*")]
    return [option.option_strings[0] for option in options] if positional else []


def test_no_option_swallows_a_positional_argument() -> None:
    found = list(parsers(cli._parser()))
    assert len(found) > 6
    # Where one of these may have taken the model, the command says so.
    known = ["--api-key", "--served-model-name"]
    assert [option for parser in found for option in greedy_options(parser)] == known


def test_a_greedy_option_is_seen() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--many", nargs="+")
    assert greedy_options(parser) == []
    parser.add_argument("prompt")
    assert greedy_options(parser) == ["--many"]
