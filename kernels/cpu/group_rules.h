// How sixteen groups side by side are quantized: a rule for each form with groups.
//
// A rule gives codes, scales and minima of a tile, and the values that they stand for. The formulas, roundings and
// orders of sums are those of kernels/reference/quantize_weight.py. Tiles and rules are passed by value: what is behind
// a reference is read again after each code that is kept.
#pragma once

#include <initializer_list>
#include <limits>

#include "integers.h"
#include "transpose.h"
#include "vector_math.h"

namespace llm {
namespace {

// Sixteen groups of a weight side by side: lane g of vector i is element i of group g. Each group has a scale of its
// own, so every step of quantizing is one for each lane: no sum or maximum across lanes.

// Floats of a buffer for a tile: whole blocks of 16 x 16, which are transposed.
constexpr int64_t tile_floats(int64_t size) { return ceil_div(size, LANES) * LANES * LANES; }

struct GroupTile {
    float* x;  // [size][16]
    int64_t size;

    LLM_INLINE F32 operator[](int64_t i) const { return load(x + i * LANES); }

    // From `count` groups that follow each other; the other lanes are 0.
    template <class T> void read(const T* src, int64_t count) const {
        alignas(64) float tile[LANES * LANES] = {};
        for (int64_t i = 0; i < size; i += LANES) {
            for (int64_t lane = 0; lane < count; ++lane) {
                const T* from = src + lane * size + i;
                store(tile + lane * LANES, i + LANES <= size ? load(from) : load_part(from, size - i));
            }
            transpose_tile(tile, x + i * LANES, LANES);
        }
    }
    // |x| of each group's largest; compared as integers, NaN > infinity > every number.
    LLM_INLINE F32 largest() const {
        const I32 mask = set1_i(0x7fffffff);
        I32 found = set1_i(0);
        for (int64_t i = 0; i < size; ++i) found = max_i(found, and_i(as_int((*this)[i]), mask));
        return as_float(found);
    }
};

// codes [size][16] -> q, `count` groups that follow each other.
inline void write_codes(const float* codes, int8_t* q, int64_t size, int64_t count) {
    alignas(64) float tile[LANES * LANES];
    for (int64_t i = 0; i < size; i += LANES) {
        transpose_tile(codes + i * LANES, tile, LANES);
        for (int64_t lane = 0; lane < count; ++lane) {
            alignas(16) int8_t bytes[LANES];
            int8_t* to = q + lane * size + i;
            const bool whole = i + LANES <= size;
            store_int8(whole ? to : bytes, to_int(load(tile + lane * LANES)));
            if (!whole) std::memcpy(to, bytes, size - i);
        }
    }
}

// The sum of value(place), value(place + 32) and so on over `stripes` of them: runs of 16 are summed by themselves, and
// runs of 16 such sums again.
template <class Value> LLM_INLINE F32 sum_stripes(int64_t stripes, int64_t place, const Value& value) {
    constexpr int64_t levels = 4, run = 16;
    const auto sum_of = [&](int64_t from, int64_t end) {
        F32 sum = zero();
        for (int64_t i = from * 32 + place; i < end * 32; i += 32) sum = sum + value(i);
        return sum;
    };
    if (stripes < run) return sum_of(0, stripes);
    F32 sums[levels] = {zero(), zero(), zero(), zero()};
    int64_t done = run;
    for (; done <= stripes; done += run) {
        sums[0] = sum_of(done - run, done);
        for (int64_t level = 1, size = run; level < levels && done % size == 0; ++level, size *= run)
            sums[level] = sums[level] + sums[level - 1], sums[level - 1] = zero();
    }
    return ((sum_of(done - run, stripes) + sums[1]) + sums[2]) + sums[3];
}

// The sum over i < size of value(i) for each lane, in the order of `ordered_sum` of
// kernels/reference/quantize_weight.py. value(i) is called once for each i.
template <class Value> LLM_INLINE F32 ordered_sum(int64_t size, const Value& value) {
    F32 total = zero();
    if (size == 32) {  // most of all groups
        LLM_UNROLL for (int j = 0; j < 8; ++j)
            total = total + (((value(j) + value(8 + j)) + value(16 + j)) + value(24 + j));
        return total;
    }
    const int64_t stripes = size / 32, rest = stripes * 32, vectors = (size - rest) / 8;
    for (int64_t i = rest + vectors * 8; i < size; ++i) total = total + value(i);
    for (int64_t j = 0; j < 8; ++j) {
        F32 lane = sum_stripes(stripes, j, value);
        for (int64_t vector = 0; vector < vectors; ++vector) lane = lane + value(rest + vector * 8 + j);
        for (int64_t place = 8 + j; place < 32; place += 8) lane = lane + sum_stripes(stripes, place, value);
        total = total + lane;
    }
    return total;
}

// Each lane rounded to bfloat16, half to even; finite.
LLM_INLINE F32 round_bf16(F32 x) {
    const I32 bits = as_int(x), odd = and_i(shift_right<16>(bits), set1_i(1));
    return as_float(and_i(bits + set1_i(0x7fff) + odd, set1_i(static_cast<int32_t>(0xffff0000))));
}
// Each lane rounded to float16.
inline F32 round_f16(F32 x) {
    alignas(64) float values[LANES];
    store(values, x);
    for (float& value : values) value = widen(narrow<F16>(value));
    return load(values);
}
// 1 / x; 0 where that is 2^100 and more.
LLM_INLINE F32 inverse(F32 x) { return select_less(set1(0x1p-100f), abs(x), set1(1.0f) / x, zero()); }

// One code for each element of a tile, [size][16].
struct Codes {
    float* codes;

