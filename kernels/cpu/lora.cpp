// What adapters add to the result of a layer: y[t] += scale * up(down(x[t])) for the tokens of each adapter.
//
// A term is one pair of matrices: those of one adapter for some neighbouring output channels of the layer. Tokens are
// sorted by adapter, so a term is two GEMMs over all of its tokens, in shares of some rows. All products with `down`
// are one parallel region, those with `up` and the sums are the next. A share is one GEMM of linear.cpp on one thread,
// and a token's channel is in one term at most, so its bits are those of the token alone.
#include "rows.h"
#include "weight.h"

namespace llm {
namespace {

constexpr int64_t MOST_ROWS = 128;  // of a share
constexpr int64_t LEAST_ROWS = 16;  // of a share, if there are so many
constexpr int64_t SLICE = 256;      // output channels of a task, a multiple of 16
constexpr int64_t BYTES_PER_NS = 8, MULTIPLY_ADDS_PER_NS = 16;

// The arguments of llm_lora.
struct Terms {
    const Weight *down, *up;  // [count]
    const int64_t* places;    // [count][2]: the adapter's slot, the first output channel
    const float* scales;      // [count]
    int64_t count;
    const int64_t* slots;  // [tokens], 0 or less: no adapter
    int64_t tokens;
    const float* x;  // [tokens][k]; null: `ids` [tokens] choose rows of `down`
    const int64_t* ids;
    float* y;  // [tokens][width]
    int64_t width, threads;

    int64_t slot(int64_t term) const { return places[2 * term]; }
    int64_t first(int64_t term) const { return places[2 * term + 1]; }
    int64_t rank(int64_t term) const { return up[term].k; }
    int64_t slots_end() const {
        int64_t end = 1;
        for (int64_t t = 0; t < count; ++t) end = max(end, slot(t) + 1);
        return end;
    }
};

// Tokens [first, first + count) of the sorted ones for one term; its products with `down` begin at `inner`.
struct Share { int64_t term, first, count, inner; };

// Tokens by slot, in a slot in their order, and the shares of all terms.
class Sorted {
    const Scratch memory_;
    int64_t *starts_, *tokens_;
    Share* shares_;
    int64_t count_ = 0, inner_ = 0;

    static int64_t most_shares(const Terms& terms) { return terms.count * (ceil_div(terms.tokens, LEAST_ROWS) + 1); }

