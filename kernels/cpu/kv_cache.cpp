// Writes keys and values into the paged KV cache; attention.cpp describes its layout.
#include "kinds.h"
#include "rows.h"
#include "vector_math.h"

namespace llm {
namespace {

template <class T> struct Cache {
    T *keys, *values;
    int64_t kv_heads, head_size;

    // One head of a token's key or value, rounded to the element type of the KV cache.
    void store_key(int64_t slot, int64_t head, const float* from) const {
        T* to = keys + (slot / LANES * kv_heads + head) * head_size * LANES + slot % LANES;
        for (int64_t i = 0; i < head_size; ++i) to[i * LANES] = narrow<T>(from[i]);
    }
    void store_value(int64_t slot, int64_t head, const float* from) const {
        T* to = values + ((slot / LANES * kv_heads + head) * LANES + slot % LANES) * head_size;
        for (int64_t i = 0; i < head_size; ++i) to[i] = narrow<T>(from[i]);
    }
};

}  // namespace
}  // namespace llm

using namespace llm;

// key, value: [tokens][kv_heads][head_size], tokens `stride` floats apart. Returns -1; or, having written nothing, the
// first token whose slot is outside the KV cache.
LLM_EXPORT int64_t llm_write_kv_cache(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                                      Kind kind, void* key_cache, void* value_cache, const int64_t* slot_mapping,
                                      int64_t slots, int64_t tokens, int64_t kv_heads, int64_t head_size,
                                      int64_t threads) {
    const int64_t bad = first_outside(slot_mapping, tokens, slots);
    if (bad >= 0) return bad;
    with_type(kind, [&](auto type) {
        using T = typename decltype(type)::Value;
        const Cache<T> cache{static_cast<T*>(key_cache), static_cast<T*>(value_cache), kv_heads, head_size};
        for_rows(tokens, 2 * kv_heads * head_size, threads, [&](int64_t token) {
            for (int64_t head = 0; head < kv_heads; ++head) {
                cache.store_key(slot_mapping[token], head, key + token * key_stride + head * head_size);
                cache.store_value(slot_mapping[token], head, value + token * value_stride + head * head_size);
            }
        });
    });
    return -1;
}

LLM_KERNEL(llm_write_kv_cache)