    LLM_INLINE void keep(int64_t i, F32 code) const { store(codes + i * LANES, code); }
    LLM_INLINE F32 operator[](int64_t i) const { return load(codes + i * LANES); }
};
// What a rule finds beside the codes: W ~ (value(code) - zero) * scale - minimum.
struct Found {
    F32 scale, minimum;
    bool fits;  // the scales are within the range of the form
    F32 zero = llm::zero();
};

LLM_INLINE F32 clamp(F32 x, float low, float high) { return max(min(x, set1(high)), set1(low)); }
LLM_INLINE F32 floor_of_positive(F32 x) {
    const F32 near = round_even(x);
    return select_less(x, near, near - set1(1.0f), near);
}
LLM_INLINE bool all_at_most(F32 x, float most) { return at_least(set1(most), x) == 0xffff; }
// Of magnitudes.
LLM_INLINE bool is_finite(F32 x) { return all_at_most(x, std::numeric_limits<float>::max()); }

// x / divisor by lanes, as `Divider` of quantize.h: for divisors with exact corrections.
struct LaneDivider {
    F32 negative, reciprocal;
    explicit LLM_INLINE LaneDivider(F32 divisor) : negative(zero() - divisor), reciprocal(set1(1.0f) / divisor) {}
    LLM_INLINE F32 corrected(F32 q, F32 x) const { return fma(fma(q, negative, x), reciprocal, q); }
    LLM_INLINE F32 operator()(F32 x) const { return corrected(corrected(x * reciprocal, x), x); }
};
struct LaneDivision {  // 0 / 0 becomes 0
    F32 divisor;
    explicit LLM_INLINE LaneDivision(F32 by) : divisor(by) {}
    LLM_INLINE F32 operator()(F32 x) const { return nan_to_zero(x / divisor); }
};
// Calls call(LaneDivider or LaneDivision), the type that is right for divisors from `least` to `most`.
template <class Call> LLM_INLINE void with_divider(F32 least, F32 most, const Call& call) {
#if !LLM_PLAIN
    if ((at_least(least, set1(0x1p-60f)) & at_least(set1(0x1p60f), most)) == 0xffff) {
        call([](F32 divisor) { return LaneDivider(divisor); });
        return;
    }
#endif
    call([](F32 divisor) { return LaneDivision(divisor); });
}

// Integers: the scale of least squares error over several shares of the one that clips nothing, in 16 bits.
struct ClippedIntegers {
    static constexpr float SHARES[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.65f};
    float high;

