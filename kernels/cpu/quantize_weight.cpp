// Quantizes a float weight [n, k] with a scale for each row and group of columns, while it is loaded.
//
// The formulas, roundings and orders of sums of kernels/reference/quantize_weight.py. Plain rounding takes a row at a
// time. What searches for a scale, or has small groups, takes 16 groups side by side (group_rules.h).
#include "group_rules.h"
#include "kinds.h"
#include "quantize.h"
#include "rotate.h"

#include <type_traits>

namespace llm {
namespace {

// Rounds blocks of rotated columns so that what rounding did to some of them is made up for in the columns after them:
// `_round_with_compensation` of kernels/reference/quantize_weight.py, for sixteen rows side by side.
//
// The inverse of the inputs' moments is H diag(spectrum) H here, whose halves of a block commute. So errors of the
// first half go to the second by a rotation, a factor for each column and a rotation back, and each half is such a
// block again.

// Factors of a block of `size` columns: those of its halves follow its own.
constexpr int64_t shares_in(int64_t size) { return size <= 1 ? 0 : size / 2 + 2 * shares_in(size / 2); }

// `room` is [2 * size].
inline void find_shares(const float* spectrum, int64_t size, float* shares, float* room) {
    const int64_t half = size / 2;
    if (half == 0) return;
    for (int64_t i = 0; i < half; ++i) {
        const float low = spectrum[i], high = spectrum[half + i], mean = 0.5f * (low + high);
        shares[i] = (low - high) / mean / static_cast<float>(size);
        room[i] = mean, room[half + i] = low / mean * high;
    }
    find_shares(room, half, shares + half, room + size);
    find_shares(room + half, half, shares + half + shares_in(half), room + size);
}

// Columns that fit in registers.
#if LLM_AVX512
constexpr int IN_REGISTERS = 16;
#else
constexpr int IN_REGISTERS = 8;
#endif

// H diag(shares) H x, where H gives sums in the first half of `SIZE` columns, differences in the second, and so on in
// each half; backwards from the smallest.
template <int SIZE> LLM_INLINE void spread(F32* x, const float* shares) {
    LLM_UNROLL for (int stride = SIZE / 2; stride > 0; stride /= 2) LLM_UNROLL for (int i = 0; i < SIZE; ++i) {
        if (i & stride) continue;
        const F32 a = x[i], b = x[i + stride];
        x[i] = a + b, x[i + stride] = a - b;
    }
    LLM_UNROLL for (int i = 0; i < SIZE; ++i) x[i] = x[i] * set1(shares[i]);
    LLM_UNROLL for (int stride = 1; stride < SIZE; stride *= 2) LLM_UNROLL for (int i = 0; i < SIZE; ++i) {
        if (i & stride) continue;
        const F32 a = x[i], b = x[i + stride];
        x[i] = a + b, x[i + stride] = a - b;
    }
}
template <int SIZE> void spread_columns(float* x, const float* shares) {
    if constexpr (SIZE <= IN_REGISTERS) {
        F32 columns[SIZE];
        LLM_UNROLL for (int i = 0; i < SIZE; ++i) columns[i] = load(x + i * LANES);
        spread<SIZE>(columns, shares);
        LLM_UNROLL for (int i = 0; i < SIZE; ++i) store(x + i * LANES, columns[i]);
    } else {
        constexpr int half = SIZE / 2;
        float* second = x + half * LANES;
        const auto sums_and_differences = [=] {
            for (int i = 0; i < half * LANES; i += LANES) {
                const F32 a = load(x + i), b = load(second + i);
                store(x + i, a + b), store(second + i, a - b);
            }
        };
        sums_and_differences();
        spread_columns<half>(x, shares), spread_columns<half>(second, shares + half);
        sums_and_differences();
    }
}

// One block of two tiles of sixteen rows, which are divided by their scales, on two levels of scales. Each column waits
// for the one before it, so the tiles are rounded side by side.
struct CompensatedBlock {
    static constexpr int TILES = 2;
    static constexpr int LEAST = 8;  // columns that are in registers, and of which groups have a multiple

    int64_t block, group_size;
    float *x, *codes, *values;  // [TILES][block][16]: codes as `Weight` has them, and what they stand for

    // Calls found(tile, column, level) for each group.
    template <class Found> void round(const float* shares, const Found& found) {
        switch (block) {
            case 16: return columns<16>(0, shares, found);
            case 32: return columns<32>(0, shares, found);
            case 64: return columns<64>(0, shares, found);
            case 128: return columns<128>(0, shares, found);
            default: return columns<256>(0, shares, found);
        }
    }

