// The feed-forward of a mixture of experts: for each token the weighted sum of the experts that its router chose.
//
// A pair is a token and one of its slots. Pairs are sorted by expert, so each used expert's weights are read once for
// all of its pairs. A task is up to some hundred pairs of one expert by a slice of output channels: one GEMM of
// linear.cpp on one thread, so a pair has the bits of llm_linear whatever its company. Gate, up and activation of all
// pairs are one parallel region, the down products are the next, and the sums in the order of the slots follow.
#include "activation.h"
#include "rows.h"
#include "weight.h"

namespace llm {
namespace {

// Beside the functions of activation.h. kernels/cpu/experts.py has the same number.
constexpr int64_t SWIGLUOAI = 6;

constexpr int64_t TASKS_PER_THREAD = 8;      // a late core takes fewer
constexpr int64_t SLICE_PANELS = 4;          // a slice is of a multiple: as many as a tile of one row takes at once
constexpr int64_t ROWS_BYTES = 2 << 20;      // of a task's activations
constexpr int64_t RESULT_BYTES = 1 << 20;    // of a task's gates and ups
constexpr int64_t PRODUCT_BYTES = 32 << 20;  // of the down products that wait for their sum

// The arguments of llm_experts.
struct Mixture {
    const Weight *gate_up, *down;  // [experts]
    int64_t experts;
    const float* x;
    const int64_t* ids;    // [tokens][top_k]
    const float* factors;  // [tokens][top_k]
    int64_t tokens, top_k;
    int64_t function;
    float limit;
    float* y;
    int64_t threads;

    int64_t pairs() const { return tokens * top_k; }
    int64_t hidden() const { return gate_up->k; }
    int64_t inner() const { return down->k; }
    bool is_gated() const { return gate_up->n != inner(); }
};

// Pairs [first, first + count) of the sorted ones, all of one expert.
struct Share { int64_t expert, first, count; };

// Pairs by expert, and in an expert by token.
class Sorted {
    const Scratch memory_;
    int64_t *tokens_, *places_;
    Share* shares_;
    int64_t count_ = 0, most_ = 0;

