"""Calibration: layers computed one after the other give a whole model's statistics, in the memory of one of them."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm
from tiny_models import tiny_checkpoint

from llm import LLM
from llm.quantization.on_load import ActivationStatistics
from llm.runner import layerwise
from llm.runner.inspection import _InputSums
from llm.setup import calibrate

TEXT = (Path(__file__).parents[1] / "fixtures/held_out.txt").read_text("utf-8")[:2000]
ONE_BY_ONE, WHOLE = "one unquantized layer after the other", "the whole unquantized model"


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibrate, "_folder", lambda: tmp_path)
    monkeypatch.setattr(calibrate, "_TEXTS", 3)
    monkeypatch.setattr(calibrate, "_TOKENS", 40)


def bits(llm: LLM) -> dict[str, list[torch.Tensor]]:
    """Of all packed weights."""
    modules = engine_of(llm).runner.model.named_modules()
    held = {name: getattr(module, "packed_weight", None) for name, module in modules}
    return {
        name: [part.clone() for part in one.memory().values() if part is not None] for name, one in held.items() if one
    }


def same(left: dict[str, list[torch.Tensor]], right: dict[str, list[torch.Tensor]]) -> bool:
    assert left and left.keys() == right.keys()
    return all(torch.equal(*pair) for name in left for pair in zip(left[name], right[name], strict=True))


def ask_for_whole(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(layerwise, "_why_whole", lambda plan, model: "the test asks for it")


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama-tied", ONE_BY_ONE),
        ("gemma3", ONE_BY_ONE),  # groups of blocks
        ("granitemoehybrid", ONE_BY_ONE),  # recurrent states, attention and experts
        ("gemma3n", f"{WHOLE}, as its layers do not run one after the other"),
        ("codegen", f"{WHOLE}, as some of its weights are made of several"),
        ("opt-normed-sums", f"{WHOLE}, as a linear layer comes after the last"),
    ],
)
def test_layers_one_by_one_have_the_bits_of_a_whole_model(
    family: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In steps that cut texts, with blocks and slots that several texts have."""
    folder = tiny_checkpoint(family, tmp_path_factory)
    options: dict[str, Any] = {"quantization": "w4a16", "skip_tokenizer_init": True}
    options |= {"max_num_batched_tokens": 32, "max_num_seqs": 2}
    with open_llm(folder, calibration="auto", **options) as llm:
        found = bits(llm)
        assert how in llm.config.reasons["quantization"]
    with monkeypatch.context() as patched:
        ask_for_whole(patched)
        with open_llm(folder, calibration="auto", **options) as llm:
            assert WHOLE in llm.config.reasons["quantization"]
            assert same(found, bits(llm))
    with open_llm(folder, **options) as llm:
        assert not same(found, bits(llm))


@pytest.mark.parametrize("options", [{}, {"runner": "pooling", "convert": "embed"}])
def test_texts_and_vectors(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"quantization": "w8a8_static", "calibration": [TEXT], "max_model_len": 256, **options}
    with open_llm(**options) as llm:
        found = bits(llm)
        assert ONE_BY_ONE in llm.config.reasons["quantization"]
    ask_for_whole(monkeypatch)
    with open_llm(**options) as llm:
        assert WHOLE in llm.config.reasons["quantization"] and same(found, bits(llm))


class Watched:
    """What is in memory whenever a part of the unquantized model has been read.

    Attributes:
        live: bytes of all such parts, and of the last.
        statistics: of how many layers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live: list[tuple[int, int]] = []
        self.statistics: list[int] = []
        self._parts: list[Any] = []
        self._sums: list[weakref.ref[torch.Tensor]] = []
        self._load, self._finished = layerwise.load_weights, _InputSums.statistics
        monkeypatch.setattr(layerwise, "load_weights", self._loaded)
        monkeypatch.setattr(_InputSums, "statistics", lambda sums: self._found(sums))

    def _loaded(self, model: Any, tensors: Any, **options: Any) -> Any:
        targets = self._load(model, tensors, **options)
        self._parts.append(model.get_submodule(options["part"]))
        sizes = [sum(parameter.nbytes for parameter in part.parameters()) for part in self._parts]
        self.live.append((sum(sizes), sizes[-1]))
        self.statistics.append(self.held())
        return targets

    def _found(self, sums: _InputSums) -> ActivationStatistics:
        statistics = self._finished(sums)
        self._sums.append(weakref.ref(statistics.moments[0]))
        return statistics

    def held(self) -> int:
        """Of how many layers there are statistics now."""
        return sum(each() is not None for each in self._sums)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory)


def test_one_layer_is_in_memory_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's unquantized weights, and its statistics."""
    options: dict[str, Any] = {"quantization": "w4a16", "calibration": "auto", "skip_tokenizer_init": True}
    with monkeypatch.context() as patched:
        found = Watched(patched)
        with open_llm(folder, **options):
            assert found.held() == 0
    embedding, norm, *layers = found.live
    assert embedding[0] == embedding[1] > 0 and norm[0] == embedding[0] + norm[1]
    assert len(layers) == 3 and all(live == own > 0 for live, own in layers)
    assert found.statistics == [0] * 5
    # The controls: weights are not freed, statistics are of a whole model.
    with monkeypatch.context() as patched:
        patched.setattr(layerwise, "_free_parameters", lambda module: None)
        found = Watched(patched)
        with open_llm(folder, **options):
            assert found.live[-1][0] > 3 * found.live[-1][1]
    ask_for_whole(monkeypatch)
    found = Watched(monkeypatch)
    with open_llm(folder, **options):
        assert found.held() == 3 * 4


def test_texts_whose_hidden_states_are_larger_than_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"quantization": "w4a16", "calibration": "auto", "skip_tokenizer_init": True}
    monkeypatch.setattr(calibrate, "_TEXTS", 16)
    monkeypatch.setattr(calibrate, "_TOKENS", 200)
    with open_llm(folder, **options) as llm:
        assert f"{WHOLE}, as the hidden states of these texts" in llm.config.reasons["quantization"]


def test_weights_that_are_read_again_are_calibrated_again(folder: Path) -> None:
    options: dict[str, Any] = {"quantization": "w4a8", "calibration": "auto", "skip_tokenizer_init": True}
    with open_llm(folder, **options) as llm:
        found = bits(llm)
        assert ONE_BY_ONE in llm.config.reasons["quantization"]
        llm.sleep(level=2)
        llm.wake_up()
        assert same(found, bits(llm))
