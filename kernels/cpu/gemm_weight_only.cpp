// GEMM y = x W^T (+ bias): float32 activations and weights with scales, W[n, k] = (w[n, k] - zero[n, g]) * scale[n, g]
// or code[n, k] * scale[n, g] - minimum[n, g] (weight.h), of integers, values of a table or 8-bit floats (codes.h). And
// rows of such weights by id.
//
// Each output is one chain of FMAs from +0 over k = 0 ... K-1, then the bias, as with a float weight. For few batch
// rows, weights become float32 in registers just before they are multiplied. For more, a block of k is widened once
// into the L2 cache and shared by a block of row tiles.
#include <cmath>

#include "exact_scales.h"

namespace llm {
namespace {

#if LLM_AVX512
constexpr int TILE_PANELS = 2;
#else
constexpr int TILE_PANELS = 1;
#endif
constexpr int64_t BLOCK_K = 256;          // k of the float weights in the L2 cache
constexpr int64_t BLOCK_BYTES = 1 << 20;  // activations of one block of row tiles
constexpr int64_t PREFETCH_BYTES = 2048;

template <Code CODE> LLM_INLINE int64_t steps_of(const Product& p) { return ceil_div(p.k, step_of(CODE)); }
LLM_INLINE const uint8_t* panel_at(const Product& p, int64_t index) {
    return static_cast<const uint8_t*>(p.data) + index * panel_bytes(p.kind, p.k);
}

// What makes an unsigned code of a value.
template <Code CODE> constexpr int CODE_BIAS = (CODE == Code::INT8 ? 128 : 8) - VALUE_BIAS<CODE>;

// What is subtracted: nothing, a zero point before the integer is scaled, or a minimum after. SCALED_ZEROS: zero points
// whose products with the scales are exact, so that one FMA rounds as the difference and the product would.
enum class Form { PLAIN, ZEROS, SCALED_ZEROS, MINIMA };

// Turns a group's values of 16 output channels into weights. The bias is a power of two, so bias * scale is exact and
// one FMA rounds as the product with the value itself would. Only plain values have a divisor.
template <Code CODE, Form FORM> struct Grid {
    F32 scale, shift;
    LLM_INLINE Grid() : scale(zero()), shift(zero()) {}
    LLM_INLINE void load_group(const Product& p, int64_t group, int64_t column) {
        scale = p.scales().load(group, column, p.n - column);
        if constexpr (VALUE_DIVISOR<CODE> != 1) scale = scale * set1(VALUE_DIVISOR<CODE>);
        if constexpr (FORM == Form::ZEROS || FORM == Form::SCALED_ZEROS)
            shift = p.zeros().load(group, column, p.n - column);
        if constexpr (FORM == Form::ZEROS) return;
        if constexpr (FORM == Form::SCALED_ZEROS)
            shift = zero() - (VALUE_BIAS<CODE> ? shift + set1(VALUE_BIAS<CODE>) : shift) * scale;
        else if constexpr (FORM == Form::MINIMA) shift = zero() - p.minima().load(group, column, p.n - column);
        else if (VALUE_BIAS<CODE>) shift = scale * set1(-VALUE_BIAS<CODE>);
    }
    // Of a later panel: they come from memory one line at a time.
    LLM_INLINE void fetch_group(const Product& p, int64_t group, int64_t column) const {
        p.scales().fetch(group, column);
        if constexpr (FORM == Form::ZEROS || FORM == Form::SCALED_ZEROS) p.zeros().fetch(group, column);
        if constexpr (FORM == Form::MINIMA) p.minima().fetch(group, column);
    }
    LLM_INLINE F32 weight(F32 value) const {
        if constexpr (FORM == Form::MINIMA)
            return fma(CODE_BIAS<CODE> ? value + set1(CODE_BIAS<CODE>) : value, scale, shift);
        if constexpr (FORM == Form::ZEROS)
            return ((VALUE_BIAS<CODE> ? value - set1(VALUE_BIAS<CODE>) : value) - shift) * scale;
        return VALUE_BIAS<CODE> || FORM == Form::SCALED_ZEROS ? fma(value, scale, shift) : value * scale;
    }
};

#if !defined(LLM_PLAIN)

#if LLM_AVX512
constexpr int FEW_ROWS = 12;
template <Form FORM> constexpr int panels_for(int rows) { return rows <= 2 ? 4 : 2; }
#elif LLM_NEON
constexpr int FEW_ROWS = 6;
template <Form FORM> constexpr int panels_for(int rows) { return rows == 1 ? 2 : 1; }
#else
constexpr int FEW_ROWS = 6;
// Scales and shifts of four panels would not stay in registers.
template <Form FORM> constexpr int panels_for(int rows) {
    return rows == 1 ? (FORM == Form::PLAIN ? 4 : 2) : rows == 2 ? 2 : 1;
}
#endif

// acc += x w of one step.
template <Code CODE, Form FORM, int ROWS, int PANELS>
LLM_INLINE void add_step(const float* a, int64_t stride, const uint8_t* const (&b)[PANELS], int64_t s,
                         const Lookup<CODE>& lookup, const Grid<CODE, FORM> (&grid)[PANELS], F32 (&acc)[ROWS][PANELS]) {
    constexpr std::make_integer_sequence<int, step_of(CODE)> all{};
#if LLM_AVX512
    // Panels side by side: a broadcast input is used at once, or gcc keeps those of a whole panel and spills.
    for_each([&](auto j) {
        constexpr int J = decltype(j)::value;
        F32 w[PANELS];
        LLM_UNROLL for (int c = 0; c < PANELS; ++c)
            w[c] = grid[c].weight(Opened<CODE>(b[c] + s * STEP_BYTES, lookup).template value<J>());
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const F32 value = set1(a[r * stride + J]);
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) acc[r][c] = fma(value, w[c], acc[r][c]);
        }
    }, all);
#else
    LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
        const Opened<CODE> opened(b[c] + s * STEP_BYTES, lookup);
        for_each([&](auto j) {
            constexpr int J = decltype(j)::value;
            const F32 w = grid[c].weight(opened.template value<J>());
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) acc[r][c] = fma(set1(a[r * stride + J]), w, acc[r][c]);
        }, all);
    }
