// The AVX-512, AVX-VNNI and AMX instructions of the kernels, on a processor with AVX2 and FMA: emulated.py compiles the
// kernels with this header in front.
//
// Every function computes what Intel's manual gives as the instruction's operation. Vectors are GCC's generic vectors,
// which the compiler cuts into AVX2 registers.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// From here on the kernels believe that they have these. Before, immintrin.h would have believed it too.
#if defined(EMULATE_AVX512)
#define __AVX512F__ 1
#endif
#if defined(EMULATE_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATE_BF16)
#define __AVX512BF16__ 1
#endif
#if defined(EMULATE_AVX_VNNI)
#define __AVXVNNI__ 1
#endif
#if defined(EMULATE_AMX)
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#endif

namespace emulated {
namespace {

#define EMULATED inline __attribute__((always_inline, unused))

template <class To, class From> EMULATED To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "one size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
template <class V> EMULATED V load(const void* p) {
    V out;
    std::memcpy(&out, p, sizeof out);
    return out;
}

// Both halves of a vector through an AVX2 instruction.
struct Floats { __m256 lo, hi; };
struct Integers { __m256i lo, hi; };
EMULATED Floats halves(__m512 x) { return bits<Floats>(x); }
EMULATED Integers halves(__m512i x) { return bits<Integers>(x); }
EMULATED __m512 whole(__m256 lo, __m256 hi) { return bits<__m512>(Floats{lo, hi}); }
EMULATED __m512i whole(__m256i lo, __m256i hi) { return bits<__m512i>(Integers{lo, hi}); }

// --- Moves.

EMULATED __m512 set1_ps(float x) { return __m512{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
EMULATED __m512 setzero_ps() { return __m512{}; }
EMULATED __m512i setzero_si512() { return __m512i{}; }
EMULATED __m512i set1_epi64(int64_t x) { return x - __m512i{}; }
EMULATED __m512i set1_epi32(int x) { return (__m512i)(x - __v16si{}); }
EMULATED __m512i set1_epi16(short x) { return (__m512i)(x - __v32hi{}); }
EMULATED __m512i set1_epi8(char x) {
    char all[64];
    std::memset(all, x, sizeof all);
    return load<__m512i>(all);
}
template <class... T> EMULATED __m512 setr_ps(T... x) { return __m512{static_cast<float>(x)...}; }
template <class... T> EMULATED __m512i setr_epi32(T... x) { return (__m512i)__v16si{x...}; }
template <class... T> EMULATED __m512i set_epi16(T... x) {  // the last argument is lane 0
    const short last_first[] = {static_cast<short>(x)...};
    short lanes[32];
    for (int i = 0; i < 32; ++i) lanes[i] = last_first[31 - i];
    return load<__m512i>(lanes);
}
EMULATED __m512 loadu_ps(const void* p) { return load<__m512>(p); }
EMULATED __m512i loadu_si512(const void* p) { return load<__m512i>(p); }
EMULATED void storeu_ps(void* p, __m512 x) { std::memcpy(p, &x, sizeof x); }
EMULATED void storeu_si512(void* p, __m512i x) { std::memcpy(p, &x, sizeof x); }
EMULATED __m512 castsi512_ps(__m512i x) { return (__m512)x; }
EMULATED __m512i castps_si512(__m512 x) { return (__m512i)x; }
EMULATED __m256 castps512_ps256(__m512 x) { return halves(x).lo; }
EMULATED __m256i castsi512_si256(__m512i x) { return halves(x).lo; }
EMULATED __m256 extractf32x8_ps(__m512 x, int half) { return half ? halves(x).hi : halves(x).lo; }
EMULATED __m256i extracti32x8_epi32(__m512i x, int half) { return half ? halves(x).hi : halves(x).lo; }
EMULATED __m512 permutexvar_ps(__m512i index, __m512 x) { return __builtin_shuffle(x, (__v16si)index); }
template <int ORDER> EMULATED __m512 permute_ps(__m512 x) {
    __m512 out = x;
    for (int i = 0; i < 16; ++i) out[i] = x[i / 4 * 4 + (ORDER >> i % 4 * 2 & 3)];
    return out;
}
template <int ORDER> EMULATED __m512 shuffle_f32x4(__m512 a, __m512 b) {
    __m512 out = a;
    for (int i = 0; i < 16; ++i) out[i] = (i < 8 ? a : b)[(ORDER >> i / 4 * 2 & 3) * 4 + i % 4];
    return out;
}
EMULATED __m512i permutexvar_epi32(__m512i index, __m512i x) {
    return (__m512i)__builtin_shuffle((__v16si)x, (__v16si)index);
}
EMULATED __m512i permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
    return (__m512i)__builtin_shuffle((__v32hi)a, (__v32hi)b, (__v32hi)index);
}
EMULATED __m512i permutexvar_epi16(__m512i index, __m512i x) {
    return (__m512i)__builtin_shuffle((__v32hi)x, (__v32hi)index);
}
EMULATED __m512i broadcast_i32x4(__m128i x) {
    return whole(_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x));
}
EMULATED __m512i broadcast_i64x4(__m256i x) { return whole(x, x); }
EMULATED __m512i shuffle_epi8(__m512i x, __m512i index) {
    return whole(_mm256_shuffle_epi8(halves(x).lo, halves(index).lo),
                 _mm256_shuffle_epi8(halves(x).hi, halves(index).hi));
}

// --- Masks. Memory of lanes that are masked out is not touched.

EMULATED bool lane_of(__mmask16 mask, int lane) { return mask >> lane & 1; }
EMULATED __m512i mask_shuffle_epi8(__m512i src, uint64_t mask, __m512i x, __m512i index) {
    const __m512i shuffled = shuffle_epi8(x, index);
    char from[64], out[64];
    std::memcpy(from, &shuffled, sizeof from), std::memcpy(out, &src, sizeof out);
    for (int i = 0; i < 64; ++i)
        if (mask >> i & 1) out[i] = from[i];
    return load<__m512i>(out);
}
EMULATED __m512 mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
    for (int i = 0; i < 16; ++i)
        if (lane_of(mask, i)) a[i] = b[i];
    return a;
}
EMULATED __m512 maskz_mov_ps(__mmask16 mask, __m512 x) { return mask_blend_ps(mask, __m512{}, x); }
EMULATED __m512 maskz_sub_ps(__mmask16 mask, __m512 a, __m512 b) { return maskz_mov_ps(mask, a - b); }
EMULATED __m512i mask_or_epi32(__m512i src, __mmask16 mask, __m512i a, __m512i b) {
    return (__m512i)mask_blend_ps(mask, (__m512)src, (__m512)(a | b));
}
EMULATED __m512 mask_loadu_ps(__m512 src, __mmask16 mask, const float* p) {
    for (int i = 0; i < 16; ++i)
        if (lane_of(mask, i)) std::memcpy(reinterpret_cast<char*>(&src) + 4 * i, p + i, 4);
    return src;
}
EMULATED __m256i maskz_loadu_epi16(__mmask16 mask, const void* p) {
    __v16hi out{};
    for (int i = 0; i < 16; ++i)
        if (lane_of(mask, i))
            std::memcpy(reinterpret_cast<char*>(&out) + 2 * i, static_cast<const char*>(p) + 2 * i, 2);
    return (__m256i)out;
}
EMULATED void mask_storeu_ps(float* p, __mmask16 mask, __m512 x) {
    for (int i = 0; i < 16; ++i)
        if (lane_of(mask, i)) std::memcpy(p + i, reinterpret_cast<const char*>(&x) + 4 * i, 4);
}
template <int PREDICATE> EMULATED __mmask16 cmp_ps_mask(__m512 a, __m512 b) {
    const __m256 lo = _mm256_cmp_ps(halves(a).lo, halves(b).lo, PREDICATE);
    const __m256 hi = _mm256_cmp_ps(halves(a).hi, halves(b).hi, PREDICATE);
    return static_cast<__mmask16>(_mm256_movemask_ps(lo) | _mm256_movemask_ps(hi) << 8);
}

// --- Floats.

EMULATED __m512 add_ps(__m512 a, __m512 b) { return a + b; }
EMULATED __m512 sub_ps(__m512 a, __m512 b) { return a - b; }
EMULATED __m512 mul_ps(__m512 a, __m512 b) { return a * b; }
EMULATED __m512 div_ps(__m512 a, __m512 b) { return a / b; }
EMULATED __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return whole(_mm256_fmadd_ps(halves(a).lo, halves(b).lo, halves(c).lo),
                 _mm256_fmadd_ps(halves(a).hi, halves(b).hi, halves(c).hi));
}
EMULATED __m512 max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
EMULATED __m512 min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
EMULATED __m512 sqrt_ps(__m512 x) { return whole(_mm256_sqrt_ps(halves(x).lo), _mm256_sqrt_ps(halves(x).hi)); }
EMULATED __m512 abs_ps(__m512 x) { return (__m512)((__v16si)x & 0x7fffffff); }
template <int MODE> EMULATED __m512 roundscale_ps(__m512 x) {
    static_assert((MODE & 0xf0) == 0, "to integers");
    return whole(_mm256_round_ps(halves(x).lo, MODE), _mm256_round_ps(halves(x).hi, MODE));
}
EMULATED __m512 scalef_ps(__m512 x, __m512 n) {  // x * 2^n for integers n, rounded once
    for (int i = 0; i < 16; ++i) x[i] = std::isnan(n[i]) ? n[i] : std::scalbn(x[i], static_cast<int>(n[i]));
    return x;
}

