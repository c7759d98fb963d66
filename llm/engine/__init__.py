"""The engine: policy without tensors (scheduler, block manager), and the runner behind a boundary of plain data."""
