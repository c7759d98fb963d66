// Spreads work over the kernels' own threads (threads.cpp).
//
// A slow or late core takes fewer tasks; nobody waits for a thread that has taken none. No result may depend on which
// thread runs a task, or on the number of threads.
#pragma once

#include "integers.h"
#include "system.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace llm {

// Calls work(argument) here and on up to `threads` - 1 workers, each at most once: threads.cpp.
void on_threads(void (*work)(void*), void* argument, int64_t threads);

// True if sharing `ns` nanoseconds of one thread's work saves time: a second thread saves at most half, and a region
// has a cost, which is measured once.
bool is_worth_sharing(int64_t ns);

// Rounding to nearest with denormals kept. The control word is per thread, and another library may have changed it.
class FloatControl {
#if defined(__x86_64__)
    unsigned saved_ = _mm_getcsr();

  public:
    FloatControl() { _mm_setcsr(0x1f80); }
    ~FloatControl() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
    uint64_t saved_;
    static void set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }

  public:
    FloatControl() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        set(0);
    }
    ~FloatControl() { set(saved_); }
#else
  public:
    FloatControl() {}
    ~FloatControl() {}
#endif
    FloatControl(const FloatControl&) = delete;
    FloatControl& operator=(const FloatControl&) = delete;
};

// 64-byte aligned memory, freed at the end of the scope.
class Scratch {
    void* data_;

  public:
    explicit Scratch(int64_t bytes) : data_(bytes > 0 ? allocate(bytes) : nullptr) {
        if (bytes > 0 && !data_) std::abort();
    }
    ~Scratch() { release(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    template <class T> T* as() const { return static_cast<T*>(data_); }
};

// The tasks are cut into one range per thread. A thread takes its own range in order, so that its prefetches are used,
// and then helps with the other ranges. Of a long range it takes several tasks at once: an atomic operation waits until
// the stores of the task before it have left the core.
template <class Task> struct Region {
    static constexpr int64_t MOST_RUNS = 64, PARTS = 16;
    struct alignas(64) Run {
        std::atomic<int64_t> next;
        int64_t end;
    };
    const Task* task;
    int64_t scratch_bytes, runs;
    std::atomic<int64_t> arrived{0};
    Run run[MOST_RUNS];

    Region(const Task& what, int64_t count, int64_t threads, int64_t bytes)
        : task(&what), scratch_bytes(bytes), runs(threads < MOST_RUNS ? threads : MOST_RUNS) {
        for (int64_t i = 0; i < runs; ++i) {
            run[i].next.store(count * i / runs, std::memory_order_relaxed);
            run[i].end = count * (i + 1) / runs;
        }
    }
    static void work(void* self) {
        Region& region = *static_cast<Region*>(self);
        FloatControl control;
        Scratch scratch(region.scratch_bytes);
        const int64_t own = region.arrived.fetch_add(1, std::memory_order_relaxed);
        for (int64_t turn = 0; turn < region.runs; ++turn) {
            Run& run = region.run[(own + turn) % region.runs];
            for (int64_t left; (left = run.end - run.next.load(std::memory_order_relaxed)) > 0;) {
                const int64_t some = left < PARTS ? 1 : left / PARTS;
                const int64_t first = run.next.fetch_add(some, std::memory_order_relaxed);
                const int64_t end = first + some < run.end ? first + some : run.end;
                for (int64_t index = first; index < end; ++index) (*region.task)(index, scratch.as<char>());
            }
        }
    }
};

// Calls task(index, scratch) for each index in [0, count) on at most `threads` threads; each thread has a `scratch` of
// its own.
template <class Task> void parallel_for(int64_t count, int64_t threads, int64_t scratch_bytes, const Task& task) {
    if (count <= 0) return;
    if (threads > count) threads = count;
    Region<Task> region(task, count, threads < 1 ? 1 : threads, scratch_bytes);
    on_threads(Region<Task>::work, &region, threads);
}

}  // namespace llm
