"""The reference operations are their formulas, held against float64 written here from the definitions.

Attention is held against a dense softmax over the keys of each row; every slot that a row must not read is NaN, so one
stray read shows in the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import one_thread

from llm.forward import AttentionMetadata, KVCacheSpec
from llm.kernels.reference import activation, attention, linear, norm, rotary
from llm.layers.norm import RMSNorm

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = torch.finfo(torch.float32).eps

seeds = st.integers(0, 2**31)
sizes = st.integers(1, 67)
dtypes = st.sampled_from(FLOATS)
quick = settings(max_examples=30)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """float32 against float64, relative to the largest element."""
    assert actual.dtype == torch.float32 and actual.shape == expected.shape
    if expected.numel():
        assert (actual - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


# Norms


def rms_norm_64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@quick
@given(seeds, st.integers(0, 5), st.integers(1, 130), dtypes, st.sampled_from([1e-3, 1.0, 1e3]))
def test_rms_norm(seed: int, rows: int, width: int, dtype: torch.dtype, size: float) -> None:
    x, weight = normal(seed, rows, width) * size, normal(seed + 1, width).to(dtype)
    before = x.clone()
    assert_close(norm.rms_norm(x, weight, 1e-5), rms_norm_64(x, weight, 1e-5))
    assert torch.equal(x, before)


@quick
@given(seeds, st.integers(0, 5), st.integers(1, 130), dtypes)
def test_rms_norm_with_residual(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = normal(seed, rows, width), normal(seed + 1, rows, width)
    layer = RMSNorm(width, 1e-6, dtype=dtype)
    layer.weight.data.copy_(normal(seed + 2, width))
    normed, total = layer(x, residual)
    assert torch.equal(total, x + residual)
    assert_close(normed, rms_norm_64(total, layer.weight, 1e-6))


@quick
@given(seeds, st.integers(0, 5), st.integers(2, 130), dtypes)
def test_layer_norm(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        normal(seed, rows, width) + 3,
        normal(seed + 1, width).to(dtype),
        normal(seed + 2, width).to(dtype),
    )
    centred = x.double() - x.double().mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double()
    assert_close(norm.layer_norm(x, weight, bias, 1e-5), expected)


# Activations


def sigmoid_64(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x.double()))


def gelu_64(x: torch.Tensor, approximate: str) -> torch.Tensor:
    x = x.double()
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@quick
@given(seeds, st.integers(0, 5), st.integers(1, 70))
def test_activations(seed: int, rows: int, width: int) -> None:
    x = normal(seed, rows, 2 * width) * 3
    gate, up = x[:, :width], x[:, width:].double()
    before = x.clone()
    assert_close(activation.silu_and_mul(x), gate.double() * sigmoid_64(gate) * up)
    for approximate in ("none", "tanh"):
        assert_close(activation.gelu_and_mul(x, approximate), gelu_64(gate, approximate) * up)
    assert_close(activation.gelu_new(x), gelu_64(x, "tanh"))
    assert torch.equal(activation.relu(x), x.clamp(min=0))
    assert torch.equal(x, before)


# Rotary embeddings


@quick
@given(seeds, st.integers(1, 6), st.integers(1, 4), st.sampled_from([2, 10, 64]), st.sampled_from([0, 6]))
def test_rotary_is_transformers(seed: int, tokens: int, heads: int, rotated: int, passed: int) -> None:
    """On the rotated channels transformers' formula, on the rest nothing."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, angles = normal(seed, tokens, heads, rotated + passed), normal(seed + 1, tokens, rotated // 2) * 10
    actual = rotary.apply_rotary(x, angles.cos(), angles.sin())
    twice = torch.cat((angles, angles), dim=-1).double()
    expected, _ = apply_rotary_pos_emb(
        x[..., :rotated].double(), x[..., :rotated].double(), twice.cos(), twice.sin(), unsqueeze_dim=1
    )
    assert_close(actual[..., :rotated], expected)
    assert torch.equal(actual[..., rotated:], x[..., rotated:])


# Products with stored weights


@quick
@given(seeds, st.integers(0, 9), sizes, sizes, dtypes, st.booleans(), st.sampled_from([1, 64, 1 << 20]))
def test_linear(seed: int, rows: int, k: int, n: int, dtype: torch.dtype, with_bias: bool, widened: int) -> None:
    """Within the bound of a float32 sum of k products, whatever the storage type; the bias may be stored likewise."""
    x, weight = normal(seed, rows, k), normal(seed + 1, n, k).to(dtype)
    bias = normal(seed + 2, n).to(dtype) if with_bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_WIDEN_ELEMENTS", widened)
        actual = linear.linear(x, weight, bias)
    offset = torch.zeros(n).double() if bias is None else bias.double()
    expected = x.double() @ weight.double().T + offset
    bound = (k + 2) * EPSILON * (x.double().abs() @ weight.double().abs().T + offset.abs())
    assert actual.dtype == torch.float32 and actual.shape == (rows, n)
    assert ((actual - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7,), (2, 3, 7), (0, 7), (2, 0, 7)])
