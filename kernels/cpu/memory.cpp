// Huge pages for weights: every token reads them from end to end, and a 2 MiB page needs one TLB entry instead of 512.
#include "replay.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

// Asks for huge pages that lie wholly within [data, data + bytes). Call it before the first write, which then gets
// them, or with `written`, which moves what is there. A system without huge pages refuses; only speed depends on the
// answer.
LLM_EXPORT void llm_large_pages(void* data, int64_t bytes, int64_t written) {
#if defined(__linux__)
    constexpr int collapse = 25;  // MADV_COLLAPSE, Linux 6.1: older headers do not have it
    constexpr uintptr_t page = 2 << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, written ? collapse : MADV_HUGEPAGE);
#else
    (void)data, (void)bytes, (void)written;
#endif
}

LLM_FUNCTION(llm_large_pages)
