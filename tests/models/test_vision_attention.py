"""The attention of towers is PyTorch's, whatever is masked, and a sequence's bits depend on nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_sets import needs_kernels

from llm.kernels.select import backend_for
from llm.models.vision import attention
from llm.platforms import current_platform

HEADS, SIZE = 4, 8
OPS = backend_for(current_platform).ops


def tokens(batch: int, heads: int, count: int, seed: int) -> torch.Tensor:
    return torch.randn(batch, heads, count, SIZE, generator=torch.Generator().manual_seed(seed))


def attend(*given: Any, is_causal: bool | None = False, **more: Any) -> torch.Tensor:
    with attention.computing(OPS):
        out, _ = attention._attend(SimpleNamespace(is_causal=False), *given, is_causal=is_causal, **more)  # type: ignore[arg-type]
    return out


def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **more).transpose(1, 2)


PADDED = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


@pytest.mark.parametrize(
    ("queries", "keys", "kv_heads", "mask"),
    [
        (7, 7, HEADS, None),
        (7, 7, 2, None),
        (3, 7, HEADS, None),
        (7, 7, HEADS, PADDED[:, None, None]),
        (3, 7, HEADS, PADDED[:, None, None].expand(2, 1, 3, 7)),
        (9, 7, HEADS, PADDED[:, None, None].expand(2, 1, 9, 7)),
        (7, 7, HEADS, torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(5))),
        (7, 7, HEADS, torch.ones(7, 7, dtype=torch.bool).tril()[None, None]),
    ],
)
def test_it_is_pytorchs_attention(queries: int, keys: int, kv_heads: int, mask: torch.Tensor | None) -> None:
    given = tokens(2, HEADS, queries, 0), tokens(2, kv_heads, keys, 1), tokens(2, kv_heads, keys, 2)
    found, expected = attend(*given, mask), fused(*given, attn_mask=mask)
    if mask is PADDED[:, None, None] or (mask is not None and mask.shape[2] == 1 and queries == keys):
        found, expected = found[PADDED], expected[PADDED]  # padding has no meaning
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_cap_and_a_causal_mask_are_computed() -> None:
    given = tokens(1, HEADS, 5, 0), tokens(1, HEADS, 5, 1), tokens(1, HEADS, 5, 2)
    assert torch.allclose(attend(*given, None, is_causal=True), fused(*given, is_causal=True), atol=1e-5)
    scores = given[0] @ given[1].transpose(-1, -2) * SIZE**-0.5
    expected = (torch.tanh(scores / 2.0) * 2.0).softmax(-1) @ given[2]
    assert torch.allclose(attend(*given, None, softcap=2.0), expected.transpose(1, 2), atol=1e-5)


def test_packed_sequences_have_the_bits_of_each_alone() -> None:
    lengths = [1, 16, 0, 5, 33]
    given = [tokens(1, HEADS, sum(lengths), seed) for seed in range(3)]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    found = attend(*given, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    parts = zip(*(part.split(lengths, dim=2) for part in given), strict=True)
    each = [attend(*part, None) for part in parts if part[0].shape[2]]
    assert torch.equal(found, torch.cat(each, dim=1))


@needs_kernels
def test_the_number_of_threads_changes_no_bit() -> None:
    given = tokens(1, 2, 17, 0), tokens(1, 2, 17, 1), tokens(1, 2, 17, 2)
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(attend(*given, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_attention_of_sam_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.got_ocr2.modeling_got_ocr2")
    from transformers import GotOcr2VisionConfig

    config = GotOcr2VisionConfig(hidden_size=16, num_attention_heads=2, image_size=40, patch_size=8)
    generator = torch.Generator().manual_seed(7)
    for window in (0, 3):
        theirs = modeling.GotOcr2VisionAttention(config, window).eval().requires_grad_(False)
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.5, generator=generator)
        assert attention.is_sams(theirs) and not attention.is_sams(theirs.qkv)
        ours = attention.SamAttention(theirs, "", torch.float32)
        for name, parameter in theirs.named_parameters():
            ours.get_parameter(name).data.copy_(parameter)
        size = window or 5
        image = torch.randn(3, size, size, 16, generator=generator)
        assert torch.allclose(ours(hidden_states=image)[0], theirs(image)[0], atol=1e-5)
        ours.rel_pos_h.data.neg_()
        assert not torch.allclose(ours(hidden_states=image)[0], theirs(image)[0], atol=1e-2)
