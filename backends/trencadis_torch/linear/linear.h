// Linear layers on a CPU and the small operations between them: what linear.cpp and decoder.cpp are made of.
//
// Shapes: M rows, N outputs, K inputs. A panel holds PANEL outputs, [K][PANEL] in float32 and [K / 4][PANEL][4] in int8, so that
// weights are read once, in order, whatever M is. Every output is summed over K in one order and by one accumulator: the bits of
// a row do not depend on the rows beside it, nor on the number of threads. What ends a row (the last additions, and what is in rows.h)
// is never inlined: compiled once, it rounds the same way wherever it is called from.
//
// Vectors are GCC's and clang's own: portable. Each library is one file that includes this one.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include <immintrin.h>
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, COLUMNS = 4, MOST_ROWS = 6;
#elif defined(__AVX2__)
constexpr int LANES = 8, COLUMNS = 2, MOST_ROWS = 6;
#else
constexpr int LANES = 4, COLUMNS = 2, MOST_ROWS = 4;
#endif
constexpr int PANEL = LANES * COLUMNS;
constexpr int AHEAD = 2048;  // bytes of weights asked for before they are needed

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef float LooseFloats __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
void store(float* to, Floats value) { *reinterpret_cast<LooseFloats*>(to) = value; }

#define ALONE __attribute__((noinline))

struct Linear {
    const float* bias;  // [N], or null
    float* out;         // where the first row's first output goes
    int64_t out_stride;
    int64_t num_outputs;
    int64_t num_inputs;
    bool adds = false;  // to what is there
    int64_t first_row = 0, first_output = 0;

    float* at(int64_t row, int64_t output) const { return out + (row - first_row) * out_stride + (output - first_output); }
};

// Write one row's outputs of a panel; the last panel may be wider than what is left.
ALONE void finish(const Linear& layer, int64_t row, int64_t first, const Floats* sums) {
    float* out = layer.at(row, first);
    const int64_t left = layer.num_outputs - first;
    if (left >= PANEL) {
        for (int c = 0; c < COLUMNS; ++c) {
            Floats value = sums[c];
            if (layer.bias) value += load(layer.bias + first + c * LANES);
            if (layer.adds) value += load(out + c * LANES);
            store(out + c * LANES, value);
        }
        return;
    }
    float values[PANEL];
    for (int c = 0; c < COLUMNS; ++c) store(values + c * LANES, sums[c]);
    for (int64_t n = 0; n < left; ++n) {
        const float value = layer.bias ? values[n] + layer.bias[first + n] : values[n];
        out[n] = layer.adds ? value + out[n] : value;
    }
}

template <int ROWS>
void float_rows(const Linear& layer, const float* x, int64_t stride, const float* panel, int64_t row, int64_t first) {
    Floats sums[ROWS][COLUMNS] = {};
    const float* source = x + row * stride;
    for (int64_t k = 0; k < layer.num_inputs; ++k) {
        const float* weights = panel + k * PANEL;
        Floats w[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) {
            __builtin_prefetch(reinterpret_cast<const char*>(weights + c * LANES) + AHEAD);
            w[c] = load(weights + c * LANES);
        }
        for (int m = 0; m < ROWS; ++m) {
            const Floats value = source[m * stride + k] - Floats{};
            for (int c = 0; c < COLUMNS; ++c) sums[m][c] += value * w[c];
        }
    }
    for (int m = 0; m < ROWS; ++m) finish(layer, row + m, first, sums[m]);
}

struct Quantised {
    const uint8_t* rows;   // [M, padded K], 128 more than the signed value
    const float* scales;   // [M]
    const float* weight_scales;  // [N], padded to whole panels
    const int32_t* weight_sums;  // [N] times 128, padded
    int64_t stride;
};

Ints dot(Ints sums, int32_t four, const int8_t* weights) {
#if HAS_VNNI
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(
        reinterpret_cast<__m512i>(sums), _mm512_set1_epi32(four), _mm512_loadu_si512(weights)));
#else
    Ints w;
    std::memcpy(&w, weights, sizeof w);
    const uint32_t u = static_cast<uint32_t>(four);
    sums += (w << 24 >> 24) * static_cast<int32_t>(u & 255);
    sums += (w << 16 >> 24) * static_cast<int32_t>(u >> 8 & 255);
    sums += (w << 8 >> 24) * static_cast<int32_t>(u >> 16 & 255);
    return sums + (w >> 24) * static_cast<int32_t>(u >> 24);
#endif
}

