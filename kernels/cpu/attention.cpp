// Attention over the paged KV cache, which kv_cache.cpp writes.
//
// The KV cache is cut into panels of 16 slots (slot = block * block_size + offset). Keys are
// [panels][kv_heads][head_size][16]: vector lanes run along keys. Values are [panels][kv_heads][16][head_size]: lanes
// run along channels. One panel more than the slots need is allocated and never written: with a head size that is no
// multiple of 16, loads run over the end.
//
// In 8 bits a panel has scales beside it (quantized_cache.h), and int8 is multiplied as integers (attention_int8.h).
//
// The KV cache of latent attention (latent.cpp writes it) is [slots][head_size]: one row is a token's key for every
// head, and all but its last `rope_size` channels are the value. A block of it is staged: keys are transposed. In 8
// bits two scales are behind a row, and both types are widened to floats.
//
// The bits do not depend on the batch, the chunks or the threads. The softmax advances KEYS positions at a time,
// counted from position 0. One thread reduces scores over channels in order and outputs over keys in order. A key that
// a query does not see takes no part in that query's arithmetic.
#include "attention_int8.h"
#include "attention_tiles.h"
#include "kinds.h"
#include "parallel.h"
#include "quantized_cache.h"
#include "transpose.h"

namespace llm {
namespace {

// Staging of latent attention: 16 rows of its KV cache as a panel of keys and a panel of values. Rows are widened and
// transposed in tiles of 16 channels: a tile stays in the L1 cache, a panel of keys does not.
LLM_INLINE F32 load(const int8_t* p) { return to_float(load_int8(p)); }

// The rows of lanes [first, end) of a panel; scales of 1 where elements are no codes.
template <class T> struct LatentRows {
    const T* from[LANES];
    float latent[LANES], rope[LANES];
    int64_t first, end;
};

// Channels [first, end) of all rows -> keys [channels][16], and if `values` is not null values [16][end].
template <class T>
void stage_channels(const LatentRows<T>& rows, const float* scales, int64_t first, int64_t end, float* keys,
                    float* values) {
    alignas(64) float tile[LANES * LANES] = {};
    for (int64_t channel = first; channel < end; channel += LANES) {
        const int64_t count = min(LANES, end - channel);
        for (int64_t lane = rows.first; lane < rows.end; ++lane) {
            const T* from = rows.from[lane] + channel;
            float* to = tile + lane * LANES;
            if (count == LANES) store(to, load(from) * set1(scales[lane]));
            else
                for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]) * scales[lane];
            if (values) store_part(values + lane * end + channel, load(to), count);
        }
        transpose_tile(tile, keys + channel * LANES, count);
    }
}

