// Replays a recorded sequence of kernel calls: a decode step without returning to Python in between.
//
// program.py records the calls and owns the memory they point to.
#include "replay.h"

namespace llm {
namespace {

struct Call {
    int64_t (*replay)(const Slot*);
    const Slot* slots;
    int64_t expected;  // what it returned when it was recorded
};

}  // namespace
}  // namespace llm

// Returns -1; or the index of the first call whose return value differs from the recorded one: later calls are not run.
LLM_EXPORT int64_t llm_replay(const void* program, int64_t count) {
    const llm::Call* calls = static_cast<const llm::Call*>(program);
    for (int64_t i = 0; i < count; ++i)
        if (calls[i].replay(calls[i].slots) != calls[i].expected) return i;
    return -1;
}

LLM_FUNCTION(llm_replay)
