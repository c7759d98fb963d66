"""The encoder of DeepSeek-OCR 2: a decoder of Qwen2's form over patches and queries. Import it by vLLM's path,
`llm.model_executor.models.deepencoder2`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from llm.base.construction import construction
from llm.base.custom_op import PluggableLayer
from llm.errors import ValidationError
from llm.layers.activation import SiluAndMul
from llm.layers.linear import ReplicatedLinear
from llm.layers.norm import RMSNorm
from llm.layers.rotary import ApplyRotaryEmb
from llm.layers.vision import product_type
from llm.quantization.base import QuantizationConfig

_Linear: TypeAlias = Callable[..., ReplicatedLinear]


@PluggableLayer.register("qwen2_decoder")
class CustomQwen2Decoder(PluggableLayer):
    """Layers of Qwen2 in which patches see each other in both directions, and queries the patches and those before.

    Args:
        decoder_layer: how many layers there are.
        hidden_dimension, num_attention_heads, num_key_value_heads, intermediate_size: their sizes.
        rms_norm_eps, rope_theta: of the norms, and of the rotation of queries and keys by their place.
        params_dtype, quant_config, prefix: as in `LinearBase`.
    """

    def __init__(
        self,
        decoder_layer: int = 24,
        hidden_dimension: int = 896,
        num_attention_heads: int = 14,
        num_key_value_heads: int = 2,
        intermediate_size: int = 4864,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1000000.0,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        for name, count, by in (
            ("hidden_dimension", hidden_dimension, num_attention_heads),
            ("num_attention_heads", num_attention_heads, num_key_value_heads),
        ):
            if by < 1 or count % by:
                raise ValidationError(f"{by} does not divide {name}={count}.", parameter=name, value=count)
        self.head_size = hidden_dimension // num_attention_heads
        self.rope_theta = rope_theta
        heads = num_attention_heads, num_key_value_heads
        self.layers = nn.ModuleList(
            _Layer(
                hidden_dimension,
                heads,
                intermediate_size,
                rms_norm_eps,
                params_dtype,
                quant_config,
                f"{prefix}.layers.{index}",
            )
            for index in range(decoder_layer)
        )
        self.norm = RMSNorm(hidden_dimension, rms_norm_eps, dtype=construction().activations)

    def forward(self, inputs_embeds: torch.Tensor, token_type_ids: torch.Tensor) -> torch.Tensor:
        """inputs_embeds float [B, N, H], token_type_ids int [B, N], 0 of a patch and 1 of a query -> the shape and type
        of inputs_embeds."""
        length = inputs_embeds.shape[1]
        places = torch.arange(length, device=inputs_embeds.device)
        pairs = torch.arange(0, self.head_size, 2, dtype=torch.float32, device=inputs_embeds.device)
        angles = places[:, None] / self.rope_theta ** (pairs / self.head_size)
        is_query = token_type_ids.bool()
        before = places[None, :] <= places[:, None]
        seen = ~is_query[:, None, :] | (is_query[:, :, None] & before)
        hidden = inputs_embeds.to(product_type(inputs_embeds))
        for layer in self.layers:
            hidden = layer(hidden, angles.cos(), angles.sin(), seen[:, None])
        return self.norm(hidden).to(inputs_embeds.dtype)


class _Layer(nn.Module):
    def __init__(
        self,
        size: int,
        heads: tuple[int, int],
        intermediate: int,
        eps: float,
        dtype: torch.dtype | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        linear = partial(ReplicatedLinear, params_dtype=dtype, quant_config=quant_config, return_bias=False)
        self.input_layernorm = RMSNorm(size, eps, dtype=construction().activations)
        self.self_attn = _Attention(linear, size, heads, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=construction().activations)
        self.mlp = _MLP(linear, size, intermediate, f"{prefix}.mlp")

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, seen)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Attention(nn.Module):
    def __init__(self, linear: _Linear, size: int, heads: tuple[int, int], prefix: str) -> None:
        super().__init__()
        self.head_size = size // heads[0]
        self.q_proj = linear(size, size, prefix=f"{prefix}.q_proj")
        self.k_proj = linear(size, heads[1] * self.head_size, prefix=f"{prefix}.k_proj")
        self.v_proj = linear(size, heads[1] * self.head_size, prefix=f"{prefix}.v_proj")
        self.o_proj = linear(size, size, bias=False, prefix=f"{prefix}.o_proj")
        self.rotate = ApplyRotaryEmb()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """x float [B, N, H], cos and sin [N, head_size / 2], seen bool [B, 1, N, N] -> the shape of x."""
        query, key, value = (
            projection(x).float().unflatten(-1, (-1, self.head_size))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (self.rotate(part, cos, sin).transpose(1, 2) for part in (query, key))
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value.transpose(1, 2)))
        scores = (query @ key.transpose(2, 3) * self.head_size**-0.5).masked_fill(~seen, -torch.inf)
        out: torch.Tensor = self.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2).to(x.dtype))
        return out


class _MLP(nn.Module):
    def __init__(self, linear: _Linear, size: int, intermediate: int, prefix: str) -> None:
        super().__init__()
        self.gate_proj = linear(size, intermediate, bias=False, prefix=f"{prefix}.gate_proj")
        self.up_proj = linear(size, intermediate, bias=False, prefix=f"{prefix}.up_proj")
        self.down_proj = linear(intermediate, size, bias=False, prefix=f"{prefix}.down_proj")
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(torch.cat([self.gate_proj(x), self.up_proj(x)], -1)))
        return out
