// Sixteen lanes in four NEON registers: the part of simd.h for aarch64, which includes this inside of its namespace.
//
// Comparisons and conversions follow x86, as simd.h promises, where NEON's own instructions differ.
#pragma once

struct F32 { float32x4_t v[4]; };
struct I32 { int32x4_t v[4]; };

// The four registers of a vector, each made by op(index).
template <class V, class Op> LLM_INLINE V quarters(const Op& op) { return {{op(0), op(1), op(2), op(3)}}; }

LLM_INLINE F32 set1(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {{v, v, v, v}};
}
LLM_INLINE F32 zero() { return set1(0.0f); }
LLM_INLINE F32 load(const float* p) {
    return quarters<F32>([&](int i) { return vld1q_f32(p + 4 * i); });
}
LLM_INLINE void store(float* p, F32 x) { LLM_UNROLL for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]); }
LLM_INLINE F32 operator+(F32 a, F32 b) {
    return quarters<F32>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
LLM_INLINE F32 operator-(F32 a, F32 b) {
    return quarters<F32>([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
LLM_INLINE F32 operator*(F32 a, F32 b) {
    return quarters<F32>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
LLM_INLINE F32 operator/(F32 a, F32 b) {
    return quarters<F32>([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
LLM_INLINE F32 fma(F32 a, F32 b, F32 c) {
    return quarters<F32>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// NEON's own maximum and minimum are NaN if either is.
LLM_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
LLM_INLINE F32 max(F32 a, F32 b) {
    return quarters<F32>([&](int i) { return larger(a.v[i], b.v[i]); });
}
LLM_INLINE F32 min(F32 a, F32 b) {
    return quarters<F32>([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
LLM_INLINE F32 sqrt(F32 a) {
    return quarters<F32>([&](int i) { return vsqrtq_f32(a.v[i]); });
}
LLM_INLINE F32 abs(F32 a) {
    return quarters<F32>([&](int i) { return vabsq_f32(a.v[i]); });
}
LLM_INLINE F32 round_even(F32 a) {
    return quarters<F32>([&](int i) { return vrndnq_f32(a.v[i]); });
}
LLM_INLINE F32 select_less(F32 a, F32 b, F32 x, F32 y) {
    return quarters<F32>([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), x.v[i], y.v[i]); });
}
// Bit i is lane i of four masks.
template <class Op> LLM_INLINE uint32_t lane_bits(const Op& mask) {
    const uint32x4_t bit = {1, 2, 4, 8};
    uint32_t bits = 0;
    LLM_UNROLL for (int i = 0; i < 4; ++i) bits |= vaddvq_u32(vandq_u32(mask(i), bit)) << 4 * i;
    return bits;
}
LLM_INLINE uint32_t not_at_most(F32 a, F32 b) {
    return lane_bits([&](int i) { return vmvnq_u32(vcleq_f32(a.v[i], b.v[i])); });
}
LLM_INLINE uint32_t at_least(F32 a, F32 b) {
    return lane_bits([&](int i) { return vcgeq_f32(a.v[i], b.v[i]); });
}
LLM_INLINE F32 nan_to_zero(F32 a) {
    return quarters<F32>([&](int i) { return vbslq_f32(vceqq_f32(a.v[i], a.v[i]), a.v[i], vdupq_n_f32(0.0f)); });
}

LLM_INLINE I32 set1_i(int32_t x) {
    const int32x4_t v = vdupq_n_s32(x);
    return {{v, v, v, v}};
}
LLM_INLINE I32 load_i(const int32_t* p) {
    return quarters<I32>([&](int i) { return vld1q_s32(p + 4 * i); });
}
LLM_INLINE void store_i(int32_t* p, I32 x) { LLM_UNROLL for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, x.v[i]); }
LLM_INLINE I32 operator+(I32 a, I32 b) {
    return quarters<I32>([&](int i) { return vaddq_s32(a.v[i], b.v[i]); });
}
LLM_INLINE I32 operator-(I32 a, I32 b) {
    return quarters<I32>([&](int i) { return vsubq_s32(a.v[i], b.v[i]); });
}
template <int N> LLM_INLINE I32 shift_left(I32 a) {
    return quarters<I32>([&](int i) { return vshlq_n_s32(a.v[i], N); });
}
template <int N> LLM_INLINE I32 shift_right(I32 a) {
    return quarters<I32>([&](int i) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), N)); });
}
LLM_INLINE F32 as_float(I32 a) {
    return quarters<F32>([&](int i) { return vreinterpretq_f32_s32(a.v[i]); });
}
LLM_INLINE I32 as_int(F32 a) {
    return quarters<I32>([&](int i) { return vreinterpretq_s32_f32(a.v[i]); });
}
LLM_INLINE F32 to_float(I32 a) {
    return quarters<F32>([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}
// NEON's own conversion gives 0 for NaN, and the nearest integer out of range.
LLM_INLINE I32 to_int(F32 a) {
    return quarters<I32>([&](int i) {
        const uint32x4_t inside = vandq_u32(vcgeq_f32(a.v[i], vdupq_n_f32(-0x1p31f)),
                                            vcltq_f32(a.v[i], vdupq_n_f32(0x1p31f)));
        return vbslq_s32(inside, vcvtnq_s32_f32(a.v[i]), vdupq_n_s32(INT32_MIN));
    });
}

LLM_INLINE F32 load(const BF16* p) {
    const uint16_t* at = reinterpret_cast<const uint16_t*>(p);
    return quarters<F32>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(at + 4 * i), 16)); });
}
LLM_INLINE F32 load(const F16* p) {
    const uint16_t* at = reinterpret_cast<const uint16_t*>(p);
    return quarters<F32>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at + 4 * i))); });
}
LLM_INLINE I32 max_i(I32 a, I32 b) {
    return quarters<I32>([&](int i) { return vmaxq_s32(a.v[i], b.v[i]); });
}
LLM_INLINE I32 and_i(I32 a, I32 b) {
    return quarters<I32>([&](int i) { return vandq_s32(a.v[i], b.v[i]); });
}
LLM_INLINE void store_int16(int16_t* p, I32 x) {
    LLM_UNROLL for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vmovn_s32(x.v[i]));
}
LLM_INLINE void store_int8(int8_t* p, I32 x) {
    LLM_UNROLL for (int i = 0; i < 2; ++i)
        vst1_s8(p + 8 * i, vmovn_s16(vcombine_s16(vmovn_s32(x.v[2 * i]), vmovn_s32(x.v[2 * i + 1]))));
}
LLM_INLINE I32 load_int8(const int8_t* p) {
    const int8x16_t raw = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(raw)), high = vmovl_s8(vget_high_s8(raw));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
             vmovl_s16(vget_high_s16(high))}};
}
