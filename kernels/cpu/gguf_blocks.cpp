// Decodes the blocks of GGUF tensors into integers, scales and minima, while they are loaded.
//
// kernels/reference/gguf_blocks.py defines each type; products are of a float16 with a small integer, and exact. Bytes
// are taken apart in loops of constant length without branches, which compilers turn into vector instructions.
#include "kinds.h"

namespace llm {
namespace {

constexpr int64_t MOST_GROUPS = 16;
// Values that are worth a task, and sharing at all.
constexpr int64_t TASK_VALUES = 1 << 15, SHARED_VALUES = 1 << 17;

// The groups of a block; a minimum only where the type has it.
struct Groups { float scale[MOST_GROUPS], minimum[MOST_GROUPS]; };

LLM_INLINE float half_at(const uint8_t* p) {
    F16 half;
    std::memcpy(&half.bits, p, 2);
    return widen(half);
}

// Low nibbles of COUNT bytes, then their high ones, less ZERO.
template <int COUNT, int ZERO> LLM_INLINE void nibbles(const uint8_t* raw, int8_t* q) {
    for (int i = 0; i < COUNT; ++i) {
        q[i] = static_cast<int8_t>((raw[i] & 15) - ZERO);
        q[i + COUNT] = static_cast<int8_t>((raw[i] >> 4) - ZERO);
    }
}

// PARTS times the lowest WIDTH bits of COUNT bytes, then the next, ..., as long as they fill `8 / WIDTH` or fewer
// parts.
template <int COUNT, int WIDTH, int PARTS> LLM_INLINE void bits(const uint8_t* raw, int8_t* q) {
    for (int part = 0; part < PARTS; ++part)
        for (int i = 0; i < COUNT; ++i)
            q[part * COUNT + i] = static_cast<int8_t>(raw[i] >> (WIDTH * part) & ((1 << WIDTH) - 1));
}

// q | high << SHIFT, less ZERO.
template <int COUNT, int SHIFT, int ZERO> LLM_INLINE void join(int8_t* q, const int8_t* high) {
    for (int i = 0; i < COUNT; ++i) q[i] = static_cast<int8_t>((q[i] | high[i] << SHIFT) - ZERO);
}

// Bit i of four bytes is the fifth of value i.
template <int ZERO> LLM_INLINE void fifth_bits(const uint8_t* raw, int8_t* q) {
    int8_t high[32];
    for (int i = 0; i < 32; ++i) high[i] = static_cast<int8_t>(raw[i / 8] >> (i % 8) & 1);
    join<32, 4, ZERO>(q, high);
}

// Eight scales and eight minima of six bits in twelve bytes.
LLM_INLINE void six_bit_pairs(const uint8_t* raw, Groups& groups) {
    const float d = half_at(raw), least = half_at(raw + 2);
    const uint8_t *first = raw + 4, *second = raw + 8, *third = raw + 12;
    for (int i = 0; i < 4; ++i) {
        groups.scale[i] = d * static_cast<float>(first[i] & 63);
        groups.scale[i + 4] = d * static_cast<float>((third[i] & 15) | first[i] >> 6 << 4);
        groups.minimum[i] = least * static_cast<float>(second[i] & 63);
        groups.minimum[i + 4] = least * static_cast<float>(third[i] >> 4 | second[i] >> 6 << 4);
    }
}

template <int V, int B, int G, bool HAS> struct Layout {
    static constexpr int VALUES = V, BYTES = B, GROUP = G;
    static constexpr bool HAS_MINIMUM = HAS;
};

struct Q8_0 : Layout<32, 34, 32, false> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        std::memcpy(q, raw + 2, 32);
        groups.scale[0] = half_at(raw);
    }
};

// IQ4_NL too, whose codes stand for other numbers.
struct Q4_0 : Layout<32, 18, 32, false> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        nibbles<16, 8>(raw + 2, q);
        groups.scale[0] = half_at(raw);
    }
};

