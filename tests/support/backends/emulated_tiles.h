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

template <int TO>
void zero() {
    expect(is_usable(TO));
    std::memset(unit.tiles[TO], 0, sizeof unit.tiles[TO]);
}

template <int TO>
void load(const void* from, int64_t stride) {
    zero<TO>();
    for (int m = 0; m < unit.rows[TO]; ++m)
        std::memcpy(unit.tiles[TO][m], static_cast<const char*>(from) + m * stride, static_cast<size_t>(unit.row_bytes[TO]));
}

template <int FROM>
void store(void* to, int64_t stride) {
    expect(is_usable(FROM));
    for (int m = 0; m < unit.rows[FROM]; ++m)
        std::memcpy(static_cast<char*>(to) + m * stride, unit.tiles[FROM][m], static_cast<size_t>(unit.row_bytes[FROM]));
}

// Sums of a tile [m, n], by `add(sums of a row, k, words of a row, words of the weights)` for all k of each row.
template <int SUMS, int ROWS, int WEIGHTS, typename Row>
void each_row(const Row& row) {
    ++num_dots;
    expect(SUMS != ROWS && SUMS != WEIGHTS && ROWS != WEIGHTS);
    expect(is_usable(SUMS) && is_usable(ROWS) && is_usable(WEIGHTS));
    expect(unit.rows[SUMS] == unit.rows[ROWS] && unit.row_bytes[SUMS] == unit.row_bytes[WEIGHTS]);
    expect(unit.row_bytes[ROWS] == 4 * unit.rows[WEIGHTS] && unit.row_bytes[SUMS] % 4 == 0);
    for (int m = 0; m < unit.rows[SUMS]; ++m) row(unit.tiles[SUMS][m], unit.tiles[ROWS][m], unit.row_bytes[ROWS] / 4, unit.row_bytes[SUMS] / 4);
}

template <int SUMS, int ROWS, int WEIGHTS>
void dot_bytes() {
    each_row<SUMS, ROWS, WEIGHTS>([](uint8_t* sums, const uint8_t* row, int num_words, int num_outputs) {
        for (int n = 0; n < num_outputs; ++n) {
            uint32_t sum;
            std::memcpy(&sum, sums + 4 * n, 4);
            for (int k = 0; k < num_words; ++k)
                for (int i = 0; i < 4; ++i)
                    sum += static_cast<uint32_t>(static_cast<int8_t>(row[4 * k + i]) * static_cast<int>(unit.tiles[WEIGHTS][k][4 * n + i]));
            std::memcpy(sums + 4 * n, &sum, 4);
        }
    });
}

// To float32, to nearest and ties to even; what would be below its normal numbers with any exponent is 0. Sums of two floats, and of one
// and a product of bfloat16, have the bits in float64 first that they need to be rounded once more.
float rounded(double value) {
    if (std::fabs(static_cast<float>(value * 0x1p100)) < 0x1p-26f) return std::copysign(0.0f, static_cast<float>(value));
    return static_cast<float>(value);
}

float bfloat(const uint8_t* from) {
    uint16_t narrow;
    std::memcpy(&narrow, from, 2);
    const uint32_t bits = static_cast<uint32_t>(narrow & 0x7f80 ? narrow : narrow & 0x8000) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <int SUMS, int ROWS, int WEIGHTS>
void dot_pairs() {
    each_row<SUMS, ROWS, WEIGHTS>([](uint8_t* sums, const uint8_t* row, int num_words, int num_outputs) {
        for (int n = 0; n < num_outputs; ++n) {
            float apart[2] = {};
            for (int k = 0; k < num_words; ++k)
                for (int i = 0; i < 2; ++i) {
                    const double product = static_cast<double>(bfloat(row + 4 * k + 2 * i)) * static_cast<double>(bfloat(unit.tiles[WEIGHTS][k] + 4 * n + 2 * i));
                    apart[i] = rounded(product + static_cast<double>(apart[i]));
                }
            float sum;
            std::memcpy(&sum, sums + 4 * n, 4);
            sum = rounded(static_cast<double>(sum) + static_cast<double>(rounded(static_cast<double>(apart[0]) + static_cast<double>(apart[1]))));
            std::memcpy(sums + 4 * n, &sum, 4);
        }
    });
}

#if defined(TILES_ARE_REFUSED)
int64_t ask() { return TILES_ARE_REFUSED; }
#else
int64_t ask() { return 0; }
#endif

}  // namespace tile_unit
}  // namespace

extern "C" {

// Since the library was loaded: products of tiles, broken rules, configurations; and threads that have one.
int64_t tile_unit_dots() { return tile_unit::num_dots; }
int64_t tile_unit_faults() { return tile_unit::num_faults; }
int64_t tile_unit_configured() { return tile_unit::num_configured; }
int64_t tile_unit_open() { return tile_unit::num_open; }

}  // extern "C"
