// Activations over the rows of a batch, and the soft cap: activation.h has the functions.
#include "activation.h"

#include <cmath>

#include "replay.h"
#include "rows.h"

using namespace llm;

// gate (and up, or null): rows `stride` floats apart -> out [rows][width].
LLM_EXPORT void llm_activation(int64_t function, const float* gate, const float* up, int64_t stride, float* out,
                               int64_t rows, int64_t width, int64_t threads) {
    for_rows(rows, width, threads, [&](int64_t row) {
        activation_row(function, gate + row * stride, up ? up + row * stride : nullptr, out + row * width, width);
    });
}

// x = cap * tanh(x / cap), in place.
LLM_EXPORT void llm_soft_cap(float* x, float cap, int64_t count, int64_t threads) {
    constexpr int64_t width = 1 << 12;
    for_rows(ceil_div(count, width), width, threads, [&](int64_t row) {
        const int64_t end = min((row + 1) * width, count);
        for (int64_t i = row * width; i < end; i += LANES)
            store_part(x + i, tanh(load_part(x + i, end - i) / set1(cap)) * set1(cap), end - i);
    });
}

// xIELU (kernels/reference/activation.py), whose slopes are stored before softplus.
LLM_EXPORT void llm_xielu(const float* x, const float* alpha_p, const float* alpha_n, const float* beta, float eps,
                          float* out, int64_t count, int64_t threads) {
    constexpr int64_t width = 1 << 12;
    const F32 slope = set1(*beta), positive = softplus(set1(*alpha_p)), negative = softplus(set1(*alpha_n)) + slope;
    for_rows(ceil_div(count, width), width, threads, [&](int64_t row) {
        const int64_t end = min((row + 1) * width, count);
        for (int64_t i = row * width; i < end; i += LANES) {
            const F32 v = load_part(x + i, end - i);
            const F32 below = (expm1_of_negative(min(set1(eps), v)) - v) * negative;
            store_part(out + i, fma(slope, v, select_less(zero(), v, positive * v * v, below)), end - i);
        }
    });
}

// gelu(max(gate - cut, 0)) * up of rows [gate, up], both of `width`; cut is the mean of the gate's row plus
// `deviations` standard deviations.
LLM_EXPORT void llm_gelu_sparse(const float* x, int64_t is_tanh, float deviations, float* out, int64_t rows,
                                int64_t width, int64_t threads) {
    for_rows(rows, width, threads, width * sizeof(float), [&](int64_t row, float* kept) {
        const float* gate = x + 2 * row * width;
        const float count = static_cast<float>(width);
        const float mean = sum_vectors(width, [&](int64_t i) { return load_part(gate + i, width - i); }) / count;
        const float squares = sum_vectors(width, [&](int64_t i) {
            const F32 centred = load_part(gate + i, width - i, mean) - set1(mean);
            return centred * centred;
        });
        const F32 cut = set1(std::sqrt(squares / count) * deviations);
        for (int64_t i = 0; i < width; i += LANES)
            store_part(kept + i, max(zero(), load_part(gate + i, width - i) - set1(mean) - cut), width - i);
        activation_row(is_tanh ? GELU_TANH : GELU, kept, gate + width, out + row * width, width);
    });
}

LLM_KERNEL(llm_activation)
LLM_KERNEL(llm_xielu)
LLM_KERNEL(llm_gelu_sparse)
LLM_KERNEL(llm_soft_cap)