    struct Rounding {
        F32 low, high;
        template <class Quotient> LLM_INLINE F32 operator()(const Quotient& quotient, F32 x) const {
            return max(min(round_even(quotient(x)), high), low);
        }
    };
    LLM_INLINE Found operator()(GroupTile x, F32 largest, Codes codes) const {
        const F32 full = select_less(zero(), largest, largest / set1(high), set1(1.0f));
        F32 scale = full;
        with_divider(full * set1(SHARES[7]), full, [&](const auto& divided_by) {
            scale = search(x, full, divided_by, {set1(-high - 1), set1(high)}, codes);
        });
        return {scale, zero(), true};
    }
    template <class Divided>
    static F32 search(GroupTile x, F32 full, const Divided& divided_by, Rounding rounded, Codes codes) {
        const F32 none = set1(std::numeric_limits<float>::infinity());
        F32 least = none, best = full, best_scale = full;
        for (const float share : SHARES) {
            const F32 divisor = full * set1(share), scale = refitted(x, full, divided_by(divisor), rounded, codes);
            F32 error = ordered_sum(x.size, [=](int64_t i) {
                const F32 rest = x[i] - codes[i] * scale;
                return rest * rest;
            });
            error = select_less(zero(), scale, error, none);
            best = select_less(error, least, divisor, best);
            best_scale = select_less(error, least, scale, best_scale);
            least = select_less(error, least, error, least);
        }
        const auto quotient = divided_by(best);
        for (int64_t i = 0; i < x.size; ++i) codes.keep(i, select_less(least, none, rounded(quotient, x[i]), zero()));
        return best_scale;
    }
    // The scale of least squares error for the integers by `quotient`, which are kept.
    template <class Quotient>
    static LLM_INLINE F32 refitted(GroupTile x, F32 full, Quotient quotient, Rounding rounded, Codes codes) {
        F32 norm = zero();  // exact in any order: a sum of whole numbers
        const F32 product = ordered_sum(x.size, [&](int64_t i) {
            const F32 value = x[i], integer = rounded(quotient, value);
            codes.keep(i, integer);
            norm = fma(integer, integer, norm);
            return integer * value;
        });
        return round_bf16(select_less(zero(), norm, product / norm, full));
    }
    LLM_INLINE F32 value(F32 code) const { return code; }
};

// Integers with a zero point, W ~ (code - zero) * scale: `asymmetric_groups` of quantize_weight.py.
struct AsymmetricIntegers {
    static constexpr float STEPS[] = {1.05f, 1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f}, BESIDE = 0.025f, MOST = 15.0f;
    struct Best { F32 least, scale, zero, share; };

    LLM_INLINE Found operator()(GroupTile x, F32, Codes codes) const {
        F32 low = zero(), high = zero();
        for (int64_t i = 0; i < x.size; ++i) low = min(low, x[i]), high = max(high, x[i]);
        const F32 squares = ordered_sum(x.size, [&](int64_t i) { return x[i] * x[i]; });
        const F32 mean = sqrt(squares / set1(static_cast<float>(x.size)));
        const F32 range = high / set1(MOST) - low / set1(MOST);
        const F32 full = select_less(zero(), range, range, set1(1.0f));
        const F32 middle = set1(0.5f) * high + set1(0.5f) * low;
        Best best{set1(std::numeric_limits<float>::infinity()), full, centred(middle, full), set1(1.0f)};
        for (const float share : STEPS) {
            const F32 step = full * set1(share);
            attempt(x, mean, step, centred(middle, step), set1(share), codes, best);
        }
        const Best first = best;
        for (const float beside : {-1.0f, 1.0f})
            attempt(x, mean, full * first.share, clamp(first.zero + set1(beside), 0, MOST), first.share, codes, best);
        const Best second = best;
        for (const float beside : {-BESIDE, BESIDE}) {
            const F32 share = second.share + set1(beside);
            attempt(x, mean, full * share, second.zero, share, codes, best);
        }
        attempt(x, mean, best.scale, best.zero, best.share, codes, best);
        const F32 per_step = inverse(best.scale), shift = best.zero - set1(8.0f);
        const F32 least = zero() - best.zero, most = set1(MOST) - best.zero;
        for (int64_t i = 0; i < x.size; ++i) codes.keep(i, from_zero(x[i], per_step, least, most) + shift);
        return {best.scale, zero(), true, shift};
    }
    LLM_INLINE F32 value(F32 code) const { return code; }

