// Loops over rows of floats: sums in fixed lanes, and spreading rows over threads.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace llm {
namespace {

// Elements that are worth waking one more thread.
constexpr int64_t ELEMENTS_PER_TASK = 1 << 14;

// Calls row_task(row, scratch) for each row; each thread has `scratch_bytes` of scratch.
template <class Task>
void for_rows(int64_t rows, int64_t width, int64_t threads, int64_t scratch_bytes, const Task& row_task) {
    const int64_t at_once = max(1, ELEMENTS_PER_TASK / (width + 1));
    parallel_for(ceil_div(rows, at_once), threads, scratch_bytes, [&](int64_t index, char* scratch) {
        const int64_t end = min((index + 1) * at_once, rows);
        for (int64_t row = index * at_once; row < end; ++row) row_task(row, reinterpret_cast<float*>(scratch));
    });
}

// Calls row_task(row) for each row.
template <class Task> void for_rows(int64_t rows, int64_t width, int64_t threads, const Task& row_task) {
    for_rows(rows, width, threads, 0, [&](int64_t row, float*) { row_task(row); });
}

// Sum of term(i) over the vectors i = 0, 16, 32, ... of `count` elements: four chains of lanes, then one fixed tree.
// term(i) must give 0 in lanes beyond `count`.
template <class Term> LLM_INLINE float sum_vectors(int64_t count, const Term& term) {
    F32 acc[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        LLM_UNROLL for (int c = 0; c < 4; ++c) acc[c] = acc[c] + term(i + c * LANES);
    LLM_UNROLL for (int c = 0; c < 4; ++c) if (i + c * LANES < count) acc[c] = acc[c] + term(i + c * LANES);
    return sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

}  // namespace
}  // namespace llm
