// Over the vocabulary: log-softmax.
#include <cmath>

#include "rows.h"
#include "vector_math.h"

namespace llm {
namespace {

LLM_INLINE float largest_of(const float* x, int64_t count) {
    F32 best = set1(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES) best = max(best, load_part(x + i, count - i, -INFINITY));
    return largest(best);
}

// x - largest - log(sum of e^(x - largest)).
void log_softmax_row(const float* x, float* out, int64_t count) {
    const F32 top = set1(largest_of(x, count));
    const float total = sum_vectors(count, [&](int64_t i) { return exp(load_part(x + i, count - i, -INFINITY) - top); });
    // The logarithm of one number in double, rounded once: the same on every instruction set.
    const F32 logarithm = set1(static_cast<float>(std::log(static_cast<double>(total))));
    for (int64_t i = 0; i < count; i += LANES) store_part(out + i, load_part(x + i, count - i) - top - logarithm, count - i);
}

}  // namespace
}  // namespace llm

using namespace llm;

LLM_EXPORT void llm_log_softmax(const float* x, float* out, int64_t rows, int64_t width, int64_t threads) {
    for_rows(rows, width, threads, [&](int64_t row) { log_softmax_row(x + row * width, out + row * width, width); });
}