#endif
}

// Few batch rows, whole steps in every group: weights go from memory straight to the FMA.
template <Code CODE, Form FORM, int ROWS>
__attribute__((noinline)) void few_rows(const Product& p, int64_t row, int64_t panel) {
    constexpr int PANELS = panels_for<FORM>(ROWS), STEP = step_of(CODE);
    const Lookup<CODE> lookup(p);
    const uint8_t* b[PANELS];
    F32 acc[ROWS][PANELS];
    // Past the last panel, the last panel is computed again.
    LLM_UNROLL for (int c = 0; c < PANELS; ++c) b[c] = panel_at(p, min(panel + c, p.panels() - 1));
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < PANELS; ++c) acc[r][c] = zero();
    const int64_t steps = steps_of<CODE>(p), group_steps = p.group_size / STEP;
    const Ahead ahead(PREFETCH_BYTES, STEP_BYTES, steps, PANELS, panel_bytes(p.kind, p.k));
    for (int64_t s = 0, group = 0; s < steps; ++group) {
        Grid<CODE, FORM> grid[PANELS];
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
            const int64_t column = min(panel + c, p.panels() - 1) * LANES;
            grid[c].load_group(p, group, column);
            grid[c].fetch_group(p, group, column + PANELS * LANES);
        }
        for (const int64_t end = min(steps, s + group_steps); s < end; ++s) {
            const int64_t distance = ahead.distance(s);
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) prefetch(b[c] + s * STEP_BYTES + distance);
            const float* a = p.x + row * p.k + s * STEP;
            add_step<CODE, FORM, ROWS, PANELS>(a, p.k, b, s, lookup, grid, acc);
        }
    }
    LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
        const int64_t column = min(panel + c, p.panels() - 1) * LANES;
        const F32 biases = p.biases(column);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) p.store_output(row + r, column, acc[r][c], biases);
    }
}

