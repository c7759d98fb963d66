// The arithmetic of attention on a tile of query rows and a block of keys: scores, one step of the online softmax,
// outputs.
//
// A query row is one token's query in one head. Scores are reduced over channels in order, outputs over keys in order.
#pragma once

#include "attention_tasks.h"
#include "integers.h"
#include "vector_math.h"

namespace llm {
namespace {

// Keys per block. Part of the definition of the result: another number gives other bits.
constexpr int KEYS = 64, PANELS = KEYS / LANES;
constexpr int64_t LINE = 64;  // bytes of a cache line
#if LLM_PLAIN
constexpr int MAX_TILE_ROWS = 2;  // without vectors, large tiles compile slowly
#elif LLM_AVX512
constexpr int MAX_TILE_ROWS = 7;
#else
constexpr int MAX_TILE_ROWS = 6;
#endif

// Height of the next tile when `left` query rows remain.
LLM_INLINE int64_t tile_rows(int64_t left) {
    if (left >= MAX_TILE_ROWS) return MAX_TILE_ROWS;
#if LLM_AVX2
    if (left == 3) return 2;  // 3 x 2 vectors would spill, 3 x 1 do not hide FMA latency
#endif
    return left;
}

// Positions [first, end).
struct Span {
    int64_t first, end;
    bool empty() const { return first >= end; }
};

LLM_INLINE Span intersect(Span a, Span b) { return {max(a.first, b.first), min(a.end, b.end)}; }

// acc[r][v] += a[r][i] * b[v][i], i in order; b[v] advances by `stride` elements. With FETCH, each step prefetches a
// line of every `next` (what the task reads after this block) into the L2 cache.
template <int ROWS, int VECTORS, bool FETCH, class T>
LLM_INLINE void accumulate(F32 (&acc)[ROWS][VECTORS], const float* a, int64_t row_stride, const T* const* b,
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

// The panels of keys and values of one block of KEYS positions.
template <class T> struct Block { const T *keys[PANELS], *values[PANELS]; };

// The panels in the cache that are read next, with `line` bytes of 16 keys or values of a channel.
struct Next {
    const char *keys[PANELS], *values[PANELS];
    int64_t line;
};

// What a task works on, in the thread's scratch memory.
struct Work {
    float *query, *scores, *out, *sums, *maxima, *staged;  // scores: of one tile of query rows
    float* slopes;                                         // of each query row, in powers of two; null: no ALiBi
    Span* spans;                                           // positions that each query row sees
    Span common;                                           // positions that all query rows see
    int64_t out_stride;
};

// The positions that the token at `position` of `length` sees.
Span seen_from(const Layer& layer, int64_t position, int64_t length) {
    const int64_t first = layer.window ? max(0, position + 1 - layer.window) : 0;
    const int64_t chunk = layer.chunk ? position / layer.chunk * layer.chunk : 0;
    return {max(first, chunk), min(length, position + 1 + layer.ahead)};
}

// The positions that the tokens of a task see.
Span seen_by(const Step& step, const Layer& layer, const Task& task) {
    const int64_t length = step.lengths[task.row];
    return {seen_from(layer, step.position(task.row, task.first), length).first,
            seen_from(layer, step.position(task.row, task.end - 1), length).end};
}

// Sets the softmax, the output and the span of a query row in `head` at `position` of `length` to those before its
// first key.
void start_row(const Work& work, int64_t row, const Layer& layer, int64_t head, int64_t position, int64_t length) {
    for (int64_t i = 0; i < work.out_stride; ++i) work.out[row * work.out_stride + i] = 0.0f;
    for (int64_t i = 0; i < LANES; ++i) work.sums[row * LANES + i] = 0.0f;
    work.maxima[row] = -3e38f;  // finite: -inf - -inf would be NaN
    if (layer.sinks) {
        work.maxima[row] = layer.sinks[head] * 0x1.715476p+0f;
        work.sums[row * LANES] = 1.0f;
    }
    if (layer.slopes) work.slopes[row] = layer.slopes[head] * 0x1.715476p+0f;
    work.spans[row] = seen_from(layer, position, length);
}

// The positions that all query rows see become work.common; returns those that any of them sees.
Span find_spans(Work& work, int64_t rows) {
    Span all = work.common = work.spans[0];
    for (int64_t row = 1; row < rows; ++row) {
        work.common = intersect(work.common, work.spans[row]);
        all = {min(all.first, work.spans[row].first), max(all.end, work.spans[row].end)};
    }
    return all;
}

// Positions that a query row sees of the block that begins at `start`, relative to it.
Span seen_in_block(const Work& work, int64_t row, int64_t start) {
    const Span seen = intersect(work.spans[row], {start, start + KEYS});
    return {seen.first - start, seen.end - start};
}

// Vectors per tile row: enough independent FMA chains to hide latency, few enough to stay in registers.
constexpr int vectors_for(int rows) {
#if LLM_AVX512
    return rows > 0 ? 4 : 0;
#elif LLM_PLAIN
    return rows > 0 ? 1 : 0;
#elif LLM_NEON
    return rows <= 2 ? 2 : 1;
#else
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
#endif
}

template <int ROWS, int VECTORS, bool FETCH, class T>
void score_panels(const Work& work, int64_t row, int panel, const Block<T>& block, const Next& next,
                  int64_t head_size) {
    F32 acc[ROWS][VECTORS];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
    accumulate<ROWS, VECTORS, FETCH>(acc, work.query + row * head_size, head_size, block.keys + panel, LANES, head_size,
                                     next.keys + panel, next.line);
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int v = 0; v < VECTORS; ++v)
        store(work.scores + r * KEYS + (panel + v) * LANES, acc[r][v]);
}

// Scores of at least the first `keys` keys of the block, rounded up to whole panels.
template <int ROWS, bool FETCH, class T>
void score_tile(const Work& work, int64_t row, int64_t keys, const Block<T>& block, const Next& next,
                int64_t head_size) {
    constexpr int width = vectors_for(ROWS);
    for (int panel = 0; panel * LANES < keys; panel += width)
        score_panels<ROWS, width, FETCH>(work, row, panel, block, next, head_size);
}

// Adds the keys [first, end) of the block to VECTORS vectors of the outputs of ROWS query rows.
template <int ROWS, int VECTORS, bool FETCH, class T>
void add_values(const Work& work, int64_t row, const float* scores, int64_t channel, Span keys, const Block<T>& block,
                const Next& next, int64_t head_size) {
    F32 acc[ROWS][VECTORS];
    float* out = work.out + row * work.out_stride + channel;
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int v = 0; v < VECTORS; ++v)
        acc[r][v] = load(out + r * work.out_stride + v * LANES);
    for (int64_t key = keys.first; key < keys.end;) {
        const int64_t panel = key / LANES, inside = key % LANES, stop = min(keys.end, (panel + 1) * LANES);
        const T* values[VECTORS];
        const char* fetched[VECTORS];
        LLM_UNROLL for (int v = 0; v < VECTORS; ++v) {
            values[v] = block.values[panel] + inside * head_size + channel + v * LANES;
            // Prefetches the next block's lines in address order, spread over all keys and all channels.
            const int64_t line = channel / LANES * KEYS + key * VECTORS + v;
            fetched[v] = next.values[min(line / head_size, PANELS - 1)] + line % head_size * next.line;
        }
        accumulate<ROWS, VECTORS, FETCH>(acc, scores + key, KEYS, values, head_size, stop - key, fetched,
                                         VECTORS * next.line);
        key = stop;
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int v = 0; v < VECTORS; ++v)
        store(out + r * work.out_stride + v * LANES, acc[r][v]);
}

template <int ROWS, bool FETCH, class T>
void value_tile(const Work& work, int64_t row, const float* scores, Span keys, const Block<T>& block, const Next& next,
                int64_t head_size) {
    constexpr int width = vectors_for(ROWS);
    int64_t channel = 0;
    for (; channel + width * LANES <= work.out_stride; channel += width * LANES)
        add_values<ROWS, width, FETCH>(work, row, scores, channel, keys, block, next, head_size);
    for (; channel < work.out_stride; channel += LANES)
        add_values<ROWS, 1, FETCH>(work, row, scores, channel, keys, block, next, head_size);
}

template <bool FETCH, int ROWS = MAX_TILE_ROWS, class... Rest>
LLM_INLINE void score_rows(int64_t rows, const Rest&... rest) {
    if (rows == ROWS) return score_tile<ROWS, FETCH>(rest...);
    if constexpr (ROWS > 1) score_rows<FETCH, ROWS - 1>(rows, rest...);
}

template <bool FETCH, int ROWS = MAX_TILE_ROWS, class... Rest>
LLM_INLINE void value_rows(int64_t rows, const Rest&... rest) {
    if (rows == ROWS) return value_tile<ROWS, FETCH>(rest...);
    if constexpr (ROWS > 1) value_rows<FETCH, ROWS - 1>(rows, rest...);
}

// ALiBi (arXiv:2108.12409): adds the slope times the distance from the query to each key, which is at most 0 for the
// keys that it sees. Such a layer is causal: the query is at the last position of its span.
void add_distances(const Work& work, int64_t row, float* scores, int64_t start) {
    alignas(64) static constexpr float lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t position = work.spans[row].end - 1;
    const F32 slope = set1(work.slopes[row]);
    for (int v = 0; v < KEYS; v += LANES) {
        const F32 distances = set1(static_cast<float>(start + v - position)) + load(lanes);
        store(scores + v, fma(slope, distances, load(scores + v)));
    }
}

// One step of the online softmax (arXiv:1805.02867) for one query row, in powers of two. Scores become probabilities;
// sum and output so far are rescaled when the maximum grew. `seen` is relative to the block, which begins at position
// `start`, and not empty. Whole vectors behind the last key that is seen are left as they are: their sum is 0.
void advance_softmax(const Work& work, int64_t row, float* scores, int64_t start, Span seen, float soft_cap) {
    const int64_t end = ceil_div(seen.end, LANES) * LANES;
    if (soft_cap != 0.0f)
        for (int64_t v = 0; v < end; v += LANES) store(scores + v, tanh(load(scores + v)) * set1(soft_cap));
    if (work.slopes) add_distances(work, row, scores, start);
    for (int64_t key = 0; key < seen.first; ++key) scores[key] = -INFINITY;
    for (int64_t key = seen.end; key < end; ++key) scores[key] = -INFINITY;
    F32 best = load(scores);
    for (int64_t v = LANES; v < end; v += LANES) best = max(best, load(scores + v));
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
    for (int64_t v = 0; v < end; v += LANES) {
        const F32 p = exp2_of_negative(load(scores + v) - set1(now));
        sum = sum + p;
        store(scores + v, p);
    }
    store(sums, sum);
}

}  // namespace
}  // namespace llm
