// GGUF's Q4_K for sixteen groups side by side, which are two of its blocks: see `quantize_q4_k` of
// kernels/reference/quantize_weight.py.
#pragma once

#include <initializer_list>

#include "group_rules.h"

namespace llm {
namespace {

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
