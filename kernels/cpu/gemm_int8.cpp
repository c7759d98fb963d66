// GEMM y = x W^T (+ bias): int8 weights, activations quantized here to int8; exact int32 sums, one scale per output
// channel.
//
// A panel is [k / 4][16][4]: four k of an output channel side by side, as VNNI instructions read them. k is padded to a
// multiple of 4 with zeros. Without VNNI or NEON both operands are widened to int16 and multiplied in pairs. Sums stay
// below 2^31 for k up to 2^17: the caller checks.
#include "bytes.h"
#include "gemm_tiles.h"
#include "quantize.h"
#include "rotate.h"
#include "weight.h"

namespace llm {
namespace {

constexpr int64_t STEP = 4;                   // k of one group of a column
constexpr int64_t PANEL_STEP = LANES * STEP;  // elements of a panel per step
// Bytes ahead: of panels read side by side, and of one read alone, whose block is longer.
constexpr int64_t prefetch_bytes(int panels) { return panels > 1 ? 2048 : 4096; }
constexpr int64_t BLOCK_BYTES = 512 << 10;

#if LLM_DOTS

#if LLM_NEON
using Operand = int8_t;
constexpr int32_t OPERAND_SHIFT = 0;
#else
// VNNI multiplies unsigned by signed bytes. Activations are stored plus 128; at the end 128 times the output channel's
// sum is subtracted, modulo 2^32 and therefore exactly.
using Operand = uint8_t;
constexpr int32_t OPERAND_SHIFT = 128;
#endif

#if LLM_MMLA
#include "gemm_int8_pairs.h"
#endif

// What a tile of PANELS panels prefetches. One row tile is bound by memory: it fetches its own panels a little ahead.
// Of several only the first would wait for memory: each fetches its share of the panels that its thread takes next.
template <int PANELS> class Fetches {
    const Ahead ahead_;
    const int64_t panel_bytes_, bytes_;  // bytes_: of its share, for a step
    const char* share_ = nullptr;

  public:
    Fetches(const int8_t* panels, int64_t panel_bytes, int64_t steps, const Turn& turn)
        : ahead_(prefetch_bytes(PANELS), PANEL_STEP, steps, PANELS, panel_bytes), panel_bytes_(panel_bytes),
          bytes_(ceil_div(PANELS * PANEL_STEP, turn.count)) {
        if (turn.count == 1) return;
        share_ = reinterpret_cast<const char*>(panels) + turn.panels * panel_bytes +
                 turn.index * PANELS * panel_bytes / turn.count;
    }
    // `at`: the step in the first panel.
    LLM_INLINE void step(const int8_t* at, int64_t step) const {
        if (share_) return prefetch_far(share_ + step * bytes_);
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) prefetch(at + c * panel_bytes_ + ahead_.distance(step));
    }
};

// Sums [ROWS][PANELS][16]. Not inlined: what the caller keeps in registers would make it spill.
template <int ROWS, int PANELS>
__attribute__((noinline)) void dots(const Operand* a, const int8_t* b, int64_t panel_bytes, int64_t steps,
                                    const Turn& turn, int32_t* out) {
    constexpr int vectors = PANELS * PANEL_VECTORS;
    Bytes acc[ROWS][vectors];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < vectors; ++c) acc[r][c] = Bytes{};
    const Fetches<PANELS> fetches(b, panel_bytes, steps, turn);
    for (int64_t s = 0; s < steps; ++s) {
        Bytes w[vectors];
        fetches.step(b + s * PANEL_STEP, s);
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) LLM_UNROLL for (int v = 0; v < PANEL_VECTORS; ++v)
            w[c * PANEL_VECTORS + v] = load_bytes(b + c * panel_bytes + s * PANEL_STEP + v * sizeof(Bytes));
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const Bytes value = broadcast_bytes(a + (s * ROWS + r) * STEP);
            LLM_UNROLL for (int c = 0; c < vectors; ++c) dot(acc[r][c], value, w[c]);
        }
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < vectors; ++c)
        std::memcpy(out + r * PANELS * LANES + c * sizeof(Bytes) / 4, &acc[r][c], sizeof(Bytes));
}

