// Rounds blocks of rotated columns so that what rounding did to some of them is made up for in the columns after them:
// `_round_with_compensation` of kernels/reference/quantize_weight.py, for sixteen rows side by side.
//
// The inverse of the inputs' moments is H diag(spectrum) H here, whose halves of a block commute. So errors of the
// first half go to the second by a rotation, a factor for each column and a rotation back, and each half is such a
// block again.
#pragma once

#include "group_rules.h"

namespace llm {
namespace {

// Factors of a block of `size` columns: those of its halves follow its own.
constexpr int64_t shares_in(int64_t size) { return size <= 1 ? 0 : size / 2 + 2 * shares_in(size / 2); }

// `room` is [2 * size].
inline void find_shares(const float* spectrum, int64_t size, float* shares, float* room) {
    const int64_t half = size / 2;
    if (half == 0) return;
    for (int64_t i = 0; i < half; ++i) {
        const float low = spectrum[i], high = spectrum[half + i], mean = 0.5f * (low + high);
        shares[i] = (low - high) / mean / static_cast<float>(size);
        room[i] = mean, room[half + i] = low / mean * high;
    }
    find_shares(room, half, shares + half, room + size);
    find_shares(room + half, half, shares + half + shares_in(half), room + size);
}

// Columns that fit in registers.
#if LLM_AVX512
constexpr int IN_REGISTERS = 16;
#else
constexpr int IN_REGISTERS = 8;
#endif

// H diag(shares) H x, where H gives sums in the first half of `SIZE` columns, differences in the second, and so on in
// each half; backwards from the smallest.
template <int SIZE> LLM_INLINE void spread(F32* x, const float* shares) {
    LLM_UNROLL for (int stride = SIZE / 2; stride > 0; stride /= 2) LLM_UNROLL for (int i = 0; i < SIZE; ++i) {
        if (i & stride) continue;
        const F32 a = x[i], b = x[i + stride];
        x[i] = a + b, x[i + stride] = a - b;
    }
    LLM_UNROLL for (int i = 0; i < SIZE; ++i) x[i] = x[i] * set1(shares[i]);
    LLM_UNROLL for (int stride = 1; stride < SIZE; stride *= 2) LLM_UNROLL for (int i = 0; i < SIZE; ++i) {
        if (i & stride) continue;
        const F32 a = x[i], b = x[i + stride];
        x[i] = a + b, x[i + stride] = a - b;
    }
}
template <int SIZE> void spread_columns(float* x, const float* shares) {
    if constexpr (SIZE <= IN_REGISTERS) {
        F32 columns[SIZE];
        LLM_UNROLL for (int i = 0; i < SIZE; ++i) columns[i] = load(x + i * LANES);
        spread<SIZE>(columns, shares);
        LLM_UNROLL for (int i = 0; i < SIZE; ++i) store(x + i * LANES, columns[i]);
    } else {
        constexpr int half = SIZE / 2;
        float* second = x + half * LANES;
        const auto sums_and_differences = [=] {
            for (int i = 0; i < half * LANES; i += LANES) {
                const F32 a = load(x + i), b = load(second + i);
                store(x + i, a + b), store(second + i, a - b);
            }
        };
        sums_and_differences();
        spread_columns<half>(x, shares), spread_columns<half>(second, shares + half);
        sums_and_differences();
    }
}

// One block of two tiles of sixteen rows, which are divided by their scales, on two levels of scales. Each column waits
// for the one before it, so the tiles are rounded side by side.
struct CompensatedBlock {
    static constexpr int TILES = 2;
    static constexpr int LEAST = 8;  // columns that are in registers, and of which groups have a multiple

    int64_t block, group_size;
    float *x, *codes, *values;  // [TILES][block][16]: codes as `Weight` has them, and what they stand for

    // Calls found(tile, column, level) for each group.
    template <class Found> void round(const float* shares, const Found& found) {
        switch (block) {
            case 16: return columns<16>(0, shares, found);
            case 32: return columns<32>(0, shares, found);
            case 64: return columns<64>(0, shares, found);
            case 128: return columns<128>(0, shares, found);
            default: return columns<256>(0, shares, found);
        }
    }

