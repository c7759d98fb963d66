"""The reference operations are their formulas, held against float64 written here from the definitions.

Attention is held against a dense softmax over the keys of each row; every slot that a row must not read is NaN, so one
stray read shows in the result.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Pages, Shape, normal

from llm.kernels.reference import activation, attention, elementwise, linear
from llm.layers.norm import RMSNorm

pytestmark = pytest.mark.usefixtures("one_core")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = torch.finfo(torch.float32).eps

seeds = st.integers(0, 2**31)
sizes = st.integers(1, 67)
dtypes = st.sampled_from(FLOATS)
quick = settings(max_examples=30)


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
    assert_close(elementwise.rms_norm(x, weight, 1e-5), rms_norm_64(x, weight, 1e-5))
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
    assert_close(elementwise.layer_norm(x, weight, bias, 1e-5), expected)


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
    actual = elementwise.apply_rotary(x, angles.cos(), angles.sin())
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
        actual = linear.linear(x, replace(linear.pack(weight), bias=bias))
    offset = torch.zeros(n).double() if bias is None else bias.double()
    expected = x.double() @ weight.double().T + offset
    bound = (k + 2) * EPSILON * (x.double().abs() @ weight.double().abs().T + offset.abs())
    assert actual.dtype == torch.float32 and actual.shape == (rows, n)
    assert ((actual - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7,), (2, 3, 7), (0, 7), (2, 0, 7)])
def test_linear_keeps_leading_dimensions(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = normal(0, *shape), normal(1, 5, 7).to(dtype)
    assert_close(linear.linear(x, linear.pack(weight)), x.double() @ weight.double().T)


@quick
@given(seeds, st.integers(0, 9), st.integers(1, 40), dtypes)
def test_embedding(seed: int, count: int, vocab: int, dtype: torch.dtype) -> None:
    weight = normal(seed, vocab, 5).to(dtype)
    ids = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))
    expected = torch.stack([weight[index].float() for index in ids.tolist()]) if count else torch.empty(0, 5)
    assert torch.equal(linear.embedding(ids, linear.pack(weight)), expected)


# Attention


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
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        chunk=draw(st.sampled_from([None, None, 7, 20])),
    )


@pytest.mark.parametrize("kind", ROWS)
@settings(max_examples=40)
@given(
    data=st.data(),
    shape=shapes(),
    seed=seeds,
    gather_elements=st.sampled_from([1, 2000, 1 << 20]),
    query_chunk=st.sampled_from([1, 5, 512]),
)
def test_paged_attention(
    kind: str, data: st.DataObject, shape: Shape, seed: int, gather_elements: int, query_chunk: int
) -> None:
    pages = Pages(shape, data.draw(ROWS[kind]), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_GATHER_ELEMENTS", gather_elements)
        patch.setattr(attention, "_QUERY_CHUNK", query_chunk)
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
        assert poisoned.attend_again().isnan().any()
    swapped = Pages(shape, MIXED, seed=0)
    swapped.attend()
    here, there = swapped.slot(0, 29), swapped.slot(0, 28)
    swapped.value_cache[:, [here, there]] = swapped.value_cache[:, [there, here]]
    with pytest.raises(AssertionError):
        assert_close(swapped.attend_again(), expected)


@pytest.mark.parametrize(
    "change",
    [{"window": 6}, {"window": 8}, {"soft_cap": 2.0}, {"sinks": True}, {"alibi": True}, {"window": None, "chunk": 5}],
)
def test_reference_tells_shapes_apart(change: dict[str, Any]) -> None:
    pages, other = Pages(Shape(window=7), MIXED, seed=0), Pages(Shape(**{"window": 7, **change}), MIXED, seed=0)
    with pytest.raises(AssertionError):
        assert_close(pages.attend(), other.expected())


def test_extreme_scores() -> None:
    """Softmax subtracts the largest score: no overflow however large they are."""
    pages = Pages(Shape(), MIXED, seed=0)
    pages.query *= 300
    assert_close(pages.attend(), pages.expected(), tolerance=1e-3)
