// A weight [n, k] as Python describes it once (packed.py), and what products with any weight share.
#pragma once

#include "kinds.h"
#include "panels.h"

namespace llm {

// What a product makes of its float32 activations before it multiplies. weight.py has the names.
enum class Activations : int64_t { FLOAT, BFLOAT16, INT8 };
LLM_NAMED(Activations)

// W[i, j] = (w[i, j] - zero[i, j / group_size]) * scale[i, j / group_size], or w[i, j] of a float kind.
//   data          panels of 16 rows: kernels/README.md
//   sums          [n, padded to panels], the sum of each row of w; of INT8 alone
//   scale, zero   [groups][stride], the rows of a group side by side; zero may be null
//   bias          [n] or null
//   input_scale   of static int8 activations, with input_offset; 0: each row of activations has its own
#define LLM_WEIGHT(FIELD)           \
    FIELD(const void*, data)        \
    FIELD(const int32_t*, sums)     \
    FIELD(const void*, scale)       \
    FIELD(const void*, zero)        \
    FIELD(const float*, bias)       \
    FIELD(Kind, kind)               \
    FIELD(Kind, scale_kind)         \
    FIELD(Kind, zero_kind)          \
    FIELD(int64_t, scale_stride)    \
    FIELD(int64_t, zero_stride)     \
    FIELD(int64_t, n)               \
    FIELD(int64_t, k)               \
    FIELD(int64_t, group_size)      \
    FIELD(Activations, activations) \
    FIELD(int64_t, input_offset)    \
    FIELD(float, input_scale)

struct Weight {
#define LLM_DECLARED(TYPE, NAME) TYPE NAME;
    LLM_WEIGHT(LLM_DECLARED)
#undef LLM_DECLARED
};
LLM_NAMED(const Weight*)

// One function for each way to multiply: x [m, k] -> y [m, n].
void linear_float(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);  // gemm_float.cpp
void linear_int8(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);   // gemm_int8.cpp
void linear_int4(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);   // gemm_int4.cpp
void linear_weight_only(const Weight& weight, const float* x, float* y, int64_t m,
                        int64_t threads);  // gemm_weight_only.cpp

// And for each kind of panels: src [n, k] -> panels; rows [first, end) of a weight -> dst, as they were; rows `ids`
// [count], all below n, as floats.
void pack_float(Kind kind, const void* src, void* dst, int64_t n, int64_t k, int64_t threads);
void pack_int8(const int8_t* src, int8_t* dst, int32_t* sums, int64_t n, int64_t k, int64_t threads);
void pack_int4(const int8_t* src, uint8_t* dst, int64_t n, int64_t k, int64_t threads);
void unpack_float(const Weight& weight, void* dst, int64_t first, int64_t end, int64_t threads);
void unpack_int8(const Weight& weight, int8_t* dst, int64_t first, int64_t end, int64_t threads);
void unpack_int4(const Weight& weight, int8_t* dst, int64_t first, int64_t end, int64_t threads);
void gather_float(const Weight& weight, const int64_t* ids, float* y, int64_t count, int64_t threads);
void gather_int8(const Weight& weight, const int64_t* ids, float* y, int64_t count, int64_t threads);

namespace {

// One value for each row and group.
struct Groups {
    const void* data;
    Kind kind;
    int64_t stride;

    // 16 rows of a group from `row` on; those beyond `count` are 0 and not read. `ahead`: what lies so many rows
    // further is fetched meanwhile; values come from memory one line at a time.
    LLM_INLINE F32 load(int64_t group, int64_t row, int64_t count, int64_t ahead = 0) const {
        return with_type(kind, [&](auto type) {
            const auto* at = static_cast<const typename decltype(type)::Value*>(data) + group * stride + row;
            if (ahead) prefetch(at + ahead);
            return load_part(at, count);
        });
    }
    LLM_INLINE float at(int64_t group, int64_t row) const {
        return with_type(kind, [&](auto type) {
            return widen(static_cast<const typename decltype(type)::Value*>(data)[group * stride + row]);
        });
    }
    LLM_INLINE void fetch(int64_t group, int64_t row) const {
        prefetch(static_cast<const char*>(data) + (group * stride + row) * (kind == Kind::FLOAT32 ? 4 : 2));
    }
};

// y [m, n] = x [m, k] W^T + bias.
struct Product : Weight {
    const float* x;
    float* y;
    int64_t m;

    int64_t panels() const { return ceil_div(n, LANES); }
    LLM_INLINE Groups scales() const { return {scale, scale_kind, scale_stride}; }
    LLM_INLINE Groups zeros() const { return {zero, zero_kind, zero_stride}; }
    // The biases of 16 outputs from `column` on, 0 where there are none.
    LLM_INLINE F32 biases(int64_t column) const { return bias ? load_part(bias + column, n - column) : llm::zero(); }
    // y = value (+ the biases of these columns), of which those beyond n are left out.
    LLM_INLINE void store_output(int64_t row, int64_t column, F32 value, F32 its_biases) const {
        store_part(y + row * n + column, bias ? value + its_biases : value, n - column);
    }
};

}  // namespace
}  // namespace llm
