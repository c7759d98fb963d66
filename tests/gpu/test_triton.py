"""The Triton kernels where there is no GPU: interpreted in a process of their own, and compiled for GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


def test_the_kernels_are_right_in_tritons_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*command, str(HERE / "interpreted.py")], env=environment, capture_output=True, text=True, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


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
