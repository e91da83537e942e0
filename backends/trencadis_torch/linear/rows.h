// What happens to one row between two products: norms, activations, rotations, multipliers. None is inlined (see linear.h).

#pragma once

#include "linear.h"

namespace {

// exp of what is at most 87 and at least -87; relative error below 2e-7. Source: Cephes, expf.
Floats exp_of(Floats x) {
    x = x > 87.0f ? Floats{} + 87.0f : x;
    x = x < -87.0f ? Floats{} - 87.0f : x;
    constexpr float INTEGERS = 12582912.0f;
    const Floats n = x * 1.44269504088896341f + INTEGERS - INTEGERS;
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = Floats{} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    Floats two;
    std::memcpy(&two, &power, sizeof two);
    return y * two;
}

// erf; absolute error below 2e-7. Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
Floats erf_of(Floats x) {
    const Floats magnitude = x < 0.0f ? -x : x;
    const Floats t = 1.0f / (1.0f + 0.3275911f * magnitude);
    Floats y = Floats{} + 1.061405429f;
    y = y * t - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    const Floats value = 1.0f - y * t * exp_of(-magnitude * magnitude);
    return x < 0.0f ? -value : value;
}

enum Activation : int64_t { SILU, GELU_TANH, GELU, RELU_SQUARED, RELU };

// silu is x * sigmoid(x); gelu is x / 2 * (1 + erf(x / sqrt(2))), or by tanh x * sigmoid(2 u), which is x / 2 * (1 + tanh(u)).
// Source: arXiv:1606.08415, section 2; relu squared: arXiv:2109.08668, section 3.
Floats activated(Floats x, int64_t kind) {
    if (kind == GELU) return 0.5f * x * (1.0f + erf_of(x * 0.70710678118654752f));
    if (kind >= RELU_SQUARED) {
        const Floats positive = x < 0.0f ? Floats{} : x;  // what is no number stays none
        return kind == RELU ? positive : positive * positive;
    }
    Floats u = x;
    if (kind == GELU_TANH) u = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_of(-u));
}

// From gates and values to activation(gate) * value.
ALONE void gate_row(const float* gates, const float* values, int64_t size, int64_t kind, float* out) {
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) store(out + k, activated(load(gates + k), kind) * load(values + k));
    for (; k < size; ++k) out[k] = activated(Floats{} + gates[k], kind)[0] * values[k];
}

ALONE void activate_row(const float* x, int64_t size, int64_t kind, float* out) {
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) store(out + k, activated(load(x + k), kind));
    for (; k < size; ++k) out[k] = activated(Floats{} + x[k], kind)[0];
}

float sum_of_squares(const float* x, int64_t size) {
    Floats sums = {};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) sums += load(x + k) * load(x + k);
    float total = 0.0f;
    for (int i = 0; i < LANES; ++i) total += sums[i];
    for (; k < size; ++k) total += x[k] * x[k];
    return total;
}

// Source: arXiv:1910.07467.
ALONE void norm_row(const float* x, const float* weight, float eps, int64_t size, float* out) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
    for (int64_t k = 0; k < size; ++k) out[k] = x[k] * factor * weight[k];
}

// Source: arXiv:1607.06450, section 3.
ALONE void centre_row(const float* x, const float* weight, const float* bias, float eps, int64_t size, float* out) {
    Floats sums = {};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) sums += load(x + k);
    float total = 0.0f;
    for (int i = 0; i < LANES; ++i) total += sums[i];
    for (; k < size; ++k) total += x[k];
    const float mean = total / static_cast<float>(size);
    for (k = 0; k < size; ++k) out[k] = x[k] - mean;
    const float factor = 1.0f / std::sqrt(sum_of_squares(out, size) / static_cast<float>(size) + eps);
    for (k = 0; k < size; ++k) out[k] = out[k] * factor * weight[k] + (bias ? bias[k] : 0.0f);
}

ALONE void scale_row(float* x, float factor, int64_t size) {
    for (int64_t k = 0; k < size; ++k) x[k] *= factor;
}

// Turn pairs (i, i + half) of a head. Source: arXiv:2104.09864, as transformers lays it out.
ALONE void rotate_head(float* x, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cosines[i] - second * sines[i];
        x[i + half] = second * cosines[i + half] + first * sines[i + half];
    }
}

// Turn pairs (2 i, 2 i + 1), by the same cosines and sines in the same order.
ALONE void rotate_pairs(float* x, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[2 * i], second = x[2 * i + 1];
        x[2 * i] = first * cosines[i] - second * sines[i];
        x[2 * i + 1] = second * cosines[i + half] + first * sines[i + half];
    }
}

// Bits of Heads::how; norms stand before the rotation, one for each head, unless said otherwise.
enum How : int64_t { PAIRS = 1, NORMS_AFTER = 2, NORMS_WHOLE = 4 };

// Query and key heads of a row, which stand side by side.
struct Heads {
    int64_t num_heads, num_kv_heads, head_dim;
    const float *query_norm, *key_norm;  // null: none
    float eps;
    int64_t how;

    // Norm all queries of a row as one, and all keys.
    void norm_whole(float* row) const {
        const int64_t size = num_heads * head_dim;
        norm_row(row, query_norm, eps, size, row);
        norm_row(row + size, key_norm, eps, num_kv_heads * head_dim, row + size);
    }

    void turn(float* row, int64_t h, const float* cosines, const float* sines, int64_t num_turned) const {
        float* const head = row + h * head_dim;
        const float* const norm = how & NORMS_WHOLE ? nullptr : h < num_heads ? query_norm : key_norm;
        if (norm && !(how & NORMS_AFTER)) norm_row(head, norm, eps, head_dim, head);
        if (how & PAIRS) rotate_pairs(head, cosines, sines, num_turned / 2);
        else if (num_turned) rotate_head(head, cosines, sines, num_turned / 2);
        if (norm && how & NORMS_AFTER) norm_row(head, norm, eps, head_dim, head);
    }
};

}  // namespace
