// Linear layers on a CPU and the small operations between them: what linear.cpp and decoder.cpp are made of.
//
// Weights are read once, in order, whatever the number of rows is: a panel holds PANEL outputs for all inputs.
//
//     FLOAT      float32   [K][PANEL]
//     BFLOAT     bfloat16  [K / 2][PANEL][2], widened where it is used: the sums are those of the same weights in float32
//     CHANNELS   8 bits    [K / 4][PANEL][4], one scale for each output
//     GROUPS8    8 bits    for each group of inputs [G / 4][PANEL][4], then its scales [PANEL] in float16, and its minimums, if it has some
//     GROUPS4    4 bits    the same, [G / 8][PANEL][4]: four inputs in the lower halves of four bytes, four in the upper ones
//
// Integers are unsigned. Rows that meet them are quantised to int8 by the largest magnitude of a group's inputs (CHANNELS: of the row's).
// Sums of a group are exact in int32.
//
// Every output is summed over K in one order and by one accumulator: the bits of a row do not depend on the rows beside it, nor on the
// number of threads. What ends a row (a norm, a rotation, the last additions) is never inlined: compiled once, it rounds the same way
// wherever it is called from.
//
// Vectors are GCC's and clang's own: portable. Instructions for integers are chosen by what the compiler may use. Each library is one file
// that includes this one.
//
// Shapes: M rows, N outputs, K inputs, G inputs of one group.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
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
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
void store(float* to, Floats value) { *reinterpret_cast<LooseFloats*>(to) = value; }

Words words(const void* from) {
    Words found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

Floats as_floats(Words bits) { return reinterpret_cast<Floats>(bits); }

#define ALONE __attribute__((noinline))

enum Kind : int64_t { FLOAT, BFLOAT, CHANNELS, GROUPS8, GROUPS4 };

// Weights of a layer. Mirrored by a ctypes structure in native.py: the same fields in the same order, 8 bytes each.
struct Product {
    const void* weights;  // panels
    const float* scales;  // of integers: what each output is multiplied by in the end, [N] padded to whole panels; else null
    const float* bias;    // [N], or null
    int64_t kind;
    int64_t group;  // inputs that share a scale
    int64_t zero;   // weight = scale * (value - zero); negative: weight = scale * value + minimum
    int64_t num_outputs, num_inputs;
};

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

// The same with two inputs in each word; a sum takes them one after the other.
template <int ROWS>
void bfloat_rows(const Linear& layer, const float* x, int64_t stride, const uint16_t* panel, int64_t row, int64_t first) {
    Floats sums[ROWS][COLUMNS] = {};
    const float* source = x + row * stride;
    for (int64_t k = 0; k < layer.num_inputs; k += 2) {
        const uint16_t* weights = panel + k * PANEL;
        Words both[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) {
            __builtin_prefetch(reinterpret_cast<const char*>(weights + c * LANES * 2) + AHEAD);
            both[c] = words(weights + c * LANES * 2);
        }
        for (int m = 0; m < ROWS; ++m) {
            const Floats value = source[m * stride + k] - Floats{};
            for (int c = 0; c < COLUMNS; ++c) sums[m][c] += value * as_floats(both[c] << 16);
        }
        if (k + 1 == layer.num_inputs) break;
        for (int m = 0; m < ROWS; ++m) {
            const Floats value = source[m * stride + k + 1] - Floats{};
            for (int c = 0; c < COLUMNS; ++c) sums[m][c] += value * as_floats(both[c] & 0xffff0000u);
        }
    }
    for (int m = 0; m < ROWS; ++m) finish(layer, row + m, first, sums[m]);
}

// Integers: a word of each output has four values, or eight of 4 bits; it is multiplied in HALVES, by four bytes of the row in each.
//
//     dpbusd, usdot  four unsigned by four signed bytes
//     maddwd         8 bits: two by two, widened to 16 bits before
//     maddubsw       4 bits: sums of 16 bits, which hold 16 products of an output, widened at the end of a chunk
//
// PLACES: where the inputs of a word lie in it. TAKEN: what a multiplication takes away from each weight.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define DOT(sums, w, x) reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(w), _mm512_set1_epi32(x)))
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
#define DOT(sums, w, x) reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sums), reinterpret_cast<__m256i>(w), _mm256_set1_epi32(x)))
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define DOT(sums, w, x) reinterpret_cast<Ints>(vusdotq_s32(reinterpret_cast<int32x4_t>(sums), reinterpret_cast<uint8x16_t>(w), vreinterpretq_s8_s32(vdupq_n_s32(x))))
#elif defined(__AVX512BW__)
#define MADDWD(a, b) reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)))
#define MADDUBS(a, b) reinterpret_cast<Words>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)))
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define MADDWD(a, b) reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)))
#define MADDUBS(a, b) reinterpret_cast<Words>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)))
#elif defined(__SSSE3__) && !defined(__AVX2__)
#define MADDWD(a, b) reinterpret_cast<Ints>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)))
#define MADDUBS(a, b) reinterpret_cast<Words>(_mm_maddubs_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)))
#elif defined(__ARM_FEATURE_DOTPROD)
#define SIGNED_DOT(sums, w, x) reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(sums), reinterpret_cast<int8x16_t>(w), vreinterpretq_s8_s32(vdupq_n_s32(x))))
#endif

