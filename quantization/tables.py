"""The values that codes of 4 bits stand for, where they are no integers counted from -8.

Each table is float32 [16], as `Weight.table`. A table of whole numbers is looked up faster, so FP4 is held doubled, and
its scales are halved; both are exact.
"""

from __future__ import annotations

import torch

# e2m1: a sign, then 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# NormalFloat4 (QLoRA, arXiv:2305.14314): quantiles of a normal distribution over [-1, 1], 0 among them.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def nf4() -> torch.Tensor:
    """The value of each code, in ascending order."""
    return torch.tensor(_NF4)


def doubled_fp4() -> torch.Tensor:
    """Twice the value of each code, by the code; -0 is 0."""
    return torch.tensor([2 * value for value in _FP4] + [0.0 - 2 * value for value in _FP4])
