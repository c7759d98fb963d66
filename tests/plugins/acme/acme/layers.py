"""Operations and layers that are constructed in place of the in-tree ones. Importing this module registers them."""

from __future__ import annotations

import torch

from llm.layers.activation import SiluAndMul
from llm.layers.custom_op import CustomOp, PluggableLayer
from llm.layers.linear import RowParallelLinear
from llm.layers.norm import RMSNorm
from llm.layers.rotary import RotaryEmbedding


@CustomOp.register_oot
class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        total = x if residual is None else x + residual
        scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + self.variance_epsilon)
        normed = total * scale * self.weight.float()
        return normed if residual is None else (normed, total)


@CustomOp.register_oot("SiluAndMul")
class AcmeSiluAndMul(SiluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up


@CustomOp.register_oot(name="rotary_embedding")
class AcmeRotaryEmbedding(RotaryEmbedding):
    def forward_oot(self, positions, query, key):
        cos, sin = self.cos_sin_cache[positions].chunk(2, dim=-1)
        return self._turn(query, cos, sin), self._turn(key, cos, sin)

    def _turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(x.shape[0], -1, self.head_size)
        left, right = heads.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).view(x.shape)


@PluggableLayer.register_oot(name="RowParallelLinear")
class AcmeRowParallelLinear(RowParallelLinear):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)