#if defined(MADDWD)
constexpr bool HAS_DOT = false, WIDENS = true;
constexpr int PLACES[4] = {0, 2, 1, 3};
#elif defined(DOT) || defined(SIGNED_DOT)
constexpr bool HAS_DOT = true, WIDENS = false;
constexpr int PLACES[4] = {0, 1, 2, 3};
#else
constexpr bool HAS_DOT = false, WIDENS = false;
constexpr int PLACES[4] = {0, 1, 2, 3};
#endif

#if defined(SIGNED_DOT)
constexpr int32_t TAKEN8 = 128;
#else
constexpr int32_t TAKEN8 = 0;
#endif

constexpr int CHUNK = 4;  // words of eight values whose sums fit into 16 bits: 8 * 2 * 15 * 127 < 2 ** 15

template <int BITS>
constexpr int HALVES = BITS == 4 || WIDENS ? 2 : 1;

template <int BITS>
Words half_of(Words w, int half) {
    if (BITS == 4) return (half ? w >> 4 : w) & 0x0f0f0f0fu;
    if (!WIDENS) return w;
    return half ? w >> 8 & 0x00ff00ffu : w & 0x00ff00ffu;
}

// Four products of each output, added: those of int8 `x` in its bytes, or of two int16.
template <int BITS>
Ints dot(Ints sums, Words w, int32_t x) {
#if defined(DOT)
    return DOT(sums, w, x);
#elif defined(MADDWD)
    const Ints all = Ints{} + x;
    if (BITS == 8) return sums + MADDWD(w, all);
    typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));
    return reinterpret_cast<Ints>(reinterpret_cast<Shorts>(sums) + reinterpret_cast<Shorts>(MADDUBS(w, all)));
#elif defined(SIGNED_DOT)
    return SIGNED_DOT(sums, BITS == 8 ? w ^ 0x80808080u : w, x);
#else
    const Words b = Words{} + static_cast<uint32_t>(x);
    for (int shift = 0; shift < 32; shift += 8)
        sums += reinterpret_cast<Ints>(w >> shift & 255u) * (reinterpret_cast<Ints>(b << (24 - shift)) >> 24);
    return sums;
#endif
}

// From what a chunk begins with, and to what it leaves.
template <int BITS>
Ints begun(Ints whole) {
    return WIDENS && BITS == 4 ? Ints{} : whole;
}

template <int BITS>
Ints ended(Ints whole, Ints part) {
#if defined(MADDWD)
    if (BITS == 4) return whole + MADDWD(part, Ints{} + 0x00010001);
#endif
    return part;
}

typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

// From float16 that is finite.
Floats widened(const uint16_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__) && defined(__F16C__)
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    Halves given;
    std::memcpy(&given, from, sizeof given);
    const Words bits = __builtin_convertvector(given, Words);
    const Floats magnitude = as_floats((bits & 0x7fffu) << 13) * 0x1p112f;
    return as_floats(reinterpret_cast<Words>(magnitude) | (bits & 0x8000u) << 16);
#endif
}

float widened(uint16_t bits) {
    const uint32_t shifted = static_cast<uint32_t>(bits & 0x7fff) << 13;
    float magnitude;
    std::memcpy(&magnitude, &shifted, sizeof magnitude);
    return magnitude * (bits & 0x8000 ? -0x1p112f : 0x1p112f);
}

int64_t whole(int64_t number, int64_t of) { return (number + of - 1) / of * of; }

bool is_quantised(const Product& w) { return w.kind >= CHANNELS; }
int64_t bits_of(const Product& w) { return w.kind == GROUPS4 ? 4 : 8; }

