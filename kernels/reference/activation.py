"""Activations, plain and gated: computed in float32 whatever the type of the input, rounded once to that type.

A gated activation takes x [..., 2d], the gate in its first half and the value in its second, and returns [..., d].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Those that a backend may have kernels for.
OPERATIONS = (
    *("silu_and_mul", "mul_and_silu", "gelu_and_mul", "silu", "gelu", "gelu_new", "quick_gelu", "relu", "relu2"),
    *("soft_cap", "xielu", "gelu_and_mul_sparse"),
)
# The constants of "swigluoai", gpt-oss's: of the gate's sigmoid, and where gate and value end.
SWIGLUOAI_ALPHA = 1.702
SWIGLUOAI_LIMIT = 7.0


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: silu of the first half times the second."""
    gate, up = _halves(x)
    return F.silu(gate).mul_(up).to(x.dtype)


def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: the first half times silu of the second."""
    up, gate = _halves(x)
    return F.silu(gate).mul_(up).to(x.dtype)


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: gelu of the first half times the second; `approximate` as in torch."""
    gate, up = _halves(x)
    return F.gelu(gate, approximate=approximate).mul_(up).to(x.dtype)


def gelu_and_mul_sparse(x: torch.Tensor, deviations: float, approximate: str) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: the gate keeps what exceeds mean + deviations * std of its row, then gelu."""
    gate, up = _halves(x)
    centred = gate - gate.mean(dim=-1, keepdim=True)
    std = centred.square().mean(dim=-1, keepdim=True).sqrt()
    kept = F.relu(centred - std * deviations)
    return F.gelu(kept, approximate=approximate).mul_(up).to(x.dtype)


def fatrelu_and_mul(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: the first half where it exceeds `threshold`, else 0, times the second."""
    gate, up = _halves(x)
    return F.threshold(gate, threshold, 0.0).mul_(up).to(x.dtype)


def silu_and_mul_with_clamp(x: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: g sigmoid(alpha g) (u + beta), g = min(gate, limit), u = up within +-limit."""
    return _clamped_glu(*_halves(x), limit, alpha, beta).to(x.dtype)


def swigluoai_and_mul(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """`silu_and_mul_with_clamp` with beta = 1, the gate in the even channels and the value in the odd ones."""
    gate, up = _pairs(x)
    return _clamped_glu(gate, up, limit, alpha, 1.0).to(x.dtype)


def swiglustep_and_mul(x: torch.Tensor, limit: float) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: min(silu(gate), limit) * up within +-limit; the clamp follows silu."""
    gate, up = _halves(x)
    return F.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit)).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: x sigmoid(x)."""
    return F.silu(x.float()).to(x.dtype)


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """float [...] -> [...]: gelu; `approximate` as in torch."""
    return F.gelu(x.float(), approximate=approximate).to(x.dtype)


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return gelu(x, "tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: x sigmoid(1.702 x)."""
    wide = x.float()
    return torch.sigmoid(1.702 * wide).mul_(wide).to(x.dtype)


def relu(x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: max(x, 0)."""
    return F.relu(x)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: max(x, 0)^2."""
    return F.relu(x.float()).square_().to(x.dtype)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """float32, in place: cap * tanh(x / cap)."""
    return x.div_(cap).tanh_().mul_(cap)


def xielu(
    x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: float
) -> torch.Tensor:
    """float [...] -> [...]: p x^2 + beta x for x > 0, else n (expm1(min(x, eps)) - x) + beta x.

    p = softplus(alpha_p) and n = softplus(alpha_n) + beta; all three are of one element. eps is a small negative
    number, where the exponential of the paper is cut off for its gradient.
    """
    wide, slope = x.float(), beta.float()
    p, n = F.softplus(alpha_p.float()), F.softplus(alpha_n.float()) + slope
    negative = (torch.expm1(wide.clamp(max=eps)) - wide) * n
    return (torch.where(wide > 0, p * wide.square(), negative) + slope * wide).to(x.dtype)


def _clamped_glu(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    return torch.sigmoid(alpha * gate).mul_(gate).mul_(up.clamp(-limit, limit).add_(beta))


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves of the last dimension, in float32."""
    _require_even(x)
    first, second = x.float().chunk(2, dim=-1)
    return first, second


def _pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The even and the odd channels, in float32."""
    _require_even(x)
    wide = x.float()
    return wide[..., ::2], wide[..., 1::2]


def _require_even(x: torch.Tensor) -> None:
    if x.shape[-1] % 2:
        raise ValueError(f"a gated activation needs an even last dimension, got shape {list(x.shape)}.")
