// Calls every product with buffers of exactly the size that is promised, so that AddressSanitizer and UBSan see any
// byte beyond them. Compiled with the kernels' sources by tests/test_kernels_sanitized.py; prints "ok" and the number
// of calls.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "declarations.h"

int run_step_kernels();  // kernels_driver_step.cpp
int run_experts();       // kernels_driver_experts.cpp

namespace {

int calls = 0;

struct Shape { int64_t m, n, k; };

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

void multiply(const Weight& weight, const Exactly<float>& x, const Exactly<float>& y, int64_t m) {
    if (llm_linear(&weight, x.data, y.data, m, 1)) std::exit(1);
    ++calls;
}

template <class T> void floats(Kind kind, int64_t m, int64_t n, int64_t k) {
    Exactly<T> values(n * k), panels(up(n, 16) * up(k, kind == Kind::BFLOAT16 ? 2 : 1)), back(n * k);
    llm_pack(kind, values.data, panels.data, nullptr, n, k, 1);
    Exactly<float> x(m * k), bias(n), y(m * n), rows(2 * k);
    Weight weight{};
    weight.data = panels.data, weight.kind = kind, weight.n = n, weight.k = k, weight.group_size = k;
    llm_unpack(&weight, back.data, 0, n, 1);
    expect_same(values, back);
    multiply(weight, x, y, m);
    weight.bias = bias.data;
    multiply(weight, x, y, m);
    weight.activations = Activations::BFLOAT16;
    if (kind == Kind::BFLOAT16) multiply(weight, x, y, m);
    const int64_t good[2] = {0, n - 1}, bad[2] = {0, n};
    if (llm_embedding(&weight, good, rows.data, 2, 1)) std::exit(1);
    if (!llm_embedding(&weight, bad, rows.data, 2, 1)) std::exit(1);
    calls += 4;
}

int64_t panel_elements(Kind kind, int64_t n, int64_t k) {
    if (kind == Kind::FLOAT8) return up(n, 16) * k;
    return kind == Kind::INT8 ? up(n, 16) * up(k, 4) : up(n, 16) * up(k, 8) / 2;
}

// The weight as its bits, and the same with scales of each kind; `zeros` for products with float activations.
template <class T> void integers(Kind kind, int64_t m, int64_t n, int64_t k) {
    Exactly<int8_t> values(n * k), back(n * k);
    Exactly<T> panels(panel_elements(kind, n, k));
    Exactly<int32_t> sums(up(n, 16));
    llm_pack(kind, values.data, panels.data, kind == Kind::INT8 ? sums.data : nullptr, n, k, 1);
    Exactly<float> x(m * k), bias(n), y(m * n), rows(2 * k);
    Exactly<int32_t> order(k);
    for (int64_t j = 0; j < k; ++j) order.data[j] = static_cast<int32_t>(k - 1 - j);
    Weight weight{};
    weight.data = panels.data, weight.sums = sums.data, weight.kind = kind, weight.n = n, weight.k = k;
    llm_unpack(&weight, back.data, 0, n, 1);
    expect_same(values, back);
    if (!llm_linear(&weight, x.data, y.data, m, 1)) std::exit(1);  // it has no scales
    for (int64_t group : {int64_t{8}, int64_t{32}, int64_t{64}, k}) {
        const int64_t groups = (k + group - 1) / group;
        Exactly<float> scales(n * groups), zeros(n * groups);
        Exactly<uint16_t> half(n * groups);
        const auto with_scales = [&](Kind scale_kind, bool has_zeros, bool has_bias) {
            weight.scale = scale_kind == Kind::FLOAT32 ? static_cast<void*>(scales.data) : half.data;
            weight.scale_kind = scale_kind, weight.group_size = group;
            weight.scale_stride = weight.zero_stride = weight.minimum_stride = n;
            weight.zero = !has_zeros ? nullptr : has_bias ? static_cast<void*>(zeros.data) : half.data;
            weight.zero_kind = has_bias ? Kind::FLOAT32 : Kind::FLOAT16;
            weight.bias = has_bias ? bias.data : nullptr;
            multiply(weight, x, y, m);
        };
        weight.activations = Activations::FLOAT;
        const int64_t ids[2] = {0, n - 1};
        Exactly<float> table(16);
        for (const float step : {1.0f, 0.3f}) {  // whole numbers, which AVX2 looks up in bytes, and others
            if (kind == Kind::INT8) break;
            for (int64_t j = 0; j < 16; ++j) table.data[j] = step * static_cast<float>(j);
            weight.table = kind == Kind::INT4 ? table.data : nullptr;
            with_scales(Kind::FLOAT32, false, true);
            with_scales(Kind::BFLOAT16, false, false);
            if (llm_embedding(&weight, ids, rows.data, 2, 1)) std::exit(1);
        }
        weight.table = nullptr;
        if (kind == Kind::FLOAT8) continue;
        with_scales(Kind::FLOAT32, true, true);
        with_scales(Kind::BFLOAT16, true, false);
        with_scales(Kind::FLOAT16, false, false);
        weight.minimum = zeros.data, weight.minimum_kind = Kind::FLOAT32;
        with_scales(Kind::FLOAT32, false, true);
        if (llm_embedding(&weight, ids, rows.data, 2, 1)) std::exit(1);
        weight.minimum = nullptr;
        weight.columns = order.data;
        with_scales(Kind::FLOAT32, true, true);
        weight.columns = nullptr;
        weight.activations = Activations::INT8;
        if (kind == Kind::INT8 && groups > 1) continue;
        with_scales(Kind::FLOAT32, false, true);
        with_scales(Kind::BFLOAT16, false, false);
        with_scales(Kind::FLOAT16, false, false);
        if (kind != Kind::INT4 || k % group || group % 8) continue;
        Exactly<uint8_t> levels(up(n, 16) * groups);
        for (int64_t i = 0; i < levels.count; ++i) levels.data[i] = static_cast<uint8_t>(i % 15 + 1 + i % 16 * 16);
        Exactly<float> by_row(n);
        weight.levels = levels.data, weight.scale = by_row.data;
        weight.scale_kind = Kind::FLOAT32, weight.bias = bias.data;
        llm_level_sums(&weight, sums.data, 1);
        multiply(weight, x, y, m);
        weight.levels = nullptr;
    }
    calls += 3;
    if (kind != Kind::INT8) return;
    Exactly<float> per_row(n);
    weight.scale = per_row.data, weight.scale_kind = Kind::FLOAT32, weight.bias = bias.data;
    weight.input_scale = 0.5f, weight.input_offset = -128;
    multiply(weight, x, y, m);
    const int64_t ids[2] = {0, n - 1};
    if (llm_embedding(&weight, ids, rows.data, 2, 1)) std::exit(1);
    Exactly<float> row_scale(m);
    Exactly<int8_t> q(m * k);
    llm_quantize_per_token(x.data, q.data, row_scale.data, m, k, 1);
    llm_quantize_static(x.data, q.data, 0.25f, 3, m * k, 1);
    calls += 3;
}

// A weight in every form that it can be quantized to: groups of 32 columns, with Q4_K in blocks of 256.
template <class T> void quantized(Kind kind, int64_t n, int64_t k, int64_t group) {
    const int64_t groups = n * k / group;
    Exactly<T> values(n * k);
    if (kind != Kind::FLOAT32)  // finite
        for (int64_t i = 0; i < n * k; ++i) values.data[i] = static_cast<T>(0x3c00 + i * 7 % 256);
    Exactly<int8_t> q(n * k);
    Exactly<float> scale(groups), minimum(groups), table(16);
    Exactly<double> energies(2 * (n > up(groups, 16) / 16 ? n : up(groups, 16) / 16));
    for (int64_t j = 0; j < 16; ++j) table.data[j] = static_cast<float>(j) / 8 - 1;
    const auto to = [&](WeightForm form, int64_t rotation = 0, const float* input_squares = nullptr) {
        const bool has_minimum = form == WeightForm::Q4_K || form == WeightForm::ASYMMETRIC ||
                                 form == WeightForm::TWO_LEVELS;
        if (llm_quantize_weight(kind, form, values.data, q.data, scale.data, has_minimum ? minimum.data : nullptr,
                                energies.data, table.data, input_squares, n, k, 7, group, rotation, 1))
            std::exit(1);
        ++calls;
    };
    for (WeightForm form : {WeightForm::ROUNDED, WeightForm::SEARCHED, WeightForm::FLOAT8, WeightForm::MXFP4,
                            WeightForm::NF4, WeightForm::ASYMMETRIC, WeightForm::TWO_LEVELS})
        to(form);
    for (int64_t block = 16; block <= 256; block *= 2) {
        if (k % block) continue;
        to(WeightForm::ROUNDED, block), to(WeightForm::TWO_LEVELS, block);
        if (block % group) continue;
        Exactly<float> input_squares(k);
        for (int64_t i = 0; i < k; ++i) input_squares.data[i] = static_cast<float>(i % 5 + 1) / 4;
        to(WeightForm::TWO_LEVELS, block, input_squares.data);
    }
    Exactly<int64_t> squares(k);
    if (llm_column_squares(kind, values.data, squares.data, n, k, 1)) std::exit(1);
    ++calls;
    if (group != 32) return;
    to(WeightForm::Q8_0), to(WeightForm::Q4_0);
    if (k % 256 == 0) to(WeightForm::Q4_K);
}

// Rows of GGUF's blocks, in the type's own form and in the widest: groups of 16, minima, numbers in the place of codes.
void blocks(BlockType kind, int64_t values, int64_t bytes, int64_t n, bool has_minimum) {
    const int64_t k = 2 * values;
    Exactly<uint8_t> raw(n * 2 * bytes);
    Exactly<int8_t> q(n * k), table(16);
    for (int64_t i = 0; i < raw.count; ++i) raw.data[i] = static_cast<uint8_t>(i * 37 % 120);  // finite scales
    for (const bool widest : {false, true}) {
        const int64_t group = widest || kind == BlockType::Q2_K || kind == BlockType::Q3_K || kind == BlockType::Q6_K
                                  ? 16
                                  : 32;
        const bool looks_up = widest && (kind == BlockType::IQ4_NL || kind == BlockType::IQ4_XS);
        Exactly<float> scale(n * k / group), minimum(n * k / group);
        if (llm_decode_blocks(kind, raw.data, q.data, scale.data, widest || has_minimum ? minimum.data : nullptr,
                              looks_up ? table.data : nullptr, n, k, group, widest ? 16 : 8, 1))
            std::exit(1);
        ++calls;
    }
}

void all_kinds(int64_t m, int64_t n, int64_t k) {
    floats<float>(Kind::FLOAT32, m, n, k);
    floats<uint16_t>(Kind::BFLOAT16, m, n, k);
    floats<uint16_t>(Kind::FLOAT16, m, n, k);
    integers<int8_t>(Kind::INT8, m, n, k);
    integers<uint8_t>(Kind::INT4, m, n, k);
    integers<uint8_t>(Kind::FLOAT8, m, n, k);
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
        Weight weight{};
        weight.data = table.data, weight.n = 16, weight.k = 8;
        llm_embedding(&weight, &id, y.data, 1, 1);
        return 0;
    }
    for (int64_t m : {1, 2, 4, 5, 7, 12, 13, 23})
        for (int64_t n : {1, 15, 16, 33, 81})
            for (int64_t k : {1, 3, 8, 17, 31, 64, 259}) {
                if (k > 64 && n != 33) continue;  // more than one block of k: once for each height
                all_kinds(m, n, k);
            }
    // More than one block of steps, of rows and of panels where there are matrix tiles.
    floats<uint16_t>(Kind::BFLOAT16, 130, 70, 40);
    floats<uint16_t>(Kind::BFLOAT16, 34, 70, 1100);
    for (const auto& [m, n, k] : {Shape{130, 70, 40}, Shape{33, 34, 2100}}) {
        integers<int8_t>(Kind::INT8, m, n, k);
        integers<uint8_t>(Kind::INT4, m, n, k);
    }
    for (int64_t n : {1, 3, 17}) {
        for (int64_t k : {1, 15, 40, 260}) quantized<float>(Kind::FLOAT32, n, k, k);
        for (int64_t k : {32, 96, 256}) {
            quantized<float>(Kind::FLOAT32, n, k, 32);
            quantized<uint16_t>(Kind::BFLOAT16, n, k, 32);
            quantized<uint16_t>(Kind::FLOAT16, n, k, 32);
        }
    }
    for (int64_t n : {1, 3, 700}) {  // more than one task
        for (BlockType kind : {BlockType::Q8_0, BlockType::Q4_0, BlockType::Q4_1, BlockType::Q5_0, BlockType::Q5_1,
                               BlockType::IQ4_NL, BlockType::MXFP4}) {
            const int64_t bytes[] = {34, 18, 20, 22, 24, 0, 0, 0, 0, 0, 18, 0, 17};
            blocks(kind, 32, bytes[static_cast<int>(kind)], n, kind == BlockType::Q4_1 || kind == BlockType::Q5_1);
        }
        blocks(BlockType::Q2_K, 256, 84, n, true), blocks(BlockType::Q3_K, 256, 110, n, false);
        blocks(BlockType::Q4_K, 256, 144, n, true), blocks(BlockType::Q5_K, 256, 176, n, true);
        blocks(BlockType::Q6_K, 256, 210, n, false), blocks(BlockType::IQ4_XS, 256, 136, n, false);
    }
    std::printf("ok %d\n", calls + run_step_kernels() + run_experts());
    return 0;
}
