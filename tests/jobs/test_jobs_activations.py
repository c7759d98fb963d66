"""Activations of jobs: a file for each row, of the bits that a call gives, after an interruption too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from same_answers import same_values

from llm import LLM, Capture, CompletionOutput, JobError, RequestOutput, SamplingParams, ValidationError
from llm.inside.capture import Activations
from llm.jobs import job
from llm.jobs.tables import write_activations

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
            assert same_values(found[name], array)
            assert np.array_equal(found[f"{name}.positions"], output.activations.positions[name])


def test_a_file_for_each_row(llm: LLM, rows: Path) -> None:
    check(llm, run(llm, rows))


def test_arrow_files_are_tables(llm: LLM, rows: Path) -> None:
    """A record for each position; what was not captured at one is null; patterns are lists."""
    pytest.importorskip("pyarrow")
    import pyarrow.dataset as dataset
    from pyarrow import ipc

    pattern = Capture("layers.0.attention.pattern", positions=[0, -1])
    params = SamplingParams(temperature=0, max_tokens=3, n=2, extra_args=None)
    asked = Capture(["layers.1.output", "layers.0.attention.heads"], positions="all")
    folder = run(llm, rows, capture=asked, capture_format="arrow")
    expected = llm.generate(PROMPTS, PARAMS, capture=asked, use_tqdm=False)
    assert sorted(path.name for path in folder.iterdir()) == [f"{index:08}.arrow" for index in range(4)]
    table = dataset.dataset(folder, format="arrow").to_table()
    for index, output in enumerate(expected):
        own = ipc.open_file(folder / f"{index:08}.arrow").read_all()
        assert own["row"].unique().to_pylist() == [index] and own["completion"].unique().to_pylist() == [0]
        for name, array in output.activations.items():
            assert own["position"].to_pylist() == output.activations.positions[name].tolist()
            assert np.array_equal(own[name].combine_chunks().to_numpy_ndarray(), array)
    assert len(table) == sum(len(output.activations["layers.1.output"]) for output in expected)
    given = {"capture": pattern, "capture_to": rows.with_name("patterns"), "capture_format": "arrow"}
    llm.run(rows, rows.with_name("more.jsonl"), params, **given, use_tqdm=False)
    (first, *_) = llm.generate(PROMPTS[:1], params, capture=pattern, use_tqdm=False)
    found = ipc.open_file(rows.with_name("patterns") / "00000000.arrow").read_all()
    assert found["completion"].to_pylist() == [0, 0, 1, 1]
    kept = first.outputs[1].activations["layers.0.attention.pattern"]
    assert np.array_equal(np.array(found["layers.0.attention.pattern"].to_pylist()[2:], np.float32), kept)


def test_a_site_that_was_not_captured_at_a_position_is_null(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    found = Activations({"a": np.array([5]), "b": np.array([2, 5])})
    found |= {"a": np.ones((1, 2), np.float16), "b": np.array([[3], [4]])}
    completion = CompletionOutput(0, "", [1], activations=found)
    write_activations(RequestOutput("7", None, [1], [completion], True, index=7), tmp_path, "arrow")
    table = arrow.ipc.open_file(tmp_path / "00000007.arrow").read_all()
    assert table["position"].to_pylist() == [2, 5] and table["row"].to_pylist() == [7, 7]
    assert table["a"].null_count == 1 and table["a"].to_pylist()[1] == [1, 1]
    assert table["b"].combine_chunks().to_numpy_ndarray().tolist() == [[3], [4]]


def test_an_interrupted_job_goes_on(llm: LLM, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = job.write_activations, []

    def fails(output: Any, folder: Path, format: str) -> None:
        if len(written) == 2:
            raise JobError("the disk is full")
        written.append(output.index)
        write(output, folder, format)

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_activations", fails)
        with pytest.raises(JobError, match="the disk is full"):
            run(llm, rows)
    with pytest.raises(JobError, match="has safetensors files; resume with capture_format='safetensors'"):
        run(llm, rows, resume=True, capture_format="arrow")
    folder = run(llm, rows, resume=True)
    check(llm, folder)


def test_mistakes_are_told(llm: LLM, rows: Path) -> None:
    with pytest.raises(ValidationError, match="capture_to must be given with capture"):
        run(llm, rows, capture_to=None)
    with pytest.raises(ValidationError, match="capture must be given with capture_to"):
        run(llm, rows, capture=None)
    with pytest.raises(ValidationError, match="capture_format must be 'safetensors' or 'arrow', got 'npz'"):
        run(llm, rows, capture_format="npz")
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
