// What the library exports beside each function: a form that takes all arguments in one block, for Python (library.py)
// and for recorded steps (replay.cpp), and the function's types.
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
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(slot.integer);
    else if constexpr (std::is_floating_point_v<T>) return static_cast<T>(slot.real);
    else return static_cast<T>(slot.integer);
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

// A type's name in source form.
template <class T> struct TypeName;
template <> struct TypeName<void> { static constexpr const char* value = "void"; };
#define LLM_NAMED(TYPE) \
    template <> struct TypeName<TYPE> { static constexpr const char* value = #TYPE; };
#define LLM_NAMED_POINTERS(TYPE) LLM_NAMED(TYPE*) LLM_NAMED(const TYPE*)
LLM_NAMED(int64_t)
LLM_NAMED(float)
LLM_NAMED_POINTERS(void)
LLM_NAMED_POINTERS(float)
LLM_NAMED_POINTERS(double)
LLM_NAMED_POINTERS(int8_t)
LLM_NAMED_POINTERS(uint8_t)
LLM_NAMED_POINTERS(int32_t)
LLM_NAMED_POINTERS(int64_t)

// The names of the result and the arguments, then null.
template <class R, class... A> const char* const* types_of(R (*)(A...)) {
    static constexpr const char* names[] = {TypeName<R>::value, TypeName<A>::value..., nullptr};
    return names;
}

}  // namespace llm

// Exports NAME_types(), the types of NAME: signatures.py compares them with its own.
#define LLM_FUNCTION(NAME) \
    LLM_EXPORT const char* const* NAME##_types() { return llm::types_of(NAME); }

// Exports NAME_types() and NAME_replay(slots), one slot per argument of NAME.
#define LLM_KERNEL(NAME) \
    LLM_FUNCTION(NAME)   \
    LLM_EXPORT int64_t NAME##_replay(const llm::Slot* slots) { return llm::call_with(NAME, slots); }
