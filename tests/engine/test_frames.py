"""How far it is from `LLM.generate` to the GEMM: a request passes few functions in few files."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
from embedded import engine_of, open_llm
from kernel_sets import has_kernels, needs_compiler

import llm
from llm import SamplingParams

PACKAGE = Path(llm.__file__).parent
# The GEMM's own function is the last of them.
MOST_FRAMES, MOST_FILES = 12, 9
pytestmark = [needs_compiler, pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")]


def frames_to_first_gemm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(file, function) of the package's own frames, from `LLM.generate` to the function that calls the kernel."""
    found: list[tuple[str, str]] = []
    threads = torch.get_num_threads

    def traced() -> int:
        """The GEMM asks for the number of threads as it calls its kernel."""
        stack = traceback.extract_stack()[:-1]
        if not found and stack[-1].name == "linear":
            own = [(frame.filename, frame.name) for frame in stack if frame.filename.startswith(str(PACKAGE))]
            found.extend(own[[name for _, name in own].index("generate") :])
        return threads()

    monkeypatch.setattr(torch, "get_num_threads", traced)
    with open_llm() as engine:
        engine.generate("In the beginning", SamplingParams(max_tokens=1), use_tqdm=False)
    return found


def test_a_patched_quant_method_is_what_a_layer_computes_with() -> None:
    with open_llm() as engine:
        layer = engine_of(engine).runner.model.model.layers[0].self_attn.qkv_proj
        x = torch.randn(2, layer.input_size)
        before, method = layer(x), layer.quant_method
        method.apply = lambda *arguments: 2 * type(method).apply(method, *arguments)
        assert torch.equal(layer(x), 2 * before)
        del method.apply
        assert torch.equal(layer(x), before)


def test_a_request_passes_few_frames_in_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = frames_to_first_gemm(monkeypatch)
    assert frames[0][1] == "generate" and len(frames) > 5
    assert len(frames) <= MOST_FRAMES, "\n".join(map(str, frames))
    assert len({file for file, _ in frames}) <= MOST_FILES, "\n".join(map(str, frames))
