// Attention over a paged cache, and writing into that cache.
//
// The cache is cut into panels of 16 slots (slot = block * block_size + offset): keys [panels][kv_heads][head_size][16],
// so that the lanes of a vector run along keys, and values [panels][kv_heads][16][head_size], so that they run along
// channels. One more panel than the slots need is allocated and never written: loads of a head size that is no multiple
// of 16 run over the end.
//
// The same bits whatever the batch, the chunks and the threads: the softmax advances KEYS positions at a time, from
// multiples of KEYS counted from position 0; scores are reduced over channels in order, outputs over keys in order, by
// one thread; and a key that a row does not see never takes part in that row's arithmetic.
#include "kv_cache.h"
#include "parallel.h"
#include "replay.h"
#include "rows.h"
#include "vector_math.h"

namespace llm {
namespace {

// Part of the definition of the result: another number gives other bits.
constexpr int KEYS = 64, PANELS = KEYS / LANES;
constexpr int64_t LINE = 64;  // bytes that the caches move together
// Query rows (a token and a head) that share the keys of a task.
constexpr int64_t TASK_ROWS = 48;
#if LLM_PLAIN
constexpr int MAX_TILE_ROWS = 2;  // a compiler without vectors takes long over large tiles
#else
constexpr int MAX_TILE_ROWS = 6;
#endif

// Rows of the next tile when `left` remain.
LLM_INLINE int64_t tile_rows(int64_t left) {
    if (left >= MAX_TILE_ROWS) return MAX_TILE_ROWS;
#if LLM_AVX2
    if (left == 3) return 2;  // 3 x 2 vectors do not fit the registers, 3 x 1 do not fill the multiplier
#endif
    return left;
}

// One step's rows. Row r owns tokens starts[r] : starts[r + 1], the last of its lengths[r] positions.
struct Step {
    const int32_t *table, *starts, *lengths;
    int64_t rows, table_width, block_size, slots;
};

struct Layer {
    int64_t heads, kv_heads, head_size, window;  // window 0: none
    float scale, soft_cap;                       // soft_cap 0: none
    const float* sinks;                          // per head, or null
    int64_t group() const { return heads / kv_heads; }
};

// Tokens first : end of one row, and the heads first_head : end_head of one group.
struct Task {
    int64_t row, first, end, kv_head, first_head, end_head;
    int64_t heads() const { return end_head - first_head; }
    int64_t rows() const { return (end - first) * heads(); }
};

// Positions [first, end).
struct Span {
    int64_t first, end;
    bool empty() const { return first >= end; }
};

LLM_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
LLM_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
LLM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
LLM_INLINE Span intersect(Span a, Span b) { return {most(a.first, b.first), least(a.end, b.end)}; }

// acc[r][v] += sum over i in order of a[r][i] * b[v][i], where b[v] advances by `stride` floats. Meanwhile a line of each
// `next`, what the task reads after this, is fetched into the second-level cache.
template <int ROWS, int VECTORS, bool FETCH>
LLM_INLINE void accumulate(F32 (&acc)[ROWS][VECTORS], const float* a, int64_t row_stride, const float* const* b,
                           int64_t stride, int64_t count, const char* const* next, int64_t next_stride) {
    _Pragma("GCC unroll 2") for (int64_t i = 0; i < count; ++i) {
        F32 column[VECTORS];
        LLM_UNROLL for (int v = 0; v < VECTORS; ++v) {
            column[v] = load(b[v] + i * stride);
            if (FETCH) prefetch_far(next[v] + i * next_stride);
        }
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const F32 value = set1(a[r * row_stride + i]);
            LLM_UNROLL for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(value, column[v], acc[r][v]);
        }
    }
}

// The keys and values of one block of KEYS positions, as panels of floats.
struct Block {
    const float *keys[PANELS], *values[PANELS];
};

// What a task works on, in the thread's scratch memory.
struct Work {
    float *query, *scores, *out, *sums, *maxima, *staged;  // scores: of one tile of rows
    Span* spans;  // what each row sees
    Span common;  // what all rows see
    int64_t out_stride;
};

// Enough independent chains for the multiplier, few enough for the registers.
constexpr int vectors_for(int rows) {
#if LLM_AVX512
    return rows > 0 ? 4 : 0;
#elif LLM_PLAIN
    return rows > 0 ? 1 : 0;
#else
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
#endif
}

template <int ROWS, int VECTORS, bool FETCH>
void score_panels(const Work& work, int64_t row, int panel, const Block& block, const Block& next, int64_t head_size) {
    F32 acc[ROWS][VECTORS];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
    const float *keys[VECTORS];
    const char* fetched[VECTORS];
    LLM_UNROLL for (int v = 0; v < VECTORS; ++v) {
        keys[v] = block.keys[panel + v];
        fetched[v] = reinterpret_cast<const char*>(next.keys[panel + v]);
    }
    accumulate<ROWS, VECTORS, FETCH>(acc, work.query + row * head_size, head_size, keys, LANES, head_size, fetched, LINE);
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int v = 0; v < VECTORS; ++v)
        store(work.scores + r * KEYS + (panel + v) * LANES, acc[r][v]);
}

