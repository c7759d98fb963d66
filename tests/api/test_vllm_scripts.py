"""Thirteen vLLM scripts run here after changing only their imports.

Each script of `vllm_scripts/` is one that vLLM runs when `llm` is replaced by `vllm` in its import lines and MODEL
names a model; here they run on the embedded model, in this process, and what they print is checked.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llm.config.arguments import ARGUMENTS

SCRIPTS = sorted((Path(__file__).parents[1] / "vllm_scripts").glob("*.py"))

# What vLLM has at the same path, with `vllm` for `llm`; of its names, those that the scripts may use.
VLLM_NAMES = {
    "llm": {
        "LLM",
        "SamplingParams",
        "TextPrompt",
        "TokensPrompt",
        "PromptType",
        "RequestOutput",
        "CompletionOutput",
        "EngineArgs",
    },
    "llm.utils.argparse_utils": {"FlexibleArgumentParser"},
    "llm.inputs": {"TextPrompt", "TokensPrompt", "PromptType"},
    "llm.outputs": {"RequestOutput", "CompletionOutput"},
    "llm.sampling_params": {"SamplingParams", "RequestOutputKind", "BeamSearchParams", "StructuredOutputsParams"},
}
VLLM_METHODS = {"generate", "chat", "get_default_sampling_params", "get_tokenizer", "beam_search"}
VLLM_ARGUMENTS = set(ARGUMENTS) - {"device", "verbose"}
SAMPLING_PARAMS = {
    *("n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "logprobs", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "output_kind"),
    *("extra_args", "structured_outputs"),
}

# What is written after a script's name.
ARGUMENTS_OF = {"command_line": ("--max_model_len", "128", "--enforce-eager", "--max-tokens=6", "--temperature", "0")}


def basic(printed: str) -> None:
    texts = re.findall(r"^Output:    (.+)$", printed, re.MULTILINE)
    assert len(texts) == 4
    assert all(len(text) > 2 for text in texts)


def batch_params(printed: str) -> None:
    counts = [(int(a), int(b)) for a, b in re.findall(r"^(\d+) of (\d+) tokens: ", printed, re.MULTILINE)]
    assert [limit for _, limit in counts] == [8, 12, 16, 20, 24]
    assert all(1 <= count <= limit for count, limit in counts)
    assert counts[-1] == (24, 24)


def chat(printed: str) -> None:
    first, then = printed.split("=" * 60)[:2]
    assert first.count("Generated text: ") == 1
    assert then.count("Generated text: ") == 3


def token_prompts(printed: str) -> None:
    assert "all the same: True" in printed
    assert printed.startswith("'In the beginning God created' [")
    assert printed.count("\nNone [") == 3
    decoded = re.search(r"^text: '', decoded: (.+)$", printed, re.MULTILINE)
    assert decoded and len(decoded[1]) > 2


def seeds_logprobs(printed: str) -> None:
    assert "repeatable: True" in printed
    assert int(re.findall(r"different samples: (\d)", printed)[0]) > 1
    sums = re.findall(r"cumulative logprob (-[\d.]+) = sum (-[\d.]+)", printed)
    assert len(sums) == 3
    assert all(float(a) == pytest.approx(float(b), abs=2e-4) for a, b in sums)
    assert printed.count(" rank 1: ") == 3


def stopping(printed: str) -> None:
    lines = re.findall(
        r"^(.+): (\d+) tokens, finish_reason=(\w+), stop_reason=(.+), text=['\"](.*)['\"]$", printed, re.MULTILINE
    )
    rows = {label: (int(count), finish, stop, text) for label, count, finish, stop, text in lines}
    assert rows["ignore_eos"][:3] == (24, "length", "None")
    _, finish, stop, text = rows["stop"]
    word = stop.strip("'\"")
    assert finish == "stop"
    assert word not in text
    assert rows["ignore_eos"][3].startswith(text + word)
    assert rows["stop, kept"][1:] == ("stop", stop, text + word)
    count, finish, stop, _ = rows["stop_token_ids"]
    assert (count <= 5, finish, stop.isdigit()) == (True, "stop", True)
    assert rows["min_tokens"][0] >= 16


def prefix_caching(printed: str) -> None:
    cached = [(int(a), int(b)) for a, b in re.findall(r"^(\d+) of (\d+) prompt tokens were cached", printed, re.M)]
    assert len(cached) == 4
    assert all(total / 2 < hit < total for hit, total in cached)
    assert "Generated answers are the same: True" in printed


def engine_args(printed: str) -> None:
    assert re.findall(r"^Prompt: '(.+)', Generated text: ['\"].+['\"]$", printed, re.MULTILINE) == [
        "The words of the prophet",
        "And the angel said",
    ]


def chat_template(printed: str) -> None:
    assert printed.count("same prompt as LLM.chat: True") == 2
    assert printed.count("same answer as LLM.chat: True") == 2
    assert "Who was Abraham?" in printed


def greedy_fields(printed: str) -> None:
    assert "deterministic: True" in printed
    assert printed.count("\nfinished: True\n") == printed.count("  finished(): True\n") == 3
    assert len(set(re.findall(r"^request_id: (.+)$", printed, re.MULTILINE))) == 3
    assert set(re.findall(r"^  finish_reason: '(\w+)'$", printed, re.MULTILINE)) <= {"stop", "length"}


def beam_search(printed: str) -> None:
    found = re.findall(r"^(-[\d.]+) (\d+) tokens: ['\"](.+)['\"]$", printed, re.MULTILINE)
    assert len(found) == 6
    assert all(text.startswith(("And Moses said unto", "In the beginning God")) for _, _, text in found)


def structured_outputs(printed: str) -> None:
    lines = dict(line.split(": ", 1) for line in printed.splitlines() if ": " in line)
    assert lines["choice"] in ("good", "evil")
    assert re.fullmatch("[a-z]+@[a-z]+[.]com", lines["regex"])
    assert set(json.loads(lines["json"])) == {"name", "age"}


def command_line(printed: str) -> None:
    assert len(re.findall(r"^Prompt: '.+'\nGenerated text: ['\"].+['\"]$", printed, re.MULTILINE)) == 3
    assert re.findall(r"^\d+ tokens at most$", printed, re.MULTILINE) == ["6 tokens at most"]


CHECKS: dict[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (
        *(basic, batch_params, chat, token_prompts, seeds_logprobs, stopping, prefix_caching, engine_args),
        *(command_line, chat_template, greedy_fields, beam_search, structured_outputs),
    )
}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.setattr(sys, "argv", [str(path), *ARGUMENTS_OF.get(path.stem, ())])
    runpy.run_path(str(path), run_name="__main__")
    CHECKS[path.stem](capsys.readouterr().out)


def test_there_are_thirteen() -> None:
    assert len(SCRIPTS) == 13
    assert {path.stem for path in SCRIPTS} == set(CHECKS)


def not_vllm(source: str) -> Iterator[str]:
    """What a script says that vLLM would not understand after `llm` is replaced by `vllm` in its imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "llm")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "llm":
            known = VLLM_NAMES.get(node.module or "", set())
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in known)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("LLM", "SamplingParams")
        ):
            known = VLLM_ARGUMENTS if node.func.id == "LLM" else SAMPLING_PARAMS
            yield from (f"{node.func.id}({word.arg}=)" for word in node.keywords if word.arg and word.arg not in known)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "llm":
            yield from () if node.attr in VLLM_METHODS else (f"llm.{node.attr}",)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_is_vllm_but_for_its_imports(path: Path) -> None:
    source = path.read_text()
    assert "from llm import LLM" in source
    assert list(not_vllm(source)) == []


def test_the_check_for_vllm_can_fail() -> None:
    source = """
import llm.api
from llm import LLM, register_model
from llm.engine import Engine
llm = LLM(verbose=True)
params = SamplingParams(best_of=2)
llm.stream("x", params)
"""
    assert sorted(not_vllm(source)) == [
        *("LLM(verbose=)", "SamplingParams(best_of=)", "llm.api", "llm.engine.Engine", "llm.register_model"),
        "llm.stream",
    ]
