// What a weight's codes stand for, as floats in registers: integers of 8 and 4 bits, codes of 4 bits that select one of
// 16 values, and 8-bit floats. Scales are applied by gemm_weight_only.cpp.
//
// A step of a panel is 64 bytes: 4 k of 16 output channels, or 8 k of 4 bits. Panels of integers are those of
// gemm_int8.cpp and gemm_int4.cpp. Those of 8-bit floats are [k][16].
#pragma once

#include <utility>

#include "weight.h"

namespace llm {
namespace {

// WHOLES: a table of whole numbers of 8 bits, which AVX2 looks up in one byte, not in four. FLOAT8_SMALL: 8-bit floats
// with scales below SMALL_SCALES, which AVX2 widens without float16.
enum class Code { INT8, INT4, TABLE, WHOLES, FLOAT8, FLOAT8_SMALL };

constexpr int64_t STEP_BYTES = LANES * 4;
constexpr bool is_nibble(Code code) { return code == Code::INT4 || code == Code::TABLE || code == Code::WHOLES; }
constexpr int step_of(Code code) { return is_nibble(code) ? 8 : 4; }
// Where value j of a step is within its 32 bits of an output channel. A nibble is stored plus 8; k and k + 4 share a
// byte.
constexpr int nibble_bit(int j) { return j < 4 ? 8 * j : 8 * (j - 4) + 4; }

// Calls call(std::integral_constant j) for j = 0 ... N - 1.
template <class Call, int... J> LLM_INLINE void for_each(const Call& call, std::integer_sequence<int, J...>) {
    (call(std::integral_constant<int, J>{}), ...);
}

// `Opened<CODE>::value<J>()` is value J of a step, as a float, plus VALUE_BIAS and divided by VALUE_DIVISOR: both are
// powers of two, so that what undoes them is exact. `Lookup<CODE>` is what all steps of a weight share.
template <Code CODE> constexpr float VALUE_DIVISOR = 1;
template <Code CODE> struct Lookup {
    explicit Lookup(const Weight&) {}
};

#if !defined(LLM_PLAIN)

// An 8-bit float's bits in a float16: its exponent is counted from 8 less, and subnormal numbers are what they were.
template <> constexpr float VALUE_DIVISOR<Code::FLOAT8> = 256;
#if !LLM_NEON
LLM_INLINE __m256i float16_bits(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
}
#endif

#endif

#if LLM_AVX512

template <Code CODE> constexpr int VALUE_BIAS = CODE == Code::INT8 ? 128 : CODE == Code::INT4 ? 8 : 0;

template <> struct Lookup<Code::TABLE> {
    __m512 table;
    LLM_INLINE explicit Lookup(const Weight& weight) : table(_mm512_loadu_ps(weight.table)) {}
};
template <> struct Lookup<Code::INT4> {
    __m512 table;
    LLM_INLINE explicit Lookup(const Weight&)
        : table(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)) {}
};

template <Code CODE> struct Opened {
    __m512i raw;
    const Lookup<CODE>& lookup;
    LLM_INLINE Opened(const uint8_t* p, const Lookup<CODE>& shared) : raw(_mm512_loadu_si512(p)), lookup(shared) {}
    // The permutation reads only the lowest four bits of each index.
    template <int J> LLM_INLINE F32 value() const {
        return {_mm512_permutexvar_ps(_mm512_srli_epi32(raw, nibble_bit(J)), lookup.table)};
    }
};

template <> struct Opened<Code::INT8> {
    __m512i raw;  // unsigned bytes
    LLM_INLINE Opened(const uint8_t* p, const Lookup<Code::INT8>&)
        : raw(_mm512_sub_epi8(_mm512_loadu_si512(p), _mm512_set1_epi8(-128))) {}
    // A mask for the first byte leaves one of the two ports of shifts and shuffles to the others.
    template <int J> LLM_INLINE F32 value() const {
        if constexpr (J == 0) return {_mm512_cvtepi32_ps(_mm512_and_si512(raw, _mm512_set1_epi32(255)))};
        if constexpr (J == 3) return {_mm512_cvtepi32_ps(_mm512_srli_epi32(raw, 24))};
        constexpr int Z = static_cast<int>(0x80808000u);
        const __m512i byte = _mm512_broadcast_i32x4(_mm_setr_epi32(Z | J, Z | (4 + J), Z | (8 + J), Z | (12 + J)));
        return {_mm512_cvtepi32_ps(_mm512_shuffle_epi8(raw, byte))};
    }
};

template <> struct Opened<Code::FLOAT8> {
    const uint8_t* p;
    LLM_INLINE Opened(const uint8_t* at, const Lookup<Code::FLOAT8>&) : p(at) {}
    template <int J> LLM_INLINE F32 value() const { return {_mm512_cvtph_ps(float16_bits(p + J * LANES))}; }
};

#elif LLM_AVX2

template <Code CODE> constexpr int VALUE_BIAS = CODE == Code::INT4 ? 8 : 128;
template <> constexpr int VALUE_BIAS<Code::TABLE> = 0;
template <> constexpr int VALUE_BIAS<Code::FLOAT8> = 0;
template <> constexpr int VALUE_BIAS<Code::FLOAT8_SMALL> = 0;
// An 8-bit float's bits in a float32: its exponent is counted from 120 less. The scale takes the factor up.
template <> constexpr float VALUE_DIVISOR<Code::FLOAT8_SMALL> = 0x1p120f;
constexpr float SMALL_SCALES = 0x1p8f;

// Whether a weight's table is of WHOLES.
inline bool looks_up_bytes(const Weight& weight) {
    for (int i = 0; i < 16; ++i) {
        const float value = weight.table[i];
        if (!(value >= -128 && value <= 127 && value == std::nearbyintf(value))) return false;
    }
    return true;
}

template <> struct Lookup<Code::WHOLES> {
    __m256i table;  // bytes of value + 128, twice
    LLM_INLINE explicit Lookup(const Weight& weight) {
        alignas(16) uint8_t bytes[16];
        for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(static_cast<int>(weight.table[i]) + 128);
        table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    }
};
template <> struct Lookup<Code::TABLE> {
    __m256i byte[4];  // byte i of each value, twice
    LLM_INLINE explicit Lookup(const Weight& weight) {
        alignas(16) uint8_t bytes[4][16];
        for (int value = 0; value < 16; ++value) {
            uint32_t whole;
            std::memcpy(&whole, weight.table + value, sizeof(whole));
            for (int i = 0; i < 4; ++i) bytes[i][value] = static_cast<uint8_t>(whole >> 8 * i);
        }
        for (int i = 0; i < 4; ++i)
            byte[i] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[i])));
    }
};

