// Activations over the rows of a batch, and the soft cap: activation.h has the functions.
#include "activation.h"
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

LLM_KERNEL(llm_activation)
LLM_KERNEL(llm_soft_cap)
