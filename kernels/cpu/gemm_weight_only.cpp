// GEMM y = x W^T (+ bias): float activations and weights with scales, W[n, k] = (w[n, k] - zero[n, g]) * scale[n, g] or
// code[n, k] * scale[n, g] - minimum[n, g] (weight.h), of integers, values of a table or 8-bit floats (codes.h). And
// rows of such weights by id.
//
// Scales are applied to sums, not to weights: of each group of k, a chain of FMAs from +0 adds the products of inputs
// and unscaled values. Then zero point, scale and minimum, in the order of Grid::add, add it to the output's sum; at
// last the bias. For few batch rows, values become float32 in registers just before they are multiplied. Of more, the
// first of a block of row tiles does the same, and leaves the values of a block of k in the cache for the others.
//
// Activations that are rounded to bfloat16 are multiplied in the same order: with vdpbf16ps two k at once, which adds
// their products one after the other, as gemm_bf16.cpp says. Unscaled values are bfloat16 then: they have at most 8
// bits.
#include <cmath>

#include "codes.h"
#include "quantize.h"
#include "rows.h"

namespace llm {
namespace {

#if LLM_AVX512
constexpr int TILE_PANELS = 2;
#else
constexpr int TILE_PANELS = 1;
#endif
constexpr int64_t BLOCK_WORDS = 256;      // of the values of an output channel in the cache
constexpr int64_t BLOCK_BYTES = 1 << 20;  // activations of one block of row tiles
constexpr int64_t PREFETCH_BYTES = 2048;

LLM_INLINE const uint8_t* panel_at(const Product& p, int64_t index) {
    return static_cast<const uint8_t*>(p.data) + index * panel_bytes(p.kind, p.k);
}

// What is subtracted: nothing, a zero point before the integer is scaled, or a minimum after.
enum class Form { PLAIN, ZEROS, MINIMA };

// What 32 bits of inputs and values hold, a word: a float, or of a product with vdpbf16ps a pair of bfloat16, the even
// k in the upper half.
enum class Word { FLOAT, PAIR };
constexpr int depth_of(Word word) { return word == Word::PAIR ? 2 : 1; }

// A product, its inputs in words and, where zero points or minima need them, the sums of each batch row's inputs by
// group [m][groups]. Of pairs every group is of whole steps.
template <Form FORM, Word WORD> struct Call : Product {
    static constexpr int64_t DEPTH = depth_of(WORD), BLOCK_K = BLOCK_WORDS * DEPTH;
    int64_t groups, words;  // of a row
    Scratch pairs_memory, sums_memory;

    Call(const Product& product, int64_t threads)
        : Product(product), groups(ceil_div(k, group_size)), words(k / DEPTH),
          pairs_memory(WORD == Word::FLOAT ? 0 : m * words * sizeof(float)),
          sums_memory(FORM == Form::PLAIN ? 0 : m * groups * sizeof(float)) {
        if constexpr (FORM == Form::PLAIN && WORD == Word::FLOAT) return;
        for_rows(m, k, threads, [&](int64_t row) {
            if constexpr (FORM != Form::PLAIN) add_inputs(x + row * k, sums_memory.as<float>() + row * groups);
#if LLM_BF16
            if constexpr (WORD == Word::PAIR) round_pairs(x + row * k, k, pairs_memory.as<float>() + row * words);
#endif
        });
        if constexpr (WORD == Word::PAIR) x = pairs_memory.as<float>();
    }
    LLM_INLINE const float* words_of(int64_t row, int64_t first) const { return x + row * words + first / DEPTH; }
    LLM_INLINE F32 inputs(int64_t row, int64_t group) const {
        return FORM == Form::PLAIN ? llm::zero() : set1(sums_memory.as<float>()[row * groups + group]);
    }
    // The first output channel of a panel; past the last panel, of the last.
    LLM_INLINE int64_t column_of(int64_t panel) const { return min(panel, panels() - 1) * LANES; }

  private:
    void add_inputs(const float* row, float* out) const {
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t first = group * group_size, end = min(first + group_size, k);
            F32 total = llm::zero();
            for (int64_t at = first; at < end; at += LANES) {
                const F32 part = load_part(row + at, end - at);
#if LLM_BF16
                total = total + (WORD == Word::PAIR ? rounded(part) : part);
#else
                total = total + part;
#endif
            }
            out[group] = sum(total);
        }
    }
};

// What codes are counted from, below the integers.
template <Code CODE> constexpr float LEAST = CODE == Code::INT8 ? 16 : 8;

// A group's scales, and zero points or minima, of 16 output channels. code * scale - minimum is also integer * scale -
// (minimum - LEAST * scale), where both terms are small.
template <Form FORM> struct Grid {
    F32 scale, shift;

    // `subtracted`: zero points or minima.
    template <Code CODE> static LLM_INLINE Grid of(F32 scale, F32 subtracted) {
        Grid grid{scale * set1(1 / FACTOR<CODE>), zero()};
        if constexpr (FORM == Form::ZEROS) grid.shift = subtracted * set1(-FACTOR<CODE>);
        if constexpr (FORM == Form::MINIMA) grid.shift = fma(scale, set1(LEAST<CODE>), zero() - subtracted);
        return grid;
    }
    static LLM_INLINE Groups subtracted(const Product& p) { return FORM == Form::ZEROS ? p.zeros() : p.minima(); }
    template <Code CODE, int PANELS>
    static LLM_INLINE void load(const Product& p, int64_t group, const int64_t (&columns)[PANELS],
                                Grid (&grids)[PANELS]) {
        F32 scales[PANELS], others[PANELS] = {};
        p.scales().load(group, columns, p.n, scales);
        if constexpr (FORM != Form::PLAIN) subtracted(p).load(group, columns, p.n, others);
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) grids[c] = of<CODE>(scales[c], others[c]);
    }
    // In memory: [2][16].
    static LLM_INLINE Grid kept(const float* at) {
        return {llm::load(at), FORM == Form::PLAIN ? zero() : llm::load(at + LANES)};
    }
    LLM_INLINE void keep(float* at) const {
        store(at, scale);
        if constexpr (FORM != Form::PLAIN) store(at + LANES, shift);
    }
    // They come from memory one line at a time.
    static LLM_INLINE void fetch(const Product& p, int64_t group, int64_t column, int panels) {
        p.scales().fetch(group, column, panels);
        if constexpr (FORM != Form::PLAIN) subtracted(p).fetch(group, column, panels);
    }
    // `part` is the group's sum of products, `inputs` that of its inputs.
    LLM_INLINE F32 add(F32 total, F32 part, F32 inputs) const {
        if constexpr (FORM == Form::PLAIN) return fma(part, scale, total);
        if constexpr (FORM == Form::ZEROS) return fma(fma(inputs, shift, part), scale, total);
        return fma(inputs, shift, fma(part, scale, total));
    }
};

