// Causal convolution of each channel over the tokens of its batch row, with the row's last inputs as state.
//
// An output is bias + w0 x0 + w1 x1 + ..., one chain of FMAs from the oldest input, so its bits do not depend on how
// the row's tokens are split over steps. A task takes the tokens of one row and a slice of the channels.
#include "activation.h"
#include "kinds.h"
#include "recurrent.h"
#include "rows.h"

namespace llm {
namespace {

constexpr int64_t SLICE = 256;
constexpr int MOST_TAPS = 4;    // of a token that changes the state where it is
constexpr int64_t AHEAD = 512;  // floats that its inputs are prefetched, for the next slice

struct Convolution {
    StateRows rows;
    const float* x;
    int64_t x_stride;
    Kind kind;  // of weight and bias
    const void* weight;
    int64_t weight_channel, weight_tap;  // strides
    const void* bias;                    // or null
    float* state;
    int64_t state_slot, state_channel, state_tap;  // strides
    int64_t channels, taps;
    bool silu;
    float* out;

    // Per thread: the inputs of one token, the weight [taps][SLICE], the inputs before the step [taps - 1][SLICE],
    // bias.
    int64_t scratch_bytes() const { return taps * 8 + (2 * taps) * SLICE * 4; }
};

// [taps][SLICE] of `count` channels, from memory of any strides.
template <class T> void gather(const T* from, int64_t channel, int64_t tap, int64_t taps, int64_t count, float* to) {
    for (int64_t k = 0; k < taps; ++k, from += tap, to += SLICE) {
        if (channel == 1)
            for (int64_t i = 0; i < count; i += LANES) store_part(to + i, load_part(from + i, count - i), count - i);
        else
            for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i * channel]);
    }
}

// The channels [begin, begin + count) of one row.
struct Slice {
    const Convolution& conv;
    int64_t begin, count, first;
    const float** inputs;
    float *weight, *before, *bias;

    Slice(const Convolution& what, int64_t row, int64_t start, char* scratch)
        : conv(what), begin(start), count(min(SLICE, what.channels - start)), first(what.rows.first(row)),
          inputs(reinterpret_cast<const float**>(scratch)), weight(reinterpret_cast<float*>(scratch + what.taps * 8)),
          before(weight + what.taps * SLICE), bias(before + (what.taps - 1) * SLICE) {}

    // Of token `t` of the row; below 0 it is one before this step.
    const float* input(int64_t t) const {
        return t < 0 ? before + (conv.taps - 1 + t) * SLICE : conv.x + (first + t) * conv.x_stride + begin;
    }

    template <class T> void gather_parameters() {
        gather(static_cast<const T*>(conv.weight) + begin * conv.weight_channel, conv.weight_channel, conv.weight_tap,
               conv.taps, count, weight);
        if (conv.bias) gather(static_cast<const T*>(conv.bias) + begin, 1, 0, 1, count, bias);
        else std::memset(bias, 0, count * sizeof(float));
    }

    void convolve(int64_t t) {
        for (int64_t k = 0; k < conv.taps; ++k) inputs[k] = input(t - (conv.taps - 1) + k);
        float* out = conv.out + (first + t) * conv.channels + begin;
        for (int64_t i = 0; i < count; i += LANES) {
            F32 sum = load(bias + i);  // lanes beyond `count` are not stored
            for (int64_t k = 0; k < conv.taps; ++k)
                sum = fma(load(weight + k * SLICE + i), load_part(inputs[k] + i, count - i), sum);
            store_part(out + i, conv.silu ? activate<SILU>(sum) : sum, count - i);
        }
    }

    // The state after the first `tokens` tokens; its old values are in `before`.
    void roll(float* state, int64_t tokens) const {
        for (int64_t j = 0; j < conv.taps - 1; ++j) {
            const float* from = input(tokens - (conv.taps - 1) + j);
            float* to = state + j * conv.state_tap;
            for (int64_t i = 0; i < count; ++i) to[i * conv.state_channel] = from[i];
        }
    }
};

