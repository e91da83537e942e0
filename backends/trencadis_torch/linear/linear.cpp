// Linear layers on a CPU: weights packed once, as floats or integers, and the small operations between them, one by one.
//
// A plain C interface: loaded by ctypes, compiled for the machine it runs on. See linear.h.

#include <vector>

#include "experts.h"
#include "linear.h"
#include "rows.h"

extern "C" {

int64_t trencadis_panel() { return PANEL; }

int64_t trencadis_most_apart() { return MOST_APART; }

int64_t trencadis_has_dot() { return HAS_DOT; }

int64_t trencadis_dots_pairs() { return DOTS_PAIRS; }

int64_t trencadis_has_tiles() { return HAS_TILES; }

// Bytes of a layer's panels.
int64_t trencadis_packed_bytes(const Product* w) { return whole(w->num_outputs, PANEL) / PANEL * panel_bytes(*w); }

// Write floats [N, K] as panels, for `w`, whose outputs they are from the panel on that begins with `first`.
void trencadis_pack_floats(const Product* w, const void* given, int64_t num_outputs, int64_t first, void* out) {
    const int64_t size = panel_bytes(*w), num_inputs = w->num_inputs;
#pragma omp parallel for
    for (int64_t n = 0; n < num_outputs; n += PANEL) {
        char* const panel = static_cast<char*>(out) + (first + n) / PANEL * size;
        const int64_t count = num_outputs - n < PANEL ? num_outputs - n : PANEL;
        std::memset(panel, 0, size);
        if (w->kind == FLOAT) {
            const float* weights = static_cast<const float*>(given) + n * num_inputs;
            float* const to = reinterpret_cast<float*>(panel);
            for (int64_t k = 0; k < num_inputs; ++k)
                for (int64_t i = 0; i < count; ++i) to[k * PANEL + i] = weights[i * num_inputs + k];
        } else {
            const uint16_t* weights = static_cast<const uint16_t*>(given) + n * num_inputs;
            uint16_t* const to = reinterpret_cast<uint16_t*>(panel);
            for (int64_t k = 0; k < num_inputs; ++k)
                for (int64_t i = 0; i < count; ++i) to[(k / 2 * PANEL + i) * 2 + k % 2] = weights[i * num_inputs + k];
        }
    }
}

// The same of what is stored in a byte or half of one, [N, K], with the scales and minimums of their groups, float16 [N, K / G]; null where there are none.
void trencadis_pack_ints(const Product* w, const uint8_t* values, const uint16_t* scales, const uint16_t* minimums,
                         int64_t num_outputs, int64_t first, uint8_t* out) {
    const Grouping groups = grouping(*w);
    const int64_t size = panel_bytes(*w);
#pragma omp parallel for
    for (int64_t n = 0; n < num_outputs; n += PANEL) {
        uint8_t* group = out + (first + n) / PANEL * size;
        const int64_t count = num_outputs - n < PANEL ? num_outputs - n : PANEL;
        std::memset(group, 0, size);
        for (int64_t g = 0; g < groups.count; ++g, group += groups.bytes) {
            uint16_t* const after = reinterpret_cast<uint16_t*>(group + groups.value_bytes);
            for (int64_t i = 0; i < count; ++i) {
                const uint8_t* from = values + (n + i) * w->num_inputs + g * w->group;
                for (int64_t k = 0; k < w->group; ++k) {
                    const Place at = place(*w, k, i);
                    group[at.byte] |= static_cast<uint8_t>(from[k] << at.shift);
                }
                if (scales) after[i] = scales[(n + i) * groups.count + g];
                if (minimums) after[PANEL + i] = minimums[(n + i) * groups.count + g];
            }
        }
    }
}

void trencadis_linear(const Product* w, const float* x, int64_t num_rows, int64_t stride, float* out, int64_t out_stride,
                      int64_t num_threads) {
    const int64_t bytes = row_bytes(*w);
    thread_local std::vector<uint8_t> buffer;
    if (static_cast<int64_t>(buffer.size()) < num_rows * bytes) buffer.resize(num_rows * bytes);
    uint8_t* const quantised = buffer.data();
    const Linear layer{w->bias, out, out_stride, w->num_outputs, w->num_inputs};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        [[maybe_unused]] const Tiles held{};
        if (bytes) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < num_rows; ++row) round_row(*w, x + row * stride, quantised + row * bytes);
        }
#pragma omp for schedule(static)
        for (int64_t first = 0; first < w->num_outputs; first += PANEL)
            multiply_panel(*w, layer, Input{x, quantised}, stride, 0, num_rows, first);
    }
}

// Write rows of packed weights: embeddings out of the panels of an output projection, times a scale. Returns which id has no row, or -1.
int64_t trencadis_rows(const Product* w, const int64_t* ids, int64_t num_rows, float scale, float* out) {
    for (int64_t m = 0; m < num_rows; ++m) {
        if (ids[m] < 0 || ids[m] >= w->num_outputs) return m;
        read_row(*w, ids[m], scale, out + m * w->num_inputs);
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

// Choose experts of rows of logits [M, E], which become scores: [M, C] of them and their weights; see experts.h.
void trencadis_route(const Mixture* mixture, float* logits, int64_t num_rows, int64_t* experts, float* weights) {
    for (int64_t row = 0; row < num_rows; ++row)
        route_row(*mixture, logits + row * mixture->num_experts, experts + row * mixture->num_chosen, weights + row * mixture->num_chosen);
}

// Write what experts make of rows [M, H], by the experts and weights of each [M, C]. Returns which expert there is not, or -1.
int64_t trencadis_mix(const Mixture* mixture, const float* x, int64_t num_rows, const int64_t* experts, const float* weights, float* out,
                   int64_t num_threads) {
    const Mixture& m = *mixture;
    for (int64_t r = 0; r < num_rows * m.num_chosen; ++r)
        if (experts[r] < 0 || experts[r] >= m.num_experts) return experts[r] < 0 ? m.num_experts : experts[r];
    std::vector<char> room(mixing_bytes(m, num_rows) + 64);
    const Mixing at(m, num_rows, room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64));
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        [[maybe_unused]] const Tiles held{};
        alignas(64) float tiles[2 * TILE];
        for (int64_t row = 0; row < num_rows; row += MIXED_ROWS) {
            const int64_t count = row + MIXED_ROWS < num_rows ? MIXED_ROWS : num_rows - row;
            mix_rows(m, at, x + row * m.hidden_size, experts + row * m.num_chosen, weights + row * m.num_chosen, count, tiles,
                     out + row * m.hidden_size);
        }
    }
    return -1;
}

// Add rows [M, H] to others, times the sigmoids of their gates [M]; without gates as they are.
void trencadis_add_beside(const float* x, const float* gates, int64_t num_rows, int64_t size, float* sum) {
    for (int64_t row = 0; row < num_rows; ++row) add_beside(x + row * size, gates ? gates + row : nullptr, size, sum + row * size);
}

}  // extern "C"
