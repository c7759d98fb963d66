"""The engine: policy without tensors (scheduler, block manager), and a runner that exchanges plain data with it."""
