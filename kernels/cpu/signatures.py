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
int64_t llm_linear(const Weight* weight, const float* x, float* y, int64_t m, int64_t threads)
int64_t llm_embedding(const Weight* weight, const int64_t* ids, float* y, int64_t count, int64_t threads)
int64_t llm_experts(const Weight* gate_up, const Weight* down, int64_t experts, const float* x, const int64_t* ids,
    const float* factors, int64_t tokens, int64_t top_k, int64_t function, float limit, float* y, int64_t threads)
int64_t llm_lora(const Weight* down, const Weight* up, int64_t count, const int64_t* places, const float* scales,
    const int64_t* slots, int64_t tokens, const float* x, const int64_t* ids, float* y, int64_t width, int64_t threads)
void llm_pack(Kind kind, const void* src, void* dst, int32_t* sums, int64_t n, int64_t k, int64_t threads)
void llm_unpack(const Weight* weight, void* dst, int64_t first, int64_t end, int64_t threads)
void llm_level_sums(const Weight* weight, int32_t* sums, int64_t threads)
void llm_quantize_per_token(const float* x, int8_t* q, float* scale, int64_t m, int64_t k, int64_t threads)
int64_t llm_quantize_weight(Kind kind, WeightForm form, const void* src, int8_t* q, float* scale, float* minimum,
    double* energies, const float* table, const float* input_squares, int64_t n, int64_t k, int64_t high,
    int64_t group_size, int64_t rotation, int64_t threads)
int64_t llm_column_squares(Kind kind, const void* src, int64_t* sums, int64_t n, int64_t k, int64_t threads)
int64_t llm_decode_blocks(BlockType kind, const uint8_t* raw, int8_t* q, float* scale, float* minimum,
    const int8_t* table, int64_t n, int64_t k, int64_t group_size, int64_t least, int64_t threads)
void llm_quantize_static(const float* x, int8_t* q, float scale, int64_t offset, int64_t count, int64_t threads)

void llm_rms_norm(const float* x, const float* residual, Kind kind, const void* weight, float weight_offset,
    float eps, int64_t variance_size, float* out, float* total, int64_t rows, int64_t width, int64_t threads)
void llm_layer_norm(const float* x, const float* residual, Kind kind, const void* weight, const void* bias,
    float eps, float* out, float* total, int64_t rows, int64_t width, int64_t threads)
void llm_activation(int64_t function, const float* gate, const float* up, int64_t stride, float* out, int64_t rows,
    int64_t width, int64_t threads)
void llm_xielu(const float* x, const float* alpha_p, const float* alpha_n, const float* beta, float eps, float* out,
    int64_t count, int64_t threads)
void llm_gelu_sparse(const float* x, int64_t is_tanh, float deviations, float* out, int64_t rows, int64_t width,
    int64_t threads)
void llm_soft_cap(float* x, float cap, int64_t count, int64_t threads)
void llm_select_experts(const float* logits, const float* bias, float* weights, int64_t* ids, int64_t rows,
    int64_t experts, int64_t top_k, int64_t sigmoid, int64_t renormalize, int64_t groups, int64_t topk_groups,
    float scale, int64_t threads)
void llm_mix_two_experts(const float* logits, float* weights, int64_t* ids, int64_t rows, int64_t experts,
    float tolerance, int64_t threads)
int64_t llm_rotary(const int64_t* positions, int64_t tokens, const float* table_rows, int64_t length, int64_t pairs,
    int64_t halves, const float* query, int64_t query_stride, float* query_out, int64_t heads, const float* key,
    int64_t key_stride, float* key_out, int64_t kv_heads, int64_t head_size, int64_t threads)

int64_t llm_write_kv_cache(const float* key, int64_t key_stride, const float* value, int64_t value_stride, Kind kind,
    void* key_cache, void* value_cache, const int64_t* slot_mapping, int64_t slots, int64_t tokens, int64_t kv_heads,
    int64_t head_size, const float* static_scales, int64_t threads)
int64_t llm_paged_attention(const int32_t* table, const int32_t* starts, const int32_t* lengths, int64_t rows,
    int64_t table_width, int64_t block_size, int64_t slots, const float* query, int64_t query_stride, int64_t tokens,
    Kind kind, const void* key_cache, const void* value_cache, float* out, int64_t heads, int64_t kv_heads,
    int64_t head_size, int64_t window, int64_t chunk, int64_t ahead, float scale, float soft_cap, const float* sinks,
    const float* slopes, const float* static_scales, int64_t threads)
