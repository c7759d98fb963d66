// The gated delta rule: linear attention whose state is a matrix [K][V] per head, decayed, corrected and read by each
// token in order.
//
// Columns of a state do not depend on each other: a task takes a slice of them, of one head of one row, into the L1
// cache while all of the row's tokens pass; few tokens change a head's whole state where it is. Sums over K are chains
// of FMAs from +0, so a token's bits depend on nothing but the tokens before it.
#include <cmath>

#include "activation.h"
#include "recurrent.h"
#include "replay.h"
#include "rows.h"

namespace llm {
namespace {

constexpr int VECTORS = 4;
constexpr int64_t COLUMNS = VECTORS * LANES;  // of a task
constexpr int64_t FEW = 2;                    // tokens that are not worth copying a state for
constexpr float NORM_EPS = 1e-6f;

// Tokens `stride` floats apart.
struct Tokens {
    const float* from;
    int64_t stride;
    const float* at(int64_t token) const { return from + token * stride; }
};

struct DeltaRule {
    StateRows rows;
    Tokens query, key, value, decay, beta;
    const float *a, *dt_bias;
    bool decay_per_channel;
    float beta_scale;
    float* state;
    int64_t key_heads, heads, keys, values;  // `keys` and `values`: channels of a head
    float* out;

    int64_t padded_keys() const { return ceil_div(keys, LANES) * LANES; }
    // Per thread: key, query and decay of a token, then a slice of the state [keys][COLUMNS] or two sums [values].
    int64_t scratch_bytes() const { return (3 * padded_keys() + max(keys * COLUMNS, 2 * values)) * 4; }
};

// x / sqrt(sum of squares + eps) * scale
void normalise(const float* x, float scale, int64_t size, float* out) {
    const float squares = sum_vectors(size, [&](int64_t i) {
        const F32 value = load_part(x + i, size - i);
        return value * value;
    });
    const F32 factor = set1(1.0f / std::sqrt(squares + NORM_EPS)), by = set1(scale);
    for (int64_t i = 0; i < size; i += LANES) store_part(out + i, load_part(x + i, size - i) * factor * by, size - i);
}

// What a head reads of one token.
struct Token {
    const DeltaRule& rule;
    int64_t head;
    float *key, *query, *decay;
    float beta = 0.0f;

    Token(const DeltaRule& what, int64_t index, float* scratch)
        : rule(what), head(index), key(scratch), query(key + what.padded_keys()), decay(query + what.padded_keys()) {}

    // e^(a softplus(decay + dt_bias)), of the head or of each of its key channels.
    void read_decay(int64_t token) {
        const F32 rate = set1(rule.a[head]);
        const int64_t width = rule.decay_per_channel ? rule.keys : 1;
        const float *from = rule.decay.at(token) + head * width, *bias = rule.dt_bias + head * width;
        for (int64_t i = 0; i < width; i += LANES) {
            const F32 x = load_part(from + i, width - i) + load_part(bias + i, width - i);
            store_part(decay + i, exp(rate * softplus(x)), width - i);
        }
        if (!rule.decay_per_channel)
            for (int64_t k = 1; k < rule.keys; ++k) decay[k] = decay[0];
    }

    void read(int64_t token) {
        const int64_t from = head / (rule.heads / rule.key_heads) * rule.keys;
        normalise(rule.key.at(token) + from, 1.0f, rule.keys, key);
        normalise(rule.query.at(token) + from, 1.0f / std::sqrt(static_cast<float>(rule.keys)), rule.keys, query);
        read_decay(token);
        beta = read_beta(token);
    }

    float read_beta(int64_t token) const {
        const F32 logit = set1(rule.beta.at(token)[head]);
        alignas(64) float lane[LANES];
        store(lane, set1(rule.beta_scale) / (exp(zero() - logit) + set1(1.0f)));
        return lane[0];
    }
};

// Some columns of the state of one head of one row.
struct Columns {
    const DeltaRule& rule;
    Token& token;
    int64_t begin, count;
    float* state;  // [keys][COLUMNS]

    Columns(Token& what, int64_t start, float* scratch)
        : rule(what.rule), token(what), begin(start), count(min(COLUMNS, rule.values - start)), state(scratch) {}

