// Calling an exported kernel with its arguments in one block: from Python (library.py), and again when they were recorded
// (replay.cpp).
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "parallel.h"

namespace llm {

union Slot {
    int64_t integer;
    double real;
};

template <class T> T from_slot(const Slot& slot) {
    if constexpr (std::is_pointer_v<T>)
        return reinterpret_cast<T>(slot.integer);
    else if constexpr (std::is_floating_point_v<T>)
        return static_cast<T>(slot.real);
    else
        return static_cast<T>(slot.integer);
}

template <class R, class... A, std::size_t... I>
int64_t call_with(R (*function)(A...), const Slot* slots, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
        function(from_slot<A>(slots[I])...);
        return 0;
    } else {
        return static_cast<int64_t>(function(from_slot<A>(slots[I])...));
    }
}

template <class R, class... A> int64_t call_with(R (*function)(A...), const Slot* slots) {
    return call_with(function, slots, std::index_sequence_for<A...>());
}

}  // namespace llm

// Exports NAME_replay(slots), one slot per argument of NAME.
#define LLM_REPLAYABLE(NAME) \
    LLM_EXPORT int64_t NAME##_replay(const llm::Slot* slots) { return llm::call_with(NAME, slots); }
