// Quantizes a float weight [n, k] with a scale for each row and group of columns, while it is loaded.
//
// The formulas, roundings and orders of sums of kernels/reference/quantize_weight.py and quantize_forms.py. Plain
// rounding takes a row at a time. What searches for a scale, or has small groups, takes 16 groups side by side.
#include "group_blocks.h"
#include "kinds.h"
#include "quantize.h"
#include "rotate.h"

#include <type_traits>

namespace llm {
namespace {

// What is wrong with a weight: bits.
constexpr int64_t NOT_FINITE = 1, BEYOND_RANGE = 2;
// Elements whose sums of squares are float32.
constexpr int64_t SUMMED = 256;
// Elements that are worth a task.
constexpr int64_t TASK_ELEMENTS = 1 << 13;

struct Energy {
    double signal = 0, noise = 0;
    F32 squares = zero(), errors = zero();

    LLM_INLINE void add(F32 value, F32 error) {
        squares = fma(value, value, squares), errors = fma(error, error, errors);
    }
    LLM_INLINE void flush() {
        signal += sum(squares), noise += sum(errors);
        squares = errors = zero();
    }
    void write(double* to) const { to[0] = signal, to[1] = noise; }
};

struct Job {
    int8_t* q;
    float *scale, *minimum;
    double* energies;       // of each row, or of each 16 groups: the sums of W^2 and of its error's squares
    const float* feedback;  // of TWO_LEVELS: [k / rotation][rotation][rotation], or null
    int64_t n, k, group_size, rotation, threads;

    int64_t groups() const { return n * (k / group_size); }
};

struct RoundedInteger {
    float high;

    LLM_INLINE F32 rounded(F32 quotient, F32) const { return max(min(round_even(quotient), set1(high)), set1(-high)); }
    LLM_INLINE I32 code(F32 rounded, F32) const { return to_int(rounded); }
};

// e4m3, whose largest value is 448: multiples of 2^-9 below 2^-6, four bits of precision above.
struct RoundedFloat8 {
    static constexpr float high = 448.0f, NORMAL = 0x1p-6f, STEPS = 512.0f;

