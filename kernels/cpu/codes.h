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

// WHOLES: a table of whole numbers of 8 bits, which AVX2 looks up in one byte, not in four.
enum class Code { INT8, INT4, TABLE, WHOLES, FLOAT8 };

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

// `Opened<CODE>::value<J>()` is value J of a step, as a float, times FACTOR: a power of two, the same for all
// instruction sets. A byte at the top of 32 bits is its integer times 2^24; an 8-bit float's bits are those of a
// float16 that is 256 times smaller.
template <Code CODE> constexpr float FACTOR = CODE == Code::FLOAT8 ? 0x1p-8f : 0x1p24f;

// What all steps of a weight share.
template <Code CODE> struct Lookup {
    explicit Lookup(const Weight&) {}
};

// Value `code` of the 16 that a nibble selects.
template <Code CODE> LLM_INLINE float nibble_value(const Weight& weight, int code) {
    if constexpr (CODE == Code::INT4) return static_cast<float>(code - 8);
    return weight.table[code];
}

#if LLM_AVX512

LLM_INLINE __m256i float16_bits(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
}

#if LLM_BF16
// The upper halves of two floats: of `upper` in its place, of `lower` below.
LLM_INLINE F32 joined(F32 upper, F32 lower) {
    constexpr int Z = 0x03020302;
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi32(Z, Z + 0x04040404, Z + 0x08080808, Z + 0x0c0c0c0c));
    return as_float({_mm512_mask_shuffle_epi8(as_int(upper).v, 0x3333333333333333, as_int(lower).v, order)});
}
#endif

template <Code CODE> struct NibbleLookup {
    __m512 table;
#if LLM_BF16
    __m512i halves;  // the upper halves of the 16, twice
#endif
    LLM_INLINE explicit NibbleLookup(const Weight& weight) {
        float values[LANES];
        for (int i = 0; i < LANES; ++i) values[i] = nibble_value<CODE>(weight, i) * FACTOR<CODE>;
        table = _mm512_loadu_ps(values);
#if LLM_BF16
        halves = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(table), 16)));
#endif
    }
};
template <> struct Lookup<Code::INT4> : NibbleLookup<Code::INT4> { using NibbleLookup::NibbleLookup; };
template <> struct Lookup<Code::TABLE> : NibbleLookup<Code::TABLE> { using NibbleLookup::NibbleLookup; };

template <Code CODE> struct Opened {
    __m512i raw;
    const Lookup<CODE>& lookup;
    LLM_INLINE Opened(const uint8_t* p, const Lookup<CODE>& shared) : raw(_mm512_loadu_si512(p)), lookup(shared) {}
    template <int J> LLM_INLINE F32 value() const {
        // The permutation reads only the lowest four bits of each index.
        if constexpr (is_nibble(CODE))
            return {_mm512_permutexvar_ps(_mm512_srli_epi32(raw, nibble_bit(J)), lookup.table)};
        else return {_mm512_cvtepi32_ps(byte<J>())};
    }
#if LLM_BF16
    // Values 2 J and 2 J + 1 as a pair of bfloat16, which have all their bits; the first in the upper half.
    template <int J> LLM_INLINE F32 pair() const {
        if constexpr (is_nibble(CODE)) {
            // The permutation reads only the lowest five bits of each index.
            constexpr int B = 2 * J % 4, Z = static_cast<int>(0x80008000u) | B << 16 | (B + 1);
            const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi32(Z, Z + 0x40004, Z + 0x80008, Z + 0xc000c));
            const __m512i codes = _mm512_shuffle_epi8(raw, order);
            return as_float({_mm512_permutexvar_epi16(J < 2 ? codes : _mm512_srli_epi16(codes, 4), lookup.halves)});
        } else {
            return joined(value<2 * J>(), value<2 * J + 1>());
        }
    }
