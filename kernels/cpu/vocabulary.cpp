// Operations over the vocabulary: argmax, top-k, log-softmax, logprobs and ranks of given tokens, and top-p draws.
//
// A row of logits is read in order of token id; only what beats the best so far leaves the vectors. Selection is exact,
// so rows may be cut into chunks for the threads. A sum is over a whole row in fixed lanes (rows.h). Neither chunks nor
// threads change a bit.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "replay.h"
#include "rows.h"
#include "vector_math.h"

namespace llm {
namespace {

// Logits that are worth waking one more thread.
constexpr int64_t CHUNK = 1 << 15;

// Calls hit(i) for each i in [begin, end) with !(x[i] <= bound), in order, until it returns false. `hit` may raise
// `bound`.
template <class Hit>
LLM_INLINE void scan_above(const float* x, int64_t begin, int64_t end, const float& bound, const Hit& hit) {
    constexpr int64_t STEP = 4 * LANES;
    for (int64_t i = begin; i < end; i += STEP) {
        const F32 least = set1(bound);
        uint64_t bits = 0;
        LLM_UNROLL for (int c = 0; c < 4; ++c) {
            const int64_t left = end - i - c * LANES;
            if (left <= 0) break;
            bits |= static_cast<uint64_t>(not_at_most(load_part(x + i + c * LANES, left, -INFINITY), least))
                    << c * LANES;
        }
        for (; bits; bits &= bits - 1) {
            const int64_t at = i + __builtin_ctzll(bits);
            if (!(x[at] <= bound) && !hit(at)) return;
        }
    }
}

struct Best {
    float value;
    int64_t id;
};

// The first of the largest. The first NaN is larger than anything. All -inf: (-inf, begin).
Best best_of(const float* x, int64_t begin, int64_t end) {
    Best best{-INFINITY, begin};
    scan_above(x, begin, end, best.value, [&](int64_t i) {
        best = {x[i], i};
        return x[i] == x[i];
    });
    return best;
}

// A key that orders tokens: larger logit first, then lower id. -0 counts as 0, NaN as above inf.
LLM_INLINE uint64_t order_of(float value, int64_t id) {
    const uint32_t bits = float_to_bits(value + 0.0f);
    const uint32_t rank = value != value ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(rank) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
LLM_INLINE int64_t id_of(uint64_t order) { return 0xffffffffu - static_cast<uint32_t>(order); }

// The k largest of a row so far, among up to `capacity` tokens.
struct Largest {
    const float* x;
    uint64_t* held;
    int64_t k, capacity, count = 0;
    float bound = -INFINITY;  // a logit not above it is not among the k largest

    static int64_t capacity_for(int64_t k) { return 2 * k + 64; }

    LLM_INLINE bool add(int64_t id) {
        held[count++] = order_of(x[id], id);
        if (count == capacity) keep();
        return true;
    }
    void keep() {
        if (count < k) return;
        std::nth_element(held, held + k - 1, held + count, std::greater<uint64_t>());
        count = k;
        const float least = x[id_of(held[k - 1])];
        bound = least == least ? least : INFINITY;  // only another NaN is above a NaN
    }
    // Fills the room that is left with tokens of -inf, lowest ids first: scan_above never gives them.
    void fill(int64_t width) {
        for (int64_t id = 0; id < width && count < k; ++id)
            if (x[id] == -INFINITY) held[count++] = order_of(x[id], id);
    }
};

// Chunks that each row is cut into, so that every thread has work.
int64_t chunks_of(int64_t rows, int64_t width, int64_t threads) {
    const int64_t most = ceil_div(width, CHUNK);
    const int64_t wanted = rows >= 2 * threads ? 1 : 2 * threads / (rows < 1 ? 1 : rows);
    return max(1, min(most, wanted));
}

// Calls task(row, chunk, begin, end) for every chunk of every row.
template <class Task> void for_chunks(int64_t rows, int64_t width, int64_t chunks, int64_t threads, const Task& task) {
    if (chunks == 1)
        return for_rows(rows, width, threads, [&](int64_t row) { task(row, int64_t{0}, int64_t{0}, width); });
    parallel_for(rows * chunks, threads, 0, [&](int64_t index, char*) {
        const int64_t row = index / chunks, chunk = index % chunks;
        task(row, chunk, width * chunk / chunks, width * (chunk + 1) / chunks);
    });
}

// e^x for x <= 0; 0 below -87: masked tokens lie there, and denormal results are slow.
constexpr float LEAST = -87.0f;
LLM_INLINE F32 weight(F32 x) {
    const F32 least = set1(LEAST);
    return select_less(x, least, zero(), exp(max(least, x)));  // a NaN passes both
}

// What log-softmax subtracts from each logit of a row: the largest, then log(sum of e^(x - largest)).
struct Normaliser {
    F32 top, logarithm;

    static Normaliser none() { return {zero(), zero()}; }
    static Normaliser of(const float* x, int64_t width) {
        const F32 top = set1(best_of(x, 0, width).value);
        const float total = sum_vectors(width, [&](int64_t i) {
            return weight(load_part(x + i, width - i, -INFINITY) - top);
        });
        // One logarithm in double, rounded once: the same on every instruction set.
        return {top, set1(static_cast<float>(std::log(static_cast<double>(total))))};
    }
    LLM_INLINE F32 apply(F32 x) const { return x - top - logarithm; }
};

// For each of N values: how many logits of the row are at least as large.
template <int N>
void count_at_least(const float* x, int64_t width, const Normaliser& norm, const float* values, int64_t* counts) {
    int64_t found[N] = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t left = width - i;
        const F32 own = norm.apply(load_part(x + i, left));
        const uint32_t inside = left >= LANES ? 0xffffu : (1u << left) - 1;
        LLM_UNROLL for (int n = 0; n < N; ++n) found[n] += __builtin_popcount(at_least(own, set1(values[n])) & inside);
    }
    for (int n = 0; n < N; ++n) counts[n] = found[n];
}

// The sum of e^(x - top) over `count` logits.
LLM_INLINE float block_sum(const float* x, int64_t count, F32 top) {
    return sum_vectors(count, [&](int64_t i) { return weight(load_part(x + i, count - i, -INFINITY) - top); });
}

// Draws from the smallest set of likeliest tokens of a row whose probabilities reach top_p.
//
// Few tokens are looked at. Tokens below (1 - top_p) / width of the sum weigh less than 1 - top_p together, so none of
// them is needed. The others are the candidates; a histogram over their logits finds the cut, and only candidates
// around it are sorted. Sums are in double and in order of id, so neither instruction set, threads nor other rows
// change a draw.
class Nucleus {
    static constexpr float BINS = 64.0f;  // per unit of a logit
    static constexpr int64_t MOST_BINS = static_cast<int64_t>(-LEAST * BINS) + 128;
    static constexpr int64_t BLOCK = 512;
    static constexpr double SLACK = 1e-4;  // far above the rounding error of a row's sum

