// Quantizes activations to int8: dynamically, by each row's largest magnitude, or by a given scale and offset. And
// rounds them to bfloat16.
//
// The formulas and roundings of kernels/reference/linear.py: x / scale is a true division, rounded half to even. NaN
// becomes 0, and the row's factor becomes NaN.
#pragma once

#include <type_traits>

#include "parallel.h"
#include "vector_math.h"

namespace llm {
namespace {

// Below this number of activations the calling thread quantizes alone.
constexpr int64_t SERIAL_ELEMENTS = 1 << 14;

// max|x| of a row; NaN if the row holds one. Compared as integers, |NaN| > infinity > every number.
LLM_INLINE float largest_magnitude(const float* x, int64_t k) {
    const I32 mask = set1_i(0x7fffffff);
    I32 a = set1_i(0), b = a, c = a, d = a;  // four chains: one has latency, and gcc 12 spills it
    int64_t i = 0;
    for (; i + 4 * LANES <= k; i += 4 * LANES) {
        a = max_i(a, and_i(as_int(load(x + i)), mask));
        b = max_i(b, and_i(as_int(load(x + i + LANES)), mask));
        c = max_i(c, and_i(as_int(load(x + i + 2 * LANES)), mask));
        d = max_i(d, and_i(as_int(load(x + i + 3 * LANES)), mask));
    }
    for (; i < k; i += LANES) a = max_i(a, and_i(as_int(load_part(x + i, k - i)), mask));
    return bits_to_float(static_cast<uint32_t>(largest(max_i(max_i(a, b), max_i(c, d)))));
}

// x / divisor. Where corrections are exact, quotients come from the reciprocal r: a third of the time of divisions, the
// same bits. x * r with one correction is less than a unit in the last place off. From there, with r rounded to nearest
// and an exact remainder, a second correction gives the correctly rounded quotient (Markstein, IBM J. Res. Dev. 34,
// 1990). Remainders are exact for divisors within 2^+-60; below |x| = 2^-90 both ways give less than a half.
class Divider {
    F32 divisor_, negative_, reciprocal_;
    bool divides_;

    LLM_INLINE F32 corrected(F32 q, F32 x) const { return fma(fma(q, negative_, x), reciprocal_, q); }

  public:
    Divider() = default;
    Divider(float divisor, bool divides)
        : divisor_(set1(divisor)), negative_(set1(-divisor)), reciprocal_(set1(1.0f / divisor)), divides_(divides) {}
    // By a divisor with exact corrections whose reciprocal is known.
    Divider(float divisor, float reciprocal)
        : divisor_(set1(divisor)), negative_(set1(-divisor)), reciprocal_(set1(reciprocal)), divides_(false) {}
    LLM_INLINE bool divides() const { return divides_; }
    LLM_INLINE F32 operator()(F32 x) const {
        return divides_ ? x / divisor_ : corrected(corrected(x * reciprocal_, x), x);
    }
#if defined(LLM_PLAIN)
    static bool has_exact_corrections(float) { return false; }  // nor fast: a fused multiply-add may be a call
#else
    static bool has_exact_corrections(float divisor) { return divisor >= 0x1p-60f && divisor <= 0x1p60f; }
#endif
};

// Quantizes a row: clamp(round(x / divisor) + offset, -128, 127), rounded half to even.
class Quantizer {
    Divider quotient_;
    F32 offset_;

  public:
    Quantizer() = default;
    // By a scale for any x: divides.
    Quantizer(float scale, int64_t offset) : quotient_(scale, true), offset_(set1(static_cast<float>(offset))) {}
    // By a row's scale, which is NaN if the row holds a NaN.
    explicit Quantizer(float row_scale)
        : quotient_(row_scale == 0.0f ? 1.0f : row_scale, !Divider::has_exact_corrections(row_scale)),
          offset_(set1(0.0f)) {}
    LLM_INLINE I32 operator()(F32 x) const {
        const F32 quotient = quotient_(x);
        if (!quotient_.divides()) return to_int(quotient);  // by a row's scale, which is finite: at most 127
        const F32 q = nan_to_zero(round_even(quotient) + offset_);
        return to_int(max(min(q, set1(127.0f)), set1(-128.0f)));
    }
};

LLM_INLINE float row_scale(const float* x, int64_t k) { return largest_magnitude(x, k) / 127.0f; }
// NaN if the row holds an infinity or a NaN.
LLM_INLINE float one_if_finite(const float* x, int64_t k) { return largest_magnitude(x, k) * 0.0f + 1.0f; }

// The quantizer of one batch row, and the factor of its sums. `input_scale` 0: by the row's own scale, which is the
// factor. Else: by input_scale and `offset`, with factor 1 if the row is finite.
struct RowQuantizer {
    float factor;
    Quantizer quantize;

