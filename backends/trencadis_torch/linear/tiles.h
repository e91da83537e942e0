// Products by the tile unit of a CPU with AMX: a block of at most 16 rows meets 16 outputs of a panel in one instruction. Part of linear.h.
//
// The words of a panel, two bfloat16 or four integers of each output, lie as a tile has them: 16 outputs in 64 bytes, those of the next
// inputs PANEL words further on. So tiles are loaded from the panels that vectors read; 4 bits are unpacked before, once for 32 rows.
//
// Sums of integers are exact: rows get the bits that vectors give, and tiles are used where there are many. `tdpbf16ps` adds even and odd
// inputs of a tile apart, so its sums have other low bits than those of `vdpbf16ps`: a layer that tiles can take is theirs for any number
// of rows, and a row's bits depend on that row alone.
//
// Their instructions end a process that has not asked Linux for tiles: native_build.py loads a library with tiles after it has got them.
// How tiles are laid out belongs to a thread.

#pragma once

#if defined(TRENCADIS_TILE_UNIT)  // another unit with the same functions, in the file that is named
#define TRENCADIS_TILES
#include TRENCADIS_TILE_UNIT
#elif defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define TRENCADIS_TILES

// Not by the compiler's functions: GCC's take the number of a tile as a literal only, and hide that they read and write memory.
namespace {
namespace tile_unit {

void configure(const void* shapes) { asm volatile("ldtilecfg (%0)" : : "r"(shapes) : "memory"); }
void release() { asm volatile("tilerelease"); }

template <int TO>
WITHIN void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TO));
}

template <int TO>
WITHIN void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(TO), "r"(from), "r"(stride) : "memory");
}

template <int FROM>
WITHIN void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(FROM), "r"(to), "r"(stride) : "memory");
}

template <int SUMS, int ROWS, int WEIGHTS>
WITHIN void dot_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
}

// Signed rows, unsigned weights.
template <int SUMS, int ROWS, int WEIGHTS>
WITHIN void dot_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
}

}  // namespace tile_unit
}  // namespace
#endif

