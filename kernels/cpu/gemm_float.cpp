// y = x W^T (+ bias): float32 activations and accumulation, weights float32, bfloat16 or float16.
//
// Every output is one chain of fused multiply-adds from +0 over k = 0 ... K-1, then the bias, whatever the tile, the
// number of rows and the thread. A panel is [k][16]; of bfloat16 [k / 2][16][2], so that a shift and a mask widen a column's
// two. With matrix tiles (gemm_tiles.h) a bfloat16 weight has another chain, its own for any number of rows just the same.
#include "gemm_tiles.h"
#include "panels.h"
#include "quantize.h"
#include "replay.h"

namespace llm {
namespace {

constexpr int64_t PREFETCH_BYTES = 4096;
// Activations of one row block: what stays in the second-level cache beside the panels.
constexpr int64_t BLOCK_BYTES = 1 << 20;

// How many k of a column lie side by side in a panel.
template <class T> constexpr int64_t DEPTH = 1;
template <> constexpr int64_t DEPTH<BF16> = 2;

template <class T> LLM_INLINE int64_t panel_elements(int64_t k) { return ceil_div(k, DEPTH<T>) * DEPTH<T> * LANES; }
template <class T> LLM_INLINE int64_t position(int64_t lane, int64_t k) {
    return k / DEPTH<T> * DEPTH<T> * LANES + lane * DEPTH<T> + k % DEPTH<T>;
}

// The weights of the step of a panel that begins at `p`, `k` further on.
LLM_INLINE F32 load_panel(const float* p, int64_t) { return load(p); }
LLM_INLINE F32 load_panel(const F16* p, int64_t) { return load(p); }
LLM_INLINE F32 load_panel(const BF16* p, int64_t k) {
    const I32 both = load_i(reinterpret_cast<const int32_t*>(p));
    return as_float(k ? and_i(both, set1_i(static_cast<int32_t>(0xffff0000u))) : shift_left<16>(both));
}

template <class T> struct Product {
    const float* x;
    const T* weight;
    const float* bias;
    float* y;
    int64_t m, n, k;
};

template <class T, int ROWS, int PANELS> void tile(const Product<T>& p, int64_t row, int64_t panel) {
    constexpr int64_t step = DEPTH<T> * LANES;  // elements of a panel
    const int64_t steps = p.k / DEPTH<T>, panel_size = panel_elements<T>(p.k);
    const float* a = p.x + row * p.k;
    const T* b = p.weight + panel * panel_size;
    F32 acc[ROWS][PANELS];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < PANELS; ++c) acc[r][c] = zero();
    const auto add = [&](int64_t s, int64_t d) {
        F32 w[PANELS];
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) w[c] = load_panel(b + c * panel_size + s * step, d);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const F32 value = set1(a[r * p.k + s * DEPTH<T> + d]);
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) acc[r][c] = fma(value, w[c], acc[r][c]);
        }
    };
    const Ahead ahead(PREFETCH_BYTES, step * sizeof(T), steps, PANELS, panel_size * sizeof(T));
    for (int64_t s = 0; s < steps; ++s) {
        const int64_t distance = ahead.distance(s);
        LLM_UNROLL for (int c = 0; c < PANELS; ++c)
            prefetch_far(reinterpret_cast<const char*>(b + c * panel_size + s * step) + distance);
        LLM_UNROLL for (int64_t d = 0; d < DEPTH<T>; ++d) add(s, d);
    }
    if (p.k % DEPTH<T>) add(steps, 0);
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

#if LLM_TILES