// Of many rows gcc would compute the offset of each row and k before the loop, and load them from its stack one by one.
template <int ROWS> LLM_INLINE const float* computed_here(const float* p) {
    if constexpr (ROWS > 2) asm("" : "+r"(p));
    return p;
}

// Word J of a step's values, and part + the products of 16 words with an input's.
template <Word WORD, int J, Code CODE> LLM_INLINE F32 word_of(const Opened<CODE>& opened) {
#if LLM_BF16
    if constexpr (WORD == Word::PAIR) return opened.template pair<J>();
#endif
    return opened.template value<J>();
}
template <Word WORD> LLM_INLINE F32 add_products(F32 input, F32 values, F32 part) {
#if LLM_BF16
    if constexpr (WORD == Word::PAIR)
        return {_mm512_dpbf16_ps(part.v, (__m512bh)as_int(values).v, (__m512bh)as_int(input).v)};
#endif
    return fma(input, values, part);
}

// part += x w of one step; with KEEPS its values are left in `kept` [words of a step][PANELS][16].
template <Code CODE, Word WORD, int ROWS, int PANELS, bool KEEPS = false>
LLM_INLINE void add_step(const float* a, int64_t stride, const uint8_t* const (&b)[PANELS], int64_t s,
                         const Lookup<CODE>& lookup, F32 (&part)[ROWS][PANELS], float* kept = nullptr) {
    constexpr std::make_integer_sequence<int, step_of(CODE) / depth_of(WORD)> all{};
#if LLM_AVX512
    // Panels side by side: a broadcast input is used at once, or gcc keeps those of a whole panel and spills.
    for_each([&](auto j) {
        constexpr int J = decltype(j)::value;
        F32 w[PANELS];
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
            w[c] = word_of<WORD, J>(Opened<CODE>(b[c] + s * STEP_BYTES, lookup));
            if (KEEPS) store(kept + (J * PANELS + c) * LANES, w[c]);
        }
        const float* at = computed_here<ROWS>(a + J);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const F32 value = set1(at[r * stride]);
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) part[r][c] = add_products<WORD>(value, w[c], part[r][c]);
        }
    }, all);