// --- Integers, which wrap around.

EMULATED __m512i add_epi32(__m512i a, __m512i b) { return (__m512i)((__v16su)a + (__v16su)b); }
EMULATED __m512i sub_epi32(__m512i a, __m512i b) { return (__m512i)((__v16su)a - (__v16su)b); }
EMULATED __m512i sub_epi8(__m512i a, __m512i b) { return (__m512i)((__v64qu)a - (__v64qu)b); }
EMULATED __m512i and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i or_si512(__m512i a, __m512i b) { return a | b; }
EMULATED __m512i mullo_epi16(__m512i a, __m512i b) {
    return whole(_mm256_mullo_epi16(halves(a).lo, halves(b).lo), _mm256_mullo_epi16(halves(a).hi, halves(b).hi));
}
EMULATED __m512i mulhi_epu16(__m512i a, __m512i b) {
    return whole(_mm256_mulhi_epu16(halves(a).lo, halves(b).lo), _mm256_mulhi_epu16(halves(a).hi, halves(b).hi));
}
EMULATED __m512i set4_epi32(int d, int c, int b, int a) {
    const __m256i four = _mm256_setr_epi32(a, b, c, d, a, b, c, d);
    return whole(four, four);
}
EMULATED __m512i xor_si512(__m512i a, __m512i b) { return a ^ b; }
EMULATED __m512i packs_epi32(__m512i a, __m512i b) {
    return whole(_mm256_packs_epi32(halves(a).lo, halves(b).lo), _mm256_packs_epi32(halves(a).hi, halves(b).hi));
}
EMULATED __m512i packs_epi16(__m512i a, __m512i b) {
    return whole(_mm256_packs_epi16(halves(a).lo, halves(b).lo), _mm256_packs_epi16(halves(a).hi, halves(b).hi));
}
EMULATED __m512i slli_epi32(__m512i x, int n) { return (__m512i)((__v16su)x << n); }
EMULATED __m512i srli_epi32(__m512i x, int n) { return (__m512i)((__v16su)x >> n); }
EMULATED __m512i slli_epi16(__m512i x, int n) { return (__m512i)((__v32hu)x << n); }
EMULATED __m512i srai_epi16(__m512i x, int n) { return (__m512i)((__v32hi)x >> n); }
EMULATED __m512i srai_epi32(__m512i x, int n) { return (__m512i)((__v16si)x >> n); }
EMULATED __m512i srli_epi16(__m512i x, int n) { return (__m512i)((__v32hu)x >> n); }
EMULATED __m512i max_epi32(__m512i a, __m512i b) {
    return (__m512i)((__v16si)a > (__v16si)b ? (__v16si)a : (__v16si)b);
}
EMULATED __m512i madd_epi16(__m512i a, __m512i b) {
    return whole(_mm256_madd_epi16(halves(a).lo, halves(b).lo), _mm256_madd_epi16(halves(a).hi, halves(b).hi));
}

