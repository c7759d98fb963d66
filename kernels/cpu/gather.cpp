// What ranks exchange: every rank's part of a matrix, through memory that all processes of one machine map.
//
// A rank has two buffers, which it fills in turn. It fills one again two rounds later: by the round between
// all others have read it. So a round waits once, and no rank waits for its readers.
#include "replay.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llm {
namespace {

constexpr int64_t SPIN_NS = 50'000;       // ranks that compute the same arrive together
constexpr int64_t SLEEP_NS = 50'000'000;  // then: is the step still wanted?
constexpr int64_t BUFFER_BYTES = 1 << 20;
constexpr int64_t PAGE = 4096;

enum Result : int64_t { DONE, ABORTED, OUT_OF_STEP, LATE };

// One rank's, written by it alone but for `sleepers`.
struct alignas(128) RankSlot {
    std::atomic<uint32_t> posted;    // rounds that it has filled a buffer for
    std::atomic<uint32_t> sleepers;  // who waits for `posted`
    int64_t counts[2];               // elements in each buffer, and in a row of it
    int64_t widths[2];
};

// At the beginning of the memory; the slots of all ranks follow, then on a new page their buffers.
struct alignas(128) Head {
    std::atomic<uint32_t> aborted;  // 0, or a `Result`
    std::atomic<uint32_t> culprit;  // of LATE, the rank that did not come
};

int64_t before_buffers(int64_t ranks) {
    return (static_cast<int64_t>(sizeof(Head) + ranks * sizeof(RankSlot)) + PAGE - 1) / PAGE * PAGE;
}

struct Memory {
    Head* head;
    int64_t ranks;

    RankSlot& slot(int64_t rank) const { return reinterpret_cast<RankSlot*>(head + 1)[rank]; }
    char* buffer(int64_t rank, uint32_t round) const {
        return reinterpret_cast<char*>(head) + before_buffers(ranks) + (2 * rank + round % 2) * BUFFER_BYTES;
    }
    int64_t abort(Result why, int64_t culprit) const {
        uint32_t none = DONE;
        head->culprit.store(static_cast<uint32_t>(culprit));
        head->aborted.compare_exchange_strong(none, why);
        return head->aborted.load();
    }
};

void wake_sleepers(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

// Until `word` is no longer `seen`, or a while has passed.
void sleep(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    const timespec most{0, SLEEP_NS};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &most, nullptr, 0);
#elif defined(_WIN32)
    (void)word, (void)seen;
    Sleep(1);
#else
    (void)word, (void)seen;
    const timespec pause{0, 50'000};
    nanosleep(&pause, nullptr);
#endif
}

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until `rank` has filled a buffer for the round.
int64_t await(const Memory& memory, int64_t rank, uint32_t round, int64_t timeout_ns) {
    RankSlot& slot = memory.slot(rank);
    const auto has_come = [&] {
        return static_cast<int32_t>(slot.posted.load(std::memory_order_acquire) - round) >= 0;
    };
    if (has_come()) return DONE;
    const int64_t start = sys::now_ns();
    do {
        for (int i = 0; i < 32; ++i) {
            if (has_come()) return DONE;
            relax();
        }
    } while (sys::now_ns() - start < SPIN_NS);
    while (!has_come()) {
        if (memory.head->aborted.load()) return memory.head->aborted.load();
        if (sys::now_ns() - start > timeout_ns) return memory.abort(LATE, rank);
        slot.sleepers.fetch_add(1);
        const uint32_t seen = slot.posted.load();
        if (static_cast<int32_t>(seen - round) < 0) sleep(slot.posted, seen);
        slot.sleepers.fetch_sub(1);
    }
    return DONE;
}

// `count` elements of a rank's matrix with rows of `width`, from element `first` on -> `out`: into its columns of each
// row; with `owners`, the rows that the rank owns.
void place_part(const float* part, int64_t first, int64_t count, int64_t width, int64_t rank, int64_t ranks,
                const int64_t* owners, float* out) {
    for (int64_t i = 0; i < count;) {
        const int64_t row = (first + i) / width, column = (first + i) % width;
        const int64_t run = std::min(width - column, count - i);
        const int64_t start = owners ? row * width : (row * ranks + rank) * width;
        if (!owners || owners[row] == rank) std::memcpy(out + start + column, part + i, run * sizeof(float));
        i += run;
    }
}

}  // namespace
}  // namespace llm

using namespace llm;

// x [rows, width] of each rank -> out [rows, ranks * width], in order of rank; or, with `owners` [rows], row i of rank
// owners[i] -> out [rows, width]. All ranks call it, in the same order and with matrices of one shape. Returns a
// `Result`; once it is not DONE every rank's is, until llm_restart_ranks.
LLM_EXPORT int64_t llm_gather(void* memory, int64_t rank, int64_t ranks, const float* x, const int64_t* owners,
                              int64_t rows, int64_t width, float* out, int64_t timeout_ms) {
    const Memory shared{static_cast<Head*>(memory), ranks};
    RankSlot& own = shared.slot(rank);
    constexpr int64_t most = BUFFER_BYTES / sizeof(float);
    const int64_t total = rows * width;
    for (int64_t first = 0; first < total; first += most) {
        if (const int64_t aborted = shared.head->aborted.load()) return aborted;
        const int64_t count = std::min(most, total - first);
        const uint32_t round = own.posted.load(std::memory_order_relaxed) + 1;
        std::memcpy(shared.buffer(rank, round), x + first, count * sizeof(float));
        own.counts[round % 2] = total;
        own.widths[round % 2] = width;
        own.posted.store(round);
        if (own.sleepers.load()) wake_sleepers(own.posted);
        place_part(x + first, first, count, width, rank, ranks, owners, out);
        for (int64_t step = 1; step < ranks; ++step) {
            const int64_t other = (rank + step) % ranks;
            if (const int64_t failed = await(shared, other, round, timeout_ms * 1'000'000)) return failed;
            const RankSlot& slot = shared.slot(other);
            if (slot.counts[round % 2] != total || slot.widths[round % 2] != width)
                return shared.abort(OUT_OF_STEP, other);
            const float* part = reinterpret_cast<const float*>(shared.buffer(other, round));
            place_part(part, first, count, width, other, ranks, owners, out);
        }
    }
    return DONE;
}

// The bytes of memory, zeros at first, that so many ranks share.
LLM_EXPORT int64_t llm_gather_bytes(int64_t ranks) { return before_buffers(ranks) + 2 * ranks * BUFFER_BYTES; }

// All ranks leave the rounds they are in, and come to no other.
LLM_EXPORT void llm_abort_ranks(void* memory) {
    uint32_t none = DONE;
    static_cast<Head*>(memory)->aborted.compare_exchange_strong(none, ABORTED);
}

// The rank that did not come.
LLM_EXPORT int64_t llm_late_rank(const void* memory) { return static_cast<const Head*>(memory)->culprit.load(); }

// As at the beginning; no rank is in a round.
LLM_EXPORT void llm_restart_ranks(void* memory, int64_t ranks) {
    const Memory shared{static_cast<Head*>(memory), ranks};
    for (int64_t rank = 0; rank < ranks; ++rank) shared.slot(rank).posted.store(0);
    shared.head->aborted.store(DONE);
}

LLM_KERNEL(llm_gather)
LLM_FUNCTION(llm_gather_bytes)
LLM_FUNCTION(llm_abort_ranks)
LLM_FUNCTION(llm_late_rank)
LLM_FUNCTION(llm_restart_ranks)