template <int ROWS>
void int_rows(const Linear& layer, const Quantised& x, const int8_t* panel, int64_t row, int64_t first) {
    Ints sums[ROWS][COLUMNS] = {};
    const uint8_t* source = x.rows + row * x.stride;
    for (int64_t k = 0; k < x.stride; k += 4) {
        const int8_t* weights = panel + k * PANEL;
        for (int c = 0; c < COLUMNS; ++c) __builtin_prefetch(weights + c * LANES * 4 + AHEAD);
        for (int m = 0; m < ROWS; ++m) {
            int32_t four;
            std::memcpy(&four, source + m * x.stride + k, 4);
            for (int c = 0; c < COLUMNS; ++c) sums[m][c] = dot(sums[m][c], four, weights + c * LANES * 4);
        }
    }
    for (int m = 0; m < ROWS; ++m) {
        Floats values[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) {
            Ints taken;
            std::memcpy(&taken, x.weight_sums + first + c * LANES, sizeof taken);
            values[c] = __builtin_convertvector(sums[m][c] - taken, Floats);
            values[c] = values[c] * load(x.weight_scales + first + c * LANES) * x.scales[row + m];
        }
        finish(layer, row + m, first, values);
    }
}

// Cut rows into as few runs of at most MOST_ROWS as there can be, of nearly equal length.
template <typename Run>
void in_runs(int64_t row, int64_t end, const Run& run) {
    const int64_t count = (end - row + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t size = (end - row) / (count - i);
        run(row, static_cast<int>(size));
        row += size;
    }
}

#define BY_SIZE(size, function, ...)                        \
    switch (size) {                                         \
        case 1: function<1>(__VA_ARGS__); break;            \
        case 2: function<2>(__VA_ARGS__); break;            \
        case 3: function<3>(__VA_ARGS__); break;            \
        case 4: function<4>(__VA_ARGS__); break;            \
        case 5: function<5>(__VA_ARGS__); break;            \
        default: function<6>(__VA_ARGS__); break;           \
    }

int64_t padded(int64_t num_inputs) { return (num_inputs + 3) / 4 * 4; }

// To int8 by the row's largest magnitude, to nearest and ties to even; what is no number makes the scale none.
ALONE void quantise_row(const float* x, int64_t size, uint8_t* out, float* scale) {
    const int64_t whole = size / LANES * LANES;
    Floats most = {}, poison = {};
    for (int64_t k = 0; k < whole; k += LANES) {
        const Floats value = load(x + k);
        const Floats magnitude = value < 0.0f ? -value : value;
        most = magnitude > most ? magnitude : most;
        poison += value * 0.0f;
    }
    float largest = 0.0f, none = 0.0f;
    for (int i = 0; i < LANES; ++i) {
        largest = most[i] > largest ? most[i] : largest;
        none += poison[i];
    }
    for (int64_t k = whole; k < size; ++k) {
        largest = std::fabs(x[k]) > largest ? std::fabs(x[k]) : largest;
        none += x[k] * 0.0f;
    }
    *scale = largest / 127.0f + none;
    const float factor = largest > 0.0f && none == 0.0f ? 127.0f / largest : 0.0f;
    // Added and taken away again, it leaves an integer: above it float32 has no fractions.
    constexpr float INTEGERS = 12582912.0f;
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    for (int64_t k = 0; k < whole; k += LANES) {
        const Floats rounded = load(x + k) * factor + INTEGERS - INTEGERS;
        const Bytes bytes = __builtin_convertvector(__builtin_convertvector(rounded, Ints) + 128, Bytes);
        std::memcpy(out + k, &bytes, sizeof bytes);
    }
    for (int64_t k = whole; k < size; ++k) {
        const float rounded = x[k] * factor + INTEGERS - INTEGERS;
        out[k] = static_cast<uint8_t>(static_cast<int32_t>(rounded) + 128);
    }
    for (int64_t k = size; k < padded(size); ++k) out[k] = 128;
}

// Read one output's weights out of its panel, times a scale.
void read_row(const float* weights, int64_t id, int64_t num_inputs, float scale, float* out) {
    const float* column = weights + id / PANEL * PANEL * num_inputs + id % PANEL;
    for (int64_t k = 0; k < num_inputs; ++k) out[k] = column[k * PANEL] * scale;
}

void read_row(const int8_t* weights, const float* weight_scales, int64_t id, int64_t num_inputs, float scale, float* out) {
    const int8_t* column = weights + id / PANEL * PANEL * padded(num_inputs) + id % PANEL * 4;
    const float factor = weight_scales[id] * scale;
    for (int64_t k = 0; k < num_inputs; ++k) out[k] = column[k / 4 * 4 * PANEL + k % 4] * factor;
}

}  // namespace