namespace {

#if defined(TRENCADIS_TILES)
constexpr bool HAS_TILES = true;

constexpr int64_t BLOCK = 16;            // rows, and outputs, of a tile
constexpr int64_t UNPACKED_WORDS = 64;   // of a group of 4 bits: they fit into the first cache
constexpr int ROWS_TILE = 4, WEIGHTS_TILE = 6;  // the first two of each; sums are before

// How tiles are laid out; see LDTILECFG in Intel's manual of the architecture, volume 2.
struct TileShapes {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

thread_local int64_t tile_shapes = 0;  // of the thread: rows and words of a step; 0: none

// What a member of a team holds while it multiplies.
struct Tiles {
    ~Tiles() {
        if (tile_shapes) tile_unit::release();
        tile_shapes = 0;
    }
};

// Tiles for blocks of `rows`, `step` words at a time.
void shape_tiles(int64_t rows, int64_t step) {
    if (tile_shapes == rows * 256 + step) return;
    tile_shapes = rows * 256 + step;
    TileShapes shapes{};
    shapes.palette = 1;
    for (int i = 0; i < 8; ++i) {
        shapes.rows[i] = static_cast<uint8_t>(i < WEIGHTS_TILE ? rows : step);
        shapes.row_bytes[i] = static_cast<uint16_t>(i / 2 * 2 == ROWS_TILE ? step * 4 : 64);
    }
    tile_unit::configure(&shapes);
}

// Words of each output that a step of tiles takes; 0: vectors multiply. Fewer than half of a tile's are not worth it.
int64_t tile_step(const Product& w, int64_t num_rows) {
    if (!is_rounded(w) || num_rows < 1) return 0;
    const bool is_packed = form_of(w) != INT8;
    int64_t count = whole(w.num_inputs, 2) / 2;
    if (w.kind != BFLOAT_PAIRS) {
        // As many rows as vectors take at a time wait for memory: reading a panel once is all there is to gain.
        count = num_rows > MOST_ROWS ? grouping(w).num_words * (is_packed ? 2 : 1) : 0;
        if (is_packed && count > UNPACKED_WORDS) return 0;
    }
    return count % 8 || !count ? 0 : count % 16 ? 8 : 16;
}

// One vector of outputs, and those after it up to WIDE, meet the blocks of rows that are loaded.
template <int BLOCKS, bool FLOATS, int C = 0>
WITHIN void meet(const uint8_t* weights) {
    constexpr int WIDE = COLUMNS / BLOCKS, FROM = WEIGHTS_TILE + C % 2;
    tile_unit::load<FROM>(weights + C * LANES * 4, PANEL * 4);
    if constexpr (FLOATS) tile_unit::dot_pairs<C, ROWS_TILE, FROM>();
    else tile_unit::dot_bytes<C, ROWS_TILE, FROM>();
    if constexpr (BLOCKS == 2 && FLOATS) tile_unit::dot_pairs<WIDE + C, ROWS_TILE + 1, FROM>();
    if constexpr (BLOCKS == 2 && !FLOATS) tile_unit::dot_bytes<WIDE + C, ROWS_TILE + 1, FROM>();
    if constexpr (C + 1 < WIDE) meet<BLOCKS, FLOATS, C + 1>(weights);
}

template <int BLOCKS, int T = 0>
WITHIN void leave(char* const (&sums)[2]) {
    constexpr int WIDE = COLUMNS / BLOCKS;
    tile_unit::store<T>(sums[T / WIDE] + T % WIDE * LANES * 4, PANEL * 4);
    if constexpr (T + 1 < COLUMNS) leave<BLOCKS, T + 1>(sums);
}

// Some words of rows, times those of a panel, for one or two blocks of rows that are `apart` rows from each other: sums [rows, PANEL] of
// float32 or int32. One block meets all outputs of a panel at once, two meet half of them.
template <int BLOCKS, bool FLOATS>
void tile_sums(const uint8_t* rows, int64_t stride, int64_t apart, const uint8_t* weights, int64_t count, int64_t step, bool asks,
               void* out) {
    for (int first = 0; first < COLUMNS; first += COLUMNS / BLOCKS, asks = false) {
        tile_unit::zero<0>();
        tile_unit::zero<1>();
        tile_unit::zero<2>();
        tile_unit::zero<3>();
        for (int64_t at = 0; at < count; at += step) {
            const uint8_t* const from = weights + at * PANEL * 4;
            for (int64_t b = 0; asks && b < step * PANEL * 4; b += 64) __builtin_prefetch(from + step * PANEL * 4 + b);
            tile_unit::load<ROWS_TILE>(rows + at * 4, stride);
            if constexpr (BLOCKS == 2) tile_unit::load<ROWS_TILE + 1>(rows + apart * stride + at * 4, stride);
            meet<BLOCKS, FLOATS>(from + first * LANES * 4);
        }
        char* const to = static_cast<char*>(out) + first * LANES * 4;
        leave<BLOCKS>({to, to + apart * PANEL * 4});
    }
}

// Write a group's values of 4 bits as those of 8, or as what a table has for them.
template <int FORM>
void unpack(const Product& w, const uint8_t* from, int64_t num_words, uint8_t* to) {
    const Words table = FORM == LEVELS ? table_of(w) : Words{};
    for (int64_t i = 0; i < num_words; ++i)
        for (int half = 0; half < 2; ++half)
            for (int c = 0; c < COLUMNS; ++c) {
                const Words low = halves(words(from + (i * COLUMNS + c) * LANES * 4), half), found = FORM == LEVELS ? looked_up(table, low) : low;
                std::memcpy(to + ((i * 2 + half) * COLUMNS + c) * LANES * 4, &found, sizeof found);
            }
}

// Add what a group's integers are worth, which wait in `found`, to the sums of the rows.
void add_group(const Product& w, const Grouping& groups, const uint8_t* rows, int64_t stride, int64_t num_rows, int64_t g,
               const uint8_t* panel, const Ints* found, Floats* sums) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + groups.value_bytes);
    for (int64_t m = 0; m < num_rows; ++m) {
        Head head;
        std::memcpy(&head, rows + m * stride + g * sizeof(Head), sizeof head);
        for (int c = 0; c < COLUMNS; ++c) {
            const Floats scale = w.kind == CHANNELS ? Floats{} + 1.0f : widened(scales + c * LANES);
            Floats& sum = sums[m * COLUMNS + c];
            sum += __builtin_convertvector(found[m * COLUMNS + c] + head.start, Floats) * (scale * head.scale);
            if (w.zero < 0) sum += widened(scales + PANEL + c * LANES) * head.total;
        }
    }
}

