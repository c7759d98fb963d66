// Quantizes a float weight [n, k] to integers with a scale per row and group of columns, while it is loaded.
//
// The formulas, roundings and orders of sums of kernels/reference/quantize_weight.py. A task is a row.
#include "kinds.h"
#include "ordered_sums.h"
#include "quantize.h"
#include "vector_math.h"

#include <limits>

namespace llm {
namespace {

// Fractions of the scale that clips nothing.
constexpr float SHARES[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.65f};
constexpr int64_t SHARES_TRIED = SUMS;

struct Rounding {
    float low, high;
    template <class Quotient> LLM_INLINE F32 operator()(const Quotient& quotient, F32 x) const {
        return max(min(round_even(quotient(x)), set1(high)), set1(low));
    }
};

// By a divisor for which corrections are not exact. The quotient of 0 / 0 is NaN, which becomes 0.
struct TrueDivision {
    F32 divisor;
    LLM_INLINE F32 operator()(F32 x) const { return nan_to_zero(x / divisor); }
};

// The shares of one group's scale, tried side by side: their sums wait for each other's additions.
struct Trial {
    const float* x;
    float* room;  // [SHARES_TRIED][padded]: the integers of each share
    int64_t size, padded;
    Rounding rounded;
    alignas(64) float scales[SHARES_TRIED], norms[SHARES_TRIED], errors[SHARES_TRIED];
    alignas(64) float lane[SHARES_TRIED][8], squares[SHARES_TRIED][8];

    LLM_INLINE F32 at(int64_t i, Whole) const { return load(x + i); }
    LLM_INLINE F32 at(int64_t i, Part) const { return load_part(x + i, size - i); }

    template <class Quotient> LLM_INLINE void round(int64_t share, const Quotient& quotient) {
        float* q = room + share * padded;
        F32 norm = zero();  // exact in any order: a sum of whole numbers
        scales[share] = ordered_lanes(size, lane[share], [&](int64_t i, auto is_whole) {
            const F32 value = at(i, is_whole), code = rounded(quotient, value);
            store(q + i, code);
            norm = fma(code, code, norm);
            return code * value;
        });
        store_lanes(squares[share], norm, zero());
    }
    void round_all(float full) {
        float divisors[SHARES_TRIED], reciprocals[SHARES_TRIED];
        for (int64_t i = 0; i < SHARES_TRIED; ++i) divisors[i] = full * SHARES[i], reciprocals[i] = 1.0f / divisors[i];
        if (Divider::has_exact_corrections(divisors[0]) && Divider::has_exact_corrections(divisors[SHARES_TRIED - 1])) {
            for (int64_t i = 0; i < SHARES_TRIED; ++i) round(i, Divider(divisors[i], reciprocals[i]));
        } else {
            for (int64_t i = 0; i < SHARES_TRIED; ++i) round(i, TrueDivision{set1(divisors[i])});
        }
    }
    // The scales of least squares error for the integers, in 16 bits.
    LLM_INLINE void refit(float full) {
        for (float& norm : norms) norm = 0.0f;
        add_lanes(norms, squares), add_lanes(scales, lane);
        for (int64_t i = 0; i < SHARES_TRIED; ++i)
            scales[i] = widen(narrow<BF16>(norms[i] > 0 ? scales[i] / norms[i] : full));
    }
    void measure() {
        for (int64_t share = 0; share < SHARES_TRIED; ++share) {
            const float* q = room + share * padded;
            const F32 its = set1(scales[share]);
            errors[share] = ordered_lanes(size, lane[share], [&](int64_t i, auto is_whole) {
                const F32 error = at(i, is_whole) - load(q + i) * its;
                return error * error;
            });
        }
        add_lanes(errors, lane);
    }
};

// The least squares error over the shares of `full`: the best integers are in the returned part of `room`
// [SHARES_TRIED][padded], their scale in `scale`. Null: none is better than zeros.
const float* search(const float* x, float* room, int64_t size, int64_t padded, float full, float high, float& scale) {
    Trial trial{x, room, size, padded, {-high - 1, high}, {}, {}, {}, {}, {}};
    trial.round_all(full);
    trial.refit(full);
    trial.measure();
    int64_t best = -1;
    float least = std::numeric_limits<float>::infinity();
    for (int64_t share = 0; share < SHARES_TRIED; ++share)
        if (trial.errors[share] < least && trial.scales[share] > 0) least = trial.errors[share], best = share;
    scale = best < 0 ? full : trial.scales[best];
    return best < 0 ? nullptr : room + best * padded;
}

struct Energy {
    double signal = 0, noise = 0;
    // Of a group: sums in float32 of at most 256 elements, added in double.
    LLM_INLINE void add(const float* x, const float* q, int64_t size, float scale) {
        const F32 its = set1(scale);
        for (int64_t from = 0; from < size; from += 256) {
            F32 squares = zero(), errors = zero();
            for (int64_t i = from; i < min(from + 256, size); i += LANES) {
                const F32 value = load_part(x + i, size - i), error = value - load(q + i) * its;
                squares = fma(value, value, squares), errors = fma(error, error, errors);
            }
            signal += sum(squares), noise += sum(errors);
        }
    }
};

struct Job {
    int8_t* q;
    float* scale;
    double* energies;
    int64_t k, group_size;
    float high;
    bool searches;

