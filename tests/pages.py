"""Requests in a paged KV cache, for all tests of attention kernels, in any cache layout.

Every slot that a request must not read is NaN, so one stray read shows in the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llm.forward import QUANTIZED_CACHE_DTYPES, AttentionMetadata, KVCacheSpec
from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Shape:
    """The arguments of an attention layer. `sinks`, `alibi`: every head has a sink, a slope; `static`: the scales of a
    quantized cache are given, and offsets if it is int8; not `causal`: rows have no cached tokens."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    block_size: int = 4
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    sinks: bool = False
    alibi: bool = False
    chunk: int | None = None  # where there is no window
    static: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        self.chunk = None if self.window is not None else self.chunk

    @property
    def scale(self) -> float:
        return 1.3 / math.sqrt(self.head_size)

    @property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED_CACHE_DTYPES

    def static_scales(self, seed: int) -> torch.Tensor | None:
        """float32 [4, kv_heads, head_size]; two channels' scales are too small for some elements."""
        if not self.static:
            return None
        found = normal(seed, 4, self.kv_heads, self.head_size)
        found[::2] = (2 + found[::2].abs()) / (100 if self.dtype == torch.int8 else 200)
        found[1::2] = (found[1::2] * 10).round() if self.dtype == torch.int8 else 0
        return found