    RowQuantizer() = default;
    RowQuantizer(const float* x, int64_t k, float input_scale, int64_t offset)
        : factor(input_scale == 0.0f ? row_scale(x, k) : one_if_finite(x, k)),
          quantize(input_scale == 0.0f ? Quantizer(factor) : Quantizer(input_scale, offset)) {}
};

// Operands of GEMMs are int8, uint8 plus 128, or int16.
LLM_INLINE void store_operands(int8_t* p, I32 x) { store_int8(p, x); }
LLM_INLINE void store_operands(uint8_t* p, I32 x) { store_int8(reinterpret_cast<int8_t*>(p), x + set1_i(128)); }
LLM_INLINE void store_operands(int16_t* p, I32 x) { store_int16(p, x); }
// 16 k of each of the batch rows `x` -> [16 / STEP][rows][STEP].
template <int64_t STEP, class Operand> LLM_INLINE void store_operands(Operand* p, const I32 (&x)[1]) {
    store_operands(p, x[0]);
}

// Batch rows that are quantized side by side: their bytes fill whole stores.
template <class Operand> constexpr int ROWS_AT_ONCE = 1;
#if LLM_AVX512
template <> constexpr int ROWS_AT_ONCE<int8_t> = 4;
template <> constexpr int ROWS_AT_ONCE<uint8_t> = 4;

template <int64_t STEP, class Operand> LLM_INLINE void store_operands(Operand* p, const I32 (&x)[4]) {
    static_assert(sizeof(Operand) == 1 && (STEP == 4 || STEP == 8), "bytes in steps of 4 or 8 k");
    const __m512i low = _mm512_packs_epi32(x[0].v, x[1].v), high = _mm512_packs_epi32(x[2].v, x[3].v);
    __m512i bytes = _mm512_packs_epi16(low, high);  // [4][4 rows][4]
    if (STEP == 8) {
        const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        bytes = _mm512_permutexvar_epi32(order, bytes);
    }
    _mm512_storeu_si512(p, std::is_signed_v<Operand> ? bytes : _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)));
}
#endif

// 16 k of ROWS batch rows -> the first `steps` of their steps in a tile's operands [steps][rows][STEP].
template <int64_t STEP, int ROWS, class Operand>
LLM_INLINE void store_steps(const I32 (&x)[ROWS], int64_t steps, int64_t rows, Operand* out) {
    alignas(64) Operand side[ROWS * LANES];
    store_operands<STEP>(side, x);
    for (int64_t s = 0; s < steps; ++s)
        std::memcpy(out + s * rows * STEP, side + s * ROWS * STEP, ROWS * STEP * sizeof(Operand));
}

// Each of x [rows][k] rounded to the nearest bfloat16.
inline void round_rows(const float* x, int64_t rows, int64_t k, float* out, int64_t threads) {
    parallel_for(rows, rows * k < SERIAL_ELEMENTS ? 1 : threads, 0, [&](int64_t row, char*) {
        for (int64_t i = row * k; i < (row + 1) * k; ++i) out[i] = widen(narrow<BF16>(x[i]));
    });
}

#if LLM_BF16
LLM_INLINE __m512i halves_exchanged(__m512i pairs) {  // vprold, by whose intrinsic gcc 12 warns
    return (__m512i)((__v16su)pairs << 16 | (__v16su)pairs >> 16);
}
// The first of up to 32 activations x as 16 pairs of the nearest bfloat16, the even k in the lower half.
LLM_INLINE I32 rounded_pairs(const float* x, int64_t count) {
    const F32 low = load_part(x, count), high = count > LANES ? load_part(x + LANES, count - LANES) : zero();
    return {(__m512i)_mm512_cvtne2ps_pbh(high.v, low.v)};
}
// A row x [k] of an even number -> [k / 2] pairs, the even k in the upper half.
LLM_INLINE void round_pairs(const float* x, int64_t k, float* out) {
    for (int64_t i = 0; i < k; i += 2 * LANES)
        store_part(out + i / 2, as_float({halves_exchanged(rounded_pairs(x + i, k - i).v)}), (k - i) / 2);
}
// Each lane rounded to the nearest bfloat16.
LLM_INLINE F32 rounded(F32 x) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(x.v, x.v);
    return as_float(shift_left<16>(I32{_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both))}));
}
#endif

}  // namespace
}  // namespace llm
