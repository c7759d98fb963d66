"""What a first answer costs and touches: imports, the network, the terminal, the environment."""

from __future__ import annotations

import ast
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from embedded import GREEDY, PROMPTS, copy_model, engine_of, open_llm, python, run

from llm import LLM, ValidationError
from llm.config import env
from llm.errors import CheckpointError
from llm.platforms.cpu import CpuPlatform

SCRIPT = """
import sys
events = []
sys.addaudithook(lambda event, args: events.append(event))
from llm import LLM, SamplingParams
import torch  # it looks around as it is imported; what is counted begins here
del events[:]
with LLM() as llm:
    llm.generate(["In the beginning", "And"], SamplingParams(max_tokens=4, stop="zzz", logprobs=1), use_tqdm=True)
    for _ in llm.stream("In", SamplingParams(max_tokens=3)): pass
    {more}
modules = [name for name in sys.modules if "." not in name]
kinds = ("socket.", "subprocess.", "os.fork", "os.exec", "pickle.")
suspicious = [event for event in events if event.startswith(kinds)]
print([modules, suspicious])
"""


def after(more: str) -> tuple[set[str], set[str]]:
    """The modules that are loaded and the audit events of network, processes and pickle, once a script has run."""
    result = python("-c", SCRIPT.replace("{more}", more))
    assert result.returncode == 0, result.stderr
    modules, suspicious = ast.literal_eval(result.stdout)
    return set(modules), set(suspicious)


def test_generate_imports_no_transformers_and_opens_nothing() -> None:
    modules, suspicious = after("pass")
    assert {"torch", "tokenizers", "safetensors"} <= modules
    assert not modules & {"transformers", "jinja2", "huggingface_hub", "pandas", "IPython", "matplotlib", "requests"}
    assert suspicious == set()


def test_what_is_looked_for_would_be_seen() -> None:
    chat = 'llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=2), use_tqdm=False)'
    others = "import socket, pickle; socket.socket().close(); pickle.loads(pickle.dumps(llm.stats()))"
    modules, suspicious = after(f"{chat}; {others}")
    assert "transformers" in modules
    assert {"socket.__new__", "pickle.find_class"} <= suspicious


def test_a_local_folder_needs_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)  # importing it fails
    with open_llm() as llm:
        assert len(run(llm, PROMPTS)) == 3


def test_offline_is_respected(tmp_path: Path) -> None:
    script = "from llm import LLM\ntry:\n LLM('some-org/some-model')\nexcept Exception as e: print(type(e).__name__, e)"
    result = python("-c", script, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    assert result.stdout.startswith("CheckpointError 'some-org/some-model' "), result.stderr
    assert "HF_HUB_OFFLINE" in result.stdout


# The terminal


def test_nothing_is_printed_unless_asked(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm() as llm:
        run(llm, PROMPTS)
        list(llm.stream(PROMPTS[0], GREEDY))
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("llm.engine.progress._DELAY_SECONDS", 0.0)
    with open_llm() as llm:
        llm.generate(PROMPTS, GREEDY)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Generating" in err


def test_verbose_tells_what_was_decided(caplog: pytest.LogCaptureFixture) -> None:
    with open_llm(gpu_memory_utilization=0.5):
        assert not caplog.records
    with open_llm(gpu_memory_utilization=0.5, verbose=True):
        assert "gpu_memory_utilization: " in caplog.text
        assert "max_model_len " in caplog.text
    logging.getLogger("llm").setLevel(logging.NOTSET)


# The environment


@pytest.mark.parametrize("value", ["loud", "10", "debug info"])
def test_a_malformed_log_level_raises(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LLM_LOG_LEVEL", value)
    with pytest.raises(ValidationError, match=r"LLM_LOG_LEVEL=.*use one of DEBUG, INFO, WARNING, ERROR"):
        LLM()


@pytest.mark.parametrize("name", [name for name in env.VARIABLES if name != "LLM_OFFLOAD_FOLDER"])
def test_a_malformed_value_of_any_variable_raises(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also of one that only huggingface_hub reads, or only a plugin that fails."""
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ValidationError, match=f"{name}.*'maybe'"):
        LLM()


def test_a_folder_for_weights_that_cannot_be_made_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for named in (tmp_path / "file", tmp_path / "file" / "inner"):
        monkeypatch.setenv("LLM_OFFLOAD_FOLDER", str(named))
        with pytest.raises(ValidationError, match=r"LLM_OFFLOAD_FOLDER=.*file', which is no folder"):
            LLM()
    monkeypatch.setenv("LLM_OFFLOAD_FOLDER", str(tmp_path / "to" / "be" / "made"))
    open_and_close()


def test_a_misspelt_variable_is_told_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Those of other programs are none of our business."""
    env._warn_of.cache_clear()
    for name in ("LLM_PLUGIN", "LLM_MODEL", "LLM_API_KEY", "MY_LLM_PLUGINS"):
        monkeypatch.setenv(name, "x")
    open_and_close()
    open_and_close()
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable LLM_PLUGIN is not known; did you mean LLM_PLUGINS?"
    ]


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("llm")
    monkeypatch.setattr(logger, "level", logger.level)
    logger.setLevel(logging.CRITICAL)
    open_and_close()
    assert logger.level == logging.CRITICAL  # a program's own setting stands
    monkeypatch.setenv("LLM_LOG_LEVEL", "debug")
    open_and_close()
    assert logger.level == logging.DEBUG
    logger.setLevel(logging.NOTSET)


def open_and_close(**kwargs: Any) -> None:
    LLM(**kwargs).close()


def test_neither_environment_nor_handlers_are_changed() -> None:
    before = dict(os.environ), list(logging.getLogger().handlers), list(logging.getLogger("llm").handlers)
    with open_llm() as llm:
        run(llm, PROMPTS)
    after = dict(os.environ), list(logging.getLogger().handlers), list(logging.getLogger("llm").handlers)
    assert after == before


def test_the_model_may_stand_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_model(tmp_path / "a model")
    monkeypatch.chdir(tmp_path)
    with open_llm("a model") as by_name, open_llm(Path("a model")) as by_path:
        assert run(by_name, "In")[0].outputs == run(by_path, "In")[0].outputs
    monkeypatch.setenv("HOME", str(tmp_path))
    open_and_close(model="~/a model")
    with pytest.raises(CheckpointError, match="does not exist"):
        LLM(Path("org/name"))  # a Path is a folder, never a name of the hub


def test_rotary_tables_take_a_small_part_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkpoint may claim ten million positions."""
    folder = copy_model(tmp_path / "long", config={"max_position_embeddings": 10_000_000})
    monkeypatch.setattr(CpuPlatform, "memory_free", lambda self: 8 << 30)
    with open_llm(folder, kv_cache_memory_bytes=3 << 28, max_num_seqs=1) as llm:
        longest, reason = llm.config.model_config.max_model_len, llm.config.reasons["max_model_len"]
        buffers: Any = engine_of(llm).runner.model.named_buffers()
        tables = {item.data_ptr(): item.nbytes for name, item in buffers if "cos_sin" in name}
    assert (16 << 20) // 2 < sum(tables.values()) <= (8 << 30) // 128
    assert longest < 10_000_000 and "the model's maximum is 10000000" in reason
