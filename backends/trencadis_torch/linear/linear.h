// Linear layers on a CPU and the small operations between them: what linear.cpp and decoder.cpp are made of.
//
// Weights are read once, in order, whatever the number of rows is: a panel holds PANEL outputs for all inputs.
//
//     FLOAT      float32   [K][PANEL]
//     BFLOAT     bfloat16  [K / 2][PANEL][2], widened where it is used: the sums are those of the same weights in float32
//     E4M3       float8    for each group of inputs [G / 2][PANEL][2], then its scales [PANEL] in float16; widened where it is used
//     E5M2       float8    the same
//     CHANNELS   8 bits    [K / 4][PANEL][4], one scale for each output
//     GROUPS8    8 bits    for each group of inputs [G / 4][PANEL][4], then its scales [PANEL] in float16, and its minimums, if it has some
//     GROUPS4    4 bits    the same, [G / 8][PANEL][4]: four inputs in the lower halves of four bytes, four in the upper ones
//     LEVELS4    4 bits    the same: a value is a place in a table of 16 integers of 8 bits
//     BFLOAT_PAIRS  bfloat16  as BFLOAT, for rows that are rounded to bfloat16: a pair of products is added to float32 at a time
//
// Integers are unsigned. Rows that meet them are quantised to int8 by the largest magnitude of a group's inputs (CHANNELS: of the row's).
// Sums of a group are exact in int32. Groups may be of inputs that lie apart: `order` says which input each column of the weights is for.
//
// Every output is summed over K in one order and by one accumulator: the bits of a row do not depend on the rows beside it, nor on the
// number of threads. What ends a row (the last additions, and what is in rows.h) is never inlined: compiled once, it rounds the same
// way wherever it is called from.
//
// Vectors are GCC's and clang's own: portable. Instructions for integers are chosen by what the compiler may use; with AMX tiles.h has the
// products that tiles can take. Each library is one file that includes this one.
//
// Shapes: M rows, N outputs, K inputs, G inputs of one group.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__) || defined(TRENCADIS_TILE_UNIT)
constexpr int LANES = 16, COLUMNS = 4, MOST_ROWS = 6;
#elif defined(__AVX2__)
constexpr int LANES = 8, COLUMNS = 2, MOST_ROWS = 6;
#else
constexpr int LANES = 4, COLUMNS = 2, MOST_ROWS = 4;
#endif
constexpr int PANEL = LANES * COLUMNS;
constexpr int AHEAD = 2048;  // bytes of weights asked for before they are needed, where each is needed once
constexpr int64_t PART_INPUTS = 128;  // that many rows meet before they meet the next ones
constexpr int64_t ROWS_TOGETHER = 48;  // for which sums are kept between parts
constexpr int64_t MOST_APART = 1024;  // inputs of a group that may lie apart

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
#define WITHIN __attribute__((always_inline)) inline  // else sums would be in memory
#define UNROLLED _Pragma("GCC unroll 8")  // the same, before compilers decide what is in registers

enum Kind : int64_t { FLOAT, BFLOAT, E4M3, E5M2, CHANNELS, GROUPS8, GROUPS4, LEVELS4, BFLOAT_PAIRS };

