// Arithmetic of sizes and positions.
#pragma once

#include <cstdint>

namespace llm {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// Index of the first of `count` indices that is not in [0, end); -1 if there is none.
inline int64_t first_outside(const int64_t* indices, int64_t count, int64_t end) {
    for (int64_t i = 0; i < count; ++i)
        if (indices[i] < 0 || indices[i] >= end) return i;
    return -1;
}

}  // namespace
}  // namespace llm
