// How elements are stored: the numbers that Python hands over, and the types they stand for.
#pragma once

#include "replay.h"
#include "simd.h"

namespace llm {

// Of integers, two or more lie side by side in a byte or a word: gemm_int8.cpp and gemm_int4.cpp. weight.py has the
// names.
enum class Kind : int64_t { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 };
LLM_NAMED(Kind)

namespace {

template <class T> struct Type { using Value = T; };

// call(the element type of a float `kind`)
template <class Call> LLM_INLINE auto with_type(Kind kind, const Call& call) {
    if (kind == Kind::FLOAT32) return call(Type<float>{});
    if (kind == Kind::BFLOAT16) return call(Type<BF16>{});
    return call(Type<F16>{});
}

}  // namespace
}  // namespace llm