    WholeSteps::Grid grids[TILES] = {{set1(1.0f), zero()}, {set1(1.0f), zero()}};  // of the group that is rounded
    using Few = F32[TILES][LEAST];

    template <int SIZE, class Found> void columns(int64_t first, const float* shares, const Found& found) {
        if (SIZE == group_size)
            for (int tile = 0; tile < TILES; ++tile) {
                const int64_t at = (tile * block + first) * LANES;
                const WholeSteps::Level level = WholeSteps()({x + at, SIZE}, {codes + at});
                grids[tile] = WholeSteps::Grid(level.step, level.place);
                found(tile, first, level);
            }
        if constexpr (SIZE == LEAST) {
            Few in, out;
            LLM_UNROLL for (int i = 0; i < TILES * SIZE; ++i)
                in[i / SIZE][i % SIZE] = load(x + (i / SIZE * block + first + i % SIZE) * LANES);
            few<SIZE, 0>(in, out, codes + first * LANES, shares);
            LLM_UNROLL for (int i = 0; i < TILES * SIZE; ++i)
                store(values + (i / SIZE * block + first + i % SIZE) * LANES, out[i / SIZE][i % SIZE]);
        } else {
            constexpr int half = SIZE / 2;
            alignas(64) float error[TILES][half * LANES];
            for (int tile = 0; tile < TILES; ++tile)
                std::memcpy(error[tile], x + (tile * block + first) * LANES, sizeof error[tile]);
            columns<half>(first, shares + half, found);
            for (int tile = 0; tile < TILES; ++tile) {
                float *own = error[tile], *second = x + (tile * block + first + half) * LANES;
                const float* rounded = values + (tile * block + first) * LANES;
                if constexpr (half <= IN_REGISTERS) {
                    F32 moved[half];
                    LLM_UNROLL for (int i = 0; i < half; ++i)
                        moved[i] = load(own + i * LANES) - load(rounded + i * LANES);
                    spread<half>(moved, shares);
                    LLM_UNROLL for (int i = 0; i < half; ++i)
                        store(second + i * LANES, load(second + i * LANES) - moved[i]);
                } else {
                    for (int i = 0; i < half * LANES; i += LANES) store(own + i, load(own + i) - load(rounded + i));
                    spread_columns<half>(own, shares);
                    for (int i = 0; i < half * LANES; i += LANES) store(second + i, load(second + i) - load(own + i));
                }
            }
            columns<half>(first + half, shares + half + shares_in(half), found);
        }
    }
    // `SIZE` columns of each tile from column `FIRST` of those in registers on.
    template <int SIZE, int FIRST> LLM_INLINE void few(Few& in, Few& out, float* to, const float* shares) const {
        if constexpr (SIZE == 1) {
            LLM_UNROLL for (int tile = 0; tile < TILES; ++tile) {
                const WholeSteps::Grid& grid = grids[tile];
                const F32 code = grid.code(in[tile][FIRST] + grid.shift);
                store(to + (tile * block + FIRST) * LANES, code - set1(8.0f));
                out[tile][FIRST] = code * grid.step - grid.shift;
            }
        } else {
            constexpr int half = SIZE / 2;
            F32 error[TILES][half];
            LLM_UNROLL for (int i = 0; i < TILES * half; ++i)
                error[i / half][i % half] = in[i / half][FIRST + i % half];
            few<half, FIRST>(in, out, to, shares + half);
            LLM_UNROLL for (int tile = 0; tile < TILES; ++tile) {
                LLM_UNROLL for (int i = 0; i < half; ++i) error[tile][i] = error[tile][i] - out[tile][FIRST + i];
                spread<half>(error[tile], shares);
                LLM_UNROLL for (int i = 0; i < half; ++i)
                    in[tile][FIRST + half + i] = in[tile][FIRST + half + i] - error[tile][i];
            }
            few<half, FIRST + half>(in, out, to, shares + half + shares_in(half));
        }
    }
};

// What is wrong with a weight: bits.
constexpr int64_t NOT_FINITE = 1, BEYOND_RANGE = 2;
// Elements whose sums of squares are float32.
constexpr int64_t SUMMED = 256;
// Rows whose squares are summed at once, and what a row's largest magnitude is counted as: sums have 31 bits.
constexpr int64_t SUMMED_ROWS = 128;
constexpr float LARGEST_SHARE = 2047.0f;
// Scales of rows are larger.
constexpr float LEAST_DIVISOR = 0x1p-100f;
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
    double* energies;            // of each row, or of each 16 groups: the sums of W^2 and of its error's squares
    const float* input_squares;  // of TWO_LEVELS: [k], or null
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
    const float* shares_;                   // of all blocks, where errors are compensated; else null
    const int64_t per_row_, rows_, lanes_;  // rows_ at a time, with the groups of so many lanes

