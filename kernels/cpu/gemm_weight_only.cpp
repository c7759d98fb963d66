// GEMM y = x W^T (+ bias): float32 activations, int8 or int4 weights W[n, k] = (w[n, k] - zero[n, g]) * scale[n, g], or
// code[n, k] * scale[n, g] - minimum[n, g] with unsigned codes (weight.h). And rows of such weights by id.
//
// Each output is one chain of FMAs from +0 over k = 0 ... K-1, then the bias, as with a float weight. For few batch
// rows, weights become float32 in registers just before they are multiplied. For more, a block of k is widened once
// into the L2 cache and shared by a block of row tiles. Panels are those of gemm_int8.cpp and gemm_int4.cpp.
#include <cmath>
#include <utility>

#include "weight.h"

namespace llm {
namespace {

#if LLM_AVX512
constexpr int TILE_PANELS = 2;
#else
constexpr int TILE_PANELS = 1;
#endif
constexpr int64_t BLOCK_K = 256;          // k of the float weights in the L2 cache
constexpr int64_t BLOCK_BYTES = 1 << 20;  // activations of one block of row tiles
constexpr int64_t PREFETCH_BYTES = 2048;
constexpr int64_t STEP_BYTES = LANES * 4;  // of a panel: 4 k of int8, 8 k of int4
constexpr int step_of(int bits) { return 32 / bits; }

template <int BITS> LLM_INLINE int64_t steps_of(const Product& p) { return ceil_div(p.k, step_of(BITS)); }
template <int BITS> LLM_INLINE const uint8_t* panel_at(const Product& p, int64_t index) {
    return static_cast<const uint8_t*>(p.data) + index * steps_of<BITS>(p) * STEP_BYTES;
}

// Value J of each output channel's four bytes, or eight nibbles, as an integer plus VALUE_BIAS. A nibble is stored plus
// 8; k and k + 4 share a byte.
constexpr int nibble_bit(int j) { return j < 4 ? 8 * j : 8 * (j - 4) + 4; }
#if LLM_AVX512
template <int BITS> constexpr int VALUE_BIAS = 0;
template <int BITS> struct Opened {
    __m512i raw;
    LLM_INLINE explicit Opened(const uint8_t* p) : raw(_mm512_loadu_si512(p)) {}
    template <int J> LLM_INLINE F32 value() const {
        if constexpr (BITS == 8) return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(raw, 24 - 8 * J), 24))};
        // The permutation reads only the lowest four bits of each index.
        const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        return {_mm512_permutexvar_ps(_mm512_srli_epi32(raw, nibble_bit(J)), table)};
    }
};
#elif LLM_AVX2
template <int BITS> constexpr int VALUE_BIAS = 1 << (BITS - 1);
template <int BITS> struct Opened {
    __m256i lo[BITS == 8 ? 1 : 2], hi[BITS == 8 ? 1 : 2];  // unsigned bytes: of k ... k + 3, of k + 4 ... k + 7
    LLM_INLINE explicit Opened(const uint8_t* p) {
        lo[0] = load_256(p), hi[0] = load_256(p + 32);
        if constexpr (BITS == 8) {
            const __m256i flip = _mm256_set1_epi8(-128);
            lo[0] = _mm256_xor_si256(lo[0], flip), hi[0] = _mm256_xor_si256(hi[0], flip);
        } else {
            const __m256i mask = _mm256_set1_epi8(15);
            lo[1] = _mm256_and_si256(_mm256_srli_epi32(lo[0], 4), mask),
            hi[1] = _mm256_and_si256(_mm256_srli_epi32(hi[0], 4), mask);
            lo[0] = _mm256_and_si256(lo[0], mask), hi[0] = _mm256_and_si256(hi[0], mask);
        }
    }
    template <int J> LLM_INLINE F32 value() const {  // byte J of each 32 bits, alone
        constexpr int B = J % 4, Z = static_cast<int>(0x80808000u);
        const __m256i order = _mm256_setr_epi32(Z | B, Z | (4 + B), Z | (8 + B), Z | (12 + B), Z | B, Z | (4 + B),
                                                Z | (8 + B), Z | (12 + B));
        return to_float(I32{_mm256_shuffle_epi8(lo[J / 4], order), _mm256_shuffle_epi8(hi[J / 4], order)});
    }
};
#else
template <int BITS> constexpr int VALUE_BIAS = 0;
template <int BITS> struct Opened {
    const uint8_t* p;
    explicit Opened(const uint8_t* at) : p(at) {}
    template <int J> F32 value() const {
        return lanes<F32>([&](int c) {
            const uint8_t byte = p[4 * c + J % 4];
            return static_cast<float>(BITS == 8 ? static_cast<int8_t>(byte) : (J < 4 ? byte & 15 : byte >> 4) - 8);
        });
    }
};
#endif