// Scores of the first `keys` keys of the block, and perhaps of some more.
template <int ROWS, bool FETCH>
void score_tile(const Work& work, int64_t row, int64_t keys, const Block& block, const Block& next, int64_t head_size) {
    constexpr int width = vectors_for(ROWS);
    for (int panel = 0; panel * LANES < keys; panel += width)
        score_panels<ROWS, width, FETCH>(work, row, panel, block, next, head_size);
}

// Adds the keys [first, end) of the block to VECTORS vectors of the outputs of ROWS rows.
template <int ROWS, int VECTORS, bool FETCH>
void add_values(const Work& work, int64_t row, const float* scores, int64_t channel, Span keys, const Block& block,
                const Block& next, int64_t head_size) {
    F32 acc[ROWS][VECTORS];
    float* out = work.out + row * work.out_stride + channel;
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int v = 0; v < VECTORS; ++v)
        acc[r][v] = load(out + r * work.out_stride + v * LANES);
    for (int64_t key = keys.first; key < keys.end;) {
        const int64_t panel = key / LANES, inside = key % LANES, stop = least(keys.end, (panel + 1) * LANES);
        const float* values[VECTORS];
        const char* fetched[VECTORS];
        LLM_UNROLL for (int v = 0; v < VECTORS; ++v) {
            const int64_t offset = inside * head_size + channel + v * LANES;
            values[v] = block.values[panel] + offset;
            // Lines of the next block in the order of their addresses, over all keys and then over all channels.
            const int64_t line = channel / LANES * KEYS + key * VECTORS + v;
            fetched[v] = reinterpret_cast<const char*>(next.values[least(line / head_size, PANELS - 1)]) + line % head_size * LINE;
        }
        accumulate<ROWS, VECTORS, FETCH>(acc, scores + key, KEYS, values, head_size, stop - key, fetched, VECTORS * LINE);
        key = stop;
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int v = 0; v < VECTORS; ++v)
        store(out + r * work.out_stride + v * LANES, acc[r][v]);
}

template <int ROWS, bool FETCH>
void value_tile(const Work& work, int64_t row, const float* scores, Span keys, const Block& block, const Block& next,
                int64_t head_size) {
    constexpr int width = vectors_for(ROWS);
    int64_t channel = 0;
    for (; channel + width * LANES <= work.out_stride; channel += width * LANES)
        add_values<ROWS, width, FETCH>(work, row, scores, channel, keys, block, next, head_size);
    for (; channel < work.out_stride; channel += LANES)
        add_values<ROWS, 1, FETCH>(work, row, scores, channel, keys, block, next, head_size);
}

template <bool FETCH, int ROWS = MAX_TILE_ROWS, class... Rest> LLM_INLINE void score_rows(int64_t rows, const Rest&... rest) {
    if (rows == ROWS) return score_tile<ROWS, FETCH>(rest...);
    if constexpr (ROWS > 1) score_rows<FETCH, ROWS - 1>(rows, rest...);
}

template <bool FETCH, int ROWS = MAX_TILE_ROWS, class... Rest> LLM_INLINE void value_rows(int64_t rows, const Rest&... rest) {
    if (rows == ROWS) return value_tile<ROWS, FETCH>(rest...);
    if constexpr (ROWS > 1) value_rows<FETCH, ROWS - 1>(rows, rest...);
}