  public:
    explicit Sorted(const Terms& terms)
        : memory_((terms.slots_end() + 1 + terms.tokens) * sizeof(int64_t) + most_shares(terms) * sizeof(Share)) {
        const int64_t end = terms.slots_end();
        starts_ = memory_.as<int64_t>();
        tokens_ = starts_ + end + 1;
        shares_ = reinterpret_cast<Share*>(tokens_ + terms.tokens);
        std::memset(starts_, 0, (end + 1) * sizeof(int64_t));
        const auto is_used = [&](int64_t slot) { return slot > 0 && slot < end; };
        for (int64_t i = 0; i < terms.tokens; ++i)
            if (is_used(terms.slots[i])) ++starts_[terms.slots[i] + 1];
        for (int64_t s = 0; s < end; ++s) starts_[s + 1] += starts_[s];
        for (int64_t i = 0; i < terms.tokens; ++i)
            if (is_used(terms.slots[i])) tokens_[starts_[terms.slots[i]]++] = i;
        for (int64_t s = end; s > 0; --s) starts_[s] = starts_[s - 1];
        starts_[0] = 0;
        for (int64_t t = 0; t < terms.count; ++t) {
            const int64_t begin = starts_[terms.slot(t)], tokens = starts_[terms.slot(t) + 1] - begin;
            const int64_t rows = max(LEAST_ROWS, min(MOST_ROWS, ceil_div(tokens, 2 * max(1, terms.threads))));
            for (int64_t at = 0; at < tokens; at += rows) {
                const int64_t size = min(rows, tokens - at);
                shares_[count_++] = {t, begin + at, size, inner_};
                inner_ += size * terms.rank(t);
            }
        }
    }
    int64_t shares() const { return count_; }
    const Share& share(int64_t index) const { return shares_[index]; }
    // Elements of all products with `down`.
    int64_t inner() const { return inner_; }
    const int64_t* tokens(const Share& share) const { return tokens_ + share.first; }
};

// The products of a share with `down` -> to [count][rank].
void multiply_down(const Terms& terms, const Share& share, const int64_t* token, float* to) {
    const Weight& down = terms.down[share.term];
    if (!terms.x) {
        const Scratch memory(share.count * sizeof(int64_t));
        int64_t* ids = memory.as<int64_t>();
        for (int64_t r = 0; r < share.count; ++r) ids[r] = terms.ids[token[r]];
        return gather_float(down, ids, to, share.count, 1);
    }
    const bool in_place = token[share.count - 1] - token[0] == share.count - 1;
    const Scratch memory(in_place ? 0 : share.count * down.k * sizeof(float));
    float* copies = memory.as<float>();
    if (!in_place)
        for (int64_t r = 0; r < share.count; ++r)
            std::memcpy(copies + r * down.k, terms.x + token[r] * down.k, down.k * sizeof(float));
    linear(down, in_place ? terms.x + token[0] * down.k : copies, to, share.count, 1);
}

// y += scale * (inner up^T + bias) for output channels [first, end) of a share's term.
void add_up(const Terms& terms, const Share& share, const int64_t* token, const float* inner, int64_t first,
            int64_t end) {
    const Weight part = channels(terms.up[share.term], first, end);
    const Scratch memory(share.count * part.n * sizeof(float));
    float* products = memory.as<float>();
    linear(part, inner, products, share.count, 1);
    const F32 scale = set1(terms.scales[share.term]);
    for (int64_t r = 0; r < share.count; ++r) {
        float* to = terms.y + token[r] * terms.width + terms.first(share.term) + first;
        for (int64_t i = 0; i < part.n; i += LANES) {
            const F32 product = load_part(products + r * part.n + i, part.n - i);
            store_part(to + i, load_part(to + i, part.n - i) + product * scale, part.n - i);
        }
    }
}

// Of one thread for all shares: what it reads or computes.
int64_t nanoseconds(const Terms& terms, const Sorted& sorted) {
    int64_t total = 0;
    for (int64_t s = 0; s < sorted.shares(); ++s) {
        const int64_t term = sorted.share(s).term, inputs = terms.x ? terms.down[term].k : 0;
        const int64_t elements = (inputs + terms.up[term].n) * terms.rank(term);
        total += max(sorted.share(s).count * elements / MULTIPLY_ADDS_PER_NS,
                     elements * bits_of(terms.up[term].kind) / 8 / BYTES_PER_NS);
    }
    return total;
}

}  // namespace
}  // namespace llm

using namespace llm;

// y [tokens, width] += scale * up(down(x)) for every term and the tokens in its slot. Terms of one slot have channels
// of their own. down [rank, k], or for `ids` [vocabulary, rank]; up [channels, rank]; all of a float kind. Returns 0;
// or 1, having computed nothing, if one of `ids` is outside of `down`.
LLM_EXPORT int64_t llm_lora(const Weight* down, const Weight* up, int64_t count, const int64_t* places,
                            const float* scales, const int64_t* slots, int64_t tokens, const float* x,
                            const int64_t* ids, float* y, int64_t width, int64_t threads) {
    const Terms terms{down, up, places, scales, count, slots, tokens, x, ids, y, width, threads};
    if (!x)
        for (int64_t t = 0; t < count; ++t)
            if (first_outside(ids, tokens, down[t].n) >= 0) return 1;
    const Sorted sorted(terms);
    const Scratch memory(sorted.inner() * sizeof(float));
    float* inner = memory.as<float>();
    const int64_t shared = is_worth_sharing(nanoseconds(terms, sorted)) ? threads : 1;
    parallel_for(sorted.shares(), shared, 0, [&](int64_t task, char*) {
        const Share& share = sorted.share(task);
        multiply_down(terms, share, sorted.tokens(share), inner + share.inner);
    });
    int64_t slices = 1;
    for (int64_t t = 0; t < count; ++t) slices = max(slices, ceil_div(up[t].n, SLICE));
    parallel_for(sorted.shares() * slices, shared, 0, [&](int64_t task, char*) {
        const Share& share = sorted.share(task % sorted.shares());
        const int64_t first = task / sorted.shares() * SLICE, end = min(first + SLICE, up[share.term].n);
        if (first < end) add_up(terms, share, sorted.tokens(share), inner + share.inner, first, end);
    });
    return 0;
}

LLM_KERNEL(llm_lora)