    WholeSteps::Grid grids[TILES] = {{set1(1.0f), zero()}, {set1(1.0f), zero()}};  // of the group that is rounded
    using Few = F32[TILES][LEAST];

    template <int SIZE, class Found> void columns(int64_t first, const float* shares, const Found& found) {
        if (SIZE == group_size)
            for (int tile = 0; tile < TILES; ++tile) {
                const int64_t at = (tile * block + first) * LANES;
                const WholeSteps::Level level = WholeSteps()({x + at, SIZE}, {codes + at});
                grids[tile] = WholeSteps::Grid(level.step, level.place);
                found(tile, first, level);
            }
        if constexpr (SIZE == LEAST) {
            Few in, out;
            LLM_UNROLL for (int i = 0; i < TILES * SIZE; ++i)
                in[i / SIZE][i % SIZE] = load(x + (i / SIZE * block + first + i % SIZE) * LANES);
            few<SIZE, 0>(in, out, codes + first * LANES, shares);
            LLM_UNROLL for (int i = 0; i < TILES * SIZE; ++i)
                store(values + (i / SIZE * block + first + i % SIZE) * LANES, out[i / SIZE][i % SIZE]);
        } else {
            constexpr int half = SIZE / 2;
            alignas(64) float error[TILES][half * LANES];
            for (int tile = 0; tile < TILES; ++tile)
                std::memcpy(error[tile], x + (tile * block + first) * LANES, sizeof error[tile]);
            columns<half>(first, shares + half, found);
            for (int tile = 0; tile < TILES; ++tile) {
                float *own = error[tile], *second = x + (tile * block + first + half) * LANES;
                const float* rounded = values + (tile * block + first) * LANES;
                if constexpr (half <= IN_REGISTERS) {
                    F32 moved[half];
                    LLM_UNROLL for (int i = 0; i < half; ++i)
                        moved[i] = load(own + i * LANES) - load(rounded + i * LANES);
                    spread<half>(moved, shares);
                    LLM_UNROLL for (int i = 0; i < half; ++i)
                        store(second + i * LANES, load(second + i * LANES) - moved[i]);
                } else {
                    for (int i = 0; i < half * LANES; i += LANES) store(own + i, load(own + i) - load(rounded + i));
                    spread_columns<half>(own, shares);
                    for (int i = 0; i < half * LANES; i += LANES) store(second + i, load(second + i) - load(own + i));
                }
            }
            columns<half>(first + half, shares + half + shares_in(half), found);
        }
    }
    // `SIZE` columns of each tile from column `FIRST` of those in registers on.
    template <int SIZE, int FIRST> LLM_INLINE void few(Few& in, Few& out, float* to, const float* shares) const {
        if constexpr (SIZE == 1) {
            LLM_UNROLL for (int tile = 0; tile < TILES; ++tile) {
                const WholeSteps::Grid& grid = grids[tile];
                const F32 code = grid.code(in[tile][FIRST] + grid.shift);
                store(to + (tile * block + FIRST) * LANES, code - set1(8.0f));
                out[tile][FIRST] = code * grid.step - grid.shift;
            }
        } else {
            constexpr int half = SIZE / 2;
            F32 error[TILES][half];
            LLM_UNROLL for (int i = 0; i < TILES * half; ++i)
                error[i / half][i % half] = in[i / half][FIRST + i % half];
            few<half, FIRST>(in, out, to, shares + half);
            LLM_UNROLL for (int tile = 0; tile < TILES; ++tile) {
                LLM_UNROLL for (int i = 0; i < half; ++i) error[tile][i] = error[tile][i] - out[tile][FIRST + i];
                spread<half>(error[tile], shares);
                LLM_UNROLL for (int i = 0; i < half; ++i)
                    in[tile][FIRST + half + i] = in[tile][FIRST + half + i] - error[tile][i];
            }
            few<half, FIRST + half>(in, out, to, shares + half + shares_in(half));
        }
    }
};

}  // namespace
}  // namespace llm
