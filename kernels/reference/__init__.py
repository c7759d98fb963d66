"""Plain PyTorch: the definition of each operation. Kernels in C++ or Triton have the same names and signatures."""
