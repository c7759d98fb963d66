"""The kernels in Triton, for GPUs of NVIDIA and AMD. kernels/README.md says what holds for them."""