// What makes an unsigned code of a value.
template <int BITS> constexpr int CODE_BIAS = (1 << (BITS - 1)) - VALUE_BIAS<BITS>;

// What is subtracted: nothing, a zero point before the integer is scaled, or a minimum after.
enum class Form { PLAIN, ZEROS, MINIMA };

// Turns a group's integers of 16 output channels into weights. The bias is a power of two, so bias * scale is exact and
// one FMA rounds as the product with the integer itself would.
template <int BITS, Form FORM> struct Grid {
    F32 scale, shift;
    LLM_INLINE Grid() : scale(zero()), shift(zero()) {}
    LLM_INLINE void load_group(const Product& p, int64_t group, int64_t column) {
        scale = p.scales().load(group, column, p.n - column);
        if constexpr (FORM == Form::ZEROS) shift = p.zeros().load(group, column, p.n - column);
        else if constexpr (FORM == Form::MINIMA) shift = zero() - p.minima().load(group, column, p.n - column);
        else if (VALUE_BIAS<BITS>) shift = scale * set1(-VALUE_BIAS<BITS>);
    }
    LLM_INLINE F32 weight(F32 value) const {
        if constexpr (FORM == Form::MINIMA)
            return fma(CODE_BIAS<BITS> ? value + set1(CODE_BIAS<BITS>) : value, scale, shift);
        if constexpr (FORM == Form::ZEROS)
            return ((VALUE_BIAS<BITS> ? value - set1(VALUE_BIAS<BITS>) : value) - shift) * scale;
        return VALUE_BIAS<BITS> ? fma(value, scale, shift) : value * scale;
    }
};

// Calls call(std::integral_constant j) for j = 0 ... N - 1.
template <class Call, int... J> LLM_INLINE void for_each(const Call& call, std::integer_sequence<int, J...>) {
    (call(std::integral_constant<int, J>{}), ...);
}

#if !defined(LLM_PLAIN)

constexpr int FEW_ROWS = 6;
#if LLM_AVX512
constexpr int panels_for(int rows) { return rows <= 3 ? 4 : 2; }
#else
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif

// Few batch rows, whole steps in every group: weights go from memory straight to the FMA.
template <int BITS, Form FORM, int ROWS> __attribute__((noinline)) void few_rows(const Product& p, int64_t panel) {
    constexpr int PANELS = panels_for(ROWS), STEP = step_of(BITS);
    const uint8_t* b[PANELS];
    F32 acc[ROWS][PANELS];
    // Past the last panel, the last panel is computed again.
    LLM_UNROLL for (int c = 0; c < PANELS; ++c) b[c] = panel_at<BITS>(p, min(panel + c, p.panels() - 1));
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < PANELS; ++c) acc[r][c] = zero();
    const int64_t steps = steps_of<BITS>(p), group_steps = p.group_size / STEP;
    const Ahead ahead(PREFETCH_BYTES, STEP_BYTES, steps, PANELS, steps * STEP_BYTES);
    for (int64_t s = 0, group = 0; s < steps; ++group) {
        Grid<BITS, FORM> grid[PANELS];
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
            const int64_t column = min(panel + c, p.panels() - 1) * LANES;
            grid[c].load_group(p, group, column);
            // A later panel's scales: they come from memory one line at a time.
            p.scales().fetch(group, column + PANELS * LANES);
        }
        for (const int64_t end = min(steps, s + group_steps); s < end; ++s) {
            const int64_t distance = ahead.distance(s);
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) prefetch(b[c] + s * STEP_BYTES + distance);
            const float* a = p.x + s * STEP;
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
                const Opened<BITS> opened(b[c] + s * STEP_BYTES);
                for_each([&](auto j) {
                    const F32 w = grid[c].weight(opened.template value<decltype(j)::value>());
                    LLM_UNROLL for (int r = 0; r < ROWS; ++r)
                        acc[r][c] = fma(set1(a[r * p.k + decltype(j)::value]), w, acc[r][c]);
                }, std::make_integer_sequence<int, STEP>{});
            }
        }
    }
    LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
        const int64_t column = min(panel + c, p.panels() - 1) * LANES;
        const F32 biases = p.biases(column);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) p.store_output(r, column, acc[r][c], biases);
    }
}

