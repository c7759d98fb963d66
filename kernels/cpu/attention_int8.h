// Attention over a KV cache in int8, multiplied as integers. attention.cpp has the tasks, quantized_cache.h the layout.
//
// A query (times the scale of scores) is rounded to 15 bits by its largest magnitude: q = round(x / s), |q| <= 16256.
// A score is q . k, an exact integer, times s and the key's scale. The probabilities of a block of 64 positions, times
// the scales of the values, are rounded in the same way; their sums with the values' codes are exact integers too, and
// are added to the output block by block. So the order inside a block does not enter, and a position that a query does
// not see has the weight 0. Rounding to 15 bits errs by at most 1 / 32512 of a query's or a block's largest element:
// int8 codes, by 1 / 254 of their token's.
#pragma once

#include "attention_tiles.h"
#include "bytes.h"
#include "quantized_cache.h"

namespace llm {
namespace {

// Products of int8 codes and factors of 15 bits, exact in int32: what attention over a KV cache in int8 is made of.

// 127 * 128, so that NEON multiplies the high and the low seven bits, which are int8.
constexpr int64_t LARGEST_FACTOR = 16256;
// Four factors, in the order in which they are multiplied.
constexpr int64_t FOUR_BYTES = 8;
#if LLM_PLAIN || LLM_NEON
constexpr int INT8_ROWS = 2;
#elif LLM_AVX512 && LLM_VNNI
constexpr int INT8_ROWS = 8;
#else
constexpr int INT8_ROWS = 4;
#endif

// `Codes` are four codes of each of 16 lanes, 64 bytes. add() adds their products with the four factors at `four`, the
// same for all lanes, to the lanes of a sum.
#if LLM_AVX512

// Two chains: with VNNI a product has the latency of five.
struct Sum { I32 even, odd; };
LLM_INLINE Sum no_sum() { return {set1_i(0), set1_i(0)}; }
LLM_INLINE I32 total_of(Sum sum) { return sum.even + sum.odd; }
// sum += two products to an int32, of the int16 of `codes` and the two at `pair`. Assembly: gcc 12 copies each sum
// before its product.
LLM_INLINE void add_pair(I32& sum, __m512i codes, const int32_t* pair) {
#if LLM_VNNI
    __m512i out = sum.v;
    asm volatile("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(out) : "v"(codes), "m"(*pair));
    sum.v = out;
#else
    sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(codes, _mm512_set1_epi32(*pair)));
#endif
}
struct Codes {
    __m512i even, odd;
    LLM_INLINE explicit Codes(const uint8_t* p) {
        const __m512i raw = _mm512_loadu_si512(p);
        even = _mm512_srai_epi16(_mm512_slli_epi16(raw, 8), 8), odd = _mm512_srai_epi16(raw, 8);
    }
    LLM_INLINE void add(Sum& sum, const int32_t* four) const {
        add_pair(sum.even, even, four);
        add_pair(sum.odd, odd, four + 1);
    }
};

#elif LLM_AVX2

using Sum = I32;
LLM_INLINE Sum no_sum() { return set1_i(0); }
LLM_INLINE I32 total_of(Sum sum) { return sum; }
struct Codes {
    __m256i even_lo, even_hi, odd_lo, odd_hi;
    LLM_INLINE explicit Codes(const uint8_t* p) {
        const __m256i lo = load_256(p), hi = load_256(p + 32);
        even_lo = _mm256_srai_epi16(_mm256_slli_epi16(lo, 8), 8), odd_lo = _mm256_srai_epi16(lo, 8);
        even_hi = _mm256_srai_epi16(_mm256_slli_epi16(hi, 8), 8), odd_hi = _mm256_srai_epi16(hi, 8);
    }
    LLM_INLINE void add(Sum& sum, const int32_t* four) const {
        const __m256i first = _mm256_set1_epi32(four[0]), second = _mm256_set1_epi32(four[1]);
        sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(even_lo, first));
        sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(even_hi, first));
        sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(odd_lo, second));
        sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(odd_hi, second));
    }
};