  public:
    // `limit`: pairs of a share, at most.
    Sorted(const Mixture& mix, int64_t limit) : memory_((mix.experts + 2 + 5 * mix.pairs()) * sizeof(int64_t)) {
        int64_t* starts = memory_.as<int64_t>();
        tokens_ = starts + mix.experts + 2;
        places_ = tokens_ + mix.pairs();
        shares_ = reinterpret_cast<Share*>(places_ + mix.pairs());
        std::memset(starts, 0, (mix.experts + 2) * sizeof(int64_t));
        for (int64_t i = 0; i < mix.pairs(); ++i) ++starts[mix.ids[i] + 2];
        for (int64_t e = 0; e < mix.experts; ++e) starts[e + 2] += starts[e + 1];
        for (int64_t i = 0; i < mix.pairs(); ++i) {
            places_[i] = starts[mix.ids[i] + 1]++;  // so starts[e] ends as the first pair of expert e
            tokens_[places_[i]] = i / mix.top_k;
        }
        for (int64_t e = 0; e < mix.experts; ++e)
            for (int64_t first = starts[e]; first < starts[e + 1]; first += limit) {
                const int64_t count = min(limit, starts[e + 1] - first);
                shares_[count_++] = {e, first, count};
                most_ = max(most_, count);
            }
    }
    int64_t shares() const { return count_; }
    const Share& share(int64_t index) const { return shares_[index]; }
    // Pairs of the largest share.
    int64_t most() const { return most_; }
    // Where the pairs of a token are, slot by slot.
    const int64_t* places(int64_t token, int64_t top_k) const { return places_ + token * top_k; }
    // The rows of x [tokens][width] of a share: in place, or copied to `to`.
    const float* rows(const Share& share, const float* x, int64_t width, float* to) const {
        const int64_t* token = tokens_ + share.first;
        if (token[share.count - 1] - token[0] == share.count - 1) return x + token[0] * width;
        for (int64_t r = 0; r < share.count; ++r) std::memcpy(to + r * width, x + token[r] * width, width * sizeof *x);
        return to;
    }
};

// n output channels cut into at least `least` slices of a multiple of SLICE_PANELS panels, where there are so many.
struct Slices {
    int64_t n, width, count;
    Slices(int64_t channels, int64_t least) : n(channels) {
        constexpr int64_t unit = SLICE_PANELS * LANES;
        width = max(1, ceil_div(n, unit * max(1, least))) * unit;
        count = ceil_div(n, width);
    }
    int64_t first(int64_t slice) const { return slice * width; }
    int64_t end(int64_t slice) const { return min(n, first(slice + 1)); }
};

int64_t least_slices(const Mixture& mix, const Sorted& pairs) {
    return ceil_div(TASKS_PER_THREAD * mix.threads, pairs.shares());
}

// g sigmoid(1.702 g) (u + 1) with g = min(gate, limit) and u = up within +-limit. NaN passes through: min(a, b) and
// max(a, b) are b if either is NaN.
void swigluoai_row(const float* gate, const float* up, float limit, float* out, int64_t width) {
    const F32 most = set1(limit), least = set1(-limit);
    for (int64_t i = 0; i < width; i += LANES) {
        const F32 g = min(most, load_part(gate + i, width - i));
        const F32 u = max(least, min(most, load_part(up + i, width - i)));
        store_part(out + i, activate<QUICK_GELU>(g) * (u + set1(1.0f)), width - i);
    }
}

// Gate, up and activation of all pairs -> out [pairs][inner]; without a gate up and activation.
void compute_inner(const Mixture& mix, const Sorted& pairs, float* out) {
    const int64_t inner = mix.inner(), result_bytes = pairs.most() * 2 * inner * static_cast<int64_t>(sizeof(float));
    const Slices slices(inner, max(least_slices(mix, pairs), ceil_div(result_bytes, RESULT_BYTES)));
    // A slice of `up` may begin within a panel: the GEMM then begins with the panel.
    const int64_t copied = pairs.most() * mix.hidden(), results = pairs.most() * (slices.width + LANES);
    const int64_t scratch_bytes = (copied + 2 * results) * sizeof(float);
    parallel_for(slices.count * pairs.shares(), mix.threads, scratch_bytes, [&](int64_t task, char* scratch) {
        const Share& share = pairs.share(task % pairs.shares());
        const int64_t first = slices.first(task / pairs.shares()), end = slices.end(task / pairs.shares());
        const Weight& both = mix.gate_up[share.expert];
        const int64_t skipped = (inner + first) % LANES;
        const Weight gate = channels(both, first, end);
        float *copies = reinterpret_cast<float*>(scratch), *gates = copies + copied, *ups = gates + results;
        const float* x = pairs.rows(share, mix.x, mix.hidden(), copies);
        linear(gate, x, gates, share.count, 1);
        if (!mix.is_gated()) {
            for (int64_t r = 0; r < share.count; ++r)
                activation_row(mix.function, gates + r * gate.n, nullptr, out + (share.first + r) * inner + first,
                               end - first);
            return;
        }
        const Weight up = channels(both, inner + first - skipped, inner + end);
        linear(up, x, ups, share.count, 1);
        for (int64_t r = 0; r < share.count; ++r) {
            const float *g = gates + r * gate.n, *u = ups + r * up.n + skipped;
            float* to = out + (share.first + r) * inner + first;
            if (mix.function == SWIGLUOAI) swigluoai_row(g, u, mix.limit, to, end - first);
            else activation_row(mix.function, g, u, to, end - first);
        }
    });
}

// out[i] = sum over the slots, in order, of factor * products[place][i].
void add_slots(const float* products, const int64_t* places, const float* factors, int64_t slots, float* out,
               int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) {
        F32 total = zero();
        for (int64_t slot = 0; slot < slots; ++slot) {
            const F32 term = set1(factors[slot]) * load_part(products + places[slot] * width + i, width - i);
            total = slot ? total + term : term;
        }
        store_part(out + i, total, width - i);
    }
}

// Down products of inner [pairs][inner], and their sums -> y: some slices at a time, for what memory they take.
void compute_sums(const Mixture& mix, const Sorted& pairs, const float* inner) {
    const int64_t hidden = mix.hidden(), row_bytes = mix.pairs() * static_cast<int64_t>(sizeof(float));
    const Slices slices(hidden, max(least_slices(mix, pairs), ceil_div(row_bytes * hidden, PRODUCT_BYTES)));
    const int64_t at_once = min(slices.count, max(1, PRODUCT_BYTES / (row_bytes * slices.width)));
    const Scratch memory(at_once * slices.width * row_bytes);
    for (int64_t begin = 0; begin < slices.count; begin += at_once) {
        const int64_t end = min(slices.count, begin + at_once);
        // [pairs][width of the slice], one slice after the other.
        const auto products = [&](int64_t slice) {
            return memory.as<float>() + (slice - begin) * slices.width * mix.pairs();
        };
        parallel_for((end - begin) * pairs.shares(), mix.threads, 0, [&](int64_t task, char*) {
            const Share& share = pairs.share(task % pairs.shares());
            const int64_t slice = begin + task / pairs.shares();
            const Weight part = channels(mix.down[share.expert], slices.first(slice), slices.end(slice));
            linear(part, inner + share.first * mix.inner(), products(slice) + share.first * part.n, share.count, 1);
        });
        for_rows(mix.tokens, mix.top_k * (end - begin) * slices.width, mix.threads, [&](int64_t token) {
            for (int64_t slice = begin; slice < end; ++slice)
                add_slots(products(slice), pairs.places(token, mix.top_k), mix.factors + token * mix.top_k, mix.top_k,
                          mix.y + token * hidden + slices.first(slice), slices.end(slice) - slices.first(slice));
        });
    }
}

}  // namespace
}  // namespace llm