// 32 activations as three lines of bfloat16: x = first + second + third, but for what is below 2^-133. Of what is not finite
// the first says it all.
LLM_INLINE void split(F32 low, F32 high, char* first, char* second, char* third) {
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const auto cut = [&](F32 x) { return F32{_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), top))}; };
    // A NaN may have all its bits below the cut; the fraction's top bit makes sure.
    const auto head = [&](F32 x) {
        const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
        return as_float({_mm512_mask_or_epi32(as_int(cut(x)).v, nan, as_int(x).v, _mm512_set1_epi32(0x00400000))});
    };
    const auto rest = [](F32 x, F32 part) {
        return F32{_mm512_maskz_sub_ps(_mm512_cmp_ps_mask(abs(x).v, _mm512_set1_ps(INFINITY), _CMP_LT_OQ), x.v, part.v)};
    };
    const __m512i upper_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                                  23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const auto put = [&](char* to, F32 a, F32 b) {
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(as_int(a).v, upper_halves, as_int(b).v));
    };
    const F32 low_1 = head(low), high_1 = head(high), low_rest = rest(low, low_1), high_rest = rest(high, high_1);
    const F32 low_2 = cut(low_rest), high_2 = cut(high_rest);
    put(first, low_1, high_1);
    put(second, low_2, high_2);
    put(third, low_rest - low_2, high_rest - high_2);
}

// 32 activations as a line of the nearest bfloat16.
LLM_INLINE void round_to(F32 low, F32 high, char* line) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(high.v, low.v);
    std::memcpy(line, &rounded, LINE);
}

template <Form FORM>
void tile_linear_bf16(const float* x, const BF16* weight, const float* bias, float* y, int64_t m, int64_t n, int64_t k,
                      int64_t threads) {
    const TilePanels panels{reinterpret_cast<const char*>(weight), ceil_div(k, DEPTH<BF16>)};
    for_row_blocks(m, panels.steps(), parts_of(FORM), BLOCK_STEPS, MOST_TILES, [&](const TileOperands& a, int64_t from) {
        parallel_for(a.rows, a.rows * k < SERIAL_ELEMENTS ? 1 : threads, 0, [&](int64_t row, char*) {
            const float* at = x + (from + row) * k;
            a.write_row(row, [&](int64_t step, char* line, int64_t part) {
                const int64_t i = step * 2 * LANES, left = k - i;
                const F32 low = load_part(at + i, left), high = left > LANES ? load_part(at + i + LANES, left - LANES) : zero();
                if constexpr (FORM == BF16_ROUNDED) round_to(low, high, line);
                else split(low, high, line, line + part, line + 2 * part);
            });
        });
        const auto done = [&](int64_t tile, int64_t panel, int64_t wide, const char* sums) {
            for (int64_t c = 0; c < wide; ++c) {
                const int64_t column = (panel + c) * LANES, columns = n - column;
                const F32 add = bias ? load_part(bias + column, columns) : zero();
                for (int64_t r = 0; r < a.tile_rows(tile); ++r) {
                    const F32 sum = load(reinterpret_cast<const float*>(sums + (r * TILE_PANELS + c) * LINE));
                    store_part(y + (from + tile * TILE_LINES + r) * n + column, bias ? sum + add : sum, columns);
                }
            }
        };
        multiply_tiles<FORM>(a, panels, ceil_div(n, LANES), threads, done);
    });
}

#endif

// src [n, k] -> panels; `src` and `dst` may be the same memory when n is a multiple of 16 and k of the depth.
template <class T> void pack(const T* src, T* dst, int64_t n, int64_t k, int64_t threads) {
    const int64_t size = panel_elements<T>(k);
    parallel_for(ceil_div(n, LANES), threads, size * sizeof(T), [&](int64_t panel, char* scratch) {
        T* out = reinterpret_cast<T*>(scratch);
        std::memset(scratch, 0, size * sizeof(T));
        for (int64_t lane = 0; lane < Tasks::least(LANES, n - panel * LANES); ++lane)
            for (int64_t i = 0; i < k; ++i) out[position<T>(lane, i)] = src[(panel * LANES + lane) * k + i];
        std::memcpy(dst + panel * size, out, size * sizeof(T));
    });
}