#else
    LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
        const Opened<CODE> opened(b[c] + s * STEP_BYTES, lookup);
        for_each([&](auto j) {
            constexpr int J = decltype(j)::value;
            const F32 w = word_of<WORD, J>(opened);
            if (KEEPS) store(kept + (J * PANELS + c) * LANES, w);
            const float* at = computed_here<ROWS>(a + J);
            LLM_UNROLL for (int r = 0; r < ROWS; ++r)
                part[r][c] = add_products<WORD>(set1(at[r * stride]), w, part[r][c]);
        }, all);
    }
#endif
}

// Prefetches the scales of a later group of the same panels, past their last group those of the panels read next. The
// next panels' scales alone would wait in the cache for a whole panel, and be a page or more from each other.
template <Form FORM, Word WORD, int PANELS>
LLM_INLINE void fetch_scales(const Call<FORM, WORD>& p, int64_t group, const int64_t (&columns)[PANELS]) {
    const bool next = group >= p.groups;
    Grid<FORM>::fetch(p, next ? group - p.groups : group, columns[0] + (next ? PANELS * LANES : 0), PANELS);
}

// How many groups ahead of their use scales are prefetched: as many k as codes are.
template <Code CODE, Form FORM, Word WORD> LLM_INLINE int64_t groups_ahead(const Call<FORM, WORD>& p) {
    return min(p.groups, max(1, PREFETCH_BYTES / STEP_BYTES * step_of(CODE) / p.group_size));
}

// Whether every group is of whole steps.
template <Code CODE> bool has_whole_steps(const Weight& weight) {
    constexpr int STEP = step_of(CODE);
    return weight.k % STEP == 0 && (weight.group_size % STEP == 0 || weight.group_size >= weight.k);
}

#if !defined(LLM_PLAIN)

#if LLM_AVX512
constexpr int FEW_ROWS = 12;
constexpr int panels_for(int rows) { return rows <= 2 ? 4 : 2; }
#elif LLM_NEON
constexpr int FEW_ROWS = 6;
constexpr int panels_for(int rows) { return rows == 1 ? 2 : 1; }
#else
constexpr int FEW_ROWS = 6;
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif

// Few batch rows, whole steps in every group: values go from memory straight to the FMA.
template <Code CODE, int ROWS, Form FORM, Word WORD>
__attribute__((noinline)) void few_rows(const Call<FORM, WORD>& p, int64_t row, int64_t panel) {
    constexpr int PANELS = panels_for(ROWS), STEP = step_of(CODE);
    const Lookup<CODE> lookup(p);
    const uint8_t* b[PANELS];
    int64_t columns[PANELS];
    F32 total[ROWS][PANELS];
    LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
        columns[c] = p.column_of(panel + c);
        b[c] = panel_at(p, columns[c] / LANES);
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < PANELS; ++c) total[r][c] = zero();
    const int64_t steps = p.k / STEP, group_steps = p.group_size / STEP;
    const Ahead ahead(PREFETCH_BYTES, STEP_BYTES, steps, PANELS, panel_bytes(p.kind, p.k));
    const int64_t scales_ahead = groups_ahead<CODE>(p);
    for (int64_t s = 0, group = 0; s < steps; ++group) {
        F32 part[ROWS][PANELS];
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < PANELS; ++c) part[r][c] = zero();
        fetch_scales(p, group + scales_ahead, columns);
        for (const int64_t end = min(steps, s + group_steps); s < end; ++s) {
            const int64_t distance = ahead.distance(s);
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) prefetch(b[c] + s * STEP_BYTES + distance);
            add_step<CODE, WORD, ROWS, PANELS>(p.words_of(row, s * STEP), p.words, b, s, lookup, part);
        }
        Grid<FORM> grids[PANELS];
        Grid<FORM>::template load<CODE>(p, group, columns, grids);
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) LLM_UNROLL for (int r = 0; r < ROWS; ++r)
            total[r][c] = grids[c].add(total[r][c], part[r][c], p.inputs(row + r, group));
    }
    LLM_UNROLL for (int c = 0; c < PANELS; ++c)
        p.store_outputs(row, ROWS, columns[c], [&](int64_t r) { return total[r][c]; });
}

