// The instruction that multiplies four unsigned by four signed bytes and adds them to an int32, with AVX-512 or with AVX2.
#pragma once

#include "simd.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define LLM_VNNI 1

namespace llm {
namespace {

// A step of a panel, 64 bytes, is PANEL_VECTORS of these.
#if LLM_AVX512
using Dots = __m512i;
#else
using Dots = __m256i;
#endif
constexpr int PANEL_VECTORS = 64 / sizeof(Dots);

// Written out, and volatile to stay in order: gcc 12 loads all broadcasts ahead and spills the sums.
LLM_INLINE Dots broadcast_four(const void* four) {
    using Four = const char (*)[4];
    Dots out;
    asm volatile("vpbroadcastd %1, %0" : "=v"(out) : "m"(*static_cast<Four>(four)));
    return out;
}
LLM_INLINE Dots load_dots(const void* p) {
    Dots out;
    std::memcpy(&out, p, sizeof out);
    asm("" : "+v"(out));  // or gcc loads it again for every product
    return out;
}
// sum += unsigned bytes * signed bytes
LLM_INLINE void dot(Dots& sum, Dots unsigned_bytes, Dots signed_bytes) {
#if LLM_AVX512
    asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
#else
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(unsigned_bytes), "x"(signed_bytes));
#endif
}

}  // namespace
}  // namespace llm

#endif