// One step of the online softmax (arXiv:1805.02867) of one row, in powers of two: scores become probabilities, and what
// the row has so far is rescaled when its largest score grew. `seen` is relative to the block and not empty.
void advance_softmax(const Work& work, int64_t row, float* scores, Span seen, float soft_cap) {
    if (soft_cap != 0.0f)
        for (int v = 0; v < KEYS; v += LANES) store(scores + v, tanh(load(scores + v)) * set1(soft_cap));
    for (int64_t key = 0; key < seen.first; ++key) scores[key] = -INFINITY;
    for (int64_t key = seen.end; key < KEYS; ++key) scores[key] = -INFINITY;
    F32 best = load(scores);
    LLM_UNROLL for (int v = LANES; v < KEYS; v += LANES) best = max(best, load(scores + v));
    const float before = work.maxima[row], block_best = largest(best), now = block_best > before ? block_best : before;
    float* sums = work.sums + row * LANES;
    F32 sum = load(sums);
    if (now != before) {
        const F32 shrink = exp2_of_negative(set1(before - now));
        sum = sum * shrink;
        float* out = work.out + row * work.out_stride;
        for (int64_t i = 0; i < work.out_stride; i += LANES) store(out + i, load(out + i) * shrink);
        work.maxima[row] = now;
    }
    LLM_UNROLL for (int v = 0; v < KEYS; v += LANES) {
        const F32 p = exp2_of_negative(load(scores + v) - set1(now));
        sum = sum + p;
        store(scores + v, p);
    }
    store(sums, sum);
}