  private:
    static LLM_INLINE F32 centred(F32 middle, F32 step) {
        return clamp(round_even(set1(0.5f * MOST) - middle * inverse(step)), 0, MOST);
    }
    static LLM_INLINE F32 from_zero(F32 x, F32 per_step, F32 least, F32 most) {
        return max(min(round_even(x * per_step), most), least);
    }
    // Refits the scale to the codes by `step`, which are kept, and takes it where its weighted error is less. Inlined a
    // dozen times it would take minutes to compile.
    __attribute__((noinline)) static void attempt(GroupTile x, F32 mean, F32 step, F32 at, F32 share, Codes codes,
                                                  Best& best) {
        const F32 per_step = inverse(step), least = zero() - at, most = set1(MOST) - at;
        const F32 products = ordered_sum(x.size, [=](int64_t i) {
            const F32 value = x[i], code = from_zero(value, per_step, least, most);
            codes.keep(i, code);
            return code * (abs(value) + mean) * value;
        });
        const F32 norm = ordered_sum(x.size, [=](int64_t i) {
            const F32 code = codes[i];
            return code * (abs(x[i]) + mean) * code;
        });
        const F32 scale = round_bf16(select_less(zero(), norm, products / norm, step));
        const F32 change = scale * (scale * norm - (products + products));
        const F32 error = select_less(zero(), scale, change, set1(std::numeric_limits<float>::infinity()));
        best.scale = select_less(error, best.least, scale, best.scale);
        best.zero = select_less(error, best.least, at, best.zero);
        best.share = select_less(error, best.least, share, best.share);
        best.least = select_less(error, best.least, error, best.least);
    }
};

// Integers on two levels of scales: `level_of` of quantize_weight.py, of groups that are divided by their rows' scales.
struct WholeSteps {
    static constexpr float STEPS[] = {1.0f, 0.0f, -1.0f, -2.0f}, PLACES[] = {0.0f, -1.0f, 1.0f}, MOST = 15.0f;
    static constexpr float PLACES_IN_STEP = 3.2f, FIRST_PLACE = 16.0f;
    struct Level {
        F32 step, place, error;

        // Step and place as `Weight` has them, in bytes that are to be read without a sign.
        LLM_INLINE I32 byte() const {
            const F32 both = step + place * set1(16.0f);
            return to_int(select_less(place, set1(8.0f), both, both - set1(256.0f)));
        }
    };

    LLM_INLINE Level operator()(GroupTile x, Codes codes) const {
        F32 low = x[0], high = x[0];
        for (int64_t i = 1; i < x.size; ++i) low = min(low, x[i]), high = max(high, x[i]);
        const F32 first = ceiling((high - low) * set1(1 / MOST)), middle = set1(0.5f) * (high + low);
        Level best{set1(1.0f), zero(), set1(std::numeric_limits<float>::infinity())};
        for (const float near : STEPS) {
            const F32 step = clamp(first + set1(near), 1, MOST), at = set1(0.5f * MOST) - middle * (set1(1.0f) / step);
            const F32 centre = round_even(at * set1(PLACES_IN_STEP)) - set1(FIRST_PLACE);
            for (const float beside : PLACES) attempt(x, step, clamp(centre + set1(beside), 0, MOST), best);
        }
        const Grid grid(best.step, best.place);
        for (int64_t i = 0; i < x.size; ++i) codes.keep(i, grid.code(x[i] + grid.shift) - set1(8.0f));
        return best;
    }

