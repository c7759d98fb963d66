// RMS norm of groups of channels with a gate, before or after the norm.
//
// Sums have fixed lanes (rows.h), so a row's bits do not depend on the other rows.
#include <cmath>

#include "activation.h"
#include "kinds.h"
#include "rows.h"

namespace llm {
namespace {

struct GatedNorm {
    const void* weight;  // null: no norm
    float eps;
    int64_t groups, width;
    bool norm_first, sigmoid;

    LLM_INLINE F32 act(F32 z) const {
        return sigmoid ? set1(1.0f) / (exp(zero() - z) + set1(1.0f)) : activate<SILU>(z);
    }

    // out = x * act(gate)
    void multiply(const float* x, const float* gate, float* out) const {
        for (int64_t i = 0; i < width; i += LANES)
            store_part(out + i, load_part(x + i, width - i) * act(load_part(gate + i, width - i)), width - i);
    }

    // `x` may be `out`.
    template <class T> void normalise(const float* x, float* out) const {
        const int64_t size = width / groups;
        const T* scale = static_cast<const T*>(weight);
        for (int64_t group = 0; group < groups; ++group, x += size, out += size, scale += size) {
            const float squares = sum_vectors(size, [&](int64_t i) {
                const F32 value = load_part(x + i, size - i);
                return value * value;
            });
            const F32 inverse = set1(1.0f / std::sqrt(squares / static_cast<float>(size) + eps));
            for (int64_t i = 0; i < size; i += LANES)
                store_part(out + i, load_part(x + i, size - i) * inverse * load_part(scale + i, size - i), size - i);
        }
    }

    template <class T> void row(const float* x, const float* gate, float* out) const {
        if (!weight) return multiply(x, gate, out);
        if (!gate) return normalise<T>(x, out);
        if (norm_first) {
            normalise<T>(x, out);
            multiply(out, gate, out);
        } else {
            multiply(x, gate, out);
            normalise<T>(out, out);
        }
    }
};

}  // namespace
}  // namespace llm

using namespace llm;

// x and gate: rows `x_stride` and `gate_stride` floats apart -> out [rows][width]. At least one of gate and weight is
// not null.
LLM_EXPORT void llm_gated_rms_norm(const float* x, int64_t x_stride, const float* gate, int64_t gate_stride, Kind kind,
                                   const void* weight, float eps, int64_t groups, int64_t norm_first, int64_t sigmoid,
                                   float* out, int64_t rows, int64_t width, int64_t threads) {
    const GatedNorm norm{weight, eps, groups, width, norm_first != 0, sigmoid != 0};
    for_rows(rows, width, threads, [&](int64_t row) {
        with_type(kind, [&](auto type) {
            norm.template row<typename decltype(type)::Value>(x + row * x_stride,
                                                              gate ? gate + row * gate_stride : nullptr,
                                                              out + row * width);
        });
    });
}

LLM_KERNEL(llm_gated_rms_norm)
