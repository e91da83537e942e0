// A tile unit in plain C++ in place of that of AMX, see tiles.h: what its instructions compute, and which of their rules were broken.
//
// Source: Intel's manual of the architecture, volume 2: LDTILECFG, TILELOADD, TILESTORED, TDPBSUD, TDPBF16PS.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {
namespace tile_unit {

struct Unit {
    bool is_configured = false;
    int rows[8] = {}, row_bytes[8] = {};
    uint8_t tiles[8][16][64] = {};
};

thread_local Unit unit;
std::atomic<int64_t> num_dots{0}, num_faults{0}, num_open{0}, num_configured{0};

void expect(bool is_right) { num_faults += !is_right; }

void release() {
    num_open -= unit.is_configured;
    unit = Unit{};
}

void configure(const void* shapes) {
    const uint8_t* const bytes = static_cast<const uint8_t*>(shapes);
    ++num_configured;
    release();
    expect(bytes[0] == 1);
    for (int i = 1; i < 16; ++i) expect(bytes[i] == 0);
    for (int i = 32; i < 48; ++i) expect(bytes[i] == 0);
    for (int i = 56; i < 64; ++i) expect(bytes[i] == 0);
    for (int i = 0; i < 8; ++i) {
        unit.rows[i] = bytes[48 + i];
        unit.row_bytes[i] = bytes[16 + 2 * i] + 256 * bytes[17 + 2 * i];
        expect(unit.rows[i] <= 16 && unit.row_bytes[i] <= 64 && (unit.rows[i] == 0) == (unit.row_bytes[i] == 0));
    }
    unit.is_configured = true;
    ++num_open;
}

bool is_usable(int tile) { return unit.is_configured && unit.rows[tile]; }

void zero_tile(int to) {
    expect(is_usable(to));
    std::memset(unit.tiles[to], 0, sizeof unit.tiles[to]);
}

void load_tile(int to, const char* from, int64_t stride) {
    zero_tile(to);
    for (int m = 0; m < unit.rows[to]; ++m) std::memcpy(unit.tiles[to][m], from + m * stride, static_cast<size_t>(unit.row_bytes[to]));
}

void store_tile(int from, char* to, int64_t stride) {
    expect(is_usable(from));
    for (int m = 0; m < unit.rows[from]; ++m) std::memcpy(to + m * stride, unit.tiles[from][m], static_cast<size_t>(unit.row_bytes[from]));
}

int32_t bytes_added(int32_t sum, const uint8_t* row, const uint8_t (*weights)[64], int num_words) {
    uint32_t whole = static_cast<uint32_t>(sum);
    for (int k = 0; k < num_words; ++k)
        for (int i = 0; i < 4; ++i) whole += static_cast<uint32_t>(static_cast<int8_t>(row[4 * k + i]) * static_cast<int>(weights[k][i]));
    return static_cast<int32_t>(whole);
}

// To float32, to nearest and ties to even; what would be below its normal numbers with any exponent is 0. Sums of two floats, and of one
// and a product of bfloat16, have the bits in float64 first that they need to be rounded once more.
float rounded(double value) {
    if (std::fabs(static_cast<float>(value * 0x1p100)) < 0x1p-26f) return std::copysign(0.0f, static_cast<float>(value));
    return static_cast<float>(value);
}

double bfloat(const uint8_t* from) {
    uint16_t narrow;
    std::memcpy(&narrow, from, 2);
    const uint32_t bits = static_cast<uint32_t>(narrow & 0x7f80 ? narrow : narrow & 0x8000) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return static_cast<double>(value);
}

float pairs_added(float sum, const uint8_t* row, const uint8_t (*weights)[64], int num_words) {
    float apart[2] = {};
    for (int k = 0; k < num_words; ++k)
        for (int i = 0; i < 2; ++i) apart[i] = rounded(bfloat(row + 4 * k + 2 * i) * bfloat(weights[k] + 2 * i) + static_cast<double>(apart[i]));
    return rounded(static_cast<double>(sum) + static_cast<double>(rounded(static_cast<double>(apart[0]) + static_cast<double>(apart[1]))));
}

// Add the products of rows and weights to sums, by what adds those of one row and one output.
template <typename Number, typename Added>
void dot_tiles(int sums, int rows, int weights, const Added& added) {
    ++num_dots;
    expect(sums != rows && sums != weights && rows != weights);
    expect(is_usable(sums) && is_usable(rows) && is_usable(weights));
    expect(unit.rows[sums] == unit.rows[rows] && unit.row_bytes[sums] == unit.row_bytes[weights]);
    expect(unit.row_bytes[rows] == 4 * unit.rows[weights] && unit.row_bytes[sums] % 4 == 0);
    for (int m = 0; m < unit.rows[sums]; ++m)
        for (int n = 0; n < unit.row_bytes[sums]; n += 4) {
            Number sum;
            std::memcpy(&sum, unit.tiles[sums][m] + n, 4);
            const auto* const column = reinterpret_cast<const uint8_t(*)[64]>(unit.tiles[weights][0] + n);
            sum = added(sum, unit.tiles[rows][m], column, unit.row_bytes[rows] / 4);
            std::memcpy(unit.tiles[sums][m] + n, &sum, 4);
        }
}

void dot_pairs_of(int sums, int rows, int weights) { dot_tiles<float>(sums, rows, weights, pairs_added); }
void dot_bytes_of(int sums, int rows, int weights) { dot_tiles<int32_t>(sums, rows, weights, bytes_added); }

template <int TO>
void zero() {
    zero_tile(TO);
}

template <int TO>
void load(const void* from, int64_t stride) {
    load_tile(TO, static_cast<const char*>(from), stride);
}

template <int FROM>
void store(void* to, int64_t stride) {
    store_tile(FROM, static_cast<char*>(to), stride);
}

template <int SUMS, int ROWS, int WEIGHTS>
void dot_pairs() {
    dot_pairs_of(SUMS, ROWS, WEIGHTS);
}

template <int SUMS, int ROWS, int WEIGHTS>
void dot_bytes() {
    dot_bytes_of(SUMS, ROWS, WEIGHTS);
}

}  // namespace tile_unit
}  // namespace

extern "C" {

// Since the library was loaded: products of tiles, broken rules, configurations; and threads that have one.
int64_t tile_unit_dots() { return tile_unit::num_dots; }
int64_t tile_unit_faults() { return tile_unit::num_faults; }
int64_t tile_unit_configured() { return tile_unit::num_configured; }
int64_t tile_unit_open() { return tile_unit::num_open; }

}  // extern "C"