// --- Conversions.

EMULATED __m512 cvtepi32_ps(__m512i x) {
    return whole(_mm256_cvtepi32_ps(halves(x).lo), _mm256_cvtepi32_ps(halves(x).hi));
}
EMULATED __m512i cvtps_epi32(__m512 x) {
    return whole(_mm256_cvtps_epi32(halves(x).lo), _mm256_cvtps_epi32(halves(x).hi));
}
EMULATED __m128i upper(__m256i x) { return _mm256_extracti128_si256(x, 1); }
EMULATED __m512i cvtepu16_epi32(__m256i x) {
    return whole(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(upper(x)));
}
EMULATED __m512i cvtepi8_epi16(__m256i x) {
    return whole(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(x)), _mm256_cvtepi8_epi16(upper(x)));
}
EMULATED __m512i cvtepi8_epi32(__m128i x) {
    return whole(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}
EMULATED __m512i cvtepu8_epi32(__m128i x) {
    return whole(_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)));
}
EMULATED __m512 cvtph_ps(__m256i x) {
    return whole(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(upper(x)));
}
EMULATED __m128i cvtepi32_epi8(__m512i x) {
    char out[16];
    for (int i = 0; i < 16; ++i) out[i] = static_cast<char>(((__v16si)x)[i]);
    return load<__m128i>(out);
}
EMULATED __m256i cvtepi32_epi16(__m512i x) {
    short out[16];
    for (int i = 0; i < 16; ++i) out[i] = static_cast<short>(((__v16si)x)[i]);
    return load<__m256i>(out);
}
// float32 to bfloat16 with rounding to nearest even; denormals become zero, whatever the thread's mode.
EMULATED uint16_t to_bf16(float x) {
    const uint32_t from = bits<uint32_t>(x), size = from & 0x7fffffffu;
    if (size < 0x00800000u) return static_cast<uint16_t>(from >> 16 & 0x8000u);
    if (size > 0x7f800000u) return static_cast<uint16_t>(from >> 16 | 0x40u);
    return static_cast<uint16_t>((from + 0x7fffu + (from >> 16 & 1)) >> 16);
}
EMULATED __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
    uint16_t out[32];
    for (int i = 0; i < 16; ++i) out[i] = to_bf16(low[i]), out[i + 16] = to_bf16(high[i]);
    return load<__m512bh>(out);
}

