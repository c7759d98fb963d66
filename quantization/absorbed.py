"""kv_b_proj as latent attention reads it: a matrix per head for its queries, and one for its outputs.

`AbsorbedWeight` is the layout, and `AbsorbedLinearMethod` brings the loaded weight into it. Both matrices take the
memory of the one that was loaded, and give it back bit for bit. Integers of a checkpoint are dequantized first: the
matrices then hold their exact values in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from llm.base.construction import construction
from llm.kernels.select import backend_of_construction
from llm.kernels.weight import Weight, kind_of
from llm.quantization.base import LinearMethodBase, WeightLoader
from llm.quantization.schemes import IntegerMethod
from llm.quantization.unquantized import new_parameter

_OPERATIONS = ("heads_linear", "write_latent_cache", "latent_attention")


@dataclass(frozen=True, eq=False)
class AbsorbedWeight(Weight):
    """A float matrix [heads * (key_size + value_size), latent]: a head's key rows, then its value rows, then the next.

    `data` holds the key rows of every head as they were, then the value rows of every head transposed.
    """

    heads: int = 1
    key_size: int = 0

    @property
    def value_size(self) -> int:
        return self.n // self.heads - self.key_size

    def of_queries(self) -> torch.Tensor:
        """[heads, key_size, latent]: a query times it is what latents are compared with."""
        return self.data.view(-1)[: self._split].view(self.heads, self.key_size, self.k)

    def of_outputs(self) -> torch.Tensor:
        """[heads, latent, value_size]: a sum of latents times it is the sum of their values."""
        return self.data.view(-1)[self._split :].view(self.heads, self.k, self.value_size)

    @property
    def _split(self) -> int:
        return self.heads * self.key_size * self.k

    def rows(self, start: int, end: int) -> torch.Tensor:
        both = torch.cat((self.of_queries(), self.of_outputs().transpose(1, 2)), dim=1)
        return both.reshape(self.n, self.k)[start:end]


class AbsorbedLinearMethod(LinearMethodBase):
    """A weight in its storage type: [N, K] while it is loaded, then an `AbsorbedWeight` as `packed_weight`.

    Args:
        heads, key_size: of this rank's rows.
        source, reason: why it is not quantized, where the rest of the model is.
        stored: what reads it, where the checkpoint stores integers; None: it stores floats.

    Attributes:
        stored_as: the scheme in the checkpoint; "" for floats.
    """

    def __init__(
        self, heads: int, key_size: int, source: str = "", reason: str = "", stored: IntegerMethod | None = None
    ) -> None:
        self._heads, self._key_size, self._stored = heads, key_size, stored
        self.source, self.reason = source, reason
        self.stored_as = "" if stored is None else stored.scheme
        backend = backend_of_construction()
        self.invariant = backend.computes(*_OPERATIONS)
        self.kernel = backend.source("heads_linear")

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader
    ) -> None:
        if self._stored is not None:
            self._stored.create(layer, sizes, columns, dtype, loader)
            return
        data = torch.empty((sum(sizes), columns), dtype=dtype, device=construction().device)
        layer.weight = new_parameter(data, loader, output_dim=0, input_dim=1)
        layer.packed_weight = None  # type: ignore[assignment]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if layer.packed_weight is not None:
            return
        loaded = layer.weight.data if self._stored is None else self._stored.take_dequantized(layer)
        # The parameter itself, so that whoever frees it frees the weight.
        layer.weight = nn.Parameter(torch.empty_like(loaded), requires_grad=False)
        kind = kind_of(loaded, None)
        weight = AbsorbedWeight(layer.weight, kind, *loaded.shape, heads=self._heads, key_size=self._key_size)
        by_head = loaded.view(self._heads, -1, weight.k)
        weight.of_queries().copy_(by_head[:, : self._key_size])
        weight.of_outputs().copy_(by_head[:, self._key_size :].transpose(1, 2))
        layer.packed_weight = weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Keys and values of latents, which attention here never computes."""
        return F.linear(x, self.dequantize_weight(layer).to(x.dtype), bias)

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        packed = cast(AbsorbedWeight | None, layer.packed_weight)
        weight = cast(nn.Parameter, layer.weight).data if packed is None else packed.unpack()
        return weight.float()