// At most two blocks of rows, for one panel; sums [rows, COLUMNS].
void multiply_blocks(const Product& w, const uint8_t* rows, int64_t num_rows, int64_t block, int64_t step, const uint8_t* panel, bool asks,
                     Floats* sums) {
    const int64_t stride = row_bytes(w), apart = num_rows - block;
    if (w.kind == BFLOAT_PAIRS) {
        const int64_t count = whole(w.num_inputs, 2) / 2;
        if (apart) tile_sums<2, true>(rows, stride, apart, panel, count, step, asks, sums);
        else tile_sums<1, true>(rows, stride, apart, panel, count, step, asks, sums);
        return;
    }
    alignas(64) uint8_t unpacked[UNPACKED_WORDS * PANEL * 4];
    alignas(64) Ints found[2 * BLOCK * COLUMNS];
    const Grouping groups = grouping(w);
    const Form form = form_of(w);
    for (int64_t i = 0; i < num_rows * COLUMNS; ++i) sums[i] = Floats{};
    for (int64_t g = 0; g < groups.count; ++g, panel += groups.bytes) {
        const uint8_t* const x = rows + groups.count * sizeof(Head) + g * groups.row_bytes;
        if (form == INT4) unpack<INT4>(w, panel, groups.num_words, unpacked);
        if (form == LEVELS) unpack<LEVELS>(w, panel, groups.num_words, unpacked);
        const uint8_t* const values = form == INT8 ? panel : unpacked;
        const int64_t count = groups.row_bytes / 4;
        if (apart) tile_sums<2, false>(x, stride, apart, values, count, step, asks && form == INT8, found);
        else tile_sums<1, false>(x, stride, apart, values, count, step, asks && form == INT8, found);
        add_group(w, groups, rows, stride, num_rows, g, panel, found, sums);
    }
}

// Rows' outputs of one panel. All blocks have the same number of rows: the last may begin with some that the one before has.
void multiply_tiles(const Product& w, const Linear& layer, const Input& in, int64_t row, int64_t end, int64_t first, const uint8_t* panel,
                    int64_t step) {
    alignas(64) Floats sums[2 * BLOCK * COLUMNS];
    const int64_t stride = row_bytes(w), block = end - row < BLOCK ? end - row : BLOCK;
    shape_tiles(block, step);
    for (int64_t at = row, last; at < end; at = last) {
        last = at + 2 * BLOCK < end ? at + 2 * BLOCK : end;
        const int64_t from = last - at < block ? last - block : at;
        multiply_blocks(w, in.bytes + from * stride, last - from, block, step, panel, at == row, sums);
        for (int64_t m = at; m < last; ++m) {
            Floats* const found = sums + (m - from) * COLUMNS;
            for (int c = 0; c < COLUMNS && w.kind != BFLOAT_PAIRS; ++c) found[c] *= load(w.scales + first + c * LANES);
            finish(layer, m, first, found);
        }
    }
}
#else
constexpr bool HAS_TILES = false;
struct Tiles {};
#endif

}  // namespace
