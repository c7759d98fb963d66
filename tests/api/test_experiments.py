"""The logit lens and patching: their tables are what single calls give, and show as heat maps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kernel_sets import needs_kernels

from llm import LLM, Capture, Intervention, SamplingParams, ValidationError

pytest.importorskip("pandas")

CLEAN, CORRUPTED = "And Moses said unto", "And David said unto"
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def last_logits(llm: LLM, prompt: str, interventions: list[Intervention]) -> np.ndarray:
    capture = Capture("logits", "last")
    (output,) = llm.generate([prompt], ONE, capture=capture, interventions=interventions, use_tqdm=False)
    return output.activations["logits"][0].astype(np.float64)


def test_the_lens_ends_with_the_models_own_tokens(llm: LLM) -> None:
    lens = llm.logit_lens(CLEAN)
    (output,) = llm.generate([CLEAN], ONE, capture=Capture("logits", "prompt"), use_tqdm=False)
    own = output.activations["logits"].astype(np.float64)
    tokenizer = llm.get_tokenizer()
    assert list(lens.iloc[-1]) == [tokenizer.decode([number]) for number in own.argmax(-1)]
    assert list(lens.index) == [f"layers.{index}" for index in range(4)]
    assert len(lens.columns) == len(output.prompt_token_ids)
    chances = np.exp(own) / np.exp(own).sum(-1, keepdims=True)
    assert np.abs(np.array(lens.attrs["values"])[-1] - chances.max(-1)).max() < 1e-6
    of_token = llm.logit_lens(CLEAN, token=int(own[-1].argmax()))
    assert abs(of_token.iloc[-1, -1] - chances[-1].max()) < 1e-6
    assert (of_token.iloc[0] != of_token.iloc[-1]).any()


@needs_kernels
def test_a_cell_is_what_one_patch_gives(llm: LLM) -> None:
    def metric(logits: np.ndarray) -> float:
        return float(logits[5] - logits[7])

    sites = ["layers.1.output", "layers.2.mlp.output"]
    frame = llm.patch(CLEAN, CORRUPTED, sites, metric)
    (source,) = llm.generate([CLEAN], ONE, capture=Capture(sites, "prompt"), use_tqdm=False)
    for site in sites:
        values = source.activations[site]
        for place in (1, len(values) - 1):
            change = [Intervention.replace(site, values[place], [place])]
            assert frame.loc[site].iloc[place] == metric(last_logits(llm, CORRUPTED, change).astype(np.float32))
    assert frame.attrs["corrupted"] == metric(last_logits(llm, CORRUPTED, []).astype(np.float32))


def test_patching_the_end_gives_the_clean_answer(llm: LLM) -> None:
    frame = llm.patch(CLEAN, CORRUPTED, metric=(" the", " Moses"))
    assert frame.iloc[-1, -1] == pytest.approx(frame.attrs["clean"], abs=1e-4)
    assert frame.iloc[-1, 0] == pytest.approx(frame.attrs["corrupted"], abs=1e-4)  # nothing reads it any more
    assert frame.attrs["clean"] != pytest.approx(frame.attrs["corrupted"], abs=0.1)
    assert list(llm.patch(CLEAN, CORRUPTED, "layers.0.attention.output").index) == ["layers.0.attention.output"]


def test_a_table_shows_as_a_heat_map(llm: LLM) -> None:
    shown = llm.patch(CLEAN, CORRUPTED, "layers.3.output")._repr_html_()
    assert shown.count("<td") == len(llm.patch(CLEAN, CORRUPTED, "layers.3.output").columns)
    assert "rgba(" in shown and "clean" in shown


def test_mistakes_are_told(llm: LLM) -> None:
    with pytest.raises(ValidationError, match=r"clean has .* tokens and corrupted has"):
        llm.patch(CLEAN, CORRUPTED + " Moses")
    with pytest.raises(ValidationError, match="metric must be a callable"):
        llm.patch(CLEAN, CORRUPTED, metric="Moses")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"no site 'layers\.7\.output'"):
        llm.patch(CLEAN, CORRUPTED, "layers.7.output")
