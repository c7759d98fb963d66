"""Quantization: configs choose a scheme per layer, storages read the file's tensors, schemes compute with kernels."""