template <class T> class Attention {
  public:
    const Step& step;
    const Layer& layer;
    const T *key_cache, *value_cache;
    const float *query, *query_rope;  // query_rope: of latent attention, [tokens][heads][rope_size]
    int64_t query_stride;
    float* out;

    int64_t padded() const { return ceil_div(layer.value_size(), LANES) * LANES; }
    bool has_panels() const { return !layer.is_latent() && step.block_size % LANES == 0; }
    bool is_staged() const { return sizeof(T) == 1 || !has_panels(); }
    // Floats of one block's keys and values.
    int64_t staged_size() const { return KEYS * (layer.head_size + layer.value_size()) + LANES; }

    int64_t scratch_bytes(int64_t rows) const {
        const int64_t per_row = layer.head_size + padded() + LANES + 2 + LANES;
        const int64_t staged = is_staged() ? staged_size() : 0;
        return (rows * per_row + MAX_TILE_ROWS * KEYS + staged) * sizeof(float) + rows * sizeof(Span) + 64 * 9;
    }

    // `following`: what this thread probably does next, or null.
    void run(const Task& task, const Task* following, char* scratch) const {
        const int64_t rows = task.rows();
        Work work = divide(scratch, rows);
        start(task, work, rows);
        const Span all = find_spans(work, rows);
        for (int64_t index = all.first / KEYS; index * KEYS < all.end; ++index) {
            const bool last = (index + 1) * KEYS >= all.end, fetch = has_panels() && (!last || following);
            const Next next = !fetch ? Next{} : last ? first_of(*following) : next_of(in_cache(task, all, index + 1));
            const auto advance_over = [&](const auto& block) {
                fetch ? advance<true>(work, rows, index * KEYS, block, next)
                      : advance<false>(work, rows, index * KEYS, block, next);
            };
            if constexpr (sizeof(T) > 1) {
                if (!is_staged()) {
                    advance_over(in_cache(task, all, index));
                    continue;
                }
            }
            advance_over(open(task, work, all, index));
        }
        finish(task, work);
    }

  private:
    Work divide(char* scratch, int64_t rows) const {
        char* at = scratch;
        const auto take = [&](int64_t count, int64_t size) {
            char* taken = at;
            at += ceil_div(count * size, 64) * 64;
            return taken;
        };
        const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count, sizeof(float))); };
        Work work{};
        work.out_stride = padded();
        work.query = floats(rows * layer.head_size);
        work.scores = floats(MAX_TILE_ROWS * KEYS);
        work.out = floats(rows * padded());
        work.sums = floats(rows * LANES);
        work.maxima = floats(rows);
        work.slopes = layer.slopes ? floats(rows) : nullptr;
        work.staged = is_staged() ? floats(staged_size()) : nullptr;
        work.spans = reinterpret_cast<Span*>(take(rows, sizeof(Span)));
        return work;
    }

    void start(const Task& task, const Work& work, int64_t rows) const {
        const float factor = layer.factor();
        const int64_t size = layer.head_size, plain = layer.value_size(), rotated = layer.rope_size;
        const float* scales = layer.channel(KEY_SCALE, task.kv_head);
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t head = task.head_of(row, layer.group()), token = task.token_of(row);
            const float* source = query + token * query_stride + head * plain;
            const float* rope = query_rope + (token * layer.heads + head) * rotated;
            float* to = work.query + row * size;
            for (int64_t i = 0; i < plain; ++i) to[i] = source[i] * factor;
            for (int64_t i = 0; i < rotated; ++i) to[plain + i] = rope[i] * factor;
            for (int64_t i = 0; scales && i < size; ++i) to[i] *= scales[i];
            start_row(work, row, layer, head, step.position(task.row, token), step.lengths[task.row]);
        }
    }

    void finish(const Task& task, const Work& work) const {
        const int64_t size = layer.value_size();
        const float* scales = layer.channel(VALUE_SCALE, task.kv_head);
        for (int64_t row = 0; row < task.rows(); ++row) {
            const float* from = work.out + row * work.out_stride;
            float* to = out + (task.token_of(row) * layer.heads + task.head_of(row, layer.group())) * size;
            const F32 total = set1(sum(load(work.sums + row * LANES)));
            for (int64_t i = 0; i < size; i += LANES) {
                // + 0: zeros become positive, however they arose.
                const F32 mean = load(from + i) / total + zero();
                store_part(to + i, scales ? mean * load_part(scales + i, size - i) : mean, size - i);
            }
        }
    }

    static constexpr bool IS_CODE = sizeof(T) == 1;
    static constexpr bool HAS_SCALES = std::is_same_v<T, F8>;
    const T* at(const T* cache, int64_t panel, int64_t kv_head) const {
        const int64_t record = panel * layer.kv_heads + kv_head;
        if constexpr (HAS_SCALES) return cache + record * record_bytes(layer.head_size) + SCALE_BYTES;
        else return cache + record * layer.head_size * LANES;
    }
    const T* keys_at(int64_t panel, int64_t kv_head) const { return at(key_cache, panel, kv_head); }
    const T* values_at(int64_t panel, int64_t kv_head) const { return at(value_cache, panel, kv_head); }
    // Of the panel whose codes begin at `codes`.
    const BF16* scales_of(const T* codes) const { return reinterpret_cast<const BF16*>(codes) - LANES; }

    // The panels of block `index` in the cache. Where no query row sees a panel it is panel 0: read, but not used.
    Block<T> in_cache(const Task& task, Span all, int64_t index) const {
        Block<T> block;
        for (int panel = 0; panel < PANELS; ++panel) {
            const int64_t first = index * KEYS + panel * LANES;
            const bool seen = !intersect(all, {first, first + LANES}).empty();
            const int64_t at = seen ? step.slot(task.row, first) / LANES : 0;
            block.keys[panel] = keys_at(at, task.kv_head);
            block.values[panel] = values_at(at, task.kv_head);
        }
        return block;
    }

    Next first_of(const Task& task) const {
        const Span seen = seen_by(step, layer, task);
        return next_of(in_cache(task, seen, seen.first / KEYS));
    }

    static Next next_of(const Block<T>& block) {
        Next next{};
        next.line = LANES * sizeof(T);
        for (int panel = 0; panel < PANELS; ++panel) {
            next.keys[panel] = reinterpret_cast<const char*>(block.keys[panel]);
            next.values[panel] = reinterpret_cast<const char*>(block.values[panel]);
        }
        return next;
    }

    // The panels of block `index` as floats.
    Block<float> open(const Task& task, const Work& work, Span all, int64_t index) const {
        Block<float> block;
        for (int panel = 0; panel < PANELS; ++panel) {
            const int64_t first = index * KEYS + panel * LANES;
            stage(task, work, intersect(all, {first, first + LANES}), first, panel, block);
        }
        return block;
    }

    void stage(const Task& task, const Work& work, Span seen, int64_t first, int panel, Block<float>& block) const {
        const int64_t panel_size = LANES * layer.head_size;
        float* keys = work.staged + panel * panel_size;
        float* values = work.staged + PANELS * panel_size + panel * LANES * layer.value_size();
        block.keys[panel] = keys, block.values[panel] = values;
        if (seen.empty()) return;  // stale scratch, read but not used
        if (layer.is_latent()) stage_latent(task, seen, first, keys, values);
        else if constexpr (!std::is_same_v<T, int8_t>) stage_panel(task, seen, first, keys, values);
    }

    void stage_panel(const Task& task, Span seen, int64_t first, float* keys, float* values) const {
        const int64_t panel_size = LANES * layer.head_size;
        if (step.block_size % LANES == 0) {
            const int64_t at = step.slot(task.row, first) / LANES;
            const T *from_keys = keys_at(at, task.kv_head), *from_values = values_at(at, task.kv_head);
            if constexpr (HAS_SCALES) return stage_scaled(from_keys, from_values, keys, values);
            for (int64_t i = 0; i < panel_size; i += LANES) store(keys + i, load(from_keys + i));
            for (int64_t i = 0; i < panel_size; i += LANES) store(values + i, load(from_values + i));
            return;
        }
        for (int64_t position = seen.first; position < seen.end; ++position) {
            const int64_t at = step.slot(task.row, position), lane = position - first, from = at % LANES;
            const T *from_keys = keys_at(at / LANES, task.kv_head), *from_values = values_at(at / LANES, task.kv_head);
            const float key_scale = HAS_SCALES ? widen(scales_of(from_keys)[from]) : 1.0f;
            const float value_scale = HAS_SCALES ? widen(scales_of(from_values)[from]) : 1.0f;
            for (int64_t i = 0; i < layer.head_size; ++i) {
                keys[i * LANES + lane] = widen(from_keys[i * LANES + from]) * key_scale;
                values[lane * layer.head_size + i] = widen(from_values[from * layer.head_size + i]) * value_scale;
            }
        }
    }

    // A panel of 8-bit floats. Slots that no query row sees have any scale.
    void stage_scaled(const T* from_keys, const T* from_values, float* keys, float* values) const {
        const int64_t size = layer.head_size;
        const F32 scales = load(scales_of(from_keys));
        for (int64_t i = 0; i < size; ++i) store(keys + i * LANES, load(from_keys + i * LANES) * scales);
        for (int64_t slot = 0; slot < LANES; ++slot) {
            const F32 scale = set1(widen(scales_of(from_values)[slot]));
            for (int64_t i = 0; i < size; i += LANES)
                store_part(values + slot * size + i, load(from_values + slot * size + i) * scale, size - i);
        }
    }

    void stage_latent(const Task& task, Span seen, int64_t first, float* keys, float* values) const {
        const int64_t size = layer.head_size, value_size = layer.value_size();
        const int64_t stride = size + (IS_CODE ? LATENT_SCALE_BYTES : 0);
        LatentRows<T> rows{};
        rows.first = seen.first - first, rows.end = seen.end - first;
        for (int64_t lane = rows.first; lane < rows.end; ++lane) {
            rows.from[lane] = key_cache + step.slot(task.row, first + lane) * stride;
            LatentScales scales{{0x3f80}, {0x3f80}};  // 1
            if constexpr (IS_CODE) std::memcpy(&scales, rows.from[lane] + size, LATENT_SCALE_BYTES);
            rows.latent[lane] = widen(scales.latent), rows.rope[lane] = widen(scales.rope);
        }
        stage_channels(rows, rows.latent, 0, value_size, keys, values);
        stage_channels(rows, rows.rope, value_size, size, keys, nullptr);
    }

    // Advances all query rows over the block of positions that begins at `start`. With FETCH, its last full tile
    // prefetches what is next: it has enough arithmetic to hide that, and needs these keys no more.
    template <bool FETCH, class U>
    void advance(const Work& work, int64_t rows, int64_t start, const Block<U>& block, const Next& next) const {
        const int64_t fetches = max(0, rows / MAX_TILE_ROWS - 1) * MAX_TILE_ROWS;
        const bool whole = work.common.first <= start && start + KEYS <= work.common.end;
        for (int64_t row = 0, share; row < rows; row += share) {
            share = tile_rows(rows - row);
            const auto advance_rows = [&](auto fetch) {
                constexpr bool fetch_here = decltype(fetch)::value;
                if (whole) advance_tile<fetch_here>(work, row, share, start, block, next);
                else advance_edge<fetch_here>(work, row, share, start, block, next);
            };
            if (FETCH && row == fetches) advance_rows(std::true_type{});
            else advance_rows(std::false_type{});
        }
    }

    // Query rows that all see the whole block.
    template <bool FETCH, class U>
    void advance_tile(const Work& work, int64_t row, int64_t rows, int64_t start, const Block<U>& block,
                      const Next& next) const {
        score_rows<FETCH>(rows, work, row, int64_t{KEYS}, block, next, layer.head_size);
        for (int64_t r = 0; r < rows; ++r)
            advance_softmax(work, row + r, work.scores + r * KEYS, start, {0, KEYS}, layer.log2_cap());
        value_rows<FETCH>(rows, work, row, work.scores, Span{0, KEYS}, block, next, layer.value_size());
    }

    // Query rows of which some see only a part of the block.
    template <bool FETCH, class U>
    void advance_edge(const Work& work, int64_t row, int64_t rows, int64_t start, const Block<U>& block,
                      const Next& next) const {
        Span shared{0, KEYS}, any{KEYS, 0};
        for (int64_t r = row; r < row + rows; ++r) {
            const Span seen = seen_in_block(work, r, start);
            shared = intersect(shared, seen);
            if (!seen.empty()) any = {min(any.first, seen.first), max(any.end, seen.end)};
        }
        if (any.empty()) return;
        const int64_t size = layer.value_size();
        score_rows<FETCH>(rows, work, row, any.end, block, next, layer.head_size);
        const auto scores = [&](int64_t r) { return work.scores + (r - row) * KEYS; };
        for (int64_t r = row; r < row + rows; ++r) {
            const Span seen = seen_in_block(work, r, start);
            if (!seen.empty()) advance_softmax(work, r, scores(r), start, seen, layer.log2_cap());
        }
        // Keys that all rows see are added for the whole tile, the others row by row. Each row's keys stay in order,
        // and a key that a row does not see is not multiplied by 0 (0 * inf is NaN).
        if (shared.empty()) shared = {KEYS, KEYS};
        const auto add_alone = [&](int64_t r, Span keys) {
            if (!keys.empty()) value_rows<false>(1, work, r, scores(r), keys, block, next, size);
        };
        for (int64_t r = row; r < row + rows; ++r) {
            const Span seen = seen_in_block(work, r, start);
            add_alone(r, {seen.first, min(seen.end, shared.first)});
        }
        if (shared.empty()) return;
        value_rows<FETCH>(rows, work, row, work.scores, shared, block, next, size);
        for (int64_t r = row; r < row + rows; ++r) add_alone(r, {shared.end, seen_in_block(work, r, start).end});
    }
};