using namespace llm;

// y [tokens, hidden] = sum over the slots, in order, of factors[token, slot] * down(act(gate_up(x[token]))), each with
// the weights of the expert ids[token, slot]. Weights [experts]: gate_up [2 inner, hidden], the gates first, or without
// gates [inner, hidden], and down [hidden, inner]. Returns 0; or, having computed nothing: 1 if an id is not in [0,
// experts), 2 for weights that lack their scales.
LLM_EXPORT int64_t llm_experts(const Weight* gate_up, const Weight* down, int64_t experts, const float* x,
                               const int64_t* ids, const float* factors, int64_t tokens, int64_t top_k,
                               int64_t function, float limit, float* y, int64_t threads) {
    const Mixture mix{gate_up, down, experts, x, ids, factors, tokens, top_k, function, limit, y, threads};
    if (first_outside(ids, mix.pairs(), experts) >= 0) return 1;
    for (int64_t e = 0; e < experts; ++e)
        if (lacks_scales(gate_up[e]) || lacks_scales(down[e])) return 2;
    if (mix.pairs() == 0) {
        std::memset(y, 0, tokens * mix.hidden() * sizeof(float));
        return 0;
    }
    const int64_t fitting = ROWS_BYTES / (mix.hidden() * static_cast<int64_t>(sizeof(float)) + 1);
    const Sorted pairs(mix, max(64, min(512, fitting)));
    const Scratch inner(mix.pairs() * mix.inner() * sizeof(float));
    compute_inner(mix, pairs, inner.as<float>());
    compute_sums(mix, pairs, inner.as<float>());
    return 0;
}

LLM_KERNEL(llm_experts)