#endif
    // Byte J of each 32 bits at their top, with zeros below. A mask leaves one of the two ports of shifts and shuffles
    // to the others.
    template <int J> LLM_INLINE __m512i byte() const {
        if constexpr (J == 0) return _mm512_slli_epi32(raw, 24);
        if constexpr (J == 3) return _mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xff000000u)));
        constexpr int Z = 0x00808080;
        return _mm512_shuffle_epi8(raw, _mm512_broadcast_i32x4(_mm_setr_epi32(Z | J << 24, Z | (4 + J) << 24,
                                                                              Z | (8 + J) << 24, Z | (12 + J) << 24)));
    }
};

template <> struct Opened<Code::FLOAT8> {
    const uint8_t* p;
    LLM_INLINE Opened(const uint8_t* at, const Lookup<Code::FLOAT8>&) : p(at) {}
    template <int J> LLM_INLINE F32 value() const { return {_mm512_cvtph_ps(float16_bits(p + J * LANES))}; }
#if LLM_BF16
    template <int J> LLM_INLINE F32 pair() const { return joined(value<2 * J>(), value<2 * J + 1>()); }
#endif
};

#elif LLM_AVX2

// Whether a weight's table is of WHOLES.
inline bool looks_up_bytes(const Weight& weight) {
    for (int i = 0; i < 16; ++i) {
        const float value = weight.table[i];
        if (!(value >= -128 && value <= 127 && value == std::nearbyintf(value))) return false;
    }
    return true;
}

template <Code CODE> struct ByteLookup {
    __m256i table;  // 16 bytes, twice
    LLM_INLINE explicit ByteLookup(const Weight& weight) {
        alignas(16) int8_t bytes[16];
        for (int i = 0; i < 16; ++i) bytes[i] = static_cast<int8_t>(nibble_value<CODE>(weight, i));
        table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    }
    LLM_INLINE __m256i bytes(__m256i codes) const { return _mm256_shuffle_epi8(table, codes); }
};
template <> struct Lookup<Code::INT4> : ByteLookup<Code::INT4> { using ByteLookup::ByteLookup; };
template <> struct Lookup<Code::WHOLES> : ByteLookup<Code::WHOLES> { using ByteLookup::ByteLookup; };
template <> struct Lookup<Code::TABLE> {
    __m256i byte[4];  // byte i of each value, twice
    LLM_INLINE explicit Lookup(const Weight& weight) {
        alignas(16) uint8_t bytes[4][16];
        for (int code = 0; code < 16; ++code) {
            const float value = weight.table[code] * FACTOR<Code::TABLE>;
            uint32_t whole;
            std::memcpy(&whole, &value, sizeof(whole));
            for (int i = 0; i < 4; ++i) bytes[i][code] = static_cast<uint8_t>(whole >> 8 * i);
        }
        for (int i = 0; i < 4; ++i)
            byte[i] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[i])));
    }
};

template <Code CODE> struct Opened {
    static constexpr bool NIBBLES = is_nibble(CODE);
    __m256i lo[NIBBLES ? 2 : 1], hi[NIBBLES ? 2 : 1];  // bytes: of k ... k + 3, of k + 4 ... k + 7
    LLM_INLINE Opened(const uint8_t* p, const Lookup<CODE>& lookup) {
        lo[0] = load_256(p), hi[0] = load_256(p + 32);
        if constexpr (NIBBLES) {
            const __m256i mask = _mm256_set1_epi8(15);
            lo[1] = _mm256_and_si256(_mm256_srli_epi32(lo[0], 4), mask),
            hi[1] = _mm256_and_si256(_mm256_srli_epi32(hi[0], 4), mask);
            lo[0] = _mm256_and_si256(lo[0], mask), hi[0] = _mm256_and_si256(hi[0], mask);
        }
        if constexpr (NIBBLES)
            for (int i = 0; i < 2; ++i) lo[i] = lookup.bytes(lo[i]), hi[i] = lookup.bytes(hi[i]);
    }
    template <int J> LLM_INLINE F32 value() const {
        return to_float(I32{byte<J % 4>(lo[J / 4]), byte<J % 4>(hi[J / 4])});
    }
    // Byte B of each 32 bits at their top, with zeros below. A mask and a shift where they do leave the shuffles' two
    // ports to the others.
    template <int B> static LLM_INLINE __m256i byte(__m256i from) {
        if constexpr (B == 0) return _mm256_slli_epi32(from, 24);
        if constexpr (B == 3) return _mm256_and_si256(from, _mm256_set1_epi32(static_cast<int>(0xff000000u)));
        constexpr int Z = 0x00808080;
        return _mm256_shuffle_epi8(from,
                                   _mm256_broadcastsi128_si256(_mm_setr_epi32(Z | B << 24, Z | (4 + B) << 24,
                                                                              Z | (8 + B) << 24, Z | (12 + B) << 24)));
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

// An 8-bit float's bits are also those of a float32 that is 2^120 times smaller.
template <> struct Opened<Code::FLOAT8> {
    const uint8_t* p;
    LLM_INLINE Opened(const uint8_t* at, const Lookup<Code::FLOAT8>&) : p(at) {}
    template <int J> LLM_INLINE F32 value() const { return {half(p + J * LANES), half(p + J * LANES + 8)}; }
    static LLM_INLINE __m256 half(const uint8_t* at) {
        const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        const __m256i mask = _mm256_set1_epi32(static_cast<int>(0x87f00000u));
        const __m256 small = _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(wide, 20), mask));
        return _mm256_mul_ps(small, _mm256_set1_ps(FACTOR<Code::FLOAT8> * 0x1p120f));
    }
};