void llm_heads_linear(Kind kind, const void* weight, const float* x, int64_t x_stride, int64_t x_head_stride, float* y,
    int64_t tokens, int64_t heads, int64_t n, int64_t k, int64_t threads)
int64_t llm_write_latent_cache(const float* latent, int64_t latent_stride, const float* rope, int64_t rope_stride,
    Kind kind, void* cache, const int64_t* slot_mapping, int64_t slots, int64_t tokens, int64_t latent_size,
    int64_t rope_size, int64_t threads)
int64_t llm_latent_attention(const int32_t* table, const int32_t* starts, const int32_t* lengths, int64_t rows,
    int64_t table_width, int64_t block_size, int64_t slots, const float* query, const float* query_rope, int64_t tokens,
    Kind kind, const void* cache, float* out, int64_t heads, int64_t latent_size, int64_t rope_size, float scale,
    int64_t threads)

int64_t llm_causal_conv1d(const int64_t* slots, const int32_t* starts, const int32_t* lengths, const int32_t* counts,
    const int32_t* stored, int64_t rows, int64_t num_slots, const float* x, int64_t x_stride, int64_t tokens,
    Kind kind, const void* weight, int64_t weight_channel, int64_t weight_tap, const void* bias, float* state,
    int64_t state_slot, int64_t state_channel, int64_t state_tap, int64_t channels, int64_t taps, int64_t silu,
    float* out, int64_t threads)
int64_t llm_gated_delta_rule(const int64_t* slots, const int32_t* starts, const int32_t* lengths,
    const int32_t* counts, const int32_t* stored, int64_t rows, int64_t num_slots, int64_t tokens, const float* query,
    int64_t query_stride, const float* key, int64_t key_stride, const float* value, int64_t value_stride,
    const float* decay, int64_t decay_stride, int64_t decay_per_channel, const float* beta, int64_t beta_stride,
    float beta_scale, const float* a, const float* dt_bias, float* state, int64_t key_heads, int64_t heads,
    int64_t keys, int64_t values, float* out, int64_t threads)
int64_t llm_selective_scan(const int64_t* slots, const int32_t* starts, const int32_t* lengths, const int32_t* counts,
    const int32_t* stored, int64_t rows, int64_t num_slots, int64_t tokens, const float* x, int64_t x_stride,
    const float* dt, int64_t dt_stride, const float* b, int64_t b_stride, const float* c, int64_t c_stride,
    const float* gate, int64_t gate_stride, const float* a, const float* d, const float* dt_bias, float* state,
    int64_t channels, int64_t states, float* out, int64_t threads)
int64_t llm_mamba2_scan(const int64_t* slots, const int32_t* starts, const int32_t* lengths, const int32_t* counts,
    const int32_t* stored, int64_t rows, int64_t num_slots, int64_t tokens, const float* x, int64_t x_stride,
    const float* dt, int64_t dt_stride, const float* b, int64_t b_stride, const float* c, int64_t c_stride,
    const float* a, const float* d, int64_t d_by_channel, const float* dt_bias, float lowest, float highest,
    float* state, int64_t heads, int64_t groups, int64_t states, int64_t channels, float* out, int64_t threads)
void llm_gated_rms_norm(const float* x, int64_t x_stride, const float* gate, int64_t gate_stride, Kind kind,
    const void* weight, float eps, int64_t groups, int64_t norm_first, int64_t sigmoid, float* out, int64_t rows,
    int64_t width, int64_t threads)

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
void llm_divide_rows(float* x, const float* divisor, int64_t rows, int64_t width, int64_t threads)

void llm_add(const float* x, const float* y, float* out, int64_t count, int64_t threads)
void llm_scale(const float* x, float factor, float* out, int64_t count, int64_t threads)
void llm_multiply(const float* x, int64_t x_stride, const float* y, int64_t y_stride, float* out, int64_t rows,
    int64_t width, int64_t threads)
void llm_scale_rows(const float* x, int64_t stride, const float* factors, int64_t factor_stride, float* out,
    int64_t rows, int64_t width)
