// The recurrences of Mamba and of Mamba 2 over the tokens of each batch row, in order.
//
// Lanes are channels, which do not depend on each other, and a sum over states has one order: the bits do not depend on
// how a row's tokens are split over steps. A task takes the tokens of one row, and a slice of the channels or one head,
// whose state stays in the L1 or L2 cache meanwhile.
#include "activation.h"
#include "recurrent.h"
#include "replay.h"
#include "rows.h"

namespace llm {
namespace {

// A matrix with one row per token; rows are `stride` floats apart.
struct Tokens {
    const float* from;
    int64_t stride;
    const float* at(int64_t token) const { return from + token * stride; }
};

// Mamba: every channel has its own step and its own decays.
struct SelectiveScan {
    static constexpr int64_t SLICE = 256;  // channels of a task
    // Vectors of channels at a time, whose steps and sums stay in registers while the states pass.
    static constexpr int VECTORS = 4;
    static constexpr int64_t TILE = VECTORS * LANES;
    static constexpr int64_t AHEAD = 2 * TILE;  // channels, whose states are prefetched

    StateRows rows;
    Tokens x, dt, b, c, gate;  // no gate: null
    const float *a, *d, *dt_bias;
    float* state;
    int64_t channels, states;
    float* out;

    // Per thread: the states of a slice and their rates, [states][SLICE] each.
    int64_t scratch_bytes() const { return 2 * states * SLICE * static_cast<int64_t>(sizeof(float)); }

    // V vectors of channels of one token; all of them exist, or the first `left` channels of one vector. `own` and
    // `rates`: from one state to the next there are `stride` floats.
    template <int V, bool WHOLE>
    LLM_INLINE void advance(int64_t token, int64_t channel, int64_t left, float* own, const float* rates,
                            int64_t stride) const {
        const float *input = x.at(token) + channel, *in = b.at(token), *read = c.at(token);
        F32 step[V], scaled[V], sum[V];
        LLM_UNROLL for (int v = 0; v < V; ++v) {
            F32 value = take<WHOLE>(dt.at(token) + channel + v * LANES, left);
            if (dt_bias) value = value + take<WHOLE>(dt_bias + channel + v * LANES, left);
            value = softplus(value);
            scaled[v] = value * take<WHOLE>(input + v * LANES, left);
            step[v] = value * set1(0x1.715476p+0f);  // log2(e): a decay is a power of two
            sum[v] = zero();
        }
        for (int64_t n = 0; n < states; ++n, own += stride, rates += stride) {
            const F32 added = set1(in[n]), weight = set1(read[n]);
            LLM_UNROLL for (int v = 0; v < V; ++v) {
                prefetch(own + AHEAD + v * LANES);
                const F32 decay = exp2_of_negative(take<WHOLE>(rates + v * LANES, left) * step[v]);
                const F32 next = fma(decay, take<WHOLE>(own + v * LANES, left), added * scaled[v]);
                give<WHOLE>(own + v * LANES, next, left);
                sum[v] = fma(weight, next, sum[v]);
            }
        }
        LLM_UNROLL for (int v = 0; v < V; ++v) {
            const int64_t at = channel + v * LANES;
            F32 y = fma(take<WHOLE>(d + at, left), take<WHOLE>(input + v * LANES, left), sum[v]);
            if (gate.from) y = y * activate<SILU>(take<WHOLE>(gate.at(token) + at, left));
            give<WHOLE>(out + token * channels + at, y, left);
        }
    }

    // The tokens [from, to) change `own`, the states of `count` channels.
    void pass(int64_t from, int64_t to, int64_t begin, int64_t count, float* own, const float* rates,
              int64_t stride) const {
        for (int64_t token = from; token < to; ++token) {
            int64_t i = 0;
            for (; i + TILE <= count; i += TILE)
                advance<VECTORS, true>(token, begin + i, LANES, own + i, rates + i, stride);
            for (; i < count; i += LANES) advance<1, false>(token, begin + i, count - i, own + i, rates + i, stride);
        }
    }

