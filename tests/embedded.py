"""Helpers for tests of the API on the embedded model: opening it, and the invariants between calls.

Tests that use it assert properties of the engine, not the content of the model's text.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from llm import LLM, RequestOutput, SamplingParams
from llm.llm import EMBEDDED_MODEL
from llm.runner.model_runner import ModelRunner

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["In the beginning", "And the LORD said unto Moses", "The king"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12)


@contextmanager
def open_llm(*args: Any, **kwargs: Any) -> Iterator[LLM]:
    """An `LLM` on one thread: for a model this small more threads are slower.

    It drafts no tokens unless asked to. By default it would when measured times say so, and tests count steps.
    """
    kwargs.setdefault("speculative_config", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with LLM(*args, **kwargs) as llm:
            yield llm
    finally:
        torch.set_num_threads(threads)


def run(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The token ids of each output's first completion."""
    return [output.outputs[0].token_ids for output in outputs]


def engine_of(llm: LLM) -> Any:
    engine: Any = llm._engine
    return engine


def free_blocks(llm: LLM) -> list[int]:
    return [len(pool.free) for pool in engine_of(llm).scheduler.blocks.pools]


def interrupt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that Ctrl-C ends in this process's forward."""

    def interrupted(self: ModelRunner, batch: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPTS)


def assert_idle(llm: LLM) -> None:
    """Assert that there is no request, that every block is free, and that the scheduler is consistent."""
    engine = engine_of(llm)
    engine.scheduler.check_integrity()
    assert not engine.scheduler.requests
    assert not engine._completions
    assert free_blocks(llm) == [llm.config.cache_config.num_blocks] * len(free_blocks(llm))


def copy_model(folder: Path, **files: dict[str, Any]) -> Path:
    """A copy of the embedded model; `config=` and `generation_config=` change keys of those files."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in EMBEDDED_MODEL.glob("*"):
        if path.suffix in {".json", ".safetensors", ".jinja"}:
            shutil.copy(path, folder / path.name)
    for name, changes in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def python(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that imports this checkout, from an empty environment as far as this project reads one."""
    kept = {name: value for name, value in os.environ.items() if name != "LLM_LOG_LEVEL" and not name.startswith("HF_")}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    command = [sys.executable, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300, **options)
