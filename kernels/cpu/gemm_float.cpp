// GEMM y = x W^T (+ bias): float32 activations and accumulation, weights float32, bfloat16 or float16.
//
// Every output is one chain of FMAs from +0 over k = 0 ... K-1, then the bias. The tile, the number of batch rows and
// the thread do not enter. A panel is [k][16], of bfloat16 [k / 2][16][2]: a shift and a mask widen an output channel's
// two values. With AMX (gemm_tiles.h) a bfloat16 weight has another chain, which does not depend on the batch either.
// Packing is here for 8-bit floats too, in panels [k][16]; gemm_weight_only.cpp computes with them.
// Activations that are rounded to bfloat16 are multiplied in the chain of AVX-512 BF16, k = 1, 0, 3, 2, ...
// (gemm_bf16.cpp).
#include "gemm_tiles.h"
#include "quantize.h"
#include "vector_math.h"
#include "weight.h"

namespace llm {
namespace {

constexpr int64_t PREFETCH_BYTES = 4096;
// Activations of one block of row tiles: what stays in the L2 cache beside the panels.
constexpr int64_t BLOCK_BYTES = 1 << 20;

// How many k of an output channel lie side by side in a panel.
template <class T> constexpr int64_t DEPTH = 1;
template <> constexpr int64_t DEPTH<BF16> = 2;

template <class T> LLM_INLINE int64_t panel_elements(int64_t k) { return ceil_div(k, DEPTH<T>) * DEPTH<T> * LANES; }
template <class T> LLM_INLINE int64_t position(int64_t lane, int64_t k) {
    return k / DEPTH<T> * DEPTH<T> * LANES + lane * DEPTH<T> + k % DEPTH<T>;
}

// Widens the weights of one k from the panel step at `p`; `k`: which of the step's k.
LLM_INLINE F32 load_panel(const float* p, int64_t) { return load(p); }
LLM_INLINE F32 load_panel(const F16* p, int64_t) { return load(p); }
LLM_INLINE F32 load_panel(const BF16* p, int64_t k) {
    const I32 both = load_i(reinterpret_cast<const int32_t*>(p));
    return as_float(k ? and_i(both, set1_i(static_cast<int32_t>(0xffff0000u))) : shift_left<16>(both));
}

// Which of the k of a panel step comes first.
enum class Order { EVEN_FIRST, ODD_FIRST };

template <class T, Order ORDER, int ROWS, int PANELS> void tile(const Product& p, int64_t row, int64_t panel) {
    constexpr int64_t step = DEPTH<T> * LANES;  // elements of a panel
    const int64_t steps = p.k / DEPTH<T>, panel_size = panel_elements<T>(p.k);
    const float* a = p.x + row * p.k;
    const T* b = static_cast<const T*>(p.data) + panel * panel_size;
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
        LLM_UNROLL for (int64_t d = 0; d < DEPTH<T>; ++d) add(s, ORDER == Order::ODD_FIRST ? DEPTH<T> - 1 - d : d);
    }
    if (p.k % DEPTH<T>) add(steps, 0);
    LLM_UNROLL for (int c = 0; c < PANELS; ++c)
        p.store_outputs(row, ROWS, (panel + c) * LANES, [&](int64_t r) { return acc[r][c]; });
}

// Panels of a tile of `rows` batch rows: enough independent FMA chains to hide latency, few enough to stay in
// registers.
constexpr int panels_for(int rows) {
#if LLM_AVX512
    return rows <= 3 ? 4 : 2;
#elif LLM_NEON
    return rows <= 2 ? 2 : 1;
#else
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#endif
}

template <class T, Order ORDER, int ROWS> void tiles(const Product& p, int64_t row, int64_t panel, int64_t end) {
    for_panels<panels_for(ROWS)>(panel, end, [&](auto wide, int64_t at) {
        tile<T, ORDER, ROWS, decltype(wide)::value>(p, row, at);
    });
}

template <class T, Order ORDER = Order::EVEN_FIRST> void multiply(const Product& p, int64_t threads) {
    const Tasks tasks(p.m, p.n, MAX_ROWS, p.k * sizeof(float), BLOCK_BYTES, threads);
    tasks.run([&](int64_t tile, int64_t panel, int64_t end) {
        with_rows(tasks.rows(tile),
                  [&](auto rows) { tiles<T, ORDER, decltype(rows)::value>(p, tasks.first_row(tile), panel, end); });
    });
}

#if LLM_TILES

// Cuts 32 activations into three lines of bfloat16: x = first + second + third, except below 2^-133. Infinity and NaN
// are all in the first.
LLM_INLINE void split(F32 low, F32 high, char* first, char* second, char* third) {
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const auto cut = [&](F32 x) { return F32{_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), top))}; };
    // A NaN may have all its set bits below the cut; setting the quiet bit keeps it a NaN.
    const auto head = [&](F32 x) {
        const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
        return as_float({_mm512_mask_or_epi32(as_int(cut(x)).v, nan, as_int(x).v, _mm512_set1_epi32(0x00400000))});
    };
    const auto rest = [](F32 x, F32 part) {
        return F32{
            _mm512_maskz_sub_ps(_mm512_cmp_ps_mask(abs(x).v, _mm512_set1_ps(INFINITY), _CMP_LT_OQ), x.v, part.v)};
    };
    const __m512i upper_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                                  29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const auto put = [&](char* to, F32 a, F32 b) {
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(as_int(a).v, upper_halves, as_int(b).v));
    };
    const F32 low_1 = head(low), high_1 = head(high), low_rest = rest(low, low_1), high_rest = rest(high, high_1);
    const F32 low_2 = cut(low_rest), high_2 = cut(high_rest);
    put(first, low_1, high_1);
    put(second, low_2, high_2);
    put(third, low_rest - low_2, high_rest - high_2);
}