template <Code CODE> struct Opened {
    static constexpr bool NIBBLES = is_nibble(CODE);
    __m256i lo[NIBBLES ? 2 : 1], hi[NIBBLES ? 2 : 1];  // unsigned bytes: of k ... k + 3, of k + 4 ... k + 7
    LLM_INLINE Opened(const uint8_t* p, const Lookup<CODE>& lookup) {
        lo[0] = load_256(p), hi[0] = load_256(p + 32);
        if constexpr (CODE == Code::INT8) {
            const __m256i flip = _mm256_set1_epi8(-128);
            lo[0] = _mm256_xor_si256(lo[0], flip), hi[0] = _mm256_xor_si256(hi[0], flip);
        } else {
            const __m256i mask = _mm256_set1_epi8(15);
            lo[1] = _mm256_and_si256(_mm256_srli_epi32(lo[0], 4), mask),
            hi[1] = _mm256_and_si256(_mm256_srli_epi32(hi[0], 4), mask);
            lo[0] = _mm256_and_si256(lo[0], mask), hi[0] = _mm256_and_si256(hi[0], mask);
        }
        if constexpr (CODE == Code::WHOLES)
            for (int i = 0; i < 2; ++i) {
                lo[i] = _mm256_shuffle_epi8(lookup.table, lo[i]);
                hi[i] = _mm256_shuffle_epi8(lookup.table, hi[i]);
            }
    }
    template <int J> LLM_INLINE F32 value() const {
        return to_float(I32{byte<J % 4>(lo[J / 4]), byte<J % 4>(hi[J / 4])});
    }
    // Byte B of each 32 bits, alone. A mask and a shift where they do leave the shuffles' two ports to the others.
    template <int B> static LLM_INLINE __m256i byte(__m256i from) {
        if constexpr (B == 0) return _mm256_and_si256(from, _mm256_set1_epi32(255));
        if constexpr (B == 3) return _mm256_srli_epi32(from, 24);
        constexpr int Z = static_cast<int>(0x80808000u);
        return _mm256_shuffle_epi8(from, _mm256_setr_epi32(Z | B, Z | (4 + B), Z | (8 + B), Z | (12 + B), Z | B,
                                                           Z | (4 + B), Z | (8 + B), Z | (12 + B)));
    }
};

template <> struct Opened<Code::TABLE> {
    __m256 lo[8], hi[8];
    LLM_INLINE Opened(const uint8_t* p, const Lookup<Code::TABLE>& lookup) {
        open(load_256(p), lookup, lo), open(load_256(p + 32), lookup, hi);
    }
    template <int J> LLM_INLINE F32 value() const { return {lo[J], hi[J]}; }
    // Each byte of a value is looked up for itself. In every 128 bits, 4 channels of 4 bytes each are transposed first,
    // so that the bytes of one k, joined, are the floats of 4 channels.
    static LLM_INLINE void open(__m256i raw, const Lookup<Code::TABLE>& lookup, __m256* out) {
        const __m256i by_k = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5,
                                              9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m256i mask = _mm256_set1_epi8(15), both = _mm256_shuffle_epi8(raw, by_k);
        LLM_UNROLL for (int high = 0; high < 2; ++high) {
            const __m256i code = _mm256_and_si256(high ? _mm256_srli_epi32(both, 4) : both, mask);
            const __m256i b0 = _mm256_shuffle_epi8(lookup.byte[0], code),
                          b1 = _mm256_shuffle_epi8(lookup.byte[1], code);
            const __m256i b2 = _mm256_shuffle_epi8(lookup.byte[2], code),
                          b3 = _mm256_shuffle_epi8(lookup.byte[3], code);
            const __m256i low01 = _mm256_unpacklo_epi8(b0, b1), low23 = _mm256_unpacklo_epi8(b2, b3);
            const __m256i high01 = _mm256_unpackhi_epi8(b0, b1), high23 = _mm256_unpackhi_epi8(b2, b3);
            out[4 * high] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low01, low23));
            out[4 * high + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low01, low23));
            out[4 * high + 2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(high01, high23));
            out[4 * high + 3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(high01, high23));
        }
    }
};