def test_linear_keeps_leading_dimensions(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = normal(0, *shape), normal(1, 5, 7).to(dtype)
    assert_close(linear.linear(x, weight), x.double() @ weight.double().T)


@quick
@given(seeds, st.integers(0, 9), st.integers(1, 40), dtypes)
def test_embedding(seed: int, count: int, vocab: int, dtype: torch.dtype) -> None:
    weight = normal(seed, vocab, 5).to(dtype)
    ids = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))
    expected = torch.stack([weight[index].float() for index in ids.tolist()]) if count else torch.empty(0, 5)
    assert torch.equal(linear.embedding(ids, weight, torch.float32), expected)


# Attention


@dataclass
class Shape:
    """What an attention layer is built with, and the limits inside the implementation that a case may tighten."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    block_size: int = 4
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    gather_elements: int = 1 << 20
    query_chunk: int = 512

    @property
    def scale(self) -> float:
        return 1.3 / math.sqrt(self.head_size)


class Pages:
    """Rows (tokens cached before, tokens of this step) in a paged cache with scattered blocks.

    Slots that no row may read are NaN: blocks nobody owns, the ends of last blocks, what has left the window. Where a
    whole block has left the window the table may hold the null block or the block's old id. Slot 0 holds zeros.
    """

    def __init__(self, shape: Shape, rows: list[tuple[int, int]], seed: int) -> None:
        self.shape, self.rows = shape, rows
        tokens = sum(new for _, new in rows)
        self.query = normal(seed, tokens, shape.heads, shape.head_size)
        self.keys = [self._row(cached + new, seed + 2 * row + 1) for row, (cached, new) in enumerate(rows)]
        self.values = [self._row(cached + new, seed + 2 * row + 2) for row, (cached, new) in enumerate(rows)]
        self.table = self._scatter(torch.Generator().manual_seed(seed))
        self.key_cache, self.value_cache = self._empty(), self._empty()
        self._fill()
        self._drop_blocks_out_of_window(seed)

    def attend(self) -> torch.Tensor:
        """Write this step's keys and values, then attend, as the layer does."""
        key, value = self._new(self.keys), self._new(self.values)
        attention.write_kv_cache(key, value, self.key_cache, self.value_cache, self.slot_mapping())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "_GATHER_ELEMENTS", self.shape.gather_elements)
            patch.setattr(attention, "_QUERY_CHUNK", self.shape.query_chunk)
            return attention.paged_attention(
                self.query,
                self.key_cache,
                self.value_cache,
                self.metadata(),
                scale=self.shape.scale,
                sliding_window=self.shape.window,
                soft_cap=self.shape.soft_cap,
            )

    def expected(self) -> torch.Tensor:
        """Row by row and token by token, dense, in float64 over what the cache's type can hold."""
        lines = []
        queries = iter(self.query.double())
        for (cached, new), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            keys, values = (tensor.to(self.shape.dtype).double() for tensor in (keys, values))
            for position in range(cached, cached + new):
                first = self.first_seen(position)
                lines.append(self._dense(next(queries), keys[first : position + 1], values[first : position + 1]))
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
        return 0 if self.shape.window is None else max(0, position - self.shape.window + 1)

    def _row(self, tokens: int, seed: int) -> torch.Tensor:
        return normal(seed, tokens, self.shape.kv_heads, self.shape.head_size)

    def _new(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The tokens of this step, end to end."""
        return torch.cat([tensor[-new:] for tensor, (_, new) in zip(rows, self.rows, strict=True)])

    def _dense(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """query [heads, d], keys and values [n, kv_heads, d] -> [heads, d]; query head h reads head h // ratio."""
        ratio = self.shape.heads // self.shape.kv_heads
        heads = []
        for head in range(self.shape.heads):
            scores = keys[:, head // ratio] @ query[head] * self.shape.scale
            if self.shape.soft_cap is not None:
                scores = self.shape.soft_cap * torch.tanh(scores / self.shape.soft_cap)
            weights = torch.exp(scores - scores.max())
            heads.append(weights / weights.sum() @ values[:, head // ratio])
        return torch.stack(heads)

    def _scatter(self, generator: torch.Generator) -> torch.Tensor:
        """Distinct random blocks for every row; beyond its own a row's table holds ids of blocks it does not own."""
        needed = [-(-(cached + new) // self.shape.block_size) for cached, new in self.rows]
        ids = iter((torch.randperm(sum(needed) + 5, generator=generator) + 1).tolist())
        self.num_blocks = sum(needed) + 6
        table = torch.randint(self.num_blocks, (len(needed), max(needed)), generator=generator).int()
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([next(ids) for _ in range(count)])
        return table

    def _empty(self) -> torch.Tensor:
        spec = KVCacheSpec(self.shape.kv_heads, self.shape.head_size, self.shape.dtype, self.shape.window)
        cache = torch.full(attention.kv_cache_shape(spec, self.num_blocks, self.shape.block_size), math.nan)
        cache[:, 0] = 0
        return cache.to(self.shape.dtype)

    def _fill(self) -> None:
        """The keys and values of earlier steps that some token of this step sees."""
        for row, (cached, _) in enumerate(self.rows):
            seen = range(self.first_seen(cached), cached)
            slots = torch.tensor([self.slot(row, position) for position in seen], dtype=torch.int64)
            kept = slice(seen.start, seen.stop)
            attention.write_kv_cache(
                self.keys[row][kept], self.values[row][kept], self.key_cache, self.value_cache, slots
            )

    def _drop_blocks_out_of_window(self, seed: int) -> None:
        for row, (cached, _) in enumerate(self.rows):
            if (seed + row) % 2:
                self.table[row, : self.first_seen(cached) // self.shape.block_size] = 0


decode_row = st.tuples(st.integers(0, 70), st.just(1))
prompt_row = st.tuples(st.just(0), st.integers(2, 25))
continued_row = st.tuples(st.integers(1, 40), st.integers(2, 25))
ROWS = {
    "decode": st.lists(decode_row, min_size=1, max_size=9),
    "prefill": st.lists(prompt_row, min_size=1, max_size=4),
    "continued": st.lists(continued_row, min_size=1, max_size=4),
    "mixed": st.lists(st.one_of(decode_row, prompt_row, continued_row), min_size=2, max_size=7),
}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Shape(
        heads=kv_heads * draw(st.sampled_from([1, 2, 7])),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([8, 10, 64, 80, 128])),
        block_size=draw(st.sampled_from([1, 3, 4, 16])),
        window=draw(st.sampled_from([None, None, 1, 3, 16, 33, 1000])),
        soft_cap=draw(st.sampled_from([None, None, 2.0])),
        dtype=draw(dtypes),
        gather_elements=draw(st.sampled_from([1, 2000, 1 << 20])),
        query_chunk=draw(st.sampled_from([1, 5, 512])),
    )


@pytest.mark.parametrize("kind", ROWS)
@settings(max_examples=40)
@given(data=st.data(), shape=shapes(), seed=seeds)
def test_paged_attention(kind: str, data: st.DataObject, shape: Shape, seed: int) -> None:
    pages = Pages(shape, data.draw(ROWS[kind]), seed)
    assert_close(pages.attend(), pages.expected())


@quick
@given(shape=shapes(), rows=ROWS["mixed"], seed=seeds)
def test_writing_touches_its_own_slots_only(shape: Shape, rows: list[tuple[int, int]], seed: int) -> None:
    pages = Pages(shape, rows, seed)
    before = pages.key_cache.clone(), pages.value_cache.clone()
    pages.attend()
    others = torch.ones(before[0].shape[1], dtype=torch.bool)
    others[pages.slot_mapping()] = False
    for old, new in zip(before, (pages.key_cache, pages.value_cache), strict=True):
        assert torch.equal(old[:, others].nan_to_num(7), new[:, others].nan_to_num(7))
        assert new[:, ~others].isfinite().all()


MIXED = [(30, 1), (5, 1), (0, 9), (13, 6)]


@pytest.mark.parametrize("window", [None, 7])
def test_poison_and_reference_see_defects(window: int | None) -> None:
    """The negative control: one slot too many is NaN, one too few or in the wrong place is another number."""
    shape = Shape(window=window)
    pages = Pages(shape, MIXED, seed=0)
    expected = pages.expected()
    assert_close(pages.attend(), expected)
    for row, (cached, new) in enumerate(MIXED):
        poisoned = Pages(shape, MIXED, seed=0)
        poisoned.attend()
        poisoned.value_cache[:, poisoned.slot(row, poisoned.first_seen(cached + new - 1))] = math.nan
        assert _attend_again(poisoned).isnan().any()
    swapped = Pages(shape, MIXED, seed=0)
    swapped.attend()
    here, there = swapped.slot(0, 29), swapped.slot(0, 28)
    swapped.value_cache[:, [here, there]] = swapped.value_cache[:, [there, here]]
    with pytest.raises(AssertionError):
        assert_close(_attend_again(swapped), expected)


@pytest.mark.parametrize("change", [{"window": 6}, {"window": 8}, {"soft_cap": 2.0}])
def test_reference_tells_shapes_apart(change: dict[str, Any]) -> None:
    pages, other = Pages(Shape(window=7), MIXED, seed=0), Pages(Shape(**{"window": 7, **change}), MIXED, seed=0)
    with pytest.raises(AssertionError):
        assert_close(pages.attend(), other.expected())


def _attend_again(pages: Pages) -> torch.Tensor:
    """Attend over the cache as it is."""
    return attention.paged_attention(
        pages.query,
        pages.key_cache,
        pages.value_cache,
        pages.metadata(),
        scale=pages.shape.scale,
        sliding_window=pages.shape.window,
    )


def test_extreme_scores() -> None:
    """Softmax subtracts the largest score: no overflow however large they are."""
    pages = Pages(Shape(), MIXED, seed=0)
    pages.query *= 300
    assert_close(pages.attend(), pages.expected(), tolerance=1e-3)
