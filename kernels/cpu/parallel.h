// Spreading work over the threads of the OpenMP runtime that the host process already has.
//
// The runtime is not linked: library.py binds its entry points (llm_bind_openmp). Unbound, work runs on one thread.
// Tasks are handed out one by one from a counter, so a slow core takes fewer. No result may depend on which thread runs
// a task, nor on how many there are.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define LLM_EXPORT extern "C" __attribute__((visibility("default")))

namespace llm {

struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);
    int (*num_threads)();
};
extern OpenMP openmp;  // threads.cpp

// Rounding to nearest, denormals kept: the control word is per thread, and a library loaded by the user may have changed it.
class FloatControl {
#if defined(__x86_64__)
    unsigned saved_ = _mm_getcsr();

  public:
    FloatControl() { _mm_setcsr(0x1f80); }
    ~FloatControl() { _mm_setcsr(saved_); }
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
    explicit Scratch(int64_t bytes) : data_(bytes > 0 ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr) {
        if (bytes > 0 && !data_) std::abort();
    }
    ~Scratch() { std::free(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    template <class T> T* as() const { return static_cast<T*>(data_); }
};

template <class Task> struct Region {
    const Task* task;
    int64_t count, scratch_bytes;
    std::atomic<int64_t> next;

    static void work(void* self) {
        Region& region = *static_cast<Region*>(self);
        int64_t index = region.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= region.count) return;
        FloatControl control;
        Scratch scratch(region.scratch_bytes);
        for (; index < region.count; index = region.next.fetch_add(1, std::memory_order_relaxed))
            (*region.task)(index, scratch.as<char>());
    }
};

// task(index, scratch) for each index in [0, count), on at most `threads` threads; `scratch` is the thread's own.
template <class Task> void parallel_for(int64_t count, int64_t threads, int64_t scratch_bytes, const Task& task) {
    if (count <= 0) return;
    Region<Task> region{&task, count, scratch_bytes, {0}};
    if (threads > count) threads = count;
    if (threads <= 1 || !openmp.parallel)
        Region<Task>::work(&region);
    else
        openmp.parallel(Region<Task>::work, &region, static_cast<unsigned>(threads), 0);
}

}  // namespace llm
