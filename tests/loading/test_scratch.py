"""Memory for temporaries of loading: taken again when it is free, and never before."""

from __future__ import annotations

import torch

from llm.base.construction import Scratch


def test_memory_is_taken_again_when_nothing_refers_to_it() -> None:
    scratch = Scratch()
    first = scratch.empty(8, 1 << 16)
    place = first.data_ptr()
    rows = first.fill_(1)[2:4]
    del first
    beside = scratch.empty(4, 1 << 16)  # a view still holds the first
    assert beside.data_ptr() != place and rows.eq(1).all()
    beside.fill_(2)
    assert rows.eq(1).all() and rows.dtype is torch.int8
    del rows
    again = scratch.empty(2, 1 << 16)
    assert again.data_ptr() == place and again.shape == (2, 1 << 16)
    del again
    assert scratch.empty(16, 1 << 16).shape == (16, 1 << 16)  # more than is kept


def test_nothing_is_an_empty_tensor() -> None:
    assert Scratch().empty(0, 16).shape == (0, 16)
