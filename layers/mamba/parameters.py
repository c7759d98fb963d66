"""Parameters of recurrences."""

from __future__ import annotations

import torch
from torch import nn

from llm.base.custom_op import PluggableLayer


def float32_parameter(*shape: int) -> nn.Parameter:
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