template <class T> void unpack(const T* src, T* dst, int64_t first, int64_t end, int64_t k, int64_t threads) {
    const int64_t size = panel_elements<T>(k);
    parallel_for(end - first, threads, 0, [&](int64_t index, char*) {
        const int64_t row = first + index;
        const T* panel = src + row / LANES * size;
        for (int64_t i = 0; i < k; ++i) dst[index * k + i] = panel[position<T>(row % LANES, i)];
    });
}

template <class T> void gather(const int64_t* ids, const T* panels, float* y, int64_t count, int64_t k, int64_t threads) {
    const int64_t size = panel_elements<T>(k);
    parallel_for(count, threads, 0, [&](int64_t index, char*) {
        const int64_t row = ids[index];
        const T* panel = panels + row / LANES * size;
        for (int64_t i = 0; i < k; ++i) y[index * k + i] = widen(panel[position<T>(row % LANES, i)]);
    });
}

// ROUNDED: a bfloat16 weight whose products read their activations rounded to bfloat16, with matrix tiles alone.
enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, ROUNDED = 3 };
template <class T> struct Type { using Value = T; };

// call(the element type of `kind`)
template <class Call> void with_type(int64_t kind, const Call& call) {
    if (kind == FLOAT32) return call(Type<float>{});
    if (kind == BFLOAT16) return call(Type<BF16>{});
    call(Type<F16>{});
}

}  // namespace
}  // namespace llm

using namespace llm;

#if LLM_TILES

// `kind`: BFLOAT16, or ROUNDED.
static void linear_bf16(int64_t kind, const float* x, const void* weight, const float* bias, float* y, int64_t m, int64_t n,
                        int64_t k, int64_t threads) {
    const auto run = kind == ROUNDED ? tile_linear_bf16<BF16_ROUNDED> : tile_linear_bf16<BF16_PARTS>;
    run(x, static_cast<const BF16*>(weight), bias, y, m, n, k, threads);
}

#endif

LLM_EXPORT void llm_linear_float(int64_t kind, const float* x, const void* weight, const float* bias, float* y, int64_t m,
                                 int64_t n, int64_t k, int64_t threads) {
#if LLM_TILES
    if (kind == BFLOAT16 || kind == ROUNDED) return linear_bf16(kind, x, weight, bias, y, m, n, k, threads);
#endif
    with_type(kind, [&](auto type) { product<typename decltype(type)::Value>(x, weight, bias, y, m, n, k, threads); });
}

LLM_EXPORT void llm_pack_float(int64_t kind, const void* src, void* dst, int64_t n, int64_t k, int64_t threads) {
    with_type(kind, [&](auto type) {
        using T = typename decltype(type)::Value;
        pack(static_cast<const T*>(src), static_cast<T*>(dst), n, k, threads);
    });
}

// Rows [first, end) of the weight.
LLM_EXPORT void llm_unpack_float(int64_t kind, const void* src, void* dst, int64_t first, int64_t end, int64_t k,
                                 int64_t threads) {
    with_type(kind, [&](auto type) {
        using T = typename decltype(type)::Value;
        unpack(static_cast<const T*>(src), static_cast<T*>(dst), first, end, k, threads);
    });
}

// ids [count] -> y [count, k]; returns 0, or 1 when an id is not in [0, n): then nothing was read.
LLM_EXPORT int64_t llm_embedding_float(int64_t kind, const int64_t* ids, const void* weight, float* y, int64_t count, int64_t n,
                                       int64_t k, int64_t threads) {
    if (!within(ids, count, n)) return 1;
    with_type(kind, [&](auto type) {
        using T = typename decltype(type)::Value;
        gather(ids, static_cast<const T*>(weight), y, count, k, threads);
    });
    return 0;
}

LLM_KERNEL(llm_linear_float)
LLM_KERNEL(llm_embedding_float)
LLM_KERNEL(llm_pack_float)
LLM_KERNEL(llm_unpack_float)
