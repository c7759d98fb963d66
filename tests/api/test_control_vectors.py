"""Control vectors: fitted ones steer, files are llama.cpp's and repeng's, and what is wrong with one is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llm import LLM, Capture, CheckpointError, ControlVector, SamplingParams, ValidationError

gguf = pytest.importorskip("gguf")

POSITIVE = ["And the LORD said", "Thus saith the LORD", "The LORD spake unto Moses"]
NEGATIVE = ["And the king said", "Thus saith the king", "The king spake unto Moses"]
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


@pytest.fixture(scope="module")
def fitted(llm: LLM) -> ControlVector:
    return ControlVector.fit(llm, POSITIVE, NEGATIVE, method="mean")


def hidden(llm: LLM, prompts: list[str], layer: int) -> np.ndarray:
    site = f"layers.{layer}.output"
    outputs = llm.generate(prompts, PARAMS, capture=Capture(site), use_tqdm=False)
    return np.stack([output.activations[site][0] for output in outputs]).astype(np.float64)


def test_the_mean_is_that_of_the_differences(llm: LLM, fitted: ControlVector) -> None:
    assert list(fitted.directions) == [1, 2, 3] and fitted.model_hint == llm.model_config.model_type
    expected = hidden(llm, POSITIVE, 2).mean(0) - hidden(llm, NEGATIVE, 2).mean(0)
    assert np.abs(fitted.directions[2] - expected).max() < 1e-5


def test_pca_is_the_first_component(llm: LLM) -> None:
    """Of the centred differences, by their covariance; towards `positive`."""
    vector = ControlVector.fit(llm, POSITIVE, NEGATIVE, layers=[2])
    differences = hidden(llm, POSITIVE, 2) - hidden(llm, NEGATIVE, 2)
    centred = differences - differences.mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    assert abs(abs(vectors[:, -1] @ vector.directions[2]) - 1) < 1e-4 and values[-1] > values[-2]
    assert ((differences @ vector.directions[2]) > 0).sum() >= 2


def test_it_steers_and_its_opposite_steers_back(llm: LLM, fitted: ControlVector) -> None:
    """With a strength of 1, what the last layer has of `negative` becomes on average what it has of `positive`."""
    one = ControlVector.fit(llm, POSITIVE, NEGATIVE, method="mean", layers=[3])
    site, towards = "layers.3.output", one.directions[3]
    steered = llm.generate(NEGATIVE, PARAMS, interventions=one.at(1.0), capture=Capture(site), use_tqdm=False)
    moved = np.stack([output.activations[site][0] for output in steered]) - hidden(llm, NEGATIVE, 3)
    assert np.abs(moved - towards).max() < 1e-4
    same = llm.generate(NEGATIVE, PARAMS, interventions=[*one.at(1.0), *(-one).at(1.0)], use_tqdm=False)
    plain = llm.generate(NEGATIVE, PARAMS, use_tqdm=False)
    assert [output.outputs[0].text for output in same] == [output.outputs[0].text for output in plain]
    far = llm.generate(NEGATIVE, PARAMS, interventions=fitted.at(20.0), use_tqdm=False)
    assert [output.outputs[0].text for output in far] != [output.outputs[0].text for output in plain]


def test_arithmetic(fitted: ControlVector) -> None:
    both = fitted + 2 * fitted - fitted
    assert np.allclose(both.directions[1], 2 * fitted.directions[1], atol=1e-5)
    assert len(fitted.at(0.5, layers=[1, 3])) == 2


def test_files_of_repeng_are_read(tmp_path: Path) -> None:
    """Written with the `gguf` package, as repeng does."""
    path = tmp_path / "vector.gguf"
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "mistral")
    writer.add_uint32("controlvector.layer_count", 2)
    rows = {layer: np.random.default_rng(layer).normal(size=8).astype(np.float32) for layer in (7, 3)}
    for layer, row in rows.items():
        writer.add_tensor(f"direction.{layer}", row)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    vector = ControlVector.load(path)
    assert vector.model_hint == "mistral" and list(vector.directions) == [3, 7]
    assert all(np.array_equal(vector.directions[layer], row) for layer, row in rows.items())


def test_what_is_saved_the_gguf_package_reads(fitted: ControlVector, tmp_path: Path) -> None:
    path = fitted.save(tmp_path / "own.gguf")
    found = gguf.GGUFReader(path)
    assert str(bytes(found.get_field("general.architecture").parts[-1]), "utf-8") == "controlvector"
    tensors = {tensor.name: np.array(tensor.data) for tensor in found.tensors}
    assert tensors.keys() == {f"direction.{layer}" for layer in fitted.directions}
    again = ControlVector.load(path)
    for layer, own in fitted.directions.items():
        assert np.array_equal(tensors[f"direction.{layer}"], own) and np.array_equal(again.directions[layer], own)


def test_mistakes_are_told(llm: LLM, fitted: ControlVector, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a GGUF file, but a text that is long enough")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        ControlVector.load(tmp_path / "text.gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"general\.architecture 'llama', a control vector has"):
        ControlVector.load(tmp_path / "model.gguf")
    with pytest.raises(ValidationError, match=r"negative must be as many as positive \(3\)"):
        ControlVector.fit(llm, POSITIVE, NEGATIVE[:1])
    with pytest.raises(ValidationError, match=r"layers must be of those that the vector has, \[1, 2, 3\]"):
        fitted.at(1.0, layers=[9])
    with pytest.raises(ValidationError, match=r"vector must be of the shape of layers\.1\.output"):
        llm.generate("a", PARAMS, interventions=ControlVector({1: np.ones(3, np.float32)}).at(1.0), use_tqdm=False)
    with pytest.raises(ValidationError, match=r"llama\.cpp refuses layer 0"):
        ControlVector({0: np.ones(3, np.float32)}).save(tmp_path / "zero.gguf")
