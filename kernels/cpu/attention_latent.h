// Staging of latent attention: 16 rows of its KV cache as a panel of keys and a panel of values.
//
// Rows are widened and transposed in tiles of 16 channels: a tile stays in the L1 cache, a panel of keys does not.
#pragma once

#include "quantized_cache.h"
#include "transpose.h"

namespace llm {
namespace {

LLM_INLINE F32 load(const int8_t* p) { return to_float(load_int8(p)); }

// The rows of lanes [first, end) of a panel; scales of 1 where elements are no codes.
template <class T> struct LatentRows {
    const T* from[LANES];
    float latent[LANES], rope[LANES];
    int64_t first, end;
};

// Channels [first, end) of all rows -> keys [channels][16], and if `values` is not null values [16][end].
template <class T>
void stage_channels(const LatentRows<T>& rows, const float* scales, int64_t first, int64_t end, float* keys,
                    float* values) {
    alignas(64) float tile[LANES * LANES] = {};
    for (int64_t channel = first; channel < end; channel += LANES) {
        const int64_t count = min(LANES, end - channel);
        for (int64_t lane = rows.first; lane < rows.end; ++lane) {
            const T* from = rows.from[lane] + channel;
            float* to = tile + lane * LANES;
            if (count == LANES) store(to, load(from) * set1(scales[lane]));
            else
                for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]) * scales[lane];
            if (values) store_part(values + lane * end + channel, load(to), count);
        }
        transpose_tile(tile, keys + channel * LANES, count);
    }
}

}  // namespace
}  // namespace llm