template <int BITS, Form FORM> void few_rows(const Product& p, const Tasks& tasks) {
    tasks.run([&](int64_t, int64_t panel, int64_t end) {
        with_rows(p.m, [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            if constexpr (ROWS <= FEW_ROWS)
                for (; panel < end; panel += panels_for(ROWS)) few_rows<BITS, FORM, ROWS>(p, panel);
        });
    });
}

#endif

// Widens a panel's weights of k in [first, end) into out [end - first][TILE_PANELS][16].
template <int BITS, Form FORM>
void widen_block(const Product& p, int64_t panel, int64_t first, int64_t end, float* out) {
    constexpr int STEP = step_of(BITS);
    constexpr int64_t ROW = TILE_PANELS * LANES;
    const uint8_t* from = panel_at<BITS>(p, panel);
    for (int64_t k = first; k < end;) {
        const int64_t group = k / p.group_size, stop = min(end, (group + 1) * p.group_size);
        Grid<BITS, FORM> grid;
        grid.load_group(p, group, panel * LANES);
        while (k < stop) {
            const uint8_t* at = from + k / STEP * STEP_BYTES;
            prefetch(at + PREFETCH_BYTES);
            const Opened<BITS> opened(at);
            const int64_t skip = k % STEP, count = min(STEP, stop - k + skip);
            float* to = out + (k - first - skip) * ROW;
            for_each([&](auto j) {
                constexpr int J = decltype(j)::value;
                if (J >= skip && J < count) store(to + J * ROW, grid.weight(opened.template value<J>()));
            }, std::make_integer_sequence<int, STEP>{});
            k += count - skip;
        }
    }
}

// sums [ROWS][TILE_PANELS][16] += x [ROWS][count] w [count][TILE_PANELS][16]
template <int ROWS>
__attribute__((noinline)) void accumulate(const float* x, int64_t stride, const float* w, int64_t count, float* sums) {
    F32 acc[ROWS][TILE_PANELS];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c)
        acc[r][c] = load(sums + (r * TILE_PANELS + c) * LANES);
    for (int64_t k = 0; k < count; ++k) {
        F32 weight[TILE_PANELS];
        LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c) weight[c] = load(w + (k * TILE_PANELS + c) * LANES);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const F32 value = set1(x[r * stride + k]);
            LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c) acc[r][c] = fma(value, weight[c], acc[r][c]);
        }
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c)
        store(sums + (r * TILE_PANELS + c) * LANES, acc[r][c]);
}

// One block of row tiles with TILE_PANELS panels.
template <int BITS, Form FORM>
void block(const Product& p, const Tasks& tasks, int64_t first_tile, int64_t end_tile, int64_t panel, float* weights) {
    constexpr int64_t ROW = TILE_PANELS * LANES;
    float* sums = weights + BLOCK_K * ROW;
    const int64_t first_row = tasks.first_row(first_tile), rows = tasks.first_row(end_tile) - first_row;
    const int64_t panels = min(TILE_PANELS, p.panels() - panel);
    std::memset(sums, 0, rows * ROW * sizeof(float));
    for (int64_t first = 0; first < p.k; first += BLOCK_K) {
        const int64_t end = min(first + BLOCK_K, p.k);
        for (int64_t c = 0; c < panels; ++c) widen_block<BITS, FORM>(p, panel + c, first, end, weights + c * LANES);
        for (int64_t tile = first_tile; tile < end_tile; ++tile)
            with_rows(tasks.rows(tile), [&](auto height) {
                const int64_t row = tasks.first_row(tile);
                accumulate<decltype(height)::value>(p.x + row * p.k + first, p.k, weights, end - first,
                                                    sums + (row - first_row) * ROW);
            });
    }
    for (int64_t c = 0; c < panels; ++c) {
        const int64_t column = (panel + c) * LANES;
        const F32 biases = p.biases(column);
        for (int64_t row = 0; row < rows; ++row)
            p.store_output(first_row + row, column, load(sums + row * ROW + c * LANES), biases);
    }
}