// Sixteen channels of one token, of which `left` exist. All inputs are loaded before the first is stored: a load of an
// address whose lower bits are those of a store just before it would have to wait for that store.
template <bool WHOLE, class T>
LLM_INLINE void convolve_one(const Convolution& conv, const T* weight, const T* bias, float* state, const float* x,
                             float* out, int64_t left) {
    F32 sum = bias ? take<WHOLE>(bias, left) : zero(), input[MOST_TAPS];
    const int64_t taps = conv.taps;
    LLM_UNROLL for (int k = 0; k < MOST_TAPS; ++k) {
        if (k >= taps) break;
        const float* from = k + 1 < taps ? state + k * conv.state_tap : x;
        prefetch(from + AHEAD);
        input[k] = take<WHOLE>(from, left);
        sum = fma(take<WHOLE>(weight + k * conv.weight_tap, left), input[k], sum);
    }
    LLM_UNROLL for (int k = 1; k < MOST_TAPS; ++k) if (k < taps)
        give<WHOLE>(state + (k - 1) * conv.state_tap, input[k], left);
    give<WHOLE>(out, conv.silu ? activate<SILU>(sum) : sum, left);
}

// One token of one row, whose channels are side by side in weight and state: each input moves to the place before.
template <class T> void convolve_one(const Convolution& conv, int64_t row, int64_t begin) {
    const int64_t count = min(SLICE, conv.channels - begin), token = conv.rows.first(row);
    const T* weight = static_cast<const T*>(conv.weight) + begin;
    const T* bias = conv.bias ? static_cast<const T*>(conv.bias) + begin : nullptr;
    float* state = conv.state + conv.rows.slots[row] * conv.state_slot + begin;
    const float* x = conv.x + token * conv.x_stride + begin;
    float* out = conv.out + token * conv.channels + begin;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        convolve_one<true>(conv, weight + i, bias ? bias + i : nullptr, state + i, x + i, out + i, LANES);
    if (i < count)
        convolve_one<false>(conv, weight + i, bias ? bias + i : nullptr, state + i, x + i, out + i, count - i);
}

void convolve_slice(const Convolution& conv, int64_t row, int64_t begin, char* scratch) {
    const int64_t tokens = conv.rows.count(row);
    if (!tokens) return;
    const bool side_by_side = conv.weight_channel == 1 && conv.state_channel == 1 && conv.taps <= MOST_TAPS;
    if (tokens == 1 && conv.rows.stored(row) && !conv.rows.is_new(row) && side_by_side)
        return with_type(conv.kind, [&](auto type) { convolve_one<typename decltype(type)::Value>(conv, row, begin); });
    Slice slice(conv, row, begin, scratch);
    float* state = conv.state + conv.rows.slots[row] * conv.state_slot + begin * conv.state_channel;
    if (conv.rows.is_new(row)) std::memset(slice.before, 0, (conv.taps - 1) * SLICE * sizeof(float));
    else gather(state, conv.state_channel, conv.state_tap, conv.taps - 1, slice.count, slice.before);
    with_type(conv.kind, [&](auto type) { slice.template gather_parameters<typename decltype(type)::Value>(); });
    for (int64_t t = 0; t < tokens; ++t) slice.convolve(t);
    slice.roll(state, conv.rows.stored(row));
}

}  // namespace
}  // namespace llm

using namespace llm;

// x: tokens `x_stride` apart; weight [channels][taps] and state [num_slots][channels][taps - 1] of any strides -> out
// [tokens][channels]. Returns -1; or, having written nothing, the first row whose slot or tokens do not exist.
LLM_EXPORT int64_t llm_causal_conv1d(const int64_t* slots, const int32_t* starts, const int32_t* lengths,
                                     const int32_t* counts, const int32_t* stored, int64_t rows, int64_t num_slots,
                                     const float* x, int64_t x_stride, int64_t tokens, Kind kind, const void* weight,
                                     int64_t weight_channel, int64_t weight_tap, const void* bias, float* state,
                                     int64_t state_slot, int64_t state_channel, int64_t state_tap, int64_t channels,
                                     int64_t taps, int64_t silu, float* out, int64_t threads) {
    const StateRows given{slots, starts, lengths, counts, stored, rows}, of = given.trimmed();
    const int64_t bad = first_bad_row(given, num_slots, tokens);
    if (bad >= 0) return bad;
    const Convolution conv{of,    x,          x_stride,      kind,      weight,   weight_channel, weight_tap, bias,
                           state, state_slot, state_channel, state_tap, channels, taps,           silu != 0,  out};
    const int64_t slices = ceil_div(channels, SLICE);
    const int64_t shared = min(threads, 1 + tokens * channels / ELEMENTS_PER_TASK);
    parallel_for(of.rows * slices, shared, conv.scratch_bytes(), [&](int64_t index, char* scratch) {
        convolve_slice(conv, index / slices, index % slices * SLICE, scratch);
    });
    return -1;
}

LLM_KERNEL(llm_causal_conv1d)
