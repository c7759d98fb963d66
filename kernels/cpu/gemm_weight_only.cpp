// y = x W^T (+ bias) with float32 activations and int8 or int4 weights: W[n, k] = (w[n, k] - zero[n, g]) * scale[n, g].
//
// The weights of a panel are made float32 for a block of k at a time, in the cache; each output is then one chain of fused
// multiply-adds over k = 0 ... K-1, as with a float weight. Panels are those of gemm_int8.cpp and gemm_int4.cpp.
#include "panels.h"
#include "replay.h"

namespace llm {
namespace {

#if LLM_AVX512
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 6;
#endif
constexpr int64_t BLOCK_K = 256;
constexpr int64_t PREFETCH_BYTES = 4096;

struct Product {
    const float* x;
    const uint8_t* weight;
    const float* scale;  // [groups][stride]
    const float* zero;   // the same, or null
    const float* bias;
    float* y;
    int64_t m, n, k, group_size, stride, bits;

    int64_t step() const { return bits == 8 ? 4 : 8; }
    int64_t panel_bytes() const { return ceil_div(k, step()) * 64; }
};

// Value j of each column's four bytes, or j of its eight nibbles, which are stored plus 8.
LLM_INLINE F32 widen_byte(const uint8_t* p, int j) {
    alignas(64) float out[LANES];
    for (int c = 0; c < LANES; ++c) out[c] = static_cast<float>(static_cast<int8_t>(p[4 * c + j]));
    return load(out);
}
LLM_INLINE F32 widen_nibble(const uint8_t* p, int j) {
    alignas(64) float out[LANES];
    for (int c = 0; c < LANES; ++c) out[c] = static_cast<float>((j < 4 ? p[4 * c + j] & 15 : p[4 * c + j - 4] >> 4) - 8);
    return load(out);
}
#if !defined(LLM_PLAIN)
// A column's four bytes are one 32-bit lane: shift the wanted bits to the top, and down again with their sign.
template <int UP, int DOWN> LLM_INLINE F32 widen_bits(I32 lanes) {
#if LLM_AVX512
    return to_float(I32{_mm512_srai_epi32(_mm512_slli_epi32(lanes.v, UP), DOWN)});
#else
    return to_float(I32{_mm256_srai_epi32(_mm256_slli_epi32(lanes.lo, UP), DOWN),
                        _mm256_srai_epi32(_mm256_slli_epi32(lanes.hi, UP), DOWN)});
#endif
}
LLM_INLINE I32 lanes_of(const uint8_t* p) { return load_i(reinterpret_cast<const int32_t*>(p)); }
LLM_INLINE I32 signed_nibbles(I32 lanes) {  // stored plus 8: the top bit of each nibble is the other way round
    const I32 flip = set1_i(static_cast<int32_t>(0x88888888u));
#if LLM_AVX512
    return {_mm512_xor_si512(lanes.v, flip.v)};
#else
    return {_mm256_xor_si256(lanes.lo, flip.lo), _mm256_xor_si256(lanes.hi, flip.hi)};
#endif
}
#endif

// One step of a panel as floats: [4 or 8][16].
LLM_INLINE void widen_step(const uint8_t* p, int64_t bits, F32* out) {
#if defined(LLM_PLAIN)
    for (int j = 0; j < (bits == 8 ? 4 : 8); ++j) out[j] = bits == 8 ? widen_byte(p, j) : widen_nibble(p, j);
#else
    if (bits == 8) {
        const I32 lanes = lanes_of(p);
        out[0] = widen_bits<24, 24>(lanes), out[1] = widen_bits<16, 24>(lanes);
        out[2] = widen_bits<8, 24>(lanes), out[3] = widen_bits<0, 24>(lanes);
        return;
    }
    const I32 lanes = signed_nibbles(lanes_of(p));  // k, k + 4, k + 1, k + 5 ... from the lowest nibble up
    out[0] = widen_bits<28, 28>(lanes), out[4] = widen_bits<24, 28>(lanes);
    out[1] = widen_bits<20, 28>(lanes), out[5] = widen_bits<16, 28>(lanes);
    out[2] = widen_bits<12, 28>(lanes), out[6] = widen_bits<8, 28>(lanes);
    out[3] = widen_bits<4, 28>(lanes), out[7] = widen_bits<0, 28>(lanes);
#endif
}

// Weights of k in [first, end) of a panel into out [end - first][16]; `first` is a multiple of 8.
void widen_block(const Product& p, int64_t panel, int64_t first, int64_t end, float* out) {
    const int64_t column = panel * LANES, columns = p.n - column, step = p.step();
    const uint8_t* from = p.weight + panel * p.panel_bytes();
    int64_t group = -1;
    F32 scale = zero(), shift = zero();
    for (int64_t k = first; k < end; k += step) {
        F32 values[8];
        prefetch(from + k / step * 64 + PREFETCH_BYTES);
        widen_step(from + k / step * 64, p.bits, values);
        for (int64_t j = 0; j < Tasks::least(step, end - k); ++j) {
            if ((k + j) / p.group_size != group) {
                group = (k + j) / p.group_size;
                scale = load_part(p.scale + group * p.stride + column, columns);
                shift = p.zero ? load_part(p.zero + group * p.stride + column, columns) : zero();
            }
            const F32 value = p.zero ? values[j] - shift : values[j];
            store(out + (k + j - first) * LANES, value * scale);
        }
    }
}

// sums [ROWS][16] += x [ROWS][count] w [count][16]
template <int ROWS> __attribute__((noinline)) void accumulate(const float* x, int64_t stride, const float* w, int64_t count, float* sums) {
    F32 acc[ROWS];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) acc[r] = load(sums + r * LANES);
    for (int64_t k = 0; k < count; ++k) {
        const F32 weight = load(w + k * LANES);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) acc[r] = fma(set1(x[r * stride + k]), weight, acc[r]);
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) store(sums + r * LANES, acc[r]);
}

}  // namespace
}  // namespace llm

