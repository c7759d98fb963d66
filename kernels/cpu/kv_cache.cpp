// Writes keys and values into the paged KV cache; attention.cpp describes its layout.
#include "attention_tasks.h"
#include "kinds.h"
#include "quantized_cache.h"
#include "rows.h"

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

// A KV cache in 8 bits; T: int8_t or F8.
template <class T> struct QuantizedCache {
    uint8_t *keys, *values;
    int64_t kv_heads, head_size;
    const float* static_scales;  // static scales and offsets, or null

    const float* channel(int64_t which, int64_t head) const {
        return static_scales ? static_scales + (which * kv_heads + head) * head_size : nullptr;
    }
    template <class At>
    void write(uint8_t* cache, int64_t slot, int64_t head, const float* from, int64_t which, const At& at) const {
        uint8_t* record = cache + (slot / LANES * kv_heads + head) * record_bytes(head_size);
        const BF16 scale = token_scale<T>(from, head_size, static_scales);
        reinterpret_cast<BF16*>(record)[slot % LANES] = scale;
        T* codes = reinterpret_cast<T*>(record + SCALE_BYTES);
        quantize_head<T>(from, head_size, scale, channel(which, head), channel(which + 1, head),
                         [&](int64_t i, T code) { codes[at(slot % LANES, i)] = code; });
    }
    void store_key(int64_t slot, int64_t head, const float* from) const {
        write(keys, slot, head, from, KEY_SCALE,
              [](int64_t lane, int64_t i) { return std::is_same_v<T, F8> ? i * LANES + lane : int8_key_at(lane, i); });
    }
    void store_value(int64_t slot, int64_t head, const float* from) const {
        write(values, slot, head, from, VALUE_SCALE, [&](int64_t lane, int64_t i) {
            return std::is_same_v<T, F8> ? lane * head_size + i : int8_value_at(lane, i, head_size);
        });
    }
};

// The keys and values of a step.
struct Tokens {
    const float *key, *value;
    int64_t key_stride, value_stride, count, kv_heads, head_size;
    const int64_t* slots;

    template <class Cache> void write(const Cache& cache, int64_t threads) const {
        for_rows(count, 2 * kv_heads * head_size, threads, [&](int64_t token) {
            for (int64_t head = 0; head < kv_heads; ++head) {
                cache.store_key(slots[token], head, key + token * key_stride + head * head_size);
                cache.store_value(slots[token], head, value + token * value_stride + head * head_size);
            }
        });
    }
};

}  // namespace
}  // namespace llm

using namespace llm;

// key, value: [tokens][kv_heads][head_size], tokens `stride` floats apart. `static_scales` as of llm_paged_attention.
// Returns -1; or, having written nothing, the first token whose slot is outside the KV cache.
LLM_EXPORT int64_t llm_write_kv_cache(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                                      Kind kind, void* key_cache, void* value_cache, const int64_t* slot_mapping,
                                      int64_t slots, int64_t tokens, int64_t kv_heads, int64_t head_size,
                                      const float* static_scales, int64_t threads) {
    const int64_t bad = first_outside(slot_mapping, tokens, slots);
    if (bad >= 0) return bad;
    const Tokens step{key, value, key_stride, value_stride, tokens, kv_heads, head_size, slot_mapping};
    if (has_scales(kind)) {
        auto *keys = static_cast<uint8_t*>(key_cache), *values = static_cast<uint8_t*>(value_cache);
        if (kind == Kind::FLOAT8)
            step.write(QuantizedCache<F8>{keys, values, kv_heads, head_size, static_scales}, threads);
        else step.write(QuantizedCache<int8_t>{keys, values, kv_heads, head_size, static_scales}, threads);
        return -1;
    }
    with_type(kind, [&](auto type) {
        using T = typename decltype(type)::Value;
        step.write(Cache<T>{static_cast<T*>(key_cache), static_cast<T*>(value_cache), kv_heads, head_size}, threads);
    });
    return -1;
}

LLM_KERNEL(llm_write_kv_cache)
