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
    static constexpr int64_t SLICE = 512;  // channels of a task
    static constexpr int64_t AHEAD = 2;    // states whose channels are prefetched

    StateRows rows;
    Tokens x, dt, b, c, gate;  // no gate: null
    const float* a_log;
    int64_t a_channel, a_state;  // strides
    const float *d, *dt_bias;
    float* state;
    int64_t channels, states;
    float* out;

    // Per thread, of a slice: a state and the rates, [states][SLICE] each; then of a token [SLICE] each: its steps, the
    // inputs times the steps, and the sums over the states.
    int64_t scratch_bytes() const { return (2 * states + 3) * SLICE * static_cast<int64_t>(sizeof(float)); }

    // -exp(a_log) log2(e): a decay is a power of two.
    void gather_rates(int64_t begin, int64_t count, float* rates) const {
        const F32 factor = set1(-0x1.715476p+0f);
        for (int64_t n = 0; n < states; ++n, rates += SLICE) {
            const float* from = a_log + begin * a_channel + n * a_state;
            if (a_channel == 1) std::memcpy(rates, from, count * sizeof(float));
            else
                for (int64_t i = 0; i < count; ++i) rates[i] = from[i * a_channel];
            // Lanes beyond `count` are computed too, and dropped.
            for (int64_t i = count; i % LANES; ++i) rates[i] = 0.0f;
            for (int64_t i = 0; i < count; i += LANES) store(rates + i, factor * exp(load(rates + i)));
        }
    }

    // The steps of one token's channels and their inputs times these.
    void read_token(int64_t token, int64_t begin, int64_t count, float* steps, float* scaled) const {
        for (int64_t i = 0; i < count; i += LANES) {
            const int64_t left = count - i;
            F32 step = load_part(dt.at(token) + begin + i, left);
            if (dt_bias) step = step + load_part(dt_bias + begin + i, left);
            step = softplus(step);
            store(steps + i, step);
            store(scaled + i, step * load_part(x.at(token) + begin + i, left));
        }
    }

    // Sixteen channels of one state, of which `left` exist.
    template <bool WHOLE>
    LLM_INLINE void advance(float* own, int64_t left, F32 rate, F32 in, F32 read, const float* step,
                            const float* scaled, float* sum) const {
        const F32 decay = exp2_of_negative(rate * load(step));
        const F32 next = fma(decay, take<WHOLE>(own, left), in * load(scaled));
        give<WHOLE>(own, next, left);
        store(sum, fma(read, next, load(sum)));
    }

    void write_token(int64_t token, int64_t begin, int64_t count, const float* sums) const {
        for (int64_t i = 0; i < count; i += LANES) {
            const int64_t left = count - i;
            F32 sum = fma(load_part(d + begin + i, left), load_part(x.at(token) + begin + i, left), load(sums + i));
            if (gate.from) sum = sum * activate<SILU>(load_part(gate.at(token) + begin + i, left));
            store_part(out + token * channels + begin + i, sum, left);
        }
    }

    // The tokens [from, to) of a slice. `own`: its states, `stride` floats from one to the next; `after`: what is read
    // after the last of them. A state's channels lie side by side in memory, and the next state's far away: they are
    // read in this order, and prefetched, because the processor does not see where the next are.
    void pass(int64_t from, int64_t to, int64_t begin, int64_t count, float* own, int64_t stride, const float* after,
              const float* rates, float* scratch) const {
        float *steps = scratch, *scaled = steps + SLICE, *sums = scaled + SLICE;
        for (int64_t token = from; token < to; ++token) {
            read_token(token, begin, count, steps, scaled);
            std::memset(sums, 0, SLICE * sizeof(float));
            for (int64_t n = 0; n < states; ++n) {
                const F32 in = set1(b.at(token)[n]), read = set1(c.at(token)[n]);
                float* at = own + n * stride;
                const float* rate = rates + n * SLICE;
                const float* later = n + AHEAD < states ? at + AHEAD * stride : after + (n + AHEAD - states) * stride;
                int64_t i = 0;
                for (; i + LANES <= count; i += LANES) {
                    prefetch(later + i);
                    advance<true>(at + i, LANES, load(rate + i), in, read, steps + i, scaled + i, sums + i);
                }
                if (i < count)
                    advance<false>(at + i, count - i, load(rate + i), in, read, steps + i, scaled + i, sums + i);
            }
            write_token(token, begin, count, sums);
        }
    }

    void run(int64_t row, int64_t begin, const float* after, const float* rates, float* scratch) const {
        const int64_t count = min(SLICE, channels - begin), first = rows.first(row), tokens = rows.count(row);
        if (!tokens) return;
        float* kept = state + rows.slots[row] * states * channels + begin;
        float *own = scratch, *more = scratch + states * SLICE;
        // One token is not worth a copy of the state.
        if (tokens == 1 && rows.stored(row) == 1 && !rows.is_new(row))
            return pass(first, first + 1, begin, count, kept, channels, after, rates, more);
        for (int64_t n = 0; n < states; ++n)
            if (rows.is_new(row)) std::memset(own + n * SLICE, 0, count * sizeof(float));
            else std::memcpy(own + n * SLICE, kept + n * channels, count * sizeof(float));
        const int64_t behind = first + rows.stored(row);
        pass(first, behind, begin, count, own, SLICE, own, rates, more);
        for (int64_t n = 0; n < states; ++n) std::memcpy(kept + n * channels, own + n * SLICE, count * sizeof(float));
        pass(behind, first + tokens, begin, count, own, SLICE, own, rates, more);
    }

    // All rows of a slice, whose rates are computed once.
    void run(int64_t slice, float* scratch) const {
        const int64_t begin = slice * SLICE, size = states * channels;
        float* rates = scratch + (states + 3) * SLICE;
        gather_rates(begin, min(SLICE, channels - begin), rates);
        for (int64_t row = 0; row < rows.rows; ++row) {
            const bool last = row + 1 == rows.rows;
            const float* after = state + rows.slots[last ? 0 : row + 1] * size + begin + (last ? SLICE : 0);
            run(row, begin, after, rates, scratch);
        }
    }
};

