// Calls attention and the elementwise kernels with buffers of exactly the size that is promised; see
// kernels_driver.cpp.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "declarations.h"

namespace step {

int calls = 0;

// Heap memory of exactly `count` elements: the bytes behind it are poisoned.
template <class T> struct Exactly {
    T* data;
    explicit Exactly(int64_t n, T value = T{}) : data(static_cast<T*>(std::malloc(n * sizeof(T) + (n == 0)))) {
        for (int64_t i = 0; i < n; ++i) data[i] = value;
    }
    ~Exactly() { std::free(data); }
};

void need(bool holds, const char* what) {
    if (holds) return;
    std::printf("%s\n", what);
    std::exit(1);
}

// One row: `cached` tokens of an earlier step, `fresh` of this one.
template <class T>
void attention(Kind kind, int64_t heads, int64_t kv_heads, int64_t size, int64_t block, int64_t window, int64_t cached,
               int64_t fresh) {
    const int64_t length = cached + fresh, blocks = (length + block - 1) / block, slots = (blocks + 1) * block;
    const bool is_quantized = kind == Kind::INT8 || kind == Kind::FLOAT8;
    const int64_t record = is_quantized ? 32 + (size + 3) / 4 * 4 * 16 : size * 16;
    const int64_t panels = (slots + 15) / 16 + 1, elements = panels * kv_heads * record;
    Exactly<T> keys(elements), values(elements);
    Exactly<float> k(length * kv_heads * size, 0.5f), v(length * kv_heads * size, 0.25f), q(fresh * heads * size, 0.1f);
    Exactly<float> out(fresh * heads * size), sinks(heads, 0.5f), slopes(heads, 0.5f);
    Exactly<int64_t> mapping(length);
    Exactly<int32_t> table(blocks), starts(2), lengths(1);
    for (int64_t i = 0; i < blocks; ++i) table.data[i] = static_cast<int32_t>(blocks - i);  // 1 ... blocks, backwards
    for (int64_t i = 0; i < length; ++i) mapping.data[i] = table.data[i / block] * block + i % block;
    starts.data[0] = 0, starts.data[1] = static_cast<int32_t>(fresh), lengths.data[0] = static_cast<int32_t>(length);
    const int64_t stride = kv_heads * size;
    need(llm_write_kv_cache(k.data, stride, v.data, stride, kind, keys.data, values.data, mapping.data, slots, length,
                            kv_heads, size, nullptr, 1) == -1,
         "a good slot was refused");
    const auto attend = [&](float cap, const float* sink, const float* slope = nullptr) {
        return llm_paged_attention(table.data, starts.data, lengths.data, 1, blocks, block, slots, q.data, heads * size,
                                   fresh, kind, keys.data, values.data, out.data, heads, kv_heads, size, window, 0,
                                   cap != 0.0f ? 2 : 0, 0.3f, cap, sink, slope, nullptr, 1);
    };
    need(attend(0.0f, nullptr) == -1 && std::fabs(out.data[0] - 0.25f) < 2e-3f, "attention is wrong");
    need(attend(3.0f, sinks.data) == -1, "a good step was refused");
    need(attend(0.0f, nullptr, slopes.data) == -1, "a step with slopes was refused");
    table.data[blocks - 1] = static_cast<int32_t>(blocks + 1);
    need(attend(0.0f, nullptr) == 0, "a block outside of the cache was read");
    mapping.data[length - 1] = slots;
    need(llm_write_kv_cache(k.data, stride, v.data, stride, kind, keys.data, values.data, mapping.data, slots, length,
                            kv_heads, size, nullptr, 1) == length - 1,
         "a slot outside of the cache was written");
    calls += 6;
}

// As `attention`, of latents with `rope` channels behind them, and the GEMMs around it.
template <class T>
void latent_attention(Kind kind, int64_t heads, int64_t latent, int64_t rope, int64_t block, int64_t cached,
                      int64_t fresh) {
    const int64_t length = cached + fresh, blocks = (length + block - 1) / block, slots = (blocks + 1) * block;
    constexpr bool is_code = sizeof(T) == 1;  // with two scales behind a row
    Exactly<T> cache(slots * (latent + rope + (is_code ? 4 : 0))), weight(heads * rope * latent);
    Exactly<float> c(length * latent, 0.25f), k(length * rope, 0.5f), q(fresh * heads * latent, 0.1f);
    Exactly<float> r(fresh * heads * rope, 0.1f), out(fresh * heads * latent);
    Exactly<int64_t> mapping(length);
    Exactly<int32_t> table(blocks), starts(2), lengths(1);
    for (int64_t i = 0; i < blocks; ++i) table.data[i] = static_cast<int32_t>(blocks - i);
    for (int64_t i = 0; i < length; ++i) mapping.data[i] = table.data[i / block] * block + i % block;
    starts.data[0] = 0, starts.data[1] = static_cast<int32_t>(fresh), lengths.data[0] = static_cast<int32_t>(length);
    const auto write = [&] {
        return llm_write_latent_cache(c.data, latent, k.data, rope, kind, cache.data, mapping.data, slots, length,
                                      latent, rope, 1);
    };
    const auto attend = [&] {
        return llm_latent_attention(table.data, starts.data, lengths.data, 1, blocks, block, slots, q.data, r.data,
                                    fresh, kind, cache.data, out.data, heads, latent, rope, 0.3f, 1);
    };
    need(write() == -1, "a good slot was refused");
    need(attend() == -1 && std::fabs(out.data[0] - 0.25f) < (is_code ? 4e-3f : 1e-3f), "latent attention is wrong");
    if (!is_code)
        llm_heads_linear(kind, weight.data, r.data, heads * rope, rope, out.data, fresh, heads, latent, rope, 1);
    table.data[blocks - 1] = static_cast<int32_t>(blocks + 1);
    need(attend() == 0, "a block outside of the cache was read");
    mapping.data[length - 1] = slots;
    need(write() == length - 1, "a slot outside of the cache was written");
    calls += 5;
}

template <class T> void rows(Kind kind, int64_t count, int64_t width) {
    Exactly<float> x(count * width, 0.5f), y(count * width, 0.25f), out(count * width), total(count * width);
    Exactly<T> weight(width), bias(width);
    llm_rms_norm(x.data, nullptr, kind, weight.data, 0.0f, 1e-5f, width, out.data, nullptr, count, width, 1);
    llm_rms_norm(x.data, y.data, kind, weight.data, 1.0f, 1e-5f, (width + 1) / 2, out.data, total.data, count, width,
                 1);
    llm_layer_norm(x.data, y.data, kind, weight.data, bias.data, 1e-5f, out.data, total.data, count, width, 1);
    for (int64_t function = 0; function < 6; ++function) {
        llm_activation(function, x.data, nullptr, width, out.data, count, width, 1);
        llm_activation(function, x.data, x.data + width / 2, width, out.data, count, width / 2, 1);
    }
    llm_soft_cap(out.data, 3.0f, count * width, 1);
    llm_log_softmax(x.data, out.data, count, width, 1);
    llm_add(x.data, y.data, out.data, count * width, 1);
    llm_scale(x.data, 3.0f, out.data, count * width, 1);
    llm_multiply(x.data, width, x.data, width, out.data, count, width, 1);
    llm_scale_rows(x.data, width, y.data, width, out.data, count, width);
    llm_offset(x.data, 3.0f, out.data, count * width);
    llm_clamp(x.data, -0.1f, 0.1f, out.data, count * width);
    llm_copy_rows(x.data, width, out.data, count, width / 2);
    llm_place_rows(x.data, out.data, width, count, width / 2);
    llm_gated_rms_norm(x.data, width, y.data, width, kind, weight.data, 1e-5f, 1, 0, 0, out.data, count, width, 1);
    llm_gated_rms_norm(x.data, width, y.data, width, kind, weight.data, 1e-5f, width, 1, 1, out.data, count, width, 1);
    llm_gated_rms_norm(x.data, width, y.data, width, kind, nullptr, 0.0f, 1, 0, 0, out.data, count, width, 1);
    Exactly<int64_t> chosen(count, count - 1);
    need(llm_select_rows(x.data, count, chosen.data, out.data, count, width) == 0, "a good row was refused");
    llm_ids_below(chosen.data, count, chosen.data, count);
    chosen.data[0] = count;
    need(llm_select_rows(x.data, count, chosen.data, out.data, count, width) == 1, "a row outside was taken");
    const int64_t head = width * 2;
    Exactly<float> heads(count * 3 * head, 0.5f), key(count * head, 0.5f), to(count * 3 * head), key_to(count * head);
    Exactly<float> angles(4 * 2 * (width - width / 3));
    Exactly<int64_t> positions(count, 3);
    const int64_t pairs = width - width / 3;
    for (int64_t halves : {0, 1})
        need(llm_rotary(positions.data, count, angles.data, 4, pairs, halves, heads.data, 3 * head, to.data, 3,
                        key.data, head, key_to.data, 1, head, 1) == -1,
             "a good position was refused");
    positions.data[count - 1] = 4;
    need(llm_rotary(positions.data, count, angles.data, 4, pairs, 1, heads.data, 3 * head, to.data, 3, key.data, head,
                    key_to.data, 1, head, 1) == count - 1,
         "a position outside of the table was read");
    calls += 27;
}

// Two rows of 3 and 2 tokens, the second of which goes on; `stored`: some of them are drafts.
struct TwoRows {
    Exactly<int64_t> slots{2};
    Exactly<int32_t> starts{3}, lengths{2}, counts{2}, stored{2, 1};
    TwoRows() {
        slots.data[0] = 1, slots.data[1] = 0, starts.data[0] = 0, starts.data[1] = 3, starts.data[2] = 5;
        lengths.data[0] = 3, lengths.data[1] = 9, counts.data[0] = 3, counts.data[1] = 2;
    }
    const int32_t* counts_if(bool has_drafts) const { return has_drafts ? counts.data : nullptr; }
    const int32_t* stored_if(bool has_drafts) const { return has_drafts ? stored.data : nullptr; }
};

// Slots of strides that leave nothing over.
template <class T> void convolution(Kind kind, int64_t channels, int64_t taps, bool columns) {
    Exactly<T> weight(channels * taps), bias(channels);
    Exactly<float> x(5 * channels, 0.5f), out(5 * channels), state(2 * channels * (taps - 1), 0.25f);
    const TwoRows of;
    const auto convolve = [&](const void* with, bool drafts = false) {
        return llm_causal_conv1d(of.slots.data, of.starts.data, of.lengths.data, of.counts_if(drafts),
                                 of.stored_if(drafts), 2, 2, x.data, channels, 5, kind, weight.data, columns ? 1 : taps,
                                 columns ? channels : 1, with, state.data, channels * (taps - 1),
                                 columns ? 1 : taps - 1, columns ? channels : 1, channels, taps, 1, out.data, 1);
    };
    need(convolve(bias.data) == -1 && convolve(nullptr, true) == -1, "a good row was refused");
    of.slots.data[1] = 2;
    need(convolve(nullptr) == 1, "a slot that does not exist was read");
    of.slots.data[1] = 0, of.starts.data[2] = 6;
    need(convolve(nullptr) == 1, "tokens that do not exist were read");
    of.counts.data[1] = 3;
    need(convolve(nullptr, true) == 1, "tokens that do not exist were counted");
    of.counts.data[1] = 2, of.stored.data[1] = 3;
    need(convolve(nullptr, true) == 1, "a state was stored after tokens that do not exist");
    calls += 6;
}

void delta_rule(int64_t key_heads, int64_t heads, int64_t keys, int64_t values, bool per_channel) {
    const int64_t decays = per_channel ? heads * keys : heads;
    Exactly<float> query(5 * key_heads * keys, 0.5f), key(5 * key_heads * keys, 0.25f), value(5 * heads * values, 1.0f);
    Exactly<float> decay(5 * decays), beta(5 * heads), a(heads, -1.0f), dt_bias(decays), out(5 * heads * values);
    Exactly<float> state(2 * heads * keys * values, 0.5f);
    const TwoRows of;
    const auto apply = [&](bool drafts) {
        return llm_gated_delta_rule(of.slots.data, of.starts.data, of.lengths.data, of.counts_if(drafts),
                                    of.stored_if(drafts), 2, 2, 5, query.data, key_heads * keys, key.data,
                                    key_heads * keys, value.data, heads * values, decay.data, decays, per_channel,
                                    beta.data, heads, 1.0f, a.data, dt_bias.data, state.data, key_heads, heads, keys,
                                    values, out.data, 1);
    };
    need(apply(false) == -1 && apply(true) == -1, "a good row was refused");
    of.slots.data[0] = -1;
    need(apply(false) == 0, "a slot that does not exist was read");
    calls += 3;
}

void scans(int64_t channels, int64_t states, int64_t heads) {
    const int64_t width = heads * channels;
    Exactly<float> x(5 * width, 0.5f), dt(5 * width, 0.25f), b(5 * states), c(5 * states), a(width * states, -1.0f);
    Exactly<float> d(width), bias(width), out(5 * width), state(2 * width * states, 0.5f);
    const TwoRows of;
    const auto mamba = [&](const float* gate, bool drafts = false) {
        return llm_selective_scan(of.slots.data, of.starts.data, of.lengths.data, of.counts_if(drafts),
                                  of.stored_if(drafts), 2, 2, 5, x.data, width, dt.data, width, b.data, states, c.data,
                                  states, gate, width, a.data, d.data, bias.data, state.data, width, states, out.data,
                                  1);
    };
    const auto mamba2 = [&](int64_t by_channel, bool drafts = false) {
        return llm_mamba2_scan(of.slots.data, of.starts.data, of.lengths.data, of.counts_if(drafts),
                               of.stored_if(drafts), 2, 2, 5, x.data, width, dt.data, heads, b.data, states, c.data,
                               states, a.data, d.data, by_channel, bias.data, 0.0f, 1.0f, state.data, heads, 1, states,
                               channels, out.data, 1);
    };
    need(mamba(x.data) == -1 && mamba(nullptr) == -1 && mamba2(0) == -1 && mamba2(1) == -1, "a good row was refused");
    need(mamba(x.data, true) == -1 && mamba2(0, true) == -1, "a row with drafts was refused");
    of.slots.data[1] = 2;
    need(mamba(nullptr) == 1 && mamba2(0) == 1, "a slot that does not exist was read");
    calls += 8;
}

// A row is cut into chunks by the number of threads; the kernels' own threads share the chunks.
void over_the_vocabulary(int64_t count, int64_t width, int64_t threads) {
    const int64_t k = width < 5 ? width : 5, blocks = (width + 15) / 16;
    Exactly<float> x(count * width), best(count), top(count * k), picked(count * 9), sums(count * blocks);
    Exactly<int64_t> ids(count), top_ids(count * k), asked(count * 9), ranks(count * 9);
    for (int64_t i = 0; i < count * 9; ++i) asked.data[i] = i % 2 ? width - 1 : 0;
    llm_argmax(x.data, best.data, ids.data, count, width, threads);
    llm_top_k(x.data, k, top.data, top_ids.data, count, width, threads);
    for (int64_t i = 0; i < count; ++i) need(ids.data[i] == top_ids.data[i * k], "argmax is not the first of top_k");
    need(llm_gather_logprobs(x.data, asked.data, 9, 9, 1, picked.data, ranks.data, count, width, threads),
         "ids are good");
    llm_block_sums(x.data, best.data, 16, sums.data, count, width, threads);
    llm_cut_below_largest(x.data, best.data, count, width, threads);
    llm_divide_rows(x.data, best.data, count, width, threads);
    asked.data[count * 9 - 1] = width;
    need(!llm_gather_logprobs(x.data, asked.data, 9, 1, 0, picked.data, ranks.data, count, width, threads),
         "an id outside of the vocabulary was read");
    calls += 7;
}

}  // namespace step

