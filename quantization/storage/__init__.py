"""How checkpoints store quantized weights: parameters as a file has them, and the integers they stand for."""
