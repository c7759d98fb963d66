// RMS norm and layer norm over the last dimension, optionally after adding a residual.
//
// Sums have fixed lanes (rows.h), so a row's bits do not depend on the other rows. Everything else is elementwise; the
// vector body and the tail of a row compute alike.
#include <cmath>

#include "kinds.h"
#include "rows.h"

namespace llm {
namespace {

// A norm: RMS over the first `variance_size` channels, or layer norm. Weight and bias (null: none) are of one kind.
// `weight_offset` is added to the weight (Gemma stores weight - 1).
struct Norm {
    bool is_layer_norm;
    Kind parameter_kind;
    const void *weight, *bias;
    int64_t variance_size;
    float weight_offset, eps;
};

// Weight and bias of a norm; null: none.
template <class T> struct Scale {
    const T *weight, *bias;
    float offset;

    LLM_INLINE F32 apply(F32 x, int64_t i, int64_t count) const {
        if (weight)
            x = x * (offset == 0.0f ? load_part(weight + i, count) : load_part(weight + i, count) + set1(offset));
        return bias ? x + load_part(bias + i, count) : x;
    }
};

void add(const float* x, const float* residual, float* total, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES)
        store_part(total + i, load_part(x + i, width - i) + load_part(residual + i, width - i), width - i);
}

template <class T> void rms_norm(const Norm& norm, const Scale<T>& scale, const float* x, float* out, int64_t width) {
    const int64_t size = norm.variance_size ? norm.variance_size : width;
    const float squares = sum_vectors(size, [&](int64_t i) {
        const F32 value = load_part(x + i, size - i);
        return value * value;
    });
    const F32 inverse = set1(1.0f / std::sqrt(squares / static_cast<float>(size) + norm.eps));
    for (int64_t i = 0; i < width; i += LANES)
        store_part(out + i, scale.apply(load_part(x + i, width - i) * inverse, i, width - i), width - i);
}

template <class T> void layer_norm(const Norm& norm, const Scale<T>& scale, const float* x, float* out, int64_t width) {
    const float count = static_cast<float>(width);
    const float mean = sum_vectors(width, [&](int64_t i) { return load_part(x + i, width - i); }) / count;
    const float squares = sum_vectors(width, [&](int64_t i) {
        const F32 centred = load_part(x + i, width - i, mean) - set1(mean);
        return centred * centred;
    });
    const F32 inverse = set1(1.0f / std::sqrt(squares / count + norm.eps));
    for (int64_t i = 0; i < width; i += LANES)
        store_part(out + i, scale.apply((load_part(x + i, width - i) - set1(mean)) * inverse, i, width - i), width - i);
}

template <class T> void typed_row(const Norm& norm, const float* x, float* out, int64_t width) {
    const Scale<T> scale{static_cast<const T*>(norm.weight), static_cast<const T*>(norm.bias), norm.weight_offset};
    if (norm.is_layer_norm) layer_norm(norm, scale, x, out, width);
    else rms_norm(norm, scale, x, out, width);
}

// A `residual` that is not null is added to x first, and the sum is written to `total`.
void norm_row(const Norm& norm, const float* x, const float* residual, float* total, float* out, int64_t width) {
    if (residual) {
        add(x, residual, total, width);
        x = total;
    }
    with_type(norm.parameter_kind, [&](auto type) { typed_row<typename decltype(type)::Value>(norm, x, out, width); });
}

// x [rows][width] -> out; with a residual also total = x + residual.
void norm_rows(const Norm& norm, const float* x, const float* residual, float* out, float* total, int64_t rows,
               int64_t width, int64_t threads) {
    for_rows(rows, width, threads, [&](int64_t row) {
        const int64_t at = row * width;
        norm_row(norm, x + at, residual ? residual + at : nullptr, residual ? total + at : nullptr, out + at, width);
    });
}

}  // namespace
}  // namespace llm

using namespace llm;

// x [rows][width] -> out; with a residual also total = x + residual. The mean square is over the first variance_size
// channels.
LLM_EXPORT void llm_rms_norm(const float* x, const float* residual, Kind kind, const void* weight, float weight_offset,
                             float eps, int64_t variance_size, float* out, float* total, int64_t rows, int64_t width,
                             int64_t threads) {
    norm_rows({false, kind, weight, nullptr, variance_size, weight_offset, eps}, x, residual, out, total, rows, width,
              threads);
}

LLM_EXPORT void llm_layer_norm(const float* x, const float* residual, Kind kind, const void* weight, const void* bias,
                               float eps, float* out, float* total, int64_t rows, int64_t width, int64_t threads) {
    norm_rows({true, kind, weight, bias, width, 0.0f, eps}, x, residual, out, total, rows, width, threads);
}

LLM_KERNEL(llm_rms_norm)
LLM_KERNEL(llm_layer_norm)
