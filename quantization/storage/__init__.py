"""How checkpoints store quantized weights: the parameters of each format, and reading integers from them."""
