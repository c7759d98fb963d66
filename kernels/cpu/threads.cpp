// The kernels' own threads: created when work is first shared, asleep between calls, ended by llm_end_threads.
//
// After a task a worker spins for a moment, because the next task usually follows at once, and then sleeps. While other
// programs take its core, spinning would burn the time slice that the work itself needs: workers sleep at once then,
// and short work stays with its caller. They sleep at once too where a region has more threads than there are cores.
// The caller computes too, and waits only for workers that have taken a task.
#include "replay.h"

#include <algorithm>

namespace llm {
namespace {

constexpr int MOST_WORKERS = 255;
constexpr int64_t SPIN_NS = 300'000;             // longer than Python's gap between two kernels of a prefill
constexpr int64_t CONTENDED_SPIN_NS = 2'000;     // while other processes, or more threads, run on these cores
constexpr int64_t PREEMPTED_NS = 1'000'000;      // without a core, yet not asleep: another program had it
constexpr int64_t CONTENDED_NS = 50'000'000;     // how long a sign of contention counts
constexpr int64_t CONTENDED_REGION_NS = 30'000;  // what a region costs then: a worker inside may lose its core
constexpr int64_t HAND_OFFS = 15, LONGEST_HAND_OFF_NS = 20'000;

// state: region number << 16 | OPEN | number of workers inside.
constexpr uint64_t OPEN = 1 << 15, INSIDE = OPEN - 1, REGION = 1 << 16;

struct Pool {
    std::atomic_flag taken = ATOMIC_FLAG_INIT;  // one region at a time; a caller that finds it taken computes alone
    int workers = 0;
    sys::Thread ids[MOST_WORKERS];
    // The open region. Written only while no worker is inside and none can enter.
    void (*work)(void*) = nullptr;
    void* argument = nullptr;
    std::atomic<uint64_t> seats{0};
    std::atomic<uint64_t> cores{UINT64_MAX};  // when workers were last created
    bool ending = false;
    alignas(64) std::atomic<uint64_t> state{0};
    alignas(64) std::atomic<uint32_t> opened{0};  // futex of workers: counts regions
    std::atomic<int> asleep{0};
    alignas(64) std::atomic<uint32_t> left{0};  // futex of the caller: counts regions whose last worker has left
    std::atomic<bool> caller_asleep{false};
    alignas(64) std::atomic<int64_t> contended_until{0};
    std::atomic<int64_t> region_ns{0};  // what a region costs its caller; 0: not measured
};
Pool pool;
thread_local bool is_worker = false;

using sys::now_ns;

// Grows while this thread has no core: asleep, or preempted.
int64_t away_ns() { return now_ns() - sys::thread_ns(); }

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether the last region has more threads than there are cores.
bool is_outnumbered() {
    return pool.seats.load(std::memory_order_relaxed) >= pool.cores.load(std::memory_order_relaxed);
}

// True once `ready()` holds; false when it is time to sleep.
template <class Ready> bool spin(const Ready& ready) {
    if (ready()) return true;
    const int64_t start = now_ns();
    const bool is_contended = start < pool.contended_until.load(std::memory_order_relaxed) || is_outnumbered();
    const int64_t most = is_contended ? CONTENDED_SPIN_NS : SPIN_NS;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
    } while (now_ns() - start <= most);
    return ready();
}

// A worker that has not slept since `away_before` was taken notes whether it lost its core. Returns its away_ns() now.
int64_t note_preemption(int64_t away_before) {
    const int64_t away = away_ns();
    if (away - away_before > PREEMPTED_NS)
        pool.contended_until.store(now_ns() + CONTENDED_NS, std::memory_order_relaxed);
    return away;
}

// Joins the region if it is open and has a seat left.
void join_region() {
    uint64_t seen = pool.state.load(std::memory_order_acquire);
    do {
        if (!(seen & OPEN) || (seen & INSIDE) >= pool.seats.load(std::memory_order_relaxed)) return;
    } while (!pool.state.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire));
    pool.work(pool.argument);
    seen = pool.state.fetch_sub(1, std::memory_order_acq_rel) - 1;
    if ((seen & (OPEN | INSIDE)) != 0) return;
    pool.left.fetch_add(1);
    if (pool.caller_asleep.load()) sys::wake(pool.left, 1);
}

void* live(void*) {
    is_worker = true;
    // Regions opened before this line count too: `opened` was 0 when the pool had no workers, or a region waits for
    // this one.
    int64_t away = away_ns();
    for (uint32_t seen = 0;;) {
        const auto ready = [&] { return pool.opened.load(std::memory_order_acquire) != seen; };
        if (!ready()) away = note_preemption(away);
        while (!spin(ready)) {
            pool.asleep.fetch_add(1);
            if (!ready()) sys::wait(pool.opened, seen);
            pool.asleep.fetch_sub(1);
            away = away_ns();
        }
        seen = pool.opened.load(std::memory_order_acquire);
        if (pool.ending) return nullptr;
        join_region();
    }
}

// In a forked child: it has none of its parent's threads, and the fork may have come in the middle of a region.
void forget_workers() {
    sys::forget_sleepers();
    pool.taken.clear();
    pool.workers = 0;
    pool.state.store(0);
    pool.asleep.store(0);
    pool.caller_asleep.store(false);
}

