"""Every exported function of the kernels, declared once: result, arguments, their order and their C++ types.

Python packs a call's arguments by these declarations, and loading compares them with the types that the compiled
library exports of itself (replay.h): a function that changed on one side alone is refused by name, where it would read
memory that is not its own. A test compares the arguments' names with the sources.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

# Called with one block of arguments, and recorded (program.py): replay.h, LLM_KERNEL.
_KERNELS = """
void llm_linear_float(int64_t kind, const float* x, const void* weight, const float* bias, float* y, int64_t m,
    int64_t n, int64_t k, int64_t threads)
void llm_linear_w8a8(const float* x, const int8_t* weight, const int32_t* column_sum, const float* scale,
    float input_scale, int64_t input_offset, const float* bias, float* y, int64_t m, int64_t n, int64_t k,
    int64_t threads)
void llm_linear_w4a8(const float* x, const uint8_t* weight, const void* scale, int64_t scale_kind, int64_t scale_stride,
    int64_t group_size, int64_t groups, const float* bias, float* y, int64_t m, int64_t n, int64_t k, int64_t threads)
void llm_linear_weight_only(int64_t bits, const float* x, const uint8_t* weight, const void* scale, int64_t scale_kind,
    int64_t scale_stride, const void* zero, int64_t zero_kind, int64_t zero_stride, int64_t group_size,
    const float* bias, float* y, int64_t m, int64_t n, int64_t k, int64_t threads)
int64_t llm_embedding_float(int64_t kind, const int64_t* ids, const void* weight, float* y, int64_t count, int64_t n,
    int64_t k, int64_t threads)
int64_t llm_embedding_int8(const int64_t* ids, const int8_t* weight, const float* scale, float* y, int64_t count,
    int64_t n, int64_t k, int64_t threads)
void llm_pack_float(int64_t kind, const void* src, void* dst, int64_t n, int64_t k, int64_t threads)
void llm_pack_int8(const int8_t* src, int8_t* dst, int32_t* column_sum, int64_t n, int64_t k, int64_t threads)
void llm_pack_int4(const int8_t* src, uint8_t* dst, int64_t n, int64_t k, int64_t threads)
void llm_unpack_float(int64_t kind, const void* src, void* dst, int64_t first, int64_t end, int64_t k, int64_t threads)
void llm_unpack_int8(const int8_t* src, int8_t* dst, int64_t first, int64_t end, int64_t k, int64_t threads)
void llm_unpack_int4(const uint8_t* src, int8_t* dst, int64_t first, int64_t end, int64_t k, int64_t threads)
void llm_quantize_per_token(const float* x, int8_t* q, float* scale, int64_t m, int64_t k, int64_t threads)
void llm_quantize_static(const float* x, int8_t* q, float scale, int64_t offset, int64_t count, int64_t threads)

void llm_rms_norm(const float* x, const float* residual, int64_t kind, const void* weight, float weight_offset,
    float eps, int64_t variance_size, float* out, float* total, int64_t rows, int64_t width, int64_t threads)
void llm_layer_norm(const float* x, const float* residual, int64_t kind, const void* weight, const void* bias,
    float eps, float* out, float* total, int64_t rows, int64_t width, int64_t threads)
void llm_activation(int64_t function, const float* gate, const float* up, int64_t stride, float* out, int64_t rows,
    int64_t width, int64_t threads)
void llm_soft_cap(float* x, float cap, int64_t count, int64_t threads)
int64_t llm_rotary(const int64_t* positions, int64_t tokens, const float* table_rows, int64_t length, int64_t pairs,
    int64_t halves, const float* query, int64_t query_stride, float* query_out, int64_t heads, const float* key,
    int64_t key_stride, float* key_out, int64_t kv_heads, int64_t head_size, int64_t threads)

int64_t llm_write_kv_cache(const float* key, int64_t key_stride, const float* value, int64_t value_stride, int64_t kind,
    void* key_cache, void* value_cache, const int64_t* slot_mapping, int64_t slots, int64_t tokens, int64_t kv_heads,
    int64_t head_size, int64_t threads)
int64_t llm_paged_attention(const int32_t* table, const int32_t* starts, const int32_t* lengths, int64_t rows,
    int64_t table_width, int64_t block_size, int64_t slots, const float* query, int64_t query_stride, int64_t tokens,
    int64_t kind, const void* key_cache, const void* value_cache, float* out, int64_t heads, int64_t kv_heads,
    int64_t head_size, int64_t window, float scale, float soft_cap, const float* sinks, int64_t threads)

