// A mixture of experts: which experts a row goes to, and what these make of it. Each expert's matrices are read once for all its rows.
//
//     logits ▶ scores ▶ the best of them and their weights ▶ rows by expert ▶ gates and values ▶ down ▶ weighted and added, by expert
//
// An expert's outputs are padded to whole panels, so that one product has the matrices of all experts, one after the other. Rows of an
// expert are added to a token's sum in the order of experts: a token's bits depend on that token alone.
//
// Functions with shared loops are called by all threads of a team. Memory is the caller's.
//
// Shapes: M rows, E experts, C experts of a row, H hidden size, I inner size of an expert.

#pragma once

#include <limits>

#include "linear.h"
#include "rows.h"

namespace {

constexpr int64_t MIXED_ROWS = 512;  // rows that are routed at a time: bounds the memory of their copies
constexpr int64_t TILE_ROWS = 48;    // rows whose gates wait for their values
constexpr int64_t TILE = TILE_ROWS * PANEL;

enum Score : int64_t { SOFTMAX, SIGMOID };

constexpr int64_t LIMITED = 5;  // after the activations of rows.h: gate * sigmoid(alpha * gate) * (value + 1), both limited before

// Mirrored by a ctypes structure in native.py: the same fields in the same order, 8 bytes each.
struct Mixture {
    Product router;               // a logit of each expert
    Product gates, values, down;  // of all experts
    Product beside;               // one output, by whose sigmoid the MLP beside the experts is multiplied; without outputs: it is not
    const float* correction;      // added to scores where experts are chosen, not where they weigh [E]; null: none
    int64_t num_experts, num_chosen, hidden_size, inner_size;  // without experts there is no mixture
    int64_t score, normalises, activation;
    int64_t num_groups, num_open, num_best;  // of experts; those that are chosen; experts of a group whose scores are its own. 0: no groups
    double scale, alpha, limit;   // scale: of the weights
};

int64_t num_panels(int64_t num_outputs) { return (num_outputs + PANEL - 1) / PANEL; }

// Write the scores of a row's logits, in place.
void score_row(int64_t kind, int64_t count, float* x) {
    float largest = x[0], total = 0.0f;
    for (int64_t e = 1; e < count; ++e) largest = x[e] > largest ? x[e] : largest;
    const auto score = [&](Floats logit) { return kind == SOFTMAX ? exp_of(logit - largest) : 1.0f / (1.0f + exp_of(-logit)); };
    int64_t e = 0;
    for (; e + LANES <= count; e += LANES) store(x + e, score(load(x + e)));
    for (; e < count; ++e) x[e] = score(Floats{} + x[e])[0];
    if (kind != SOFTMAX) return;
    for (e = 0; e < count; ++e) total += x[e];
    for (e = 0; e < count; ++e) x[e] /= total;
}

constexpr int64_t MOST_GROUPS = 64;

// Leave the experts of the best groups, by the sum of the best scores in each; the scores of others become the least there are.
void close_groups(const Mixture& m, float* scores) {
    const int64_t size = m.num_experts / m.num_groups;
    const float least = -std::numeric_limits<float>::infinity();
    float best[MOST_GROUPS];
    for (int64_t g = 0; g < m.num_groups; ++g) {
        float first = least, second = least;
        for (int64_t e = g * size; e < (g + 1) * size; ++e) {
            const float key = m.correction ? scores[e] + m.correction[e] : scores[e];
            if (key > first) second = first, first = key;
            else if (key > second) second = key;
        }
        best[g] = m.num_best > 1 ? first + second : first;
    }
    for (int64_t g = 0; g < m.num_groups; ++g) {
        int64_t before = 0;
        for (int64_t other = 0; other < m.num_groups; ++other) before += best[other] > best[g] || (best[other] == best[g] && other < g);
        if (before >= m.num_open)
            for (int64_t e = g * size; e < (g + 1) * size; ++e) scores[e] = least;
    }
}

// Choose a row's experts by its logits, the best first and the lower of equal ones; logits become scores. Without a correction and groups
// logits decide, of which no two are made equal by rounding.
ALONE void route_row(const Mixture& m, float* logits, int64_t* experts, float* weights) {
    const int64_t count = m.num_experts, most = m.num_chosen;
    const bool by_score = m.correction || m.num_groups;
    if (by_score) score_row(m.score, count, logits);
    if (m.num_groups) close_groups(m, logits);
    const auto key = [&](int64_t e) { return m.correction ? logits[e] + m.correction[e] : logits[e]; };
    int64_t found = 0;
    for (int64_t e = 0; e < count; ++e) {
        int64_t at = found;
        for (; at > 0 && key(e) > key(experts[at - 1]); --at)
            if (at < most) experts[at] = experts[at - 1];
        if (at < most) experts[at] = e;
        if (at < most && found < most) ++found;
    }
    if (!by_score) score_row(m.score, count, logits);
    float total = 0.0f;
    for (int64_t c = 0; c < most; ++c) total += logits[experts[c]];
    for (int64_t c = 0; c < most; ++c)
        weights[c] = (m.normalises ? logits[experts[c]] / total : logits[experts[c]]) * static_cast<float>(m.scale);
}

// Gates, limited from above, and values, limited from both sides. Source: gpt-oss, gpt_oss/torch/model.py, swiglu.
ALONE void limited_gate_row(const float* gates, const float* values, int64_t size, float alpha, float limit, float* out) {
    for (int64_t k = 0; k < size; k += LANES) {
        Floats gate = load(gates + k), value = load(values + k);
        gate = gate > limit ? Floats{} + limit : gate;
        value = value > limit ? Floats{} + limit : value;
        value = value < -limit ? Floats{} - limit : value;
        const Floats made = gate / (1.0f + exp_of(gate * -alpha)) * (value + 1.0f);
        if (k + LANES <= size) store(out + k, made);
        else for (int64_t i = k; i < size; ++i) out[i] = made[i - k];
    }
}

ALONE void add_row(const float* x, float weight, int64_t size, float* sum) {
    for (int64_t k = 0; k < size; ++k) sum[k] += weight * x[k];
}

// Add what the MLP beside the experts made of a row, times the sigmoid of its gate if there is one.
ALONE void add_beside(const float* x, const float* gate, int64_t size, float* sum) {
    const float factor = gate ? 1.0f / (1.0f + exp_of(Floats{} - *gate)[0]) : 1.0f;
    for (int64_t k = 0; k < size; ++k) sum[k] += factor * x[k];
}

// Memory for at most MIXED_ROWS rows, each part on a cache line of its own.
struct Mixing {
    float *logits, *weights, *rows, *made;         // [M, E], [M, C], by expert [M C, H], the same [M C, I]
    int64_t *experts, *order, *starts, *active;    // [M, C], routes by expert [M C], first of each expert [E + 1], experts with rows [E]
    int64_t* num_active;
    uint8_t* bytes;                                // of rows that are quantised [M C, widest]
    int64_t size;                                  // of all