// Mamba 2: the channels of a head share one step and one decay.
struct Mamba2Scan {
    // Vectors of channels at a time, whose sums fit the registers: a head of 64 channels is read from end to end.
    static constexpr int VECTORS = 4;
    static constexpr int64_t STEPS = LANES;  // tokens whose steps are computed at a time

    StateRows rows;
    Tokens x, dt, b, c;
    const float *a_log, *d, *dt_bias;
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
        store(decay, exp((zero() - exp(set1(a_log[head]))) * value));
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

// x, dt, gate (or null): tokens of `channels` values; b and c of `states`; a_log [channels][states] of any strides;
// state [num_slots][states][channels] -> out [tokens][channels]. Returns -1; or, having written nothing, the first row
// whose slot or tokens do not exist.
LLM_EXPORT int64_t llm_selective_scan(const int64_t* slots, const int32_t* starts, const int32_t* lengths,
                                      const int32_t* counts, const int32_t* stored, int64_t rows, int64_t num_slots,
                                      int64_t tokens, const float* x, int64_t x_stride, const float* dt,
                                      int64_t dt_stride, const float* b, int64_t b_stride, const float* c,
                                      int64_t c_stride, const float* gate, int64_t gate_stride, const float* a_log,
                                      int64_t a_channel, int64_t a_state, const float* d, const float* dt_bias,
                                      float* state, int64_t channels, int64_t states, float* out, int64_t threads) {
    const StateRows of{slots, starts, lengths, counts, stored, rows};
    const int64_t bad = first_bad_row(of, num_slots, tokens);
    if (bad >= 0) return bad;
    const SelectiveScan scan{of,
                             {x, x_stride},
                             {dt, dt_stride},
                             {b, b_stride},
                             {c, c_stride},
                             {gate, gate_stride},
                             a_log,
                             a_channel,
                             a_state,
                             d,
                             dt_bias,
                             state,
                             channels,
                             states,
                             out};
    const int64_t slices = ceil_div(channels, SelectiveScan::SLICE);
    const int64_t shared = threads_for(tokens, channels * states, threads);
    parallel_for(slices, shared, scan.scratch_bytes(),
                 [&](int64_t index, char* scratch) { scan.run(index, reinterpret_cast<float*>(scratch)); });
    return -1;
}

// x: tokens of heads * channels values; dt of `heads`; b and c of groups * states; d [heads], or [heads][channels];
// state [num_slots][heads][states][channels] -> out [tokens][heads][channels]. Returns as above.
LLM_EXPORT int64_t llm_mamba2_scan(const int64_t* slots, const int32_t* starts, const int32_t* lengths,
                                   const int32_t* counts, const int32_t* stored, int64_t rows, int64_t num_slots,
                                   int64_t tokens, const float* x, int64_t x_stride, const float* dt, int64_t dt_stride,
                                   const float* b, int64_t b_stride, const float* c, int64_t c_stride,
                                   const float* a_log, const float* d, int64_t d_by_channel, const float* dt_bias,
                                   float lowest, float highest, float* state, int64_t heads, int64_t groups,
                                   int64_t states, int64_t channels, float* out, int64_t threads) {
    const StateRows of{slots, starts, lengths, counts, stored, rows};
    const int64_t bad = first_bad_row(of, num_slots, tokens);
    if (bad >= 0) return bad;
    const Mamba2Scan scan{of,
                          {x, x_stride},
                          {dt, dt_stride},
                          {b, b_stride},
                          {c, c_stride},
                          a_log,
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
    parallel_for(rows * heads, shared, scan.scratch_bytes(), [&](int64_t index, char* scratch) {
        scan.run(index / heads, index % heads, reinterpret_cast<float*>(scratch));
    });
    return -1;
}

LLM_KERNEL(llm_selective_scan)
LLM_KERNEL(llm_mamba2_scan)
