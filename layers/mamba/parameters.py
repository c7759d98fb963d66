"""Parameters of recurrences."""

from __future__ import annotations

import torch
from torch import nn


def float32_parameter(*shape: int) -> nn.Parameter:
    """A parameter that the checkpoint fills; what a recurrence is made of keeps its precision."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