template <class T> class Attention {
  public:
    const Step& step;
    const Layer& layer;
    const T *key_cache, *value_cache;
    const float* query;
    int64_t query_stride;
    float* out;

    int64_t padded() const { return ceil_div(layer.head_size, LANES) * LANES; }
    bool is_staged() const { return sizeof(T) != sizeof(float) || step.block_size % LANES != 0; }

    int64_t scratch_bytes(int64_t rows) const {
        const int64_t per_row = layer.head_size + padded() + LANES + 1 + LANES;
        const int64_t staged = is_staged() ? 2 * (PANELS * LANES * layer.head_size) + LANES : 0;
        return (rows * per_row + MAX_TILE_ROWS * KEYS + staged) * sizeof(float) + rows * sizeof(Span) + 64 * 8;
    }

    void run(const Task& task, char* scratch) const {
        const int64_t rows = task.rows();
        Work work = divide(scratch, rows);
        start(task, work, rows);
        Span all = work.common = work.spans[0];
        for (int64_t row = 1; row < rows; ++row) {
            work.common = intersect(work.common, work.spans[row]);
            all = {least(all.first, work.spans[row].first), most(all.end, work.spans[row].end)};
        }
        const bool fetch = !is_staged();
        Block block = open(task, work, all, all.first / KEYS);
        for (int64_t index = all.first / KEYS; index * KEYS < all.end; ++index) {
            const bool last = (index + 1) * KEYS >= all.end;
            // Staged blocks share one buffer: the next one may be opened only when this one is done.
            const Block next = last || is_staged() ? block : open(task, work, all, index + 1);
            advance(work, rows, index * KEYS, block, next, fetch && !last);
            block = last || !is_staged() ? next : open(task, work, all, index + 1);
        }
        finish(task, work);
    }

  private:
    Work divide(char* scratch, int64_t rows) const {
        char* at = scratch;
        const auto take = [&](int64_t count, int64_t size) {
            char* taken = at;
            at += ceil_div(count * size, 64) * 64;
            return taken;
        };
        const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count, sizeof(float))); };
        Work work{};
        work.out_stride = padded();
        work.query = floats(rows * layer.head_size);
        work.scores = floats(MAX_TILE_ROWS * KEYS);
        work.out = floats(rows * padded());
        work.sums = floats(rows * LANES);
        work.maxima = floats(rows);
        work.staged = is_staged() ? floats(2 * PANELS * LANES * layer.head_size + LANES) : nullptr;
        work.spans = reinterpret_cast<Span*>(take(rows, sizeof(Span)));
        return work;
    }

    // The head and the token of a row of the task: rows are sorted by token.
    int64_t head_of(const Task& task, int64_t row) const {
        return task.kv_head * layer.group() + task.first_head + row % task.heads();
    }
    int64_t token_of(const Task& task, int64_t row) const { return task.first + row / task.heads(); }

    void start(const Task& task, const Work& work, int64_t rows) const {
        constexpr float log2e = 0x1.715476p+0f;
        const float factor = layer.soft_cap != 0.0f ? layer.scale / layer.soft_cap : layer.scale * log2e;
        const int64_t length = step.lengths[task.row], end = step.starts[task.row + 1], size = layer.head_size;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t head = head_of(task, row), token = token_of(task, row), position = length - (end - token);
            const float* source = query + token * query_stride + head * size;
            for (int64_t i = 0; i < size; ++i) work.query[row * size + i] = source[i] * factor;
            for (int64_t i = 0; i < work.out_stride; ++i) work.out[row * work.out_stride + i] = 0.0f;
            for (int64_t i = 0; i < LANES; ++i) work.sums[row * LANES + i] = 0.0f;
            work.maxima[row] = -3e38f;  // finite, so that subtracting it is no NaN
            if (layer.sinks) {
                work.maxima[row] = layer.sinks[head] * log2e;
                work.sums[row * LANES] = 1.0f;
            }
            work.spans[row] = {layer.window ? most(0, position + 1 - layer.window) : 0, position + 1};
        }
    }

    void finish(const Task& task, const Work& work) const {
        const int64_t size = layer.head_size;
        for (int64_t row = 0; row < task.rows(); ++row) {
            const float* from = work.out + row * work.out_stride;
            float* to = out + (token_of(task, row) * layer.heads + head_of(task, row)) * size;
            const F32 total = set1(sum(load(work.sums + row * LANES)));
            // + 0: a row's zeros are positive, whichever way they came about.
            for (int64_t i = 0; i < size; i += LANES) store_part(to + i, load(from + i) / total + zero(), size - i);
        }
    }

    const T* keys_at(int64_t panel, int64_t kv_head) const {
        return key_cache + (panel * layer.kv_heads + kv_head) * layer.head_size * LANES;
    }
    const T* values_at(int64_t panel, int64_t kv_head) const {
        return value_cache + (panel * layer.kv_heads + kv_head) * layer.head_size * LANES;
    }
    int64_t slot(const Task& task, int64_t position) const {
        const int64_t block = step.table[task.row * step.table_width + position / step.block_size];
        return block * step.block_size + position % step.block_size;
    }

    // The panels of block `index`. Those that no row sees point to panel 0: they are read, and not used.
    Block open(const Task& task, const Work& work, Span all, int64_t index) const {
        Block block;
        for (int panel = 0; panel < PANELS; ++panel) {
            const int64_t first = index * KEYS + panel * LANES;
            const Span seen = intersect(all, {first, first + LANES});
            if (is_staged())
                stage(task, work, seen, first, panel, block);
            else {
                const int64_t at = seen.empty() ? 0 : slot(task, first) / LANES;
                block.keys[panel] = reinterpret_cast<const float*>(keys_at(at, task.kv_head));
                block.values[panel] = reinterpret_cast<const float*>(values_at(at, task.kv_head));
            }
        }
        return block;
    }

    void stage(const Task& task, const Work& work, Span seen, int64_t first, int panel, Block& block) const {
        const int64_t panel_size = LANES * layer.head_size;
        float* keys = work.staged + panel * panel_size;
        float* values = keys + PANELS * panel_size;
        block.keys[panel] = keys, block.values[panel] = values;
        if (seen.empty()) return;  // stale scratch: finite or not, it is not used
        if (step.block_size % LANES == 0) {
            const int64_t at = slot(task, first) / LANES;
            const T *from_keys = keys_at(at, task.kv_head), *from_values = values_at(at, task.kv_head);
            for (int64_t i = 0; i < panel_size; i += LANES) store(keys + i, load(from_keys + i));
            for (int64_t i = 0; i < panel_size; i += LANES) store(values + i, load(from_values + i));
            return;
        }
        for (int64_t position = seen.first; position < seen.end; ++position) {
            const int64_t at = slot(task, position), lane = position - first, from = at % LANES;
            const T *from_keys = keys_at(at / LANES, task.kv_head), *from_values = values_at(at / LANES, task.kv_head);
            for (int64_t i = 0; i < layer.head_size; ++i) {
                keys[i * LANES + lane] = widen(from_keys[i * LANES + from]);
                values[lane * layer.head_size + i] = widen(from_values[from * layer.head_size + i]);
            }
        }
    }

    // All rows over the block of positions that starts at `start`.
    void advance(const Work& work, int64_t rows, int64_t start, const Block& block, const Block& next, bool fetch) const {
        // The tile that fetches what comes next: the last that is full, which has both the time and no use for the keys.
        const int64_t fetches = fetch ? most(0, rows / MAX_TILE_ROWS - 1) * MAX_TILE_ROWS : -1;
        const bool whole = work.common.first <= start && start + KEYS <= work.common.end;
        for (int64_t row = 0, share; row < rows; row += share) {
            share = tile_rows(rows - row);
            if (!whole)
                advance_edge(work, row, share, start, block);
            else if (row == fetches)
                advance_tile<true>(work, row, share, block, next);
            else
                advance_tile<false>(work, row, share, block, next);
        }
    }

    float log2_cap() const { return layer.soft_cap * 0x1.715476p+0f; }

    // Rows that see all of the block.
    template <bool FETCH>
    void advance_tile(const Work& work, int64_t row, int64_t rows, const Block& block, const Block& next) const {
        score_rows<FETCH>(rows, work, row, KEYS, block, next, layer.head_size);
        for (int64_t r = 0; r < rows; ++r) advance_softmax(work, row + r, work.scores + r * KEYS, {0, KEYS}, log2_cap());
        value_rows<FETCH>(rows, work, row, work.scores, Span{0, KEYS}, block, next, layer.head_size);
    }

    Span seen_in_block(const Work& work, int64_t row, int64_t start) const {
        const Span seen = intersect(work.spans[row], {start, start + KEYS});
        return {seen.first - start, seen.end - start};
    }

    // Rows of which some do not see all of the block.
    void advance_edge(const Work& work, int64_t row, int64_t rows, int64_t start, const Block& block) const {
        Span shared{0, KEYS}, any{KEYS, 0};
        for (int64_t r = row; r < row + rows; ++r) {
            const Span seen = seen_in_block(work, r, start);
            shared = intersect(shared, seen);
            if (!seen.empty()) any = {least(any.first, seen.first), most(any.end, seen.end)};
        }
        if (any.empty()) return;
        const int64_t size = layer.head_size;
        score_rows<false>(rows, work, row, any.end, block, block, size);
        const auto scores = [&](int64_t r) { return work.scores + (r - row) * KEYS; };
        for (int64_t r = row; r < row + rows; ++r) {
            const Span seen = seen_in_block(work, r, start);
            if (!seen.empty()) advance_softmax(work, r, scores(r), seen, log2_cap());
        }
        // Keys that all rows see are added together, the others row by row: each row's keys stay in order, and a key
        // that a row does not see (0 * inf is NaN) stays out of its sum.
        if (shared.empty()) shared = {KEYS, KEYS};
        const auto add_alone = [&](int64_t r, Span keys) {
            if (!keys.empty()) value_rows<false>(1, work, r, scores(r), keys, block, block, size);
        };
        for (int64_t r = row; r < row + rows; ++r) {
            const Span seen = seen_in_block(work, r, start);
            add_alone(r, {seen.first, least(seen.end, shared.first)});
        }
        if (shared.empty()) return;
        value_rows<false>(rows, work, row, work.scores, shared, block, block, size);
        for (int64_t r = row; r < row + rows; ++r) add_alone(r, {shared.end, seen_in_block(work, r, start).end});
    }
};

