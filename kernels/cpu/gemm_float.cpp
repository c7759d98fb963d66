// y = x W^T (+ bias): float32 activations and accumulation, weights float32, bfloat16 or float16.
//
// Every output is one chain of fused multiply-adds from +0 over k = 0 ... K-1, then the bias, whatever the tile, the
// number of rows and the thread. A panel is [k][16]; bfloat16 panels keep columns c and c + 8 in one 32-bit word, so
// that a shift and a mask widen them.
#include "panels.h"
#include "replay.h"

namespace llm {
namespace {

#if LLM_AVX512
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 6;
#endif
constexpr int64_t PREFETCH_BYTES = 4096;
// Activations of one row block: what stays in the second-level cache beside the panels.
constexpr int64_t BLOCK_BYTES = 1 << 20;

LLM_INLINE F32 load_panel(const float* p) { return load(p); }
LLM_INLINE F32 load_panel(const F16* p) { return load(p); }
LLM_INLINE F32 load_panel(const BF16* p) { return load_paired(p); }

template <class T> struct Product {
    const float* x;
    const T* weight;
    const float* bias;
    float* y;
    int64_t m, n, k;
};

template <class T, int ROWS, int PANELS> void tile(const Product<T>& p, int64_t row, int64_t panel) {
    const float* a = p.x + row * p.k;
    const T* b = p.weight + panel * LANES * p.k;
    F32 acc[ROWS][PANELS];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < PANELS; ++c) acc[r][c] = zero();
    const Ahead ahead(PREFETCH_BYTES, LANES * sizeof(T), p.k, PANELS, LANES * p.k * sizeof(T));
    for (int64_t k = 0; k < p.k; ++k) {
        F32 w[PANELS];
        const int64_t distance = ahead.distance(k);
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
            const T* at = b + (c * p.k + k) * LANES;
            w[c] = load_panel(at);
            prefetch(reinterpret_cast<const char*>(at) + distance);
        }
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const F32 value = set1(a[r * p.k + k]);
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) acc[r][c] = fma(value, w[c], acc[r][c]);
        }
    }
    LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
        const int64_t column = (panel + c) * LANES, columns = p.n - column;
        const F32 bias = p.bias ? load_part(p.bias + column, columns) : zero();
        LLM_UNROLL for (int r = 0; r < ROWS; ++r)
            store_part(p.y + (row + r) * p.n + column, p.bias ? acc[r][c] + bias : acc[r][c], columns);
    }
}

// How many panels a tile of `rows` rows takes: enough independent chains for the multiplier, few enough for the registers.
constexpr int panels_for(int rows) {
#if LLM_AVX512
    return rows <= 3 ? 4 : 2;
#else
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#endif
}

template <class T, int ROWS> void tiles(const Product<T>& p, int64_t row, int64_t panel, int64_t end) {
    constexpr int wide = panels_for(ROWS);
    for (; panel + wide <= end; panel += wide) tile<T, ROWS, wide>(p, row, panel);
    for (; panel < end; ++panel) tile<T, ROWS, 1>(p, row, panel);
}

template <class T>
void product(const float* x, const void* weight, const float* bias, float* y, int64_t m, int64_t n, int64_t k, int64_t threads) {
    const Product<T> p{x, static_cast<const T*>(weight), bias, y, m, n, k};
    const Tasks tasks(m, n, MAX_ROWS, k * sizeof(float), BLOCK_BYTES, threads);
    tasks.run([&](int64_t tile, int64_t panel, int64_t end) {
        with_rows(tasks.rows(tile), [&](auto rows) { tiles<T, decltype(rows)::value>(p, tasks.first_row(tile), panel, end); });
    });
}

LLM_INLINE int64_t lane_position(int64_t lane, bool paired) { return paired ? lane % 8 * 2 + lane / 8 : lane; }