    LLM_INLINE F32 rounded(F32 quotient, F32) const {
        const F32 size = min(abs(quotient), set1(high)), small = round_even(size * set1(STEPS)) * set1(1 / STEPS);
        const I32 bits = as_int(size), odd = and_i(shift_right<20>(bits), set1_i(1));
        const I32 large = and_i(bits + set1_i(0x7ffff) + odd, set1_i(static_cast<int32_t>(0xfff00000)));
        return with_sign_of(select_less(size, set1(NORMAL), small, as_float(large)), quotient);
    }
    // The sign of -0 is kept, which its quotient has lost.
    LLM_INLINE I32 code(F32 rounded, F32 x) const {
        const F32 size = abs(rounded);
        const I32 large = shift_right<20>(as_int(size)) - set1_i((127 - 7) << 3);
        const F32 magnitude = select_less(size, set1(NORMAL), size * set1(STEPS), to_float(large));
        const I32 sign = shift_right<24>(and_i(as_int(x), set1_i(static_cast<int32_t>(0x80000000))));
        return to_int(magnitude) - sign;
    }
};

// A row at a time: elements side by side.
template <class Rule> struct Rows {
    Job job;
    Rule rule;

    template <class Quotient>
    void round(const Quotient& quotient, const float* x, int8_t* q, float scale, Energy& energy) const {
        const F32 its = set1(scale);
        for (int64_t i = 0; i < job.group_size; i += LANES) {
            const int64_t left = job.group_size - i;
            const F32 value = load_part(x + i, left), rounded = rule.rounded(quotient(value), value);
            energy.add(value, value - rounded * its);
            if (left >= LANES) store_int8(q + i, rule.code(rounded, value));
            else {
                alignas(16) int8_t lanes[LANES];
                store_int8(lanes, rule.code(rounded, value));
                std::memcpy(q + i, lanes, left);
            }
            if ((i + LANES) % SUMMED == 0) energy.flush();
        }
        energy.flush();
    }
    template <class T> int64_t run(int64_t row, const T* src, char* scratch) const {
        float* x = reinterpret_cast<float*>(scratch);
        for (int64_t i = 0; i < job.k; i += LANES)
            store_part(x + i, load_part(src + row * job.k + i, job.k - i), job.k - i);
        if (job.rotation) rotate_row(x, x, job.k, job.rotation);
        Energy energy;
        const int64_t groups = job.k / job.group_size;
        for (int64_t group = 0; group < groups; ++group) {
            const float* from = x + group * job.group_size;
            const float largest = largest_magnitude(from, job.group_size);
            if (!(largest <= std::numeric_limits<float>::max())) return NOT_FINITE;
            const float its = largest == 0 ? 1.0f : largest / rule.high;
            int8_t* to = job.q + row * job.k + group * job.group_size;
            job.scale[row * groups + group] = its;
            if (Divider::has_exact_corrections(its)) round(Divider(its, 1.0f / its), from, to, its, energy);
            else round(TrueDivision{set1(its)}, from, to, its, energy);
        }
        energy.write(job.energies + 2 * row);
        return 0;
    }
    // By a divisor for which corrections are not exact. The quotient of 0 / 0 is NaN, which becomes 0.
    struct TrueDivision {
        F32 divisor;
        LLM_INLINE F32 operator()(F32 x) const { return nan_to_zero(x / divisor); }
    };
};

template <class Rule, class T> int64_t quantize_rows(const Job& job, const Rule& rule, const T* src) {
    const Rows<Rule> rows{job, rule};
    std::atomic<int64_t> refused{0};
    parallel_for(job.n, job.threads, (job.k + LANES) * sizeof(float), [&](int64_t row, char* scratch) {
        if (const int64_t reason = rows.run(row, src, scratch)) refused.fetch_or(reason, std::memory_order_relaxed);
    });
    return refused.load();
}

template <class Rule> LLM_INLINE void measure(Rule rule, GroupTile x, Codes codes, Found found, double* to) {
    Energy energy;
    for (int64_t i = 0; i < x.size; ++i) {
        const F32 value = x[i];
        energy.add(value, (value + found.minimum) - (rule.value(codes[i]) - found.zero) * found.scale);
        if ((i + 1) % (SUMMED / LANES) == 0) energy.flush();
    }
    energy.flush();
    energy.write(to);
}

template <class Rule, class T>
int64_t quantize_tile(const Job& job, Rule rule, const T* src, int64_t tile, char* scratch) {
    const int64_t size = job.group_size, first = tile * LANES, count = min(LANES, job.groups() - first);
    float* room = reinterpret_cast<float*>(scratch);
    const GroupTile x{room, size};
    x.read(src + first * size, count);
    const F32 largest = x.largest();
    if (!is_finite(largest)) return NOT_FINITE;
    const Codes codes{room + tile_floats(size)};
    const Found found = rule(x, largest, codes);
    if (!found.fits) return BEYOND_RANGE;
    store_part(job.scale + first, found.scale, count);
    if (job.minimum) store_part(job.minimum + first, found.minimum + found.zero, count);
    write_codes(codes.codes, job.q + first * size, size, count);
    measure(rule, x, codes, found, job.energies + 2 * tile);
    return 0;
}

template <class Rule, class T> int64_t quantize_tiles(const Job& job, const Rule& rule, const T* src) {
    const int64_t tiles = ceil_div(job.groups(), LANES), at_once = max(1, TASK_ELEMENTS / (job.group_size * LANES));
    const int64_t scratch_bytes = 2 * tile_floats(job.group_size) * sizeof(float);
    std::atomic<int64_t> refused{0};
    parallel_for(ceil_div(tiles, at_once), job.threads, scratch_bytes, [&](int64_t task, char* scratch) {
        for (int64_t tile = task * at_once; tile < min((task + 1) * at_once, tiles); ++tile)
            if (const int64_t reason = quantize_tile(job, rule, src, tile, scratch))
                refused.fetch_or(reason, std::memory_order_relaxed);
    });
    return refused.load();
}

// Rows with two levels of scales, some at a time so that their groups fill the lanes.
template <class T> class LeveledRows {
    const Job& job_;
    const T* src_;
    const int64_t per_row_, rows_, lanes_;  // rows_ at a time, with the groups of so many lanes

    static constexpr float LEAST_SCALE = 0x1p-100f;
    int64_t tile() const { return tile_floats(job_.group_size); }
    // The row as floats, and its scale; 0: it holds a value that is not finite.
    float read(int64_t row, float* x) const {
        for (int64_t i = 0; i < job_.k; i += LANES)
            store_part(x + i, load_part(src_ + row * job_.k + i, job_.k - i), job_.k - i);
        if (job_.rotation) rotate_row(x, x, job_.k, job_.rotation);
        const float largest = largest_magnitude(x, job_.k), scale = largest / 127.0f;
        if (!(largest <= std::numeric_limits<float>::max())) return 0.0f;
        return scale > LEAST_SCALE ? scale : 1.0f;
    }

  public:
    LeveledRows(const Job& job, const T* src)
        : job_(job), src_(src), per_row_(job.k / job.group_size),
          rows_(job.feedback ? LANES : max(1, min(LANES, 4 * TASK_ELEMENTS / max(1, job.k)))),
          lanes_(ceil_div(rows_ * per_row_, LANES) * LANES) {}
    int64_t tasks() const { return ceil_div(job_.n, rows_); }
    int64_t scratch_bytes() const {
        const int64_t tiles = job_.feedback ? 5 * tile_floats(job_.rotation) : 2 * tile();
        return (rows_ * job_.k + LANES + tiles + lanes_) * sizeof(float);
    }
    int64_t run(int64_t task, char* scratch) const {
        return job_.feedback ? run_with_feedback(task, scratch) : run_groups(task, scratch);
    }

  private:
    // Sixteen rows side by side, a block of rotated columns after the other: `_round_with_feedback` of the reference.
    int64_t run_with_feedback(int64_t task, char* scratch) const {
        const int64_t first = task * LANES, count = min(LANES, job_.n - first), block = job_.rotation;
        float* rows = reinterpret_cast<float*>(scratch);
        float *side_by_side = rows + LANES * job_.k + LANES, *in_rows = side_by_side + tile_floats(block);
        float *original = in_rows + tile_floats(block), *codes = original + tile_floats(block);
        int8_t* bytes = reinterpret_cast<int8_t*>(codes + tile_floats(block));
        alignas(64) float scales[LANES];
        store(scales, set1(1.0f));
        for (int64_t r = 0; r < count; ++r) {
            const float scale = read(first + r, rows + r * job_.k);
            if (scale == 0.0f) return NOT_FINITE;
            job_.scale[first + r] = scales[r] = scale;
        }
        const GroupTile x{side_by_side, block};
        double signal = 0, noise = 0;
        for (int64_t start = 0; start < job_.k; start += block) {
            for (int64_t r = 0; r < count; ++r)
                for (int64_t i = 0; i < block; i += LANES)
                    store(in_rows + r * block + i, load(rows + r * job_.k + start + i) / set1(scales[r]));
            x.read(in_rows, count);
            std::memcpy(original, x.x, block * LANES * sizeof(float));
            Energy energy;
            for (int64_t at = 0; at < block; at += job_.group_size)
                round_group(x, at, job_.feedback + start * block, original, codes, first, count, start, energy);
            signal += sum(energy.squares * (load(scales) * load(scales)));
            noise += sum(energy.errors * (load(scales) * load(scales)));
            write_codes(codes, bytes, block, count);
            for (int64_t r = 0; r < count; ++r)
                std::memcpy(job_.q + (first + r) * job_.k + start, bytes + r * block, block);
        }
        job_.energies[2 * first] = signal, job_.energies[2 * first + 1] = noise;
        return 0;
    }
    // The group of `x` from column `at` on: its codes and levels; errors go to all columns after each.
    void round_group(GroupTile x, int64_t at, const float* feedback, const float* original, float* codes, int64_t first,
                     int64_t count, int64_t start, Energy& energy) const {
        const WholeSteps::Level found = WholeSteps()({x.x + at * LANES, job_.group_size}, {codes + at * LANES});
        alignas(16) int8_t levels[LANES];
        store_int8(levels, found.byte());
        uint8_t* to = reinterpret_cast<uint8_t*>(job_.minimum) + first * per_row_ + (start + at) / job_.group_size;
        for (int64_t r = 0; r < count; ++r) to[r * per_row_] = static_cast<uint8_t>(levels[r]);
        const WholeSteps::Grid grid(found.step, found.place);
        for (int64_t i = at; i < at + job_.group_size; ++i) {
            const F32 code = grid.code(x[i] + grid.shift), value = code * grid.step - grid.shift, error = x[i] - value;
            store(codes + i * LANES, code - set1(8.0f));
            energy.add(load(original + i * LANES), load(original + i * LANES) - value);
            for (int64_t j = i + 1; j < x.size; ++j)
                store(x.x + j * LANES, x[j] - set1(feedback[i * x.size + j]) * error);
        }
    }
    int64_t run_groups(int64_t task, char* scratch) const {
        float* rows = reinterpret_cast<float*>(scratch);
        const GroupTile x{rows + rows_ * job_.k + LANES, job_.group_size};
        const Codes codes{x.x + tile()};
        float* scales = codes.codes + tile();
        const int64_t first = task * rows_, count = min(rows_, job_.n - first), groups = count * per_row_;
        for (int64_t i = 0; i < lanes_; ++i) scales[i] = 1.0f;
        for (int64_t r = 0; r < count; ++r) {
            const float scale = read(first + r, rows + r * job_.k);
            if (scale == 0.0f) return NOT_FINITE;
            job_.scale[first + r] = scale;
            for (int64_t g = 0; g < per_row_; ++g) scales[r * per_row_ + g] = scale;
        }
        uint8_t* levels = reinterpret_cast<uint8_t*>(job_.minimum) + first * per_row_;
        double signal = 0, noise = 0;
        for (int64_t g = 0; g < groups; g += LANES) {
            const int64_t some = min(LANES, groups - g);
            const F32 scale = load(scales + g);
            x.read(rows + g * job_.group_size, some);
            F32 squares = zero();
            for (int64_t i = 0; i < job_.group_size; ++i) {
                const F32 value = x[i] / scale;
                squares = fma(value, value, squares);
                store(x.x + i * LANES, value);
            }
            const WholeSteps::Level found = WholeSteps()(x, codes);
            alignas(16) int8_t bytes[LANES];
            store_int8(bytes, found.byte());
            std::memcpy(levels + g, bytes, some);
            write_codes(codes.codes, job_.q + first * job_.k + g * job_.group_size, job_.group_size, some);
            signal += sum(squares * (scale * scale)), noise += sum(found.error * (scale * scale));
        }
        job_.energies[2 * first] = signal, job_.energies[2 * first + 1] = noise;
        return 0;
    }
};

template <class T> int64_t quantize_levels(const Job& job, const T* src) {
    const LeveledRows<T> rows(job, src);
    std::atomic<int64_t> refused{0};
    parallel_for(rows.tasks(), job.threads, rows.scratch_bytes(), [&](int64_t task, char* scratch) {
        if (const int64_t reason = rows.run(task, scratch)) refused.fetch_or(reason, std::memory_order_relaxed);
    });
    return refused.load();
}

template <class T> int64_t quantize(WeightForm form, const Job& job, float high, const float* table, const T* src) {
    switch (form) {
        case WeightForm::ROUNDED: return quantize_rows(job, RoundedInteger{high}, src);
        case WeightForm::FLOAT8: return quantize_rows(job, RoundedFloat8{}, src);
        case WeightForm::SEARCHED: return quantize_tiles(job, ClippedIntegers{high}, src);
        case WeightForm::MXFP4: return quantize_tiles(job, Fp4{}, src);
        case WeightForm::NF4: return quantize_tiles(job, NearestOfTable{table}, src);
        case WeightForm::Q8_0: return quantize_tiles(job, Q8_0{}, src);
        case WeightForm::Q4_0: return quantize_tiles(job, Q4_0{}, src);
        case WeightForm::ASYMMETRIC: return quantize_tiles(job, AsymmetricIntegers{}, src);
        case WeightForm::TWO_LEVELS: return quantize_levels(job, src);
        default: return quantize_tiles(job, Q4_K{}, src);
    }
}

}  // namespace
}  // namespace llm

using namespace llm;

// src [n, k] -> q [n, k], scale and minimum (of Q4_K, the zero point of ASYMMETRIC) [n, k / group_size], energies.
// Integers are in [-high, high], those searched for in [-high - 1, high]. Of TWO_LEVELS scale is [n], and minimum
// holds the levels as bytes. `table` [16] of NF4. `rotation`: rows are rotated first (rotate.h), for ROUNDED and
// TWO_LEVELS alone. `feedback` of TWO_LEVELS, or null: by how much of each column's error the columns after it in its
// block become less. Returns 0, or what is wrong with the weight.
LLM_EXPORT int64_t llm_quantize_weight(Kind kind, WeightForm form, const void* src, int8_t* q, float* scale,
                                       float* minimum, double* energies, const float* table, const float* feedback,
                                       int64_t n, int64_t k, int64_t high, int64_t group_size, int64_t rotation,
                                       int64_t threads) {
    const Job job{q, scale, minimum, energies, feedback, n, k, group_size, rotation, threads};
    return with_type(kind, [&](auto type) {
        return quantize(form, job, static_cast<float>(high), table,
                        static_cast<const typename decltype(type)::Value*>(src));
    });
}

LLM_KERNEL(llm_quantize_weight)