#elif LLM_NEON

struct Sum { I32 high, low; };
LLM_INLINE Sum no_sum() { return {set1_i(0), set1_i(0)}; }
LLM_INLINE I32 total_of(Sum sum) { return shift_left<7>(sum.high) + sum.low; }
struct Codes {
    int8x16_t codes[4];
    LLM_INLINE explicit Codes(const uint8_t* p) {
        LLM_UNROLL for (int i = 0; i < 4; ++i) codes[i] = vld1q_s8(reinterpret_cast<const int8_t*>(p) + 16 * i);
    }
    LLM_INLINE void add(Sum& sum, const int32_t* four) const {
        const int8x16_t high = vreinterpretq_s8_s32(vdupq_n_s32(four[0]));
        const int8x16_t low = vreinterpretq_s8_s32(vdupq_n_s32(four[1]));
        LLM_UNROLL for (int i = 0; i < 4; ++i) {
            sum.high.v[i] = vdotq_s32(sum.high.v[i], codes[i], high);
            sum.low.v[i] = vdotq_s32(sum.low.v[i], codes[i], low);
        }
    }
};

#else

using Sum = I32;
LLM_INLINE Sum no_sum() { return set1_i(0); }
LLM_INLINE I32 total_of(Sum sum) { return sum; }
struct Codes {
    const int8_t* codes;
    explicit Codes(const uint8_t* p) : codes(reinterpret_cast<const int8_t*>(p)) {}
    void add(Sum& sum, const int32_t* four) const {
        int16_t factors[4];
        std::memcpy(factors, four, FOUR_BYTES);
        for (int i = 0; i < LANES; ++i)
            for (int j = 0; j < 4; ++j) sum.v[i] += factors[j] * codes[4 * i + j];
    }
};

#endif

// 16 factors in the order in which `Codes` multiplies them, fours side by side.
LLM_INLINE void encode(I32 x, int32_t* to) {
#if LLM_PLAIN || LLM_NEON
    alignas(64) int16_t factors[LANES];
    store_int16(factors, x);
#if LLM_PLAIN
    std::memcpy(to, factors, sizeof factors);
#else
    int8_t bytes[2 * LANES];
    for (int i = 0; i < LANES; ++i) {
        const int high = (factors[i] + 64) >> 7, at = i / 4 * FOUR_BYTES + i % 4;
        bytes[at] = static_cast<int8_t>(high), bytes[at + 4] = static_cast<int8_t>(factors[i] - high * 128);
    }
    std::memcpy(to, bytes, sizeof bytes);
#endif
#else
#if LLM_AVX512
    const __m256i factors = _mm512_cvtepi32_epi16(x.v);
#else
    const __m256i factors = low_halves(x);
#endif
    const __m256i even_first = _mm256_set1_epi64x(0x0706030205040100);
    const __m256i lanes = _mm256_set_epi64x(0x0808080808080808, 0, 0x0808080808080808, 0);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_shuffle_epi8(factors, _mm256_add_epi8(even_first, lanes)));
#endif
}

// x [count], a multiple of 16, rounded to factors of at most `largest` -> fours; returns what a factor stands for. It
// is NaN if an element of x is, and 0 where its reciprocal would be infinite.
LLM_INLINE float to_factors(const float* x, int64_t count, int64_t most, int32_t* fours) {
    const float unit = largest_magnitude(x, count) / static_cast<float>(most);
    const bool vanishes = unit < 0x1p-126f;
    const F32 reciprocal = set1(vanishes ? 0.0f : 1.0f / unit);
    for (int64_t i = 0; i < count; i += LANES) encode(to_int(load(x + i) * reciprocal), fours + i / 2);
    return vanishes ? 0.0f : unit;
}

template <int ROWS>
LLM_INLINE void add_products(Sum (&sums)[ROWS], const uint8_t* codes, int64_t stride, const int32_t* fours,
                             int64_t row_stride, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step) {
        const Codes four_codes(codes + step * stride);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) four_codes.add(sums[r], fours + r * row_stride + 2 * step);
    }
}

