// Where the rows come from that a product multiplies: as they lie in memory, or computed as they are read, by the norm or the
// activation before the product, into memory of the thread that makes operands of them.
//
// A row has one function (norm.cpp, activation.cpp), whoever asks: computed by a product it has the bits that it has alone.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace llm {

// A norm of a row, or of the sum of two: RMS over the first `variance_size` channels (0: all), or layer norm. The weight and the bias
// (null: none) are of one type of rows.h; `weight_offset` is added to the weight (Gemma stores weight - 1).
struct Norm {
    int64_t layer, parameter_kind;
    const void *weight, *bias;
    int64_t variance_size;
    float weight_offset, eps;
};

// norm.cpp. `residual`, when it is not null, is added to x first and the sum written to `total`.
void norm_row(const Norm& norm, const float* x, const float* residual, float* total, float* out, int64_t width);
// activation.cpp: out[i] = activate(gate[i]) * up[i]; without `up` only the first factor.
void activation_row(int64_t function, const float* gate, const float* up, float* out, int64_t width);

// What does not change from call to call; rows.py has the same fields.
struct RowOperation {
    enum Form : int64_t { NORM = 0, ACTIVATION = 1, GATE_FIRST = 2, GATE_SECOND = 3 };
    int64_t form;
    int64_t function;  // of the activation
    Norm norm;
};

// The rows [k] of a product. `operation`: null, or what computes them from the rows of x, which of a gated activation are
// [2 k]; a norm adds `residual` (null: none) and writes the sum to `total`. Each row is to be asked for once.
struct RowSource {
    const RowOperation* operation;
    const float *x, *residual;
    float* total;
    int64_t k;

    int64_t scratch_bytes() const { return operation ? k * static_cast<int64_t>(sizeof(float)) : 0; }
    // In x, or in `scratch` of so many bytes.
    const float* row(int64_t index, char* scratch) const { return operation ? compute(index, reinterpret_cast<float*>(scratch)) : x + index * k; }

  private:
    const float* compute(int64_t index, float* out) const {
        const int64_t at = index * k;
        switch (operation->form) {
            case RowOperation::NORM:
                norm_row(operation->norm, x + at, residual ? residual + at : nullptr, residual ? total + at : nullptr, out, k);
                break;
            case RowOperation::ACTIVATION: activation_row(operation->function, x + at, nullptr, out, k); break;
            case RowOperation::GATE_FIRST: activation_row(operation->function, x + 2 * at, x + 2 * at + k, out, k); break;
            default: activation_row(operation->function, x + 2 * at + k, x + 2 * at, out, k);
        }
        return out;
    }
};

// The rows of `x`; where too few tasks to share out evenly will read them, computed by all threads beforehand.
class SharedRows {
    Scratch memory_;
    RowSource rows_;

  public:
    SharedRows(const RowSource& x, int64_t m, int64_t tasks, int64_t threads)
        : memory_(threads > 1 && tasks < 2 * threads ? m * x.scratch_bytes() : 0), rows_(x) {
        float* to = memory_.as<float>();
        if (!to) return;
        parallel_for(m, threads, 0, [&](int64_t row, char*) { x.row(row, reinterpret_cast<char*>(to + row * x.k)); });
        rows_ = {nullptr, to, nullptr, nullptr, x.k};
    }
    const RowSource* operator->() const { return &rows_; }
};

}  // namespace llm