// Weights of a layer. Mirrored by a ctypes structure in native.py: the same fields in the same order, 8 bytes each.
struct Product {
    const void* weights;    // panels
    const float* scales;    // what each output is multiplied by in the end, [N] padded to whole panels; null: floats of 16 and 32 bits
    const float* bias;      // [N], or null
    const uint8_t* levels;  // LEVELS4: the table, [16]; else null
    const int32_t* order;   // of integers: the input of each column, [K]; null: as they come
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

// A stretch of the inputs of a panel of floats, which all rows meet before they meet the next one: then it comes from the first cache, and is widened
// once. Meanwhile the next one is asked for, by each run of rows for its share, so that memory is never idle.
struct Stretch {
    int64_t begin, end;  // inputs
    bool starts, ends;   // sums start as zeros; they are the row's
    Floats* kept;        // sums of the run's rows between two parts, [M][COLUMNS]
    const char* next;    // bytes that the run asks for
    int64_t mask;        // in steps whose number has none of these bits
};

template <bool PARTS, int ROWS>
WITHIN void take(const Stretch& part, Floats (&sums)[ROWS][COLUMNS]) {
    for (int m = 0; m < ROWS; ++m)
        for (int c = 0; c < COLUMNS; ++c) sums[m][c] = PARTS && !part.starts ? part.kept[m * COLUMNS + c] : Floats{};
}

template <int ROWS>
WITHIN void keep(const Stretch& part, const Floats (&sums)[ROWS][COLUMNS]) {
    for (int m = 0; m < ROWS; ++m)
        for (int c = 0; c < COLUMNS; ++c) part.kept[m * COLUMNS + c] = sums[m][c];
}

// Ask for an input's weights: some after these, or, where there are parts, of the next part. With narrow vectors a CPU's own guesses are quicker
// than what is asked for: measured on Zen 3, an eighth.
template <bool PARTS>
WITHIN void ask(const float* weights, const char** next, int64_t step, int64_t mask) {
    if (PARTS ? step & mask : LANES < 16) return;
    const char* const from = PARTS ? *next : reinterpret_cast<const char*>(weights) + AHEAD;
    for (int i = 0; i < PANEL * 4; i += 64) __builtin_prefetch(from + i);
    if (PARTS) *next += PANEL * 4;
}

// `panel` begins with the part's first input.
template <int ROWS, bool PARTS>
void float_rows(const Linear& layer, const float* x, int64_t stride, const float* panel, int64_t row, int64_t first, const Stretch& part) {
    Floats sums[ROWS][COLUMNS];
    take<PARTS>(part, sums);
    const char* next = part.next;
    const float* source = x + row * stride + part.begin;
    const int64_t size = part.end - part.begin;
    for (int64_t k = 0; k < size; ++k) {
        const float* weights = panel + k * PANEL;
        ask<PARTS>(weights, &next, k, part.mask);
        Floats w[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) w[c] = load(weights + c * LANES);
        for (int m = 0; m < ROWS; ++m) {
            const Floats value = source[m * stride + k] - Floats{};
            for (int c = 0; c < COLUMNS; ++c) sums[m][c] += value * w[c];
        }
    }
    if (PARTS && !part.ends) return keep(part, sums);
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

// Rows and weights in pairs of bfloat16. Without an instruction for pairs rows are float32, rounded as well, and meet weights as those of
// BFLOAT do: sums are of the same products, and may differ in low bits. The instruction takes what is below float32's normal numbers for 0.
// Elsewhere nothing calls the function, which is what the instruction computes.
#if defined(__AVX512BF16__)
constexpr bool DOTS_PAIRS = true;
Floats dot_pairs(Floats sums, Words w, uint32_t x) {
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(Words{} + x)));
}
#else
#if defined(TRENCADIS_TILE_UNIT)
constexpr bool DOTS_PAIRS = true;
#else
constexpr bool DOTS_PAIRS = false;
#endif
Floats dot_pairs(Floats sums, Words w, uint32_t x) {
    return sums + as_floats(w << 16) * as_floats(Words{} + (x << 16)) + as_floats(w & 0xffff0000u) * as_floats(Words{} + (x & 0xffff0000u));
}
#endif

// `panel` begins with the part's first input; `stride` is in bytes.
template <int ROWS, bool PARTS>
void pair_rows(const Linear& layer, const uint8_t* x, int64_t stride, const uint8_t* panel, int64_t row, int64_t first, const Stretch& part) {
    Floats sums[ROWS][COLUMNS];
    take<PARTS>(part, sums);
    const char* next = part.next;
    const uint8_t* source = x + row * stride + part.begin * 2;
    for (int64_t k = 0; k < part.end - part.begin; k += 2) {
        const uint8_t* weights = panel + k * PANEL * 2;
        ask<PARTS>(reinterpret_cast<const float*>(weights), &next, k / 2, part.mask);
        Words w[COLUMNS];
        UNROLLED for (int c = 0; c < COLUMNS; ++c) w[c] = words(weights + c * LANES * 4);
        UNROLLED for (int m = 0; m < ROWS; ++m) {
            uint32_t two;
            std::memcpy(&two, source + m * stride + k * 2, 4);
            UNROLLED for (int c = 0; c < COLUMNS; ++c) sums[m][c] = dot_pairs(sums[m][c], w[c], two);
        }
    }
    if (PARTS && !part.ends) return keep(part, sums);
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

// How integers are stored, and by how many bits they are multiplied.
enum Form { INT8, INT4, LEVELS };

template <int FORM>
constexpr int BITS = FORM == INT4 ? 4 : 8;

template <int FORM>
constexpr int PARTS = FORM == INT4 ? 2 : (FORM == LEVELS ? 2 : 1) * (WIDENS ? 2 : 1);

// The entries of a table, which every 16 bytes hold, at places 0 to 15 in each byte.
Words looked_up(Words table, Words places) {
#if defined(__AVX512BW__)
    return reinterpret_cast<Words>(_mm512_shuffle_epi8(reinterpret_cast<__m512i>(table), reinterpret_cast<__m512i>(places)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return reinterpret_cast<Words>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(places)));
#elif defined(__SSSE3__) && !defined(__AVX2__)
    return reinterpret_cast<Words>(_mm_shuffle_epi8(reinterpret_cast<__m128i>(table), reinterpret_cast<__m128i>(places)));
#elif defined(__aarch64__)
    return reinterpret_cast<Words>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(table), reinterpret_cast<uint8x16_t>(places)));
