// Sixteen float lanes on every instruction set: one AVX-512 register, two AVX2 registers, four NEON registers, or an
// array.
//
// Kernels are written once, on F32, I32 and the element type. Every operation rounds the same way on all four, and a
// sum over lanes has one fixed tree, so a kernel gives the same bits on every instruction set. Comparisons follow x86:
// max(a, b) is b if either is NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define LLM_TILES 1
#elif defined(__AVX512BF16__)
#define LLM_BF16 1
#endif
#if defined(__AVX512F__)
#define LLM_AVX512 1
#elif defined(__AVX2__)
#define LLM_AVX2 1
#elif defined(__ARM_FEATURE_DOTPROD)
#define LLM_NEON 1
#else
#define LLM_PLAIN 1
#endif
#if LLM_AVX512 || LLM_AVX2
#include <immintrin.h>
#elif LLM_NEON
#include <arm_neon.h>
#endif

#define LLM_INLINE inline __attribute__((always_inline))
#define LLM_UNROLL _Pragma("GCC unroll 32")

namespace llm {
namespace {  // one copy per object file: the linker cannot mix instruction sets

LLM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// Into the L2 cache, which has more fetches in flight than L1.
LLM_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

constexpr int LANES = 16;

struct BF16 { uint16_t bits; };
struct F16 { uint16_t bits; };
struct F8 { uint8_t bits; };  // e4m3fn

LLM_INLINE float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
LLM_INLINE float widen(float x) { return x; }
LLM_INLINE float widen(BF16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
// float16 -> float32, exact; a signalling NaN becomes quiet, as with vcvtph2ps.
LLM_INLINE float widen(F16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    if (rest >= 0x7c00u)
        return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13 | (rest > 0x7c00u ? 0x400000u : 0));
    if (rest >= 0x0400u) return bits_to_float(sign | ((rest << 13) + 0x38000000u));
    const float denormal = static_cast<float>(rest) * 0x1p-24f;
    return sign ? -denormal : denormal;
}
// Of all but NaN: the bits of a float16 whose exponent is counted from 8 more.
LLM_INLINE float widen(F8 x) {
    const uint32_t bits = (x.bits & 0x80u) << 8 | (x.bits & 0x7fu) << 7;
    return widen(F16{static_cast<uint16_t>(bits)}) * 256.0f;
}

#if LLM_AVX512

struct F32 { __m512 v; };
struct I32 { __m512i v; };

LLM_INLINE F32 zero() { return {_mm512_setzero_ps()}; }
LLM_INLINE F32 set1(float x) { return {_mm512_set1_ps(x)}; }
LLM_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
LLM_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
LLM_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
LLM_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
LLM_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
LLM_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
LLM_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
LLM_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
LLM_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
LLM_INLINE F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
LLM_INLINE F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
LLM_INLINE F32 round_even(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a < b ? x : y, lane by lane (y if either is NaN)
LLM_INLINE F32 select_less(F32 a, F32 b, F32 x, F32 y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// Bit i is lane i of !(a <= b), or of a >= b. With a NaN the first is true, the second false.
LLM_INLINE uint32_t not_at_most(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ); }
LLM_INLINE uint32_t at_least(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
LLM_INLINE F32 nan_to_zero(F32 a) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_ORD_Q), a.v)}; }

