"""The layers models are wired from. A layer owns shapes and loading; its arithmetic is a kernel or a quant method."""
