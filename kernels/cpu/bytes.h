// Vector registers of bytes, shared by the int8 and int4 GEMM.
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
constexpr int PANEL_VECTORS = 64 / sizeof(Bytes);  // vectors of one step of a panel

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
#if LLM_AVX512
    asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
#else
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(unsigned_bytes), "x"(signed_bytes));
#endif
}

// Panels that a tile of `rows` rows takes at once: its sums fill the registers. Few rows take several panels, so that
// several streams of memory are under way.
#if LLM_AVX512
constexpr int panels_for(int rows) { return rows <= 4 ? 4 : 2; }
#else
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif

#endif

}  // namespace
}  // namespace llm

#endif