    double* bins_;     // [MOST_BINS] what the candidates of a bin weigh
    uint64_t* order_;  // [width] of the candidates around the cut
    float* weights_;   // [width] of the candidates, rounded up to whole vectors
    float* logits_;    // the same
    int32_t* ids_;     // [width]
    int64_t count_ = 0;

    static int64_t padded(int64_t width) { return ceil_div(width, LANES) * LANES; }
    // Every value has a bin that exists, even what must not occur: NaN, or a logit above the largest.
    static LLM_INLINE int64_t bin_of(float below) {
        const float bin = below * BINS;
        return bin < MOST_BINS - 1 ? static_cast<int64_t>(std::max(bin, 0.0f)) : MOST_BINS - 1;
    }

    void find_candidates(const float* x, int64_t width, float top, double lightest) {
        const double far = lightest > 0 ? std::max<double>(LEAST - 1.0f, std::log(lightest) - 1e-3) : LEAST - 1.0f;
        const float bound = std::nextafterf(static_cast<float>(top + far), -INFINITY);
        scan_above(x, 0, width, bound, [&](int64_t i) {
            logits_[count_] = x[i];
            ids_[count_++] = static_cast<int32_t>(i);
            return true;
        });
        for (int64_t i = 0; i < count_; i += LANES) store(weights_ + i, weight(load(logits_ + i) - set1(top)));
    }

    // The last token, in order of likelihood, before which the others weigh less than `enough`.
    uint64_t edge(float top, double enough) {
        std::fill(bins_, bins_ + MOST_BINS, 0.0);
        for (int64_t i = 0; i < count_; ++i) bins_[bin_of(top - logits_[i])] += weights_[i];
        int64_t cut = 0;
        double before = 0.0, sum = 0.0;
        for (int64_t bin = 0; bin < MOST_BINS && sum < enough; ++bin) {
            if (!(bins_[bin] > 0.0)) continue;
            cut = bin;
            before = sum;
            sum += bins_[bin];
        }
        int64_t around = 0;
        for (int64_t i = 0; i < count_; ++i)
            if (weights_[i] > 0.0f && bin_of(top - logits_[i]) == cut) order_[around++] = order_of(logits_[i], ids_[i]);
        std::sort(order_, order_ + around, std::greater<uint64_t>());
        int64_t last = 0;
        for (int64_t i = 0; i < around && (i == 0 || before < enough); ++i) {
            last = i;
            before += weight_of(order_[i]);
        }
        return order_[last];
    }
    // Candidates stand in order of id.
    LLM_INLINE float weight_of(uint64_t order) const {
        return weights_[std::lower_bound(ids_, ids_ + count_, static_cast<int32_t>(id_of(order))) - ids_];
    }

