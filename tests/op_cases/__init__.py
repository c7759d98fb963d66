"""What the walk over the registry (test_ops.py) knows about each operation: how to build it, feed it and judge it.

`CASES` is keyed by registered name. A reference is transformers' or torch's own module in float64 where
there is one (named in its docstring or its body), else the formula written here in float64, independently of the code
under test. References get the inputs and read the parameters in float64, so the only difference left is ours: float32
arithmetic and one rounding to the type of the input.
"""

from op_cases.activations import ACTIVATIONS
from op_cases.base import Case
from op_cases.grouped_topk import GROUPED
from op_cases.latent import LATENT
from op_cases.linear import LINEAR
from op_cases.mamba import MAMBA
from op_cases.moe import MOE
from op_cases.norms import NORMS
from op_cases.quant import QUANT
from op_cases.rotary import ROTARY
from op_cases.vision import VISION

CASES: dict[str, list[Case]] = {
    **ACTIVATIONS,
    **NORMS,
    **ROTARY,
    **LINEAR,
    **LATENT,
    **MAMBA,
    **MOE,
    **GROUPED,
    **QUANT,
    **VISION,
}

__all__ = ["CASES", "Case"]