// --- Products.

// c += a * b in float32, fused, rounded to nearest even; denormal operands and results are zero, whatever the thread's
// mode. One assembly statement, so that nothing else runs in that mode.
EMULATED void flushing_fma(__m512& c, __m512 a, __m512 b) {
    Floats sum = halves(c);
    const Floats x = halves(a), y = halves(b);
    const unsigned flush = 0x9fc0, before = _mm_getcsr();
    asm volatile("vldmxcsr %6\n\tvfmadd231ps %2, %4, %0\n\tvfmadd231ps %3, %5, %1\n\tvldmxcsr %7"
                 : "+&x"(sum.lo), "+&x"(sum.hi)
                 : "x"(x.lo), "x"(x.hi), "x"(y.lo), "x"(y.hi), "m"(flush), "m"(before));
    c = whole(sum.lo, sum.hi);
}
EMULATED void flushing_add(__m512& a, __m512 b) { flushing_fma(a, b, set1_ps(1.0f)); }
EMULATED __m512 even_bf16(__m512i x) { return (__m512)slli_epi32(x, 16); }
EMULATED __m512 odd_bf16(__m512i x) { return (__m512)((__v16su)x & 0xffff0000u); }

// VDPBF16PS: the odd elements first.
EMULATED __m512 dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    flushing_fma(sum, odd_bf16((__m512i)a), odd_bf16((__m512i)b));
    flushing_fma(sum, even_bf16((__m512i)a), even_bf16((__m512i)b));
    return sum;
}