  public:
    static int64_t scratch_bytes(int64_t width) { return MOST_BINS * 8 + padded(width) * (8 + 4 + 4 + 4); }
    Nucleus(char* scratch, int64_t width)
        : bins_(reinterpret_cast<double*>(scratch)), order_(reinterpret_cast<uint64_t*>(bins_ + MOST_BINS)),
          weights_(reinterpret_cast<float*>(order_ + padded(width))), logits_(weights_ + padded(width)),
          ids_(reinterpret_cast<int32_t*>(logits_ + padded(width))) {}

    // The token at `uniform` of the set's weight, in order of id; and the set's last token in order of likelihood.
    void draw(const float* x, int64_t width, float top, double top_p, double uniform, int64_t* token, int64_t* last) {
        double sum = 0.0;
        for (int64_t i = 0; i < width; i += BLOCK) sum += block_sum(x + i, min(BLOCK, width - i), set1(top));
        find_candidates(x, width, top, (1.0 - top_p) * (1.0 - SLACK) * sum / static_cast<double>(width));
        const uint64_t least = edge(top, top_p * sum);
        // The set moves to the front: candidates at or above `least` in the order of likelihood.
        int64_t kept = 0;
        double mass = 0.0;
        for (int64_t i = 0; i < count_; ++i) {
            if (order_of(logits_[i], ids_[i]) < least) continue;
            mass += weights_[i];
            weights_[kept] = weights_[i];
            ids_[kept++] = ids_[i];
        }
        const double target = uniform * mass;
        double reached = 0.0;
        int64_t i = 0;
        for (; i < kept - 1; ++i)  // rounding can put the target at the end
            if ((reached += weights_[i]) > target) break;
        *token = ids_[i];
        *last = id_of(least);
    }
};

}  // namespace
}  // namespace llm

using namespace llm;

LLM_EXPORT void llm_log_softmax(const float* x, float* out, int64_t rows, int64_t width, int64_t threads) {
    for_rows(rows, width, threads, [&](int64_t row) {
        const float* from = x + row * width;
        float* to = out + row * width;
        const Normaliser norm = Normaliser::of(from, width);
        for (int64_t i = 0; i < width; i += LANES)
            store_part(to + i, norm.apply(load_part(from + i, width - i)), width - i);
    });
}

// x [rows][width] -> the first largest of each row: values and ids [rows]; NaN counts as largest. width >= 1.
LLM_EXPORT void llm_argmax(const float* x, float* values, int64_t* ids, int64_t rows, int64_t width, int64_t threads) {
    const int64_t chunks = chunks_of(rows, width, threads);
    const Scratch scratch(rows * chunks * static_cast<int64_t>(sizeof(Best)));
    Best* parts = scratch.as<Best>();
    for_chunks(rows, width, chunks, threads, [&](int64_t row, int64_t chunk, int64_t begin, int64_t end) {
        parts[row * chunks + chunk] = best_of(x + row * width, begin, end);
    });
    for (int64_t row = 0; row < rows; ++row) {
        Best best = parts[row * chunks];
        for (int64_t chunk = 1; chunk < chunks && best.value == best.value; ++chunk) {
            const Best next = parts[row * chunks + chunk];
            if (!(next.value <= best.value)) best = next;
        }
        values[row] = best.value;
        ids[row] = best.id;
    }
}

// x [rows][width] -> the k largest of each row, falling, ties by id: values and ids [rows][k]. 1 <= k <= width < 2^32.
LLM_EXPORT void llm_top_k(const float* x, int64_t k, float* values, int64_t* ids, int64_t rows, int64_t width,
                          int64_t threads) {
    const int64_t chunks = chunks_of(rows, width, threads), capacity = Largest::capacity_for(k);
    const Scratch scratch(rows * chunks * capacity * 8), sizes(rows * chunks * 8);
    uint64_t* parts = scratch.as<uint64_t>();
    int64_t* counts = sizes.as<int64_t>();
    for_chunks(rows, width, chunks, threads, [&](int64_t row, int64_t chunk, int64_t begin, int64_t end) {
        const int64_t part = row * chunks + chunk;
        Largest largest{x + row * width, parts + part * capacity, k, capacity};
        scan_above(largest.x, begin, end, largest.bound, [&](int64_t i) { return largest.add(i); });
        largest.keep();
        counts[part] = largest.count;
    });
    for_rows(rows, chunks * capacity, threads, [&](int64_t row) {
        Largest largest{x + row * width, parts + row * chunks * capacity, k, capacity, counts[row * chunks]};
        for (int64_t part = row * chunks + 1; part < (row + 1) * chunks; ++part)
            for (int64_t i = 0; i < counts[part]; ++i) largest.add(id_of(parts[part * capacity + i]));
        largest.keep();
        largest.fill(width);
        std::sort(largest.held, largest.held + k, std::greater<uint64_t>());
        for (int64_t i = 0; i < k; ++i) {
            ids[row * k + i] = id_of(largest.held[i]);
            values[row * k + i] = largest.x[ids[row * k + i]];
        }
    });
}