template <> struct Opened<Code::FLOAT8> {
    const uint8_t* p;
    LLM_INLINE Opened(const uint8_t* at, const Lookup<Code::FLOAT8>&) : p(at) {}
    template <int J> LLM_INLINE F32 value() const {
        const __m256i bits = float16_bits(p + J * LANES);
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
    }
};

template <> struct Opened<Code::FLOAT8_SMALL> {
    const uint8_t* p;
    LLM_INLINE Opened(const uint8_t* at, const Lookup<Code::FLOAT8_SMALL>&) : p(at) {}
    template <int J> LLM_INLINE F32 value() const { return {half(p + J * LANES), half(p + J * LANES + 8)}; }
    static LLM_INLINE __m256 half(const uint8_t* at) {
        const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        const __m256i mask = _mm256_set1_epi32(static_cast<int>(0x87f00000u));
        return _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(wide, 20), mask));
    }
};

#elif LLM_NEON

template <Code CODE> constexpr int VALUE_BIAS = CODE == Code::INT4 ? 8 : 0;

template <> struct Lookup<Code::TABLE> {
    uint8x16x4_t table;
    LLM_INLINE explicit Lookup(const Weight& weight)
        : table(vld1q_u8_x4(reinterpret_cast<const uint8_t*>(weight.table))) {}
};

template <Code CODE> struct Opened {
    I32 raw;
    const Lookup<CODE>& lookup;
    LLM_INLINE Opened(const uint8_t* p, const Lookup<CODE>& shared)
        : raw(load_i(reinterpret_cast<const int32_t*>(p))), lookup(shared) {}
    template <int J> LLM_INLINE F32 value() const {
        return quarters<F32>([&](int i) {
            if constexpr (CODE == Code::INT8) {
                return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(raw.v[i], 24 - 8 * J), 24));
            } else {
                const int32x4_t top = vshlq_n_s32(raw.v[i], 28 - nibble_bit(J));
                const uint32x4_t nibble = vshrq_n_u32(vreinterpretq_u32_s32(top), 28);
                if constexpr (CODE == Code::INT4) return vcvtq_f32_u32(nibble);
                // The four bytes of an entry of the table.
                const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100), nibble, 0x04040404);
                if constexpr (CODE == Code::TABLE)
                    return vreinterpretq_f32_u8(vqtbl4q_u8(lookup.table, vreinterpretq_u8_u32(bytes)));
            }
        });
    }
};

template <> struct Opened<Code::FLOAT8> {
    const uint8_t* p;
    LLM_INLINE Opened(const uint8_t* at, const Lookup<Code::FLOAT8>&) : p(at) {}
    template <int J> LLM_INLINE F32 value() const {
        return quarters<F32>([&](int i) {
            const int16x8_t wide = vmovl_s8(vld1_s8(reinterpret_cast<const int8_t*>(p + J * LANES + i / 2 * 8)));
            const int16x8_t bits = vandq_s16(vshlq_n_s16(wide, 7), vdupq_n_s16(static_cast<int16_t>(0xbf80)));
            return vcvt_f32_f16(vreinterpret_f16_s16(i % 2 ? vget_high_s16(bits) : vget_low_s16(bits)));
        });
    }
};

#else

template <Code CODE> constexpr int VALUE_BIAS = 0;

template <> struct Lookup<Code::TABLE> {
    const float* table;
    explicit Lookup(const Weight& weight) : table(weight.table) {}
};

template <Code CODE> struct Opened {
    const uint8_t* p;
    const Lookup<CODE>& lookup;
    Opened(const uint8_t* at, const Lookup<CODE>& shared) : p(at), lookup(shared) {}
    template <int J> F32 value() const {
        return lanes<F32>([&](int c) {
            if constexpr (CODE == Code::FLOAT8) return widen(F8{p[J * LANES + c]});
            const uint8_t byte = p[4 * c + J % 4];
            if constexpr (CODE == Code::INT8) return static_cast<float>(static_cast<int8_t>(byte));
            const int nibble = J < 4 ? byte & 15 : byte >> 4;
            if constexpr (CODE == Code::TABLE) return lookup.table[nibble];
            return static_cast<float>(nibble - 8);
        });
    }
};

#endif

}  // namespace
}  // namespace llm