// src [n, k] -> panels [ceil(n / 16)][k][16]; `src` and `dst` may be the same memory when n is a multiple of 16.
template <class E> void pack(const E* src, E* dst, int64_t n, int64_t k, bool paired, int64_t threads) {
    parallel_for(ceil_div(n, LANES), threads, LANES * k * sizeof(E), [&](int64_t panel, char* scratch) {
        E* out = reinterpret_cast<E*>(scratch);
        for (int64_t lane = 0; lane < LANES; ++lane) {
            const int64_t row = panel * LANES + lane;
            for (int64_t i = 0; i < k; ++i) out[i * LANES + lane_position(lane, paired)] = row < n ? src[row * k + i] : E{0};
        }
        std::memcpy(dst + panel * LANES * k, out, LANES * k * sizeof(E));
    });
}

template <class E> void unpack(const E* src, E* dst, int64_t first, int64_t end, int64_t k, bool paired, int64_t threads) {
    parallel_for(end - first, threads, 0, [&](int64_t index, char*) {
        const int64_t row = first + index;
        const E* panel = src + row / LANES * LANES * k + lane_position(row % LANES, paired);
        for (int64_t i = 0; i < k; ++i) dst[index * k + i] = panel[i * LANES];
    });
}

template <class T> LLM_INLINE void gather_row(const T* panels, int64_t row, float* y, int64_t k, bool paired) {
    const T* panel = panels + row / LANES * LANES * k + lane_position(row % LANES, paired);
    for (int64_t i = 0; i < k; ++i) y[i] = widen(panel[i * LANES]);
}

template <class T>
void gather(const int64_t* ids, const T* panels, float* y, int64_t count, int64_t k, bool paired, int64_t threads) {
    parallel_for(count, threads, 0, [&](int64_t i, char*) { gather_row(panels, ids[i], y + i * k, k, paired); });
}

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

}  // namespace
}  // namespace llm

using namespace llm;

LLM_EXPORT void llm_linear_float(int64_t kind, const float* x, const void* weight, const float* bias, float* y, int64_t m,
                                 int64_t n, int64_t k, int64_t threads) {
    if (kind == FLOAT32) return product<float>(x, weight, bias, y, m, n, k, threads);
    if (kind == BFLOAT16) return product<BF16>(x, weight, bias, y, m, n, k, threads);
    product<F16>(x, weight, bias, y, m, n, k, threads);
}

LLM_EXPORT void llm_pack_float(int64_t kind, const void* src, void* dst, int64_t n, int64_t k, int64_t threads) {
    if (kind == FLOAT32) return pack(static_cast<const uint32_t*>(src), static_cast<uint32_t*>(dst), n, k, false, threads);
    pack(static_cast<const uint16_t*>(src), static_cast<uint16_t*>(dst), n, k, kind == BFLOAT16, threads);
}

// Rows [first, end) of the weight.
LLM_EXPORT void llm_unpack_float(int64_t kind, const void* src, void* dst, int64_t first, int64_t end, int64_t k,
                                 int64_t threads) {
    if (kind == FLOAT32)
        return unpack(static_cast<const uint32_t*>(src), static_cast<uint32_t*>(dst), first, end, k, false, threads);
    unpack(static_cast<const uint16_t*>(src), static_cast<uint16_t*>(dst), first, end, k, kind == BFLOAT16, threads);
}

// ids [count] -> y [count, k]; returns 0, or 1 when an id is not in [0, n): then nothing was read.
LLM_EXPORT int64_t llm_embedding_float(int64_t kind, const int64_t* ids, const void* weight, float* y, int64_t count, int64_t n,
                                       int64_t k, int64_t threads) {
    if (!within(ids, count, n)) return 1;
    if (kind == FLOAT32) gather(ids, static_cast<const float*>(weight), y, count, k, false, threads);
    else if (kind == BFLOAT16) gather(ids, static_cast<const BF16*>(weight), y, count, k, true, threads);
    else gather(ids, static_cast<const F16*>(weight), y, count, k, false, threads);
    return 0;
}

LLM_REPLAYABLE(llm_linear_float)
LLM_REPLAYABLE(llm_embedding_float)
