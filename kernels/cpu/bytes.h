// Vector registers of bytes, shared by the int8 and int4 GEMM.
#pragma once

#include "simd.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define LLM_VNNI 1
#endif
// An instruction adds the products of four bytes and four bytes to an int32. That of NEON takes both as signed.
#if LLM_VNNI || LLM_NEON
#define LLM_DOTS 1
#endif
// An instruction multiplies 2 rows of 8 bytes by 2 channels of 8 bytes.
#if LLM_NEON && defined(__ARM_FEATURE_MATMUL_INT8)
#define LLM_MMLA 1
#endif

#if !defined(LLM_PLAIN)

namespace llm {
namespace {

#if LLM_AVX512
using Bytes = __m512i;
#elif LLM_NEON
using Bytes = int8x16_t;
#else
using Bytes = __m256i;
#endif
constexpr int PANEL_VECTORS = 64 / sizeof(Bytes);  // vectors of one step of a panel

#if LLM_NEON

LLM_INLINE Bytes broadcast_bytes(const void* four) {
    return vreinterpretq_s8_s32(vld1q_dup_s32(static_cast<const int32_t*>(four)));
}
LLM_INLINE Bytes load_bytes(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }
// sum += signed bytes * signed bytes, four products to an int32. Assembly: gcc 12 copies each sum before its product. A
// variable of its own: gcc leaves sums that assembly writes to in memory.
LLM_INLINE void dot(Bytes& sum, Bytes a, Bytes b) {
    Bytes out = sum;
    asm volatile("sdot %0.4s, %1.16b, %2.16b" : "+w"(out) : "w"(a), "w"(b));
    sum = out;
}
constexpr int panels_for(int rows) { return rows <= 2 ? 2 : 1; }

#else

// Broadcasts four bytes. Assembly, and volatile to stay in order: gcc 12 hoists all broadcasts and spills the sums.
LLM_INLINE Bytes broadcast_bytes(const void* four) {
    using Four = const char (*)[4];
    Bytes out;
    asm volatile("vpbroadcastd %1, %0" : "=v"(out) : "m"(*static_cast<Four>(four)));
    return out;
}
LLM_INLINE Bytes load_bytes(const void* p) {
    Bytes out;
    std::memcpy(&out, p, sizeof out);
    asm("" : "+v"(out));  // or gcc reloads it for every product
    return out;
}

#if LLM_VNNI

// sum += unsigned bytes * signed bytes, four products to an int32.
LLM_INLINE void dot(Bytes& sum, Bytes unsigned_bytes, Bytes signed_bytes) {
    Bytes out = sum;
#if LLM_AVX512
    asm volatile("vpdpbusd %2, %1, %0" : "+v"(out) : "v"(unsigned_bytes), "v"(signed_bytes));
#else
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(out) : "x"(unsigned_bytes), "x"(signed_bytes));
#endif
    sum = out;
}

// sum += signed 16 bits * signed 16 bits, two products to an int32.
LLM_INLINE void dot_words(Bytes& sum, Bytes a, Bytes b) {
    Bytes out = sum;
#if LLM_AVX512
    asm volatile("vpdpwssd %2, %1, %0" : "+v"(out) : "v"(a), "v"(b));
#else
    asm volatile("%{vex%} vpdpwssd %2, %1, %0" : "+x"(out) : "x"(a), "x"(b));
#endif
    sum = out;
}

// Panels that a tile of `rows` rows takes at once: its sums fill the registers. Few rows take several panels, so that
// several streams of memory are under way.
#if LLM_AVX512
constexpr int panels_for(int rows) { return rows <= 4 ? 4 : 2; }
#else
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif

#endif
#endif

}  // namespace
}  // namespace llm

#endif