    void fetch(const float* from) {
        for (int64_t k = 0; k < rule.keys; ++k)
            for (int64_t i = 0; i < COLUMNS; i += LANES)
                store(state + k * COLUMNS + i, load_part(from + k * rule.values + i, count - i));
    }

    void put_back(float* to) const {
        for (int64_t k = 0; k < rule.keys; ++k)
            for (int64_t i = 0; i < count; i += LANES)
                store_part(to + k * rule.values + i, load(state + k * COLUMNS + i), count - i);
    }

    // state = decay * state; state += key x (value - key state) beta; out = query state
    void step(int64_t index) {
        token.read(index);
        F32 known[VECTORS], seen[VECTORS], change[VECTORS];
        LLM_UNROLL for (int c = 0; c < VECTORS; ++c) known[c] = seen[c] = zero();
        for (int64_t k = 0; k < rule.keys; ++k) {
            const F32 by = set1(token.decay[k]), of = set1(token.key[k]);
            LLM_UNROLL for (int c = 0; c < VECTORS; ++c)
                known[c] = fma(of, load(state + k * COLUMNS + c * LANES) * by, known[c]);
        }
        const float* value = rule.value.at(index) + token.head * rule.values + begin;
        const F32 share = set1(token.beta);
        LLM_UNROLL for (int c = 0; c < VECTORS; ++c)
            change[c] = (load_part(value + c * LANES, count - c * LANES) - known[c]) * share;
        // Half of the columns at a time: twice as many sums as above fit the registers.
        LLM_UNROLL for (int half = 0; half < VECTORS; half += VECTORS / 2) {
            for (int64_t k = 0; k < rule.keys; ++k) {
                const F32 kept = set1(token.decay[k]), of = set1(token.key[k]), by = set1(token.query[k]);
                LLM_UNROLL for (int c = half; c < half + VECTORS / 2; ++c) {
                    float* at = state + k * COLUMNS + c * LANES;
                    const F32 now = fma(of, change[c], load(at) * kept);
                    store(at, now);
                    seen[c] = fma(by, now, seen[c]);
                }
            }
        }
        float* out = rule.out + (index * rule.heads + token.head) * rule.values + begin;
        LLM_UNROLL for (int c = 0; c < VECTORS; ++c) store_part(out + c * LANES, seen[c], count - c * LANES);
    }
};

// One token of a head whose state stays where it is. Its rows of keys are read in the order of memory, a few at a time,
// with the sums of all columns in the L1 cache; `values` is a multiple of LANES. A slice of the columns at a time takes
// a third longer.
struct InPlace {
    static constexpr int TOGETHER = 4;     // rows of keys
    static constexpr int64_t AHEAD = 512;  // floats of this state, or of the next head's, that are prefetched

    Token& token;
    float *state, *known, *seen;  // the sums: [values]
    int64_t keys, values;

    InPlace(Token& what, float* at, float* scratch)
        : token(what), state(at), known(scratch), seen(known + what.rule.values), keys(what.rule.keys),
          values(what.rule.values) {}

    template <int N> void read_rows(int64_t k) const {
        F32 by[N], of[N];
        LLM_UNROLL for (int j = 0; j < N; ++j) by[j] = set1(token.decay[k + j]), of[j] = set1(token.key[k + j]);
        const float* from = state + k * values;
        for (int64_t c = 0; c < values; c += LANES) {
            F32 sum = load(known + c);
            LLM_UNROLL for (int j = 0; j < N; ++j) {
                const float* at = from + j * values + c;
                prefetch(at + AHEAD);
                sum = fma(of[j], load(at) * by[j], sum);
            }
            store(known + c, sum);
        }
    }

    // `known` is the change by now.
    template <int N> void change_rows(int64_t k) const {
        F32 kept[N], of[N], by[N];
        LLM_UNROLL for (int j = 0; j < N; ++j) kept[j] = set1(token.decay[k + j]), of[j] = set1(token.key[k + j]),
                                               by[j] = set1(token.query[k + j]);
        float* from = state + k * values;
        for (int64_t c = 0; c < values; c += LANES) {
            const F32 change = load(known + c);
            F32 sum = load(seen + c);
            LLM_UNROLL for (int j = 0; j < N; ++j) {
                float* at = from + j * values + c;
                const F32 now = fma(of[j], change, load(at) * kept[j]);
                store(at, now);
                sum = fma(by[j], now, sum);
            }
            store(seen + c, sum);
        }
    }

