"""What tests of the C++ kernels share: each library that this machine runs, and PyTorch's global state as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_sets import TARGETS

from llm.kernels.cpu import library


@pytest.fixture(scope="module", params=TARGETS)
def lib(request: pytest.FixtureRequest) -> library.Library:
    return library.load_library(request.param)


@pytest.fixture
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
