// Rotary position embeddings of queries and keys in one pass.
//
// Products and sums are rounded one by one, like the PyTorch twin's: the bits are equal.
#include "replay.h"
#include "rows.h"

namespace llm {
namespace {

struct Heads {
    const float* from;
    float* to;
    int64_t stride, count, size;  // stride: floats between the tokens of `from`; `to` has no gaps
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

void rotate_token(const Heads& heads, int64_t token, const float* table, int64_t pairs, bool halves) {
    for (int64_t head = 0; head < heads.count; ++head) {
        const float* from = heads.from + token * heads.stride + head * heads.size;
        float* to = heads.to + (token * heads.count + head) * heads.size;
        if (halves)
            rotate_halves(from, to, table, table + pairs, pairs);
        else
            rotate_neighbours(from, to, table, table + pairs, pairs);
        for (int64_t i = 2 * pairs; i < heads.size; ++i) to[i] = from[i];
    }
}

}  // namespace
}  // namespace llm

using namespace llm;

// table [length][2 * pairs]: cosines, then sines. Returns -1, or without having written anything the first token whose
// position is not in the table.
LLM_EXPORT int64_t llm_rotary(const int64_t* positions, int64_t tokens, const float* table, int64_t length, int64_t pairs,
                              int64_t halves, const float* query, int64_t query_stride, float* query_out, int64_t heads,
                              const float* key, int64_t key_stride, float* key_out, int64_t kv_heads, int64_t head_size,
                              int64_t threads) {
    for (int64_t token = 0; token < tokens; ++token)
        if (positions[token] < 0 || positions[token] >= length) return token;
    const Heads queries{query, query_out, query_stride, heads, head_size}, keys{key, key_out, key_stride, kv_heads, head_size};
    for_rows(tokens, (heads + kv_heads) * head_size, threads, [&](int64_t token) {
        const float* row = table + positions[token] * 2 * pairs;
        rotate_token(queries, token, row, pairs, halves != 0);
        rotate_token(keys, token, row, pairs, halves != 0);
    });
    return -1;
}

LLM_REPLAYABLE(llm_rotary)
