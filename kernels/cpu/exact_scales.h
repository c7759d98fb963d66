// Few batch rows and integers of 4 bits, or 4-bit codes of whole numbers, whose scales have at most 15 bits: AVX2.
//
// Such a weight is an integer of 30 bits times a power of two, so one integer product gives it exactly, and the power
// of two is left to the sums: they are kept divided by it, and multiplied by the quotient of two powers where a group
// begins. Rounding does not see a power of two, unless a number is too large or subnormal: `Range` keeps both away. The
// bits are those of gemm_weight_only.cpp, with three instructions for 8 weights instead of four.
#pragma once

#include "codes.h"

#if LLM_AVX2

namespace llm {
namespace {

// Every product of an input of [2^-80, 2^20] and a scale of [2^-30, 2^16] with 15 bits is a multiple of 2^-149, and a
// sum over fewer than 2^24 of them, divided by the least power of two, below 2^127.
constexpr float LEAST_INPUT = 0x1p-80f, MOST_INPUT = 0x1p20f, LEAST_SCALE = 0x1p-30f, MOST_SCALE = 0x1p16f;

LLM_INLINE uint32_t bits_of_float(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Finds magnitudes other than 0 outside [least, most], and NaN; of numbers that must be short, those of over 15 bits.
class Range {
    uint32_t least_, most_;
    __m256i smallest_ = _mm256_set1_epi32(-1), largest_ = _mm256_setzero_si256(), used_ = _mm256_setzero_si256();

  public:
    Range(float least, float most) : least_(bits_of_float(least)), most_(bits_of_float(most)) {}
    LLM_INLINE void add(__m256 x) {
        const __m256i size = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
        largest_ = _mm256_max_epu32(largest_, size);
        // 0 becomes the largest of all.
        smallest_ = _mm256_min_epu32(smallest_, _mm256_sub_epi32(size, _mm256_set1_epi32(1)));
    }
    LLM_INLINE void add_largest(__m256i size) { largest_ = _mm256_max_epu32(largest_, size); }
    LLM_INLINE void add_short(__m256 x) {
        add(x);
        used_ = _mm256_or_si256(used_, _mm256_castps_si256(x));
    }
    bool holds() const {
        const __m256i least = _mm256_set1_epi32(static_cast<int>(least_ - 1));
        const __m256i most = _mm256_set1_epi32(static_cast<int>(most_));
        const __m256i above = _mm256_cmpeq_epi32(_mm256_min_epu32(smallest_, least), least);
        const __m256i below = _mm256_cmpeq_epi32(_mm256_max_epu32(largest_, most), most);
        return _mm256_movemask_epi8(_mm256_and_si256(above, below)) == -1 &&
               _mm256_testz_si256(used_, _mm256_set1_epi32(0x1ff));
    }
};

// Whether the inputs of all batch rows are in range.
inline bool inputs_in_range(const Product& p) {
    Range range(LEAST_INPUT, MOST_INPUT);
    const int64_t count = p.m * p.k;
    for (int64_t i = 0; i < count; i += LANES) {
        const F32 x = load_part(p.x + i, count - i);
        range.add(x.lo), range.add(x.hi);
    }
    return count < 1 << 24 && range.holds();
}

// Whether the first group's scales of a panel are in range: of most weights, all are or none.
inline bool scales_may_be_short(const Product& p, int64_t panel) {
    Range range(LEAST_SCALE, MOST_SCALE);
    const F32 scales = p.scales().load(0, panel * LANES, p.n - panel * LANES);
    range.add_short(scales.lo), range.add_short(scales.hi);
    return range.holds();
}

// A group's scales of 16 output channels: integers of 15 bits, beside a zero in either order, times power * 2^-14.
struct ShortScales {
    __m256i low[2], high[2];
    F32 power;
    LLM_INLINE ShortScales() : power(zero()) {}
    // A float16 has 11 bits, and its range is of no harm: only infinite ones and NaN must be found.
    template <bool FLOAT16> LLM_INLINE void load_group(const Product& p, int64_t group, int64_t column, Range& range) {
        F32 scales;
        const F16* at = static_cast<const F16*>(p.scale) + group * p.scale_stride + column;
        if (FLOAT16 && p.n - column >= LANES) scales = load(at);
        else scales = p.scales().load(group, column, p.n - column);
        power = {split<FLOAT16>(scales.lo, 0, range), split<FLOAT16>(scales.hi, 1, range)};
    }
    template <bool FLOAT16> LLM_INLINE __m256 split(__m256 scales, int half, Range& range) {
        const __m256i exponents = _mm256_and_si256(_mm256_castps_si256(scales), _mm256_set1_epi32(0x7f800000));
        const __m256i least = _mm256_set1_epi32(static_cast<int>(bits_of_float(LEAST_SCALE)));
        const __m256i powers = _mm256_max_epi32(exponents, least);
        if constexpr (FLOAT16) range.add_largest(powers);
        else range.add_short(scales);
        // 2^14 / power
        const __m256i up = _mm256_sub_epi32(_mm256_set1_epi32(static_cast<int>(0x86000000u)), powers);
        const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(scales, _mm256_castsi256_ps(up)));
        low[half] = _mm256_and_si256(whole, _mm256_set1_epi32(0xffff)), high[half] = _mm256_slli_epi32(whole, 16);
        return _mm256_castsi256_ps(powers);
    }
};

LLM_INLINE F32 reciprocal_of_power(F32 power) { return as_float(set1_i(0x7f000000) - as_int(power)); }

// Half a step's values of 8 output channels, each in the upper bits of 16: of k and k + 2, of k + 1 and k + 3.
template <Code CODE, int HALF> struct Opening {
    static constexpr int SHIFT = CODE == Code::INT4 ? 12 : 8;
    __m256i pairs[2];
    LLM_INLINE Opening(const uint8_t* p, __m256i table) {
        if constexpr (CODE == Code::INT4) {
            const __m256i raw = _mm256_xor_si256(load_256(p), _mm256_set1_epi8(static_cast<char>(0x88)));
            const __m256i top = _mm256_set1_epi16(static_cast<int16_t>(0xf000));
            pairs[0] = HALF ? _mm256_and_si256(_mm256_slli_epi16(raw, 8), top) : _mm256_slli_epi16(raw, 12);
            pairs[1] = _mm256_and_si256(HALF ? raw : _mm256_slli_epi16(raw, 4), top);
        } else {
            const __m256i raw = load_256(p);
            const __m256i codes = _mm256_and_si256(HALF ? _mm256_srli_epi16(raw, 4) : raw, _mm256_set1_epi8(15));
            const __m256i values = _mm256_shuffle_epi8(table, codes);
            pairs[0] = _mm256_slli_epi16(values, 8);
            pairs[1] = _mm256_and_si256(values, _mm256_set1_epi16(static_cast<int16_t>(0xff00)));
        }
    }
    // Value J times its scale's integer.
    template <int J> LLM_INLINE __m256 product(const ShortScales& scales, int half) const {
        const __m256i factors = J < 2 ? scales.low[half] : scales.high[half];
        return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs[J % 2], factors));
    }
};