template <int BITS, Form FORM> void multiply(const Product& p, int64_t threads) {
    const Tasks tasks(p.m, p.n, MAX_ROWS, 0, 0, threads);
#if !defined(LLM_PLAIN)
    constexpr int STEP = step_of(BITS);
    if (p.m <= FEW_ROWS && p.k % STEP == 0 && (p.group_size % STEP == 0 || p.group_size >= p.k))
        return few_rows<BITS, FORM>(p, tasks);
#endif
    const int64_t fitting = BLOCK_BYTES / (p.k * static_cast<int64_t>(sizeof(float)) * MAX_ROWS + 1);
    const int64_t block_tiles = min(max(8, fitting), tasks.tiles());
    const int64_t groups = ceil_div(p.panels(), TILE_PANELS), blocks = ceil_div(tasks.tiles(), block_tiles);
    const int64_t scratch = (BLOCK_K + block_tiles * MAX_ROWS) * TILE_PANELS * LANES * sizeof(float);
    parallel_for(groups * blocks, threads, scratch, [&](int64_t task, char* memory) {
        const int64_t first = task / groups * block_tiles, end = min(first + block_tiles, tasks.tiles());
        block<BITS, FORM>(p, tasks, first, end, task % groups * TILE_PANELS, reinterpret_cast<float*>(memory));
    });
}

// Calls call(Form) with what the weight subtracts, as a constant.
template <class Call> auto with_form(const Weight& weight, const Call& call) {
    if (weight.zero) return call(std::integral_constant<Form, Form::ZEROS>{});
    if (weight.minimum) return call(std::integral_constant<Form, Form::MINIMA>{});
    return call(std::integral_constant<Form, Form::PLAIN>{});
}

// Row `row` of the weight [k].
template <int BITS, Form FORM> void gather_row(const Product& p, int64_t row, float* out) {
    constexpr int STEP = step_of(BITS), CODE = 1 << (BITS - 1);
    const uint8_t* at = panel_at<BITS>(p, row / LANES) + row % LANES * 4;
    for (int64_t first = 0, group = 0; first < p.k; first += p.group_size, ++group) {
        const float scale = p.scales().at(group, row);
        for (int64_t k = first; k < min(first + p.group_size, p.k); ++k) {
            const uint8_t byte = at[k / STEP * STEP_BYTES + k % 4];
            const int value = BITS == 8 ? static_cast<int8_t>(byte) : (k % STEP < 4 ? byte & 15 : byte >> 4) - CODE;
            if constexpr (FORM == Form::MINIMA)
                out[k] = std::fmaf(static_cast<float>(value + CODE), scale, -p.minima().at(group, row));
            else out[k] = (static_cast<float>(value) - (FORM == Form::ZEROS ? p.zeros().at(group, row) : 0.0f)) * scale;
        }
    }
}

}  // namespace

void linear_weight_only(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads) {
    if (m == 0) return;
    const Product p{weight, x, y, m};
    with_form(weight, [&](auto form) {
        constexpr Form FORM = decltype(form)::value;
        weight.kind == Kind::INT8 ? multiply<8, FORM>(p, threads) : multiply<4, FORM>(p, threads);
    });
}

void gather_integers(const Weight& weight, const int64_t* ids, float* y, int64_t count, int64_t threads) {
    const Product p{weight, nullptr, y, count};
    with_form(weight, [&](auto form) {
        constexpr Form FORM = decltype(form)::value;
        parallel_for(count, threads, 0, [&](int64_t index, char*) {
            float* out = y + index * weight.k;
            const int64_t row = ids[index];
            weight.kind == Kind::INT8 ? gather_row<8, FORM>(p, row, out) : gather_row<4, FORM>(p, row, out);
        });
    });
}

}  // namespace llm