    void run(int64_t row, int64_t begin, float* own) const {
        const int64_t count = min(SLICE, channels - begin), first = rows.first(row), tokens = rows.count(row);
        if (!tokens) return;
        float* kept = state + rows.slots[row] * states * channels + begin;
        // One token is not worth copies.
        if (tokens == 1 && rows.stored(row) == 1 && !rows.is_new(row))
            return pass(first, first + 1, begin, count, kept, a + begin, channels);
        float* rates = own + states * SLICE;
        for (int64_t n = 0; n < states; ++n) {
            std::memcpy(rates + n * SLICE, a + n * channels + begin, count * sizeof(float));
            if (rows.is_new(row)) std::memset(own + n * SLICE, 0, count * sizeof(float));
            else std::memcpy(own + n * SLICE, kept + n * channels, count * sizeof(float));
        }
        const int64_t behind = first + rows.stored(row);
        pass(first, behind, begin, count, own, rates, SLICE);
        for (int64_t n = 0; n < states; ++n) std::memcpy(kept + n * channels, own + n * SLICE, count * sizeof(float));
        pass(behind, first + tokens, begin, count, own, rates, SLICE);
    }
};

// Mamba 2: the channels of a head share one step and one decay.
struct Mamba2Scan {
    // Vectors of channels at a time, whose sums fit the registers: a head of 64 channels is read from end to end. Fewer
    // sums wait for each other, so half as many are taken where they fit.
    static constexpr int VECTORS = 4;
    static constexpr int64_t STEPS = LANES;  // tokens whose steps are computed at a time

    StateRows rows;
    Tokens x, dt, b, c;
    const float *a, *d, *dt_bias;
    bool d_by_channel;
    float lowest, highest;
    float* state;
    int64_t heads, groups, states, channels;
    float* out;

    // The steps and the decays of `count` tokens of a head.
    void steps(int64_t head, int64_t token, int64_t count, float* step, float* decay) const {
        for (int64_t i = 0; i < STEPS; ++i) step[i] = i < count ? dt.at(token + i)[head] : 0.0f;
        F32 value = load(step);
        if (dt_bias) value = value + set1(dt_bias[head]);
        value = min(set1(highest), max(set1(lowest), softplus(value)));
        store(step, value);
        store(decay, exp(set1(a[head]) * value));
    }

    // V vectors of channels of one head and token; all of them exist, or the first `left` channels of one vector.
    template <int V, bool WHOLE>
    LLM_INLINE void advance(int64_t head, int64_t token, int64_t channel, int64_t left, float step, float decay,
                            float* own) const {
        const int64_t at = head * channels + channel, group = head / (heads / groups) * states;
        const float *input = x.at(token) + at, *in = b.at(token) + group, *read = c.at(token) + group;
        F32 sum[V], scaled[V];
        LLM_UNROLL for (int v = 0; v < V; ++v) {
            sum[v] = zero();
            scaled[v] = take<WHOLE>(input + v * LANES, left) * set1(step);
        }
        const F32 kept = set1(decay);
        for (int64_t n = 0; n < states; ++n, own += channels) {
            const F32 added = set1(in[n]), weight = set1(read[n]);
            LLM_UNROLL for (int v = 0; v < V; ++v) {
                const F32 next = fma(added, scaled[v], take<WHOLE>(own + v * LANES, left) * kept);
                give<WHOLE>(own + v * LANES, next, left);
                sum[v] = fma(weight, next, sum[v]);
            }
        }
        LLM_UNROLL for (int v = 0; v < V; ++v) {
            const F32 skip = d_by_channel ? take<WHOLE>(d + at + v * LANES, left) : set1(d[head]);
            const F32 y = fma(skip, take<WHOLE>(input + v * LANES, left), sum[v]);
            give<WHOLE>(out + token * heads * channels + at + v * LANES, y, left);
        }
    }

    template <int V, bool WHOLE>
    void tile(int64_t head, int64_t begin, int64_t end, int64_t channel, float* own) const {
        const int64_t left = channels - channel;
        for (int64_t token = begin; token < end; token += STEPS) {
            const int64_t count = min(STEPS, end - token);
            alignas(64) float step[STEPS], decay[STEPS];
            steps(head, token, count, step, decay);
            for (int64_t i = 0; i < count; ++i)
                advance<V, WHOLE>(head, token + i, channel, left, step[i], decay[i], own + channel);
        }
    }

    // The tokens [begin, end) change the state `own` of one head.
    void pass(int64_t head, int64_t begin, int64_t end, float* own) const {
        int64_t channel = 0;
        for (; channel + VECTORS * LANES <= channels; channel += VECTORS * LANES)
            tile<VECTORS, true>(head, begin, end, channel, own);
        for (; channel + VECTORS / 2 * LANES <= channels; channel += VECTORS / 2 * LANES)
            tile<VECTORS / 2, true>(head, begin, end, channel, own);
        for (; channel < channels; channel += LANES) tile<1, false>(head, begin, end, channel, own);
    }

    // Per thread: a copy of a head's state, if tokens may have to be forgotten.
    int64_t scratch_bytes() const {
        return rows.stored_counts ? states * channels * static_cast<int64_t>(sizeof(float)) : 0;
    }

