"""Each request by itself, on transformers' own attention: for models that the paged kernels do not fit.

ALiBi, relative positions, chunked masks and recurrent layers are computed by transformers' code, which keeps what it
needs between calls in a cache object. That is `RowCache`: before a step each request gets such an object, filled from
the engine's blocks and slots, and afterwards the new tokens' keys and values and the recurrent states go back there. So
chunked prefill, prefix caching (without recurrent states) and preemption work as for every model. The matrices of a
step are read once per request, not once per step: many requests together are no faster than one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm.forward import AttentionMetadata, ForwardBatch, LatentCacheSpec, RecurrentMetadata, RecurrentSpec, StateSpec
from llm.models.transformers_backend.skeleton import Passes, Theirs

# (attribute of a cache layer of transformers, its key there): the tensor of one recurrent state.
_Key = tuple[str, int]


@dataclass(frozen=True)
class CacheLayer:
    """What one layer of transformers' cache keeps.

    Attributes:
        key, value: [heads, channels] of a token; () if it keeps none.
        indexer: channels of a token's key for the choice of tokens; 0: none.
        keys, shapes, dtypes: its recurrent states.
        with_state: which of them it counts as computed once there was a token.
    """

    key: tuple[int, ...] = ()
    value: tuple[int, ...] = ()
    indexer: int = 0
    keys: tuple[_Key, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    with_state: tuple[int, ...] = ()

    @property
    def sizes(self) -> list[int]:
        """Channels of a token's key, value and indexer key, side by side in one state."""
        return [torch.Size(shape).numel() if shape else 0 for shape in (self.key, self.value)] + [self.indexer]

    def specs(self, dtype: torch.dtype) -> list[StateSpec]:
        found: list[StateSpec] = []
        if self.key:
            found.append(LatentCacheSpec(sum(self.sizes), dtype))
        if self.keys:
            found.append(RecurrentSpec(self.shapes, self.dtypes))
        return found


def describe(cache: Theirs) -> tuple[CacheLayer, ...]:
    """The layers of a cache of transformers after a forward pass of one request."""
    return tuple(_layer(layer) for layer in cache.layers)


def _layer(layer: Theirs) -> CacheLayer:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    indexer = getattr(layer, "indexer_keys", None)
    paged = {}
    if isinstance(keys, torch.Tensor) and keys.dim() == 4 and isinstance(values, torch.Tensor):
        paged = {"key": (keys.shape[1], keys.shape[3]), "value": (values.shape[1], values.shape[3])}
    found = {
        (name, index): state
        for name in ("conv_states", "recurrent_states")
        for index, state in getattr(layer, name, {}).items()
        if state is not None
    }
    return CacheLayer(
        **paged,
        indexer=0 if indexer is None else indexer.shape[-1],
        keys=tuple(found),
        shapes=tuple(tuple(state.shape[1:]) for state in found.values()),
        dtypes=tuple(state.dtype for state in found.values()),
        with_state=tuple(index for index, had in getattr(layer, "has_previous_state", {}).items() if had),
    )


@dataclass(frozen=True)
class RowWay:
    """How the tokens of one row are computed.

    Attributes:
        names_positions: the model is given positions; False: it counts from the cache, or from the padding id.
        one_by_one: tokens after a request's first chunk are computed one at a time, for recurrent layers whose code
            takes no more.
    """

    names_positions: bool = True
    one_by_one: bool = False