struct Q4_1 : Layout<32, 20, 32, true> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        nibbles<16, 0>(raw + 4, q);
        groups.scale[0] = half_at(raw), groups.minimum[0] = -half_at(raw + 2);
    }
};

struct Q5_0 : Layout<32, 22, 32, false> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        nibbles<16, 0>(raw + 6, q);
        fifth_bits<16>(raw + 2, q);
        groups.scale[0] = half_at(raw);
    }
};

struct Q5_1 : Layout<32, 24, 32, true> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        nibbles<16, 0>(raw + 8, q);
        fifth_bits<0>(raw + 4, q);
        groups.scale[0] = half_at(raw), groups.minimum[0] = -half_at(raw + 2);
    }
};

struct Q2_K : Layout<256, 84, 16, true> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        const float d = half_at(raw + 80), least = half_at(raw + 82);
        for (int i = 0; i < 16; ++i) {
            groups.scale[i] = d * static_cast<float>(raw[i] & 15);
            groups.minimum[i] = least * static_cast<float>(raw[i] >> 4);
        }
        for (int half = 0; half < 2; ++half) bits<32, 2, 4>(raw + 16 + 32 * half, q + 128 * half);
    }
};

struct Q3_K : Layout<256, 110, 16, false> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        int8_t high[256], scales[16], upper[16];
        for (int half = 0; half < 2; ++half) bits<32, 2, 4>(raw + 32 + 32 * half, q + 128 * half);
        bits<32, 1, 8>(raw, high);
        join<256, 2, 4>(q, high);
        nibbles<8, 0>(raw + 96, scales);
        bits<4, 2, 4>(raw + 104, upper);
        join<16, 4, 32>(scales, upper);
        const float d = half_at(raw + 108);
        for (int i = 0; i < 16; ++i) groups.scale[i] = d * static_cast<float>(scales[i]);
    }
};

struct Q4_K : Layout<256, 144, 32, true> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        six_bit_pairs(raw, groups);
        for (int part = 0; part < 4; ++part) nibbles<32, 0>(raw + 16 + 32 * part, q + 64 * part);
    }
};

struct Q5_K : Layout<256, 176, 32, true> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        int8_t high[256];
        six_bit_pairs(raw, groups);
        for (int part = 0; part < 4; ++part) nibbles<32, 0>(raw + 48 + 32 * part, q + 64 * part);
        bits<32, 1, 8>(raw + 16, high);
        join<256, 4, 0>(q, high);
    }
};

struct Q6_K : Layout<256, 210, 16, false> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        int8_t high[256];
        for (int half = 0; half < 2; ++half) {
            nibbles<64, 0>(raw + 64 * half, q + 128 * half);
            bits<32, 2, 4>(raw + 128 + 32 * half, high + 128 * half);
        }
        join<256, 4, 32>(q, high);
        const float d = half_at(raw + 208);
        for (int i = 0; i < 16; ++i) groups.scale[i] = d * static_cast<float>(static_cast<int8_t>(raw[192 + i]));
    }
};

struct IQ4_XS : Layout<256, 136, 32, false> {
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        const float d = half_at(raw);
        for (int i = 0; i < 8; ++i) {
            const int low = raw[4 + i / 2] >> (4 * (i % 2)) & 15, high = raw[2 + i / 4] >> (2 * (i % 4)) & 3;
            groups.scale[i] = d * static_cast<float>((low | high << 4) - 32);
        }
        for (int part = 0; part < 8; ++part) nibbles<16, 8>(raw + 8 + 16 * part, q + 32 * part);
    }
};

struct MXFP4 : Layout<32, 17, 32, false> {
    // The scale is 2 ** (byte - 127), halved; denormal below 2 ** -126.
    static LLM_INLINE void decode(const uint8_t* raw, int8_t* q, Groups& groups) {
        nibbles<16, 8>(raw + 1, q);
        const uint32_t exponent = raw[0];
        groups.scale[0] = bits_to_float(exponent >= 2 ? (exponent - 1) << 23 : 0x200000u << exponent);
    }
};