#if LLM_AVX2 || LLM_AVX512
// Whether call(group, column) is 0 for all groups of panels [panel, end).
template <class Call> bool none_of(const Product& p, int64_t panel, int64_t end, const Call& call) {
    uint32_t found = 0;
    for (int64_t group = 0; group < ceil_div(p.k, p.group_size); ++group)
        for (int64_t column = panel * LANES; column < min(end * LANES, p.n); column += LANES)
            found |= call(group, column);
    return !found;
}

// Whether all zero points are whole and have 11 bits, and all scales have 11 bits and leave room for the product.
inline bool zeros_scale(const Product& p, int64_t panel, int64_t end) {
    if (p.scale_kind == Kind::FLOAT32) return false;
    return none_of(p, panel, end, [&](int64_t group, int64_t column) {
        const F32 zeros = p.zeros().load(group, column, p.n - column);
        const F32 scales = p.scales().load(group, column, p.n - column);
        return not_at_most(abs(zeros), set1(0x1p11f)) | not_at_most(abs(zeros - round_even(zeros)), zero()) |
               not_at_most(abs(scales), set1(0x1p100f));
    });
}
#endif

#if LLM_AVX2
// Whether all scales of panels [panel, end) are below `limit`.
inline bool scales_below(const Product& p, int64_t panel, int64_t end, float limit) {
    return none_of(p, panel, end, [&](int64_t group, int64_t column) {
        return not_at_most(p.scales().load(group, column, p.n - column), set1(std::nextafter(limit, 0.0f)));
    });
}
#endif

template <Code CODE, Form FORM> void few_rows(const Product& p, const Tasks& tasks) {
#if LLM_AVX2
    constexpr bool SHORT = FORM == Form::PLAIN && (CODE == Code::INT4 || CODE == Code::WHOLES);
    const bool in_range = SHORT && p.m <= 2 && inputs_in_range(p);
#endif
    tasks.run([&](int64_t tile, int64_t panel, int64_t end) {
        const int64_t row = tasks.first_row(tile);
        with_rows(tasks.rows(tile), [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            if constexpr (ROWS <= FEW_ROWS) {
#if LLM_AVX2
                if constexpr (CODE == Code::FLOAT8)
                    if (scales_below(p, panel, end, SMALL_SCALES)) {
                        for (; panel < end; panel += panels_for<FORM>(ROWS))
                            few_rows<Code::FLOAT8_SMALL, FORM, ROWS>(p, row, panel);
                        return;
                    }
                if constexpr (SHORT && ROWS <= 2) {
                    int64_t pair = panel;
                    const bool narrow = p.scale_kind == Kind::FLOAT16;
                    if (in_range && scales_may_be_short(p, panel))
                        while (pair < end &&
                               (narrow ? exact_rows<CODE, ROWS, true> : exact_rows<CODE, ROWS, false>)(p, pair))
                            pair += 2;
                    if (pair >= end) return;
                }
#endif
#if LLM_AVX2 || LLM_AVX512
                if constexpr (FORM == Form::ZEROS)
                    if (zeros_scale(p, panel, end)) {
                        for (; panel < end; panel += panels_for<Form::SCALED_ZEROS>(ROWS))
                            few_rows<CODE, Form::SCALED_ZEROS, ROWS>(p, row, panel);
                        return;
                    }
#endif
                for (; panel < end; panel += panels_for<FORM>(ROWS)) few_rows<CODE, FORM, ROWS>(p, row, panel);
            }
        });
    });
}

#endif