// What is the same of all groups of a layer.
struct Grouping {
    int64_t count;        // groups
    int64_t num_words;    // of each output
    int64_t value_bytes;  // of a panel's values, before its scales
    int64_t bytes;        // of a panel's group
    int64_t row_bytes;    // of a row's group
};

Grouping grouping(const Product& w) {
    const int64_t bits = bits_of(w), num_words = (w.group + 32 / bits - 1) / (32 / bits);
    const int64_t value_bytes = num_words * 4 * PANEL, scales = w.kind == CHANNELS ? 0 : w.zero < 0 ? 2 : 1;
    return {w.num_inputs / w.group, num_words, value_bytes, value_bytes + scales * PANEL * 2,
            num_words * 4 * (bits == 4 ? HALVES<4> : HALVES<8>)};
}

int64_t panel_bytes(const Product& w) {
    if (w.kind == FLOAT) return w.num_inputs * PANEL * 4;
    if (w.kind == BFLOAT) return whole(w.num_inputs, 2) * PANEL * 2;
    const Grouping groups = grouping(w);
    return groups.count * groups.bytes;
}

// Before the values of a quantised row: this, for each group.
struct Head {
    float scale, total;  // total: of the group's inputs as they are rounded
    int32_t start;       // what a sum begins with
};

// Bytes of a row that is quantised for a layer; 0: it is not.
int64_t row_bytes(const Product& w) {
    if (!is_quantised(w)) return 0;
    const Grouping groups = grouping(w);
    return whole(groups.count * (sizeof(Head) + groups.row_bytes), 64);
}