// acc += half a step of two panels.
template <Code CODE, int HALF, int ROWS>
LLM_INLINE void add_half(const uint8_t* const* b, int64_t at, __m256i table, const ShortScales* scales, const float* a,
                         int64_t k, F32 (*acc)[2]) {
    const Opening<CODE, HALF> lo[] = {{b[0] + at, table}, {b[1] + at, table}};
    const Opening<CODE, HALF> hi[] = {{b[0] + at + 32, table}, {b[1] + at + 32, table}};
    for_each([&](auto j) {
        constexpr int J = decltype(j)::value;
        const F32 w[] = {{lo[0].template product<J>(scales[0], 0), hi[0].template product<J>(scales[0], 1)},
                         {lo[1].template product<J>(scales[1], 0), hi[1].template product<J>(scales[1], 1)}};
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const F32 x = set1(a[r * k + 4 * HALF + J]);
            LLM_UNROLL for (int c = 0; c < 2; ++c) acc[r][c] = fma(x, w[c], acc[r][c]);
        }
    }, std::make_integer_sequence<int, 4>{});
}

// Two panels side by side, whose chains hide the time of an addition. False, having written nothing, if a scale is not
// in range.
template <Code CODE, int ROWS, bool FLOAT16>
__attribute__((noinline)) bool exact_rows(const Product& p, int64_t panel) {
    constexpr int PANELS = 2, STEP = step_of(CODE);
    __m256i table = _mm256_setzero_si256();
    if constexpr (CODE == Code::WHOLES)  // it holds 128 more
        table = _mm256_xor_si256(Lookup<CODE>(p).table, _mm256_set1_epi8(-128));
    const uint8_t* b[PANELS];
    int64_t columns[PANELS];
    F32 acc[ROWS][PANELS], power[PANELS];
    Range range(LEAST_SCALE, MOST_SCALE);
    const int64_t bytes = panel_bytes(p.kind, p.k), steps = ceil_div(p.k, STEP), group_steps = p.group_size / STEP;
    LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
        const int64_t index = min(panel + c, p.panels() - 1);  // past the last panel, the last again
        b[c] = static_cast<const uint8_t*>(p.data) + index * bytes, columns[c] = index * LANES;
        power[c] = set1(1.0f);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) acc[r][c] = zero();
    }
    const Ahead ahead(2048, STEP_BYTES, steps, PANELS, bytes);
    for (int64_t s = 0, group = 0; s < steps; ++group) {
        ShortScales scales[PANELS];
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
            scales[c].load_group<FLOAT16>(p, group, columns[c], range);
            p.scales().fetch(group, columns[c] + PANELS * LANES);
            const F32 quotient = power[c] * reciprocal_of_power(scales[c].power);
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) acc[r][c] = acc[r][c] * quotient;
            power[c] = scales[c].power;
        }
        for (const int64_t end = min(steps, s + group_steps); s < end; ++s) {
            const int64_t at = s * STEP_BYTES, distance = ahead.distance(s);
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) prefetch(b[c] + at + distance);
            const float* a = p.x + s * STEP;
            add_half<CODE, 0, ROWS>(b, at, table, scales, a, p.k, acc);
            add_half<CODE, 1, ROWS>(b, at, table, scales, a, p.k, acc);
        }
    }
    if (!range.holds()) return false;
    constexpr float UNIT = 1.0f / (1 << (14 + Opening<CODE, 0>::SHIFT));
    LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
        const F32 unit = power[c] * set1(UNIT), biases = p.biases(columns[c]);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) p.store_output(r, columns[c], acc[r][c] * unit, biases);
    }
    return true;
}

}  // namespace
}  // namespace llm

#endif
