// Products of int8 codes and factors of 15 bits, exact in int32: what attention over a KV cache in int8 is made of.
#pragma once

#include "bytes.h"

namespace llm {
namespace {

// 127 * 128, so that NEON multiplies the high and the low seven bits, which are int8.
constexpr int64_t LARGEST_FACTOR = 16256;
// Four factors, in the order in which they are multiplied.
constexpr int64_t FOUR_BYTES = 8;
#if LLM_PLAIN || LLM_NEON
constexpr int INT8_ROWS = 2;
#elif LLM_AVX512 && LLM_VNNI
constexpr int INT8_ROWS = 8;
#else
constexpr int INT8_ROWS = 4;
#endif

// `Codes` are four codes of each of 16 lanes, 64 bytes. add() adds their products with the four factors at `four`, the
// same for all lanes, to the lanes of a sum.
#if LLM_AVX512

// Two chains: with VNNI a product has the latency of five.
struct Sum { I32 even, odd; };
LLM_INLINE Sum no_sum() { return {set1_i(0), set1_i(0)}; }
LLM_INLINE I32 total_of(Sum sum) { return sum.even + sum.odd; }
// sum += two products to an int32, of the int16 of `codes` and the two at `pair`. Assembly: gcc 12 copies each sum
// before its product.
LLM_INLINE void add_pair(I32& sum, __m512i codes, const int32_t* pair) {
#if LLM_VNNI
    __m512i out = sum.v;
    asm volatile("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(out) : "v"(codes), "m"(*pair));
    sum.v = out;
#else
    sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(codes, _mm512_set1_epi32(*pair)));
#endif
}
struct Codes {
    __m512i even, odd;
    LLM_INLINE explicit Codes(const uint8_t* p) {
        const __m512i raw = _mm512_loadu_si512(p);
        even = _mm512_srai_epi16(_mm512_slli_epi16(raw, 8), 8), odd = _mm512_srai_epi16(raw, 8);
    }
    LLM_INLINE void add(Sum& sum, const int32_t* four) const {
        add_pair(sum.even, even, four);
        add_pair(sum.odd, odd, four + 1);
    }
};

#elif LLM_AVX2

using Sum = I32;
LLM_INLINE Sum no_sum() { return set1_i(0); }
LLM_INLINE I32 total_of(Sum sum) { return sum; }
struct Codes {
    __m256i even_lo, even_hi, odd_lo, odd_hi;
    LLM_INLINE explicit Codes(const uint8_t* p) {
        const __m256i lo = load_256(p), hi = load_256(p + 32);
        even_lo = _mm256_srai_epi16(_mm256_slli_epi16(lo, 8), 8), odd_lo = _mm256_srai_epi16(lo, 8);
        even_hi = _mm256_srai_epi16(_mm256_slli_epi16(hi, 8), 8), odd_hi = _mm256_srai_epi16(hi, 8);
    }
    LLM_INLINE void add(Sum& sum, const int32_t* four) const {
        const __m256i first = _mm256_set1_epi32(four[0]), second = _mm256_set1_epi32(four[1]);
        sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(even_lo, first));
        sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(even_hi, first));
        sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(odd_lo, second));
        sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(odd_hi, second));
    }
};

#elif LLM_NEON

struct Sum { I32 high, low; };
LLM_INLINE Sum no_sum() { return {set1_i(0), set1_i(0)}; }
LLM_INLINE I32 total_of(Sum sum) { return shift_left<7>(sum.high) + sum.low; }
struct Codes {
    int8x16_t codes[4];
    LLM_INLINE explicit Codes(const uint8_t* p) {
        LLM_UNROLL for (int i = 0; i < 4; ++i) codes[i] = vld1q_s8(reinterpret_cast<const int8_t*>(p) + 16 * i);
    }
    LLM_INLINE void add(Sum& sum, const int32_t* four) const {
        const int8x16_t high = vreinterpretq_s8_s32(vdupq_n_s32(four[0]));
        const int8x16_t low = vreinterpretq_s8_s32(vdupq_n_s32(four[1]));
        LLM_UNROLL for (int i = 0; i < 4; ++i) {
            sum.high.v[i] = vdotq_s32(sum.high.v[i], codes[i], high);
            sum.low.v[i] = vdotq_s32(sum.low.v[i], codes[i], low);
        }
    }
};

#else

using Sum = I32;
LLM_INLINE Sum no_sum() { return set1_i(0); }
LLM_INLINE I32 total_of(Sum sum) { return sum; }
struct Codes {
    const int8_t* codes;
    explicit Codes(const uint8_t* p) : codes(reinterpret_cast<const int8_t*>(p)) {}
    void add(Sum& sum, const int32_t* four) const {
        int16_t factors[4];
        std::memcpy(factors, four, FOUR_BYTES);
        for (int i = 0; i < LANES; ++i)
            for (int j = 0; j < 4; ++j) sum.v[i] += factors[j] * codes[4 * i + j];
    }
};

#endif

// 16 factors in the order in which `Codes` multiplies them, fours side by side.
LLM_INLINE void encode(I32 x, int32_t* to) {
#if LLM_PLAIN || LLM_NEON
    alignas(64) int16_t factors[LANES];
    store_int16(factors, x);
#if LLM_PLAIN
    std::memcpy(to, factors, sizeof factors);
#else
    int8_t bytes[2 * LANES];
    for (int i = 0; i < LANES; ++i) {
        const int high = (factors[i] + 64) >> 7, at = i / 4 * FOUR_BYTES + i % 4;
        bytes[at] = static_cast<int8_t>(high), bytes[at + 4] = static_cast<int8_t>(factors[i] - high * 128);
    }
    std::memcpy(to, bytes, sizeof bytes);
#endif
#else
#if LLM_AVX512
    const __m256i factors = _mm512_cvtepi32_epi16(x.v);
#else
    const __m256i factors = low_halves(x);
#endif
    const __m256i even_first = _mm256_set1_epi64x(0x0706030205040100);
    const __m256i lanes = _mm256_set_epi64x(0x0808080808080808, 0, 0x0808080808080808, 0);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_shuffle_epi8(factors, _mm256_add_epi8(even_first, lanes)));
#endif
}

}  // namespace
}  // namespace llm
