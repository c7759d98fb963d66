// Calls every product with buffers of exactly the size that is promised, so that AddressSanitizer and UBSan see any byte
// beyond them. Compiled with the kernels' sources by tests/test_kernels_sanitized.py; prints "ok" and the number of calls.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {
void llm_linear_float(int64_t, const float*, const void*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void llm_pack_float(int64_t, const void*, void*, int64_t, int64_t, int64_t);
void llm_unpack_float(int64_t, const void*, void*, int64_t, int64_t, int64_t, int64_t);
int64_t llm_embedding_float(int64_t, const int64_t*, const void*, float*, int64_t, int64_t, int64_t, int64_t);
void llm_pack_int8(const int8_t*, int8_t*, int32_t*, int64_t, int64_t, int64_t);
void llm_unpack_int8(const int8_t*, int8_t*, int64_t, int64_t, int64_t, int64_t);
void llm_linear_w8a8(const float*, const int8_t*, const int32_t*, const float*, float, int64_t, const float*, float*, int64_t,
                     int64_t, int64_t, int64_t);
int64_t llm_embedding_int8(const int64_t*, const int8_t*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void llm_quantize_per_token(const float*, int8_t*, float*, int64_t, int64_t, int64_t);
void llm_quantize_static(const float*, int8_t*, float, int64_t, int64_t, int64_t);
void llm_pack_int4(const int8_t*, uint8_t*, int64_t, int64_t, int64_t);
void llm_unpack_int4(const uint8_t*, int8_t*, int64_t, int64_t, int64_t, int64_t);
void llm_linear_w4a8(const float*, const uint8_t*, const void*, int64_t, int64_t, int64_t, int64_t, const float*, float*,
                     int64_t, int64_t, int64_t, int64_t);
void llm_linear_weight_only(int64_t, const float*, const uint8_t*, const void*, int64_t, int64_t, const void*, int64_t, int64_t,
                            int64_t, const float*, float*, int64_t, int64_t, int64_t, int64_t);
}


extern "C" {
}

int run_step_kernels();  // kernels_driver_step.cpp

namespace {

int calls = 0;

// Heap memory of exactly `count` elements: the bytes behind it are poisoned.
template <class T> struct Exactly {
    T* data;
    int64_t count;
    explicit Exactly(int64_t n) : data(static_cast<T*>(std::malloc(n * sizeof(T) + (n == 0)))), count(n) {
        for (int64_t i = 0; i < n; ++i) data[i] = static_cast<T>(static_cast<int>(std::rand() % 15) - 7);
    }
    ~Exactly() { std::free(data); }
};

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class T> void expect_same(const Exactly<T>& a, const Exactly<T>& b) {
    if (std::memcmp(a.data, b.data, a.count * sizeof(T)) == 0) return;
    std::printf("unpacked differs\n");
    std::exit(1);
}

template <class T> void floats(int64_t kind, int64_t m, int64_t n, int64_t k) {
    Exactly<T> weight(n * k), panels(up(n, 16) * up(k, kind == 1 ? 2 : 1)), back(n * k);
    llm_pack_float(kind, weight.data, panels.data, n, k, 1);
    llm_unpack_float(kind, panels.data, back.data, 0, n, k, 1);
    expect_same(weight, back);
    Exactly<float> x(m * k), bias(n), y(m * n), rows(2 * k);
    llm_linear_float(kind, x.data, panels.data, bias.data, y.data, m, n, k, 1);
    llm_linear_float(kind, x.data, panels.data, nullptr, y.data, m, n, k, 1);
#if defined(__AMX_TILE__)
    if (kind == 1) llm_linear_float(3, x.data, panels.data, nullptr, y.data, m, n, k, 1);
#endif
    const int64_t good[2] = {0, n - 1}, bad[2] = {0, n};
    if (llm_embedding_float(kind, good, panels.data, rows.data, 2, n, k, 1)) std::exit(1);
    if (!llm_embedding_float(kind, bad, panels.data, rows.data, 2, n, k, 1)) std::exit(1);
    calls += 6;
}

void integers(int64_t m, int64_t n, int64_t k) {
    Exactly<float> x(m * k), bias(n), y(m * n), scale(n), rows(2 * k), row_scale(m);
    Exactly<int8_t> weight(n * k), panels(up(n, 16) * up(k, 4)), back(n * k), q(m * k);
    Exactly<int32_t> sums(up(n, 16));
    llm_pack_int8(weight.data, panels.data, sums.data, n, k, 1);
    llm_unpack_int8(panels.data, back.data, 0, n, k, 1);
    expect_same(weight, back);
    llm_linear_w8a8(x.data, panels.data, sums.data, scale.data, 0.0f, 0, bias.data, y.data, m, n, k, 1);
    llm_linear_w8a8(x.data, panels.data, sums.data, scale.data, 0.5f, -128, nullptr, y.data, m, n, k, 1);
    const int64_t ids[2] = {0, n - 1};
    if (llm_embedding_int8(ids, panels.data, scale.data, rows.data, 2, n, k, 1)) std::exit(1);
    llm_quantize_per_token(x.data, q.data, row_scale.data, m, k, 1);
    llm_quantize_static(x.data, q.data, 0.25f, 3, m * k, 1);
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(panels.data);
    Exactly<uint8_t> nibbles(up(n, 16) * up(k, 8) / 2);
    llm_pack_int4(weight.data, nibbles.data, n, k, 1);
    llm_unpack_int4(nibbles.data, back.data, 0, n, k, 1);
    expect_same(weight, back);
    for (int64_t group : {int64_t{8}, int64_t{32}, int64_t{64}, k}) {
        const int64_t groups = (k + group - 1) / group;
        Exactly<float> scales(n * groups), zeros(n * groups);
        Exactly<uint16_t> half(n * groups);
        llm_linear_w4a8(x.data, nibbles.data, scales.data, 0, n, group, groups, bias.data, y.data, m, n, k, 1);
        llm_linear_w4a8(x.data, nibbles.data, half.data, 1, n, group, groups, nullptr, y.data, m, n, k, 1);
        llm_linear_w4a8(x.data, nibbles.data, half.data, 2, n, group, groups, nullptr, y.data, m, n, k, 1);
        llm_linear_weight_only(4, x.data, nibbles.data, scales.data, 0, n, zeros.data, 0, n, group, bias.data, y.data, m, n, k, 1);
        llm_linear_weight_only(4, x.data, nibbles.data, half.data, 1, n, half.data, 2, n, group, nullptr, y.data, m, n, k, 1);
        llm_linear_weight_only(8, x.data, bytes, scales.data, 0, n, nullptr, 0, 0, group, nullptr, y.data, m, n, k, 1);
        calls += 6;
    }
    calls += 9;
}

}  // namespace

// With an argument: one read beyond a table, which the sanitizer must report.
int main(int argc, char**) {
#if defined(__AMX_TILE__)
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;  // the tiles' registers: build.py, request_tiles
#endif
    if (argc > 1) {
        Exactly<float> table(15 * 8), y(8);  // a panel has 16 rows
        const int64_t id = 15;
        llm_embedding_float(0, &id, table.data, y.data, 1, 16, 8, 1);
        return 0;
    }
    for (int64_t m : {1, 2, 4, 5, 7, 13, 23})
        for (int64_t n : {1, 15, 16, 33, 81})
            for (int64_t k : {1, 3, 8, 17, 31, 64, 259}) {
                if (k > 64 && n != 33) continue;  // more than one block of k: once for each height
                floats<float>(0, m, n, k);
                floats<uint16_t>(1, m, n, k);
                floats<uint16_t>(2, m, n, k);
                integers(m, n, k);
            }
    // More than one block of steps, of rows and of panels where there are matrix tiles.
    floats<uint16_t>(1, 130, 70, 40);
    floats<uint16_t>(1, 34, 70, 1100);
    integers(130, 70, 40);
    integers(33, 34, 2100);
    std::printf("ok %d\n", calls + run_step_kernels());
    return 0;
}