// Runs the tasks of a step. `attention` is an Attention or an Int8Attention.
template <class Attention> void share_tasks(const Attention& attention, int64_t threads) {
    const Step& step = attention.step;
    const Layer& layer = attention.layer;
    const AttentionTasks tasks(step, layer, threads);
    Scratch firsts((step.rows + 1) * sizeof(int64_t));
    int64_t* first_task = firsts.as<int64_t>();
    first_task[0] = 0;
    int64_t pairs = 0;  // of a token and a position that it may see
    for (int64_t row = 0; row < step.rows; ++row) {
        first_task[row + 1] = first_task[row] + tasks.tiles(row) * tasks.per_tile();
        pairs += tasks.tokens(row) * step.lengths[row];
    }
    const int64_t ns = pairs * layer.heads * layer.head_size * 2 / MULTIPLY_ADDS_PER_NS;
    parallel_for(tasks.count, is_worth_sharing(ns) ? threads : 1, attention.scratch_bytes(tasks.rows()),
                 [&](int64_t index, char* scratch) {
        const Task task = tasks.task(index, first_task);
        if (task.heads() <= 0) return;
        Task following{};
        if (index + 1 < tasks.count) following = tasks.task(index + 1, first_task);
        attention.run(task, following.heads() > 0 ? &following : nullptr, scratch);
    });
}

