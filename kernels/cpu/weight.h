// The weight [n, k] that Python declares (weight.py), and what every GEMM shares.
#pragma once

#include "kinds.h"
#include "panels.h"

namespace llm {

// What a GEMM makes of its float32 activations before it multiplies. weight.py has the same numbers.
enum class Activations : int64_t { FLOAT, BFLOAT16, INT8 };
LLM_NAMED(Activations)

// W[i, j] = (w[i, j] - zero[i, g]) * scale[i, g] with g = j / group_size, or w[i, j] of a float kind. With minima
// W[i, j] = code * scale[i, g] - minimum[i, g], rounded once, where code is w[i, j] + 16 of INT8, + 8 of INT4. With a
// table, which is of INT4, W[i, j] = table[w[i, j] + 8] * scale[i, g].
//   data          panels of 16 output channels: kernels/README.md
//   sums          [n, padded to panels], each output channel's sum over k; of INT8, and with levels
//   scale, zero, minimum   [groups][stride], a group's output channels side by side; one of the last two may be there
//   table         [16] or null
//   bias          [n] or null
//   columns       [k] or null: which input w[i, j] is multiplied by, where that is not input j; a permutation
//   levels        [panels][groups][16] or null; of INT4: W[i, j] = ((w[i, j] + 8) * step - shift) * scale[i]
//   rotation      0, or the block of columns that were rotated (rotate.h), as inputs are before the product
//   input_scale   of static int8 activations, with input_offset; 0: each batch row has its own scale
#define LLM_WEIGHT(FIELD)           \
    FIELD(const void*, data)        \
    FIELD(const int32_t*, sums)     \
    FIELD(const void*, scale)       \
    FIELD(const void*, zero)        \
    FIELD(const void*, minimum)     \
    FIELD(const float*, table)      \
    FIELD(const float*, bias)       \
    FIELD(const int32_t*, columns)  \
    FIELD(const uint8_t*, levels)   \
    FIELD(Kind, kind)               \
    FIELD(Kind, scale_kind)         \
    FIELD(Kind, zero_kind)          \
    FIELD(Kind, minimum_kind)       \
    FIELD(int64_t, scale_stride)    \
    FIELD(int64_t, zero_stride)     \
    FIELD(int64_t, minimum_stride)  \
    FIELD(int64_t, n)               \
    FIELD(int64_t, k)               \
    FIELD(int64_t, group_size)      \
    FIELD(int64_t, rotation)        \
    FIELD(Activations, activations) \
    FIELD(int64_t, input_offset)    \
    FIELD(float, input_scale)

struct Weight {
#define LLM_DECLARED(TYPE, NAME) TYPE NAME;
    LLM_WEIGHT(LLM_DECLARED)
#undef LLM_DECLARED
};
LLM_NAMED(const Weight*)

// y [m, n] = x [m, k] W^T + bias, of a weight that does not lack its scales: linear.cpp.
bool lacks_scales(const Weight& weight);
void linear(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);

// Its GEMMs: gemm_float.cpp, gemm_bf16.cpp, gemm_int8.cpp, gemm_int4.cpp and gemm_weight_only.cpp.
void linear_float(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);
#if LLM_BF16
void linear_bf16(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);
#endif
void linear_int8(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);
void linear_int4(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);
void linear_weight_only(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);

// Packing: src [n, k] -> panels. Unpacking: output channels [first, end) of a weight -> dst. Embedding: rows `ids`
// [count], all in [0, n), as floats.
void pack_float(Kind kind, const void* src, void* dst, int64_t n, int64_t k, int64_t threads);
void pack_int8(const int8_t* src, int8_t* dst, int32_t* sums, int64_t n, int64_t k, int64_t threads);
void pack_int4(const int8_t* src, uint8_t* dst, int64_t n, int64_t k, int64_t threads);
void pack_float8(const uint8_t* src, uint8_t* dst, int64_t n, int64_t k, int64_t threads);
void unpack_float(const Weight& weight, void* dst, int64_t first, int64_t end, int64_t threads);
void unpack_int8(const Weight& weight, int8_t* dst, int64_t first, int64_t end, int64_t threads);
void unpack_int4(const Weight& weight, int8_t* dst, int64_t first, int64_t end, int64_t threads);
void unpack_float8(const Weight& weight, uint8_t* dst, int64_t first, int64_t end, int64_t threads);
void gather_float(const Weight& weight, const int64_t* ids, float* y, int64_t count, int64_t threads);
void gather_scaled(const Weight& weight, const int64_t* ids, float* y, int64_t count, int64_t threads);

namespace {

// Scales or zeros: one value per output channel and group.
struct Groups {
    const void* data;
    Kind kind;
    int64_t stride;