// Rounds 32 activations to a line of the nearest bfloat16.
LLM_INLINE void round_to(F32 low, F32 high, char* line) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(high.v, low.v);
    std::memcpy(line, &rounded, LINE);
}

template <Form FORM> void multiply_by_tiles(const Product& p, int64_t threads) {
    const TilePanels panels{static_cast<const char*>(p.data), ceil_div(p.k, DEPTH<BF16>)};
    for_row_blocks(p.m, panels.steps(), parts_of(FORM), BLOCK_STEPS, MOST_TILES,
                   [&](const TileOperands& a, int64_t from) {
        parallel_for(a.rows, a.rows * p.k < SERIAL_ELEMENTS ? 1 : threads, 0, [&](int64_t row, char*) {
            const float* at = p.x + (from + row) * p.k;
            a.write_row(row, [&](int64_t step, char* line, int64_t part) {
                const int64_t i = step * 2 * LANES, left = p.k - i;
                const F32 low = load_part(at + i, left),
                          high = left > LANES ? load_part(at + i + LANES, left - LANES) : zero();
                if constexpr (FORM == BF16_ROUNDED) round_to(low, high, line);
                else split(low, high, line, line + part, line + 2 * part);
            });
        });
        const auto done = [&](int64_t tile, int64_t panel, int64_t wide, const char* sums) {
            for (int64_t c = 0; c < wide; ++c)
                p.store_outputs(from + tile * TILE_LINES, a.tile_rows(tile), (panel + c) * LANES, [&](int64_t r) {
                    return load(reinterpret_cast<const float*>(sums + (r * TILE_PANELS + c) * LINE));
                });
        };
        multiply_tiles<FORM>(a, panels, p.panels(), threads, done);
    });
}

#endif

// A bfloat16 weight without AMX, activations rounded to the nearest bfloat16.
void multiply_rounded(const Product& p, int64_t threads) {
    const Scratch memory(p.m * p.k * sizeof(float));
    round_rows(p.x, p.m, p.k, memory.as<float>(), threads);
    multiply<BF16, Order::ODD_FIRST>({p, memory.as<float>(), p.y, p.m}, threads);
}