#else
    uint8_t entries[sizeof(Words)], found[sizeof(Words)];
    std::memcpy(entries, &table, sizeof table);
    std::memcpy(found, &places, sizeof places);
    for (uint8_t& one : found) one = entries[one];
    return words(found);
#endif
}

Words halves(Words w, int half) { return (half ? w >> 4 : w) & 0x0f0f0f0fu; }
Words pairs(Words w, int pair) { return WIDENS ? (pair ? w >> 8 : w) & 0x00ff00ffu : w; }

template <int FORM>
Words part_of(Words w, int part, Words table) {
    if (FORM == INT4) return halves(w, part);
    if (FORM == INT8) return pairs(w, part);
    constexpr int EACH = PARTS<LEVELS> / 2;
    return pairs(looked_up(table, halves(w, part / EACH)), part % EACH);
}

// A sum as it is: compilers add integers in another order otherwise, with more of them than there are registers for.
WITHIN Ints in_order(Ints sums) {
#if defined(__x86_64__) && defined(__GNUC__)
    __asm__("" : "+v"(sums));
#endif
    return sums;
}

// Four products of each output, added: those of int8 `x` in its bytes, or of two int16.
template <int FORM>
Ints dot(Ints sums, Words w, int32_t x) {
#if defined(DOT)
    return DOT(sums, w, x);
#elif defined(MADDWD)
    const Ints all = Ints{} + x;
    if (BITS<FORM> == 8) return in_order(sums + MADDWD(w, all));
    typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));
    return in_order(reinterpret_cast<Ints>(reinterpret_cast<Shorts>(sums) + reinterpret_cast<Shorts>(MADDUBS(w, all))));
#elif defined(SIGNED_DOT)
    return SIGNED_DOT(sums, BITS<FORM> == 8 ? w ^ 0x80808080u : w, x);
#else
    const Words b = Words{} + static_cast<uint32_t>(x);
    for (int shift = 0; shift < 32; shift += 8)
        sums += reinterpret_cast<Ints>(w >> shift & 255u) * (reinterpret_cast<Ints>(b << (24 - shift)) >> 24);
    return sums;
#endif
}

// From what a chunk begins with, and to what it leaves.
template <int FORM>
Ints begun(Ints whole) {
    return WIDENS && FORM == INT4 ? Ints{} : whole;
}

template <int FORM>
Ints ended(Ints whole, Ints part) {
#if defined(MADDWD)
    if (FORM == INT4) return whole + MADDWD(part, Ints{} + 0x00010001);
#endif
    return part;
}

typedef int16_t Halves __attribute__((vector_size(LANES * 2)));

// From float16 that is finite.
Floats widened(Halves given) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(given)));
#elif defined(__AVX2__) && defined(__F16C__)
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(given)));
#elif defined(__aarch64__)
    return reinterpret_cast<Floats>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(given)));
#else
    const Words bits = reinterpret_cast<Words>(__builtin_convertvector(given, Ints)), magnitude = bits & 0x7fffu;
    // Without float32 below its normal numbers, which cost a hundred cycles each, or are taken for zero.
    const Floats normal = as_floats((magnitude << 13) + (112u << 23));
    const Floats least = __builtin_convertvector(reinterpret_cast<Ints>(magnitude), Floats) * 0x1p-24f;
    return as_floats(reinterpret_cast<Words>(magnitude < 0x400u ? least : normal) | (bits & 0x8000u) << 16);
#endif
}

Floats widened(const uint16_t* from) {
    Halves given;
    std::memcpy(&given, from, sizeof given);
    return widened(given);
}

float widened(uint16_t bits) {
    const uint32_t shifted = static_cast<uint32_t>(bits & 0x7fff) << 13;
    float magnitude;
    std::memcpy(&magnitude, &shifted, sizeof magnitude);
    return magnitude * (bits & 0x8000 ? -0x1p112f : 0x1p112f);
}

int64_t whole(int64_t number, int64_t of) { return (number + of - 1) / of * of; }

