"""The values that codes of 4 bits stand for, where they are no integers counted from -8.

Each table is float32 [16], as `Weight.table`. A table of whole numbers is looked up faster, so FP4 is held doubled, and
its scales are halved; both are exact.
"""

from __future__ import annotations

import torch

from llm.kernels.reference.quantize_forms import NF4

# e2m1: a sign, then 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nf4() -> torch.Tensor:
    """The value of each code, in ascending order."""
    return torch.tensor(NF4)


def doubled_fp4() -> torch.Tensor:
    """Twice the value of each code, by the code; -0 is 0."""
    return torch.tensor([2 * value for value in _FP4] + [0.0 - 2 * value for value in _FP4])