// SCALES: of a group in a panel, none, scales, or scales and minimums.
template <int ROWS, int BITS, int SCALES>
void int_rows(const Product& w, const Linear& layer, const uint8_t* rows, const uint8_t* panel, int64_t row, int64_t first) {
    const Grouping groups = grouping(w);
    const int64_t stride = row_bytes(w), chunk = BITS == 4 && WIDENS ? CHUNK : groups.num_words;
    const uint8_t* source = rows + row * stride;
    Floats sums[ROWS][COLUMNS] = {};
    for (int64_t g = 0; g < groups.count; ++g, panel += groups.bytes) {
        const uint8_t* x = source + groups.count * sizeof(Head) + g * groups.row_bytes;
        Head heads[ROWS];
        Ints all[ROWS][COLUMNS];
        for (int m = 0; m < ROWS; ++m) {
            std::memcpy(heads + m, source + m * stride + g * sizeof(Head), sizeof(Head));
            for (int c = 0; c < COLUMNS; ++c) all[m][c] = Ints{} + heads[m].start;
        }
        for (int64_t begin = 0; begin < groups.num_words; begin += chunk) {
            const int64_t end = begin + chunk < groups.num_words ? begin + chunk : groups.num_words;
            Ints parts[ROWS][COLUMNS];
            for (int m = 0; m < ROWS; ++m)
                for (int c = 0; c < COLUMNS; ++c) parts[m][c] = begun<BITS>(all[m][c]);
            for (int64_t i = begin; i < end; ++i) {
                const uint8_t* weights = panel + i * PANEL * 4;
                for (int c = 0; c < COLUMNS; ++c) __builtin_prefetch(weights + c * LANES * 4 + AHEAD);
                for (int half = 0; half < HALVES<BITS>; ++half) {
                    Words values[COLUMNS];
                    for (int c = 0; c < COLUMNS; ++c) values[c] = half_of<BITS>(words(weights + c * LANES * 4), half);
                    for (int m = 0; m < ROWS; ++m) {
                        int32_t four;
                        std::memcpy(&four, x + m * stride + (i * HALVES<BITS> + half) * 4, 4);
                        for (int c = 0; c < COLUMNS; ++c) parts[m][c] = dot<BITS>(parts[m][c], values[c], four);
                    }
                }
            }
            for (int m = 0; m < ROWS; ++m)
                for (int c = 0; c < COLUMNS; ++c) all[m][c] = ended<BITS>(all[m][c], parts[m][c]);
        }
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + groups.value_bytes);
        for (int c = 0; c < COLUMNS; ++c) {
            const Floats scale = SCALES ? widened(scales + c * LANES) : Floats{} + 1.0f;
            const Floats minimum = SCALES > 1 ? widened(scales + PANEL + c * LANES) : Floats{};
            for (int m = 0; m < ROWS; ++m) {
                sums[m][c] += __builtin_convertvector(all[m][c], Floats) * (scale * heads[m].scale);
                if (SCALES > 1) sums[m][c] += minimum * heads[m].total;
            }
        }
    }
    for (int m = 0; m < ROWS; ++m) {
        for (int c = 0; c < COLUMNS; ++c) sums[m][c] *= load(w.scales + first + c * LANES);
        finish(layer, row + m, first, sums[m]);
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

#define BY_SIZE(size, function, arguments, ...)                                  \
    switch (size) {                                                              \
        case 1: function<1 __VA_OPT__(, ) __VA_ARGS__> arguments; break;         \
        case 2: function<2 __VA_OPT__(, ) __VA_ARGS__> arguments; break;         \
        case 3: function<3 __VA_OPT__(, ) __VA_ARGS__> arguments; break;         \
        case 4: function<4 __VA_OPT__(, ) __VA_ARGS__> arguments; break;         \
        case 5: function<5 __VA_OPT__(, ) __VA_ARGS__> arguments; break;         \
        default: function<6 __VA_OPT__(, ) __VA_ARGS__> arguments; break;        \
    }

template <int BITS, int SCALES>
void int_panel(const Product& w, const Linear& layer, const uint8_t* rows, const uint8_t* panel, int64_t row, int count, int64_t first) {
    BY_SIZE(count, int_rows, (w, layer, rows, panel, row, first), BITS, SCALES)
}

// Rows that go into a product: floats [M, K], and bytes of the rows that were quantised for it.
struct Input {
    const float* rows;
    const uint8_t* bytes;
};

// Some rows' outputs of one panel: at most MOST_ROWS.
void multiply_panel(const Product& w, const Linear& layer, const Input& in, int64_t stride, int64_t row, int count, int64_t first) {
    const uint8_t* panel = static_cast<const uint8_t*>(w.weights) + first / PANEL * panel_bytes(w);
    switch (w.kind) {
        case FLOAT: BY_SIZE(count, float_rows, (layer, in.rows, stride, reinterpret_cast<const float*>(panel), row, first)) break;
        case BFLOAT: BY_SIZE(count, bfloat_rows, (layer, in.rows, stride, reinterpret_cast<const uint16_t*>(panel), row, first)) break;
        case CHANNELS: int_panel<8, 0>(w, layer, in.bytes, panel, row, count, first); break;
        case GROUPS8:
            if (w.zero < 0) int_panel<8, 2>(w, layer, in.bytes, panel, row, count, first);
            else int_panel<8, 1>(w, layer, in.bytes, panel, row, count, first);
            break;
        default:
            if (w.zero < 0) int_panel<4, 2>(w, layer, in.bytes, panel, row, count, first);
            else int_panel<4, 1>(w, layer, in.bytes, panel, row, count, first);
    }
}

// Round a group's inputs to int8 by their largest magnitude, to nearest and ties to even; what is no number makes the scale none. Returns
// the sum of the integers.
template <typename Element>
int32_t quantise_group(const float* x, int64_t size, int64_t depth, Element* out, float* scale) {
    const int64_t vectors = size / LANES * LANES;
    Floats most = {}, poison = {};
    for (int64_t k = 0; k < vectors; k += LANES) {
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
    for (int64_t k = vectors; k < size; ++k) {
        largest = std::fabs(x[k]) > largest ? std::fabs(x[k]) : largest;
        none += x[k] * 0.0f;
    }
    *scale = largest / 127.0f + none;
    const float factor = largest > 0.0f && none == 0.0f ? 127.0f / largest : 0.0f;
    // Added and taken away again, it leaves an integer: above it float32 has no fractions.
    constexpr float INTEGERS = 12582912.0f;
    typedef Element Elements __attribute__((vector_size(LANES * sizeof(Element))));
    Ints sums = {};
    for (int64_t k = 0; k < vectors; k += LANES) {
        const Floats value = load(x + k);
        const Floats number = none == 0.0f ? value : Floats{};
        const Ints rounded = __builtin_convertvector(number * factor + INTEGERS - INTEGERS, Ints);
        const Elements elements = __builtin_convertvector(rounded, Elements);
        std::memcpy(out + k, &elements, sizeof elements);
        sums += rounded;
    }
    int32_t sum = 0;
    for (int i = 0; i < LANES; ++i) sum += sums[i];
    for (int64_t k = vectors; k < size; ++k) {
        const float number = none == 0.0f ? x[k] : 0.0f;
        const int32_t rounded = static_cast<int32_t>(number * factor + INTEGERS - INTEGERS);
        out[k] = static_cast<Element>(rounded);
        sum += rounded;
    }
    for (int64_t k = size; k < depth; ++k) out[k] = 0;
    return sum;
}

// Write a row as `row_bytes` of a layer.
ALONE void quantise_row(const Product& w, const float* x, uint8_t* out) {
    const Grouping groups = grouping(w);
    const int64_t bits = bits_of(w), depth = groups.num_words * (32 / bits);
    uint8_t* values = out + groups.count * sizeof(Head);
    for (int64_t g = 0; g < groups.count; ++g, values += groups.row_bytes, x += w.group) {
        Head head;
        const bool is_wide = groups.row_bytes > depth;
        const int32_t sum = is_wide ? quantise_group(x, w.group, depth, reinterpret_cast<int16_t*>(values), &head.scale)
                                    : quantise_group(x, w.group, depth, reinterpret_cast<int8_t*>(values), &head.scale);
        head.total = head.scale * static_cast<float>(sum);
        head.start = sum * ((bits == 8 ? TAKEN8 : 0) - static_cast<int32_t>(w.zero < 0 ? 0 : w.zero));
        std::memcpy(out + g * sizeof(Head), &head, sizeof head);
    }
}

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

enum Activation : int64_t { SILU, GELU_TANH };

// x * sigmoid(x), or x * sigmoid(2 u), which is x / 2 * (1 + tanh(u)). Source: arXiv:1606.08415, section 2.
Floats activated(Floats x, int64_t kind) {
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

float sum_of_squares(const float* x, int64_t size) {
    Floats sums = {};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) sums += load(x + k) * load(x + k);
    float total = 0.0f;
    for (int i = 0; i < LANES; ++i) total += sums[i];
    for (; k < size; ++k) total += x[k] * x[k];
    return total;
}

ALONE void norm_row(const float* x, const float* weight, float eps, int64_t size, float* out) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
    for (int64_t k = 0; k < size; ++k) out[k] = x[k] * factor * weight[k];
}

// Turn pairs (i, i + half) of a head. Source: arXiv:2104.09864, as transformers lays it out.
ALONE void rotate_head(float* x, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cosines[i] - second * sines[i];
        x[i + half] = second * cosines[i + half] + first * sines[i + half];
    }
}