bool is_float8(const Product& w) { return w.kind == E4M3 || w.kind == E5M2; }
bool is_rounded(const Product& w) { return w.kind >= CHANNELS; }  // rows are, before they meet these weights
bool is_dotted(const Product& w) { return DOTS_PAIRS && w.kind == BFLOAT_PAIRS; }
Form form_of(const Product& w) { return w.kind == GROUPS4 ? INT4 : w.kind == LEVELS4 ? LEVELS : INT8; }

// What is the same of all groups of a layer.
struct Grouping {
    int64_t count;        // groups
    int64_t num_words;    // of each output; of float8: pairs
    int64_t value_bytes;  // of a panel's values, before its scales
    int64_t bytes;        // of a panel's group
    int64_t row_bytes;    // of a row's group
};

Grouping grouping(const Product& w) {
    const Form form = form_of(w);
    const int64_t each = is_float8(w) ? 2 : form == INT8 ? 4 : 8, num_words = (w.group + each - 1) / each;
    const int64_t value_bytes = num_words * PANEL * (is_float8(w) ? 2 : 4), scales = w.kind == CHANNELS ? 0 : w.zero < 0 ? 2 : 1;
    const int64_t parts = form == INT4 ? PARTS<INT4> : form == LEVELS ? PARTS<LEVELS> : PARTS<INT8>;
    return {w.num_inputs / w.group, num_words, value_bytes, value_bytes + scales * PANEL * 2, num_words * 4 * parts};
}

int64_t panel_bytes(const Product& w) {
    if (w.kind == FLOAT) return w.num_inputs * PANEL * 4;
    if (w.kind == BFLOAT || w.kind == BFLOAT_PAIRS) return whole(w.num_inputs, 2) * PANEL * 2;
    const Grouping groups = grouping(w);
    return groups.count * groups.bytes;
}

// After the values of a quantised row: this, for each group.
struct Head {
    float scale, total;  // total: of the group's inputs as they are rounded
    int32_t start;       // what a sum begins with
};

int64_t head_at(const Grouping& groups, int64_t g) { return groups.count * groups.row_bytes + g * static_cast<int64_t>(sizeof(Head)); }

// Bytes of a row that is rounded for a layer, an odd number of cache lines, so that the same columns of some rows have places in a cache
// beside each other; 0: it is not.
int64_t row_bytes(const Product& w) {
    if (!is_rounded(w)) return 0;
    if (w.kind == BFLOAT_PAIRS) return whole(w.num_inputs * (DOTS_PAIRS ? 2 : 4), 64) | 64;
    const Grouping groups = grouping(w);
    return whole(groups.count * (sizeof(Head) + groups.row_bytes), 64) | 64;
}

// Floats of 8 bits as float16, which has room for their exponents: E4M3 by a factor of 2 ** -8, which is in the scales of the outputs.
struct Float8 {
    int shift;
    int16_t kept;

    explicit Float8(const Product& w) : shift(w.kind == E4M3 ? 1 : 0), kept(static_cast<int16_t>(w.kind == E4M3 ? 0xbf80 : 0xff00)) {}

    // Of those in the upper bytes.
    Floats widened(Halves bytes) const { return ::widened(bytes >> shift & kept); }
};

template <int ROWS>
void float8_rows(const Product& w, const Linear& layer, const float* x, int64_t stride, const uint8_t* panel, int64_t row, int64_t first) {
    const Grouping groups = grouping(w);
    const Float8 float8(w);
    const float* source = x + row * stride;
    Floats sums[ROWS][COLUMNS] = {};
    for (int64_t g = 0; g < groups.count; ++g, panel += groups.bytes, source += w.group) {
        Floats parts[ROWS][COLUMNS] = {};
        for (int64_t k = 0; k < w.group; k += 2) {
            const uint8_t* weights = panel + k * PANEL;
            Halves both[COLUMNS];
            for (int c = 0; c < COLUMNS; ++c) {
                __builtin_prefetch(weights + c * LANES * 2 + AHEAD);
                std::memcpy(both + c, weights + c * LANES * 2, sizeof both[c]);
            }
            Floats values[COLUMNS];
            for (int c = 0; c < COLUMNS; ++c) values[c] = float8.widened(both[c] << 8);
            for (int m = 0; m < ROWS; ++m) {
                const Floats value = source[m * stride + k] - Floats{};
                for (int c = 0; c < COLUMNS; ++c) parts[m][c] += value * values[c];
            }
            if (k + 1 == w.group) break;
            for (int c = 0; c < COLUMNS; ++c) values[c] = float8.widened(both[c]);
            for (int m = 0; m < ROWS; ++m) {
                const Floats value = source[m * stride + k + 1] - Floats{};
                for (int c = 0; c < COLUMNS; ++c) parts[m][c] += value * values[c];
            }
        }
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + groups.value_bytes);
        for (int c = 0; c < COLUMNS; ++c) {
            const Floats scale = widened(scales + c * LANES);
            for (int m = 0; m < ROWS; ++m) sums[m][c] += parts[m][c] * scale;
        }
    }
    for (int m = 0; m < ROWS; ++m) {
        for (int c = 0; c < COLUMNS; ++c) sums[m][c] *= load(w.scales + first + c * LANES);
        finish(layer, row + m, first, sums[m]);
    }
}