#elif LLM_NEON

template <> struct Lookup<Code::TABLE> {
    uint8x16x4_t table;
    LLM_INLINE explicit Lookup(const Weight& weight) {
        float values[LANES];
        for (int i = 0; i < LANES; ++i) values[i] = weight.table[i] * FACTOR<Code::TABLE>;
        table = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(values));
    }
};

template <Code CODE> struct Opened {
    I32 raw;
    const Lookup<CODE>& lookup;
    LLM_INLINE Opened(const uint8_t* p, const Lookup<CODE>& shared)
        : raw(load_i(reinterpret_cast<const int32_t*>(p))), lookup(shared) {}
    template <int J> LLM_INLINE F32 value() const {
        return quarters<F32>([&](int i) {
            if constexpr (CODE == Code::INT8) {
                const int32x4_t top = vshlq_n_s32(raw.v[i], 24 - 8 * J);
                return vcvtq_f32_s32(vandq_s32(top, vdupq_n_s32(static_cast<int32_t>(0xff000000u))));
            } else {
                const int32x4_t top = vshlq_n_s32(raw.v[i], 28 - nibble_bit(J));
                // At the top a nibble is 2^28 times its integer, and flipping the top bit subtracts 8.
                const int32x4_t alone = vandq_s32(top, vdupq_n_s32(static_cast<int32_t>(0xf0000000u)));
                if constexpr (CODE == Code::INT4) return vcvtq_n_f32_s32(veorq_s32(alone, vdupq_n_s32(INT32_MIN)), 4);
                // The four bytes of an entry of the table.
                const uint32x4_t nibble = vshrq_n_u32(vreinterpretq_u32_s32(top), 28);
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

template <> struct Lookup<Code::TABLE> {
    const float* table;
    explicit Lookup(const Weight& weight) : table(weight.table) {}
};

template <Code CODE> struct Opened {
    const uint8_t* p;
    const Lookup<CODE>& lookup;
    Opened(const uint8_t* at, const Lookup<CODE>& shared) : p(at), lookup(shared) {}
    template <int J> F32 value() const {
        return lanes<F32>([&](int c) { return of(c, J) * FACTOR<CODE>; });
    }
    float of(int c, int j) const {
        if constexpr (CODE == Code::FLOAT8) return widen(F8{p[j * LANES + c]});
        const uint8_t byte = p[4 * c + j % 4];
        const int nibble = j < 4 ? byte & 15 : byte >> 4;
        if constexpr (CODE == Code::INT8) return static_cast<int8_t>(byte);
        if constexpr (CODE == Code::TABLE) return lookup.table[nibble];
        return static_cast<float>(nibble - 8);
    }
};

#endif

}  // namespace
}  // namespace llm