#else

using Operand = int16_t;
constexpr int32_t OPERAND_SHIFT = 0;

#if defined(LLM_PLAIN)

constexpr int panels_for(int) { return 1; }

template <int ROWS, int PANELS>
void dots(const Operand* a, const int8_t* b, int64_t, int64_t steps, const Turn&, int32_t* out) {
    static_assert(PANELS == 1, "one panel at a time");
    for (int r = 0; r < ROWS; ++r) {
        int32_t acc[LANES] = {};
        for (int64_t s = 0; s < steps; ++s)
            for (int c = 0; c < LANES; ++c)
                for (int j = 0; j < STEP; ++j)
                    acc[c] += a[(s * ROWS + r) * STEP + j] * b[s * PANEL_STEP + c * STEP + j];
        std::memcpy(out + r * LANES, acc, sizeof acc);
    }
}

#else

// A vector of int16 holds 4 k of some output channels; multiplied in pairs it gives two int32 per channel.
using Vector = Bytes;
constexpr int VECTORS = 2 * PANEL_VECTORS;
#if LLM_AVX512
LLM_INLINE Vector widen_load(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
LLM_INLINE Vector broadcast_four(const int16_t* p) {
    int64_t four;
    std::memcpy(&four, p, 8);
    return _mm512_set1_epi64(four);
}
LLM_INLINE Vector multiply(Vector a, Vector b) { return _mm512_madd_epi16(a, b); }
LLM_INLINE Vector nothing() { return _mm512_setzero_si512(); }
#else
LLM_INLINE Vector widen_load(const int8_t* p) { return _mm256_cvtepi8_epi16(load_128(p)); }
LLM_INLINE Vector broadcast_four(const int16_t* p) {
    int64_t four;
    std::memcpy(&four, p, 8);
    return _mm256_set1_epi64x(four);
}
LLM_INLINE Vector multiply(Vector a, Vector b) { return _mm256_madd_epi16(a, b); }
LLM_INLINE Vector nothing() { return _mm256_setzero_si256(); }
#endif
// Assembly: gcc moves additions behind all products, and spills.
LLM_INLINE void add_to(Vector& sum, Vector x) { asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(x)); }
constexpr int VECTOR_BYTES = sizeof(Vector) / 2;  // int8 values that widen to a Vector

// Few rows are bound by memory: they alternate between panels, so that several streams of memory are under way.
constexpr int panels_for(int rows) { return rows <= 4 ? 4 : 1; }
// Steps of a panel before its other half, or the next panel, has its turn: they stay in the L1 cache. Four rows are
// bound by arithmetic and gain from fewer turns.
constexpr int64_t block_steps(int rows, int panels) { return panels == 1 ? 128 : rows <= 3 ? 8 : 16; }

// acc [ROWS][VECTORS] += `steps` steps, for WIDTH of the vectors from `first` on. Not inlined: one part takes all
// registers.
template <int ROWS, int WIDTH>
__attribute__((noinline)) void part(const Operand* a, const int8_t* b, int64_t steps, int64_t ahead, Vector* sums,
                                    int first) {
    constexpr int parts = VECTORS / WIDTH;
    const int8_t* fetched = b + ahead + (first ? steps / 2 * PANEL_STEP : 0);
    Vector acc[ROWS][WIDTH];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < WIDTH; ++c)
        acc[r][c] = sums[r * VECTORS + first + c];
    b += first * VECTOR_BYTES;
    for (int64_t s = 0; s < steps; ++s) {
        Vector w[WIDTH];
        LLM_UNROLL for (int c = 0; c < WIDTH; ++c) {
            w[c] = widen_load(b + s * PANEL_STEP + c * VECTOR_BYTES);
            asm("" : "+v"(w[c]));  // or gcc reloads it for every product
        }
        prefetch(fetched + s * (PANEL_STEP / parts));  // each part prefetches its share
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const Vector value = broadcast_four(a + (s * ROWS + r) * STEP);
            LLM_UNROLL for (int c = 0; c < WIDTH; ++c) add_to(acc[r][c], multiply(value, w[c]));
        }
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < WIDTH; ++c)
        sums[r * VECTORS + first + c] = acc[r][c];
}