// LEVELS4: the table in every 16 bytes.
Words table_of(const Product& w) {
    uint8_t entries[sizeof(Words)];
    for (size_t i = 0; i < sizeof entries; i += 16) std::memcpy(entries + i, w.levels, 16);
    return words(entries);
}

template <int ROWS, int FORM>
void int_rows(const Product& w, const Linear& layer, const uint8_t* rows, const uint8_t* panel, int64_t row, int64_t first) {
    const Grouping groups = grouping(w);
    const bool has_scales = w.kind != CHANNELS, has_minimums = w.zero < 0;
    const int64_t stride = row_bytes(w), chunk = FORM == INT4 && WIDENS ? CHUNK : groups.num_words;
    const uint8_t* source = rows + row * stride;
    const Words table = FORM == LEVELS ? table_of(w) : Words{};
    Floats sums[ROWS][COLUMNS] = {};
    for (int64_t g = 0; g < groups.count; ++g, panel += groups.bytes) {
        const uint8_t* x = source + g * groups.row_bytes;
        Head heads[ROWS];
        Ints all[ROWS][COLUMNS];
        UNROLLED for (int m = 0; m < ROWS; ++m) {
            std::memcpy(heads + m, source + m * stride + head_at(groups, g), sizeof(Head));
            UNROLLED for (int c = 0; c < COLUMNS; ++c) all[m][c] = Ints{} + heads[m].start;
        }
        for (int64_t begin = 0; begin < groups.num_words; begin += chunk) {
            const int64_t end = begin + chunk < groups.num_words ? begin + chunk : groups.num_words;
            Ints parts[ROWS][COLUMNS];
            UNROLLED for (int m = 0; m < ROWS; ++m)
                UNROLLED for (int c = 0; c < COLUMNS; ++c) parts[m][c] = begun<FORM>(all[m][c]);
            for (int64_t i = begin; i < end; ++i) {
                const uint8_t* weights = panel + i * PANEL * 4;
                for (int b = 0; b < PANEL * 4; b += 64) __builtin_prefetch(weights + b + AHEAD);
                for (int part = 0; part < PARTS<FORM>; ++part) {
                    Words values[COLUMNS];
                    UNROLLED for (int c = 0; c < COLUMNS; ++c) values[c] = part_of<FORM>(words(weights + c * LANES * 4), part, table);
                    UNROLLED for (int m = 0; m < ROWS; ++m) {
                        int32_t four;
                        std::memcpy(&four, x + m * stride + (i * PARTS<FORM> + part) * 4, 4);
                        UNROLLED for (int c = 0; c < COLUMNS; ++c) parts[m][c] = dot<FORM>(parts[m][c], values[c], four);
                    }
                }
            }
            UNROLLED for (int m = 0; m < ROWS; ++m)
                UNROLLED for (int c = 0; c < COLUMNS; ++c) all[m][c] = ended<FORM>(all[m][c], parts[m][c]);
        }
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + groups.value_bytes);
        UNROLLED for (int c = 0; c < COLUMNS; ++c) {
            const Floats scale = has_scales ? widened(scales + c * LANES) : Floats{} + 1.0f;
            UNROLLED for (int m = 0; m < ROWS; ++m)
                sums[m][c] += __builtin_convertvector(all[m][c], Floats) * (scale * heads[m].scale);
        }
        if (!has_minimums) continue;
        UNROLLED for (int c = 0; c < COLUMNS; ++c) {
            const Floats minimum = widened(scales + PANEL + c * LANES);
            UNROLLED for (int m = 0; m < ROWS; ++m) sums[m][c] += minimum * heads[m].total;
        }
    }
    UNROLLED for (int m = 0; m < ROWS; ++m) {
        UNROLLED for (int c = 0; c < COLUMNS; ++c) sums[m][c] *= load(w.scales + first + c * LANES);
        finish(layer, row + m, first, sums[m]);
    }
}