// Widens a panel's weights of k in [first, end) into out [end - first][TILE_PANELS][16].
template <Code CODE, Form FORM>
void widen_block(const Product& p, int64_t panel, int64_t first, int64_t end, float* out) {
    constexpr int STEP = step_of(CODE);
    constexpr int64_t ROW = TILE_PANELS * LANES;
    const Lookup<CODE> lookup(p);
    const uint8_t* from = panel_at(p, panel);
    for (int64_t k = first; k < end;) {
        const int64_t group = k / p.group_size, stop = min(end, (group + 1) * p.group_size);
        Grid<CODE, FORM> grid;
        grid.load_group(p, group, panel * LANES);
        while (k < stop) {
            const uint8_t* at = from + k / STEP * STEP_BYTES;
            prefetch(at + PREFETCH_BYTES);
            const Opened<CODE> opened(at, lookup);
            const int64_t skip = k % STEP, count = min(STEP, stop - k + skip);
            float* to = out + (k - first - skip) * ROW;
            for_each([&](auto j) {
                constexpr int J = decltype(j)::value;
                if (J >= skip && J < count) store(to + J * ROW, grid.weight(opened.template value<J>()));
            }, std::make_integer_sequence<int, STEP>{});
            k += count - skip;
        }
    }
}

// sums [ROWS][TILE_PANELS][16] += x [ROWS][count] w [count][TILE_PANELS][16]
template <int ROWS>
__attribute__((noinline)) void accumulate(const float* x, int64_t stride, const float* w, int64_t count, float* sums) {
    F32 acc[ROWS][TILE_PANELS];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c)
        acc[r][c] = load(sums + (r * TILE_PANELS + c) * LANES);
    for (int64_t k = 0; k < count; ++k) {
        F32 weight[TILE_PANELS];
        LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c) weight[c] = load(w + (k * TILE_PANELS + c) * LANES);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const F32 value = set1(x[r * stride + k]);
            LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c) acc[r][c] = fma(value, weight[c], acc[r][c]);
        }
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c)
        store(sums + (r * TILE_PANELS + c) * LANES, acc[r][c]);
}

// One block of row tiles with TILE_PANELS panels.
template <Code CODE, Form FORM>
void block(const Product& p, const Tasks& tasks, int64_t first_tile, int64_t end_tile, int64_t panel, float* weights) {
    constexpr int64_t ROW = TILE_PANELS * LANES;
    float* sums = weights + BLOCK_K * ROW;
    const int64_t first_row = tasks.first_row(first_tile), rows = tasks.first_row(end_tile) - first_row;
    const int64_t panels = min(TILE_PANELS, p.panels() - panel);
    std::memset(sums, 0, rows * ROW * sizeof(float));
    for (int64_t first = 0; first < p.k; first += BLOCK_K) {
        const int64_t end = min(first + BLOCK_K, p.k);
        for (int64_t c = 0; c < panels; ++c) widen_block<CODE, FORM>(p, panel + c, first, end, weights + c * LANES);
        for (int64_t tile = first_tile; tile < end_tile; ++tile)
            with_rows(tasks.rows(tile), [&](auto height) {
                const int64_t row = tasks.first_row(tile);
                accumulate<decltype(height)::value>(p.x + row * p.k + first, p.k, weights, end - first,
                                                    sums + (row - first_row) * ROW);
            });
    }
    for (int64_t c = 0; c < panels; ++c) {
        const int64_t column = (panel + c) * LANES;
        const F32 biases = p.biases(column);
        for (int64_t row = 0; row < rows; ++row)
            p.store_output(first_row + row, column, load(sums + row * ROW + c * LANES), biases);
    }
}

template <Code CODE, Form FORM> void multiply(const Product& p, int64_t threads) {
#if !defined(LLM_PLAIN)
    constexpr int STEP = step_of(CODE);
    if (p.m <= FEW_ROWS && p.k % STEP == 0 && (p.group_size % STEP == 0 || p.group_size >= p.k)) {
        // No tile of one or two rows beside another: it takes four panels at once, and a task then has two.
        const Tasks even(p.m, p.n, p.m % 2 ? 6 : MAX_ROWS, 0, 0, threads);
        return few_rows<CODE, FORM>(p, even);
    }
#endif
    const Tasks tasks(p.m, p.n, MAX_ROWS, 0, 0, threads);
    const int64_t fitting = BLOCK_BYTES / (p.k * static_cast<int64_t>(sizeof(float)) * MAX_ROWS + 1);
    const int64_t block_tiles = min(max(8, fitting), tasks.tiles());
    const int64_t groups = ceil_div(p.panels(), TILE_PANELS), blocks = ceil_div(tasks.tiles(), block_tiles);
    const int64_t scratch = (BLOCK_K + block_tiles * MAX_ROWS) * TILE_PANELS * LANES * sizeof(float);
    parallel_for(groups * blocks, threads, scratch, [&](int64_t task, char* memory) {
        const int64_t first = task / groups * block_tiles, end = min(first + block_tiles, tasks.tiles());
        block<CODE, FORM>(p, tasks, first, end, task % groups * TILE_PANELS, reinterpret_cast<float*>(memory));
    });
}

