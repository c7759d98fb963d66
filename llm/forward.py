"""The input of a model's forward, and the state that its layers keep per request between steps.

Layers declare the specs of these states; the runner builds a `ForwardBatch` once per step. Nothing in this file
computes.

    StateSpec
      PagedSpec          grows with the sequence, in the blocks of a block table
        KVCacheSpec      keys and values, of all positions or of a sliding window
        LatentCacheSpec  one vector per token, from which keys and values are computed
      RecurrentSpec      fixed size per request, in a slot
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

# Of a KV cache that is quantized. A token has a scale in each KV head, bfloat16.
QUANTIZED_CACHE_DTYPES = (torch.int8, torch.float8_e4m3fn)
SCALE_BYTES = 2


class StateSpec:
    """The state that one layer keeps per request between steps; frozen dataclasses derive from it."""

    def bytes_per_token(self) -> int:
        """Memory per token of a sequence."""
        return 0

    def bytes_per_request(self) -> int:
        """Memory per running request, independent of its length."""
        return 0


class PagedSpec(StateSpec):
    """State per token, in blocks. Layers with equal specs form a group and share block tables.

    Attributes:
        sliding_window: the number of positions a token sees, itself included; None: all. Blocks outside the window are
            freed.
    """

    dtype: torch.dtype
    sliding_window: int | None


@dataclass(frozen=True)
class KVCacheSpec(PagedSpec):
    """Keys and values of an attention layer, whose backend owns the layout of the two tensors.

    With a dtype of `QUANTIZED_CACHE_DTYPES` each token has a scale per KV head, for its key and for its value.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window: int | None = None

    @property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED_CACHE_DTYPES

    def bytes_per_token(self) -> int:
        # Kernels read codes of four channels at a time.
        codes = -(-self.head_size // 4) * 4 + SCALE_BYTES
        return 2 * self.num_kv_heads * (codes if self.is_quantized else self.head_size * self.dtype.itemsize)


@dataclass(frozen=True)
class LatentCacheSpec(PagedSpec):
    """One vector per token, in one tensor [blocks, block_size, size]: latent attention computes keys and values of
    every head from it.

    Attributes:
        scales: of a token with a dtype of `QUANTIZED_CACHE_DTYPES`, behind its codes; 0: it has no such form.
    """

    size: int
    dtype: torch.dtype
    sliding_window: int | None = None
    scales: int = 0

    def bytes_per_token(self) -> int:
        return self._width * self.dtype.itemsize

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return num_blocks, block_size, self._width

    @property
    def _width(self) -> int:
        return self.size + (self.scales * SCALE_BYTES if self.dtype in QUANTIZED_CACHE_DTYPES else 0)


@dataclass(frozen=True)
class RecurrentSpec(StateSpec):
    """State of a fixed size per request: tensor i is [slots, *shapes[i]] of `dtypes[i]`.

    Attributes:
        rolls_back: the layer changes it in calls of `RecurrentMetadata.run` alone, so it never sees a rejected draft.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    rolls_back: bool = False

    def bytes_per_request(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


def all_roll_back(specs: Sequence[StateSpec]) -> bool:
    """True if no state of these sees a rejected draft."""
    return all(spec.rolls_back for spec in specs if isinstance(spec, RecurrentSpec))


@dataclass
class AttentionMetadata:
    """Where the tokens of this step are in the KV cache, for one group of layers.

    Shapes: R batch rows, N tokens in all; row r has tokens query_start_loc[r] : query_start_loc[r + 1].

    Attributes:
        block_table: int32 [R, blocks], the row's block ids in order of position; block 0 is never read.
        slot_mapping: int64 [N], block * block_size + offset where each token's key and value are written.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R], tokens of the row in the cache after this step's are written.
        block_size: tokens per block.
        query_lens_list, seq_lens_list: the same numbers as lists, so that a forward needs no `.item()`.
        plan: what an attention kernel derived from the above, once per step for all layers of the group.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_size: int
    query_lens_list: list[int]
    seq_lens_list: list[int]
    plan: Any = None


@dataclass(frozen=True)
class StateNumbers:
    """The tensors of a `RecurrentMetadata` as lists, so that nobody waits for a device to read them: `slots`, `starts`
    of `query_start_loc`, `lengths` of `seq_lens`, `counts`, `stored`."""

    slots: list[int]
    starts: list[int]
    lengths: list[int]
    counts: list[int] | None
    stored: list[int] | None


@dataclass
class RecurrentMetadata:
    """Where the recurrent states of this step's batch rows are, for all layers that have one.

    A row whose tokens (`seq_lens[r]` of them) are all in this step starts from zeros: its slot still has the states of
    an earlier request.

    Attributes:
        slots: int64 [R], the row's index into the tensors of each layer; all are different.
        query_start_loc, seq_lens, query_lens_list, seq_lens_list: as in `AttentionMetadata`.
        counts: int32 [R], how many tokens a row has; None: they end where the next row's start.
        stored: int32 [R], how many of a row's tokens its stored state sees: those behind them are drafts. None: all.
        calls: what changes the states in this step, if it has drafts.
        host: the numbers in the tensors, where those are not in the host's memory.
    """

    slots: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    query_lens_list: list[int]
    seq_lens_list: list[int]
    counts: torch.Tensor | None = None
    stored: torch.Tensor | None = None
    calls: list[Callable[[RecurrentMetadata], torch.Tensor]] = field(default_factory=list)
    host: StateNumbers | None = None

    @classmethod
    def of_rows(cls, *rows: tuple[int, int, int], stored: Sequence[int] | None = None) -> RecurrentMetadata:
        """Of batch rows (slot, tokens of earlier steps, tokens of this one), on the CPU; `stored`: as the attribute."""
        slots, done, counts = (list(column) for column in zip(*rows, strict=True))
        lengths = [before + count for before, count in zip(done, counts, strict=True)]
        starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
        return cls(
            torch.tensor(slots),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            counts,
            lengths,
            stored=None if stored is None else torch.tensor(stored, dtype=torch.int32),
        )

    def on_host(self) -> StateNumbers:
        """The numbers in the tensors; of tensors in the host's memory as they are now."""
        if self.host is not None:
            return self.host
        return StateNumbers(
            self.slots.tolist(),
            self.query_start_loc.tolist(),
            self.seq_lens.tolist(),
            None if self.counts is None else self.counts.tolist(),
            None if self.stored is None else self.stored.tolist(),
        )

    def run(self, call: Callable[[RecurrentMetadata], torch.Tensor]) -> torch.Tensor:
        """`call(self)`, an operation on a state, which is called again for the drafts that are accepted."""
        if self.stored is not None:
            self.calls.append(call)
        return call(self)

    def store_accepted(self, accepted: np.ndarray, upload: Callable[[np.ndarray], torch.Tensor]) -> None:
        """Let each row's stored state see so many of its drafts, int32 [R], after a step that had some."""
        if self.stored is None or not accepted.any():
            return
        host = self.on_host()
        stored = np.array(host.stored, dtype=np.int32)
        starts = np.array(host.starts, dtype=np.int32)
        lengths = np.array(host.lengths, dtype=np.int32) - np.diff(starts) + stored + accepted
        starts[:-1] += stored
        numbers = StateNumbers(host.slots, starts.tolist(), lengths.tolist(), accepted.tolist(), None)
        further = RecurrentMetadata(
            self.slots,
            upload(starts),
            upload(lengths),
            accepted.tolist(),
            lengths.tolist(),
            counts=upload(accepted),
            host=None if self.host is None else numbers,
        )
        for call in self.calls:
            call(further)


@dataclass
class ImageTokens:
    """Tokens of a step that stand for parts of pictures.

    Attributes:
        indices: int64 [M], which of the step's tokens.
        rows: [M, hidden] of the activations' type, in the place of their embeddings.
        deep: further ones, added to what enters the second layer and those after it.
        both_ways: int64 [B], those of the step's tokens that see the tokens after them in their run; None: none do.
        metadata: of these as batch rows of their own, per state of the model; None for a layer where they do not.
    """

    indices: torch.Tensor
    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()
    both_ways: torch.Tensor | None = None
    metadata: Sequence[AttentionMetadata | None] = ()


class Inside(Protocol):
    """What looks at the activations of a step, or changes them: it is called as a part of the forward of modules.

    Attributes:
        replayed: what computes a module in the place of its own forward, where a recording has it.
    """

    replayed: dict[nn.Module, Callable[..., object]]

    @property
    def modules(self) -> Collection[nn.Module]:
        """Which modules."""

    def on_tokens(self, span: slice) -> None:
        """Called by a model that computes the step's tokens in pieces, before each, with those that come."""

    def suspended(self) -> AbstractContextManager[None]:
        """Inside, the modules are computed as if nothing looked."""


@dataclass
class ForwardBatch:
    """One step's input: the tokens of all batch rows, concatenated.

    Attributes:
        input_ids: int64 [N].
        positions: int64 [N], or [3, N] for models with three position streams.
        metadata: per state of the model, where the batch rows are in it; the states of a group share one object.
        states: the tensors of each state: (key cache, value cache), (latent cache,), those of a `RecurrentSpec`.
        logits_indices: int64 [L], the tokens whose logits are needed; any number per batch row.
        inputs_embeds: float [N, hidden], replaces `embed(input_ids)`; None: not given.
        adapter_ids: int64 [N], the slot of each token's adapter, 0: it has none; None: no token has one.
        token_types: int64 [N], 1 in the second text of a pair, else 0; None: no row is pooled.
        images: the tokens that stand for pictures; None: the step has none.
        extensions: what a plugin's runner adds for its own layers.
        taps: hidden states [N, hidden] between layers, which a forward appends where layers are tapped.
        inside: what looks inside the model in this step; None: nothing does.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: list[Any]
    states: list[tuple[torch.Tensor, ...]]
    logits_indices: torch.Tensor
    inputs_embeds: torch.Tensor | None = None
    adapter_ids: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    images: ImageTokens | None = None
    extensions: dict[str, Any] = field(default_factory=dict)
    taps: list[torch.Tensor] = field(default_factory=list)
    inside: Inside | None = None


# Recurrent states have no KV group: all states of a request are in its slot.
SLOTS = -1


def group_states(specs: Sequence[StateSpec]) -> tuple[list[PagedSpec], list[int]]:
    """(the distinct paged specs, one per group; for each state, the index of its group or `SLOTS`)."""
    groups = list(dict.fromkeys(spec for spec in specs if isinstance(spec, PagedSpec)))
    return groups, [groups.index(spec) if isinstance(spec, PagedSpec) else SLOTS for spec in specs]