// Cut rows into as few runs of at most so many as there can be, of nearly equal length.
template <typename Run>
void in_runs(int64_t row, int64_t end, const Run& run, int64_t most = MOST_ROWS) {
    const int64_t count = (end - row + most - 1) / most;
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

// Rows that go into a product: floats [M, K], and bytes of the rows that were rounded for it.
struct Input {
    const float* rows;
    const uint8_t* bytes;
};

// Write a panel's weights as float32, an even number of inputs after an even one; of float8 of one group.
void widen(const Product& w, const uint8_t* from, int64_t count, float* out) {
    if (!is_float8(w)) {
        for (int64_t i = 0; i < count * PANEL; i += 2 * PANEL)
            for (int c = 0; c < PANEL; c += LANES) {
                const Words both = words(from + (i + 2 * c) * 2);
                store(out + i + c, as_floats(both << 16));
                store(out + i + PANEL + c, as_floats(both & 0xffff0000u));
            }
        return;
    }
    const Float8 float8(w);
    for (int64_t i = 0; i < count * PANEL; i += 2 * PANEL)
        for (int c = 0; c < PANEL; c += LANES) {
            Halves both;
            std::memcpy(&both, from + i + 2 * c, sizeof both);
            store(out + i + c, float8.widened(both << 8));
            store(out + i + PANEL + c, float8.widened(both));
        }
}

// Outputs of one panel of floats for some rows, more than one run of them. Sums that wait between parts keep their bits.
void multiply_parts(const Product& w, const Linear& layer, const Input& in, int64_t stride, int64_t row, int64_t end, int64_t first,
                    const uint8_t* panel) {
    alignas(64) float wide[PART_INPUTS * PANEL];
    Floats kept[ROWS_TOGETHER * COLUMNS], sums[ROWS_TOGETHER * COLUMNS];
    const bool is_grouped = is_float8(w), dots = is_dotted(w);
    const int64_t group = is_grouped ? w.group : w.num_inputs, last = w.num_inputs / group - 1, bytes = w.kind == FLOAT ? 4 : is_grouped ? 1 : 2;
    const int64_t group_bytes = is_grouped ? grouping(w).bytes : 0, runs = (end - row + MOST_ROWS - 1) / MOST_ROWS;
    int64_t mask = 0;
    while (2 * mask + 2 <= (dots ? runs : runs * 4 / bytes)) mask = 2 * mask + 1;
    for (int64_t g = 0; g <= last; ++g, panel += group_bytes) {
        for (int64_t at = 0; at < group; at += PART_INPUTS) {
            const int64_t size = at + PART_INPUTS < group ? PART_INPUTS : group - at;
            const uint8_t* const weights = panel + at * PANEL * bytes;
            if (w.kind != FLOAT && !dots) widen(w, weights, size, wide);
            const char* const next = reinterpret_cast<const char*>(weights) + size * PANEL * bytes;
            Stretch part{g * group + at, g * group + at + size, at == 0, !is_grouped && at + size == group, kept, next, mask};
            in_runs(row, end, [&](int64_t m, int count) {
                if (dots) BY_SIZE(count, pair_rows, (layer, in.bytes, row_bytes(w), weights, m, first, part), true)
                else BY_SIZE(count, float_rows, (layer, in.rows, stride, w.kind == FLOAT ? reinterpret_cast<const float*>(weights) : wide, m, first, part), true)
                part.kept += count * COLUMNS;
                part.next += size * PANEL * bytes / runs;
            });
        }
        if (!is_grouped) continue;
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + group_bytes) - PANEL;
        for (int c = 0; c < COLUMNS; ++c) {
            const Floats scale = widened(scales + c * LANES), factor = load(w.scales + first + c * LANES);
            for (int64_t i = c; i < (end - row) * COLUMNS; i += COLUMNS) {
                sums[i] = (g ? sums[i] : Floats{}) + kept[i] * scale;
                if (g == last) sums[i] *= factor;
            }
        }
    }
    if (is_grouped)
        for (int64_t m = row; m < end; ++m) finish(layer, m, first, sums + (m - row) * COLUMNS);
}

}  // namespace

#include "groups.h"
#include "tiles.h"

