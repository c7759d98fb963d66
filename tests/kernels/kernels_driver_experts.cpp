// Calls the experts of every kind of weight with buffers of exactly the size that is promised; see kernels_driver.cpp.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <vector>

#include "declarations.h"

namespace mixture {

int calls = 0;

struct Size { int64_t hidden, inner; };

// Heap memory of exactly `count` elements: the bytes behind it are poisoned.
template <class T> struct Exactly {
    T* data;
    explicit Exactly(int64_t n) : data(static_cast<T*>(std::malloc(n * sizeof(T) + (n == 0)))) {
        for (int64_t i = 0; i < n; ++i) data[i] = static_cast<T>(i % 5 - 2);
    }
    ~Exactly() { std::free(data); }
    Exactly(const Exactly&) = delete;
    Exactly& operator=(const Exactly&) = delete;
};

void need(bool holds, const char* what) {
    if (holds) return;
    std::printf("%s\n", what);
    std::exit(1);
}

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A weight and the memory of its parts.
struct Held {
    std::unique_ptr<Exactly<char>> panels;
    std::unique_ptr<Exactly<int32_t>> sums;
    std::unique_ptr<Exactly<float>> scales, bias;
    std::unique_ptr<Exactly<uint16_t>> zeros;
    Weight weight{};