// How the rows' tokens are cut into tasks: tiles of tokens, times kv heads, times parts of a group of heads.
struct Tasks {
    const Step& step;
    const Layer& layer;
    int64_t tile, parts, count;

    Tasks(const Step& step, const Layer& layer, int64_t threads) : step(step), layer(layer), parts(1), count(0) {
        tile = most(1, TASK_ROWS / layer.group());
        for (int64_t row = 0; row < step.rows; ++row) count += tiles(row) * layer.kv_heads;
        if (count && count < threads) parts = least(layer.group(), ceil_div(threads, count));
        count *= parts;
    }
    int64_t tokens(int64_t row) const { return step.starts[row + 1] - step.starts[row]; }
    int64_t tiles(int64_t row) const { return ceil_div(tokens(row), tile); }
    int64_t rows() const { return tile * ceil_div(layer.group(), parts); }
    int64_t per_tile() const { return layer.kv_heads * parts; }

    // `first_task[row]`: the tasks before the row's own. Head by head, so that a head's keys stay in the cache; the last tiles,
    // which see most, come first.
    Task task(int64_t index, const int64_t* first_task) const {
        int64_t low = 0, high = step.rows;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (first_task[middle] <= index ? low : high) = middle;
        }
        const int64_t inside = index - first_task[low], which = tiles(low) - 1 - inside % tiles(low), rest = inside / tiles(low);
        const int64_t first = step.starts[low] + which * tile, share = ceil_div(layer.group(), parts);
        const int64_t head = rest % parts * share;
        return {low, first, least(first + tile, step.starts[low + 1]), rest / parts, head, least(head + share, layer.group())};
    }
};