    Mixing(const Mixture& m, int64_t num_rows, void* at) : size(0) {
        const int64_t count = num_rows < MIXED_ROWS ? num_rows : MIXED_ROWS, routes = count * m.num_chosen;
        const int64_t outer = row_bytes(m.gates), inner = row_bytes(m.down);
        const auto take = [&](int64_t bytes) {
            char* const place = static_cast<char*>(at) + size;
            size += whole(bytes, 64);
            return static_cast<void*>(place);
        };
        logits = static_cast<float*>(take(count * m.num_experts * 4));
        weights = static_cast<float*>(take(routes * 4));
        rows = static_cast<float*>(take(outer ? 0 : routes * m.hidden_size * 4));
        made = static_cast<float*>(take(routes * m.inner_size * 4 + LANES * 4));
        experts = static_cast<int64_t*>(take(routes * 8));
        order = static_cast<int64_t*>(take(routes * 8));
        starts = static_cast<int64_t*>(take((m.num_experts + 1) * 8));
        active = static_cast<int64_t*>(take(m.num_experts * 8));
        num_active = static_cast<int64_t*>(take(8));
        bytes = static_cast<uint8_t*>(take(routes * (outer > inner ? outer : inner)));
    }
};

int64_t mixing_bytes(const Mixture& m, int64_t num_rows) {
    static char nothing[64];
    return Mixing(m, num_rows, nothing).size;
}

// Sort routes by their experts, in the order of rows within one.
void sort_routes(const Mixture& m, const int64_t* experts, int64_t num_routes, const Mixing& to) {
    for (int64_t e = 0; e <= m.num_experts; ++e) to.starts[e] = 0;
    for (int64_t r = 0; r < num_routes; ++r) ++to.starts[experts[r] + 1];
    *to.num_active = 0;
    for (int64_t e = 0; e < m.num_experts; ++e) {
        if (to.starts[e + 1]) to.active[(*to.num_active)++] = e;
        to.starts[e + 1] += to.starts[e];
    }
    for (int64_t r = 0; r < num_routes; ++r) to.order[to.starts[experts[r]]++] = r;
    for (int64_t e = m.num_experts; e > 0; --e) to.starts[e] = to.starts[e - 1];
    to.starts[0] = 0;
}

// Gates times values of one expert's rows, for one panel.
void gate_panel(const Mixture& m, const Mixing& at, int64_t expert, int64_t panel, float* tiles) {
    const int64_t pads = num_panels(m.inner_size) * PANEL, inner = panel * PANEL, first = expert * pads + inner;
    const int64_t left = m.inner_size - inner < PANEL ? m.inner_size - inner : PANEL;
    const Input in{at.rows, at.bytes};
    for (int64_t row = at.starts[expert]; row < at.starts[expert + 1]; row += TILE_ROWS) {
        const int64_t end = row + TILE_ROWS < at.starts[expert + 1] ? row + TILE_ROWS : at.starts[expert + 1];
        const Linear gates{m.gates.bias, tiles, PANEL, m.gates.num_outputs, m.hidden_size, false, row, first};
        const Linear values{m.values.bias, tiles + TILE, PANEL, m.values.num_outputs, m.hidden_size, false, row, first};
        multiply_panel(m.gates, gates, in, m.hidden_size, row, end, first);
        multiply_panel(m.values, values, in, m.hidden_size, row, end, first);
        for (int64_t r = row; r < end; ++r) {
            const float *gate = tiles + (r - row) * PANEL, *value = gate + TILE;
            float* const out = at.made + r * m.inner_size + inner;
            if (m.activation == LIMITED)
                limited_gate_row(gate, value, left, static_cast<float>(m.alpha), static_cast<float>(m.limit), out);
            else gate_row(gate, value, left, m.activation, out);
        }
    }
}

// One panel of what all experts give, weighted and added up by row; sums begin as zeros.
void down_panel(const Mixture& m, const Mixing& at, const float* weights, int64_t num_rows, int64_t panel, float* tile, float* out) {
    const int64_t pads = num_panels(m.hidden_size) * PANEL, outer = panel * PANEL;
    const int64_t left = m.hidden_size - outer < PANEL ? m.hidden_size - outer : PANEL;
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t k = 0; k < left; ++k) out[row * m.hidden_size + outer + k] = 0.0f;
    const Input in{at.made, at.bytes};
    for (int64_t i = 0; i < *at.num_active; ++i) {
        const int64_t expert = at.active[i], first = expert * pads + outer;
        for (int64_t row = at.starts[expert]; row < at.starts[expert + 1]; row += TILE_ROWS) {
            const int64_t end = row + TILE_ROWS < at.starts[expert + 1] ? row + TILE_ROWS : at.starts[expert + 1];
            const Linear layer{m.down.bias, tile, PANEL, m.down.num_outputs, m.inner_size, false, row, first};
            multiply_panel(m.down, layer, in, m.inner_size, row, end, first);
            for (int64_t r = row; r < end; ++r) {
                const int64_t route = at.order[r];
                add_row(tile + (r - row) * PANEL, weights[route], left, out + route / m.num_chosen * m.hidden_size + outer);
            }
        }
    }
}

