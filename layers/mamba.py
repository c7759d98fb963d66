"""Recurrent mixers, which keep a state of a fixed size per request: Mamba, Mamba 2, PLaMo 2's, short convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from llm.base.custom_op import CustomOp, PluggableLayer
from llm.base.watch import Patchable
from llm.forward import ForwardBatch, RecurrentMetadata, RecurrentSpec
from llm.kernels.reference.recurrent import NO_LIMIT
from llm.kernels.select import backend_of_construction
from llm.layers.linear import (
    ColumnFactors,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    StackedByHead,
)
from llm.layers.norm import Mixer2RMSNormGated, RMSNorm
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.base import QuantizationConfig
from llm.quantization.unquantized import new_parameter


def _float32_parameter(*shape: int) -> nn.Parameter:
    """A parameter that the checkpoint fills; what a recurrence is made of keeps its precision."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)


class MambaBase:
    """Base of recurrent mixers, beside `PluggableLayer` or `CustomOp`: layers with a state of fixed size per request.

    Attributes:
        layer_index: position of the layer's state among the model's.
    """

    layer_index: int


class DecayingLayer(PluggableLayer):
    """A layer whose states decay at the rates -exp(A_log), which its recurrence gets.

    Attributes:
        A_log: as in the checkpoint, one rate per head, or [channels, states].
    """

    _is_base = True
    A_log: nn.Parameter
    _rates: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_rates", None, persistent=False)

    def weights_changed(self) -> None:
        """Compute the rates once: after loading, and after whatever may have changed `A_log`."""
        self._rates = self._computed()

    @property
    def rates(self) -> torch.Tensor:
        """float32, one per head, or [states, channels] as the states are."""
        return self._computed() if self._rates is None else self._rates

    def _computed(self) -> torch.Tensor:
        """In float64, because PyTorch's float32 exp has other bits on other processors."""
        rates = -self.A_log.detach().double().exp().float()
        return rates.t().contiguous() if rates.dim() == 2 else rates


