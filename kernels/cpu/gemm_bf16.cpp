// GEMM y = x W^T (+ bias) with vdpbf16ps: bfloat16 weights, activations rounded to the nearest bfloat16.
//
// In each lane the instruction adds two products of bfloat16 to a float32 sum, one fused multiply-add after the other:
// first that of the upper halves of 32 bits, then that of the lower ones. A panel has the even k in the lower half. So
// every output is one chain of FMAs from +0 over k = 1, 0, 3, 2, ..., then the bias, as multiply_rounded in
// gemm_float.cpp has it for the other instruction sets: to exchange the halves of a weight takes the time of two
// products. The bits are the same where no operand and no sum is a denormal, which this instruction takes for zero.
#include "quantize.h"
#include "weight.h"

#if LLM_BF16

namespace llm {
namespace {

constexpr int64_t STEP_BYTES = LANES * 4;  // of a panel: 2 k of 16 output channels
constexpr int64_t PREFETCH_BYTES = 4096;
constexpr int64_t BLOCK_BYTES = 1 << 20;  // operands of one block of row tiles

// Two values of one k pair: that of the even k in the lower half.
using Pair = int32_t;

// Rounds one batch row of a tile of `rows` to [k / 2][rows]; with an odd k, the last pair ends with 0.
void round_row(const float* x, int64_t k, int64_t rows, Pair* out) {
    for (int64_t i = 0; i < k; i += 2 * LANES) {
        const int64_t left = k - i;
        alignas(64) Pair pairs[LANES];
        store_i(pairs, rounded_pairs(x + i, left));
        for (int64_t j = 0; j < min(LANES, ceil_div(left, 2)); ++j) out[(i / 2 + j) * rows] = pairs[j];
    }
}

// a: of the tile, [k / 2][ROWS]. Not inlined: what the caller keeps in registers would make it spill.
template <int ROWS, int PANELS>
__attribute__((noinline)) void tile(const Product& p, const Pair* a, int64_t row, int64_t panel) {
    const int64_t steps = ceil_div(p.k, 2), panel_size = steps * STEP_BYTES;
    const char* b = static_cast<const char*>(p.data) + panel * panel_size;
    F32 acc[ROWS][PANELS];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < PANELS; ++c) acc[r][c] = zero();
    const Ahead ahead(PREFETCH_BYTES, STEP_BYTES, steps, PANELS, panel_size);
    for (int64_t s = 0; s < steps; ++s) {
        const int64_t distance = ahead.distance(s);
        __m512bh w[PANELS];
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
            const char* at = b + c * panel_size + s * STEP_BYTES;
            prefetch_far(at + distance);
            w[c] = (__m512bh)_mm512_loadu_si512(at);
        }
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const __m512bh value = (__m512bh)_mm512_set1_epi32(a[s * ROWS + r]);
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) acc[r][c].v = _mm512_dpbf16_ps(acc[r][c].v, w[c], value);
        }
    }
    LLM_UNROLL for (int c = 0; c < PANELS; ++c)
        p.store_outputs(row, ROWS, (panel + c) * LANES, [&](int64_t r) { return acc[r][c]; });
}

// Enough independent chains to hide the latency of six cycles, few enough to stay in registers.
constexpr int panels_for(int rows) { return rows <= 4 ? 4 : 2; }

template <int ROWS> void tiles(const Product& p, const Pair* a, int64_t row, int64_t panel, int64_t end) {
    for_panels<panels_for(ROWS)>(panel, end,
                                 [&](auto wide, int64_t at) { tile<ROWS, decltype(wide)::value>(p, a, row, at); });
}

}  // namespace

void linear_bf16(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads) {
    const Product p{weight, x, y, m};
    const int64_t steps = ceil_div(p.k, 2);
    const Scratch memory(m * steps * sizeof(Pair));
    Pair* operands = memory.as<Pair>();
    const Tasks tasks(m, p.n, MAX_ROWS, steps * sizeof(Pair), BLOCK_BYTES, threads);
    parallel_for(tasks.tiles(), m * p.k < SERIAL_ELEMENTS ? 1 : threads, 0, [&](int64_t tile, char*) {
        const int64_t first = tasks.first_row(tile), rows = tasks.rows(tile);
        for (int64_t r = 0; r < rows; ++r) round_row(x + (first + r) * p.k, p.k, rows, operands + first * steps + r);
    });
    tasks.run([&](int64_t tile, int64_t panel, int64_t end) {
        const int64_t row = tasks.first_row(tile);
        with_rows(tasks.rows(tile),
                  [&](auto rows) { tiles<decltype(rows)::value>(p, operands + row * steps, row, panel, end); });
    });
}

}  // namespace llm

#endif