    static LLM_INLINE F32 floor_of(F32 x) {
        const F32 near = round_even(x);
        return select_less(x, near, near - set1(1.0f), near);
    }
    static LLM_INLINE F32 ceiling(F32 x) {
        const F32 near = round_even(x);
        return select_less(near, x, near + set1(1.0f), near);
    }
    struct Grid {
        F32 step, per_step, shift, least, most;
        LLM_INLINE Grid(F32 by, F32 place)
            : step(by), per_step(set1(1.0f) / by),
              shift(floor_of(by * (place + set1(FIRST_PLACE)) / set1(PLACES_IN_STEP))),
              least(max(ceiling((shift - set1(128.0f)) * per_step), llm::zero())),
              most(min(floor_of((shift + set1(127.0f)) / by), set1(MOST))) {}
        LLM_INLINE F32 code(F32 moved) const { return max(min(round_even(moved * per_step), most), least); }
    };

  private:
    // Takes a step and a place where their error is less. Inlined a dozen times it would take long to compile.
    __attribute__((noinline)) static void attempt(GroupTile x, F32 step, F32 place, Level& best) {
        const Grid grid(step, place);
        const F32 error = ordered_sum(x.size, [=](int64_t i) {
            const F32 moved = x[i] + grid.shift, rest = grid.code(moved) * grid.step - moved;
            return rest * rest;
        });
        best.step = select_less(error, best.error, step, best.step);
        best.place = select_less(error, best.error, place, best.place);
        best.error = select_less(error, best.error, error, best.error);
    }
};

// e2m1 with powers of two as scales: of the two that the largest value lies between, the one of less squared error.
struct Fp4 {
    // The nearest value, halfway the one with the even code.
    LLM_INLINE F32 nearest(F32 x) const {
        // Neighbours below 2 differ by a half, above it by half of the power of two below them.
        x = clamp(x, -6.0f, 6.0f) + zero();  // -0 + 0 is 0
        const F32 power = max(as_float(and_i(as_int(x), set1_i(0x7f800000))), set1(1.0f));
        const F32 per_step = as_float(set1_i(255 << 23) - as_int(power));  // 2 / power
        return round_even(x * per_step) * (power * set1(0.5f));
    }
    LLM_INLINE F32 code(F32 value) const {
        const F32 size = abs(value), two = set1(2.0f);
        const F32 above = select_less(size, set1(5.0f), size + two, set1(7.0f));
        const I32 eight = shift_right<28>(and_i(as_int(value), set1_i(static_cast<int32_t>(0x80000000))));
        return select_less(size, set1(2.5f), size * two, above) + to_float(eight) - set1(8.0f);
    }
    LLM_INLINE F32 value(F32 code) const {  // twice that of e2m1, as the table of such weights
        const F32 size = select_less(code, zero(), code + set1(8.0f), code);
        const F32 above = select_less(size, set1(6.5f), (size - set1(2.0f)) * set1(2.0f), set1(12.0f));
        const F32 doubled = select_less(size, set1(4.5f), size, above);
        return select_less(code, zero(), doubled, zero() - doubled);
    }
    LLM_INLINE Found operator()(GroupTile x, F32 largest, Codes codes) const {
        const F32 power = as_float(and_i(as_int(largest), set1_i(0x7f800000)));
        const F32 below = select_less(zero(), largest, clamp(power * set1(0.25f), 0x1p-126f, 0x1p100f), set1(0.125f));
        const F32 above = below + below, first = error(x, below), second = error(x, above);
        const F32 scale = select_less(second, first, above, below), per_scale = set1(1.0f) / scale;
        for (int64_t i = 0; i < x.size; ++i) codes.keep(i, code(nearest(x[i] * per_scale)));
        return {scale * set1(0.5f), zero(), true};
    }
    LLM_INLINE F32 error(GroupTile x, F32 scale) const {
        const F32 per_scale = set1(1.0f) / scale;
        return ordered_sum(x.size, [&](int64_t i) {
            const F32 value = x[i], rest = value - nearest(value * per_scale) * scale;
            return rest * rest;
        });
    }
};

// The nearest of a table's 16 values, which ascend to 1; the scale is a group's largest magnitude.
struct NearestOfTable {
    const float* table;