class CausalConv1d(Patchable):
    """Each channel by itself over the last `kernel_size` tokens of its request: float32 [N, C] -> float32 [N, C].

    Args:
        sections: channels of the parts that ranks share out one by one, e.g. of queries, keys and values.
        kernel_size: K.
        bias: whether it has one.
        activation: "silu" or None.

    Attributes:
        channels: C, on this rank.
        weight: [C, 1, K], in memory with the channels side by side.
    """

    def __init__(
        self,
        sections: Sequence[int],
        kernel_size: int,
        *,
        bias: bool = False,
        activation: str | None = None,
        params_dtype: torch.dtype | None = None,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.tp, self.sections = tp, list(sections)
        # Under the names of linear layers, for checkpoints with a tensor of each section.
        self.shard_ids = tuple(range(len(sections)))
        self.output_partition_sizes = [tp.share("channels", size) for size in sections]
        self.channels = sum(self.output_partition_sizes)
        self.kernel_size, self.activation = kernel_size, activation
        weight = torch.empty(kernel_size, 1, self.channels, dtype=params_dtype).permute(2, 1, 0)
        self.weight = new_parameter(weight, self._load)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = new_parameter(torch.empty(self.channels, dtype=params_dtype), self._load)
        self._ops = backend_of_construction().ops

    @property
    def state_shape(self) -> tuple[int, int]:
        """Of the inputs before the next token, float32, the oldest first."""
        return self.kernel_size - 1, self.channels

    def _load(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int | None = None) -> int:
        """This rank's channels of section `shard_id`, of all sections if that is None."""
        whole = sum(self.sections)
        first, count = (0, whole) if shard_id is None else (sum(self.sections[:shard_id]), self.sections[shard_id])
        wanted = [count, *param.shape[1:]]
        if shard_id is not None and list(loaded.shape) != wanted:
            # transformers saves the sections' tensors as equal parts of the whole, whatever the sections' sizes.
            size = -(-whole // len(self.sections))
            first, count = shard_id * size, max(0, min(size, whole - shard_id * size))
        if list(loaded.shape) != [count, *param.shape[1:]]:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {wanted}")
        return self._copy(param, loaded, first)

    def _copy(self, param: nn.Parameter, loaded: torch.Tensor, first: int) -> int:
        """Those of this rank among consecutive channels of all sections, from `first` on."""
        copied = section = place = 0
        for size, own in zip(self.sections, self.output_partition_sizes, strict=True):
            begin = section + self.tp.rank * own
            low, high = max(begin, first), min(begin + own, first + len(loaded))
            if low < high:
                param.data[place + low - begin : place + high - begin] = loaded[low - first : high - first]
                copied += loaded[low - first : high - first].numel()
            section, place = section + size, place + own
        return copied

    def forward(self, x: torch.Tensor, state: torch.Tensor, metadata: RecurrentMetadata) -> torch.Tensor:
        """`state`: [slots, *state_shape], written in place."""
        weight, window = self.weight.squeeze(1), state.transpose(1, 2)
        return metadata.run(lambda rows: self._ops.causal_conv1d(x, weight, self.bias, window, rows, self.activation))

    def extra_repr(self) -> str:
        return f"channels={self.channels}, kernel_size={self.kernel_size}, activation={self.activation}"


@PluggableLayer.register("mamba_mixer")
class MambaMixer(MambaBase, DecayingLayer):
    """Input projection, convolution, selective scan and output projection; steps, B and C depend on the input.

    Every rank of a tensor-parallel group computes all of it.

    Args:
        hidden_size: channels of what goes in and comes out.
        ssm_state_size: states of each channel.
        conv_kernel_size: inputs that the convolution sees.
        intermediate_size: channels of the recurrence.
        time_step_rank: channels that steps are computed from.
        use_conv_bias, use_bias: of the convolution; of the projections at both ends.
        use_rms_norm: steps, B and C are normalised; `rms_norm_has_weight`: by norms with a weight.
        layer_index: position of this layer's state among the model's.
        params_dtype, quant_config, prefix: as in `LinearBase`.
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        time_step_rank: int,
        use_conv_bias: bool,
        use_bias: bool,
        use_rms_norm: bool,
        rms_norm_has_weight: bool = True,
        rms_norm_eps: float = 1e-5,
        *,
        layer_index: int,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()

        def linear(name: str, inputs: int, outputs: int, bias: bool) -> ReplicatedLinear:
            path = f"{prefix}.{name}"
            return ReplicatedLinear(
                inputs,
                outputs,
                bias,
                params_dtype=params_dtype,
                quant_config=quant_config,
                prefix=path,
                return_bias=False,
            )

        def norm(size: int) -> RMSNorm | None:
            if not use_rms_norm:
                return None
            return RMSNorm(size, rms_norm_eps, has_weight=rms_norm_has_weight, dtype=params_dtype)

        self.layer_index = layer_index
        self.sizes = [time_step_rank, ssm_state_size, ssm_state_size]
        self.in_proj = linear("in_proj", hidden_size, 2 * intermediate_size, use_bias)
        self.conv1d = CausalConv1d(
            [intermediate_size], conv_kernel_size, bias=use_conv_bias, activation="silu", params_dtype=torch.float32
        )
        self.x_proj = linear("x_proj", intermediate_size, sum(self.sizes), False)
        self.dt_proj = linear("dt_proj", time_step_rank, intermediate_size, True)
        self.A_log = _float32_parameter(intermediate_size, ssm_state_size)
        self.D = _float32_parameter(intermediate_size)
        self.out_proj = linear("out_proj", intermediate_size, hidden_size, use_bias)
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (norm(size) for size in self.sizes)
        self._ops = backend_of_construction().ops

    @staticmethod
    def state_spec(conv_kernel_size: int, intermediate_size: int, ssm_state_size: int) -> RecurrentSpec:
        """The last inputs of the convolution, and the states of the recurrence."""
        shapes = (conv_kernel_size - 1, intermediate_size), (ssm_state_size, intermediate_size)
        return RecurrentSpec(shapes, (torch.float32, torch.float32), rolls_back=True)

    def forward(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """float [N, hidden_size] of the step's tokens -> the same shape."""
        conv_state, state = batch.states[self.layer_index]
        metadata = batch.metadata[self.layer_index]
        x, gate = self.in_proj(hidden_states).tensor_split(2, dim=-1)
        x = self.conv1d(x, conv_state, metadata)
        dt, b, c = self.x_proj(x).split_with_sizes(self.sizes, dim=-1)
        dt = self.dt_proj(_normed(self.dt_layernorm, dt))
        b, c = _normed(self.b_layernorm, b), _normed(self.c_layernorm, c)
        constants = self.D, None, gate, state
        y = metadata.run(lambda rows: self._ops.selective_scan(x, dt, self.rates, b, c, *constants, rows))
        return self.out_proj(y)


def _normed(norm: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


@PluggableLayer.register("mamba_mixer2")
class MambaMixer2(MambaBase, DecayingLayer):
    """Input projection, convolution, the recurrence of each head, gated norm and output projection.

    Every rank of a tensor-parallel group computes all of it.

    Args:
        hidden_size: channels of what goes in and comes out.
        ssm_state_size: states of each channel.
        conv_kernel_size: inputs that the convolution sees.
        intermediate_size: channels of the recurrence, num_heads * head_dim.
        use_conv_bias, use_bias: of the convolution; of the projections at both ends.
        n_groups: consecutive heads share one of so many B and C; the norm is over each group's channels.
        use_rms_norm: False: the gate alone.
        norm_before_gate: the norm is of the recurrence's output; False: of its product with the gate.
        dt_limit: between which steps are clamped.
        multipliers: of what `in_proj` computes: gate, x, B, C and steps; None: no such constants.
        layer_index: position of this layer's state among the model's.
        params_dtype, quant_config, prefix: as in `LinearBase`.
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        use_conv_bias: bool,
        use_bias: bool,
        n_groups: int = 1,
        num_heads: int = 128,
        head_dim: int = 64,
        rms_norm_eps: float = 1e-5,
        use_rms_norm: bool = True,
        *,
        layer_index: int,
        norm_before_gate: bool = False,
        dt_limit: tuple[float, float] = NO_LIMIT,
        multipliers: tuple[float, ...] | None = None,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        common: dict[str, Any] = {"params_dtype": params_dtype, "quant_config": quant_config, "return_bias": False}
        self.layer_index, self.dt_limit = layer_index, dt_limit
        shared = n_groups * ssm_state_size
        self.conv_sizes = [intermediate_size, shared, shared]
        self.sizes = [intermediate_size, sum(self.conv_sizes), num_heads]
        self.in_proj = ReplicatedLinear(hidden_size, sum(self.sizes), use_bias, prefix=f"{prefix}.in_proj", **common)
        parts = [intermediate_size, *self.conv_sizes, num_heads]
        self.factors = None if multipliers is None else ColumnFactors(list(zip(parts, multipliers, strict=True)))
        self.conv1d = CausalConv1d(
            [sum(self.conv_sizes)], conv_kernel_size, bias=use_conv_bias, activation="silu", params_dtype=torch.float32
        )
        self.A_log, self.D, self.dt_bias = (_float32_parameter(num_heads) for _ in range(3))
        self.norm = Mixer2RMSNormGated(
            intermediate_size, n_groups, use_rms_norm, rms_norm_eps, params_dtype, norm_before_gate=norm_before_gate
        )
        self.out_proj = ReplicatedLinear(
            intermediate_size, hidden_size, use_bias, prefix=f"{prefix}.out_proj", **common
        )
        self._ops = backend_of_construction().ops

    @staticmethod
    def state_spec(
        conv_kernel_size: int, n_groups: int, num_heads: int, head_dim: int, ssm_state_size: int
    ) -> RecurrentSpec:
        """The last inputs of the convolution, and the states of the recurrence."""
        channels = num_heads * head_dim + 2 * n_groups * ssm_state_size
        shapes = (conv_kernel_size - 1, channels), (num_heads, ssm_state_size, head_dim)
        return RecurrentSpec(shapes, (torch.float32, torch.float32), rolls_back=True)

    def forward(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """float [N, hidden_size] of the step's tokens -> the same shape."""
        projected = self.in_proj(hidden_states)
        if self.factors is not None:
            projected = self.factors(projected)
        conv_state, state = batch.states[self.layer_index]
        metadata = batch.metadata[self.layer_index]
        gate, inputs, dt = projected.split_with_sizes(self.sizes, dim=-1)
        x, b, c = self.conv1d(inputs, conv_state, metadata).split_with_sizes(self.conv_sizes, dim=-1)
        constants = self.D, self.dt_bias, state
        y = metadata.run(lambda rows: self._ops.mamba2_scan(x, dt, self.rates, b, c, *constants, rows, self.dt_limit))
        return self.out_proj(self.norm(y, gate))


@PluggableLayer.register("plamo2_mamba_mixer")
class Plamo2MambaMixer(MambaBase, DecayingLayer):
    """Input projection, convolution, the recurrence of each head, gate and output projection.

    All heads share one B and one C. Every rank of a tensor-parallel group computes all of it.

    Args:
        hidden_size: channels of what goes in and comes out.
        ssm_state_size: states of each channel.
        conv_kernel_size: inputs that the convolution sees.
        num_heads, head_dim: of the recurrence.
        time_step_rank: channels that steps are computed from.
        rms_norm_eps: of the norms of steps, B and C.
        layer_index: position of this layer's state among the model's.
        params_dtype, quant_config, prefix: as in `LinearBase`.
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        num_heads: int,
        head_dim: int,
        time_step_rank: int,
        rms_norm_eps: float = 1e-6,
        *,
        layer_index: int,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        width = num_heads * head_dim

        def linear(name: str, inputs: int, outputs: int) -> ReplicatedLinear:
            path = f"{prefix}.{name}"
            return ReplicatedLinear(
                inputs,
                outputs,
                False,
                params_dtype=params_dtype,
                quant_config=quant_config,
                prefix=path,
                return_bias=False,
            )

        self.layer_index = layer_index
        self.sizes = [ssm_state_size, ssm_state_size, time_step_rank]
        self.in_proj = StackedByHead(
            hidden_size,
            [width, width],
            num_heads,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
            return_bias=False,
        )
        self.conv1d = CausalConv1d([width], conv_kernel_size, activation="silu", params_dtype=torch.float32)
        self.bcdt_proj = linear("bcdt_proj", width, sum(self.sizes))
        self.B_norm, self.C_norm, self.dt_norm = (
            RMSNorm(size, rms_norm_eps, dtype=params_dtype) for size in self.sizes
        )
        self.dt_proj = linear("dt_proj", time_step_rank, num_heads)
        self.A_log, self.D, self.dt_bias = (_float32_parameter(num_heads) for _ in range(3))
        self.gate = Mixer2RMSNormGated(width, 1, use_rms_norm=False)
        self.out_proj = linear("out_proj", width, hidden_size)
        self._ops = backend_of_construction().ops

    @staticmethod
    def state_spec(conv_kernel_size: int, num_heads: int, head_dim: int, ssm_state_size: int) -> RecurrentSpec:
        """The last inputs of the convolution, which sees no B and no C, and the states of the recurrence."""
        return MambaMixer2.state_spec(conv_kernel_size, 0, num_heads, head_dim, ssm_state_size)

    def forward(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """float [N, hidden_size] of the step's tokens -> the same shape."""
        conv_state, state = batch.states[self.layer_index]
        metadata = batch.metadata[self.layer_index]
        gate, inputs = self.in_proj(hidden_states).tensor_split(2, dim=-1)
        x = self.conv1d(inputs, conv_state, metadata)
        b, c, dt = self.bcdt_proj(x).split_with_sizes(self.sizes, dim=-1)
        b, c, dt = self.B_norm(b), self.C_norm(c), self.dt_proj(self.dt_norm(dt))
        constants = self.D, self.dt_bias, state
        y = metadata.run(lambda rows: self._ops.mamba2_scan(x, dt, self.rates, b, c, *constants, rows))
        return self.out_proj(self.gate(y, gate))


@CustomOp.register("short_conv")
class ShortConv(MambaBase, CustomOp):
    """b, c, x = in_proj(hidden); out_proj(c * conv(b * x)): float32 [N, dim] -> float32 [N, dim].

    Args:
        dim: channels.
        kernel_size: tokens that the convolution sees, the current one included.
        bias: of the convolution and of both projections.
        layer_index: position of this layer's state among the model's.
    """

    is_layer = True

    def __init__(
        self,
        dim: int,
        kernel_size: int,
        *,
        bias: bool = False,
        layer_index: int,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.in_proj = MergedColumnParallelLinear(
            dim,
            [dim] * 3,
            bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
            tp=tp,
            return_bias=False,
        )
        self.conv = CausalConv1d([dim], kernel_size, bias=bias, params_dtype=torch.float32, tp=tp)
        self.out_proj = RowParallelLinear(
            dim,
            dim,
            bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
            tp=tp,
            return_bias=False,
        )
        # PyTorch would share it among its own threads.
        self._ops = backend_of_construction().ops

    def forward_native(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        (window,), metadata = batch.states[self.layer_index], batch.metadata[self.layer_index]
        before, after, x = self.in_proj(hidden).tensor_split(3, dim=-1)
        return self.out_proj(self._ops.multiply(after, self.conv(self._ops.multiply(before, x), window, metadata)))