    // 16 output channels of a group, from `row` on; lanes beyond `count` are 0 and not read. Prefetches the values
    // `ahead` channels further: they come from memory one line at a time.
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
    // Those of COUNT times 16 output channels, from each of `rows` on; the last of them is the highest.
    template <int COUNT>
    LLM_INLINE void load(int64_t group, const int64_t (&rows)[COUNT], int64_t end, F32 (&out)[COUNT]) const {
        with_type(kind, [&](auto type) {
            const auto* at = static_cast<const typename decltype(type)::Value*>(data) + group * stride;
            if (rows[COUNT - 1] + LANES <= end)
                LLM_UNROLL for (int i = 0; i < COUNT; ++i) out[i] = load_part(at + rows[i], LANES);
            else LLM_UNROLL for (int i = 0; i < COUNT; ++i) out[i] = load_part(at + rows[i], end - rows[i]);
        });
    }
    // Prefetches those of `count` times 16 output channels, from `row` on.
    LLM_INLINE void fetch(int64_t group, int64_t row, int count = 1) const {
        const int64_t bytes = bytes_of(kind);
        const char* at = static_cast<const char*>(data) + (group * stride + row) * bytes;
        LLM_UNROLL for (int i = 0; i < count; ++i) prefetch(at + i * LANES * bytes);
    }
};

// Bytes of one panel: 16 output channels over all k.
inline int64_t panel_bytes(Kind kind, int64_t k) {
    if (kind == Kind::INT4) return ceil_div(k, 8) * LANES * 4;
    if (kind == Kind::INT8) return ceil_div(k, 4) * LANES * 4;
    if (kind == Kind::FLOAT8) return k * LANES;
    return (kind == Kind::BFLOAT16 ? ceil_div(k, 2) * 2 : k) * LANES * bytes_of(kind);
}

// Output channels [first, end) of a weight as a weight; `first` is a multiple of 16.
inline Weight channels(const Weight& weight, int64_t first, int64_t end) {
    const auto from = [](const void* values, int64_t bytes) { return static_cast<const char*>(values) + bytes; };
    Weight part = weight;
    part.data = from(weight.data, first / LANES * panel_bytes(weight.kind, weight.k));
    if (weight.sums) part.sums += first;
    if (weight.scale) part.scale = from(weight.scale, first * bytes_of(weight.scale_kind));
    if (weight.zero) part.zero = from(weight.zero, first * bytes_of(weight.zero_kind));
    if (weight.minimum) part.minimum = from(weight.minimum, first * bytes_of(weight.minimum_kind));
    if (weight.levels) part.levels += first * (weight.k / weight.group_size);
    if (weight.bias) part.bias += first;
    part.n = end - first;
    return part;
}

// One call of a GEMM: y [m, n] = x [m, k] W^T + bias.
struct Product : Weight {
    const float* x;
    float* y;
    int64_t m;

    int64_t panels() const { return ceil_div(n, LANES); }
    LLM_INLINE Groups scales() const { return {scale, scale_kind, scale_stride}; }
    LLM_INLINE Groups zeros() const { return {zero, zero_kind, zero_stride}; }
    LLM_INLINE Groups minima() const { return {minimum, minimum_kind, minimum_stride}; }
    // Writes y = value(r) (+ bias) for `rows` batch rows from `row` on and 16 output channels; those beyond n are left
    // out. What does not change from row to row is in locals: gcc reloads members after each store.
    template <class Value>
    LLM_INLINE void store_outputs(int64_t row, int64_t rows, int64_t column, const Value& value) const {
        const int64_t stride = n, count = n - column;
        float* to = y + row * stride + column;
        const bool is_biased = bias;
        const F32 its_biases = is_biased ? load_part(bias + column, count) : llm::zero();
        LLM_UNROLL for (int64_t r = 0; r < rows; ++r, to += stride) {
            const F32 found = value(r);
            store_part(to, is_biased ? found + its_biases : found, count);
        }
    }
};

}  // namespace
}  // namespace llm