template <Code CODE, Form FORM, Word WORD> void few_rows(const Call<FORM, WORD>& p, const Tasks& tasks) {
    tasks.run([&](int64_t tile, int64_t panel, int64_t end) {
        with_rows(tasks.rows(tile), [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            if constexpr (ROWS <= FEW_ROWS)
                for (; panel < end; panel += panels_for(ROWS)) few_rows<CODE, ROWS>(p, tasks.first_row(tile), panel);
        });
    });
}

#endif

// Widens a panel's values of k in [first, end) into out [end - first][TILE_PANELS][16].
template <Code CODE>
void widen_block(const Product& p, const Lookup<CODE>& lookup, int64_t panel, int64_t first, int64_t end, float* out) {
    constexpr int STEP = step_of(CODE);
    constexpr int64_t ROW = TILE_PANELS * LANES;
    for (int64_t k = first; k < end;) {
        const uint8_t* at = panel_at(p, panel) + k / STEP * STEP_BYTES;
        prefetch(at + PREFETCH_BYTES);
        const Opened<CODE> opened(at, lookup);
        const int64_t count = min(STEP, end - k);
        for_each([&](auto j) {
            constexpr int J = decltype(j)::value;
            if (J < count) store(out + (k - first + J) * ROW, opened.template value<J>());
        }, std::make_integer_sequence<int, STEP>{});
        k += count;
    }
}

// TILE_PANELS panels of a weight as codes, of which the first row tile of a block makes values.
template <Code CODE, Form FORM, Word WORD> struct Codes {
    const Call<FORM, WORD>& p;
    const Lookup<CODE> lookup;
    const Ahead ahead;
    const int64_t scales_ahead;
    const uint8_t* panels[TILE_PANELS];
    int64_t columns[TILE_PANELS];

    Codes(const Call<FORM, WORD>& product, int64_t panel)
        : p(product), lookup(p),
          ahead(PREFETCH_BYTES, STEP_BYTES, p.k / step_of(CODE), TILE_PANELS, panel_bytes(p.kind, p.k)),
          scales_ahead(groups_ahead<CODE>(p)) {
        for (int c = 0; c < TILE_PANELS; ++c) {
            columns[c] = p.column_of(panel + c);
            panels[c] = panel_at(p, columns[c] / LANES);
        }
    }
    LLM_INLINE void begin(int64_t group) const { fetch_scales(p, group + scales_ahead, columns); }
    // part += x w of whole steps, k in [first, end); their values are left in `values` [words][TILE_PANELS][16].
    template <int ROWS>
    LLM_INLINE void add_run(const float* x, int64_t first, int64_t end, float* values,
                            F32 (&part)[ROWS][TILE_PANELS]) const {
        constexpr int STEP = step_of(CODE), WORDS = STEP / depth_of(WORD);
        for (int64_t s = first / STEP; s < end / STEP; ++s, x += WORDS, values += WORDS * TILE_PANELS * LANES) {
            const int64_t distance = ahead.distance(s);
            LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c) prefetch(panels[c] + s * STEP_BYTES + distance);
            add_step<CODE, WORD, ROWS, TILE_PANELS, true>(x, p.words, panels, s, lookup, part, values);
        }
    }
};

// The values that were left, for the other row tiles.
template <Form FORM, Word WORD> struct Kept {
    const Call<FORM, WORD>& p;

    LLM_INLINE void begin(int64_t) const {}
    template <int ROWS>
    LLM_INLINE void add_run(const float* x, int64_t first, int64_t end, const float* values,
                            F32 (&part)[ROWS][TILE_PANELS]) const {
        constexpr int AT_ONCE = 4;
        const int64_t count = (end - first) / p.DEPTH;
        const auto add = [&](int64_t word) {
            F32 value[TILE_PANELS];
            LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c) value[c] = load(values + (word * TILE_PANELS + c) * LANES);
            const float* at = computed_here<ROWS>(x + word);
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                const F32 input = set1(at[r * p.words]);
                LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c)
                    part[r][c] = add_products<WORD>(input, value[c], part[r][c]);
            }
        };
        int64_t word = 0;
        for (; word + AT_ONCE <= count; word += AT_ONCE) LLM_UNROLL for (int i = 0; i < AT_ONCE; ++i) add(word + i);
        for (; word < count; ++word) add(word);
    }
};