using namespace llm;

// bits: 8 or 4; scale and zero (or null): [groups][stride].
LLM_EXPORT void llm_linear_weight_only(int64_t bits, const float* x, const uint8_t* weight, const float* scale, const float* zero,
                                       int64_t stride, int64_t group_size, const float* bias, float* y, int64_t m, int64_t n,
                                       int64_t k, int64_t threads) {
    const Product p{x, weight, scale, zero, bias, y, m, n, k, group_size, stride, bits};
    const Tasks tasks(m, n, MAX_ROWS, 0, 0, threads);
    const int64_t block_floats = BLOCK_K * LANES;
    parallel_for(ceil_div(n, LANES), threads, (block_floats + m * LANES) * sizeof(float), [&](int64_t panel, char* scratch) {
        float* block = reinterpret_cast<float*>(scratch);
        float* sums = block + block_floats;
        std::memset(sums, 0, m * LANES * sizeof(float));
        for (int64_t first = 0; first < k; first += BLOCK_K) {
            const int64_t end = Tasks::least(first + BLOCK_K, k);
            widen_block(p, panel, first, end, block);
            for (int64_t tile = 0; tile < tasks.tiles(); ++tile)
                with_rows(tasks.rows(tile), [&](auto rows) {
                    const int64_t row = tasks.first_row(tile);
                    accumulate<decltype(rows)::value>(x + row * k + first, k, block, end - first, sums + row * LANES);
                });
        }
        const int64_t column = panel * LANES, columns = n - column;
        const F32 shift = bias ? load_part(bias + column, columns) : llm::zero();
        for (int64_t row = 0; row < m; ++row) {
            const F32 sum = load(sums + row * LANES);
            store_part(y + row * n + column, bias ? sum + shift : sum, columns);
        }
    });
}

LLM_REPLAYABLE(llm_linear_weight_only)