namespace {

// Rows' outputs of one panel. Where there are tiles, the thread holds `Tiles`.
void multiply_panel(const Product& w, const Linear& layer, Input in, int64_t stride, int64_t row, int64_t end, int64_t first) {
    const int64_t bytes = panel_bytes(w);
    const uint8_t* const panel = static_cast<const uint8_t*>(w.weights) + first / PANEL * bytes;
#if defined(TRENCADIS_TILES)
    if (const int64_t step = tile_step(w, end - row)) return multiply_tiles(w, layer, in, row, end, first, panel, step);
#endif
    if (w.kind == BFLOAT_PAIRS && !DOTS_PAIRS) in.rows = reinterpret_cast<const float*>(in.bytes), stride = row_bytes(w) / 4;
    if ((!is_rounded(w) || w.kind == BFLOAT_PAIRS) && end - row > (is_float8(w) ? 2 : 1) * MOST_ROWS) {
        for (int64_t last; row < end; row = last) {
            last = row + ROWS_TOGETHER < end ? row + ROWS_TOGETHER : end;
            multiply_parts(w, layer, in, stride, row, last, first, panel);
        }
        return;
    }
    if (is_unpacked(w) && end - row > MOST_ROWS) {
        for (int64_t last; row < end; row = last) {
            last = row + GROUPED_ROWS_TOGETHER < end ? row + GROUPED_ROWS_TOGETHER : end;
            if (w.kind == GROUPS8) multiply_groups<INT8>(w, layer, in.bytes, row, last, first, panel);
            else if (w.kind == GROUPS4) multiply_groups<INT4>(w, layer, in.bytes, row, last, first, panel);
            else multiply_groups<LEVELS>(w, layer, in.bytes, row, last, first, panel);
        }
        return;
    }
    in_runs(row, end, [&](int64_t m, int count) {
        const Stretch whole{0, w.num_inputs, true, true, nullptr, nullptr, 0};
        if (is_dotted(w)) BY_SIZE(count, pair_rows, (layer, in.bytes, row_bytes(w), panel, m, first, whole), false)
        else switch (w.kind) {
            case FLOAT: BY_SIZE(count, float_rows, (layer, in.rows, stride, reinterpret_cast<const float*>(panel), m, first, whole), false) break;
            case BFLOAT:
            case BFLOAT_PAIRS: BY_SIZE(count, bfloat_rows, (layer, in.rows, stride, reinterpret_cast<const uint16_t*>(panel), m, first)) break;
            case E4M3:
            case E5M2: BY_SIZE(count, float8_rows, (w, layer, in.rows, stride, panel, m, first)) break;
            case CHANNELS:
            case GROUPS8: BY_SIZE(count, int_rows, (w, layer, in.bytes, panel, m, first), INT8) break;
            case LEVELS4: BY_SIZE(count, int_rows, (w, layer, in.bytes, panel, m, first), LEVELS) break;
            default: BY_SIZE(count, int_rows, (w, layer, in.bytes, panel, m, first), INT4)
        }
    });
}

// All elements of a vector by an operation whose order does not matter: halves by halves.
template <typename Element, int COUNT = LANES, typename Vector, typename Operation>
WITHIN Element folded_as(const Vector& vector, const Operation& operation) {
    if constexpr (COUNT == 2) return operation(vector[0], vector[1]);
    else {
        typedef Element Half __attribute__((vector_size(COUNT / 2 * 4)));
        Half halves[2];
        std::memcpy(halves, &vector, sizeof halves);
        return folded_as<Element, COUNT / 2>(operation(halves[0], halves[1]), operation);
    }
}

template <typename Operation>
WITHIN float folded(const Floats& vector, const Operation& operation) { return folded_as<float>(vector, operation); }
template <typename Operation>
WITHIN int32_t folded(const Ints& vector, const Operation& operation) { return folded_as<int32_t>(vector, operation); }

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
    float largest = folded(most, [](auto a, auto b) { return a > b ? a : b; });
    float none = folded(poison, [](auto a, auto b) { return a + b; });
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
    int32_t sum = folded(sums, [](auto a, auto b) { return a + b; });
    for (int64_t k = vectors; k < size; ++k) {
        const float number = none == 0.0f ? x[k] : 0.0f;
        const int32_t rounded = static_cast<int32_t>(number * factor + INTEGERS - INTEGERS);
        out[k] = static_cast<Element>(rounded);
        sum += rounded;
    }
    for (int64_t k = size; k < depth; ++k) out[k] = 0;
    return sum;
}

