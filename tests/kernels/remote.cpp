// Calls the kernels of a library in another process, and on another architecture under qemu: remote.py is the caller.
//
// Reads requests from standard input until it ends: the kernel's name, its slots, regions of memory, and where the
// slots and regions hold addresses of regions. Answers with the result and the regions that the kernel may write. A
// region has the size of the caller's memory and its place in a line of 64 bytes.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t IN_SLOTS = -1;  // in the place of a region's number

struct Patch { int64_t holder, at, region, offset; };
struct Region {
    std::unique_ptr<char, decltype(&std::free)> memory{nullptr, std::free};
    char* data = nullptr;
    int64_t bytes = 0, is_written = 0;
};

bool read_all(void* to, int64_t bytes) {
    return bytes == 0 || std::fread(to, 1, bytes, stdin) == static_cast<size_t>(bytes);
}
template <class T> T take() {
    T value;
    if (!read_all(&value, sizeof value)) std::_Exit(2);
    return value;
}
template <class T> std::vector<T> take_list() {
    std::vector<T> values(take<int64_t>());
    if (!read_all(values.data(), values.size() * sizeof(T))) std::_Exit(2);
    return values;
}

using Kernel = int64_t (*)(const int64_t*);

Kernel find(void* library, const std::string& name) {
    static std::map<std::string, Kernel> known;
    Kernel& kernel = known[name];
    if (!kernel) kernel = reinterpret_cast<Kernel>(dlsym(library, (name + "_replay").c_str()));
    if (!kernel) std::fprintf(stderr, "no %s\n", name.c_str()), std::_Exit(3);
    return kernel;
}

void answer(void* library, int64_t name_bytes) {
    std::string name(name_bytes, '\0');
    if (!read_all(name.data(), name_bytes)) std::_Exit(2);
    auto slots = take_list<int64_t>();
    std::vector<Region> regions(take<int64_t>());
    for (Region& region : regions) {
        const int64_t place = take<int64_t>();
        region.bytes = take<int64_t>(), region.is_written = take<int64_t>();
        const int64_t whole = (place + region.bytes + LINE) / LINE * LINE;
        region.memory.reset(static_cast<char*>(std::aligned_alloc(LINE, whole)));
        region.data = region.memory.get() + place;
        if (!read_all(region.data, region.bytes)) std::_Exit(2);
    }
    for (const Patch& patch : take_list<Patch>()) {
        char* holder = patch.holder == IN_SLOTS ? reinterpret_cast<char*>(slots.data()) : regions[patch.holder].data;
        *reinterpret_cast<char**>(holder + patch.at) = regions[patch.region].data + patch.offset;
    }
    const int64_t result = find(library, name)(slots.data());
    std::fwrite(&result, sizeof result, 1, stdout);
    for (const Region& region : regions)
        if (region.is_written && region.bytes) std::fwrite(region.data, 1, region.bytes, stdout);
    std::fflush(stdout);
}

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::_Exit(3);
    for (int64_t name_bytes; read_all(&name_bytes, sizeof name_bytes);) answer(library, name_bytes);
    std::_Exit(0);
}