    void run(int64_t row, int64_t head, float* scratch) const {
        const int64_t count = rows.count(row), stored = rows.stored(row), first = rows.first(row);
        if (!count) return;
        const int64_t size = states * channels;
        float* own = state + (rows.slots[row] * heads + head) * size;
        if (rows.is_new(row)) std::memset(own, 0, size * sizeof(float));
        pass(head, first, first + stored, own);
        if (stored == count) return;
        std::memcpy(scratch, own, size * sizeof(float));
        pass(head, first + stored, first + count, scratch);
    }
};

// At most one thread for each `ELEMENTS_PER_TASK` states that are advanced.
int64_t threads_for(int64_t tokens, int64_t states, int64_t threads) {
    return min(threads, 1 + tokens * states / ELEMENTS_PER_TASK);
}

}  // namespace
}  // namespace llm

using namespace llm;

// x, dt, gate (or null): tokens of `channels` values; b and c of `states`; a [states][channels]; state
// [num_slots][states][channels] -> out [tokens][channels]. Returns -1; or, having written nothing, the first row whose
// slot or tokens do not exist.
LLM_EXPORT int64_t llm_selective_scan(const int64_t* slots, const int32_t* starts, const int32_t* lengths,
                                      const int32_t* counts, const int32_t* stored, int64_t rows, int64_t num_slots,
                                      int64_t tokens, const float* x, int64_t x_stride, const float* dt,
                                      int64_t dt_stride, const float* b, int64_t b_stride, const float* c,
                                      int64_t c_stride, const float* gate, int64_t gate_stride, const float* a,
                                      const float* d, const float* dt_bias, float* state, int64_t channels,
                                      int64_t states, float* out, int64_t threads) {
    const StateRows given{slots, starts, lengths, counts, stored, rows}, of = given.trimmed();
    const int64_t bad = first_bad_row(given, num_slots, tokens);
    if (bad >= 0) return bad;
    const SelectiveScan scan{of,
                             {x, x_stride},
                             {dt, dt_stride},
                             {b, b_stride},
                             {c, c_stride},
                             {gate, gate_stride},
                             a,
                             d,
                             dt_bias,
                             state,
                             channels,
                             states,
                             out};
    const int64_t tasks = of.rows * ceil_div(channels, SelectiveScan::SLICE);
    const int64_t shared = threads_for(tokens, channels * states, threads);
    parallel_for(tasks, shared, scan.scratch_bytes(), [&](int64_t index, char* scratch) {
        scan.run(index % of.rows, index / of.rows * SelectiveScan::SLICE, reinterpret_cast<float*>(scratch));
    });
    return -1;
}

// x: tokens of heads * channels values; dt of `heads`; b and c of groups * states; d [heads], or [heads][channels];
// state [num_slots][heads][states][channels] -> out [tokens][heads][channels]. Returns as above.
LLM_EXPORT int64_t llm_mamba2_scan(const int64_t* slots, const int32_t* starts, const int32_t* lengths,
                                   const int32_t* counts, const int32_t* stored, int64_t rows, int64_t num_slots,
                                   int64_t tokens, const float* x, int64_t x_stride, const float* dt, int64_t dt_stride,
                                   const float* b, int64_t b_stride, const float* c, int64_t c_stride, const float* a,
                                   const float* d, int64_t d_by_channel, const float* dt_bias, float lowest,
                                   float highest, float* state, int64_t heads, int64_t groups, int64_t states,
                                   int64_t channels, float* out, int64_t threads) {
    const StateRows given{slots, starts, lengths, counts, stored, rows}, of = given.trimmed();
    const int64_t bad = first_bad_row(given, num_slots, tokens);
    if (bad >= 0) return bad;
    const Mamba2Scan scan{of,
                          {x, x_stride},
                          {dt, dt_stride},
                          {b, b_stride},
                          {c, c_stride},
                          a,
                          d,
                          dt_bias,
                          d_by_channel != 0,
                          lowest,
                          highest,
                          state,
                          heads,
                          groups,
                          states,
                          channels,
                          out};
    const int64_t shared = threads_for(tokens, heads * states * channels, threads);
    parallel_for(of.rows * heads, shared, scan.scratch_bytes(), [&](int64_t index, char* scratch) {
        scan.run(index / heads, index % heads, reinterpret_cast<float*>(scratch));
    });
    return -1;
}

LLM_KERNEL(llm_selective_scan)
LLM_KERNEL(llm_mamba2_scan)