LLM_INLINE I32 set1_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
LLM_INLINE I32 load_i(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
LLM_INLINE void store_i(int32_t* p, I32 x) { _mm512_storeu_si512(p, x.v); }
LLM_INLINE I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
LLM_INLINE I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
template <int N> LLM_INLINE I32 shift_left(I32 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> LLM_INLINE I32 shift_right(I32 a) { return {_mm512_srli_epi32(a.v, N)}; }
LLM_INLINE F32 as_float(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
LLM_INLINE I32 as_int(F32 a) { return {_mm512_castps_si512(a.v)}; }
LLM_INLINE F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Rounds half to even; NaN and values out of range give INT32_MIN.
LLM_INLINE I32 to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }

LLM_INLINE F32 load(const BF16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
LLM_INLINE F32 load(const F16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
LLM_INLINE I32 max_i(I32 a, I32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
LLM_INLINE I32 and_i(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
// Truncates to the low 8 or 16 bits, like a C cast.
LLM_INLINE void store_int8(int8_t* p, I32 x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x.v)); }
LLM_INLINE void store_int16(int16_t* p, I32 x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x.v)); }
LLM_INLINE I32 load_int8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }

#elif LLM_AVX2

struct F32 { __m256 lo, hi; };
struct I32 { __m256i lo, hi; };

LLM_INLINE F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LLM_INLINE F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LLM_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LLM_INLINE void store(float* p, F32 x) { _mm256_storeu_ps(p, x.lo), _mm256_storeu_ps(p + 8, x.hi); }
LLM_INLINE F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
LLM_INLINE F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
LLM_INLINE F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
LLM_INLINE F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
LLM_INLINE F32 fma(F32 a, F32 b, F32 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
LLM_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
LLM_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
LLM_INLINE F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
LLM_INLINE F32 abs(F32 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
LLM_INLINE F32 round_even(F32 a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
LLM_INLINE F32 select_less(F32 a, F32 b, F32 x, F32 y) {
    return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
LLM_INLINE uint32_t lane_bits(__m256 lo, __m256 hi) {
    return static_cast<uint32_t>(_mm256_movemask_ps(lo)) | static_cast<uint32_t>(_mm256_movemask_ps(hi)) << 8;
}
LLM_INLINE uint32_t not_at_most(F32 a, F32 b) {
    return lane_bits(_mm256_cmp_ps(a.lo, b.lo, _CMP_NLE_UQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_NLE_UQ));
}
LLM_INLINE uint32_t at_least(F32 a, F32 b) {
    return lane_bits(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
LLM_INLINE F32 nan_to_zero(F32 a) {
    return {_mm256_and_ps(a.lo, _mm256_cmp_ps(a.lo, a.lo, _CMP_ORD_Q)),
            _mm256_and_ps(a.hi, _mm256_cmp_ps(a.hi, a.hi, _CMP_ORD_Q))};
}

LLM_INLINE __m256i load_256(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
LLM_INLINE __m128i load_128(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
LLM_INLINE I32 set1_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
LLM_INLINE I32 load_i(const int32_t* p) { return {load_256(p), load_256(p + 8)}; }
LLM_INLINE void store_i(int32_t* p, I32 x) {
    _mm256_storeu_si256((__m256i*)p, x.lo), _mm256_storeu_si256((__m256i*)(p + 8), x.hi);
}
LLM_INLINE I32 operator+(I32 a, I32 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
LLM_INLINE I32 operator-(I32 a, I32 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
template <int N> LLM_INLINE I32 shift_left(I32 a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
template <int N> LLM_INLINE I32 shift_right(I32 a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }
LLM_INLINE F32 as_float(I32 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
LLM_INLINE I32 as_int(F32 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
LLM_INLINE F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
LLM_INLINE I32 to_int(F32 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

LLM_INLINE __m256 widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
LLM_INLINE F32 load(const BF16* p) { return {widen_bf16(load_128(p)), widen_bf16(load_128(p + 8))}; }
LLM_INLINE F32 load(const F16* p) { return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))}; }
LLM_INLINE I32 max_i(I32 a, I32 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
LLM_INLINE I32 and_i(I32 a, I32 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
LLM_INLINE __m256i low_halves(I32 x) {
    const __m256i mask = _mm256_set1_epi32(0xffff);
    const __m256i halves = _mm256_packus_epi32(_mm256_and_si256(x.lo, mask), _mm256_and_si256(x.hi, mask));
    return _mm256_permute4x64_epi64(halves, 0xD8);
}
LLM_INLINE void store_int16(int16_t* p, I32 x) { _mm256_storeu_si256((__m256i*)p, low_halves(x)); }
LLM_INLINE void store_int8(int8_t* p, I32 x) {
    const __m256i bytes = _mm256_and_si256(low_halves(x), _mm256_set1_epi16(0xff));
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}
LLM_INLINE I32 load_int8(const int8_t* p) {
    const __m128i raw = load_128(p);
    return {_mm256_cvtepi8_epi32(raw), _mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8))};
}

#elif LLM_NEON

#include "simd_neon.h"

#else

// clang-format off
struct F32 { float v[LANES]; };
struct I32 { int32_t v[LANES]; };

template <class V, class Op> LLM_INLINE V lanes(const Op& op) {
    V out;
    for (int i = 0; i < LANES; ++i) out.v[i] = op(i);
    return out;
}
LLM_INLINE F32 set1(float x) { return lanes<F32>([&](int) { return x; }); }
LLM_INLINE F32 zero() { return set1(0.0f); }
LLM_INLINE F32 load(const float* p) { return lanes<F32>([&](int i) { return p[i]; }); }
LLM_INLINE F32 load(const BF16* p) { return lanes<F32>([&](int i) { return widen(p[i]); }); }
LLM_INLINE F32 load(const F16* p) { return lanes<F32>([&](int i) { return widen(p[i]); }); }
LLM_INLINE void store(float* p, F32 x) { std::memcpy(p, x.v, sizeof x.v); }
LLM_INLINE F32 operator+(F32 a, F32 b) { return lanes<F32>([&](int i) { return a.v[i] + b.v[i]; }); }
LLM_INLINE F32 operator-(F32 a, F32 b) { return lanes<F32>([&](int i) { return a.v[i] - b.v[i]; }); }
LLM_INLINE F32 operator*(F32 a, F32 b) { return lanes<F32>([&](int i) { return a.v[i] * b.v[i]; }); }
LLM_INLINE F32 operator/(F32 a, F32 b) { return lanes<F32>([&](int i) { return a.v[i] / b.v[i]; }); }
LLM_INLINE F32 fma(F32 a, F32 b, F32 c) { return lanes<F32>([&](int i) { return std::fmaf(a.v[i], b.v[i], c.v[i]); }); }
LLM_INLINE F32 max(F32 a, F32 b) { return lanes<F32>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
LLM_INLINE F32 min(F32 a, F32 b) { return lanes<F32>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
LLM_INLINE F32 sqrt(F32 a) { return lanes<F32>([&](int i) { return std::sqrt(a.v[i]); }); }
LLM_INLINE F32 abs(F32 a) { return lanes<F32>([&](int i) { return std::fabs(a.v[i]); }); }
LLM_INLINE F32 round_even(F32 a) { return lanes<F32>([&](int i) { return std::nearbyintf(a.v[i]); }); }
LLM_INLINE F32 select_less(F32 a, F32 b, F32 x, F32 y) {
    return lanes<F32>([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
LLM_INLINE uint32_t not_at_most(F32 a, F32 b) {
    uint32_t bits = 0;
    for (int i = 0; i < LANES; ++i) bits |= static_cast<uint32_t>(!(a.v[i] <= b.v[i])) << i;
    return bits;
}
LLM_INLINE uint32_t at_least(F32 a, F32 b) {
    uint32_t bits = 0;
    for (int i = 0; i < LANES; ++i) bits |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
    return bits;
}
LLM_INLINE F32 nan_to_zero(F32 a) { return lanes<F32>([&](int i) { return std::isnan(a.v[i]) ? 0.0f : a.v[i]; }); }

// Wraps around, as vector instructions do; signed overflow is undefined in C++.
LLM_INLINE int32_t wrap_add(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
LLM_INLINE I32 set1_i(int32_t x) { return lanes<I32>([&](int) { return x; }); }
LLM_INLINE I32 load_i(const int32_t* p) { return lanes<I32>([&](int i) { return p[i]; }); }
LLM_INLINE void store_i(int32_t* p, I32 x) { std::memcpy(p, x.v, sizeof x.v); }
LLM_INLINE I32 operator+(I32 a, I32 b) { return lanes<I32>([&](int i) { return wrap_add(a.v[i], b.v[i]); }); }
LLM_INLINE I32 operator-(I32 a, I32 b) {
    return lanes<I32>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i])); });
}
template <int N> LLM_INLINE I32 shift_left(I32 a) {
    return lanes<I32>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N); });
}
template <int N> LLM_INLINE I32 shift_right(I32 a) {
    return lanes<I32>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> N); });
}
LLM_INLINE F32 as_float(I32 a) {
    F32 out;
    std::memcpy(out.v, a.v, sizeof out.v);
    return out;
}
LLM_INLINE I32 as_int(F32 a) {
    I32 out;
    std::memcpy(out.v, a.v, sizeof out.v);
    return out;
}
LLM_INLINE F32 to_float(I32 a) { return lanes<F32>([&](int i) { return static_cast<float>(a.v[i]); }); }
LLM_INLINE I32 to_int(F32 a) {
    return lanes<I32>([&](int i) {
        const float x = std::nearbyintf(a.v[i]);
        return x >= -0x1p31f && x < 0x1p31f ? static_cast<int32_t>(x) : INT32_MIN;
    });
}
LLM_INLINE I32 max_i(I32 a, I32 b) { return lanes<I32>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
LLM_INLINE I32 and_i(I32 a, I32 b) { return lanes<I32>([&](int i) { return a.v[i] & b.v[i]; }); }
LLM_INLINE void store_int16(int16_t* p, I32 x) {
    for (int i = 0; i < LANES; ++i) p[i] = static_cast<int16_t>(x.v[i]);
}
LLM_INLINE void store_int8(int8_t* p, I32 x) {
    for (int i = 0; i < LANES; ++i) p[i] = static_cast<int8_t>(x.v[i]);
}
LLM_INLINE I32 load_int8(const int8_t* p) { return lanes<I32>([&](int i) { return p[i]; }); }

// clang-format on

#endif

// Loads the first `count` lanes; the other lanes are `fill`, and their memory is not read.
template <class T> LLM_INLINE F32 load_part(const T* p, int64_t count, float fill = 0.0f) {
    if (count >= LANES) return load(p);
    alignas(64) float lane[LANES];
    for (int i = 0; i < LANES; ++i) lane[i] = i < count ? widen(p[i]) : fill;
    return load(lane);
}
#if LLM_AVX512
LLM_INLINE __mmask16 first_lanes(int64_t count) {
    return static_cast<__mmask16>(count >= LANES ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}
LLM_INLINE F32 load_part(const float* p, int64_t count, float fill = 0.0f) {
    return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first_lanes(count), p)};
}
// With a branch: a mask would cost a GEMM of one row 4%.
LLM_INLINE __m256i load_halves(const void* p, int64_t count) {
    return count >= LANES ? _mm256_loadu_si256((const __m256i*)p) : _mm256_maskz_loadu_epi16(first_lanes(count), p);
}
LLM_INLINE F32 load_part(const BF16* p, int64_t count) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(p, count)), 16))};
}
LLM_INLINE F32 load_part(const F16* p, int64_t count) { return {_mm512_cvtph_ps(load_halves(p, count))}; }
LLM_INLINE void store_part(float* p, F32 x, int64_t count) { _mm512_mask_storeu_ps(p, first_lanes(count), x.v); }
#else
LLM_INLINE void store_part(float* p, F32 x, int64_t count) {
    if (count >= LANES) return store(p, x);
    alignas(64) float lane[LANES];
    store(lane, x);
    for (int i = 0; i < count; ++i) p[i] = lane[i];
}
#endif
// Adds lane i + 8 to lane i, then i + 4, i + 2, i + 1: one tree for every instruction set.
#if LLM_PLAIN
LLM_INLINE float larger(float a, float b) { return a > b ? a : b; }
template <class Op> LLM_INLINE float reduce(F32 x, const Op& op) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) x.v[i] = op(x.v[i], x.v[i + width]);
    return x.v[0];
}
#elif LLM_NEON
LLM_INLINE float larger(float a, float b) { return a > b ? a : b; }
template <class Op> LLM_INLINE float reduce(F32 x, const Op& op) {
    const float32x4_t four = op(op(x.v[0], x.v[2]), op(x.v[1], x.v[3]));
    const float32x4_t two = op(four, vextq_f32(four, four, 2));
    return op(vgetq_lane_f32(two, 0), vgetq_lane_f32(two, 1));
}
#else
LLM_INLINE __m256 larger(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
LLM_INLINE __m128 larger(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
#if LLM_AVX512
LLM_INLINE __m256 low_lanes(F32 x) { return _mm512_castps512_ps256(x.v); }
LLM_INLINE __m256 high_lanes(F32 x) { return _mm512_extractf32x8_ps(x.v, 1); }
#else
LLM_INLINE __m256 low_lanes(F32 x) { return x.lo; }
LLM_INLINE __m256 high_lanes(F32 x) { return x.hi; }
#endif
template <class Op> LLM_INLINE float reduce(F32 x, const Op& op) {
    const __m256 eight = op(low_lanes(x), high_lanes(x));
    const __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = op(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(op(two, _mm_movehdup_ps(two)));
}
#endif
#if LLM_PLAIN || LLM_NEON
LLM_INLINE int32_t sum(I32 x) {
#if LLM_PLAIN
    int32_t total = 0;
    for (int i = 0; i < LANES; ++i) total = wrap_add(total, x.v[i]);
    return total;
#else
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
#endif
}
LLM_INLINE int32_t largest(I32 x) {
    alignas(64) int32_t lane[LANES];
    store_i(lane, x);
    int32_t most = lane[0];
    for (int i = 1; i < LANES; ++i) most = lane[i] > most ? lane[i] : most;
    return most;
}
#else
LLM_INLINE __m256i added(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
LLM_INLINE __m128i added(__m128i a, __m128i b) { return _mm_add_epi32(a, b); }
LLM_INLINE __m256i larger(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
LLM_INLINE __m128i larger(__m128i a, __m128i b) { return _mm_max_epi32(a, b); }
template <class Op> LLM_INLINE int32_t reduce(I32 x, const Op& op) {
#if LLM_AVX512
    const __m256i eight = op(_mm512_castsi512_si256(x.v), _mm512_extracti32x8_epi32(x.v, 1));
#else
    const __m256i eight = op(x.lo, x.hi);
#endif
    const __m128i four = op(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = op(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(op(two, _mm_shuffle_epi32(two, 0xb1)));
}
LLM_INLINE int32_t sum(I32 x) {
    return reduce(x, [](auto a, auto b) { return added(a, b); });
}
LLM_INLINE int32_t largest(I32 x) {
    return reduce(x, [](auto a, auto b) { return larger(a, b); });
}
#endif
LLM_INLINE float sum(F32 x) {
    return reduce(x, [](auto a, auto b) { return a + b; });
}
LLM_INLINE float largest(F32 x) {
    return reduce(x, [](auto a, auto b) { return larger(a, b); });
}

}  // namespace
}  // namespace llm