struct Job {
    const uint8_t* raw;
    int8_t* q;
    float *scale, *minimum;
    const int8_t* table;
    int64_t n, k, group_size, least, threads;
};

// Of a type without minima in a layer that has them: codes from 0 on stand for the same values.
template <class T> LLM_INLINE bool write_groups(const Job& job, const Groups& groups, int64_t at) {
    const int64_t repeats = T::GROUP / job.group_size;
    bool finite = true;
    for (int64_t group = 0; group < T::VALUES / T::GROUP; ++group) {
        const float scale = groups.scale[group];
        const float minimum = T::HAS_MINIMUM ? groups.minimum[group] : scale * static_cast<float>(job.least);
        finite &= std::isfinite(scale) && (!T::HAS_MINIMUM || std::isfinite(minimum));
        for (int64_t i = 0; i < repeats; ++i) {
            job.scale[at + group * repeats + i] = scale;
            if (job.minimum) job.minimum[at + group * repeats + i] = minimum;
        }
    }
    return finite;
}

template <class T> bool decode_row(const Job& job, int64_t row) {
    const int64_t blocks = job.k / T::VALUES;
    const uint8_t* raw = job.raw + row * blocks * T::BYTES;
    bool finite = true;
    for (int64_t block = 0; block < blocks; ++block) {
        Groups groups;
        int8_t* q = job.q + row * job.k + block * T::VALUES;
        T::decode(raw + block * T::BYTES, q, groups);
        if (T::HAS_MINIMUM)
            for (int i = 0; i < T::VALUES; ++i) q[i] = static_cast<int8_t>(q[i] - job.least);
        if (job.table)
            for (int i = 0; i < T::VALUES; ++i) q[i] = job.table[q[i] + 8];
        finite &= write_groups<T>(job, groups, (row * job.k + block * T::VALUES) / job.group_size);
    }
    return finite;
}

template <class T> int64_t decode_rows(const Job& job) {
    const int64_t at_once = max(1, TASK_VALUES / job.k), threads = job.n * job.k < SHARED_VALUES ? 1 : job.threads;
    std::atomic<int64_t> refused{0};
    parallel_for(ceil_div(job.n, at_once), threads, 0, [&](int64_t task, char*) {
        for (int64_t row = task * at_once; row < min((task + 1) * at_once, job.n); ++row)
            if (!decode_row<T>(job, row)) refused.store(1, std::memory_order_relaxed);
    });
    return refused.load();
}

}  // namespace
}  // namespace llm

using namespace llm;

// raw [n, bytes of a row] -> q [n, k], scale and minimum [n, k / group_size]. `minimum` null: the type has none. Codes
// of a type with minima are counted from -least. `table` [16]: numbers in the place of codes. Returns 1 for a scale
// that is not finite.
LLM_EXPORT int64_t llm_decode_blocks(BlockType kind, const uint8_t* raw, int8_t* q, float* scale, float* minimum,
                                     const int8_t* table, int64_t n, int64_t k, int64_t group_size, int64_t least,
                                     int64_t threads) {
    const Job job{raw, q, scale, minimum, table, n, k, group_size, least, threads};
    switch (kind) {
        case BlockType::Q8_0: return decode_rows<Q8_0>(job);
        case BlockType::Q4_1: return decode_rows<Q4_1>(job);
        case BlockType::Q5_0: return decode_rows<Q5_0>(job);
        case BlockType::Q5_1: return decode_rows<Q5_1>(job);
        case BlockType::Q2_K: return decode_rows<Q2_K>(job);
        case BlockType::Q3_K: return decode_rows<Q3_K>(job);
        case BlockType::Q4_K: return decode_rows<Q4_K>(job);
        case BlockType::Q5_K: return decode_rows<Q5_K>(job);
        case BlockType::Q6_K: return decode_rows<Q6_K>(job);
        case BlockType::IQ4_XS: return decode_rows<IQ4_XS>(job);
        case BlockType::MXFP4: return decode_rows<MXFP4>(job);
        default: return decode_rows<Q4_0>(job);
    }
}

LLM_KERNEL(llm_decode_blocks)