    Held(Kind kind, Activations activations, int64_t n, int64_t k) {
        const bool integers = kind == Kind::INT8 || kind == Kind::INT4;
        const int64_t depth = kind == Kind::INT4 ? 8 : kind == Kind::INT8 ? 4 : kind == Kind::BFLOAT16 ? 2 : 1;
        const int64_t halves = kind == Kind::FLOAT32 ? 8 : kind == Kind::INT4 ? 1 : kind == Kind::INT8 ? 2 : 4;
        const int64_t group = integers && !(kind == Kind::INT8 && activations == Activations::INT8) ? 8 : k;
        const int64_t groups = (k + group - 1) / group;
        panels = std::make_unique<Exactly<char>>(up(n, 16) * up(k, depth) * halves / 2);
        sums = std::make_unique<Exactly<int32_t>>(up(n, 16));
        scales = std::make_unique<Exactly<float>>(n * groups);
        zeros = std::make_unique<Exactly<uint16_t>>(n * groups);
        bias = std::make_unique<Exactly<float>>(n);
        Exactly<int8_t> values(n * k * (integers ? 1 : 4));
        llm_pack(kind, values.data, panels->data, kind == Kind::INT8 ? sums->data : nullptr, n, k, 1);
        weight.data = panels->data, weight.kind = kind, weight.n = n, weight.k = k, weight.group_size = group;
        weight.activations = activations, weight.bias = bias->data;
        if (!integers) return;
        weight.sums = kind == Kind::INT8 ? sums->data : nullptr;
        weight.scale = scales->data, weight.scale_stride = weight.zero_stride = n;
        if (activations != Activations::INT8) weight.zero = zeros->data, weight.zero_kind = Kind::BFLOAT16;
    }
};

void experts(Kind kind, Activations activations, int64_t tokens, int64_t top_k, int64_t count, int64_t hidden,
             int64_t inner) {
    std::vector<Held> held;
    std::vector<Weight> gate_up, down;
    for (int64_t e = 0; e < count; ++e) {
        held.emplace_back(kind, activations, 2 * inner, hidden);
        gate_up.push_back(held.back().weight);
        held.emplace_back(kind, activations, hidden, inner);
        down.push_back(held.back().weight);
    }
    Exactly<float> x(tokens * hidden), factors(tokens * top_k), y(tokens * hidden);
    Exactly<int64_t> ids(tokens * top_k);
    const auto run = [&](int64_t function) {
        ++calls;
        return llm_experts(gate_up.data(), down.data(), count, x.data, ids.data, factors.data, tokens, top_k, function,
                           7.0f, y.data, 3);
    };
    for (int64_t i = 0; i < tokens * top_k; ++i) ids.data[i] = (i / top_k + i % top_k) % count;
    for (int64_t function : {0, 1, 2, 6}) need(run(function) == 0, "a good call was refused");
    for (int64_t i = 0; i < tokens * top_k; ++i) ids.data[i] = count - 1;  // all tokens to the last one
    need(run(0) == 0, "a good call was refused");
    if (tokens * top_k == 0) return;
    for (int64_t bad : {count, int64_t{-1}}) {
        ids.data[tokens * top_k - 1] = bad;
        need(run(0) == 1, "an expert that there is not was read");
    }
    ids.data[tokens * top_k - 1] = 0;
    down.back().scale = nullptr;
    if (kind == Kind::INT8 || kind == Kind::INT4) need(run(0) == 2, "scales that there are not were read");
}

// Rows of logits, with and without a bias, groups, and a NaN.
void routing(int64_t rows, int64_t count) {
    Exactly<float> logits(rows * count), bias(count);
    for (bool spoiled : {false, true}) {
        if (spoiled && rows) logits.data[rows * count - 1] = __builtin_nanf("");
        for (int64_t top_k : {int64_t{1}, count / 2}) {
            Exactly<float> weights(rows * top_k);
            Exactly<int64_t> ids(rows * top_k);
            llm_select_experts(logits.data, nullptr, weights.data, ids.data, rows, count, top_k, 0, 1, 1, 1, 1.0f, 3);
            llm_select_experts(logits.data, bias.data, weights.data, ids.data, rows, count, top_k, 1, 0, 2, 1, 2.5f, 3);
            calls += 2;
        }
        Exactly<float> weights(rows * 2);
        Exactly<int64_t> ids(rows * 2);
        llm_mix_two_experts(logits.data, weights.data, ids.data, rows, count, 0.02f, 3);
        ++calls;
        for (int64_t i = 0; i < rows * 2; ++i) need(ids.data[i] >= 0 && ids.data[i] < count, "a chosen expert is none");
    }
}

// A term of all output channels, one of some in the middle, and one of a slot that no token has.
void lora(Kind kind, int64_t tokens, int64_t inputs, int64_t width, int64_t rank) {
    const int64_t some = (width + 1) / 2, first = width / 4;
    const Held wide(kind, Activations::FLOAT, width, rank), part(kind, Activations::FLOAT, some, rank);
    const Held down(kind, Activations::FLOAT, rank, inputs), table(kind, Activations::FLOAT, inputs, rank);
    const std::vector<Weight> up = {wide.weight, part.weight, part.weight};
    const std::vector<Weight> products(3, down.weight), rows(3, table.weight);
    const std::vector<int64_t> places = {1, 0, 3, first, 4, 0};
    const std::vector<float> scales = {0.5f, 2.0f, 1.0f};
    Exactly<float> x(tokens * inputs), y(tokens * width);
    Exactly<int64_t> slots(tokens), ids(tokens);
    for (int64_t i = 0; i < tokens; ++i) slots.data[i] = i * 3 % 5 % 4 - (i == 1), ids.data[i] = i % inputs;
    const auto run = [&](const std::vector<Weight>& from, const float* hidden) {
        ++calls;
        return llm_lora(from.data(), up.data(), 3, places.data(), scales.data(), slots.data, tokens, hidden, ids.data,
                        y.data, width, 3);
    };
    need(run(products, x.data) == 0 && run(rows, nullptr) == 0, "a good call was refused");
    if (tokens == 0) return;
    for (int64_t bad : {inputs, int64_t{-1}}) {
        ids.data[tokens - 1] = bad;
        need(run(rows, nullptr) == 1, "a row that there is not was read");
    }
}

}  // namespace mixture

// Returns the number of calls.
int run_experts() {
    using namespace mixture;
    for (const auto& [hidden, inner] : {Size{1, 1}, Size{17, 9}, Size{33, 200}, Size{136, 40}})
        for (int64_t tokens : {0, 1, 2, 19}) {
            const auto every_kind = [&](int64_t top_k, int64_t count) {
                for (Kind kind : {Kind::FLOAT32, Kind::BFLOAT16, Kind::FLOAT16, Kind::INT8, Kind::INT4})
                    experts(kind, Activations::FLOAT, tokens, top_k, count, hidden, inner);
                for (Kind kind : {Kind::INT8, Kind::INT4})
                    experts(kind, Activations::INT8, tokens, top_k, count, hidden, inner);
            };
            every_kind(1, 1);
            every_kind(2, 3);
        }
    for (int64_t tokens : {0, 1, 2, 19, 40})
        for (Kind kind : {Kind::FLOAT32, Kind::BFLOAT16, Kind::FLOAT16}) {
            lora(kind, tokens, 1, 1, 1);
            lora(kind, tokens, 33, 300, 5);
        }
    for (int64_t rows : {0, 1, 19})
        for (int64_t count : {2, 6, 16, 34}) routing(rows, count);
    return calls;
}