void llm_log_softmax(const float* x, float* out, int64_t rows, int64_t width, int64_t threads)
void llm_argmax(const float* x, float* values, int64_t* ids, int64_t rows, int64_t width, int64_t threads)
void llm_top_k(const float* x, int64_t k, float* values, int64_t* ids, int64_t rows, int64_t width, int64_t threads)
int64_t llm_gather_logprobs(const float* x, const int64_t* ids, int64_t count, int64_t ranked, int64_t normalise,
    float* values, int64_t* ranks, int64_t rows, int64_t width, int64_t threads)
void llm_block_sums(const float* x, const float* largest, int64_t block, float* sums, int64_t rows, int64_t width,
    int64_t threads)
void llm_draw_nucleus(const float* x, const float* largest, const double* top_p, const double* uniform, int64_t* tokens,
    int64_t* last, int64_t rows, int64_t width, int64_t threads)
void llm_cut_below_largest(float* x, const float* offset, int64_t rows, int64_t width, int64_t threads)

void llm_add(const float* x, const float* y, float* out, int64_t count)
void llm_scale(const float* x, float factor, float* out, int64_t count)
void llm_shift(const int64_t* x, int64_t offset, int64_t* out, int64_t count)
void llm_copy_rows(const float* x, int64_t stride, float* out, int64_t rows, int64_t width)
"""
# Called one argument at a time, never recorded: replay.h, LLM_FUNCTION.
_FUNCTIONS = """
int64_t llm_replay(const void* program, int64_t count)
void llm_large_pages(void* data, int64_t bytes, int64_t written)
void llm_end_threads()
int64_t llm_probe_threads(int64_t* ran_by, int64_t count, int64_t turns, int64_t threads)
void llm_probe_math(int64_t function, const float* x, float* out, int64_t count)
"""

_CTYPES = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
# In a `Slot` (replay.h) of 8 bytes: pointers and integers, and floats as doubles.
_SLOTS = {"int64_t": "q", "float": "d"}


class Signature:
    """An exported function: its name, its result and its arguments.

    Attributes:
        types: in C++, of the result and of each argument, e.g. "const float*".
        names: of the arguments.
        pack: the arguments of one call (numbers; 0 for a null pointer) -> a block of slots, struct.error for a wrong
            number of them or a wrong type. ctypes takes three times as long to convert them one by one.
    """

    def __init__(self, name: str, types: Sequence[str], names: Sequence[str]) -> None:
        self.name, self.types, self.names = name, tuple(types), tuple(names)
        self.pack = struct.Struct("=" + "".join(_SLOTS.get(kind, "q") for kind in self.types[1:])).pack

    def __str__(self) -> str:
        return f"{self.types[0]} {self.name}({', '.join(self.types[1:])})"

    def bind(self, handle: ctypes.CDLL) -> Callable[..., Any]:
        """The function itself, to be called with its arguments one by one."""
        function = getattr(handle, self.name)
        function.argtypes = [_CTYPES.get(kind, ctypes.c_void_p) for kind in self.types[1:]]
        function.restype = _CTYPES.get(self.types[0])
        return function

    def bind_block(self, handle: ctypes.CDLL) -> Callable[[bytes], int]:
        """The function, to be called with what `pack` returns; gives 0 where it returns nothing."""
        function = getattr(handle, f"{self.name}_replay")
        function.argtypes, function.restype = (ctypes.c_char_p,), ctypes.c_int64
        return function


def parse(prototypes: str) -> dict[str, Signature]:
    """Name -> signature, of C++ prototypes."""
    found = {}
    for result, name, arguments in re.findall(r"^(\w+) (\w+)\(([^)]*)\)", prototypes, re.MULTILINE):
        pairs = [" ".join(argument.split()).rpartition(" ") for argument in arguments.split(",") if argument]
        found[name] = Signature(name, [result, *(kind for kind, _, _ in pairs)], [last for _, _, last in pairs])
    return found


def exported_types(handle: ctypes.CDLL, name: str) -> list[str] | None:
    """The types that a library exports of its function `name`, the result's first; None: it has no such function."""
    try:
        types = getattr(handle, f"{name}_types")
    except AttributeError:
        return None
    types.argtypes, types.restype = (), ctypes.POINTER(ctypes.c_char_p)
    found: list[str] = []
    for item in types():
        if item is None:
            return found
        found.append(item.decode())
    return found


def mismatches(handle: ctypes.CDLL) -> list[str]:
    """One sentence for each function whose declaration here is not what the library has."""
    sentences = []
    for signature in (*KERNELS.values(), *FUNCTIONS.values()):
        types = exported_types(handle, signature.name)
        if types is None:
            sentences.append(f"{signature.name} is declared as {signature} and the library has no such function.")
        elif tuple(types) != signature.types:
            other = Signature(signature.name, types, ())
            sentences.append(f"{signature.name} is declared as {signature} and compiled as {other}.")
    return sentences


KERNELS = parse(_KERNELS)
FUNCTIONS = parse(_FUNCTIONS)