// The records of one block of positions.
struct Records { const uint8_t *keys[PANELS], *values[PANELS]; };

LLM_INLINE F32 scales_of(const uint8_t* record) { return load(reinterpret_cast<const BF16*>(record)); }

class Int8Attention {
  public:
    const Step& step;
    const Layer& layer;
    const uint8_t *key_cache, *value_cache;
    const float* query;
    int64_t query_stride;
    float* out;

    int64_t scratch_bytes(int64_t rows) const {
        const int64_t floats = query_size() + rows * (width() + LANES + 2 + 2) + INT8_ROWS * KEYS;
        const int64_t fours = rows * query_size() / 2 + INT8_ROWS * KEYS / 2;
        return floats * 4 + fours * 4 + rows * sizeof(Span) + staged_bytes() + 64 * 11;
    }

    // `following`: what this thread probably does next, or null.
    void run(const Task& task, const Task* following, char* scratch) const {
        const int64_t rows = task.rows();
        Int8Work work = divide(scratch, rows);
        start(task, work, rows);
        const Span all = find_spans(work.common, rows);
        for (int64_t index = all.first / KEYS; index * KEYS < all.end; ++index) {
            const bool last = (index + 1) * KEYS >= all.end, fetch = !is_staged() && (!last || following);
            const Records records = open(task, work, all, index);
            const Records next = !fetch ? records
                                 : last ? first_of(*following, work)
                                        : open(task, work, all, index + 1);
            for (int64_t row = 0; row < rows; row += INT8_ROWS)
                advance_rows(min(rows - row, INT8_ROWS), work, row, index * KEYS, records,
                             fetch && row == 0 ? &next : nullptr);
        }
        finish(task, work.common);
    }

  private:
    struct Int8Work {
        Work common;               // without a query: `fours`
        float* units;              // what a factor of each query row stands for
        float* shifts;             // of its scores
        float* row;                // one query row
        int32_t *fours, *weights;  // of all query rows, of one tile
        uint8_t* staged;
    };

    int64_t size() const { return layer.head_size; }
    int64_t width() const { return ceil_div(size(), LANES) * LANES; }
    int64_t query_size() const { return width(); }
    bool is_staged() const { return step.block_size % LANES != 0; }
    // Loads of the last channels run over the end.
    int64_t staged_bytes() const { return is_staged() ? 2 * PANELS * record_bytes(size()) + LANES * 4 : 0; }
    // Sums of products stay within int32.
    int64_t largest_factor() const { return min(LARGEST_FACTOR, INT32_MAX / (128 * max(1, size()))); }

    Int8Work divide(char* scratch, int64_t rows) const {
        char* at = scratch;
        const auto take = [&](int64_t bytes) {
            char* taken = at;
            at += ceil_div(bytes, 64) * 64;
            return taken;
        };
        const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
        const auto fours = [&](int64_t count) { return reinterpret_cast<int32_t*>(take(count * 2)); };
        Int8Work work{};
        work.common.out_stride = width();
        work.common.scores = floats(INT8_ROWS * KEYS);
        work.common.out = floats(rows * width());
        work.common.sums = floats(rows * LANES);
        work.common.maxima = floats(rows);
        work.common.slopes = layer.slopes ? floats(rows) : nullptr;
        work.common.spans = reinterpret_cast<Span*>(take(rows * sizeof(Span)));
        work.units = floats(rows), work.shifts = floats(rows), work.row = floats(query_size());
        work.fours = fours(rows * query_size()), work.weights = fours(INT8_ROWS * KEYS);
        work.staged = reinterpret_cast<uint8_t*>(take(staged_bytes()));
        return work;
    }