// Adds the two int32 of each output channel: [VECTORS] vectors -> 16 channels.
LLM_INLINE void add_pairs(const Vector* sums, int32_t* out) {
    alignas(64) int32_t pair[2 * LANES];
    std::memcpy(pair, sums, sizeof pair);
    for (int c = 0; c < LANES; ++c) out[c] = pair[2 * c] + pair[2 * c + 1];
}

template <int ROWS, int PANELS>
void dots(const Operand* a, const int8_t* b, int64_t panel_bytes, int64_t steps, const Turn&, int32_t* out) {
    constexpr int width = ROWS * VECTORS <= 2 * MAX_ROWS ? VECTORS : 2;
    constexpr int64_t block = block_steps(ROWS, PANELS);
    const Ahead ahead(prefetch_bytes(PANELS), PANEL_STEP, steps, PANELS, panel_bytes);
    Vector sums[PANELS][ROWS * VECTORS];
    for (auto& panel : sums)
        for (Vector& sum : panel) sum = nothing();
    for (int64_t s = 0; s < steps; s += block) {
        const int64_t some = min(block, steps - s);
        for (int c = 0; c < PANELS; ++c)
            LLM_UNROLL for (int first = 0; first < VECTORS; first += width)
                part<ROWS, width>(a + s * ROWS * STEP, b + c * panel_bytes + s * PANEL_STEP, some, ahead.distance(s),
                                  sums[c], first);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < PANELS; ++c) add_pairs(sums[c] + r * VECTORS, out + (r * PANELS + c) * LANES);
}

#endif
#endif

// y = (float(sum) * row scale) * (factor * scale[n]) + bias[n], each product rounded. Dynamic quantization: the factor
// is 1. Static: the factor is input_scale, and row scales are 1, or NaN of a row that is not finite.
struct Int8Product : Product {
    const Operand* a;        // of each tile, [k / 4][rows][4]
    const float* row_scale;  // [m]
    int32_t offset;          // of the operands: `offset` times the column's sum is subtracted
    float factor;

    Int8Product(const Product& product, const Operand* operands, const float* row_scales, int32_t operand_shift)
        : Product(product), a(operands), row_scale(row_scales),
          offset(operand_shift + static_cast<int32_t>(input_offset)), factor(input_scale == 0.0f ? 1.0f : input_scale) {
    }

    int64_t steps() const { return ceil_div(k, STEP); }
    int64_t panel_bytes() const { return steps() * PANEL_STEP; }
    const int8_t* panel(int64_t index) const { return static_cast<const int8_t*>(data) + index * panel_bytes(); }
};

// Sums [rows][stride][16] of `wide` panels -> outputs.
LLM_INLINE void scale_sums(const Int8Product& p, int64_t row, int64_t rows, int64_t panel, int64_t wide, int64_t stride,
                           const int32_t* sums) {
    for (int64_t c = 0; c < wide; ++c) {
        const int64_t column = (panel + c) * LANES;
        alignas(64) int32_t excess[LANES];
        for (int i = 0; i < LANES; ++i)
            excess[i] = static_cast<int32_t>(static_cast<uint32_t>(p.offset) *
                                             static_cast<uint32_t>(p.sums[column + i]));
        const F32 scale = set1(p.factor) * p.scales().load(0, column, p.n - column);
        const I32 its_excess = load_i(excess);
        const float* row_scale = p.row_scale + row;
        p.store_outputs(row, rows, column, [=](int64_t r) {
            const I32 sum = load_i(sums + (r * stride + c) * LANES) - its_excess;
            return to_float(sum) * set1(row_scale[r]) * scale;
        });
    }
}

