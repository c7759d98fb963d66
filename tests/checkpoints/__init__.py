"""Checkpoints and adapters that tests write: a file per format, and what its tensors stand for."""
