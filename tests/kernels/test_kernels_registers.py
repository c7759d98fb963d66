"""Sums of integer GEMMs stay in registers: their loops over k store no vector on the stack, which costs a third.

Whether they do is the compiler's choice, so the compiled library is read. With AVX-512, whose registers suffice.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from kernel_sets import needs_compiler

from llm.kernels.cpu import build
from llm.kernels.cpu.library import load_library

TARGET = build.fast_targets()[-1]
# The loops of W8A8 and W4A8; each tile height has its own.
GEMMS = re.compile(r"\d(dots|add_groups)ILi(\d+)")
SPILLED = """
0000000000001000 <_ZN3llm4dotsILi2EEE>:
    1000:\tvmovdqa64 0x40(%rsp),%zmm0
    1008:\tvpdpbusd %zmm1,%zmm2,%zmm0
    1010:\tvmovdqa64 %zmm0,0x40(%rsp)
    1018:\tjne    1000 <_ZN3llm4dotsILi2EEE>
    1020:\tvmovdqa64 %zmm0,0x80(%rsp)
"""


def innermost_loops(disassembly: str) -> Iterator[tuple[str, list[str]]]:
    """(function, instructions) of each loop that has no other loop in it."""
    for function in disassembly.strip().split("\n\n"):
        head, *lines = function.split("\n")
        code = [(place.strip(), text) for place, _, text in (line.partition(":\t") for line in lines) if text]
        places = {place: index for index, (place, _) in enumerate(code)}
        ends = [  # of loops: jumps backward
            (index, places[jump[1]])
            for index, (_, text) in enumerate(code)
            if (jump := re.match(r"j\w+ +([0-9a-f]+)", text)) and places.get(jump[1], index) < index
        ]
        for end, start in ends:
            if not any(start <= other < end for other, _ in ends):
                yield head, [text for _, text in code[start:end]]


def spilling(disassembly: str) -> tuple[int, list[str]]:
    """How many loops of GEMMs there are, and the functions whose loop stores a vector on the stack."""
    loops = [
        (name, body)
        for name, body in innermost_loops(disassembly)
        if GEMMS.search(name) and any("vpdpbusd" in text for text in body)
    ]
    stores = re.compile(r"vmov\w+ +%[yz]mm\d+,.*\(%r[sb]p")
    return len(loops), [name for name, body in loops if any(stores.match(text) for text in body)]


def test_a_store_inside_the_loop_is_seen() -> None:
    """And the one behind it is not one of the loop."""
    assert spilling(SPILLED)[0] == len(spilling(SPILLED)[1]) == 1
    assert spilling(SPILLED.replace("%zmm0,0x40(%rsp)", "%zmm0,%zmm3")) == (1, [])


@needs_compiler
@pytest.mark.skipif(not shutil.which("objdump"), reason="nothing here disassembles")
@pytest.mark.skipif(TARGET not in {"avx512_vnni", "avx512_bf16"}, reason="these sums need the registers of AVX-512")
def test_integer_gemms_keep_their_sums_in_registers() -> None:
    command = ["objdump", "-d", "--no-show-raw-insn", str(load_library(TARGET).path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loops, found = spilling(shown)
    assert loops >= 12
    assert found == []