    void start(const Task& task, const Int8Work& work, int64_t rows) const {
        const float factor = layer.factor();
        const float *scales = layer.channel(KEY_SCALE, task.kv_head),
                    *offsets = layer.channel(KEY_OFFSET, task.kv_head);
        for (int64_t i = size(); i < query_size(); ++i) work.row[i] = 0.0f;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t head = task.head_of(row, layer.group()), token = task.token_of(row);
            const float* source = query + token * query_stride + head * size();
            float shift = 0.0f;
            for (int64_t i = 0; i < size(); ++i) {
                work.row[i] = source[i] * factor;
                if (scales) work.row[i] *= scales[i], shift -= work.row[i] * offsets[i];
            }
            work.shifts[row] = shift;
            work.units[row] = to_factors(work.row, query_size(), largest_factor(), work.fours + row * query_size() / 2);
            start_row(work.common, row, layer, head, step.position(task.row, token), step.lengths[task.row]);
        }
    }

    void finish(const Task& task, const Work& work) const {
        const float* scales = layer.channel(VALUE_SCALE, task.kv_head);
        const float* offsets = layer.channel(VALUE_OFFSET, task.kv_head);
        for (int64_t row = 0; row < task.rows(); ++row) {
            const int64_t head = task.head_of(row, layer.group());
            const float* from = work.out + row * work.out_stride;
            float* to = out + (task.token_of(row) * layer.heads + head) * size();
            const float total = sum(load(work.sums + row * LANES));
            // A sink's value is 0, not the value of the code 0.
            const F32 seen = set1(total) - (layer.sinks ? sink_weight(work, row, head) : zero());
            for (int64_t i = 0; i < size(); i += LANES) {
                F32 mean = load(from + i);
                if (scales) {
                    mean = mean - load_part(offsets + i, size() - i) * seen;
                    mean = mean * load_part(scales + i, size() - i);
                }
                // + 0: zeros become positive, however they arose.
                store_part(to + i, mean / set1(total) + zero(), size() - i);
            }
        }
    }

    F32 sink_weight(const Work& work, int64_t row, int64_t head) const {
        return exp2_of_negative(set1(layer.sinks[head] * 0x1.715476p+0f - work.maxima[row]));
    }

    const uint8_t* record(const uint8_t* cache, int64_t slot, int64_t kv_head) const {
        return cache + (slot / LANES * layer.kv_heads + kv_head) * record_bytes(size());
    }

    Records first_of(const Task& task, const Int8Work& work) const {
        const Span seen = seen_by(step, layer, task);
        return open(task, work, seen, seen.first / KEYS);
    }

    // The records of block `index`. Where no query row sees a panel it is panel 0: read, but not used.
    Records open(const Task& task, const Int8Work& work, Span all, int64_t index) const {
        Records records;
        for (int panel = 0; panel < PANELS; ++panel) {
            const int64_t first = index * KEYS + panel * LANES;
            const Span seen = intersect(all, {first, first + LANES});
            if (is_staged()) {
                uint8_t* keys = work.staged + 2 * panel * record_bytes(size());
                uint8_t* values = keys + record_bytes(size());
                records.keys[panel] = keys, records.values[panel] = values;
                for (int64_t position = seen.first; position < seen.end; ++position)
                    stage(task, position, position - first, keys, values);
            } else {
                const int64_t slot = seen.empty() ? 0 : step.slot(task.row, first);
                records.keys[panel] = record(key_cache, slot, task.kv_head);
                records.values[panel] = record(value_cache, slot, task.kv_head);
            }
        }
        return records;
    }

    // Copies one position into lane `lane` of two records.
    void stage(const Task& task, int64_t position, int64_t lane, uint8_t* keys, uint8_t* values) const {
        const int64_t slot = step.slot(task.row, position), from = slot % LANES;
        const uint8_t *from_keys = record(key_cache, slot, task.kv_head),
                      *from_values = record(value_cache, slot, task.kv_head);
        std::memcpy(keys + 2 * lane, from_keys + 2 * from, 2);
        std::memcpy(values + 2 * lane, from_values + 2 * from, 2);
        for (int64_t i = 0; i < padded_size(size()); i += 4)
            std::memcpy(keys + SCALE_BYTES + int8_key_at(lane, i), from_keys + SCALE_BYTES + int8_key_at(from, i), 4);
        for (int64_t i = 0; i < size(); ++i)
            values[SCALE_BYTES + int8_value_at(lane, i, size())] =
                from_values[SCALE_BYTES + int8_value_at(from, i, size())];
    }

    template <int ROWS = INT8_ROWS, class... Rest> void advance_rows(int64_t rows, const Rest&... rest) const {
        if (rows == ROWS) return advance<ROWS>(rest...);
        if constexpr (ROWS > 1) advance_rows<ROWS - 1>(rows, rest...);
    }

    // Advances ROWS query rows from `row` on over the block of positions that begins at `start`.
    template <int ROWS>
    void advance(const Int8Work& work, int64_t row, int64_t start, const Records& records, const Records* next) const {
        Span any{KEYS, 0};
        for (int r = 0; r < ROWS; ++r) {
            const Span seen = seen_in_block(work.common, row + r, start);
            if (!seen.empty()) any = {min(any.first, seen.first), max(any.end, seen.end)};
        }
        if (any.empty()) return;
        const int64_t first = any.first / LANES, end = ceil_div(any.end, LANES);
        float units[ROWS];
        for (int64_t panel = 0; panel < PANELS; ++panel) {
            if (next) fetch(next->keys[panel]);
            if (first <= panel && panel < end) score<ROWS>(work, row, panel, records.keys[panel]);
        }
        for (int r = 0; r < ROWS; ++r) units[r] = weigh(work, row + r, r, start, records);
        for (int64_t channel = 0; channel < size(); channel += LANES) {
            Sum sums[ROWS];
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) sums[r] = no_sum();
            for (int64_t panel = first; panel < end; ++panel)
                add_products<ROWS>(sums, records.values[panel] + SCALE_BYTES + 4 * channel, 4 * padded_size(size()),
                                   work.weights + panel * LANES / 2, KEYS / 2, LANES / 4);
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                float* to = work.common.out + (row + r) * work.common.out_stride + channel;
                store(to, fma(to_float(total_of(sums[r])), set1(units[r]), load(to)));
            }
            if (next && channel / LANES < PANELS) fetch(next->values[channel / LANES]);
        }
    }

    template <int ROWS> void score(const Int8Work& work, int64_t row, int64_t panel, const uint8_t* keys) const {
        Sum sums[ROWS];
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) sums[r] = no_sum();
        add_products<ROWS>(sums, keys + SCALE_BYTES, 4 * LANES, work.fours + row * query_size() / 2, query_size() / 2,
                           padded_size(size()) / 4);
        const F32 scales = scales_of(keys);
        LLM_UNROLL for (int r = 0; r < ROWS; ++r)
            store(work.common.scores + r * KEYS + panel * LANES,
                  fma(to_float(total_of(sums[r])), scales * set1(work.units[row + r]), set1(work.shifts[row + r])));
    }

    // One step of the softmax of query row `row`, row `r` of the tile; its probabilities times the scales of the values
    // become weights. Returns what a factor of them stands for.
    float weigh(const Int8Work& work, int64_t row, int r, int64_t start, const Records& records) const {
        const Span seen = seen_in_block(work.common, row, start);
        float* scores = work.common.scores + r * KEYS;
        if (seen.empty()) {
            for (int64_t key = 0; key < KEYS; ++key) scores[key] = 0.0f;
        } else {
            advance_softmax(work.common, row, scores, start, seen, layer.log2_cap());
            for (int panel = 0; panel < PANELS; ++panel) {
                float* at = scores + panel * LANES;
                store(at, load(at) * scales_of(records.values[panel]));
            }
            // The scales of slots that the query row does not see can be anything, NaN too.
            for (int64_t key = 0; key < seen.first; ++key) scores[key] = 0.0f;
            for (int64_t key = seen.end; key < KEYS; ++key) scores[key] = 0.0f;
        }
        return to_factors(scores, KEYS, LARGEST_FACTOR, work.weights + r * KEYS / 2);
    }

    void fetch(const uint8_t* from) const {
        for (int64_t i = 0; i < record_bytes(size()); i += LINE) prefetch_far(from + i);
    }
};

}  // namespace
}  // namespace llm