// Calls call(code, form) with constants: what the weight's codes stand for, and what is subtracted.
template <class Call> void with_code(const Weight& weight, const Call& call) {
    const auto with = [&](auto code, auto form) { call(code, form); };
    const auto with_form = [&](auto code) {
        if (weight.zero) with(code, std::integral_constant<Form, Form::ZEROS>{});
        else if (weight.minimum) with(code, std::integral_constant<Form, Form::MINIMA>{});
        else with(code, std::integral_constant<Form, Form::PLAIN>{});
    };
    constexpr std::integral_constant<Form, Form::PLAIN> plain;
    if (weight.kind == Kind::INT8) return with_form(std::integral_constant<Code, Code::INT8>{});
    if (weight.kind == Kind::FLOAT8) return with(std::integral_constant<Code, Code::FLOAT8>{}, plain);
    if (!weight.table) return with_form(std::integral_constant<Code, Code::INT4>{});
#if LLM_AVX2
    if (looks_up_bytes(weight)) return with(std::integral_constant<Code, Code::WHOLES>{}, plain);
#endif
    with(std::integral_constant<Code, Code::TABLE>{}, plain);
}

// The value of output channel `lane` of a panel at k, before anything is subtracted or scaled.
template <Code CODE> LLM_INLINE float value_at(const Product& p, const uint8_t* panel, int64_t lane, int64_t k) {
    if constexpr (CODE == Code::FLOAT8) {
        return widen(F8{panel[k * LANES + lane]});
    } else {
        constexpr int STEP = step_of(CODE);
        const uint8_t byte = panel[k / STEP * STEP_BYTES + lane * 4 + k % 4];
        if constexpr (CODE == Code::INT8) return static_cast<int8_t>(byte);
        const int nibble = k % STEP < 4 ? byte & 15 : byte >> 4;
        if constexpr (CODE == Code::INT4) return static_cast<float>(nibble - 8);
        return p.table[nibble];
    }
}

// Row `row` of the weight [k].
template <Code CODE, Form FORM> void gather_row(const Product& p, int64_t row, float* out) {
    const uint8_t* panel = panel_at(p, row / LANES);
    for (int64_t first = 0, group = 0; first < p.k; first += p.group_size, ++group) {
        const float scale = p.scales().at(group, row);
        for (int64_t k = first; k < min(first + p.group_size, p.k); ++k) {
            const float value = value_at<CODE>(p, panel, row % LANES, k);
            if constexpr (FORM == Form::MINIMA)
                out[k] = std::fmaf(value + (CODE == Code::INT8 ? 128 : 8), scale, -p.minima().at(group, row));
            else if constexpr (FORM == Form::ZEROS) out[k] = (value - p.zeros().at(group, row)) * scale;
            else out[k] = value * scale;
        }
    }
}

}  // namespace

void linear_weight_only(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads) {
    if (m == 0) return;
    const Product p{weight, x, y, m};
    with_code(weight,
              [&](auto code, auto form) { multiply<decltype(code)::value, decltype(form)::value>(p, threads); });
}

void gather_scaled(const Weight& weight, const int64_t* ids, float* y, int64_t count, int64_t threads) {
    const Product p{weight, nullptr, y, count};
    with_code(weight, [&](auto code, auto form) {
        parallel_for(count, threads, 0, [&](int64_t index, char*) {
            gather_row<decltype(code)::value, decltype(form)::value>(p, ids[index], y + index * weight.k);
        });
    });
}

}  // namespace llm