void llm_offset(const float* x, float offset, float* out, int64_t count)
void llm_clamp(const float* x, float low, float high, float* out, int64_t count)
void llm_ids_below(const int64_t* ids, int64_t limit, int64_t* out, int64_t count)
void llm_shift(const int64_t* x, int64_t offset, int64_t* out, int64_t count)
void llm_copy_rows(const float* x, int64_t stride, float* out, int64_t rows, int64_t width)
void llm_place_rows(const float* x, float* out, int64_t stride, int64_t rows, int64_t width)
int64_t llm_select_rows(const float* x, int64_t rows, const int64_t* indices, float* out, int64_t count, int64_t width)

int64_t llm_gather(void* memory, int64_t rank, int64_t ranks, const float* x, const int64_t* owners, int64_t rows,
    int64_t width, float* out, int64_t timeout_ms)

void llm_probe_math(int64_t function, const float* x, float* out, int64_t count)
"""
# Called one argument at a time, never recorded: replay.h, LLM_FUNCTION.
_FUNCTIONS = """
int64_t llm_replay(const void* program, int64_t count)
void llm_large_pages(void* data, int64_t bytes, int64_t written)
void llm_end_threads()
int64_t llm_probe_threads(int64_t* ran_by, int64_t count, int64_t turns, int64_t threads)
int64_t llm_count_regions()
int64_t llm_region_ns()
int64_t llm_is_outnumbered()
int64_t llm_gather_bytes(int64_t ranks)
void llm_abort_ranks(void* memory)
int64_t llm_late_rank(const void* memory)
void llm_restart_ranks(void* memory, int64_t ranks)
"""

# The fields of Weight (weight.h), in order; there is what they mean.
_WEIGHT = """
const void* data
const int32_t* sums
const void* scale
const void* zero
const void* minimum
const float* table
const float* bias
const int32_t* columns
const uint8_t* levels
Kind kind
Kind scale_kind
Kind zero_kind
Kind minimum_kind
int64_t scale_stride
int64_t zero_stride
int64_t minimum_stride
int64_t n
int64_t k
int64_t group_size
int64_t rotation
Activations activations
int64_t input_offset
float input_scale
"""

# Of a type of C++ that is no pointer. Kind and the other enumerations are numbers of 64 bits.
_CTYPES: dict[str, type[Any]] = {
    "int64_t": ctypes.c_int64,
    "Kind": ctypes.c_int64,
    "Activations": ctypes.c_int64,
    "WeightForm": ctypes.c_int64,
    "BlockType": ctypes.c_int64,
    "float": ctypes.c_float,
}


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
        # In a `Slot` (replay.h) of 8 bytes: pointers and integers, and floats as doubles.
        self.pack = struct.Struct("=" + "".join("d" if kind == "float" else "q" for kind in self.types[1:])).pack

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


class WeightStruct(ctypes.Structure):
    """`Weight` in weight.h."""

    _fields_ = tuple(
        (name, _CTYPES.get(kind, ctypes.c_void_p))
        for kind, _, name in (line.rpartition(" ") for line in _WEIGHT.strip().splitlines())
    )


def exported(handle: ctypes.CDLL, name: str) -> list[str] | None:
    """What the function `name` of a library says: names up to a null; None: it has no such function."""
    try:
        function = getattr(handle, name)
    except AttributeError:
        return None
    function.argtypes, function.restype = (), ctypes.POINTER(ctypes.c_char_p)
    found: list[str] = []
    for item in function():
        if item is None:
            break
        found.append(item.decode())
    return found


def mismatches(handle: ctypes.CDLL) -> list[str]:
    """One sentence for each function whose declaration here is not what the library has, and one for `Weight`."""
    sentences = []
    for signature in (*KERNELS.values(), *FUNCTIONS.values()):
        types = exported(handle, f"{signature.name}_types")
        if types is None:
            sentences.append(f"{signature.name} is declared as {signature} and the library has no such function.")
        elif tuple(types) != signature.types:
            other = Signature(signature.name, types, ())
            sentences.append(f"{signature.name} is declared as {signature} and compiled as {other}.")
    fields = exported(handle, "llm_weight_fields")
    if fields != _WEIGHT.strip().splitlines():
        declared, compiled = ("; ".join(lines) for lines in (_WEIGHT.strip().splitlines(), fields or []))
        sentences.append(f"Weight is declared as {{{declared}}} and compiled as {{{compiled}}}.")
    return sentences


KERNELS = parse(_KERNELS)
FUNCTIONS = parse(_FUNCTIONS)
