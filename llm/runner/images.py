"""The pictures of batch rows: their features, and where a step's tokens find them.

The vision tower is read from the checkpoint when the first picture comes: who sends text alone pays nothing for it.
Features are computed picture by picture, so they depend on nothing but the picture, and are kept for pictures that
come again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from llm.engine.image_embeds import EMBEDS, GRID
from llm.engine.step import NewRow, RowImage, RowImages, SchedulerOutput
from llm.errors import LLMError
from llm.forward import ForwardBatch, ImageTokens
from llm.loading.checkpoint import TensorInfo
from llm.loading.loader import rounded
from llm.loading.source import Tensors
from llm.models.vision.tower import Features, VisionTower
from llm.runner.batch import InputBatch, StepInput

# Of features that no running row needs.
KEPT_BYTES = 1 << 30
# Inputs of a tower up to this many elements are sizes, not pixels; positions are made of them.
_SMALL = 64


@dataclass
class _Known:
    """A picture's features, and the sizes among the tower's inputs."""

    features: Features
    sizes: dict[str, torch.Tensor]


@dataclass
class _Row:
    """positions: int64 [3, prompt tokens]; None: tokens have one position each."""

    images: RowImages
    known: list[_Known]
    positions: np.ndarray | None


class TowerTensors:
    """The tensors of a checkpoint that are a tower's.

    dtype: of vectors; None: as they are stored. (A language model's vectors stay as stored: its layers multiply in the
    type of their input, transformers' in the wider type.)
    """

    def __init__(self, checkpoint: Tensors, tower: VisionTower, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._stream = checkpoint.stream
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in checkpoint.tensors.items() if tower.has(name)
        }
        self.total_bytes = sum(info.nbytes for info in self.tensors.values())

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._stream():  # memory-mapped: what is passed over is not read
            if name in self.tensors:
                if self._dtype is not None and tensor.dim() < 2 and tensor.is_floating_point():
                    tensor = rounded(name, tensor, self._dtype)
                yield name, tensor


class ImageRows:
    """The pictures of the rows in the batch.

    Args:
        make_tower: loads the vision tower.
        groups: per state of the model, the group of its blocks; None: its layer lets no token see those after it.
        pad: the id that the language model gets in the places of features.
        hidden_size: of the language model.
        dtype, device: of the features in a step.
        multiplier: of features, where the language model multiplies its embeddings after pictures are among them.
    """

    def __init__(
        self,
        make_tower: Callable[[], VisionTower],
        groups: Sequence[int | None] = (),
        multiplier: float = 1.0,
        pad: int = 0,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self._dtype, self._device = dtype, device
        self._pad = pad
        self._hidden_size = hidden_size
        self._make_tower: Callable[[], VisionTower] | None = make_tower
        self._groups = groups
        self._tower: VisionTower | None = None
        self._multiplier = multiplier
        self._rows: dict[str, _Row] = {}
        self._features: OrderedDict[bytes, _Known] = OrderedDict()
        self._bytes = 0

    @property
    def tower(self) -> VisionTower:
        if self._tower is None:
            if self._make_tower is None:
                raise RuntimeError("the runner is closed")
            self._tower = self._make_tower()
        return self._tower

    def update(self, plan: SchedulerOutput, batch: InputBatch) -> None:
        """Take the rows that entered the batch, which knows them already; forget those that left."""
        for request_id in plan.removed:
            self._rows.pop(request_id, None)
        for new in plan.new_rows:
            if new.images is not None:
                row = self._rows[new.request_id] = self._row(new, new.images)
                if row.positions is not None:
                    shift = int(row.positions.max()) + 1 - new.num_prompt_tokens
                    batch.position_shifts[batch.index[new.request_id]] = shift

    def clear(self) -> None:
        self._rows.clear()

    def close(self) -> None:
        """Free the tower and the features, even while something refers to them."""
        for tensor in () if self._tower is None else (*self._tower.parameters(), *self._tower.buffers()):
            tensor.data = torch.empty(0, device=tensor.device)
        self.clear()
        self._features.clear()
        self._tower = self._make_tower = None  # which refers to the runner

    def apply(self, step: StepInput, batch: InputBatch, forward: ForwardBatch) -> ForwardBatch:
        """A step's input with the features and positions of pictures. `forward` is filled anew by further steps."""
        if not self._rows:
            return forward
        forward = replace(forward)
        starts = np.cumsum(step.counts) - step.counts
        found: list[tuple[np.ndarray, _Known, slice]] = []
        positions: np.ndarray | None = None
        spans: list[tuple[int, int, int, int]] = []  # batch row, first of the step's tokens, how many, end in its row
        for row, start, count in zip(step.rows.tolist(), starts.tolist(), step.counts.tolist(), strict=True):
            own = self._rows.get(batch.request_ids[row])
            first = int(batch.num_computed[row])
            if own is None or first >= batch.num_prompt_tokens[row]:
                continue
            for image, known in zip(own.images.images, own.known, strict=True):
                lo, hi = np.searchsorted(image.places, (first, first + count)).tolist()
                if lo < hi:
                    found.append((image.places[lo:hi] + (start - first), known, slice(lo, hi)))
            for begin, end in own.images.spans:
                lo, hi = max(first, begin), min(first + count, end)
                if lo < hi:
                    spans.append((row, start + lo - first, hi - lo, end))
            if own.positions is not None:
                if positions is None:
                    positions = np.repeat(forward.positions.cpu().numpy()[None], 3, axis=0)
                known_to = min(first + count, own.positions.shape[1])
                positions[:, start : start + known_to - first] = own.positions[:, first:known_to]
        if positions is not None:
            forward.positions = torch.from_numpy(positions).to(forward.positions.device)
        if found:
            forward.images = self._tokens(found, forward.input_ids.device)
            forward.input_ids = forward.input_ids.index_fill(0, forward.images.indices, self._pad)
        if spans:
            self._see_both_ways(spans, batch, forward)
        return forward

    def _see_both_ways(self, spans: list[tuple[int, int, int, int]], batch: InputBatch, forward: ForwardBatch) -> None:
        rows, starts, counts, lengths = np.array(spans).T
        ends = np.cumsum(counts)
        offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        positions = offsets + np.repeat(lengths - counts, counts)
        row_of_token = np.repeat(rows, counts)
        device = forward.input_ids.device
        made = {
            group: batch.attention_metadata(group, rows, row_of_token, positions, ends, counts, lengths)
            for group in {group for group in self._groups if group is not None}
        }
        if forward.images is None:  # text of a prompt that sees both ways
            nothing = torch.empty(0, dtype=torch.int64, device=device)
            forward.images = ImageTokens(nothing, torch.empty(0, self._width, device=device))
        forward.images.both_ways = torch.from_numpy(offsets + np.repeat(starts, counts)).to(device)
        forward.images.metadata = [None if group is None else made[group] for group in self._groups]

    def _tokens(self, found: list[tuple[np.ndarray, _Known, slice]], device: torch.device) -> ImageTokens:
        indices = torch.from_numpy(np.concatenate([places for places, _, _ in found]))
        rows = torch.cat([known.features.rows[part] for _, known, part in found])
        depth = max(len(known.features.deep) for _, known, _ in found)
        deep = tuple(
            torch.cat([known.features.deep[layer][part] for _, known, part in found]) for layer in range(depth)
        )
        return ImageTokens(indices.to(device), rows.to(device), tuple(item.to(device) for item in deep))

    def _row(self, new: NewRow, images: RowImages) -> _Row:
        known = [self._known(image) for image in images.images]
        positions = None
        # Given features that come without sizes are of a model whose tokens have one position.
        if (self._tower is not None or any(GRID in item.sizes for item in known)) and self.tower.has_axes:
            prompt = new.token_ids[: new.num_prompt_tokens]
            places = [image.places for image in images.images]
            pairs = list(zip(places, [item.sizes for item in known], strict=True))
            positions = self.tower.positions(prompt, pairs).numpy()
        return _Row(images, known, positions)

    def _known(self, image: RowImage) -> _Known:
        found = self._features.get(image.key)
        if found is not None:
            self._features.move_to_end(image.key)
            return found
        inputs = image.load()
        features = self._given(inputs[EMBEDS]) if EMBEDS in inputs else self.tower.features(inputs)
        if len(features.rows) != len(image.places):
            raise LLMError(
                f"the vision tower makes {len(features.rows)} features of an image that has {len(image.places)} tokens "
                "in the prompt; the processor's files are not of this model."
            )
        if self._multiplier != 1.0:
            features = Features(features.rows * self._multiplier, features.deep)
        sizes = {name: value for name, value in inputs.items() if value.numel() <= _SMALL and name != EMBEDS}
        self._width = features.rows.shape[-1]
        found = self._features[image.key] = _Known(features, sizes)
        self._bytes += features.nbytes
        while self._bytes > KEPT_BYTES and len(self._features) > 1:
            self._bytes -= self._features.popitem(last=False)[1].features.nbytes
        return found

    def _given(self, rows: torch.Tensor) -> Features:
        """What the user computed: [tokens, hidden size], with those of further layers behind."""
        first, *deep = rows.to(self._device, self._dtype).split(self._hidden_size, dim=1)
        return Features(first.contiguous(), tuple(part.contiguous() for part in deep))
