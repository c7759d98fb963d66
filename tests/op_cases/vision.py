"""Convolutions and the attention of encoders, against torch's and transformers' modules in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from llm.layers.qwen2_decoder import CustomQwen2Decoder
from llm.layers.vision import Conv2dLayer, Conv3dLayer, MMEncoderAttention, RelPosAttention
from op_cases.base import Case, Inputs, normal

CHANNELS = 4


def image(*space: int) -> Callable[[int, torch.dtype, torch.Generator], Inputs]:
    """A batch of `rows` images, nine at most."""

    def make(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return (normal(min(rows, 9), CHANNELS, *space, dtype=dtype, generator=generator),)

    return make


def conv(layer: Any, module: Any, space: tuple[int, ...], *arguments: Any, **more: Any) -> Case:
    def reference(op: Any, x: torch.Tensor) -> torch.Tensor:
        """torch.nn.Conv2d or Conv3d."""
        twin = module(CHANNELS, 6, *arguments, **more, dtype=torch.float64)
        twin.weight.data.copy_(op.weight)
        if op.bias is not None:
            twin.bias.data.copy_(op.bias)
        return twin(x).detach()

    return Case(
        lambda dtype: layer(CHANNELS, 6, *arguments, **more, params_dtype=dtype), image(*space), reference, 1e-5
    )


HEADS, SIZE = 4, 6


def sequence_inputs(
    kv_heads: int, packed: bool, flat: bool = True
) -> Callable[[int, torch.dtype, torch.Generator], Inputs]:
    """Query, key, value [B, N, ...]; packed: one row of tokens cut into sequences, an empty one among them."""

    def make(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        batch = 1 if packed else 2

        def tokens(heads: int) -> torch.Tensor:
            x = normal(batch, rows, heads, SIZE, dtype=dtype, generator=generator)
            return x.flatten(2) if flat else x

        given = tokens(HEADS), tokens(kv_heads), tokens(kv_heads)
        cut = rows // 3
        return (*given, torch.tensor([0, cut, cut, rows], dtype=torch.int32)) if packed else given

    return make


def dense_attention(op: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any) -> torch.Tensor:
    """Softmax over all tokens of all rows, those of other sequences at minus infinity."""
    batch, length = query.shape[:2]
    tokens = batch * length
    if not tokens:
        return query
    q = query.reshape(tokens, op.num_heads, op.head_size)
    repeats = op.num_heads // op.num_kv_heads
    k, v = (x.reshape(tokens, op.num_kv_heads, op.head_size).repeat_interleave(repeats, 1) for x in (key, value))
    places = torch.arange(tokens, dtype=torch.int32)
    sequence = torch.bucketize(places, more[0][1:], right=True) if more else places // length
    scores = torch.einsum("ihd,jhd->hij", q, k) * op.scale
    scores = scores.masked_fill(sequence[:, None] != sequence[None, :], float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(query.shape)


def encoder(given: Callable[..., Inputs], **more: Any) -> Case:
    return Case(lambda _: MMEncoderAttention(HEADS, SIZE, **more), given, dense_attention, 1e-5)


DIM = 24


def sam_reference(op: Any, x: torch.Tensor) -> torch.Tensor:
    """SamVisionAttention of transformers."""
    from transformers.models.sam.modeling_sam import SamVisionAttention

    config: Any = SimpleNamespace(
        image_size=4,
        patch_size=1,
        num_attention_heads=op.num_heads,
        hidden_size=DIM,
        attention_dropout=0.0,
        qkv_bias=op.qkv.bias is not None,
        use_rel_pos=op.use_rel_pos,
    )
    twin = SamVisionAttention(config, window_size=0).double()
    twin.load_state_dict({name: value.double() for name, value in op.state_dict().items()})
    return twin(x)[0].detach() if x.numel() else x


def places(height: int, width: int) -> Callable[[int, torch.dtype, torch.Generator], Inputs]:
    def make(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return (normal(min(rows, 5), height, width, DIM, dtype=dtype, generator=generator),)

    return make


def relative(height: int, width: int, **more: Any) -> Case:
    return Case(
        lambda dtype: RelPosAttention(DIM, 3, params_dtype=dtype, **more), places(height, width), sam_reference, 1e-5
    )


def decoder_reference(op: Any, hidden: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """The layers of Qwen2 in transformers, with what each token sees written out."""
    from transformers import Qwen2Config, Qwen2Model

    layers = len(op.layers)
    config = Qwen2Config(
        hidden_size=DIM,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=20,
        num_hidden_layers=layers,
        vocab_size=3,
        rope_parameters={"rope_type": "default", "rope_theta": op.rope_theta},
        attn_implementation="eager",
    )
    twin = Qwen2Model(config).double()
    twin.load_state_dict({name: value.double() for name, value in op.state_dict().items()}, strict=False)
    length, query = hidden.shape[1], kinds.bool()
    before = torch.ones(length, length, dtype=torch.bool).tril()
    seen = torch.where(query[:, :, None], ~query[:, None] | before, ~query[:, None])
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)[:, None]
    return twin(inputs_embeds=hidden, attention_mask=mask).last_hidden_state.detach() if length else hidden


def patches_and_queries(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    hidden = normal(2, rows, DIM, dtype=dtype, generator=generator)
    return hidden, (torch.arange(rows) >= (rows + 1) // 2).long().expand(2, -1)


VISION: dict[str, list[Case]] = {
    "qwen2_decoder": [
        Case(
            lambda dtype: CustomQwen2Decoder(2, DIM, 4, 2, 20, rope_theta=10000.0, params_dtype=dtype),
            patches_and_queries,
            decoder_reference,
            2e-5,
        )
    ],
    "conv2d": [
        conv(Conv2dLayer, nn.Conv2d, (9, 12), 4, 4),
        conv(Conv2dLayer, nn.Conv2d, (9, 12), (2, 3), stride=(2, 3), bias=False),
        conv(Conv2dLayer, nn.Conv2d, (9, 7), 3, stride=2, padding=1),
        conv(Conv2dLayer, nn.Conv2d, (9, 7), 3, padding="same", dilation=2, groups=2),
        conv(Conv2dLayer, nn.Conv2d, (8, 8), 2, stride=2, padding=1),
    ],
    "conv3d": [
        conv(Conv3dLayer, nn.Conv3d, (2, 5, 6), (2, 2, 3), (2, 2, 3)),
        conv(Conv3dLayer, nn.Conv3d, (3, 5, 6), 3, stride=(1, 2, 2), padding=1, groups=2),
    ],
    "mm_encoder_attn": [
        encoder(sequence_inputs(HEADS, packed=False)),
        encoder(sequence_inputs(2, packed=True), num_kv_heads=2),
        encoder(sequence_inputs(HEADS, packed=True, flat=False), scale=0.3),
    ],
    "rel_pos_attention": [
        relative(4, 4, use_rel_pos=True, input_size=(4, 4)),
        relative(4, 3, use_rel_pos=True, input_size=(4, 4), qkv_bias=False),
        relative(4, 5),
    ],
}