// Round a row to bfloat16, to nearest and ties to even, and write it as BFLOAT_PAIRS has it, with zeros up to a whole vector.
void narrow_row(const float* x, int64_t size, uint8_t* out) {
    typedef uint16_t Narrow __attribute__((vector_size(LANES * 2)));
    for (int64_t k = 0; k < size; k += LANES) {
        Words bits = {};
        if (k + LANES <= size) bits = words(x + k);
        else std::memcpy(&bits, x + k, static_cast<size_t>(size - k) * 4);
        const Words rounded = bits + 0x7fffu + (bits >> 16 & 1u);
        const Words found = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded;  // what is no number stays none
        const Narrow pairs = __builtin_convertvector(found >> 16, Narrow);
        const Words wide = found & 0xffff0000u;
        if (DOTS_PAIRS) std::memcpy(out + k * 2, &pairs, sizeof pairs);
        else std::memcpy(out + k * 4, &wide, sizeof wide);
    }
}

// Write a row as `row_bytes` of a layer.
ALONE void round_row(const Product& w, const float* x, uint8_t* out) {
    if (w.kind == BFLOAT_PAIRS) return narrow_row(x, w.num_inputs, out);
    const Grouping groups = grouping(w);
    const Form form = form_of(w);
    const int64_t depth = groups.num_words * (form == INT8 ? 4 : 8);
    float apart[MOST_APART];
    for (int64_t g = 0; g < groups.count; ++g) {
        uint8_t* const values = out + g * groups.row_bytes;
        Head head;
        const float* from = w.order ? apart : x + g * w.group;
        if (w.order)
            for (int64_t k = 0; k < w.group; ++k) apart[k] = x[w.order[g * w.group + k]];
        const bool is_wide = groups.row_bytes > depth;
        const int32_t sum = is_wide ? quantise_group(from, w.group, depth, reinterpret_cast<int16_t*>(values), &head.scale)
                                    : quantise_group(from, w.group, depth, reinterpret_cast<int8_t*>(values), &head.scale);
        head.total = head.scale * static_cast<float>(sum);
        head.start = sum * ((form == INT4 ? 0 : TAKEN8) - static_cast<int32_t>(w.zero < 0 ? 0 : w.zero));
        std::memcpy(out + head_at(groups, g), &head, sizeof head);
    }
}

// Where the value of an input lies in a panel's group: its byte, and by how many bits it is shifted.
struct Place {
    int64_t byte;
    int shift;
};

Place place(const Product& w, int64_t k, int64_t output) {
    if (is_float8(w)) return {(k / 2 * PANEL + output) * 2 + k % 2, 0};
    const Form form = form_of(w);
    if (form == INT8) return {(k / 4 * PANEL + output) * 4 + PLACES[k % 4], 0};
    return {(k / 8 * PANEL + output) * 4 + (form == LEVELS ? PLACES[k % 4] : k % 4), k % 8 < 4 ? 0 : 4};
}

float float8_of(uint8_t bits, bool has_four) {
    const uint16_t shifted = static_cast<uint16_t>(bits << 8);
    return widened(has_four ? static_cast<uint16_t>((shifted & 0x8000) | (shifted & 0x7fff) >> 1) : shifted);
}

void read_grouped_row(const Product& w, const uint8_t* panel, int64_t output, float factor, float* out) {
    const Grouping groups = grouping(w);
    const int32_t mask = w.kind == GROUPS4 || w.kind == LEVELS4 ? 15 : 255;
    for (int64_t g = 0, column = 0; g < groups.count; ++g, panel += groups.bytes) {
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + groups.value_bytes) + output;
        const float scale = w.kind == CHANNELS ? 1.0f : widened(scales[0]), minimum = w.zero < 0 ? widened(scales[PANEL]) : 0.0f;
        for (int64_t k = 0; k < w.group; ++k, ++column) {
            const Place at = place(w, k, output);
            const int32_t stored = panel[at.byte] >> at.shift & mask, value = w.levels ? w.levels[stored] : stored;
            const float number = is_float8(w) ? float8_of(panel[at.byte], w.kind == E4M3) : static_cast<float>(value - (w.zero < 0 ? 0 : w.zero));
            out[w.order ? w.order[column] : column] = (number * scale + minimum) * factor;
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
    } else if (w.kind == BFLOAT || w.kind == BFLOAT_PAIRS) {
        const uint16_t* column = reinterpret_cast<const uint16_t*>(panel) + 2 * output;
        for (int64_t k = 0; k < w.num_inputs; ++k) {
            const uint32_t bits = static_cast<uint32_t>(column[k / 2 * 2 * PANEL + k % 2]) << 16;
            float value;
            std::memcpy(&value, &bits, sizeof value);
            out[k] = value * scale;
        }
    } else {
        read_grouped_row(w, panel, output, w.scales[id] * scale, out);
    }
}

}  // namespace
