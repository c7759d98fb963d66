// The process-wide OpenMP entry points, and a probe that tests use to see where work runs.
#include "replay.h"

namespace llm {
OpenMP openmp{nullptr, nullptr};
}

LLM_EXPORT void llm_bind_openmp(void* parallel, void* num_threads) {
    llm::openmp.parallel = reinterpret_cast<decltype(llm::OpenMP::parallel)>(parallel);
    llm::openmp.num_threads = reinterpret_cast<decltype(llm::OpenMP::num_threads)>(num_threads);
}

// Runs `count` tasks and writes into `teams[i]` how many threads the region of task i had (0: no runtime is bound).
LLM_EXPORT void llm_probe_threads(int32_t* teams, int64_t count, int64_t threads) {
    llm::parallel_for(count, threads, 0, [&](int64_t i, char*) {
        teams[i] = llm::openmp.num_threads ? llm::openmp.num_threads() : 0;
    });
}

LLM_FUNCTION(llm_bind_openmp)
LLM_FUNCTION(llm_probe_threads)