// A tile's totals [ROWS][TILE_PANELS][16] += the products of k in [first, end), of Codes or of values that were Kept
// [words][TILE_PANELS][16]. A group that began before goes on from `parts`, and one that does not end here is left
// there. grids [groups of this k][TILE_PANELS][2][16].
template <int ROWS, class Source, Form FORM, Word WORD>
__attribute__((noinline)) void accumulate(const Call<FORM, WORD>& p, const Source& source, int64_t row, int64_t first,
                                          int64_t end, float* values, const float* grids, float* totals, float* parts) {
    for (int64_t k = first, group = first / p.group_size; k < end; ++group, grids += TILE_PANELS * 2 * LANES) {
        const int64_t whole = min(p.k, (group + 1) * p.group_size), stop = min(end, whole);
        const bool begins = k == group * p.group_size;
        F32 part[ROWS][TILE_PANELS];
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c)
            part[r][c] = begins ? zero() : load(parts + (r * TILE_PANELS + c) * LANES);
        if (begins) source.begin(group);
        source.template add_run<ROWS>(p.words_of(row, k), k, stop, values + (k - first) / p.DEPTH * TILE_PANELS * LANES,
                                      part);
        if (stop < whole) {
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c)
                store(parts + (r * TILE_PANELS + c) * LANES, part[r][c]);
            return;
        }
        Grid<FORM> grid[TILE_PANELS];
        LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c) grid[c] = Grid<FORM>::kept(grids + c * 2 * LANES);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const F32 inputs = p.inputs(row + r, group);
            LLM_UNROLL for (int c = 0; c < TILE_PANELS; ++c) {
                float* total = totals + (r * TILE_PANELS + c) * LANES;
                store(total, grid[c].add(load(total), part[r][c], inputs));
            }
        }
        k = stop;
    }
}

// One block of row tiles with TILE_PANELS panels.
template <Code CODE, Form FORM, Word WORD>
void block(const Call<FORM, WORD>& p, const Tasks& tasks, int64_t first_tile, int64_t end_tile, int64_t panel,
           float* memory) {
    constexpr int64_t ROW = TILE_PANELS * LANES;
    const int64_t first_row = tasks.first_row(first_tile), rows = tasks.first_row(end_tile) - first_row;
    const int64_t panels = min(TILE_PANELS, p.panels() - panel);
    float *values = memory, *totals = values + BLOCK_WORDS * ROW;
    float *parts = totals + rows * ROW, *grids = parts + rows * ROW;
    const Codes<CODE, FORM, WORD> codes(p, panel);
    const bool opens = WORD == Word::PAIR || has_whole_steps<CODE>(p);
    std::memset(totals, 0, rows * ROW * sizeof(float));
    for (int64_t first = 0; first < p.k; first += p.BLOCK_K) {
        const int64_t end = min(first + p.BLOCK_K, p.k);
        if (!opens)
            for (int64_t c = 0; c < panels; ++c)
                widen_block<CODE>(p, codes.lookup, panel + c, first, end, values + c * LANES);
        for (int64_t group = first / p.group_size, at = 0; group * p.group_size < end; ++group) {
            Grid<FORM> found[TILE_PANELS];
            Grid<FORM>::template load<CODE>(p, group, codes.columns, found);
            for (int c = 0; c < TILE_PANELS; ++c, at += 2 * LANES) found[c].keep(grids + at);
        }
        for (int64_t tile = first_tile; tile < end_tile; ++tile)
            with_rows(tasks.rows(tile), [&](auto height) {
                constexpr int ROWS = decltype(height)::value;
                const int64_t row = tasks.first_row(tile), at = (row - first_row) * ROW;
                if (opens && tile == first_tile)
                    accumulate<ROWS>(p, codes, row, first, end, values, grids, totals + at, parts + at);
                else accumulate<ROWS>(p, Kept<FORM, WORD>{p}, row, first, end, values, grids, totals + at, parts + at);
            });
    }
    for (int64_t c = 0; c < panels; ++c)
        p.store_outputs(first_row, rows, (panel + c) * LANES,
                        [&](int64_t r) { return load(totals + r * ROW + c * LANES); });
}

// vdpbf16ps takes six cycles, a fused multiply-add four.
template <Word WORD> constexpr int64_t LEAST_ROWS = WORD == Word::PAIR ? 6 : 4;

