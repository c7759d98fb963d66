// Storing keys and values in the paged cache; attention.cpp describes the layout.
#pragma once

#include <cstdint>

#include "rows.h"
#include "vector_math.h"

namespace llm {
namespace {

template <class T> struct Cache {
    T *keys, *values;
    int64_t kv_heads, head_size;

    // One head of a token's key or value, rounded to the type of the cache.
    void store_key(int64_t slot, int64_t head, const float* from) const {
        T* to = keys + (slot / LANES * kv_heads + head) * head_size * LANES + slot % LANES;
        for (int64_t i = 0; i < head_size; ++i) to[i * LANES] = narrow<T>(from[i]);
    }
    void store_value(int64_t slot, int64_t head, const float* from) const {
        T* to = values + ((slot / LANES * kv_heads + head) * LANES + slot % LANES) * head_size;
        for (int64_t i = 0; i < head_size; ++i) to[i] = narrow<T>(from[i]);
    }
};

// body(Cache of the type `kind`).
template <class Body>
void with_cache(int64_t kind, void* keys, void* values, int64_t kv_heads, int64_t head_size, const Body& body) {
    if (kind == FLOAT32)
        body(Cache<float>{static_cast<float*>(keys), static_cast<float*>(values), kv_heads, head_size});
    else if (kind == BFLOAT16)
        body(Cache<BF16>{static_cast<BF16*>(keys), static_cast<BF16*>(values), kv_heads, head_size});
    else
        body(Cache<F16>{static_cast<F16*>(keys), static_cast<F16*>(values), kv_heads, head_size});
}

// The first of `count` indices that is not below `end`, -1: there is none.
inline int64_t first_outside(const int64_t* indices, int64_t count, int64_t end) {
    for (int64_t i = 0; i < count; ++i)
        if (indices[i] < 0 || indices[i] >= end) return i;
    return -1;
}

}  // namespace
}  // namespace llm