template <int ROWS, int PANELS> void tile(const Int8Product& p, int64_t row, int64_t panel, const Turn& turn) {
    alignas(64) int32_t sums[ROWS * PANELS * LANES];
    LLM_UNROLL for (int64_t c = panel; c < panel + PANELS; ++c) {
        prefetch(p.sums + c * LANES);
        p.scales().fetch(0, c * LANES);
    }
#if LLM_MMLA
    if constexpr (ROWS % 2 == 0 && PANELS == 1)
        paired_dots<ROWS>(p.a + row * p.steps() * STEP, p.panel(panel), p.panel_bytes(), p.steps(), sums);
    else
#endif
        dots<ROWS, PANELS>(p.a + row * p.steps() * STEP, p.panel(panel), p.panel_bytes(), p.steps(), turn, sums);
    scale_sums(p, row, ROWS, panel, PANELS, PANELS, sums);
}

template <int ROWS> void tiles(const Int8Product& p, int64_t row, int64_t panel, int64_t end, const Turn& turn) {
    for_panels<panels_for(ROWS)>(panel, end,
                                 [&](auto wide, int64_t at) { tile<ROWS, decltype(wide)::value>(p, row, at, turn); });
}

// Quantizes ROWS batch rows of a tile of `rows` to [k / 4][rows][4], and writes the factors of their sums. `rotated`
// [ROWS][k]: room where they are rotated first.
template <int ROWS>
LLM_INLINE void quantize_rows(const Product& p, int64_t row, int64_t rows, Operand* out, float* factors,
                              float* rotated) {
    const float* x = p.x + row * p.k;
    if (p.rotation) {
        for (int64_t r = 0; r < ROWS; ++r) rotate_row(x + r * p.k, rotated + r * p.k, p.k, p.rotation);
        x = rotated;
    }
    RowQuantizer by[ROWS];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
        by[r] = RowQuantizer(x + r * p.k, p.k, p.input_scale, p.input_offset);
        factors[r] = by[r].factor;
    }
    const auto put = [&](int64_t i, int64_t steps, const auto& load_from) {
        I32 q[ROWS];
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) q[r] = by[r].quantize(load_from(x + r * p.k + i));
        store_steps<STEP>(q, steps, rows, out + i * rows);
    };
    int64_t i = 0;
    for (; i + LANES <= p.k; i += LANES) put(i, LANES / STEP, [](const float* at) { return load(at); });
    if (i < p.k) put(i, ceil_div(p.k - i, STEP), [&](const float* at) { return load_part(at, p.k - i); });
}

#if LLM_TILES

// From this many batch rows on, AMX tiles are faster; the bits are the same.
constexpr int64_t TILES_FROM = 12;

void multiply_by_tiles(const Product& product, int64_t threads) {
    const Scratch scales(product.m * sizeof(float));
    float* row_scales = scales.as<float>();
    const Int8Product p(product, nullptr, row_scales, 0);
    const TilePanels panels{static_cast<const char*>(p.data), p.steps()};
    // With more than two row tiles, short blocks pay: panels are read from the L1 cache, and sums are reloaded once
    // more.
    const int64_t block = p.m > 2 * TILE_LINES ? SHORT_STEPS : BLOCK_STEPS;
    for_row_blocks(p.m, panels.steps(), 1, block, MOST_TILES, [&](const TileOperands& a, int64_t from) {
        quantize_operands(a, p.x + from * p.k, p.k, p.rotation, p.input_scale, p.input_offset, row_scales + from,
                          threads);
        const auto done = [&](int64_t tile, int64_t panel, int64_t wide, const char* sums) {
            scale_sums(p, from + tile * TILE_LINES, a.tile_rows(tile), panel, wide, TILE_PANELS,
                       reinterpret_cast<const int32_t*>(sums));
        };
        multiply_tiles<INT8>(a, panels, p.panels(), threads, done);
    });
}

#endif

// An output channel (row of W) inside its panel.
struct PanelRow {
    const int8_t* panel;
    PanelRow(const Weight& weight, int64_t row)
        : panel(static_cast<const int8_t*>(weight.data) + row / LANES * ceil_div(weight.k, STEP) * PANEL_STEP +
                row % LANES * STEP) {}
    int8_t operator[](int64_t k) const { return panel[k / STEP * PANEL_STEP + k % STEP]; }
};

}  // namespace