    LLM_INLINE Found operator()(GroupTile x, F32 largest, Codes codes) const {
        const F32 scale = select_less(zero(), largest, largest, set1(1.0f));
        F32 borders[15];
        for (int i = 0; i < 15; ++i) borders[i] = set1((table[i + 1] + table[i]) / 2);
        with_divider(scale, scale, [&](const auto& divided_by) {
            const auto quotient = divided_by(scale);
            for (int64_t i = 0; i < x.size; ++i) {
                const F32 at = quotient(x[i]);
                F32 code = set1(-8.0f);
                LLM_UNROLL for (int j = 0; j < 15; ++j) code = code + select_less(borders[j], at, set1(1.0f), zero());
                codes.keep(i, code);
            }
        });
        return {scale, zero(), true};
    }
    LLM_INLINE F32 value(F32 code) const {
        F32 found = set1(table[0]);
        LLM_UNROLL for (int i = 1; i < LANES; ++i) found = select_less(set1(i - 8.5f), code, set1(table[i]), found);
        return found;
    }
};

// GGUF's Q8_0 as ggml rounds it: halves away from zero.
struct Q8_0 {
    LLM_INLINE Found operator()(GroupTile x, F32 largest, Codes codes) const {
        const F32 scale = largest / set1(127.0f), per_scale = inverse(scale);
        for (int64_t i = 0; i < x.size; ++i) {
            const F32 value = x[i] * per_scale, size = abs(value), whole = floor_of_positive(size);
            const F32 rest = size - whole;
            codes.keep(i, with_sign_of(whole + floor_of_positive(rest + rest), value));
        }
        const F32 stored = round_f16(scale);
        return {stored, zero(), is_finite(stored)};
    }
    LLM_INLINE F32 value(F32 code) const { return code; }
};

// GGUF's Q4_0 as ggml rounds it: the first value of the largest magnitude becomes -8.
struct Q4_0 {
    LLM_INLINE Found operator()(GroupTile x, F32, Codes codes) const {
        F32 first = x[0];
        for (int64_t i = 1; i < x.size; ++i) first = select_less(abs(first), abs(x[i]), x[i], first);
        const F32 scale = first / set1(-8.0f), per_scale = inverse(scale);
        for (int64_t i = 0; i < x.size; ++i)
            codes.keep(i, min(floor_of_positive(x[i] * per_scale + set1(8.5f)), set1(15.0f)) - set1(8.0f));
        const F32 stored = round_f16(scale);
        return {stored, zero(), is_finite(abs(stored))};
    }
    LLM_INLINE F32 value(F32 code) const { return code; }
};

// GGUF's Q4_K for sixteen groups side by side, which are two of its blocks: see `quantize_q4_k` of
// kernels/reference/quantize_weight.py.

struct Q4_K {
    // The groups of a block, whose scales and minima are levels of one float16 each.
    static constexpr int BLOCK = 8;
    static constexpr float MOST_CODE = 15.0f, MOST_LEVEL = 63.0f, LARGEST = 65504.0f * 63.0f;
    struct Line { F32 scale, minimum; };  // x ~ code * scale - minimum

    LLM_INLINE Found operator()(GroupTile x, F32 largest, Codes codes) const {
        const Line line = best_line(x, codes);
        const F32 unit = unit_of(line.scale), base = unit_of(line.minimum);
        const Line best = on_levels(x, line, unit, base);
        const F32 per_scale = inverse(best.scale);
        for (int64_t i = 0; i < x.size; ++i) codes.keep(i, code((x[i] + best.minimum) * per_scale) - set1(8.0f));
        return {best.scale, best.minimum, all_at_most(largest, LARGEST) && is_finite(max(unit, base))};
    }
    LLM_INLINE F32 value(F32 code) const { return code + set1(8.0f); }