    int64_t tile() const { return tile_floats(job_.group_size); }
    // The row as floats, and its scale; 0: it holds a value that is not finite.
    float read(int64_t row, float* x) const {
        for (int64_t i = 0; i < job_.k; i += LANES)
            store_part(x + i, load_part(src_ + row * job_.k + i, job_.k - i), job_.k - i);
        if (job_.rotation) rotate_row(x, x, job_.k, job_.rotation);
        const float largest = largest_magnitude(x, job_.k), scale = largest / 127.0f;
        if (!(largest <= std::numeric_limits<float>::max())) return 0.0f;
        return scale > LEAST_DIVISOR ? scale : 1.0f;
    }

  public:
    LeveledRows(const Job& job, const T* src, const float* shares)
        : job_(job), src_(src), shares_(shares), per_row_(job.k / job.group_size),
          rows_(shares ? CompensatedBlock::TILES * LANES : max(1, min(LANES, 4 * TASK_ELEMENTS / max(1, job.k)))),
          lanes_(ceil_div(rows_ * per_row_, LANES) * LANES) {}
    int64_t tasks() const { return ceil_div(job_.n, rows_); }
    int64_t scratch_bytes() const {
        if (shares_)
            return (tile_floats(job_.k) / LANES + 5 * CompensatedBlock::TILES * tile_floats(job_.rotation)) *
                   sizeof(float);
        return (rows_ * job_.k + LANES + 2 * tile() + lanes_) * sizeof(float);
    }
    int64_t run(int64_t task, char* scratch) const {
        return shares_ ? run_blocks(task, scratch) : run_groups(task, scratch);
    }