// What the experts make of at most MIXED_ROWS rows [M, H], of which each has its experts and weights [M, C]; `tiles` are the thread's own.
void mix_rows(const Mixture& m, const Mixing& at, const float* x, const int64_t* experts, const float* weights, int64_t num_rows,
              float* tiles, float* out) {
    const int64_t routes = num_rows * m.num_chosen, outer = row_bytes(m.gates), inner = row_bytes(m.down);
    const int64_t panels = num_panels(m.inner_size);
#pragma omp single
    sort_routes(m, experts, routes, at);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < routes; ++r) {
        const float* row = x + at.order[r] / m.num_chosen * m.hidden_size;
        if (outer) round_row(m.gates, row, at.bytes + r * outer);
        else std::memcpy(at.rows + r * m.hidden_size, row, static_cast<size_t>(m.hidden_size) * sizeof(float));
    }
    const int64_t pieces = *at.num_active * panels;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < pieces; ++i) gate_panel(m, at, at.active[i / panels], i % panels, tiles);
    if (inner) {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < routes; ++r) round_row(m.down, at.made + r * m.inner_size, at.bytes + r * inner);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t panel = 0; panel < num_panels(m.hidden_size); ++panel)
        down_panel(m, at, weights, num_rows, panel, tiles, out);
}

}  // namespace
