// Additions, products and copies that models leave to PyTorch, for recorded steps (program.py). Each element is rounded
// once, so the bits are PyTorch's.
#include "replay.h"
#include "rows.h"

using namespace llm;

LLM_EXPORT void llm_add(const float* x, const float* y, float* out, int64_t count, int64_t threads) {
    constexpr int64_t width = 1 << 12;
    for_rows(ceil_div(count, width), width, threads, [&](int64_t row) {
        const int64_t end = min((row + 1) * width, count);
        for (int64_t i = row * width; i < end; i += LANES)
            store_part(out + i, load_part(x + i, end - i) + load_part(y + i, end - i), end - i);
    });
}

namespace llm {
namespace {

void scale(const float* x, float factor, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store_part(out + i, load_part(x + i, count - i) * set1(factor), count - i);
}

}  // namespace
}  // namespace llm

// `out` may be x.
LLM_EXPORT void llm_scale(const float* x, float factor, float* out, int64_t count, int64_t threads) {
    constexpr int64_t width = 1 << 12;
    for_rows(ceil_div(count, width), width, threads, [&](int64_t row) {
        const int64_t begin = row * width;
        scale(x + begin, factor, out + begin, min(width, count - begin));
    });
}

// Rows of `width` floats, `x_stride` and `y_stride` apart -> out, contiguous.
LLM_EXPORT void llm_multiply(const float* x, int64_t x_stride, const float* y, int64_t y_stride, float* out,
                             int64_t rows, int64_t width, int64_t threads) {
    for_rows(rows, width, threads, [&](int64_t row) {
        const float *left = x + row * x_stride, *right = y + row * y_stride;
        for (int64_t i = 0; i < width; i += LANES)
            store_part(out + row * width + i, load_part(left + i, width - i) * load_part(right + i, width - i),
                       width - i);
    });
}

// Rows of `width` floats, `stride` apart, each times its factor -> out, contiguous; factors `factor_stride` apart.
LLM_EXPORT void llm_scale_rows(const float* x, int64_t stride, const float* factors, int64_t factor_stride, float* out,
                               int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row)
        scale(x + row * stride, factors[row * factor_stride], out + row * width, width);
}

LLM_EXPORT void llm_offset(const float* x, float offset, float* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] + offset;
}

// NaN stays NaN.
LLM_EXPORT void llm_clamp(const float* x, float low, float high, float* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] < low ? low : x[i] > high ? high : x[i];
}

// Ids below `limit`, and 0 in the place of others.
LLM_EXPORT void llm_ids_below(const int64_t* ids, int64_t limit, int64_t* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = ids[i] < limit ? ids[i] : 0;
}

LLM_EXPORT void llm_shift(const int64_t* x, int64_t offset, int64_t* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] + offset;
}

// Rows of `width` floats, `stride` apart -> out, contiguous.
LLM_EXPORT void llm_copy_rows(const float* x, int64_t stride, float* out, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row) std::memcpy(out + row * width, x + row * stride, width * sizeof(float));
}

// Contiguous rows of `width` floats -> out, `stride` apart.
LLM_EXPORT void llm_place_rows(const float* x, float* out, int64_t stride, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row) std::memcpy(out + row * stride, x + row * width, width * sizeof(float));
}

// Rows `indices` [count] of x [rows, width] -> out [count, width]. Returns 0; or 1, having read nothing, if an index is
// not in [0, rows).
LLM_EXPORT int64_t llm_select_rows(const float* x, int64_t rows, const int64_t* indices, float* out, int64_t count,
                                   int64_t width) {
    if (first_outside(indices, count, rows) >= 0) return 1;
    for (int64_t i = 0; i < count; ++i) std::memcpy(out + i * width, x + indices[i] * width, width * sizeof(float));
    return 0;
}

LLM_KERNEL(llm_add)
LLM_KERNEL(llm_scale)
LLM_KERNEL(llm_multiply)
LLM_KERNEL(llm_scale_rows)
LLM_KERNEL(llm_offset)
LLM_KERNEL(llm_clamp)
LLM_KERNEL(llm_ids_below)
LLM_KERNEL(llm_shift)
LLM_KERNEL(llm_copy_rows)
LLM_KERNEL(llm_place_rows)
LLM_KERNEL(llm_select_rows)
