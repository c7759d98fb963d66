"""How far it is from `LLM.generate` to the GEMM: a request passes few functions in few files."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path
from types import FrameType

import pytest
import torch
from embedded import engine_of, open_llm
from kernel_sets import has_kernels, needs_compiler

import llm
from llm import SamplingParams

PACKAGE = Path(llm.__file__).parent
# The GEMM's own function is the last of them.
MOST_FRAMES, MOST_FILES = 12, 9
# Files that docs/architecture.md leads through, and all in which a function runs, whatever it is for.
MOST_TO_READ, MOST_THAT_RUN = 25, 64
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


def files_that_run() -> set[str]:
    """The package's own files in which a function is called by `LLM.generate`, as their paths in the repository."""
    root, found = PACKAGE.resolve().parent, set()

    def called(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    with open_llm() as engine:
        sys.setprofile(called)
        try:
            engine.generate("In the beginning", SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
        finally:
            sys.setprofile(None)
    paths = [Path(name).resolve() for name in found]
    return {str(path.relative_to(root)) for path in paths if path.is_relative_to(root) and path.is_file()}


def test_the_tour_leads_through_few_files_that_run() -> None:
    text = (PACKAGE.resolve().parent / "docs" / "architecture.md").read_text("utf-8")
    steps = text.partition("## A request in ten steps")[2].partition("\n## ")[0]
    names = re.findall(r"`([\w/]+\.(?:py|cpp))`", steps)
    files = {name if "/" in name else f"llm/models/decoder/{name}" for name in names}
    assert 20 < len(files) <= MOST_TO_READ
    ran = files_that_run()
    # Plain data, and no Python.
    assert files - ran == {"llm/engine/step.py", "kernels/cpu/gemm_int8.cpp"}
    assert len(ran) <= MOST_THAT_RUN, "\n".join(sorted(ran))
