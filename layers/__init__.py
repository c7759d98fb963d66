"""The layers that models are built from. A layer owns shapes and loading; a kernel or a quant method computes it."""
