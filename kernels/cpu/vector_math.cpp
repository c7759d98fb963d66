// The elementary functions by themselves, for the tests that measure their errors.
#include "vector_math.h"
#include "replay.h"
#include "rows.h"

using namespace llm;

LLM_EXPORT void llm_probe_math(int64_t function, const float* x, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        const F32 value = load_part(x + i, count - i);
        const F32 result = function == 0   ? exp(value)
                           : function == 1 ? exp2_of_negative(value)
                           : function == 2 ? tanh(value)
                           : function == 3 ? erf(value)
                                           : softplus(value);
        store_part(out + i, result, count - i);
    }
}

LLM_KERNEL(llm_probe_math)