template <class T>
void attend(const Step& step, const Layer& layer, const void* key_cache, const void* value_cache, const float* query,
            int64_t query_stride, const float* query_rope, float* out, int64_t threads) {
    share_tasks(Attention<T>{step, layer, static_cast<const T*>(key_cache), static_cast<const T*>(value_cache), query,
                             query_rope, query_stride, out},
                threads);
}

// As with_type, and of 8-bit floats.
template <class Call> LLM_INLINE void with_cache_type(Kind kind, const Call& call) {
    if (kind == Kind::FLOAT8) call(Type<F8>{});
    else with_type(kind, call);
}

}  // namespace
}  // namespace llm

using namespace llm;

// query [tokens][heads][head_size], tokens `query_stride` floats apart -> out, contiguous. A token sees `window`
// positions up to its own (0: all), of those only what is in its own chunk of `chunk` positions (0: all), and
// `ahead` after it, of those in the cache. `slopes` of ALiBi per head, or null;
// with them `ahead` is 0. `static_scales`: static scales and offsets [4][kv_heads][head_size] of a KV cache in 8 bits
// (offsets: of int8), or null. Returns -1; or, having computed nothing, the first batch row whose numbers or block ids
// are out of range.
LLM_EXPORT int64_t llm_paged_attention(const int32_t* table, const int32_t* starts, const int32_t* lengths,
                                       int64_t rows, int64_t table_width, int64_t block_size, int64_t slots,
                                       const float* query, int64_t query_stride, int64_t tokens, Kind kind,
                                       const void* key_cache, const void* value_cache, float* out, int64_t heads,
                                       int64_t kv_heads, int64_t head_size, int64_t window, int64_t chunk,
                                       int64_t ahead, float scale, float soft_cap, const float* sinks,
                                       const float* slopes, const float* static_scales, int64_t threads) {
    const Step step{table, starts, lengths, rows, table_width, block_size, slots};
    const Layer layer{heads, kv_heads, head_size, window, chunk,  ahead,
                      0,     scale,    soft_cap,  sinks,  slopes, static_scales};
    const int64_t bad = first_bad_row(step, tokens, window);
    if (bad >= 0) return bad;
    if (kind == Kind::INT8) {
        const auto *keys = static_cast<const uint8_t*>(key_cache), *values = static_cast<const uint8_t*>(value_cache);
        share_tasks(Int8Attention{step, layer, keys, values, query, query_stride, out}, threads);
        return -1;
    }
    with_cache_type(kind, [&](auto type) {
        attend<typename decltype(type)::Value>(step, layer, key_cache, value_cache, query, query_stride, nullptr, out,
                                               threads);
    });
    return -1;
}

