// The KV cache in 8 bits: its layout, and how a token's key or value is rounded to it.
//
// A panel of one KV head (16 slots, attention.cpp) is one record: the scales of its 16 slots in bfloat16, then their
// codes, channels padded to whole fours. A scale is read with the codes it belongs to, from the next cache line.
//   int8      keys   [head_size / 4][16 slots][4 channels],  values [16 / 4 slots][head_size][4 slots]
//   float8    keys   [head_size][16 slots],                  values [16 slots][head_size]
// An element is code * scale. The scale of a token in a KV head is its largest magnitude over the largest code, rounded
// up to bfloat16; 0 of zeros, NaN where an element is not finite. With static scales of channels it is 1 (or NaN), the
// code is x / scale[channel] + offset[channel], and attention applies both to queries and outputs.
//
// Latent attention has a row per slot: the codes of the latent and of the rotated key, then a scale of each.
#pragma once

#include "codes.h"
#include "quantize.h"
#include "vector_math.h"

namespace llm {
namespace {

constexpr int64_t SCALE_BYTES = LANES * sizeof(BF16);
constexpr int64_t padded_size(int64_t head_size) { return (head_size + 3) / 4 * 4; }
// Of one panel of a KV head.
constexpr int64_t record_bytes(int64_t head_size) { return SCALE_BYTES + padded_size(head_size) * LANES; }

// Of a row of latent attention: behind its codes, of the latent and of the rotated key.
struct LatentScales { BF16 latent, rope; };
constexpr int64_t LATENT_SCALE_BYTES = sizeof(LatentScales);

LLM_INLINE float widen(int8_t x) { return x; }

// Where a slot of a panel keeps the code of a channel, behind the scales.
constexpr int64_t int8_key_at(int64_t lane, int64_t channel) { return (channel / 4 * LANES + lane) * 4 + channel % 4; }
constexpr int64_t int8_value_at(int64_t lane, int64_t channel, int64_t head_size) {
    return (lane / 4 * padded_size(head_size) + channel) * 4 + lane % 4;
}

const Lookup<Code::FLOAT8> NO_LOOKUP{Weight{}};
LLM_INLINE F32 load(const F8* p) {
    const Opened<Code::FLOAT8> opened(reinterpret_cast<const uint8_t*>(p), NO_LOOKUP);
    return opened.value<0>() * set1(1 / FACTOR<Code::FLOAT8>);
}

// To the nearest of e4m3fn, half to even; finite numbers out of range become the largest.
template <> LLM_INLINE F8 narrow<F8>(float x) {
    const uint32_t bits = float_to_bits(x), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    if (size >= 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7eu)};  // 448
    if (size < 0x3c800000u) {  // a denormal: its last place is 2^-9, the last place of floats in [2^14, 2^15)
        const float shifted = bits_to_float(size) + 0x1p14f;
        return {static_cast<uint8_t>(sign | (float_to_bits(shifted) - 0x46800000u))};
    }
    const uint32_t rounded = size + 0x7ffffu + (size >> 20 & 1);
    return {static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)))};
}

template <class T> constexpr float LARGEST_CODE = 127.0f;
template <> constexpr float LARGEST_CODE<F8> = 448.0f;

// The scale of a key or value of one KV head.
template <class T> LLM_INLINE BF16 token_scale(const float* x, int64_t head_size, bool is_static) {
    const float largest = largest_magnitude(x, head_size);
    if (!(largest <= 0x1.fffffep+127f)) return {0x7fc0};
    if (is_static) return {0x3f80};
    return {static_cast<uint16_t>((float_to_bits(largest / LARGEST_CODE<T>) + 0xffffu) >> 16)};
}

// Calls put(channel, code) for each channel. `scales` and `offsets` are of channels and static, or null.
template <class T, class Put>
void quantize_head(const float* x, int64_t head_size, BF16 stored, const float* scales, const float* offsets,
                   const Put& put) {
    const float scale = widen(stored);
    const F32 divisor = set1(scale == 0.0f ? 1.0f : scale);
    for (int64_t i = 0; i < head_size; i += LANES) {
        const int64_t count = min(LANES, head_size - i);
        F32 q = load_part(x + i, count) / (scales ? load_part(scales + i, count, 1.0f) : divisor);
        if (std::isnan(scale)) q = zero();
        if constexpr (std::is_same_v<T, F8>) {
            alignas(64) float rounded[LANES];
            store(rounded, q);
            for (int64_t j = 0; j < count; ++j) put(i + j, narrow<F8>(rounded[j]));
        } else {
            q = round_even(q);
            if (offsets) q = q + load_part(offsets + i, count);
            q = max(set1(offsets ? -128.0f : -127.0f), min(set1(127.0f), q));
            alignas(16) int8_t codes[LANES];
            store_int8(codes, to_int(q));
            for (int64_t j = 0; j < count; ++j) put(i + j, codes[j]);
        }
    }
}

}  // namespace
}  // namespace llm
