"""Towers compute large inputs in parts and with our activations; their features have the bits of the whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import images
import pytest
import torch
from kernel_sets import needs_kernels
from same_answers import same_values

from llm import LLM
from llm.base.construction import constructing_for
from llm.models.vision import modules
from llm.platforms import current_platform

pytest.importorskip("PIL")


# Of tiles, of tiles with hidden states of inner layers, and of one sequence.
@pytest.mark.parametrize("name", ["idefics3", "llava_next", "internvl", "qwen2_5_vl"])
def test_parts_have_the_bits_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images.write(name, tmp_path)
    monkeypatch.setattr(modules, "_ROWS", 7)
    with LLM(tmp_path, use_tqdm_on_load=False) as llm, torch.inference_mode():
        processor, tower = llm._preprocessor.images.processor, llm._engine.runner.images.tower
        inputs = processor.process(images.picture(60, 90), {}).inputs
        found = tower.features(inputs).rows
        parted = [module for module in tower.modules() if isinstance(module.__dict__.get("forward"), partial)]
        calls = []
        for module in parted:
            own = module.forward.args[0]  # type: ignore[union-attr]
            module.forward = lambda *args, own=own, **kwargs: (calls.append(1), own(*args, **kwargs))[1]
        assert same_values(tower.features(inputs).rows, found)
        assert len(calls) == len(parted) > 1


@needs_kernels
def test_an_activation_has_the_same_bits_with_any_number_of_threads() -> None:
    """PyTorch's differ where a thread's part ends within a vector."""
    x = torch.randn(1237, 83, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.GELU(), torch.nn.GELU("tanh"))
    with constructing_for(current_platform):
        modules.put_ours_in(model, torch.float32, None)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(model(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not any(type(part).__module__.startswith("torch") for part in model)
    expected = torch.nn.functional.gelu(torch.nn.functional.gelu(torch.nn.functional.silu(x)), approximate="tanh")
    assert torch.allclose(found[0], expected, atol=1e-5)


def layer(hidden: torch.Tensor, attention_mask: torch.Tensor | None, scale: Any = 1.0) -> torch.Tensor:
    seen = hidden if attention_mask is None else attention_mask @ hidden
    calls.append(len(hidden))
    return seen * scale


calls: list[int] = []
NAMES = ["hidden", "attention_mask", "scale"]


def test_a_layer_takes_pictures_by_themselves_where_it_knows_all_that_it_is_given() -> None:
    draw = torch.Generator().manual_seed(2)
    hidden, masks = torch.randn(3, 4, 5, generator=draw), torch.randn(3, 4, 4, generator=draw)
    for mask in (None, masks, masks[:1]):
        expected = layer(hidden, mask)
        calls.clear()
        assert torch.equal(modules._by_pictures(layer, NAMES, hidden, mask), expected)
        assert torch.equal(modules._by_pictures(layer, NAMES, hidden, attention_mask=mask), expected)
        assert calls == [1] * 6
    calls.clear()
    tables = torch.randn(4, 1, generator=draw)  # of positions: whose they are is not known
    assert torch.equal(modules._by_pictures(layer, NAMES, hidden, None, (tables,)[0]), hidden * tables)
    assert torch.equal(modules._by_pictures(layer, NAMES, hidden, None, scale=tables), hidden * tables)
    assert calls == [3, 3]
