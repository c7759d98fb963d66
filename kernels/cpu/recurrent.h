// The batch rows of a step, for kernels that keep a state per request: recurrent.py has the same in Python.
#pragma once

#include "integers.h"
#include "simd.h"

namespace llm {
namespace {

// Row r has the tokens [first(r), first(r) + count(r)); its state is at index slots[r].
struct StateRows {
    const int64_t* slots;
    const int32_t *starts, *lengths;
    const int32_t* counts;         // null: a row's tokens end where the next row's start
    const int32_t* stored_counts;  // null: `counts`
    int64_t rows;

    int64_t first(int64_t row) const { return starts[row]; }
    int64_t count(int64_t row) const { return counts ? counts[row] : starts[row + 1] - starts[row]; }
    // After so many of its tokens the state is stored; the tokens behind them change a copy.
    int64_t stored(int64_t row) const { return stored_counts ? stored_counts[row] : count(row); }
    // Its first token is at position 0: its slot has what an earlier request left.
    bool is_new(int64_t row) const { return lengths[row] == count(row); }
    // Without the last rows that have no tokens: a step that is replayed may have fewer rows than the recorded one.
    StateRows trimmed() const {
        StateRows found = *this;
        while (found.rows && !count(found.rows - 1)) --found.rows;
        return found;
    }
};

// Sixteen lanes: all of them exist, or the first `left`.
template <bool WHOLE, class T> LLM_INLINE F32 take(const T* from, int64_t left) {
    if constexpr (WHOLE) return load(from);
    else return load_part(from, left);
}
template <bool WHOLE> LLM_INLINE void give(float* to, F32 value, int64_t left) {
    if constexpr (WHOLE) store(to, value);
    else store_part(to, value, left);
}

// The first row whose slot or tokens do not exist; -1 if there is none.
inline int64_t first_bad_row(const StateRows& rows, int64_t num_slots, int64_t tokens) {
    for (int64_t r = 0; r < rows.rows; ++r) {
        if (rows.slots[r] < 0 || rows.slots[r] >= num_slots || rows.starts[r] < 0 || rows.count(r) < 0) return r;
        if (rows.first(r) + rows.count(r) > tokens || rows.lengths[r] < rows.count(r)) return r;
        if (rows.stored(r) < 0 || rows.stored(r) > rows.count(r)) return r;
    }
    return -1;
}

}  // namespace
}  // namespace llm
