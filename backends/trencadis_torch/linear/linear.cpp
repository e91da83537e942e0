// Linear layers on a CPU: weights packed once, float32 or int8, and the small operations between them, one by one.
//
// A plain C interface: loaded by ctypes, compiled for the machine it runs on. See linear.h.

#include <vector>

#include "linear.h"
#include "rows.h"

extern "C" {

int64_t trencadis_panel() { return PANEL; }

int64_t trencadis_has_vnni() { return HAS_VNNI; }

// Write weights [N, K] as panels; `out` has room for whole panels.
void trencadis_pack_float(const float* weights, int64_t num_outputs, int64_t num_inputs, float* out) {
#pragma omp parallel for
    for (int64_t first = 0; first < num_outputs; first += PANEL)
        for (int64_t k = 0; k < num_inputs; ++k)
            for (int64_t n = first; n < first + PANEL; ++n)
                out[first * num_inputs + k * PANEL + n - first] = n < num_outputs ? weights[n * num_inputs + k] : 0.0f;
}

// Write int8 weights [N, K] as panels, and 128 times each output's sum.
void trencadis_pack_int8(const int8_t* weights, int64_t num_outputs, int64_t num_inputs, int8_t* out, int32_t* sums) {
    const int64_t depth = padded(num_inputs);
#pragma omp parallel for
    for (int64_t first = 0; first < num_outputs; first += PANEL)
        for (int64_t n = first; n < first + PANEL; ++n) {
            int32_t sum = 0;
            for (int64_t k = 0; k < depth; ++k) {
                const int8_t value = n < num_outputs && k < num_inputs ? weights[n * num_inputs + k] : 0;
                out[first * depth + k / 4 * 4 * PANEL + (n - first) * 4 + k % 4] = value;
                sum += value;
            }
            sums[n] = 128 * sum;
        }
}

void trencadis_linear_float(const float* x, int64_t num_rows, int64_t stride, const float* weights, const float* bias,
                            int64_t num_outputs, int64_t num_inputs, float* out, int64_t out_stride, int64_t num_threads) {
    const Linear layer{bias, out, out_stride, num_outputs, num_inputs};
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (int64_t first = 0; first < num_outputs; first += PANEL)
        in_runs(0, num_rows, [&](int64_t row, int size) {
            BY_SIZE(size, float_rows, layer, x, stride, weights + first * num_inputs, row, first)
        });
}

void trencadis_linear_int8(const float* x, int64_t num_rows, int64_t stride, const int8_t* weights,
                           const float* weight_scales, const int32_t* weight_sums, const float* bias, int64_t num_outputs,
                           int64_t num_inputs, float* out, int64_t out_stride, int64_t num_threads) {
    const int64_t depth = padded(num_inputs);
    thread_local std::vector<uint8_t> rows;
    thread_local std::vector<float> scales;
    if (static_cast<int64_t>(rows.size()) < num_rows * depth) rows.resize(num_rows * depth);
    if (static_cast<int64_t>(scales.size()) < num_rows) scales.resize(num_rows);
    const Linear layer{bias, out, out_stride, num_outputs, num_inputs};
    uint8_t* const quantised = rows.data();
    float* const row_scales = scales.data();
    const Quantised given{quantised, row_scales, weight_scales, weight_sums, depth};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; ++row)
            quantise_row(x + row * stride, num_inputs, quantised + row * depth, row_scales + row);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < num_outputs; first += PANEL)
            in_runs(0, num_rows, [&](int64_t row, int size) {
                BY_SIZE(size, int_rows, layer, given, weights + first * depth, row, first)
            });
    }
}

// Write rows of packed float32 weights: embeddings out of the panels of an output projection, times a scale. Returns which id has
// no row, or -1.
int64_t trencadis_rows_float(const float* weights, int64_t num_outputs, const int64_t* ids, int64_t num_rows,
                             int64_t num_inputs, float scale, float* out) {
    for (int64_t m = 0; m < num_rows; ++m) {
        if (ids[m] < 0 || ids[m] >= num_outputs) return m;
        read_row(weights, ids[m], num_inputs, scale, out + m * num_inputs);
    }
    return -1;
}

int64_t trencadis_rows_int8(const int8_t* weights, const float* weight_scales, int64_t num_outputs, const int64_t* ids,
                            int64_t num_rows, int64_t num_inputs, float scale, float* out) {
    for (int64_t m = 0; m < num_rows; ++m) {
        if (ids[m] < 0 || ids[m] >= num_outputs) return m;
        read_row(weights, weight_scales, ids[m], num_inputs, scale, out + m * num_inputs);
    }
    return -1;
}

void trencadis_rms_norm(const float* x, int64_t num_rows, int64_t size, const float* weight, float eps, float* out,
                        int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1 && num_rows * size > 65536)
    for (int64_t m = 0; m < num_rows; ++m) norm_row(x + m * size, weight, eps, size, out + m * size);
}

void trencadis_layer_norm(const float* x, int64_t num_rows, int64_t size, const float* weight, const float* bias, float eps,
                          float* out, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1 && num_rows * size > 65536)
    for (int64_t m = 0; m < num_rows; ++m) centre_row(x + m * size, weight, bias, eps, size, out + m * size);
}

void trencadis_activate(const float* x, int64_t num_rows, int64_t size, int64_t kind, float* out, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1 && num_rows * size > 65536)
    for (int64_t m = 0; m < num_rows; ++m) activate_row(x + m * size, size, kind, out + m * size);
}

// From gates and values side by side, [M, 2 N], to activation(gate) * value, [M, N].
void trencadis_gate(const float* x, int64_t num_rows, int64_t size, int64_t kind, float* out, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1 && num_rows * size > 65536)
    for (int64_t m = 0; m < num_rows; ++m) gate_row(x + m * 2 * size, x + (m * 2 + 1) * size, size, kind, out + m * size);
}

// Norm, where weights are given, and turn the query and key heads of rows [M, stride] in place; see Heads.
void trencadis_rotate(float* x, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                      const float* query_norm, const float* key_norm, float eps, int64_t how, const float* cosines,
                      const float* sines, int64_t num_turned, int64_t num_threads) {
    const Heads heads{num_heads, num_kv_heads, head_dim, query_norm, key_norm, eps, how};
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1 && num_rows * stride > 65536)
    for (int64_t m = 0; m < num_rows; ++m) {
        if (how & NORMS_WHOLE) heads.norm_whole(x + m * stride);
        for (int64_t h = 0; h < num_heads + num_kv_heads; ++h)
            heads.turn(x + m * stride, h, cosines + m * num_turned, sines + m * num_turned, num_turned);
    }
}

}  // extern "C"