void linear_int8(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads) {
    const Product product{weight, x, y, m};
#if LLM_TILES
    if (m >= TILES_FROM) return multiply_by_tiles(product, threads);
#endif
    const int64_t k = weight.k, padded = ceil_div(k, STEP) * STEP;
    const Scratch operands(m * padded * sizeof(Operand)), scales(m * sizeof(float));
    Operand* a = operands.as<Operand>();
    float* row_scales = scales.as<float>();
    const Tasks tasks(m, weight.n, MAX_ROWS, padded * sizeof(Operand), BLOCK_BYTES, threads);
    const int64_t quantizing = m * k < SERIAL_ELEMENTS ? 1 : threads;
    constexpr int at_once = ROWS_AT_ONCE<Operand>;
    const int64_t rotated_bytes = weight.rotation ? at_once * k * sizeof(float) : 0;
    tasks.for_rows<at_once>(quantizing, rotated_bytes, [&](auto count, int64_t tile, int64_t r, char* scratch) {
        const int64_t first = tasks.first_row(tile), row = first + r;
        quantize_rows<decltype(count)::value>(product, row, tasks.rows(tile), a + first * padded + r * STEP,
                                              row_scales + row, reinterpret_cast<float*>(scratch));
    });
    const Int8Product p(product, a, row_scales, OPERAND_SHIFT);
    tasks.run([&](int64_t tile, int64_t panel, int64_t end) {
        with_rows(tasks.rows(tile), [&](auto rows) {
            tiles<decltype(rows)::value>(p, tasks.first_row(tile), panel, end, tasks.turn(tile));
        });
    });
}

void pack_int8(const int8_t* src, int8_t* dst, int32_t* sums, int64_t n, int64_t k, int64_t threads) {
    const int64_t bytes = ceil_div(k, STEP) * PANEL_STEP;
    parallel_for(ceil_div(n, LANES), threads, 0, [&](int64_t panel, char*) {
        const int8_t* from = src + panel * LANES * k;
        const int64_t rows = min(LANES, n - panel * LANES);
        interleave<uint32_t>(reinterpret_cast<const char*>(from), k, rows,
                             reinterpret_cast<char*>(dst + panel * bytes));
        for (int64_t row = 0; row < LANES; ++row) {
            int32_t sum = 0;
            for (int64_t i = 0; row < rows && i < k; ++i) sum += from[row * k + i];
            sums[panel * LANES + row] = sum;
        }
    });
}

void unpack_int8(const Weight& weight, int8_t* dst, int64_t first, int64_t end, int64_t threads) {
    parallel_for(end - first, threads, 0, [&](int64_t index, char*) {
        const PanelRow row(weight, first + index);
        for (int64_t i = 0; i < weight.k; ++i) dst[index * weight.k + i] = row[i];
    });
}

}  // namespace llm

using namespace llm;

// x [m, k] -> q [m, k] and each row's scale.
LLM_EXPORT void llm_quantize_per_token(const float* x, int8_t* q, float* scale, int64_t m, int64_t k, int64_t threads) {
    parallel_for(m, m * k < SERIAL_ELEMENTS ? 1 : threads, 0, [&](int64_t row, char*) {
        scale[row] = row_scale(x + row * k, k);
        const Quantizer quantize(scale[row]);
        alignas(16) int8_t out[LANES];
        for (int64_t i = 0; i < k; i += LANES) {
            store_int8(out, quantize(load_part(x + row * k + i, k - i)));
            std::memcpy(q + row * k + i, out, min(k - i, LANES));
        }
    });
}

LLM_EXPORT void llm_quantize_static(const float* x, int8_t* q, float scale, int64_t offset, int64_t count,
                                    int64_t threads) {
    constexpr int64_t chunk = 1 << 12;
    parallel_for(ceil_div(count, chunk), threads, 0, [&](int64_t index, char*) {
        const int64_t end = min(count, (index + 1) * chunk);
        const Quantizer quantize(scale, offset);
        alignas(16) int8_t out[LANES];
        for (int64_t i = index * chunk; i < end; i += LANES) {
            store_int8(out, quantize(load_part(x + i, end - i)));
            std::memcpy(q + i, out, min(LANES, end - i));
        }
    });
}

LLM_KERNEL(llm_quantize_per_token)
LLM_KERNEL(llm_quantize_static)
