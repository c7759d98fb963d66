"""Loading as an equation, on toy models: every tensor used, every parameter filled once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from llm.errors import CheckpointError
from llm.loading.checkpoint import Checkpoint
from llm.loading.loader import load_weights


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
