"""Loading as an equation, on toy models: every tensor used, every parameter filled once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from llm.errors import CheckpointError
from llm.loading import loader
from llm.loading.checkpoint import Checkpoint
from llm.loading.loader import load_dummy_weights, load_weights


class Toy(nn.Module):
    renames = (("old", "new"),)

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(3, 2, bias=False)


def load(folder: Path, *names: str, shape: tuple[int, ...] = (2, 3)) -> Toy:
    tensors = {name: torch.full(shape, float(index)) for index, name in enumerate(names)}
    save_file(tensors, folder / "model.safetensors")
    model = Toy()
    with Checkpoint.open(folder) as checkpoint:
        load_weights(model, checkpoint, show_progress=False)
    return model


def test_the_bar_knows_how_many_bytes_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader, "_PROGRESS_DELAY_SECONDS", 0.0)
    save_file({"new.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        load_weights(Toy(), checkpoint, show_progress=True)
    assert "Loading weights:" in (shown := capsys.readouterr().err) and "/24.0" in shown


@pytest.mark.parametrize("name", ["old.weight", "new.weight"])
def test_a_parameter_is_filled_from_either_name(name: str, tmp_path: Path) -> None:
    assert load(tmp_path, name).new.weight.eq(0.0).all()


def test_a_parameter_that_two_tensors_fill_is_refused(tmp_path: Path) -> None:
    """Which of them would stay is the order of the file."""
    with pytest.raises(CheckpointError, match=r"parameters filled more than once: new\.weight\.$"):
        load(tmp_path, "old.weight", "new.weight")


def test_what_is_missing_and_what_is_too_much_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not have: other\.weight; parameters that no tensor fills: new\."):
        load(tmp_path, "other.weight")


def test_another_shape_is_refused_even_if_it_could_be_repeated(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor new\.weight has shape \[1, 3\], the model needs \[2, 3\]\.$"):
        load(tmp_path, "new.weight", shape=(1, 3))


def test_random_weights_are_small_integers_fit_4_bits_and_norms_are_one() -> None:
    model = nn.Module()
    model.dense, model.norm = nn.Linear(200, 50, bias=False), nn.LayerNorm(9, bias=False)
    model.codes = nn.Parameter(torch.zeros(50, 20, dtype=torch.int32), requires_grad=False)
    load_dummy_weights(model, 1)
    assert 0.018 < float(model.dense.weight.detach().std()) < 0.022 and bool((model.norm.weight == 1).all())
    assert set(model.codes.flatten().tolist()) == set(range(-8, 8))