// Latent attention: query [tokens][heads][latent_size] and query_rope [tokens][heads][rope_size], rope_size > 0, over
// cache [slots][latent_size + rope_size], in 8 bits with LatentScales behind a row -> out [tokens][heads][latent_size].
// Returns as llm_paged_attention.
LLM_EXPORT int64_t llm_latent_attention(const int32_t* table, const int32_t* starts, const int32_t* lengths,
                                        int64_t rows, int64_t table_width, int64_t block_size, int64_t slots,
                                        const float* query, const float* query_rope, int64_t tokens, Kind kind,
                                        const void* cache, float* out, int64_t heads, int64_t latent_size,
                                        int64_t rope_size, float scale, int64_t threads) {
    const Step step{table, starts, lengths, rows, table_width, block_size, slots};
    const Layer layer{heads, 1, latent_size + rope_size, 0, 0, 0, rope_size, scale, 0.0f, nullptr, nullptr, nullptr};
    const int64_t bad = first_bad_row(step, tokens, 0);
    if (bad >= 0) return bad;
    const auto call = [&](auto type) {
        attend<typename decltype(type)::Value>(step, layer, cache, nullptr, query, heads * latent_size, query_rope, out,
                                               threads);
    };
    if (kind == Kind::INT8) call(Type<int8_t>{});
    else with_cache_type(kind, call);
    return -1;
}

LLM_KERNEL(llm_paged_attention)
LLM_KERNEL(llm_latent_attention)