// Values of ids [rows][count] in x [rows][width] or, with `normalise`, in its log-softmax; for the first `ranked` ids
// also how many logits of the row are at least as large, [rows][ranked]. Returns false, having done nothing, if an id
// is not in [0, width).
LLM_EXPORT int64_t llm_gather_logprobs(const float* x, const int64_t* ids, int64_t count, int64_t ranked,
                                       int64_t normalise, float* values, int64_t* ranks, int64_t rows, int64_t width,
                                       int64_t threads) {
    for (int64_t i = 0; i < rows * count; ++i)
        if (ids[i] < 0 || ids[i] >= width) return 0;
    for_rows(rows, width, threads, [&](int64_t row) {
        const float* own = x + row * width;
        const Normaliser norm = normalise ? Normaliser::of(own, width) : Normaliser::none();
        float* found = values + row * count;
        int64_t* places = ranks + row * ranked;
        for (int64_t i = 0; i < count; ++i) store_part(found + i, norm.apply(set1(own[ids[row * count + i]])), 1);
        int64_t i = 0;
        for (; i + 8 <= ranked; i += 8) count_at_least<8>(own, width, norm, found + i, places + i);
        for (; i < ranked; ++i) count_at_least<1>(own, width, norm, found + i, places + i);
    });
    return 1;
}

// sums [rows][ceil(width / block)] of e^(x - largest) over blocks of each row; largest [rows]. block: a multiple of 16.
LLM_EXPORT void llm_block_sums(const float* x, const float* largest, int64_t block, float* sums, int64_t rows,
                               int64_t width, int64_t threads) {
    const int64_t blocks = ceil_div(width, block);
    for_rows(rows * blocks, block, threads, [&](int64_t index) {
        const int64_t row = index / blocks, begin = index % blocks * block, count = min(block, width - begin);
        sums[index] = block_sum(x + row * width + begin, count, set1(largest[row]));
    });
}

// Draws one token per row from the smallest set of likeliest tokens that reaches top_p [rows], at uniform [rows] in [0,
// 1) of the set's weight. Writes it to tokens [rows], and to last [rows] the set's last token (falling, ties by id).
// Rows hold no inf or NaN; their largest [rows] is above -inf.
LLM_EXPORT void llm_draw_nucleus(const float* x, const float* largest, const double* top_p, const double* uniform,
                                 int64_t* tokens, int64_t* last, int64_t rows, int64_t width, int64_t threads) {
    parallel_for(rows, threads, Nucleus::scratch_bytes(width), [&](int64_t row, char* scratch) {
        Nucleus(scratch, width)
            .draw(x + row * width, width, largest[row], top_p[row], uniform[row], tokens + row, last + row);
    });
}

// In place: -inf for logits below the row's largest + offset [rows].
LLM_EXPORT void llm_cut_below_largest(float* x, const float* offset, int64_t rows, int64_t width, int64_t threads) {
    for_rows(rows, width, threads, [&](int64_t row) {
        if (offset[row] == -INFINITY) return;
        float* own = x + row * width;
        const F32 bound = set1(best_of(own, 0, width).value + offset[row]), barred = set1(-INFINITY);
        for (int64_t i = 0; i < width; i += LANES) {
            const F32 value = load_part(own + i, width - i);
            store_part(own + i, select_less(value, bound, barred, value), width - i);
        }
    });
}

// In place: each row over its divisor [rows].
LLM_EXPORT void llm_divide_rows(float* x, const float* divisor, int64_t rows, int64_t width, int64_t threads) {
    for_rows(rows, width, threads, [&](int64_t row) {
        if (divisor[row] == 1.0f) return;
        float* own = x + row * width;
        const F32 by = set1(divisor[row]);
        for (int64_t i = 0; i < width; i += LANES) store_part(own + i, load_part(own + i, width - i) / by, width - i);
    });
}

LLM_KERNEL(llm_log_softmax)
LLM_KERNEL(llm_argmax)
LLM_KERNEL(llm_top_k)
LLM_KERNEL(llm_gather_logprobs)
LLM_KERNEL(llm_block_sums)
LLM_KERNEL(llm_draw_nucleus)
LLM_KERNEL(llm_cut_below_largest)
LLM_KERNEL(llm_divide_rows)
