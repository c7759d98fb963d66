// Which experts a token goes to, and with what weights: each row of logits by itself.
#include <algorithm>
#include <cmath>

#include "replay.h"
#include "rows.h"
#include "vector_math.h"

namespace llm {
namespace {

constexpr float LEAST_SUM = 1e-20f;

struct Routing {
    const float* bias;
    int64_t experts, top_k, sigmoid, renormalize, groups, topk_groups;
    float scale;
};

// Softmax or sigmoid of a row of logits.
void score_row(const Routing& routing, const float* logits, float* scores) {
    const int64_t count = routing.experts;
    float top = logits[0];
    for (int64_t i = 1; i < count; ++i)
        if (!(logits[i] <= top)) top = logits[i];  // whatever a NaN leaves here: its own score is NaN
    for (int64_t i = 0; i < count; i += LANES) {
        const F32 x = load_part(logits + i, count - i);
        const F32 value = routing.sigmoid ? set1(1.0f) / (exp(zero() - x) + set1(1.0f)) : exp(x - set1(top));
        store_part(scores + i, value, count - i);
    }
    if (routing.sigmoid) return;
    float total = 0.0f;
    for (int64_t i = 0; i < count; ++i) total += scores[i];
    for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

// The first of the largest; NaN stands for what cannot be chosen.
int64_t best_of(const float* x, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; ++i)
        if (x[best] != x[best] || x[i] > x[best]) best = i;
    return best;
}

// What a group counts as: its best expert, with a bias the sum of its two best.
float group_score(const float* x, int64_t count, bool two) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < count; ++i) {
        if (x[i] > first) {
            second = first;
            first = x[i];
        } else if (x[i] > second) {
            second = x[i];
        }
    }
    return two && count > 1 ? first + second : first;
}

// Makes everything outside of the best groups NaN. `totals`: room for one float per group.
void keep_best_groups(const Routing& routing, float* choice, float* totals) {
    const int64_t size = routing.experts / routing.groups;
    for (int64_t group = 0; group < routing.groups; ++group)
        totals[group] = group_score(choice + group * size, size, routing.bias != nullptr);
    for (int64_t kept = 0; kept < routing.topk_groups; ++kept) totals[best_of(totals, routing.groups)] = NAN;
    for (int64_t group = 0; group < routing.groups; ++group)
        if (totals[group] == totals[group]) std::fill_n(choice + group * size, size, NAN);
}

// `scratch`: room for three floats per expert.
void select_row(const Routing& routing, const float* logits, float* scratch, float* weights, int64_t* ids) {
    const int64_t count = routing.experts;
    float *scores = scratch, *choice = scratch + count, *totals = choice + count;
    score_row(routing, logits, scores);
    bool unknown = false;
    for (int64_t i = 0; i < count; ++i) {
        choice[i] = routing.bias ? scores[i] + routing.bias[i] : scores[i];
        unknown |= choice[i] != choice[i];
    }
    if (unknown) {
        for (int64_t slot = 0; slot < routing.top_k; ++slot) {
            ids[slot] = slot;
            weights[slot] = NAN;
        }
        return;
    }
    if (routing.groups > 1) keep_best_groups(routing, choice, totals);
    float total = 0.0f;
    for (int64_t slot = 0; slot < routing.top_k; ++slot) {
        ids[slot] = best_of(choice, count);
        weights[slot] = scores[ids[slot]];
        choice[ids[slot]] = NAN;
        total = slot ? total + weights[slot] : weights[slot];
    }
    if (total < LEAST_SUM) total = LEAST_SUM;
    for (int64_t slot = 0; slot < routing.top_k; ++slot) {
        if (routing.renormalize) weights[slot] /= total;
        weights[slot] *= routing.scale;
    }
}

// Two experts, one after the other: the best of those left, and its share of the softmax over those left whose distance
// to it is at most `tolerance` of the larger magnitude. `scratch`: room for two floats per expert.
void mix_row(const float* logits, int64_t count, float tolerance, float* scratch, float* weights, int64_t* ids) {
    float *left = scratch, *terms = scratch + count;
    bool unknown = false;
    for (int64_t i = 0; i < count; ++i) {
        left[i] = logits[i];
        unknown |= logits[i] != logits[i];
    }
    for (int64_t slot = 0; slot < 2; ++slot) {
        const int64_t best = unknown ? slot : best_of(left, count);
        const float top = logits[best];
        for (int64_t i = 0; i < count; i += LANES)
            store_part(terms + i, exp(load_part(logits + i, count - i) - set1(top)), count - i);
        float total = 0.0f;
        for (int64_t i = 0; i < count; ++i) {
            const float distance = (top - logits[i]) / std::max(std::fabs(logits[i]), top);
            // All logits zero: a distance of NaN, and none is too far.
            if (left[i] == left[i] && !(distance > tolerance)) total += terms[i];
        }
        ids[slot] = best;
        weights[slot] = unknown ? NAN : 1.0f / total;
        left[best] = NAN;
    }
}

}  // namespace
}  // namespace llm

using namespace llm;

// logits [rows][experts], bias [experts] or null -> weights and ids [rows][top_k]. top_k experts can be chosen.
LLM_EXPORT void llm_select_experts(const float* logits, const float* bias, float* weights, int64_t* ids, int64_t rows,
                                   int64_t experts, int64_t top_k, int64_t sigmoid, int64_t renormalize, int64_t groups,
                                   int64_t topk_groups, float scale, int64_t threads) {
    const Routing routing{bias, experts, top_k, sigmoid, renormalize, groups, topk_groups, scale};
    for_rows(rows, experts * top_k, threads, 3 * experts * int64_t{sizeof(float)}, [&](int64_t row, float* scratch) {
        select_row(routing, logits + row * experts, scratch, weights + row * top_k, ids + row * top_k);
    });
}

// logits [rows][experts], of at least two experts -> weights and ids [rows][2].
LLM_EXPORT void llm_mix_two_experts(const float* logits, float* weights, int64_t* ids, int64_t rows, int64_t experts,
                                    float tolerance, int64_t threads) {
    for_rows(rows, experts * 2, threads, 2 * experts * int64_t{sizeof(float)}, [&](int64_t row, float* scratch) {
        mix_row(logits + row * experts, experts, tolerance, scratch, weights + row * 2, ids + row * 2);
    });
}

LLM_KERNEL(llm_select_experts)
LLM_KERNEL(llm_mix_two_experts)