class RowCache:
    """Runs a model row by row.

    Args:
        config: of the model; transformers chooses the kinds of its cache layers by it.
    """

    def __init__(self, layers: Sequence[CacheLayer], config: Theirs, way: RowWay) -> None:
        self._layers = layers
        self._config = config
        self._way = way

    def hidden(self, passes: Passes, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states float32 [N, H] of the step's tokens."""
        if self._way.names_positions:
            return self._hidden(passes, batch)
        with passes.without_positions():
            return self._hidden(passes, batch)

    def _hidden(self, passes: Passes, batch: ForwardBatch) -> torch.Tensor:
        metadata = batch.metadata[0]
        parts, first = [], 0
        for row, count in enumerate(metadata.query_lens_list):
            last = first + count
            parts.append(self._row(passes, batch, row, slice(first, last)))
            first = last
        return torch.cat(parts)

    def _row(self, passes: Passes, batch: ForwardBatch, row: int, tokens: slice) -> torch.Tensor:
        count = tokens.stop - tokens.start
        done = batch.metadata[0].seq_lens_list[row] - count
        cache = new_cache(self._config)
        noted = [_Noted(layer) for layer in cache.layers]
        if done:
            self._fill(cache, batch, row, done)
        step = 1 if self._way.one_by_one and done else count
        parts = []
        for note in noted:
            note.start()
        for first in range(tokens.start, tokens.stop, step):
            piece = slice(first, first + step)
            if batch.inside is not None:
                batch.inside.on_tokens(piece)
            embeds = None if batch.inputs_embeds is None else batch.inputs_embeds[piece]
            parts.append(passes.hidden(batch.input_ids[piece], batch.positions[piece], embeds, cache))
        self._store(cache, noted, batch, row, tokens)
        return torch.cat(parts)

    def _fill(self, cache: Theirs, batch: ForwardBatch, row: int, done: int) -> None:
        state = 0
        for layer, target in zip(self._layers, cache.layers, strict=True):
            if layer.key:
                metadata: AttentionMetadata = batch.metadata[state]
                (stored,) = batch.states[state]
                blocks = metadata.block_table[row, : -(-done // metadata.block_size)].long()
                rows = stored[blocks].flatten(0, 1)[:done].float()
                key, value, indexer = rows.split(layer.sizes, dim=-1)
                target.update(_heads(key, layer.key), _heads(value, layer.value))
                if layer.indexer:
                    target.update_indexer(indexer[None].contiguous())
                state += 1
            if layer.keys:
                slots: RecurrentMetadata = batch.metadata[state]
                for (name, index), tensor in zip(layer.keys, batch.states[state], strict=True):
                    _restore(target, name, index, tensor[slots.slots[row]][None].clone())
                for index in layer.with_state:
                    target.has_previous_state[index] = True
                state += 1

    def _store(self, cache: Theirs, noted: Sequence[_Noted], batch: ForwardBatch, row: int, tokens: slice) -> None:
        state = 0
        for layer, source, note in zip(self._layers, cache.layers, noted, strict=True):
            if layer.key:
                (stored,) = batch.states[state]
                slots = batch.metadata[state].slot_mapping[tokens]
                stored.flatten(0, 1)[slots] = note.rows(tokens.stop - tokens.start).to(stored.dtype)
                state += 1
            if layer.keys:
                slot = batch.metadata[state].slots[row]
                for (name, index), tensor in zip(layer.keys, batch.states[state], strict=True):
                    tensor[slot] = getattr(source, name)[index][0]
                state += 1


class _Noted:
    """Remembers the keys and values that a cache layer of transformers is given."""

    def __init__(self, layer: Theirs) -> None:
        self._parts: dict[str, list[torch.Tensor]] = {"update": [], "update_indexer": []}
        for name in self._parts:
            if hasattr(layer, name):
                setattr(layer, name, self._noting(name, getattr(layer, name)))

    def _noting(self, name: str, call: Theirs) -> Theirs:
        def noted(*tensors: torch.Tensor, **more: object) -> Theirs:
            given = tensors[:2] if name == "update" else tensors[:1]
            flat = [item[0].transpose(0, 1).flatten(1) if item.dim() == 4 else item[0] for item in given]
            self._parts[name].append(torch.cat(flat, dim=-1))
            return call(*tensors, **more)

        return noted

    def start(self) -> None:
        """Forget what was given so far."""
        for part in self._parts.values():
            part.clear()

    def rows(self, count: int) -> torch.Tensor:
        """float [count, channels of key, value and indexer key]."""
        found = torch.cat([torch.cat(part) for part in self._parts.values() if part], dim=-1)
        if len(found) != count:
            raise RuntimeError(f"a cache layer was given {len(found)} tokens of {count}")
        return found


def new_cache(config: Theirs) -> Theirs:
    from transformers import DynamicCache

    return DynamicCache(config=config)


def _heads(rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """[N, heads * channels] -> [1, heads, N, channels]."""
    return rows.unflatten(1, shape).transpose(0, 1)[None].contiguous()


def _restore(layer: Theirs, name: str, index: int, state: torch.Tensor) -> None:
    getattr(layer, name)[index] = state
    getattr(layer, f"is_{name}_initialized")[index] = True
    layer.dtype, layer.device = state.dtype, state.device
    if name == "conv_states":
        layer.conv_kernel_size[index] = state.shape[-1]
