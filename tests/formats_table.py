"""The table of docs/reference/formats.md: how each format is read, computed, made on load and saved.

`python tests/formats_table.py` prints it. Formats, schemes on load and saved formats are those of the registries: a
row that is missing here or is no longer registered is an error.
"""

from __future__ import annotations

from typing import NamedTuple

from llm.kernels.reference.gguf_blocks import BLOCKS
from llm.loading.save import FORMATS
from llm.quantization.formats.gptq import BITS
from llm.quantization.on_load import RECIPES
from llm.quantization.registry import builtin_methods

_FLOAT = "float32 activations"
_INT8 = "int8 activations where the file says so, else float32"


class _Row(NamedTuple):
    """What a format may hold, what its weights are multiplied with, the schemes and the saved format that make it."""

    read: str
    computed: str
    on_load: tuple[str, ...] = ()
    saved: str = ""


_ROWS: dict[str, _Row] = {
    "compressed-tensors": _Row(
        "int of 1 to 8 bits (zero points, act-order), FP8, MXFP8, MXFP4, NVFP4",
        _INT8,
        ("w8a8", "w8a8_static", "w8a16", "w4a8", "w4a16", "fp8", "mxfp4"),
        "compressed-tensors",
    ),
    "ascend": _Row(
        "ModelSlim: int8, int4, FP8, MXFP8, MXFP4",
        _INT8,
        ("w8a8", "w8a8_static", "w8a16", "w4a8", "w4a16"),
        "modelslim",
    ),
    "gguf": _Row(", ".join(BLOCKS), _FLOAT, ("q8_0", "q4_0", "q4_k", "mxfp4"), "gguf"),
    "gptq": _Row(
        f"{', '.join(map(str, BITS))} bits, both versions of zero points, act-order", _FLOAT, ("w4a16", "w8a16"), "gptq"
    ),
    "awq": _Row("4 bits, the `gemm` layout", _FLOAT),
    "bitsandbytes": _Row("NF4, FP4, double quantization, int8", _FLOAT, ("nf4",), "bitsandbytes"),
    "fp8": _Row("DeepSeek's and Qwen's e4m3, scales of a tensor, rows or blocks", _FLOAT, ("fp8",)),
    "mxfp4": _Row("the experts of gpt-oss", _FLOAT, ("mxfp4",)),
}


def overview() -> str:
    """The table in Markdown.

    Raises:
        LookupError: a format, a scheme or a saved format has no row, or a row has none.
    """
    made = {name for row in _ROWS.values() for name in row.on_load}
    saved = {row.saved for row in _ROWS.values() if row.saved}
    for what, told, registered in (
        ("formats", set(_ROWS), set(builtin_methods())),
        ("schemes", made, set(RECIPES)),
        ("saved formats", saved, set(FORMATS)),
    ):
        if told != registered:
            raise LookupError(f"the table of formats and the registered {what} differ: {sorted(told ^ registered)}")
    lines = ["| format | read | computed with | `quantization=` on load | `save_quantized` |", "|---|---|---|---|---|"]
    for name in builtin_methods():
        row = _ROWS[name]
        on_load = ", ".join(f"`{scheme}`" for scheme in row.on_load)
        lines.append(f"| {name} | {row.read} | {row.computed} | {on_load} | {f'`{row.saved}`' if row.saved else ''} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(overview())
