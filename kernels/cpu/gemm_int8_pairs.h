// The int8 dot products of pairs of rows with I8MM: the part of gemm_int8.cpp for these processors, which includes this
// inside of its namespace. Operands and panels are those of all others.
#pragma once

// Two steps of a panel at once: an instruction multiplies 2 rows of 8 k by 2 output channels of 8 k. Sums of a pair of
// rows are [8] vectors of [2 rows][2 channels].
constexpr int PAIRED = LANES / 2;

// Four bytes of a line alternate with those of the next line: 8 k of a row or of a channel side by side.
LLM_INLINE Bytes joined_low(Bytes line, Bytes next) {
    return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(line), vreinterpretq_s32_s8(next)));
}
LLM_INLINE Bytes joined_high(Bytes line, Bytes next) {
    return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(line), vreinterpretq_s32_s8(next)));
}
// The rows of a pair in two lines of operands.
LLM_INLINE Bytes row_pair(const Operand* line, const Operand* next) {
    return joined_low(vcombine_s8(vld1_s8(line), vdup_n_s8(0)), vcombine_s8(vld1_s8(next), vdup_n_s8(0)));
}
LLM_INLINE void multiply_pairs(int32x4_t& sum, Bytes rows, Bytes channels) { sum = vmmlaq_s32(sum, rows, channels); }

// Sums of an even number of rows and one panel. An odd last step is joined with zeros.
template <int ROWS>
__attribute__((noinline)) void paired_dots(const Operand* a, const int8_t* b, int64_t panel_bytes, int64_t steps,
                                           int32_t* out) {
    int32x4_t acc[ROWS / 2][PAIRED];
    LLM_UNROLL for (int r = 0; r < ROWS / 2; ++r) LLM_UNROLL for (int c = 0; c < PAIRED; ++c)
        acc[r][c] = vdupq_n_s32(0);
    const Ahead ahead(prefetch_bytes(1), PANEL_STEP, steps, 1, panel_bytes);
    const auto add = [&](const Operand* line, const Operand* next_line, const int8_t* w, const int8_t* next_w) {
        Bytes rows[ROWS / 2];
        LLM_UNROLL for (int r = 0; r < ROWS / 2; ++r) rows[r] = row_pair(line + 2 * r * STEP, next_line + 2 * r * STEP);
        LLM_UNROLL for (int v = 0; v < PANEL_VECTORS; ++v) {
            const Bytes here = load_bytes(w + v * sizeof(Bytes)), next = load_bytes(next_w + v * sizeof(Bytes));
            const Bytes low = joined_low(here, next), high = joined_high(here, next);
            LLM_UNROLL for (int r = 0; r < ROWS / 2; ++r) {
                multiply_pairs(acc[r][2 * v], rows[r], low);
                multiply_pairs(acc[r][2 * v + 1], rows[r], high);
            }
        }
    };
    int64_t s = 0;
    for (; s + 2 <= steps; s += 2) {
        prefetch(b + s * PANEL_STEP + ahead.distance(s));
        prefetch(b + (s + 1) * PANEL_STEP + ahead.distance(s));
        add(a + s * ROWS * STEP, a + (s + 1) * ROWS * STEP, b + s * PANEL_STEP, b + (s + 1) * PANEL_STEP);
    }
    alignas(64) static constexpr int8_t zeros[PANEL_STEP] = {};
    if (s < steps) add(a + s * ROWS * STEP, zeros, b + s * PANEL_STEP, zeros);
    LLM_UNROLL for (int r = 0; r < ROWS / 2; ++r) LLM_UNROLL for (int v = 0; v < PANEL_VECTORS; ++v) {
        const int64x2_t low = vreinterpretq_s64_s32(acc[r][2 * v]), high = vreinterpretq_s64_s32(acc[r][2 * v + 1]);
        vst1q_s32(out + 2 * r * LANES + v * 4, vreinterpretq_s32_s64(vzip1q_s64(low, high)));
        vst1q_s32(out + (2 * r + 1) * LANES + v * 4, vreinterpretq_s32_s64(vzip2q_s64(low, high)));
    }
}