    // As Columns::step, of all columns.
    void step(int64_t index) const {
        token.read(index);
        std::memset(known, 0, 2 * values * sizeof(float));
        int64_t k = 0;
        for (; k + TOGETHER <= keys; k += TOGETHER) read_rows<TOGETHER>(k);
        for (; k < keys; ++k) read_rows<1>(k);
        const float* value = token.rule.value.at(index) + token.head * values;
        const F32 share = set1(token.beta);
        for (int64_t c = 0; c < values; c += LANES) store(known + c, (load(value + c) - load(known + c)) * share);
        for (k = 0; k + TOGETHER <= keys; k += TOGETHER) change_rows<TOGETHER>(k);
        for (; k < keys; ++k) change_rows<1>(k);
        std::memcpy(token.rule.out + (index * token.rule.heads + token.head) * values, seen, values * sizeof(float));
    }
};

// The first of a head's slices takes all columns where the state stays in its place.
void run_columns(const DeltaRule& rule, int64_t row, int64_t head, int64_t begin, float* scratch) {
    const int64_t first = rule.rows.first(row), count = rule.rows.count(row), stored = rule.rows.stored(row);
    if (!count) return;
    float* state = rule.state + (rule.rows.slots[row] * rule.heads + head) * rule.keys * rule.values;
    Token token(rule, head, scratch);
    scratch += 3 * rule.padded_keys();
    if (count <= FEW && stored == count && rule.values % LANES == 0 && !rule.rows.is_new(row)) {
        const InPlace whole(token, state, scratch);
        for (int64_t t = 0; t < count && !begin; ++t) whole.step(first + t);
        return;
    }
    Columns columns(token, begin, scratch);
    if (rule.rows.is_new(row)) std::memset(columns.state, 0, rule.keys * COLUMNS * sizeof(float));
    else columns.fetch(state + begin);
    for (int64_t t = 0; t < stored; ++t) columns.step(first + t);
    columns.put_back(state + begin);
    for (int64_t t = stored; t < count; ++t) columns.step(first + t);
}

}  // namespace
}  // namespace llm

using namespace llm;

// query and key: tokens of [key_heads][keys], value: of [heads][values], decay: of [heads] or [heads][keys], beta: of
// [heads]; state [num_slots][heads][keys][values] -> out [tokens][heads][values]. Returns -1; or, having written
// nothing, the first row whose slot or tokens do not exist.
LLM_EXPORT int64_t llm_gated_delta_rule(const int64_t* slots, const int32_t* starts, const int32_t* lengths,
                                        const int32_t* counts, const int32_t* stored, int64_t rows, int64_t num_slots,
                                        int64_t tokens, const float* query, int64_t query_stride, const float* key,
                                        int64_t key_stride, const float* value, int64_t value_stride,
                                        const float* decay, int64_t decay_stride, int64_t decay_per_channel,
                                        const float* beta, int64_t beta_stride, float beta_scale, const float* a,
                                        const float* dt_bias, float* state, int64_t key_heads, int64_t heads,
                                        int64_t keys, int64_t values, float* out, int64_t threads) {
    const StateRows given{slots, starts, lengths, counts, stored, rows}, of = given.trimmed();
    const int64_t bad = first_bad_row(given, num_slots, tokens);
    if (bad >= 0) return bad;
    const DeltaRule rule{of,
                         {query, query_stride},
                         {key, key_stride},
                         {value, value_stride},
                         {decay, decay_stride},
                         {beta, beta_stride},
                         a,
                         dt_bias,
                         decay_per_channel != 0,
                         beta_scale,
                         state,
                         key_heads,
                         heads,
                         keys,
                         values,
                         out};
    const int64_t slices = ceil_div(values, COLUMNS), tasks = heads * slices;
    const int64_t shared = min(threads, 1 + tokens * heads * keys * values / ELEMENTS_PER_TASK);
    parallel_for(of.rows * tasks, shared, rule.scratch_bytes(), [&](int64_t index, char* scratch) {
        const int64_t task = index % tasks;
        run_columns(rule, index / tasks, task / slices, task % slices * COLUMNS, reinterpret_cast<float*>(scratch));
    });
    return -1;
}

LLM_KERNEL(llm_gated_delta_rule)