void create_workers(int wanted) {
    static bool registered = false;  // only the caller that holds `taken` comes here
    if (!registered) sys::after_fork(forget_workers);
    registered = true;
    pool.cores.store(static_cast<uint64_t>(sys::cores()), std::memory_order_relaxed);
    while (pool.workers < wanted && sys::start(pool.ids[pool.workers], live)) ++pool.workers;
}

void open_region(void (*work)(void*), void* argument, int64_t seats) {
    pool.work = work;
    pool.argument = argument;
    pool.seats.store(static_cast<uint64_t>(seats), std::memory_order_relaxed);
    const uint64_t region = pool.state.load(std::memory_order_relaxed) / REGION + 1;
    pool.state.store(region * REGION | OPEN, std::memory_order_release);
    pool.opened.fetch_add(1);
    const int64_t sleeping = pool.asleep.load();
    if (sleeping > 0) sys::wake(pool.opened, static_cast<int>(sleeping < seats ? sleeping : seats));
}

// Closes the region: after this no worker is inside, and none enters.
void close_region() {
    const uint32_t before = pool.left.load();
    if ((pool.state.fetch_and(~OPEN, std::memory_order_acq_rel) & INSIDE) == 0) return;
    const auto ready = [&] { return (pool.state.load(std::memory_order_acquire) & INSIDE) == 0; };
    while (!spin(ready)) {
        pool.caller_asleep.store(true);
        if (!ready()) sys::wait(pool.left, before);
        pool.caller_asleep.store(false);
    }
}

// A region's work that ends when a worker has come, or too late.
void hand_off(void* argument) {
    auto& came = *static_cast<std::atomic<bool>*>(argument);
    if (is_worker) return came.store(true, std::memory_order_release);
    for (const int64_t start = now_ns(); now_ns() - start < LONGEST_HAND_OFF_NS;) {
        if (came.load(std::memory_order_acquire)) return;
        relax();
    }
}

// Measured once, with the first workers just created: the median of a few hand-offs to a worker that spins.
void measure_region() {
    int64_t times[HAND_OFFS];
    for (int64_t& time : times) {
        std::atomic<bool> came{false};
        const int64_t start = now_ns();
        open_region(hand_off, &came, 1);
        hand_off(&came);
        close_region();
        time = now_ns() - start;
    }
    std::nth_element(times, times + HAND_OFFS / 2, times + HAND_OFFS);
    pool.region_ns.store(min(times[HAND_OFFS / 2], LONGEST_HAND_OFF_NS), std::memory_order_relaxed);
}

}  // namespace

bool is_worth_sharing(int64_t ns) {
    if (ns <= 2 * pool.region_ns.load(std::memory_order_relaxed)) return false;
    return ns > 2 * CONTENDED_REGION_NS || now_ns() >= pool.contended_until.load(std::memory_order_relaxed);
}

void on_threads(void (*work)(void*), void* argument, int64_t threads) {
    if (threads <= 1 || is_worker || pool.taken.test_and_set(std::memory_order_acquire)) return work(argument);
    const int64_t wanted = threads - 1 < MOST_WORKERS ? threads - 1 : MOST_WORKERS;
    if (pool.workers < wanted) create_workers(static_cast<int>(wanted));
    if (!pool.region_ns.load(std::memory_order_relaxed)) measure_region();
    open_region(work, argument, wanted);
    work(argument);
    close_region();
    pool.taken.clear(std::memory_order_release);
}

}  // namespace llm

// Ends the threads; the next region creates new ones. Does nothing while another thread computes.
LLM_EXPORT void llm_end_threads() {
    using namespace llm;
    if (pool.taken.test_and_set(std::memory_order_acquire)) return;
    pool.ending = true;
    pool.opened.fetch_add(1);
    sys::wake(pool.opened, INT_MAX);
    for (int i = 0; i < pool.workers; ++i) sys::join(pool.ids[i]);
    pool.ending = false;
    pool.workers = 0;
    pool.opened.store(0);
    pool.taken.clear(std::memory_order_release);
}

// For tests: runs `count` tasks of about `spin` turns of a loop each and writes the system's thread id that ran each.
// Returns the number of workers.
LLM_EXPORT int64_t llm_probe_threads(int64_t* ran_by, int64_t count, int64_t turns, int64_t threads) {
    llm::parallel_for(count, threads, 0, [&](int64_t i, char*) {
        for (volatile int64_t turn = 0; turn < turns; turn = turn + 1) continue;
        ran_by[i] = llm::sys::thread_id();
    });
    return llm::pool.workers;
}

// For tests: the number of regions opened since the threads were created.
LLM_EXPORT int64_t llm_count_regions() { return llm::pool.opened.load(); }

// For tests: what a region costs in nanoseconds; 0: not measured.
LLM_EXPORT int64_t llm_region_ns() { return llm::pool.region_ns.load(); }

// For tests: whether the last region had more threads than there are cores, so that none spins.
LLM_EXPORT int64_t llm_is_outnumbered() { return llm::is_outnumbered(); }

LLM_FUNCTION(llm_end_threads)
LLM_FUNCTION(llm_probe_threads)
LLM_FUNCTION(llm_count_regions)
LLM_FUNCTION(llm_region_ns)
LLM_FUNCTION(llm_is_outnumbered)