template <Code CODE, Form FORM, Word WORD> void multiply(const Call<FORM, WORD>& p, int64_t threads) {
    const Tasks tasks(p.m, p.n, MAX_ROWS, 0, 0, threads, LEAST_ROWS<WORD>);
#if !defined(LLM_PLAIN)
    if (p.m <= FEW_ROWS && has_whole_steps<CODE>(p)) return few_rows<CODE>(p, tasks);
#endif
    const int64_t fitting = BLOCK_BYTES / (p.words * static_cast<int64_t>(sizeof(float)) * MAX_ROWS + 1);
    const int64_t block_tiles = min(max(8, fitting), tasks.tiles());
    const int64_t groups = ceil_div(p.panels(), TILE_PANELS), blocks = ceil_div(tasks.tiles(), block_tiles);
    const int64_t lines = BLOCK_WORDS + 2 * block_tiles * MAX_ROWS + 2 * (p.BLOCK_K / p.group_size + 2);
    const int64_t scratch = lines * TILE_PANELS * LANES * sizeof(float);
    parallel_for(groups * blocks, threads, scratch, [&](int64_t task, char* memory) {
        const int64_t first = task / groups * block_tiles, end = min(first + block_tiles, tasks.tiles());
        block<CODE>(p, tasks, first, end, task % groups * TILE_PANELS, reinterpret_cast<float*>(memory));
    });
}

// Calls call(code, form) with constants: what the weight's codes stand for, and what is subtracted.
template <class Function> void with_code(const Weight& weight, const Function& call) {
    constexpr std::integral_constant<Form, Form::PLAIN> plain;
    const auto of_integers = [&](auto code) {
        if (weight.zero) call(code, std::integral_constant<Form, Form::ZEROS>{});
        else if (weight.minimum) call(code, std::integral_constant<Form, Form::MINIMA>{});
        else call(code, plain);
    };
    if (weight.kind == Kind::FLOAT8) return call(std::integral_constant<Code, Code::FLOAT8>{}, plain);
    if (weight.kind == Kind::INT8) return of_integers(std::integral_constant<Code, Code::INT8>{});
    if (!weight.table) return of_integers(std::integral_constant<Code, Code::INT4>{});
#if LLM_AVX2
    if (looks_up_bytes(weight)) return call(std::integral_constant<Code, Code::WHOLES>{}, plain);
#endif
    call(std::integral_constant<Code, Code::TABLE>{}, plain);
}

// The value of output channel `lane` of a panel at k, before anything is subtracted or scaled.
template <Code CODE> LLM_INLINE float value_at(const Product& p, const uint8_t* panel, int64_t lane, int64_t k) {
    if constexpr (CODE == Code::FLOAT8) {
        return widen(F8{panel[k * LANES + lane]});
    } else {
        constexpr int STEP = step_of(CODE);
        const uint8_t byte = panel[k / STEP * STEP_BYTES + lane * 4 + k % 4];
        if constexpr (is_nibble(CODE)) return nibble_value<CODE>(p, k % STEP < 4 ? byte & 15 : byte >> 4);
        return static_cast<float>(static_cast<int8_t>(byte));
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
                out[k] = std::fmaf(value + LEAST<CODE>, scale, -p.minima().at(group, row));
            else if constexpr (FORM == Form::ZEROS) out[k] = (value - p.zeros().at(group, row)) * scale;
            else out[k] = value * scale;
        }
    }
}

}  // namespace

void linear_weight_only(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads) {
    if (m == 0) return;
    const bool rounds = weight.activations == Activations::BFLOAT16;
    with_code(weight, [&](auto code, auto form) {
        constexpr Code CODE = decltype(code)::value;
        constexpr Form FORM = decltype(form)::value;
#if LLM_BF16
        if (rounds && has_whole_steps<CODE>(weight))
            return multiply<CODE>(Call<FORM, Word::PAIR>(Product{weight, x, y, m}, threads), threads);
#endif
        const Scratch memory(rounds ? m * weight.k * sizeof(float) : 0);
        if (rounds) round_rows(x, m, weight.k, memory.as<float>(), threads);
        const Product product{weight, rounds ? memory.as<float>() : x, y, m};
        multiply<CODE>(Call<FORM, Word::FLOAT>(product, threads), threads);
    });
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