    int64_t padded() const { return ceil_div(group_size, LANES) * LANES; }
    int64_t scratch_bytes() const { return (k + LANES + (SHARES_TRIED + 1) * padded()) * sizeof(float); }
    void round(const float* x, float* q, float divisor) const {
        const Rounding rounded{-high, high};
        const auto all = [&](const auto& quotient) {
            for (int64_t i = 0; i < group_size; i += LANES)
                store(q + i, rounded(quotient, load_part(x + i, group_size - i)));
        };
        if (Divider::has_exact_corrections(divisor)) all(Divider(divisor, 1.0f / divisor));
        else all(TrueDivision{set1(divisor)});
    }
    LLM_INLINE void keep(const float* best, int8_t* out) const {
        int64_t i = 0;
        for (; i + LANES <= group_size; i += LANES) store_int8(out + i, to_int(load(best + i)));
        if (i == group_size) return;
        alignas(16) int8_t lanes[LANES];
        store_int8(lanes, to_int(load(best + i)));
        std::memcpy(out + i, lanes, group_size - i);
    }
    // False if the row holds a value that is not finite.
    template <class T> bool run(int64_t row, const T* src, char* scratch) const {
        float* x = reinterpret_cast<float*>(scratch);
        float* room = x + ceil_div(k, LANES) * LANES;
        for (int64_t i = 0; i < k; i += LANES) store_part(x + i, load_part(src + i, k - i), k - i);
        Energy energy;
        for (int64_t group = 0; group < k / group_size; ++group) {
            const float* from = x + group * group_size;
            const float largest = largest_magnitude(from, group_size), full = largest == 0 ? 1.0f : largest / high;
            if (!(largest <= std::numeric_limits<float>::max())) return false;
            const float* best = room;
            float its = full;
            if (!searches) round(from, room, full);
            else best = search(from, room, group_size, padded(), full, high, its);
            if (!best) best = static_cast<const float*>(std::memset(room, 0, padded() * sizeof(float)));
            scale[row * (k / group_size) + group] = its;
            keep(best, q + row * k + group * group_size);
            energy.add(from, best, group_size, its);
        }
        energies[2 * row] = energy.signal, energies[2 * row + 1] = energy.noise;
        return true;
    }
};

}  // namespace
}  // namespace llm

using namespace llm;

// src [n, k] -> q [n, k], scale [n, k / group_size], and of each row the sums of W^2 and of its error's squares. Values
// are in [-high, high]; with `search` in [-high - 1, high]. Returns 0; or 1 if a value is not finite.
LLM_EXPORT int64_t llm_quantize_weight(Kind kind, const void* src, int8_t* q, float* scale, double* energies, int64_t n,
                                       int64_t k, int64_t high, int64_t group_size, int64_t search, int64_t threads) {
    const Job job{q, scale, energies, k, group_size, static_cast<float>(high), search != 0};
    std::atomic<int64_t> refused{0};
    parallel_for(n, threads, job.scratch_bytes(), [&](int64_t row, char* scratch) {
        with_type(kind, [&](auto type) {
            const auto* from = static_cast<const typename decltype(type)::Value*>(src) + row * k;
            if (!job.run(row, from, scratch)) refused.store(1, std::memory_order_relaxed);
        });
    });
    return refused.load();
}

LLM_KERNEL(llm_quantize_weight)