// Returns the number of calls.
int run_step_kernels() {
    using namespace step;
    for (int64_t size : {10, 64})
        for (int64_t block : {3, 16, 48})
            for (int64_t window : {0, 5})
                for (int64_t fresh : {1, 9, 70}) {
                    if (size == 64 && fresh == 70) continue;  // nine tokens are more than a task's rows, too
                    attention<float>(Kind::FLOAT32, 6, 2, size, block, window, 75, fresh);
                    attention<uint16_t>(Kind::BFLOAT16, 7, 1, size, block, window, 3, fresh);
                    attention<uint16_t>(Kind::FLOAT16, 4, 4, size, block, window, 0, fresh);
                    attention<uint8_t>(Kind::INT8, 7, 1, size, block, window, 75, fresh);
                    attention<uint8_t>(Kind::FLOAT8, 4, 2, size, block, window, 3, fresh);
                }
    for (int64_t latent : {10, 32})
        for (int64_t block : {3, 16})
            for (int64_t fresh : {1, 9}) {
                latent_attention<float>(Kind::FLOAT32, 5, latent, 6, block, 75, fresh);
                latent_attention<uint16_t>(Kind::BFLOAT16, 50, latent, 2, block, 3, fresh);
                latent_attention<uint16_t>(Kind::FLOAT16, 1, latent, 1, block, 0, fresh);
                latent_attention<uint8_t>(Kind::INT8, 3, latent, 6, block, 40, fresh);
                latent_attention<uint8_t>(Kind::FLOAT8, 3, latent, 1, block, 5, fresh);
            }
    for (int64_t channels : {1, 17, 256, 300})
        for (int64_t taps : {1, 3, 4}) {
            convolution<float>(Kind::FLOAT32, channels, taps, false);
            convolution<uint16_t>(Kind::BFLOAT16, channels, taps, true);
        }
    for (int64_t keys : {1, 16, 21})
        for (int64_t values : {1, 32, 33}) {
            delta_rule(1, 2, keys, values, false);
            delta_rule(3, 3, keys, values, true);
        }
    for (int64_t channels : {1, 15, 33, 64})
        for (int64_t states : {1, 5}) scans(channels, states, 3);
    for (int64_t count : {1, 3})
        for (int64_t width : {1, 2, 15, 16, 17, 63, 64, 65, 100}) {
            rows<float>(Kind::FLOAT32, count, width);
            rows<uint16_t>(Kind::BFLOAT16, count, width);
            rows<uint16_t>(Kind::FLOAT16, count, width);
            over_the_vocabulary(count, width, 1);
        }
    over_the_vocabulary(1, 70001, 3);
    return calls;
}
