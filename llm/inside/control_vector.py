"""Control vectors: a direction for each layer, which steers answers towards one kind of text and away from another.

The file is llama.cpp's and repeng's: GGUF with `general.architecture` "controlvector" and tensors "direction.N",
float32 [channels], added behind layer N. Layers are numbered as `layers.N.output` is, from 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from llm.base.checks import check_choice, is_real, refuse
from llm.base.text import show
from llm.errors import CheckpointError, ValidationError
from llm.inside.capture import Capture
from llm.inside.intervention import Intervention
from llm.inside.names import Positions, matching
from llm.loading.gguf.container import Planned, Value, read_header, write_gguf
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.llm import LLM

_ARCHITECTURE = "controlvector"
_NAME = re.compile(r"direction\.(\d{1,6})")
Pairs = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class ControlVector:
    """Directions by layer; `llm.generate(prompts, interventions=vector.at(1.5))`.

    Attributes:
        directions: layer -> float32 [channels].
        model_hint: the model's type, "llama"; "": not known.
    """

    directions: Mapping[int, np.ndarray]
    model_hint: str = ""

    def __post_init__(self) -> None:
        sizes = {array.shape for array in self.directions.values()}
        if not self.directions or len(sizes) != 1 or len(next(iter(sizes))) != 1:
            refuse("directions", sorted(sizes), "arrays of one size, one for each layer")

    @classmethod
    def load(cls, path: str | Path) -> ControlVector:
        """Read a file of llama.cpp or repeng.

        Raises:
            CheckpointError: it is no GGUF file, or no control vector.
        """
        header = read_header(Path(path))
        found = header.metadata.get("general.architecture")
        if found != _ARCHITECTURE:
            raise CheckpointError(
                f"{path} has general.architecture {show(found)}, a control vector has {_ARCHITECTURE!r}."
            )
        directions: dict[int, np.ndarray] = {}
        for tensor in header.tensors:
            layer = _NAME.fullmatch(tensor.name)
            if layer is None or tensor.type != "F32" or len(tensor.shape) != 1:
                raise CheckpointError(
                    f"{path}: {show(tensor.name)} is {tensor.type} {list(tensor.shape)}; the tensors of a control "
                    "vector are 'direction.N', F32 of one dimension."
                )
            with open(path, "rb") as file:
                file.seek(tensor.start)
                directions[int(layer[1])] = np.frombuffer(file.read(tensor.nbytes), dtype="<f4").copy()
        hint = header.metadata.get(f"{_ARCHITECTURE}.model_hint", "")
        try:
            return cls(dict(sorted(directions.items())), hint if isinstance(hint, str) else "")
        except ValidationError as error:
            raise CheckpointError(f"{path} is no control vector: {error}") from error

    @classmethod
    def fit(
        cls,
        llm: LLM,
        positive: Sequence[object],
        negative: Sequence[object],
        *,
        method: str = "pca",
        layers: Sequence[int] | None = None,
    ) -> ControlVector:
        """Train one: the direction from what the model computes at the last token of `negative` to that of `positive`.

        Args:
            positive: prompts, of which number i differs from `negative[i]` in what the vector is to be of alone.
            negative: as many.
            method: "mean": the mean of the differences, of their length, so that a strength of 1 goes from one kind to
                the other; "pca": the first principal component of the differences, of length 1, as repeng has it.
            layers: None: all but the first, of which llama.cpp's file has none.

        Raises:
            ValidationError: the prompts are not pairs, or "pca" has fewer than two.
        """
        check_choice("method", method, ("pca", "mean"))
        if len(positive) != len(negative) or len(positive) < (2 if method == "pca" else 1):
            refuse(
                "negative", f"{len(negative)} prompts", f"as many as positive ({len(positive)}), two or more for pca"
            )
        behind = matching("layers.*.output", llm.sites())
        sites = (behind[1:] or behind) if layers is None else [f"layers.{layer}.output" for layer in layers]
        outputs = llm.generate(
            [*positive, *negative],
            SamplingParams(temperature=0, max_tokens=1),
            capture=Capture(sites, positions="last"),
            use_tqdm=False,
        )
        found = [output.activations for output in outputs if output.activations is not None]
        make = _METHODS[method]
        directions = {}
        for name in found[0]:
            hidden = np.stack([own[name][0].reshape(-1) for own in found]).astype(np.float64)
            pairs = hidden[: len(positive)], hidden[len(positive) :]
            directions[int(name.split(".")[1])] = make(pairs).astype(np.float32)
        return cls(directions, llm.model_config.model_type)

    def save(self, path: str | Path) -> Path:
        """Write it for llama.cpp, repeng and `load`. llama.cpp reads no direction of layer 0, so it has to be left out.

        Raises:
            ValidationError: there is a direction of layer 0, or the file exists.
        """
        path = Path(path)
        if 0 in self.directions:
            refuse("directions", 0, "of layers from 1 on in a file: llama.cpp refuses layer 0; pass `layers` to fit")
        if path.exists():
            refuse("path", str(path), "of a file that does not exist")
        planned = [Planned(f"direction.{layer}", "F32", own.shape) for layer, own in self.directions.items()]
        metadata: dict[str, Value] = {
            "general.architecture": _ARCHITECTURE,
            f"{_ARCHITECTURE}.model_hint": self.model_hint,
            f"{_ARCHITECTURE}.layer_count": len(planned),
        }
        write_gguf(path, metadata, planned, (torch.from_numpy(own) for own in self.directions.values()))
        return path

    def at(
        self, strength: float = 1.0, *, layers: Sequence[int] | None = None, positions: Positions = "all"
    ) -> list[Intervention]:
        """The interventions that add `strength` times each direction; `layers`: of these alone."""
        if not is_real(strength) or not np.isfinite(strength):
            refuse("strength", strength, "a finite number")
        unknown = [layer for layer in layers or () if layer not in self.directions]
        if unknown:
            refuse("layers", unknown, f"of those that the vector has, {list(self.directions)}")
        return [
            Intervention.add(f"layers.{layer}.output", own, strength, positions)
            for layer, own in self.directions.items()
            if layers is None or layer in layers
        ]

    def __add__(self, other: ControlVector) -> ControlVector:
        layers = sorted({*self.directions, *other.directions})
        zero = np.zeros_like(next(iter(self.directions.values())))
        summed = {n: self.directions.get(n, zero) + other.directions.get(n, zero) for n in layers}
        return ControlVector(summed, self.model_hint or other.model_hint)

    def __mul__(self, factor: float) -> ControlVector:
        scaled = {layer: (own * factor).astype(np.float32) for layer, own in self.directions.items()}
        return ControlVector(scaled, self.model_hint)

    __rmul__ = __mul__

    def __neg__(self) -> ControlVector:
        return self * -1.0

    def __sub__(self, other: ControlVector) -> ControlVector:
        return self + -other


def _mean(pairs: Pairs) -> np.ndarray:
    return np.asarray((pairs[0] - pairs[1]).mean(axis=0))


def _first_component(pairs: Pairs) -> np.ndarray:
    """Of the differences, about their mean; its sign is that by which more of `positive` lies further along."""
    differences = pairs[0] - pairs[1]
    centred = differences - differences.mean(axis=0)
    # Its columns are positions in a space of as many dimensions as there are pairs, which are few.
    _, _, components = np.linalg.svd(centred, full_matrices=False)
    direction = components[0]
    along = differences @ direction
    return np.asarray(direction if (along > 0).sum() >= (along < 0).sum() else -direction)


_METHODS: Mapping[str, Callable[[Pairs], np.ndarray]] = {"mean": _mean, "pca": _first_component}
