"""What a step leaves to PyTorch: nothing that its OpenMP threads would share, as they then spin beside the kernels'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.sentence_transformers import ENCODERS, prompts, save_model, save_modules
from embedded import engine_of, open_llm
from kernel_sets import has_kernels, needs_compiler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llm import LLM, SamplingParams

# PyTorch's internal::GRAIN_SIZE: elements that one thread keeps to itself.
GRAIN = 32768
PROMPTS = [{"prompt_token_ids": [5 + i, 300, 301]} for i in range(200)]
pytestmark = [needs_compiler, pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")]


class _Shared(TorchDispatchMode):
    """Notes every operation, neither a view nor an allocation, on more elements than PyTorch gives to one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = not func._schema.is_mutable and any(item.alias_info for item in func._schema.returns)
        tensors = [item for item in tree_leaves((args, result)) if isinstance(item, torch.Tensor)]
        if not is_view and "empty" not in str(func) and any(item.numel() >= GRAIN for item in tensors):
            self.names.add(str(func))
        return result


@contextmanager
def shared_operations(llm: Any) -> Iterator[set[str]]:
    """Their names, from the forward passes and the sampling inside the context."""
    runner = engine_of(llm).runner
    execute = runner.execute
    noted = _Shared()

    def watched(plan: Any) -> Any:
        with noted:
            return execute(plan)

    runner.execute = watched
    try:
        yield noted.names
    finally:
        runner.execute = execute


def test_a_step_gives_pytorch_nothing_to_share_among_threads() -> None:
    with open_llm(enable_prefix_caching=False, max_num_seqs=len(PROMPTS)) as llm:
        with shared_operations(llm) as names:
            llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert not names
        with shared_operations(llm) as names:
            runner = engine_of(llm).runner
            plain = runner.forward
            runner.forward = lambda batch: plain(batch) * 1.0
            llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert names == {"aten.mul.Tensor"}


@pytest.mark.parametrize("family", ENCODERS)
def test_nor_does_a_step_of_an_encoder(family: str, tmp_path: Path) -> None:
    name, config = ENCODERS[family]
    save_model(tmp_path, f"{name}Model", **config)
    save_modules(tmp_path, "mean")
    texts = prompts([70] * 12)
    with LLM(tmp_path, skip_tokenizer_init=True, max_num_batched_tokens=1024) as llm:
        assert sum(map(len, texts)) * 48 > GRAIN
        with shared_operations(llm) as names:
            llm.embed(texts, use_tqdm=False)
        assert not names
