// Rotary position embedding of queries and keys in one pass.
//
// Products and sums are rounded one by one, as in the PyTorch reference: the bits are equal.
#include "replay.h"
#include "rows.h"

namespace llm {
namespace {

// table [length][2 * pairs]: cosines, then sines.
struct Table {
    const float* rows;
    int64_t length, pairs;
    bool halves;  // channel i is paired with i + pairs, else 2i with 2i + 1
};

// Heads of each token; tokens are `stride` floats apart.
struct Heads {
    const float* from;
    int64_t stride, count, size;
    const float* at(int64_t token, int64_t head) const { return from + token * stride + head * size; }
};

LLM_INLINE void rotate_halves(const float* from, float* to, const float* cosine, const float* sine, int64_t pairs) {
    for (int64_t i = 0; i < pairs; i += LANES) {
        const int64_t left = pairs - i;
        const F32 c = load_part(cosine + i, left), s = load_part(sine + i, left);
        const F32 first = load_part(from + i, left), second = load_part(from + pairs + i, left);
        store_part(to + i, first * c - second * s, left);
        store_part(to + pairs + i, second * c + first * s, left);
    }
}

LLM_INLINE void rotate_neighbours(const float* from, float* to, const float* cosine, const float* sine, int64_t pairs) {
    for (int64_t i = 0; i < pairs; ++i) {
        const float first = from[2 * i], second = from[2 * i + 1];
        to[2 * i] = first * cosine[i] - second * sine[i];
        to[2 * i + 1] = second * cosine[i] + first * sine[i];
    }
}

void rotate_head(const Table& table, int64_t position, const float* from, float* to, int64_t size) {
    const float* row = table.rows + position * 2 * table.pairs;
    if (table.halves) rotate_halves(from, to, row, row + table.pairs, table.pairs);
    else rotate_neighbours(from, to, row, row + table.pairs, table.pairs);
    for (int64_t i = 2 * table.pairs; i < size; ++i) to[i] = from[i];
}

// All heads of one token; `to` is contiguous.
void rotate_token(const Table& table, int64_t position, const Heads& heads, int64_t token, float* to) {
    for (int64_t head = 0; head < heads.count; ++head)
        rotate_head(table, position, heads.at(token, head), to + (token * heads.count + head) * heads.size, heads.size);
}

}  // namespace
}  // namespace llm

using namespace llm;

// Returns -1; or, having written nothing, the first token whose position is not in the table.
LLM_EXPORT int64_t llm_rotary(const int64_t* positions, int64_t tokens, const float* table_rows, int64_t length,
                              int64_t pairs, int64_t halves, const float* query, int64_t query_stride, float* query_out,
                              int64_t heads, const float* key, int64_t key_stride, float* key_out, int64_t kv_heads,
                              int64_t head_size, int64_t threads) {
    const int64_t bad = first_outside(positions, tokens, length);
    if (bad >= 0) return bad;
    const Table table{table_rows, length, pairs, halves != 0};
    const Heads queries{query, query_stride, heads, head_size}, keys{key, key_stride, kv_heads, head_size};
    for_rows(tokens, (heads + kv_heads) * head_size, threads, [&](int64_t token) {
        rotate_token(table, positions[token], queries, token, query_out);
        rotate_token(table, positions[token], keys, token, key_out);
    });
    return -1;
}

LLM_KERNEL(llm_rotary)
