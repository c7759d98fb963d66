"""The Triton kernels compiled for a GPU that is not here: a file of its own, as it takes as long as the interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


def test_products_of_every_kind_compile_for_a_gpu_that_is_not_here() -> None:
    command = [sys.executable, str(HERE / "compile.py"), "--quick", "--targets", "sm90"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^sm90 +gemm +\d\d forms", done.stdout, re.M) and "nothing is wrong" in done.stdout


def test_a_product_that_does_not_fit_is_found() -> None:
    sys.path.insert(0, str(HERE))
    try:
        import compile as forms
    finally:
        sys.path.remove(str(HERE))
    from llm.kernels.triton.launch import TARGETS

    compiled = forms.Compiled(None, registers=256, spilled=600, shared=300 << 10, products=frozenset())
    assert len(forms.faults(compiled, TARGETS["sm90"])) == 3