// VPDPBUSD, of 32 or 64 bytes.
template <class V> EMULATED V dpbusd(V sum, V unsigned_bytes, V signed_bytes) {
    int32_t total[sizeof(V) / 4];
    uint8_t a[sizeof(V)];
    int8_t b[sizeof(V)];
    std::memcpy(total, &sum, sizeof sum);
    std::memcpy(a, &unsigned_bytes, sizeof a);
    std::memcpy(b, &signed_bytes, sizeof b);
    for (size_t i = 0; i < sizeof(V) / 4; ++i) {
        int four = 0;
        for (size_t j = 4 * i; j < 4 * i + 4; ++j) four += a[j] * b[j];
        total[i] = static_cast<int32_t>(static_cast<uint32_t>(total[i]) + static_cast<uint32_t>(four));
    }
    return load<V>(total);
}
// VPDPWSSD, by a pair that is the same for all lanes.
EMULATED __m512i dpwssd(__m512i sum, __m512i a, int32_t pair) {
    return add_epi32(sum, madd_epi16(a, set1_epi32(pair)));
}
EMULATED __m256i dpwssd(__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
EMULATED __m512i dpwssd(__m512i sum, __m512i a, __m512i b) { return add_epi32(sum, madd_epi16(a, b)); }
EMULATED __m256i maddubs(__m256i w, __m256i a) { return _mm256_maddubs_epi16(w, a); }
EMULATED __m512i maddubs(__m512i w, __m512i a) {
    return whole(_mm256_maddubs_epi16(halves(w).lo, halves(a).lo), _mm256_maddubs_epi16(halves(w).hi, halves(a).hi));
}
EMULATED __m256i add_words(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
EMULATED __m512i add_words(__m512i a, __m512i b) { return (__m512i)((__v32hu)a + (__v32hu)b); }
EMULATED __m256i add_doubles(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
EMULATED __m512i add_doubles(__m512i a, __m512i b) { return add_epi32(a, b); }
template <class V> EMULATED V broadcast_four_bytes(const void* p) {
    char out[sizeof(V)];
    for (size_t i = 0; i < sizeof(V); i += 4) std::memcpy(out + i, p, 4);
    return load<V>(out);
}

// --- AMX. Tiles belong to a thread.

struct Tiles {
    bool configured = false;
    uint8_t lines[8];
    uint16_t bytes[8];
    char data[8][16][64];
};
inline thread_local Tiles tiles;

[[noreturn]] inline void fault() { __builtin_trap(); }
inline void configure(const void* shapes) {
    struct Shapes {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t lines[16];
    };
    const Shapes s = load<Shapes>(shapes);
    if (s.palette != 1) fault();
    for (int tile = 0; tile < 8; ++tile) {
        if (s.bytes[tile] > 64 || s.lines[tile] > 16) fault();
        tiles.bytes[tile] = s.bytes[tile], tiles.lines[tile] = s.lines[tile];
    }
    std::memset(tiles.data, 0, sizeof tiles.data);
    tiles.configured = true;
}
inline void release() { tiles.configured = false; }
inline void check(int tile) {
    if (!tiles.configured || !tiles.lines[tile] || !tiles.bytes[tile]) fault();
}
inline void tile_zero(int tile) {
    check(tile);
    std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}
inline void tile_load(int tile, const void* from, int64_t stride) {
    tile_zero(tile);
    for (int line = 0; line < tiles.lines[tile]; ++line)
        std::memcpy(tiles.data[tile][line], static_cast<const char*>(from) + line * stride, tiles.bytes[tile]);
}
inline void tile_store(int tile, void* to, int64_t stride) {
    check(tile);
    for (int line = 0; line < tiles.lines[tile]; ++line)
        std::memcpy(static_cast<char*>(to) + line * stride, tiles.data[tile][line], tiles.bytes[tile]);
}
// Of sum [m][n], a [m][k], b [k][n].
inline void check_product(int sum, int a, int b) {
    check(sum), check(a), check(b);
    if (tiles.lines[sum] != tiles.lines[a] || tiles.bytes[a] != 4 * tiles.lines[b] ||
        tiles.bytes[sum] != tiles.bytes[b])
        fault();
}
inline void tile_dot_int8(int sum, int a, int b) {
    check_product(sum, a, b);
    for (int m = 0; m < tiles.lines[sum]; ++m)
        for (int n = 0; n < tiles.bytes[sum] / 4; ++n) {
            int32_t total = load<int32_t>(tiles.data[sum][m] + 4 * n);
            for (int k = 0; k < tiles.lines[b]; ++k)
                for (int j = 0; j < 4; ++j)
                    total += static_cast<int8_t>(tiles.data[a][m][4 * k + j]) *
                             static_cast<int8_t>(tiles.data[b][k][4 * n + j]);
            std::memcpy(tiles.data[sum][m] + 4 * n, &total, 4);
        }
}
// A chain over the even k, one over the odd k, their sum, and that added to the tile's.
inline void tile_dot_bf16(int sum, int a, int b) {
    check_product(sum, a, b);
    for (int m = 0; m < tiles.lines[sum]; ++m) {
        __m512 even{}, odd{}, total = load<__m512>(tiles.data[sum][m]);
        for (int k = 0; k < tiles.lines[b]; ++k) {
            const __m512i pair = set1_epi32(load<int32_t>(tiles.data[a][m] + 4 * k));
            const __m512i weights = load<__m512i>(tiles.data[b][k]);
            flushing_fma(even, even_bf16(pair), even_bf16(weights));
            flushing_fma(odd, odd_bf16(pair), odd_bf16(weights));
        }
        flushing_add(even, odd);
        flushing_add(total, even);
        std::memcpy(tiles.data[sum][m], &total, tiles.bytes[sum]);
    }
}

}  // namespace
}  // namespace emulated

#define _mm512_setzero_ps emulated::setzero_ps
#define _mm512_setzero_si512 emulated::setzero_si512
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_set1_epi64 emulated::set1_epi64
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi16 emulated::set1_epi16
#define _mm512_set1_epi8 emulated::set1_epi8
#undef _mm512_setr_epi32
#define _mm512_setr_epi32 emulated::setr_epi32
#undef _mm512_setr_ps
#define _mm512_setr_ps emulated::setr_ps
#define _mm512_set_epi16 emulated::set_epi16
#define _mm512_loadu_ps emulated::loadu_ps
#define _mm512_loadu_si512 emulated::loadu_si512
#define _mm512_storeu_ps emulated::storeu_ps
#define _mm512_storeu_si512 emulated::storeu_si512
#define _mm512_store_si512 emulated::storeu_si512
#define _mm512_castsi512_ps emulated::castsi512_ps
#define _mm512_castps_si512 emulated::castps_si512
#define _mm512_castps512_ps256 emulated::castps512_ps256
#define _mm512_castsi512_si256 emulated::castsi512_si256
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#undef _mm512_extracti32x8_epi32
#define _mm512_extracti32x8_epi32 emulated::extracti32x8_epi32
#define _mm512_permutexvar_epi32 emulated::permutexvar_epi32
#define _mm512_permutexvar_epi16 emulated::permutexvar_epi16
#define _mm512_permutexvar_ps emulated::permutexvar_ps
#undef _mm512_permute_ps
#define _mm512_permute_ps(x, order) emulated::permute_ps<order>(x)
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(a, b, order) emulated::shuffle_f32x4<order>(a, b)
#define _mm512_permutex2var_epi16 emulated::permutex2var_epi16
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#define _mm512_broadcast_i64x4 emulated::broadcast_i64x4
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm512_mask_shuffle_epi8 emulated::mask_shuffle_epi8
#define _mm512_mask_blend_ps emulated::mask_blend_ps
#define _mm512_maskz_mov_ps emulated::maskz_mov_ps
#define _mm512_maskz_sub_ps emulated::maskz_sub_ps
#define _mm512_mask_or_epi32 emulated::mask_or_epi32
#define _mm512_mask_loadu_ps emulated::mask_loadu_ps
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, predicate) emulated::cmp_ps_mask<predicate>(a, b)
#define _mm512_add_ps emulated::add_ps
#define _mm512_sub_ps emulated::sub_ps
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_div_ps emulated::div_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_sqrt_ps emulated::sqrt_ps
#define _mm512_abs_ps emulated::abs_ps
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(x, mode) emulated::roundscale_ps<mode>(x)
#define _mm512_scalef_ps emulated::scalef_ps
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_sub_epi32 emulated::sub_epi32
#define _mm512_sub_epi8 emulated::sub_epi8
#define _mm512_and_si512 emulated::and_si512
#define _mm512_or_si512 emulated::or_si512
#define _mm512_mullo_epi16 emulated::mullo_epi16
#define _mm512_mulhi_epu16 emulated::mulhi_epu16
#undef _mm512_set4_epi32
#define _mm512_set4_epi32 emulated::set4_epi32
#define _mm512_xor_si512 emulated::xor_si512
#define _mm512_packs_epi32 emulated::packs_epi32
#define _mm512_packs_epi16 emulated::packs_epi16
#undef _mm512_slli_epi16
#define _mm512_slli_epi16 emulated::slli_epi16
#undef _mm512_srai_epi16
#define _mm512_srai_epi16 emulated::srai_epi16
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 emulated::srli_epi32
#undef _mm512_srai_epi32
#define _mm512_srai_epi32 emulated::srai_epi32
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_max_epi32 emulated::max_epi32
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi8_epi16 emulated::cvtepi8_epi16
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _mm512_dpbf16_ps emulated::dpbf16_ps