  private:
    LLM_INLINE F32 code(F32 x) const { return clamp(round_even(x), 0, MOST_CODE); }
    // Of several ranges for the codes, each refitted to the codes that it gives. `codes` is room.
    Line best_line(GroupTile x, Codes codes) const {
        F32 low = zero(), high = zero(), least = set1(std::numeric_limits<float>::infinity());
        for (int64_t i = 0; i < x.size; ++i) low = min(low, x[i]), high = max(high, x[i]);
        const F32 total = ordered_sum(x.size, [&](int64_t i) { return x[i]; }), per_span = inverse(high - low);
        Line best{zero(), zero() - low};
        for (int step = -10; step <= 10; step += 2) {
            const F32 factor = set1(static_cast<float>(15 + 0.1 * step)) * per_span;
            const Line fit = fitted(x, low, factor, total, codes);
            const F32 error = ordered_sum(x.size, [&](int64_t i) {
                const F32 rest = (x[i] + fit.minimum) - codes[i] * fit.scale;
                return rest * rest;
            });
            best.scale = select_less(error, least, fit.scale, best.scale);
            best.minimum = select_less(error, least, fit.minimum, best.minimum);
            least = select_less(error, least, error, least);
        }
        return best;
    }
    // Least squares for the codes of (x - low) * factor, which are kept; a negative minimum is 0.
    LLM_INLINE Line fitted(GroupTile x, F32 low, F32 factor, F32 total, Codes codes) const {
        F32 ones = zero(), squares = zero();  // exact in any order: sums of whole numbers
        const F32 products = ordered_sum(x.size, [&](int64_t i) {
            const F32 integer = code((x[i] - low) * factor);
            codes.keep(i, integer);
            ones = ones + integer, squares = fma(integer, integer, squares);
            return integer * x[i];
        });
        const F32 count = set1(static_cast<float>(x.size)), determinant = count * squares - ones * ones;
        const F32 per = inverse(determinant), minimum = (ones * products - squares * total) * per;
        const F32 scale = (count * products - ones * total) * per, alone = products * inverse(squares);
        const auto unless_through_zero = [&](F32 a, F32 b) {
            return select_less(minimum, zero(), b, select_less(zero(), determinant, a, b));
        };
        return {max(unless_through_zero(scale, alone), zero()), unless_through_zero(minimum, zero())};
    }
    // The levels near those of `line` with the least error.
    Line on_levels(GroupTile x, Line line, F32 unit, F32 base) const {
        const F32 level = round_even(line.scale * inverse(unit)), floor = round_even(line.minimum * inverse(base));
        F32 least = set1(std::numeric_limits<float>::infinity());
        Line best{zero(), zero()};
        for (const float up : {0.0f, -1.0f, 1.0f}) {
            for (const float down : {0.0f, -1.0f, 1.0f}) {
                const Line tried{clamp(level + set1(up), 0, MOST_LEVEL) * unit,
                                 clamp(floor + set1(down), 0, MOST_LEVEL) * base};
                const F32 per_scale = inverse(tried.scale);
                const F32 error = ordered_sum(x.size, [=](int64_t i) {
                    const F32 raised = x[i] + tried.minimum, rest = raised - code(raised * per_scale) * tried.scale;
                    return rest * rest;
                });
                best.scale = select_less(error, least, tried.scale, best.scale);
                best.minimum = select_less(error, least, tried.minimum, best.minimum);
                least = select_less(error, least, error, least);
            }
        }
        return best;
    }
    // A 63rd of the largest of each block, as a float16.
    F32 unit_of(F32 x) const {
        alignas(64) float values[LANES];
        store(values, x);
        for (int block = 0; block < LANES; block += BLOCK) {
            float most = values[block];
            for (int i = 1; i < BLOCK; ++i) most = values[block + i] > most ? values[block + i] : most;
            for (int i = 0; i < BLOCK; ++i) values[block + i] = most;
        }
        return round_f16(load(values) / set1(MOST_LEVEL));
    }
};

}  // namespace
}  // namespace llm
