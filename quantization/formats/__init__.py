"""Checkpoint formats, one file each: the scheme of every layer, and the tensors in which its weight is stored."""
