// Quantizes a float weight [n, k] to integers with a scale per row and group of columns, while it is loaded.
//
// The formulas, roundings and orders of sums of kernels/reference/quantize_weight.py. A task is a row.
#include "kinds.h"
#include "quantize.h"

#include <limits>

namespace llm {
namespace {

// Fractions of the scale that clips nothing.
constexpr float SHARES[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.65f};
constexpr int64_t SHARES_TRIED = 8;

// The sum over i < count of value(i), in the order of `ordered_sum` and up to its last step: `lane` [8] is left to be
// added to what is returned. `value` gives 16 lanes from i on, those from `count` on are 0; it is called once for each
// i.
//
// 32 sums side by side over stripes of 32; runs of 16 stripes are summed by themselves, and runs of them again.
template <class Value> LLM_INLINE float ordered_lanes(int64_t count, float* lane, const Value& value) {
    constexpr int64_t levels = 4, run = 16;
    const int64_t stripes = count / 32, left = count - stripes * 32;
    alignas(64) float sums[32], rest[32];
    F32 low = zero(), high = zero();
    const auto add = [&](int64_t i) { low = low + value(i * 32), high = high + value(i * 32 + LANES); };
    if (stripes < run) {
        for (int64_t i = 0; i < stripes; ++i) add(i);
    } else {
        F32 lows[levels] = {low, low, low, low}, highs[levels] = {low, low, low, low};
        int64_t i = 0;
        while (i + run <= stripes) {
            low = high = zero();
            for (int64_t end = i + run; i < end; ++i) add(i);
            for (int64_t level = 1, size = run; level < levels; ++level, size *= run) {
                lows[level] = lows[level] + low, highs[level] = highs[level] + high;
                if (i & (size * (run - 1))) break;
                low = lows[level], high = highs[level];
                if (level < levels - 1) lows[level] = highs[level] = zero();
            }
        }
        low = high = zero();
        for (; i < stripes; ++i) add(i);
        for (int64_t level = 1; level < levels; ++level) low = low + lows[level], high = high + highs[level];
    }
    store(sums, low), store(sums + LANES, high);
    float total = 0.0f;
    if (left) {
        store(rest, value(stripes * 32));
        if (left > LANES) store(rest + LANES, value(stripes * 32 + LANES));
        for (int64_t at = 0; at + 8 <= left; at += 8)
            for (int64_t j = 0; j < 8; ++j) sums[j] += rest[at + j];
        for (int64_t at = left / 8 * 8; at < left; ++at) total += rest[at];
    }
    for (int64_t j = 0; j < 8; ++j) lane[j] = sums[j] + sums[8 + j] + sums[16 + j] + sums[24 + j];
    return total;
}

// The last step for all shares at once: the additions of one wait for each other.
LLM_INLINE void add_lanes(float* totals, const float (*lane)[8]) {
    for (int64_t j = 0; j < 8; ++j)
        for (int64_t share = 0; share < SHARES_TRIED; ++share) totals[share] += lane[share][j];
}

struct Rounding {
    float low, high;
    template <class Quotient> LLM_INLINE F32 operator()(const Quotient& quotient, F32 x) const {
        return max(min(nan_to_zero(round_even(quotient(x))), set1(high)), set1(low));
    }
};

// Calls call(quotient) with what divides by `divisor`; a branch here, not in the loop.
template <class Call> LLM_INLINE void with_quotient(float divisor, const Call& call) {
    const F32 by = set1(divisor);
    if (Divider::has_exact_corrections(divisor)) return call(Divider(divisor, false));
    call([&](F32 x) { return x / by; });
}

// The least squares error over the shares of `full`: the best integers are in the returned part of `room`
// [SHARES_TRIED][padded], their scale in `scale`. Null: none is better than zeros.
const float* search(const float* x, float* room, int64_t size, int64_t padded, float full, float high, float& scale) {
    alignas(64) float scales[SHARES_TRIED], errors[SHARES_TRIED], norms[SHARES_TRIED], lane[SHARES_TRIED][8];
    const Rounding rounded{-high - 1, high};
    const auto part = [&](int64_t i) { return load_part(x + i, size - i); };
    for (int64_t share = 0; share < SHARES_TRIED; ++share) {
        float* q = room + share * padded;
        F32 norm = zero();  // exact in any order: a sum of whole numbers
        with_quotient(full * SHARES[share], [&](const auto& quotient) {
            scales[share] = ordered_lanes(size, lane[share], [&](int64_t i) {
                const F32 value = part(i), whole = rounded(quotient, value);
                store(q + i, whole);
                norm = fma(whole, whole, norm);
                return whole * value;
            });
        });
        norms[share] = sum(norm);
    }
    add_lanes(scales, lane);
    for (int64_t share = 0; share < SHARES_TRIED; ++share) {
        scales[share] = norms[share] > 0 ? scales[share] / norms[share] : full;
        const float* q = room + share * padded;
        const F32 its = set1(scales[share]);
        errors[share] = ordered_lanes(size, lane[share], [&](int64_t i) {
            const F32 error = part(i) - load(q + i) * its;
            return error * error;
        });
    }
    add_lanes(errors, lane);
    int64_t best = -1;
    float least = std::numeric_limits<float>::infinity();
    for (int64_t share = 0; share < SHARES_TRIED; ++share)
        if (errors[share] < least && scales[share] > 0) least = errors[share], best = share;
    scale = best < 0 ? full : scales[best];
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
        with_quotient(divisor, [&](const auto& quotient) {
            for (int64_t i = 0; i < group_size; i += LANES)
                store(q + i, rounded(quotient, load_part(x + i, group_size - i)));
        });
    }
    // False if the row holds a value that is not finite.
    template <class T> bool run(int64_t row, const T* src, char* scratch) const {
        float* x = reinterpret_cast<float*>(scratch);
        float* room = x + ceil_div(k, LANES) * LANES;
        for (int64_t i = 0; i < k; i += LANES) store_part(x + i, load_part(src + i, k - i), k - i);
        std::memset(room, 0, SHARES_TRIED * padded() * sizeof(float));
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
            int8_t* out = q + row * k + group * group_size;
            alignas(16) int8_t lanes[LANES];
            for (int64_t i = 0; i < group_size; i += LANES) {
                store_int8(lanes, to_int(load(best + i)));
                std::memcpy(out + i, lanes, min(group_size - i, LANES));
            }
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
