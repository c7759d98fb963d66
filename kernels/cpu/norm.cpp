// RMS norm and layer norm over the last dimension, with an optional residual that is added first.
//
// Sums have fixed lanes (rows.h), so a row's bits do not depend on its companions; everything else is one element at a
// time, computed alike in the body of a row and in its tail.
#include <cmath>

#include "replay.h"
#include "rows.h"

namespace llm {
namespace {

// The parameters of a norm; null: none. `offset` is added to the weight (Gemma stores weight - 1).
template <class T> struct Scale {
    const T *weight, *bias;
    float offset;

    LLM_INLINE F32 apply(F32 x, int64_t i, int64_t count) const {
        if (weight) x = x * (offset == 0.0f ? load_part(weight + i, count) : load_part(weight + i, count) + set1(offset));
        return bias ? x + load_part(bias + i, count) : x;
    }
};

struct Rows {
    const float *x, *residual;  // residual: null or added to x
    float *out, *total;         // total: the sum, when there is a residual
    int64_t rows, width;

    // The row to normalise; written to `total` first when there is a residual.
    LLM_INLINE const float* summed(int64_t row) const {
        const float* from = x + row * width;
        if (!residual) return from;
        for (int64_t i = 0; i < width; i += LANES) {
            const F32 value = load_part(from + i, width - i) + load_part(residual + row * width + i, width - i);
            store_part(total + row * width + i, value, width - i);
        }
        return total + row * width;
    }
};

template <class T> void rms_norm(const Rows& io, const Scale<T>& scale, int64_t variance_size, float eps, int64_t threads) {
    for_rows(io.rows, io.width, threads, [&](int64_t row) {
        const float* x = io.summed(row);
        const float squares = sum_vectors(variance_size, [&](int64_t i) {
            const F32 value = load_part(x + i, variance_size - i);
            return value * value;
        });
        const F32 inverse = set1(1.0f / std::sqrt(squares / static_cast<float>(variance_size) + eps));
        for (int64_t i = 0; i < io.width; i += LANES) {
            const F32 value = load_part(x + i, io.width - i) * inverse;
            store_part(io.out + row * io.width + i, scale.apply(value, i, io.width - i), io.width - i);
        }
    });
}

template <class T> void layer_norm(const Rows& io, const Scale<T>& scale, float eps, int64_t threads) {
    for_rows(io.rows, io.width, threads, [&](int64_t row) {
        const float* x = io.summed(row);
        const float width = static_cast<float>(io.width);
        const float mean = sum_vectors(io.width, [&](int64_t i) { return load_part(x + i, io.width - i); }) / width;
        const float squares = sum_vectors(io.width, [&](int64_t i) {
            const F32 centred = load_part(x + i, io.width - i, mean) - set1(mean);
            return centred * centred;
        });
        const F32 inverse = set1(1.0f / std::sqrt(squares / width + eps));
        for (int64_t i = 0; i < io.width; i += LANES) {
            const F32 value = (load_part(x + i, io.width - i) - set1(mean)) * inverse;
            store_part(io.out + row * io.width + i, scale.apply(value, i, io.width - i), io.width - i);
        }
    });
}

// run(Scale<T>) with the type that the parameters are stored in.
template <class Run> void with_scale(int64_t kind, const void* weight, const void* bias, float offset, const Run& run) {
    const auto typed = [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        run(Scale<T>{static_cast<const T*>(weight), static_cast<const T*>(bias), offset});
    };
    if (kind == FLOAT32) return typed(static_cast<float*>(nullptr));
    if (kind == BFLOAT16) return typed(static_cast<BF16*>(nullptr));
    typed(static_cast<F16*>(nullptr));
}

}  // namespace
}  // namespace llm

using namespace llm;

// x [rows][width] -> out; with a residual also total = x + residual. The mean is over the first variance_size channels.
LLM_EXPORT void llm_rms_norm(const float* x, const float* residual, int64_t kind, const void* weight, float weight_offset,
                             float eps, int64_t variance_size, float* out, float* total, int64_t rows, int64_t width,
                             int64_t threads) {
    const Rows io{x, residual, out, total, rows, width};
    with_scale(kind, weight, nullptr, weight_offset,
               [&](const auto& scale) { rms_norm(io, scale, variance_size, eps, threads); });
}

LLM_EXPORT void llm_layer_norm(const float* x, const float* residual, int64_t kind, const void* weight, const void* bias,
                               float eps, float* out, float* total, int64_t rows, int64_t width, int64_t threads) {
    const Rows io{x, residual, out, total, rows, width};
    with_scale(kind, weight, bias, 0.0f, [&](const auto& scale) { layer_norm(io, scale, eps, threads); });
}

LLM_REPLAYABLE(llm_rms_norm)
LLM_REPLAYABLE(llm_layer_norm)
