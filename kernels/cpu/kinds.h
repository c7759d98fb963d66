// Element types: the numbers that Python passes, and the C++ types they stand for. weight.py has the same numbers.
#pragma once

#include "replay.h"
#include "simd.h"

namespace llm {

// Integer weights are packed: gemm_int8.cpp and gemm_int4.cpp describe how. FLOAT8 is e4m3fn, and never NaN.
enum class Kind : int64_t { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, FLOAT8 };
LLM_NAMED(Kind)

// What quantize_weight.cpp quantizes a weight to: two ways to integers, then FORMS of
// kernels/reference/quantize_weight.py.
enum class WeightForm : int64_t { ROUNDED, SEARCHED, FLOAT8, MXFP4, NF4, Q8_0, Q4_0, Q4_K, ASYMMETRIC, TWO_LEVELS };
LLM_NAMED(WeightForm)

// The types of GGUF that gguf_blocks.cpp decodes: TYPES of kernels/reference/gguf_blocks.py.
enum class BlockType : int64_t { Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4 };
LLM_NAMED(BlockType)

namespace {

template <class T> struct Type { using Value = T; };

// Calls call(Type<T>) with the element type T of a float `kind`.
template <class Call> LLM_INLINE auto with_type(Kind kind, const Call& call) {
    if (kind == Kind::FLOAT32) return call(Type<float>{});
    if (kind == Kind::BFLOAT16) return call(Type<BF16>{});
    return call(Type<F16>{});
}

// A weight of it is multiplied by scales: integers and 8-bit floats.
LLM_INLINE bool has_scales(Kind kind) { return kind == Kind::INT8 || kind == Kind::INT4 || kind == Kind::FLOAT8; }

// Of an element of a kind without scales.
LLM_INLINE int64_t bytes_of(Kind kind) { return kind == Kind::FLOAT32 ? 4 : 2; }

LLM_INLINE int64_t bits_of(Kind kind) {
    if (kind == Kind::INT4) return 4;
    return has_scales(kind) ? 8 : 8 * bytes_of(kind);
}

}  // namespace
}  // namespace llm
