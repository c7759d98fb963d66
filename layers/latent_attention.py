"""Latent attention (DeepSeek-V2, arXiv:2405.04434): one vector per token is kept, from which every head reads.

The attention over that vector, the projection whose weight is absorbed into queries and outputs, and the layer that
joins them to the other projections. There is one form for prompts and decoding: keys and values are never computed, so
a token's bits do not depend on how it was scheduled. It costs arithmetic where prompts are long: a pair of tokens takes
2 * latent + rope multiplications per head, in place of key + rope + value (DeepSeek-V3: 1088 and 320).

`AbsorbedLinearMethod` makes kv_b_proj a matrix per head for its queries and one for its outputs. Both take the memory
of the weight that was loaded, and give it back bit for bit. Integers of a checkpoint are dequantized first: the
matrices then hold their exact values in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from llm.base.construction import construction
from llm.base.custom_op import PluggableLayer
from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch, LatentCacheSpec
from llm.kernels.select import backend_of_construction
from llm.kernels.weight import Weight, kind_of
from llm.layers.linear import ColumnParallelLinear, LinearBase
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.base import LinearMethodBase, QuantizationConfig, WeightLoader
from llm.quantization.schemes import IntegerMethod
from llm.quantization.unquantized import UnquantizedLinearMethod, new_parameter

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


# Of a token in a quantized cache: of its latent and of its rotated key.
LATENT_SCALES = 2


class LatentAttention(Patchable):
    """Causal attention of layer `layer_index` over a paged cache of latents and rotated keys, one of each per token.

    Args:
        num_heads: of queries; all read the same key and value.
        latent_size: channels of the vector that is value, and key with `rope_size` rotated channels behind it.
        scale: what dot products are multiplied by before the softmax.
    """

    sliding_window: int | None = None

    def __init__(self, num_heads: int, latent_size: int, rope_size: int, *, layer_index: int, scale: float) -> None:
        super().__init__()
        self.num_heads, self.latent_size, self.rope_size = num_heads, latent_size, rope_size
        self.layer_index, self.scale = layer_index, scale
        self._ops = backend_of_construction().ops

    @property
    def operations_per_pair(self) -> int:
        """Of one query token with one key token, a multiply-add being two."""
        return 2 * self.num_heads * (2 * self.latent_size + self.rope_size)

    def kv_cache_spec(self, dtype: torch.dtype) -> LatentCacheSpec:
        return LatentCacheSpec(self.latent_size + self.rope_size, dtype, scales=LATENT_SCALES)

    def forward(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """query [N, heads, latent_size], query_rope [N, heads, rope_size], latent [N, latent_size], key_rope
        [N, rope_size] -> [N, heads, latent_size]."""
        (cache,), metadata = batch.states[self.layer_index], batch.metadata[self.layer_index]
        # Every row's tokens are written before any row reads: rows of one step may share blocks (prefix hits).
        self._ops.write_latent_cache(latent, key_rope, cache, metadata.slot_mapping)
        return self._ops.latent_attention(query, query_rope, cache, metadata, scale=self.scale)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, latent_size={self.latent_size}, rope_size={self.rope_size}"


class LatentProjection(ColumnParallelLinear):
    """kv_b_proj: what would compute each head's key and value of a latent, and is multiplied in parts in their place.

    Its weight stays in the type that it is stored in, however the rest of the model is quantized; integers are held as
    the float32 values that they stand for. Further arguments: `ColumnParallelLinear`.

    Raises:
        UnsupportedModelError: the checkpoint stores it in a way whose values only a plugin knows.
    """

    def __init__(
        self,
        latent_size: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tp: TensorParallel = SINGLE,
    ) -> None:
        self.num_heads, self.key_size = tp.share("num_attention_heads", num_heads, prefix), key_size
        super().__init__(
            latent_size,
            num_heads * (key_size + value_size),
            bias=False,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            tp=tp,
        )

    called_by = "absorbed"

    def _resolve_method(self, quant_config: QuantizationConfig | None) -> LinearMethodBase:
        asked = super()._resolve_method(quant_config)
        if type(asked) is UnquantizedLinearMethod:
            return AbsorbedLinearMethod(self.num_heads, self.key_size, asked.source, asked.reason)
        if not isinstance(asked, IntegerMethod):
            stored = asked.scheme or type(asked).__name__
            raise UnsupportedModelError(
                f"{self.prefix} is stored as {stored}; latent attention reads it in parts, of weights whose values are "
                "known. Use a checkpoint, or a plugin, that leaves kv_b_proj as it was."
            )
        if asked.storage.on_load:
            reason = "latent attention reads it in parts, which stay as they are"
            return AbsorbedLinearMethod(self.num_heads, self.key_size, asked.source, reason)
        reason = f"{asked.scheme} in the checkpoint, held as float32: latent attention reads it in parts"
        return AbsorbedLinearMethod(self.num_heads, self.key_size, asked.source, reason, asked)

    @property
    def absorbed(self) -> AbsorbedWeight:
        """Once it is loaded."""
        return cast(AbsorbedWeight, self.packed_weight)


@dataclass
class MLAModules:
    """The modules of one layer, under vLLM's names.

    Attributes:
        q_proj: queries from hidden states; None: by `q_a_proj`, `q_a_layernorm` and `q_b_proj`.
        kv_a_proj_with_mqa: latent and the key that is rotated.
        rotary_emb: of `qk_rope_head_dim` channels; None: they are not rotated.
    """

    kv_a_proj_with_mqa: LinearBase
    kv_a_layernorm: nn.Module
    kv_b_proj: LatentProjection
    rotary_emb: nn.Module | None
    o_proj: LinearBase
    q_proj: LinearBase | None = None
    q_a_proj: LinearBase | None = None
    q_a_layernorm: nn.Module | None = None
    q_b_proj: LinearBase | None = None


@PluggableLayer.register("multi_head_latent_attention")
class MultiHeadLatentAttentionWrapper(PluggableLayer):
    """Latent attention with all its projections.

    Args:
        hidden_size: channels of what goes in and comes out.
        num_heads: on this rank.
        scale: of the scores.
        qk_nope_head_dim, qk_rope_head_dim: channels of a head's query that are not rotated, then those that are.
        v_head_dim: channels of a head's output.
        q_lora_rank: channels between `q_a_proj` and `q_b_proj`; None: there are none.
        kv_lora_rank: channels of the latent.
        mla_modules: the projections and norms, which become attributes under the names that they have there.
        layer_index: position of this layer's state among the model's.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules,
        *,
        layer_index: int,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.prefix = prefix
        self.q_proj, self.q_a_proj = mla_modules.q_proj, mla_modules.q_a_proj
        self.q_a_layernorm, self.q_b_proj = mla_modules.q_a_layernorm, mla_modules.q_b_proj
        self.kv_a_proj_with_mqa = mla_modules.kv_a_proj_with_mqa
        self.kv_a_layernorm = mla_modules.kv_a_layernorm
        self.kv_b_proj = mla_modules.kv_b_proj
        self.rotary_emb = mla_modules.rotary_emb
        self.attn = LatentAttention(num_heads, kv_lora_rank, qk_rope_head_dim, layer_index=layer_index, scale=scale)
        self.o_proj = mla_modules.o_proj
        self._ops = backend_of_construction().ops

    def forward(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """float [N, hidden_size] of the step's tokens -> the same shape."""
        tokens, weight = hidden_states.shape[0], self.kv_b_proj.absorbed
        query = self._query(hidden_states).view(tokens * self.num_heads, self.qk_head_dim)
        rotated = query[:, self.qk_nope_head_dim :].contiguous()
        latent, key_rope = self.kv_a_proj_with_mqa(hidden_states).split_with_sizes(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        width = self.num_heads * self.qk_rope_head_dim
        query_rope, key_rope = rotated.view(tokens, width), key_rope.contiguous()
        if self.rotary_emb is not None:
            query_rope, key_rope = self.rotary_emb(batch.positions, query_rope, key_rope)
        by_head = query.view(tokens, self.num_heads, self.qk_head_dim)
        absorbed = self._ops.heads_linear(by_head[..., : self.qk_nope_head_dim], weight.of_queries())
        query_rope = query_rope.view(tokens, self.num_heads, self.qk_rope_head_dim)
        out = self.attn(absorbed, query_rope, self.kv_a_layernorm(latent), key_rope, batch)
        values = self._ops.heads_linear(out, weight.of_outputs())
        return self.o_proj(values.view(tokens, self.num_heads * self.v_head_dim))

    def _query(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[N, heads * qk_head_dim]."""
        if self.q_a_proj is None or self.q_a_layernorm is None or self.q_b_proj is None:
            return cast(LinearBase, self.q_proj)(hidden_states)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
