// What the kernels need of the operating system: aligned memory, clocks, threads, and sleeping until a word changes.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <malloc.h>
#include <windows.h>
#undef near
#undef far
#else
#include <csignal>
#include <ctime>
#include <pthread.h>
#endif

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#endif
#if !defined(_WIN32)
#include <unistd.h>
#endif
// LLM_NO_FUTEX: for tests of what other systems get.
#if defined(__linux__) && !defined(LLM_NO_FUTEX)
#define LLM_FUTEX 1
#include <linux/futex.h>
#endif

#if defined(_WIN32)
#define LLM_EXPORT extern "C" __declspec(dllexport)
#else
#define LLM_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace llm {

// 64-byte aligned memory, or null; freed by release().
inline void* allocate(int64_t bytes) {
    const size_t whole = static_cast<size_t>((bytes + 63) / 64 * 64);
#if defined(_WIN32)
    return _aligned_malloc(whole, 64);
#else
    return std::aligned_alloc(64, whole);
#endif
}

inline void release(void* data) {
#if defined(_WIN32)
    _aligned_free(data);
#else
    std::free(data);
#endif
}

namespace sys {

#if defined(_WIN32)

inline int64_t now_ns() {
    LARGE_INTEGER count, rate;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&rate);
    const int64_t seconds = count.QuadPart / rate.QuadPart, rest = count.QuadPart % rate.QuadPart;
    return seconds * INT64_C(1'000'000'000) + rest * INT64_C(1'000'000'000) / rate.QuadPart;
}

// Time for which this thread had a core, in steps of a clock tick.
inline int64_t thread_ns() {
    FILETIME created, ended, kernel, user;
    if (!GetThreadTimes(GetCurrentThread(), &created, &ended, &kernel, &user)) return now_ns();
    const auto units = [](const FILETIME& time) {
        return static_cast<int64_t>(time.dwHighDateTime) << 32 | time.dwLowDateTime;
    };
    return (units(kernel) + units(user)) * 100;
}

inline int64_t thread_id() { return GetCurrentThreadId(); }

// Cores that this thread may run on.
inline int64_t cores() { return GetActiveProcessorCount(ALL_PROCESSOR_GROUPS); }

inline void wait(std::atomic<uint32_t>& word, uint32_t seen) { WaitOnAddress(&word, &seen, sizeof seen, INFINITE); }

inline void wake(std::atomic<uint32_t>& word, int count) {
    count == 1 ? WakeByAddressSingle(&word) : WakeByAddressAll(&word);
}

using Thread = HANDLE;

// False where the system has no more threads.
inline bool start(Thread& thread, void* (*live)(void*)) {
    const auto enter = [](void* function) -> DWORD {
        reinterpret_cast<void* (*)(void*)>(function)(nullptr);
        return 0;
    };
    thread = CreateThread(nullptr, 0, enter, reinterpret_cast<void*>(live), 0, nullptr);
    return thread != nullptr;
}

inline void join(Thread thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

inline void forget_sleepers() {}
inline void after_fork(void (*)()) {}  // Windows has no forks

#else

inline int64_t clock_ns(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * INT64_C(1'000'000'000) + time.tv_nsec;
}

inline int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

inline int64_t thread_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

inline int64_t thread_id() {
#if defined(__linux__)
    return syscall(SYS_gettid);
#else
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pthread_self()));
#endif
}

// Cores that this thread may run on.
inline int64_t cores() {
#if defined(__linux__)
    cpu_set_t allowed;
    // More cores than the set has room for.
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return CPU_SETSIZE;
    return CPU_COUNT(&allowed);
#else
    return sysconf(_SC_NPROCESSORS_ONLN);
#endif
}

#if defined(LLM_FUTEX)
inline void forget_sleepers() {}

inline void wait(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

inline void wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}
#else
// One lock for all words: a thread that sleeps has looked at its word under it, so no change is missed.
struct Sleepers {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
};
inline Sleepers sleepers;

// In a forked child, whose parent's threads may have held the lock.
inline void forget_sleepers() { new (&sleepers) Sleepers; }

inline void wait(std::atomic<uint32_t>& word, uint32_t seen) {
    pthread_mutex_lock(&sleepers.lock);
    if (word.load() == seen) pthread_cond_wait(&sleepers.changed, &sleepers.lock);
    pthread_mutex_unlock(&sleepers.lock);
}

inline void wake(std::atomic<uint32_t>&, int) {
    pthread_mutex_lock(&sleepers.lock);
    pthread_cond_broadcast(&sleepers.changed);
    pthread_mutex_unlock(&sleepers.lock);
}
#endif

using Thread = pthread_t;

// With all signals blocked: these are for the program's own threads. False where the system has no more threads.
inline bool start(Thread& thread, void* (*live)(void*)) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool started = pthread_create(&thread, nullptr, live, nullptr) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
}

inline void join(Thread thread) { pthread_join(thread, nullptr); }

// Calls `forget` in every forked child.
inline void after_fork(void (*forget)()) { pthread_atfork(nullptr, nullptr, forget); }

#endif

}  // namespace sys
}  // namespace llm