// `src` and `dst` may be the same memory if n is a multiple of 16 and k of DEPTH.
template <class T> void pack(const T* src, T* dst, int64_t n, int64_t k, int64_t threads) {
    using Unit = std::conditional_t<sizeof(T) == 4 || DEPTH<T> == 2, uint32_t,
                                    std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>;
    const int64_t size = panel_elements<T>(k), bytes = k * sizeof(T);
    const bool in_place = src == dst;
    parallel_for(ceil_div(n, LANES), threads, in_place ? LANES * bytes : 0, [&](int64_t panel, char* scratch) {
        const char* from = reinterpret_cast<const char*>(src + panel * LANES * k);
        if (in_place) from = static_cast<const char*>(std::memcpy(scratch, from, LANES * bytes));
        interleave<Unit>(from, bytes, min(LANES, n - panel * LANES), reinterpret_cast<char*>(dst + panel * size));
    });
}

// An output channel (row of W) inside its panel.
template <class T> struct PanelRow {
    const T* panel;
    int64_t lane;
    PanelRow(const Weight& weight, int64_t row)
        : panel(static_cast<const T*>(weight.data) + row / LANES * panel_elements<T>(weight.k)), lane(row % LANES) {}
    T operator[](int64_t k) const { return panel[position<T>(lane, k)]; }
};

template <class T> void unpack(const Weight& weight, T* dst, int64_t first, int64_t end, int64_t threads) {
    parallel_for(end - first, threads, 0, [&](int64_t index, char*) {
        const PanelRow<T> row(weight, first + index);
        for (int64_t i = 0; i < weight.k; ++i) dst[index * weight.k + i] = row[i];
    });
}

template <class T> void gather(const Weight& weight, const int64_t* ids, float* y, int64_t count, int64_t threads) {
    parallel_for(count, threads, 0, [&](int64_t index, char*) {
        const PanelRow<T> row(weight, ids[index]);
        for (int64_t i = 0; i < weight.k; ++i) y[index * weight.k + i] = widen(row[i]);
    });
}

}  // namespace

void linear_float(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads) {
    const Product p{weight, x, y, m};
    const bool rounds = weight.activations == Activations::BFLOAT16;
#if LLM_TILES
    if (weight.kind == Kind::BFLOAT16)
        return rounds ? multiply_by_tiles<BF16_ROUNDED>(p, threads) : multiply_by_tiles<BF16_PARTS>(p, threads);
#elif LLM_BF16
    if (rounds) return linear_bf16(weight, x, y, m, threads);
#endif
    if (rounds) return multiply_rounded(p, threads);
    with_type(weight.kind, [&](auto type) { multiply<typename decltype(type)::Value>(p, threads); });
}

void pack_float(Kind kind, const void* src, void* dst, int64_t n, int64_t k, int64_t threads) {
    with_type(kind, [&](auto type) {
        using T = typename decltype(type)::Value;
        pack(static_cast<const T*>(src), static_cast<T*>(dst), n, k, threads);
    });
}

void pack_float8(const uint8_t* src, uint8_t* dst, int64_t n, int64_t k, int64_t threads) {
    pack(src, dst, n, k, threads);
}

void unpack_float8(const Weight& weight, uint8_t* dst, int64_t first, int64_t end, int64_t threads) {
    unpack(weight, dst, first, end, threads);
}

void unpack_float(const Weight& weight, void* dst, int64_t first, int64_t end, int64_t threads) {
    with_type(weight.kind, [&](auto type) {
        unpack(weight, static_cast<typename decltype(type)::Value*>(dst), first, end, threads);
    });
}

void gather_float(const Weight& weight, const int64_t* ids, float* y, int64_t count, int64_t threads) {
    with_type(weight.kind, [&](auto type) { gather<typename decltype(type)::Value>(weight, ids, y, count, threads); });
}

}  // namespace llm