  private:
    // Tiles of sixteen rows side by side, a block of rotated columns after the other.
    int64_t run_blocks(int64_t task, char* scratch) const {
        constexpr int64_t tiles = CompensatedBlock::TILES, rows = tiles * LANES;
        const int64_t first = task * rows, count = min(rows, job_.n - first), block = job_.rotation;
        const int64_t size = tiles * tile_floats(block), tile = block * LANES;
        float *row = reinterpret_cast<float*>(scratch), *in_rows = row + tile_floats(job_.k) / LANES;
        float *x = in_rows + size, *original = x + size, *codes = original + size, *values = codes + size;
        int8_t* bytes = reinterpret_cast<int8_t*>(in_rows);
        uint8_t* levels = reinterpret_cast<uint8_t*>(job_.minimum) + first * per_row_;
        alignas(64) float scales[rows];
        for (int64_t r = 0; r < rows; ++r) scales[r] = r < count ? read(first + r, row) : 1.0f;
        for (int64_t r = 0; r < count; ++r) {
            if (scales[r] == 0.0f) return NOT_FINITE;
            job_.scale[first + r] = scales[r];
        }
        CompensatedBlock of{block, job_.group_size, x, codes, values};
        double signal = 0, noise = 0;
        for (int64_t start = 0; start < job_.k; start += block) {
            for (int64_t r = 0; r < count; ++r) {
                const T* from = src_ + (first + r) * job_.k + start;
                float* to = in_rows + r * block;
                for (int64_t i = 0; i < block; i += LANES) store(to + i, load(from + i));
                rotate_row(to, to, block, block);
                for (int64_t i = 0; i < block; i += LANES) store(to + i, load(to + i) / set1(scales[r]));
            }
            for (int64_t t = 0; t < tiles; ++t)
                GroupTile{x + t * tile, block}.read(in_rows + t * tile, max(0, min(LANES, count - t * LANES)));
            std::memcpy(original, x, size * sizeof(float));
            of.round(shares_ + start / block * shares_in(block), [&](int64_t t, int64_t at, WholeSteps::Level found) {
                alignas(16) int8_t level[LANES];
                store_int8(level, found.byte());
                for (int64_t r = t * LANES; r < min((t + 1) * LANES, count); ++r)
                    levels[r * per_row_ + (start + at) / job_.group_size] = static_cast<uint8_t>(level[r % LANES]);
            });
            for (int64_t t = 0; t < tiles; ++t) {
                Energy energy;
                for (int64_t i = t * tile; i < (t + 1) * tile; i += LANES)
                    energy.add(load(original + i), load(original + i) - load(values + i));
                const F32 scale = load(scales + t * LANES);
                signal += sum(energy.squares * (scale * scale)), noise += sum(energy.errors * (scale * scale));
                write_codes(codes + t * tile, bytes + t * tile, block, LANES);
            }
            for (int64_t r = 0; r < count; ++r)
                std::memcpy(job_.q + (first + r) * job_.k + start, bytes + r * block, block);
        }
        job_.energies[2 * first] = signal, job_.energies[2 * first + 1] = noise;
        return 0;
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
    const int64_t block = job.input_squares ? job.rotation : 0, size = shares_in(block);
    const Scratch all(block ? job.k / block * size * sizeof(float) : 0);
    float* shares = all.as<float>();
    if (block)
        parallel_for(job.k / block, job.threads, 3 * block * sizeof(float), [&](int64_t of, char* scratch) {
            float* spectrum = reinterpret_cast<float*>(scratch);
            for (int64_t i = 0; i < block; ++i) spectrum[i] = 1.0f / job.input_squares[of * block + i];
            find_shares(spectrum, block, shares + of * size, spectrum + block);
        });
    const LeveledRows<T> rows(job, src, shares);
    std::atomic<int64_t> refused{0};
    parallel_for(rows.tasks(), job.threads, rows.scratch_bytes(), [&](int64_t task, char* scratch) {
        if (const int64_t reason = rows.run(task, scratch)) refused.fetch_or(reason, std::memory_order_relaxed);
    });
    return refused.load();
}

// `column_squares` of the reference.
template <class T> int64_t column_squares(const T* src, int64_t* sums, int64_t n, int64_t k, int64_t threads) {
    const int64_t width = k + LANES, tasks = ceil_div(n, SUMMED_ROWS);
    const Scratch all(tasks * width * sizeof(int32_t));
    std::atomic<int64_t> refused{0};
    parallel_for(tasks, threads, width * sizeof(float), [&](int64_t task, char* scratch) {
        float* x = reinterpret_cast<float*>(scratch);
        int32_t* own = all.as<int32_t>() + task * width;
        std::memset(own, 0, width * sizeof(int32_t));
        for (int64_t row = task * SUMMED_ROWS; row < min((task + 1) * SUMMED_ROWS, n); ++row) {
            for (int64_t i = 0; i < k; i += LANES) store(x + i, load_part(src + row * k + i, k - i));
            const float largest = largest_magnitude(x, k);
            if (!(largest <= std::numeric_limits<float>::max())) {
                refused.fetch_or(NOT_FINITE, std::memory_order_relaxed);
                return;
            }
            if (!(largest > LEAST_DIVISOR)) continue;
            const F32 units = set1(LARGEST_SHARE / largest);
            for (int64_t i = 0; i < k; i += LANES) {
                const F32 share = round_even(load(x + i) * units);
                store_i(own + i, load_i(own + i) + to_int(share * share));
            }
        }
    });
    std::memset(sums, 0, k * sizeof(int64_t));
    for (int64_t task = 0; task < tasks; ++task)
        for (int64_t i = 0; i < k; ++i) sums[i] += all.as<int32_t>()[task * width + i];
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
// TWO_LEVELS alone. `input_squares` [k] of TWO_LEVELS, or null: mean squares of inputs, for which errors in blocks of
// columns are compensated. Returns 0, or what is wrong with the weight.
LLM_EXPORT int64_t llm_quantize_weight(Kind kind, WeightForm form, const void* src, int8_t* q, float* scale,
                                       float* minimum, double* energies, const float* table, const float* input_squares,
                                       int64_t n, int64_t k, int64_t high, int64_t group_size, int64_t rotation,
                                       int64_t threads) {
    const Job job{q, scale, minimum, energies, input_squares, n, k, group_size, rotation, threads};
    return with_type(kind, [&](auto type) {
        return quantize(form, job, static_cast<float>(high), table,
                        static_cast<const typename decltype(type)::Value*>(src));
    });
}

LLM_KERNEL(llm_quantize_weight)

// src [n, k] -> sums [k] of the squares of columns. Returns 0, or what is wrong with the weight.
LLM_EXPORT int64_t llm_column_squares(Kind kind, const void* src, int64_t* sums, int64_t n, int64_t k,
                                      int64_t threads) {
    return with_type(kind, [&](auto type) {
        return column_squares(static_cast<const typename decltype(type)::Value*>(src), sums, n, k, threads);
    });
}

LLM_KERNEL(llm_column_squares)