// The row that would read outside of the table or the cache, or whose numbers contradict each other; -1: none.
int64_t first_bad_row(const Step& step, int64_t tokens, int64_t window) {
    if (step.starts[0] != 0 || step.starts[step.rows] != tokens) return 0;
    for (int64_t row = 0; row < step.rows; ++row) {
        const int64_t count = step.starts[row + 1] - step.starts[row], length = step.lengths[row];
        if (count < 0 || length < count) return row;
        if (!count) continue;
        if (ceil_div(length, step.block_size) > step.table_width) return row;
        const int64_t seen_from = window ? most(0, length - count + 1 - window) : 0;
        for (int64_t i = seen_from / step.block_size; i < ceil_div(length, step.block_size); ++i) {
            const int64_t block = step.table[row * step.table_width + i];
            if (block < 0 || (block + 1) * step.block_size > step.slots) return row;
        }
    }
    return -1;
}

template <class T>
void attend(const Step& step, const Layer& layer, const void* key_cache, const void* value_cache, const float* query,
            int64_t query_stride, float* out, int64_t threads) {
    const Tasks tasks(step, layer, threads);
    const Attention<T> attention{step,  layer,        static_cast<const T*>(key_cache), static_cast<const T*>(value_cache),
                                 query, query_stride, out};
    Scratch firsts((step.rows + 1) * sizeof(int64_t));
    int64_t* first_task = firsts.as<int64_t>();
    first_task[0] = 0;
    for (int64_t row = 0; row < step.rows; ++row) first_task[row + 1] = first_task[row] + tasks.tiles(row) * tasks.per_tile();
    parallel_for(tasks.count, threads, attention.scratch_bytes(tasks.rows()), [&](int64_t index, char* scratch) {
        const Task task = tasks.task(index, first_task);
        if (task.heads() > 0) attention.run(task, scratch);
    });
}

}  // namespace
}  // namespace llm

using namespace llm;

// query [tokens][heads][head_size], tokens `query_stride` floats apart -> out, without gaps. Returns -1, or without
// having computed anything the first row whose numbers or block ids are out of range.
LLM_EXPORT int64_t llm_paged_attention(const int32_t* table, const int32_t* starts, const int32_t* lengths, int64_t rows,
                                       int64_t table_width, int64_t block_size, int64_t slots, const float* query,
                                       int64_t query_stride, int64_t tokens, int64_t kind, const void* key_cache,
                                       const void* value_cache, float* out, int64_t heads, int64_t kv_heads,
                                       int64_t head_size, int64_t window, float scale, float soft_cap, const float* sinks,
                                       int64_t threads) {
    const Step step{table, starts, lengths, rows, table_width, block_size, slots};
    const Layer layer{heads, kv_heads, head_size, window, scale, soft_cap, sinks};
    const int64_t bad = first_bad_row(step, tokens, window);
    if (bad >= 0) return bad;
    if (kind == FLOAT32)
        attend<float>(step, layer, key_cache, value_cache, query, query_stride, out, threads);
    else if (kind == BFLOAT16)
        attend<BF16>(step, layer, key_cache, value_cache, query, query_stride, out, threads);
    else
        attend<F16>(step, layer, key_cache, value_cache, query, query_stride, out, threads);
    return -1;
}

// key, value: [tokens][kv_heads][head_size], tokens `stride` floats apart. Returns -1, or without having written anything
// the first token whose slot is outside of the cache.
LLM_EXPORT int64_t llm_write_kv_cache(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                                      int64_t kind, void* key_cache, void* value_cache, const int64_t* slot_mapping,
                                      int64_t slots, int64_t tokens, int64_t kv_heads, int64_t head_size, int64_t threads) {
    const int64_t bad = first_outside(slot_mapping, tokens, slots);
    if (bad >= 0) return bad;
    with_cache(kind, key_cache, value_cache, kv_heads, head_size, [&](const auto& cache) {
        for_rows(tokens, 2 * kv_heads * head_size, threads, [&](int64_t token) {
            for (int64_t head = 0; head < kv_heads; ++head) {
                cache.store_key(slot_mapping[token], head, key + token * key_stride + head * head_size);
                cache.store_value(slot_mapping[token], head, value + token * value_stride + head * head_size);
            }
        });
    });
    return -1;
}

LLM_KERNEL(llm_paged_attention)
LLM_KERNEL(llm_write_kv_cache)
