// What latent attention has beside the attention itself (attention.cpp): GEMMs with a matrix per head, and writing its
// KV cache.
#include "kinds.h"
#include "quantized_cache.h"
#include "rows.h"
#include "vector_math.h"

namespace llm {
namespace {

// Tokens of a task: they share a head's matrix.
constexpr int64_t TASK_TOKENS = 32;
constexpr int TILE_ROWS = 4;

// y[t, h] = x[t, h] W_h, W_h [k][n]: vector lanes run along n. Every output is one chain of FMAs from +0 over
// k = 0 ... K-1. The tile, the number of tokens and the thread do not enter.
template <class T> struct Heads {
    const T* weight;
    const float* x;
    int64_t x_stride, x_head_stride;
    float* y;
    int64_t heads, n, k;

    // The first `count` of VECTORS vectors of outputs, for ROWS tokens. PART: `count` may be less than one vector.
    template <int ROWS, int VECTORS, bool PART>
    void tile(int64_t head, int64_t token, int64_t column, int64_t count) const {
        const T* w = weight + head * k * n + column;
        const float* a = x + token * x_stride + head * x_head_stride;
        F32 acc[ROWS][VECTORS];
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
        for (int64_t i = 0; i < k; ++i) {
            F32 b[VECTORS];
            LLM_UNROLL for (int v = 0; v < VECTORS; ++v) b[v] = PART ? load_part(w + i * n, count)
                                                                     : load(w + i * n + v * LANES);
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                const F32 value = set1(a[r * x_stride + i]);
                LLM_UNROLL for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(value, b[v], acc[r][v]);
            }
        }
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            float* to = y + ((token + r) * heads + head) * n + column;
            LLM_UNROLL for (int v = 0; v < VECTORS; ++v) store_part(to + v * LANES, acc[r][v], count - v * LANES);
        }
    }

    // All outputs of ROWS tokens in one head.
    template <int ROWS> void row_tile(int64_t head, int64_t token) const {
#if LLM_AVX512
        constexpr int wide = 4;
#elif LLM_NEON
        constexpr int wide = ROWS == 1 ? 2 : 1;
#else
        constexpr int wide = ROWS == 1 ? 4 : 1;
#endif
        int64_t column = 0;
        for (; column + wide * LANES <= n; column += wide * LANES)
            tile<ROWS, wide, false>(head, token, column, n - column);
        for (; column + LANES <= n; column += LANES) tile<ROWS, 1, false>(head, token, column, n - column);
        if (column < n) tile<ROWS, 1, true>(head, token, column, n - column);
    }

    void run(int64_t head, int64_t token, int64_t end) const {
        for (; token + TILE_ROWS <= end; token += TILE_ROWS) row_tile<TILE_ROWS>(head, token);
        for (; token < end; ++token) row_tile<1>(head, token);
    }
};

// A token's row of a KV cache in 8 bits; T: int8_t or F8.
template <class T>
void store_row(const float* latent, int64_t latent_size, const float* rope, int64_t rope_size, uint8_t* to) {
    T* codes = reinterpret_cast<T*>(to);
    const LatentScales scales{token_scale<T>(latent, latent_size, false), token_scale<T>(rope, rope_size, false)};
    quantize_head<T>(latent, latent_size, scales.latent, nullptr, nullptr, [&](int64_t i, T code) { codes[i] = code; });
    quantize_head<T>(rope, rope_size, scales.rope, nullptr, nullptr,
                     [&](int64_t i, T code) { codes[latent_size + i] = code; });
    std::memcpy(to + latent_size + rope_size, &scales, LATENT_SCALE_BYTES);
}

}  // namespace
}  // namespace llm

using namespace llm;

// x [tokens][heads][k], tokens `x_stride` and heads `x_head_stride` floats apart; weight [heads][k][n]
// -> y [tokens][heads][n].
LLM_EXPORT void llm_heads_linear(Kind kind, const void* weight, const float* x, int64_t x_stride, int64_t x_head_stride,
                                 float* y, int64_t tokens, int64_t heads, int64_t n, int64_t k, int64_t threads) {
    const int64_t parts = ceil_div(tokens, TASK_TOKENS);
    with_type(kind, [&](auto type) {
        using T = typename decltype(type)::Value;
        const Heads<T> product{static_cast<const T*>(weight), x, x_stride, x_head_stride, y, heads, n, k};
        parallel_for(heads * parts, threads, 0, [&](int64_t task, char*) {
            const int64_t first = task % parts * TASK_TOKENS;
            product.run(task / parts, first, min(first + TASK_TOKENS, tokens));
        });
    });
}

// latent [tokens][latent_size] and rope [tokens][rope_size], side by side -> cache [slots][latent_size + rope_size], in
// 8 bits with LatentScales behind a row.
// Returns -1; or, having written nothing, the first token whose slot is outside the KV cache.
LLM_EXPORT int64_t llm_write_latent_cache(const float* latent, int64_t latent_stride, const float* rope,
                                          int64_t rope_stride, Kind kind, void* cache, const int64_t* slot_mapping,
                                          int64_t slots, int64_t tokens, int64_t latent_size, int64_t rope_size,
                                          int64_t threads) {
    const int64_t bad = first_outside(slot_mapping, tokens, slots), size = latent_size + rope_size;
    if (bad >= 0) return bad;
    if (has_scales(kind)) {
        for_rows(tokens, size, threads, [&](int64_t token) {
            uint8_t* to = static_cast<uint8_t*>(cache) + slot_mapping[token] * (size + LATENT_SCALE_BYTES);
            const float *first = latent + token * latent_stride, *second = rope + token * rope_stride;
            if (kind == Kind::FLOAT8) store_row<F8>(first, latent_size, second, rope_size, to);
            else store_row<int8_t>(first, latent_size, second, rope_size, to);
        });
        return -1;
    }
    with_type(kind, [&](auto type) {
        using T = typename decltype(type)::Value;
        for_rows(tokens, size, threads, [&](int64_t token) {
            T* to = static_cast<T*>(cache) + slot_mapping[token] * size;
            const float *first = latent + token * latent_stride, *second = rope + token * rope_stride;
            for (int64_t i = 0; i < latent_size; ++i) to[i] = narrow<T>(first[i]);
            for (int64_t i = 0; i < rope_size; ++i) to[latent_size + i] = narrow<T>(second[i]);
        });
    });
    return -1;
}

LLM_KERNEL(llm_heads_linear)
LLM_KERNEL(llm_write_latent_cache)