// Where the value of an input lies in a panel's group: its byte, and by how many bits it is shifted.
struct Place {
    int64_t byte;
    int shift;
};

Place place(int64_t bits, int64_t k, int64_t output) {
    if (bits == 8) return {(k / 4 * PANEL + output) * 4 + PLACES[k % 4], 0};
    return {(k / 8 * PANEL + output) * 4 + k % 4, k % 8 < 4 ? 0 : 4};
}

void read_int_row(const Product& w, const uint8_t* panel, int64_t output, float factor, float* out) {
    const Grouping groups = grouping(w);
    const int64_t bits = bits_of(w);
    for (int64_t g = 0; g < groups.count; ++g, panel += groups.bytes) {
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + groups.value_bytes) + output;
        const float scale = w.kind == CHANNELS ? 1.0f : widened(scales[0]), minimum = w.zero < 0 ? widened(scales[PANEL]) : 0.0f;
        for (int64_t k = 0; k < w.group; ++k) {
            const Place at = place(bits, k, output);
            const int32_t value = panel[at.byte] >> at.shift & ((1 << bits) - 1);
            const float weight = w.zero < 0 ? static_cast<float>(value) * scale + minimum : static_cast<float>(value - w.zero) * scale;
            *out++ = weight * factor;
        }
    }
}

// Read one output's weights out of its panel, times a scale.
ALONE void read_row(const Product& w, int64_t id, float scale, float* out) {
    const uint8_t* panel = static_cast<const uint8_t*>(w.weights) + id / PANEL * panel_bytes(w);
    const int64_t output = id % PANEL;
    if (w.kind == FLOAT) {
        const float* column = reinterpret_cast<const float*>(panel) + output;
        for (int64_t k = 0; k < w.num_inputs; ++k) out[k] = column[k * PANEL] * scale;
    } else if (w.kind == BFLOAT) {
        const uint16_t* column = reinterpret_cast<const uint16_t*>(panel) + 2 * output;
        for (int64_t k = 0; k < w.num_inputs; ++k) {
            const uint32_t bits = static_cast<uint32_t>(column[k / 2 * 2 * PANEL + k % 2]) << 16;
            float value;
            std::memcpy(&value, &bits, sizeof value);
            out[k] = value * scale;
        }
    } else {
        read_int_row(w, panel, output, w.scales[id] * scale, out);
    }
}

}  // namespace
