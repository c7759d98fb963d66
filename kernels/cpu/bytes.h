// Registers of bytes: what the products with int8 and int4 weights share.
#pragma once

#include "simd.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define LLM_VNNI 1
#endif

#if !defined(LLM_PLAIN)

namespace llm {
namespace {

#if LLM_AVX512
using Bytes = __m512i;
#else
using Bytes = __m256i;
#endif
constexpr int PANEL_VECTORS = 64 / sizeof(Bytes);  // of a step of a panel

// Four bytes, over and over. Written out, and volatile to stay in order: gcc 12 loads all broadcasts ahead and spills
// the sums.
LLM_INLINE Bytes broadcast_bytes(const void* four) {
    using Four = const char (*)[4];
    Bytes out;
    asm volatile("vpbroadcastd %1, %0" : "=v"(out) : "m"(*static_cast<Four>(four)));
    return out;
}
LLM_INLINE Bytes load_bytes(const void* p) {
    Bytes out;
    std::memcpy(&out, p, sizeof out);
    asm("" : "+v"(out));  // or gcc loads it again for every product
    return out;
}

#if LLM_VNNI

// sum += unsigned bytes * signed bytes, four to an int32.
LLM_INLINE void dot(Bytes& sum, Bytes unsigned_bytes, Bytes signed_bytes) {
#if LLM_AVX512
    asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
#else
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(unsigned_bytes), "x"(signed_bytes));
#endif
}

// Panels that a tile of so many rows takes at once: as many sums as there are registers, and several streams for few
// rows.
#if LLM_AVX512
constexpr int panels_for(int rows) { return rows <= 4 ? 4 : 2; }
#else
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif

#endif

}  // namespace
}  // namespace llm

#endif
