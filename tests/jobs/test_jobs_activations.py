"""Activations of jobs: a file for each row, of the bits that a call gives, after an interruption too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llm import LLM, Capture, JobError, SamplingParams, ValidationError
from llm.jobs import job

PARAMS = SamplingParams(temperature=0, max_tokens=4)
PROMPTS = ["And Moses said", "In the beginning", "The king", "And the LORD spake unto"]
CAPTURE = Capture(["layers.1.output", "logits"], positions="all")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def run(llm: LLM, rows: Path, **more: Any) -> Path:
    folder = rows.with_name("activations")
    given = {"capture": CAPTURE, "capture_to": folder, "use_tqdm": False, **more}
    llm.run(rows, rows.with_name("out.jsonl"), PARAMS, **given)
    return folder


def check(llm: LLM, folder: Path) -> None:
    expected = llm.generate(PROMPTS, PARAMS, capture=CAPTURE, use_tqdm=False)
    assert sorted(path.name for path in folder.iterdir()) == [f"{index:08}.safetensors" for index in range(4)]
    for index, output in enumerate(expected):
        found = load_file(folder / f"{index:08}.safetensors")
        assert len(found) == 4
        for name, array in output.activations.items():
            assert np.array_equal(found[name], array)
            assert np.array_equal(found[f"{name}.positions"], output.activations.positions[name])


def test_a_file_for_each_row(llm: LLM, rows: Path) -> None:
    check(llm, run(llm, rows))


def test_an_interrupted_job_goes_on(llm: LLM, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = job.write_activations, []

    def fails(output: Any, folder: Path) -> None:
        if len(written) == 2:
            raise JobError("the disk is full")
        written.append(output.index)
        write(output, folder)

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_activations", fails)
        with pytest.raises(JobError, match="the disk is full"):
            run(llm, rows)
    folder = run(llm, rows, resume=True)
    check(llm, folder)


def test_mistakes_are_told(llm: LLM, rows: Path) -> None:
    with pytest.raises(ValidationError, match="capture_to must be given with capture"):
        run(llm, rows, capture_to=None)
    with pytest.raises(ValidationError, match="capture must be given with capture_to"):
        run(llm, rows, capture=None)
    with pytest.raises(ValidationError, match="no site 'layers"):
        run(llm, rows, capture=Capture("layers.9.output"))
    with pytest.raises(ValidationError, match="positions must be no callable"):
        run(llm, rows, capture=Capture("logits", positions=lambda at, prompt: True))
    params = SamplingParams(max_tokens=1, extra_args={"capture": "logits"})
    with pytest.raises(ValidationError, match="pass capture and capture_to"):
        llm.run(rows, rows.with_name("out.jsonl"), params, use_tqdm=False)
    rows.with_name("activations").mkdir()
    with pytest.raises(JobError, match="exists; delete it, or pass resume=True"):
        run(llm, rows)
