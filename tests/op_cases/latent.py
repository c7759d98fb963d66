"""Latent attention as a whole layer, against its plain form: keys and values of every head, computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llm.forward import AttentionMetadata, ForwardBatch
from llm.layers.latent_attention import LatentProjection, MLAModules, MultiHeadLatentAttentionWrapper
from llm.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from llm.layers.norm import RMSNorm
from llm.layers.rotary import RopeParameters, RotaryEmbedding, base_wavelengths
from llm.loading.loader import process_weights
from op_cases.base import Case, Inputs, normal

HIDDEN, HEADS, PLAIN, ROPE, VALUE, QUERY_RANK, RANK = 45, 3, 7, 6, 9, 14, 20
SCALE = 0.3
BLOCK = 4


class Whole(nn.Module):
    """The layer over one prompt, which has a cache of its own."""

    def __init__(self, dtype: torch.dtype, rank: int | None, is_neox_style: bool) -> None:
        super().__init__()
        common: Any = {"params_dtype": dtype, "bias": False}
        width = HEADS * (PLAIN + ROPE)
        modules = MLAModules(
            kv_a_proj_with_mqa=ReplicatedLinear(HIDDEN, RANK + ROPE, return_bias=False, **common),
            kv_a_layernorm=RMSNorm(RANK, dtype=dtype),
            kv_b_proj=LatentProjection(RANK, HEADS, PLAIN, VALUE, params_dtype=dtype),
            rotary_emb=RotaryEmbedding.of(ROPE, 256, RopeParameters(), is_neox_style),
            o_proj=RowParallelLinear(HEADS * VALUE, HIDDEN, return_bias=False, **common),
            q_proj=ColumnParallelLinear(HIDDEN, width, return_bias=False, **common) if rank is None else None,
            q_a_proj=None if rank is None else ReplicatedLinear(HIDDEN, rank, return_bias=False, **common),
            q_a_layernorm=None if rank is None else RMSNorm(rank, dtype=dtype),
            q_b_proj=None if rank is None else ColumnParallelLinear(rank, width, return_bias=False, **common),
        )
        sizes = (HIDDEN, HEADS, SCALE, PLAIN, ROPE, VALUE, rank, RANK)
        self.layer = MultiHeadLatentAttentionWrapper(*sizes, modules, layer_index=0)
        self.is_neox_style = is_neox_style

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        process_weights(self)
        return self.layer(hidden, one_prompt(len(hidden)))


def one_prompt(count: int) -> ForwardBatch:
    rows, blocks = int(count > 0), -(-count // BLOCK)
    metadata = AttentionMetadata(
        block_table=torch.arange(1, blocks + 1, dtype=torch.int32).view(rows, blocks),
        slot_mapping=torch.arange(count) + BLOCK,
        query_start_loc=torch.tensor([0, count][: rows + 1], dtype=torch.int32),
        seq_lens=torch.tensor([count][:rows], dtype=torch.int32),
        block_size=BLOCK,
        query_lens_list=[count][:rows],
        seq_lens_list=[count][:rows],
    )
    cache = torch.full((blocks + 1, BLOCK, RANK + ROPE), torch.nan)
    cache[0] = 0
    return ForwardBatch(torch.zeros(count), torch.arange(count), [metadata], [(cache,)], torch.arange(count))


def plain_form(op: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The keys and values of each head by kv_b_proj, then softmax attention."""
    layer = op.layer

    def times(module: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ module.quant_method.dequantize_weight(module).double().t()

    def normed(module: Any, x: torch.Tensor) -> torch.Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
        return scaled * module.weight.double()

    if layer.q_proj is None:
        query = times(layer.q_b_proj, normed(layer.q_a_layernorm, times(layer.q_a_proj, hidden)))
    else:
        query = times(layer.q_proj, hidden)
    query = query.unflatten(-1, (HEADS, PLAIN + ROPE))
    latent, rope = times(layer.kv_a_proj_with_mqa, hidden).split([RANK, ROPE], dim=-1)
    both = times(layer.kv_b_proj, normed(layer.kv_a_layernorm, latent)).unflatten(-1, (HEADS, PLAIN + VALUE))
    rope = rotated(rope.unsqueeze(1), op.is_neox_style).expand(-1, HEADS, -1)
    query = torch.cat((query[..., :PLAIN], rotated(query[..., PLAIN:], op.is_neox_style)), dim=-1)
    key = torch.cat((both[..., :PLAIN], rope), dim=-1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    count = len(hidden)
    weights = scores.masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, both[..., PLAIN:])
    return times(layer.o_proj, out.flatten(1))


def rotated(x: torch.Tensor, is_neox_style: bool) -> torch.Tensor:
    """Complex multiplication: x float64 [N, heads, ROPE]."""
    angles = torch.outer(torch.arange(len(x)).double(), 1.0 / base_wavelengths(10000.0, ROPE).double())
    pairs = torch.stack(x.chunk(2, -1), -1) if is_neox_style else x.unflatten(-1, (-1, 2))
    turned = torch.complex(*pairs.unbind(-1)) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    back = torch.view_as_real(turned)
    return torch.cat(back.unbind(-1), -1) if is_neox_style else back.flatten(-2)


def prompt(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return (normal(rows, HIDDEN, dtype=torch.float32, generator=generator),)


def case(rank: int | None, is_neox_style: bool) -> Case:
    return Case(lambda dtype: Whole(dtype, rank, is_neox_style), prompt, plain_form, 2e-5, torch.float32)


LATENT: dict[str, list[Case]] = {"multi_head_latent_attention": [case(QUERY_RANK, False), case(None, True)]}
