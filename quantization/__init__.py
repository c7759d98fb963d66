"""How weights are stored and multiplied: configs route, schemes compute, kernels do the arithmetic."""
