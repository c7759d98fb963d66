// What a step of attention is made of: its batch rows, its layer, and the tasks that the threads share.
#pragma once

#include "integers.h"

namespace llm {
namespace {

// Query rows (one token in one head) of a task: they share its keys.
constexpr int64_t TASK_ROWS = 48;
constexpr int64_t MULTIPLY_ADDS_PER_NS = 16;  // of one thread, about

// The batch rows of a step. Row r owns the tokens starts[r] : starts[r + 1], the last of its lengths[r] positions.
struct Step {
    const int32_t *table, *starts, *lengths;
    int64_t rows, table_width, block_size, slots;
    int64_t slot(int64_t row, int64_t position) const {
        return table[row * table_width + position / block_size] * block_size + position % block_size;
    }
    int64_t position(int64_t row, int64_t token) const { return lengths[row] - (starts[row + 1] - token); }
};

// The rows of Layer::static_scales, each [kv_heads][head_size].
enum Channel : int64_t { KEY_SCALE, KEY_OFFSET, VALUE_SCALE, VALUE_OFFSET };

struct Layer {
    int64_t heads, kv_heads, head_size, window;  // window 0: none
    int64_t chunk;                               // a token sees those of its own chunk of so many positions; 0: all
    int64_t ahead;                               // how many positions after its own a token sees; 0: causal
    int64_t rope_size;           // static_scales of a latent key that are no value; 0: no latent attention
    float scale, soft_cap;       // soft_cap 0: none
    const float* sinks;          // per head, or null
    const float* slopes;         // of ALiBi, per head, or null
    const float* static_scales;  // of a quantized KV cache with static scales (quantized_cache.h), or null
    int64_t group() const { return heads / kv_heads; }
    int64_t value_size() const { return head_size - rope_size; }
    bool is_latent() const { return rope_size > 0; }
    // Of queries: scores are powers of two, or with a soft cap what tanh is of.
    float factor() const { return soft_cap != 0.0f ? scale / soft_cap : scale * 0x1.715476p+0f; }
    float log2_cap() const { return soft_cap * 0x1.715476p+0f; }
    // Row `which` of `static_scales`.
    const float* channel(int64_t which, int64_t kv_head) const {
        return static_scales ? static_scales + (which * kv_heads + kv_head) * head_size : nullptr;
    }
};

// A task: tokens first : end of one batch row, heads first_head : end_head of one KV head's group.
struct Task {
    int64_t row, first, end, kv_head, first_head, end_head;
    int64_t heads() const { return end_head - first_head; }
    int64_t rows() const { return (end - first) * heads(); }
    // Head and token of a query row of the task: query rows are sorted by token.
    int64_t head_of(int64_t query_row, int64_t group) const {
        return kv_head * group + first_head + query_row % heads();
    }
    int64_t token_of(int64_t query_row) const { return first + query_row / heads(); }
};

// Cuts a step into tasks: tiles of tokens, times KV heads, times parts of a KV head's query heads.
struct AttentionTasks {
    const Step& step;
    const Layer& layer;
    int64_t tile, parts, count;

    AttentionTasks(const Step& step, const Layer& layer, int64_t threads)
        : step(step), layer(layer), parts(1), count(0) {
        tile = max(1, TASK_ROWS / layer.group());
        for (int64_t row = 0; row < step.rows; ++row) count += tiles(row) * layer.kv_heads;
        if (count && count < threads) parts = min(layer.group(), ceil_div(threads, count));
        count *= parts;
    }
    int64_t tokens(int64_t row) const { return step.starts[row + 1] - step.starts[row]; }
    int64_t tiles(int64_t row) const { return ceil_div(tokens(row), tile); }
    int64_t rows() const { return tile * ceil_div(layer.group(), parts); }
    int64_t per_tile() const { return layer.kv_heads * parts; }

    // `first_task[row]`: the number of tasks before those of batch row `row`. AttentionTasks go head by head, so that a
    // head's keys stay in cache. A row's last tile, which sees most keys, comes first.
    Task task(int64_t index, const int64_t* first_task) const {
        int64_t low = 0, high = step.rows;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (first_task[middle] <= index ? low : high) = middle;
        }
        const int64_t inside = index - first_task[low], which = tiles(low) - 1 - inside % tiles(low),
                      rest = inside / tiles(low);
        const int64_t first = step.starts[low] + which * tile, share = ceil_div(layer.group(), parts);
        const int64_t head = rest % parts * share;
        return {low,          first, min(first + tile, step.starts[low + 1]),
                rest / parts, head,  min(head + share, layer.group())};
    }
};

// The first batch row that would read outside the block table or the KV cache, or whose numbers disagree; -1 if none.
int64_t first_bad_row(const Step& step, int64_t tokens, int64_t window) {
    if (step.starts[0] != 0 || step.starts[step.rows] != tokens) return 0;
    for (int64_t row = 0; row < step.rows; ++row) {
        const int64_t count = step.starts[row + 1] - step.starts[row], length = step.lengths[row];
        if (count < 0 || length < count) return row;
        if (!count) continue;
        if (ceil_div(length, step.block_size) > step.table_width) return row;
        const int64_t seen_from = window ? max(0, length - count + 1 - window) : 0;
        for (int64_t i = seen_from / step.block_size; i < ceil_div(length, step.block_size); ++i) {
            const int64_t block = step.table[row * step.table_width + i];
            if (block < 0 || (block + 1) * step.block_size > step.slots) return row;
        }
    }
    return -1;
}

}  // namespace
}  // namespace llm
