// Operations on a weight of any kind: GEMM, embedding, packing and unpacking.
#include "rotate.h"
#include "rows.h"
#include "weight.h"

namespace llm {
namespace {

auto product_with(const Weight& weight) {
    if (!has_scales(weight.kind)) return linear_float;
    if (weight.activations != Activations::INT8) return linear_weight_only;
    return weight.kind == Kind::INT8 || weight.levels ? linear_int8 : linear_int4;
}

// Whether its GEMM rotates inputs itself, row by row while it quantizes them.
bool rotates(const Weight& weight) { return product_with(weight) == linear_int8; }

// Nanoseconds that one thread needs for a GEMM of m batch rows: about what it computes or reads in one.
constexpr int64_t MULTIPLY_ADDS_PER_NS = 48, BYTES_PER_NS = 16;

int64_t nanoseconds(const Weight& weight, int64_t m) {
    const int64_t elements = weight.n * weight.k;
    return max(m * elements / MULTIPLY_ADDS_PER_NS, elements * bits_of(weight.kind) / 8 / BYTES_PER_NS);
}

}  // namespace

bool lacks_scales(const Weight& weight) { return has_scales(weight.kind) && !weight.scale; }

void linear(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads) {
    if (!is_worth_sharing(nanoseconds(weight, m))) threads = 1;
    if (!weight.columns && (!weight.rotation || rotates(weight))) return product_with(weight)(weight, x, y, m, threads);
    const Scratch changed(m * weight.k * sizeof(float));
    float* inputs = changed.as<float>();
    for_rows(m, weight.k, threads, [&](int64_t row) {
        const float* from = x + row * weight.k;
        float* to = inputs + row * weight.k;
        if (weight.rotation) return rotate_row(from, to, weight.k, weight.rotation);
        for (int64_t k = 0; k < weight.k; ++k) to[k] = from[weight.columns[k]];
    });
    product_with(weight)(weight, inputs, y, m, threads);
}

}  // namespace llm

using namespace llm;

// y [m, n] = x [m, k] W^T + bias. Returns 0; or 1, having computed nothing, for a weight that lacks its scales.
LLM_EXPORT int64_t llm_linear(const Weight* weight, const float* x, float* y, int64_t m, int64_t threads) {
    if (lacks_scales(*weight)) return 1;
    linear(*weight, x, y, m, threads);
    return 0;
}

// ids [count] -> y [count, k], of a weight that does not lack its scales. Returns 0; or 1, having read nothing, if
// an id is not in [0, n).
LLM_EXPORT int64_t llm_embedding(const Weight* weight, const int64_t* ids, float* y, int64_t count, int64_t threads) {
    if (first_outside(ids, count, weight->n) >= 0) return 1;
    const auto gather = has_scales(weight->kind) ? gather_scaled : gather_float;
    gather(*weight, ids, y, count, threads);
    if (weight->rotation)
        for_rows(count, weight->k, threads, [&](int64_t row) {
            rotate_row(y + row * weight->k, y + row * weight->k, weight->k, weight->rotation);
        });
    return 0;
}

// src [n, k] -> panels of `kind` in `dst`. INT8 and INT4 are passed as one int8 per value. `sums` [n, padded to
// panels]: of INT8 only.
LLM_EXPORT void llm_pack(Kind kind, const void* src, void* dst, int32_t* sums, int64_t n, int64_t k, int64_t threads) {
    const int8_t* integers = static_cast<const int8_t*>(src);
    if (kind == Kind::INT8) return pack_int8(integers, static_cast<int8_t*>(dst), sums, n, k, threads);
    if (kind == Kind::INT4) return pack_int4(integers, static_cast<uint8_t*>(dst), n, k, threads);
    if (kind == Kind::FLOAT8)
        return pack_float8(static_cast<const uint8_t*>(src), static_cast<uint8_t*>(dst), n, k, threads);
    pack_float(kind, src, dst, n, k, threads);
}

// Rows [first, end) of a packed weight, bit for bit.
LLM_EXPORT void llm_unpack(const Weight* weight, void* dst, int64_t first, int64_t end, int64_t threads) {
    int8_t* integers = static_cast<int8_t*>(dst);
    if (weight->kind == Kind::INT8) return unpack_int8(*weight, integers, first, end, threads);
    if (weight->kind == Kind::INT4) return unpack_int4(*weight, integers, first, end, threads);
    if (weight->kind == Kind::FLOAT8) return unpack_float8(*weight, static_cast<uint8_t*>(dst), first, end, threads);
    unpack_float(*weight, dst, first, end, threads);
}

// The fields of Weight in order, each as "type name", then null. Python compares them with its own declaration.
LLM_EXPORT const char* const* llm_weight_fields() {
#define LLM_DESCRIBED(TYPE, NAME) #TYPE " " #NAME,
    static constexpr const char* fields[] = {LLM_WEIGHT(LLM_DESCRIBED) nullptr};
#undef LLM_DESCRIBED
    return fields;
}

LLM_KERNEL(llm_linear)
LLM_KERNEL(llm_embedding)
LLM_KERNEL(llm_pack)
LLM_KERNEL(llm_unpack)