class Pages:
    """Batch rows (tokens cached before, tokens of this step) in a paged KV cache with scattered blocks.

    Slots that no row may read are NaN: free blocks, the ends of last blocks, positions outside the window. If a whole
    block is outside the window, the block table may hold the null block or the block's old id. Slot 0 holds zeros.
    """

    def __init__(self, shape: Shape, rows: list[tuple[int, int]], seed: int, kernels: Backend = REFERENCE) -> None:
        self.shape, self.rows = shape, rows
        self._shapes, self._write, self._attend = (
            kernels.op(name) for name in ("kv_cache_shapes", "write_kv_cache", "paged_attention")
        )
        self.sinks = normal(seed - 1, shape.heads) if shape.sinks else None
        self.slopes = 0.5 ** torch.linspace(1, 8, shape.heads) if shape.alibi else None
        self.static_scales = shape.static_scales(seed)
        tokens = sum(new for _, new in rows)
        self.query = normal(seed, tokens, shape.heads, shape.head_size)
        self.keys = [self._row(cached + new, seed + 2 * row + 1) for row, (cached, new) in enumerate(rows)]
        self.values = [self._row(cached + new, seed + 2 * row + 2) for row, (cached, new) in enumerate(rows)]
        self.table = self._scatter(torch.Generator().manual_seed(seed))
        self.key_cache, self.value_cache = self._empty()
        self._fill()
        self._drop_blocks_out_of_window(seed)

    def attend(self) -> torch.Tensor:
        """Write this step's keys and values, then attend, as the layer does."""
        key, value = self._new(self.keys), self._new(self.values)
        self.write(key, value, self.slot_mapping())
        return self.attend_again()

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        self._write(key, value, self.key_cache, self.value_cache, slots, **self._more())

    def attend_again(self, metadata: AttentionMetadata | None = None) -> torch.Tensor:
        """Attend over the cache without writing."""
        return self._attend(
            self.query,
            self.key_cache,
            self.value_cache,
            metadata or self.metadata(),
            scale=self.shape.scale,
            sliding_window=self.shape.window,
            attention_chunk=self.shape.chunk,
            soft_cap=self.shape.soft_cap,
            sinks=self.sinks,
            alibi_slopes=self.slopes,
            **self._more(),
            causal=self.shape.causal,
        )

    def _more(self) -> dict[str, torch.Tensor]:
        return {} if self.static_scales is None else {"static_scales": self.static_scales}

    def refill(self) -> None:
        """Write the keys and values of earlier steps again, after `keys` and `values` were changed."""
        self._fill()

    def expected(self) -> torch.Tensor:
        """Reference: dense attention in float64, token by token, over values rounded to the cache's dtype."""
        lines = []
        queries = iter(self.query.double())
        for (cached, new), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            keys, values = (self.rounded(tensor, part) for part, tensor in enumerate((keys, values)))
            for position in range(cached, cached + new):
                first, end = self.first_seen(position), self.end_seen(position, cached + new)
                lines.append(self._dense(next(queries), keys[first:end], values[first:end]))
        return torch.stack(lines)

    def metadata(self) -> AttentionMetadata:
        counts, lengths = [new for _, new in self.rows], [cached + new for cached, new in self.rows]
        return AttentionMetadata(
            block_table=self.table,
            slot_mapping=self.slot_mapping(),
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(lengths).int(),
            block_size=self.shape.block_size,
            query_lens_list=counts,
            seq_lens_list=lengths,
        )

    def slot_mapping(self) -> torch.Tensor:
        spans = [range(cached, cached + new) for cached, new in self.rows]
        return torch.tensor([self.slot(row, position) for row, span in enumerate(spans) for position in span])

    def slot(self, row: int, position: int) -> int:
        size = self.shape.block_size
        return int(self.table[row, position // size]) * size + position % size

    def first_seen(self, position: int) -> int:
        chunk = self.shape.chunk
        return max(self.first_kept(position), 0 if chunk is None else position // chunk * chunk)

    def first_kept(self, position: int) -> int:
        """Chunks free no blocks."""
        return 0 if self.shape.window is None else max(0, position - self.shape.window + 1)

    def rounded(self, x: torch.Tensor, part: int) -> torch.Tensor:
        """float64, what the cache stands for after keys (part 0) or values (part 1) are stored."""
        dtype, given = self.shape.dtype, self.static_scales
        if not self.shape.is_quantized:
            return x.to(dtype).double()
        most = 127 if dtype == torch.int8 else 448
        if given is not None:
            scale, offset = given[2 * part].double(), given[2 * part + 1].double()
        else:
            wanted = x.abs().amax(dim=-1, keepdim=True) / most
            near = wanted.bfloat16()
            scale = torch.where(near.float() < wanted, (near.view(torch.int16) + 1).view(torch.bfloat16), near).double()
            scale, offset = torch.where(scale == 0, 1, scale), torch.zeros(())
        quotient = (x / scale.float()).clamp(-1e6, 1e6)
        if dtype == torch.int8:
            codes = (quotient.double().round() + offset).clamp(-128, 127)
        else:
            codes = quotient.clamp(-448, 448).to(dtype).double()
        return (codes - offset) * scale

    def end_seen(self, position: int, length: int) -> int:
        if self.shape.causal:
            return position + 1
        return length if self.shape.window is None else min(length, position + self.shape.window)

    def _row(self, tokens: int, seed: int) -> torch.Tensor:
        return normal(seed, tokens, self.shape.kv_heads, self.shape.head_size)

    def _new(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The tokens of this step, concatenated."""
        return torch.cat([tensor[-new:] for tensor, (_, new) in zip(rows, self.rows, strict=True)])

    def _dense(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """query [heads, d], keys and values [n, kv_heads, d] -> [heads, d]; query head h reads head h // ratio."""
        ratio = self.shape.heads // self.shape.kv_heads
        heads = []
        for head in range(self.shape.heads):
            scores = keys[:, head // ratio] @ query[head] * self.shape.scale
            if self.shape.soft_cap is not None:
                scores = self.shape.soft_cap * torch.tanh(scores / self.shape.soft_cap)
            if self.slopes is not None:
                scores = scores + self.slopes[head].double() * torch.arange(1 - len(keys), 1)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[head : head + 1].double()))
            weights = torch.exp(scores - scores.max())
            heads.append((weights / weights.sum())[: len(keys)] @ values[:, head // ratio])
        return torch.stack(heads)

    def _scatter(self, generator: torch.Generator) -> torch.Tensor:
        """Distinct random blocks for every row; beyond its own blocks a row's table holds ids of other blocks."""
        needed = [-(-(cached + new) // self.shape.block_size) for cached, new in self.rows]
        ids = iter((torch.randperm(sum(needed) + 5, generator=generator) + 1).tolist())
        self.num_blocks = sum(needed) + 6
        table = torch.randint(self.num_blocks, (len(needed), max(needed)), generator=generator).int()
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([next(ids) for _ in range(count)])
        return table

    def _empty(self) -> tuple[torch.Tensor, torch.Tensor]:
        spec = KVCacheSpec(self.shape.kv_heads, self.shape.head_size, self.shape.dtype, self.shape.window)
        keys, values = (
            _all_nan(shape, self.shape.dtype) for shape in self._shapes(spec, self.num_blocks, self.shape.block_size)
        )
        nothing = torch.zeros(1, self.shape.kv_heads, self.shape.head_size)
        self._write(nothing, nothing, keys, values, torch.tensor([0]))
        return keys, values

    def _fill(self) -> None:
        """Write the keys and values of earlier steps that some token of this step attends to."""
        for row, (cached, _) in enumerate(self.rows):
            seen = range(self.first_kept(cached), cached)
            slots = torch.tensor([self.slot(row, position) for position in seen], dtype=torch.int64)
            kept = slice(seen.start, seen.stop)
            self.write(self.keys[row][kept], self.values[row][kept], slots)

    def _drop_blocks_out_of_window(self, seed: int) -> None:
        for row, (cached, _) in enumerate(self.rows):
            if (seed + row) % 2:
                self.table[row, : self.first_kept(cached) // self.shape.block_size] = 0


def _all_nan(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """With scales that are NaN where it is quantized."""
    if dtype in QUANTIZED_CACHE_DTYPES:
        return torch.full(shape, 0xFF, dtype=torch.uint8).view(dtype)
    return torch.full(shape, math.nan, dtype=dtype)
