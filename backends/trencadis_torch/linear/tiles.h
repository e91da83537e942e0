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

constexpr int64_t BLOCK = 16;         // rows, and outputs, of a tile
constexpr int64_t PART_WORDS = 64;    // of each output, that all rows meet before they meet the next ones
constexpr int64_t FEW_GROUPED = 48;   // rows that vectors multiply by integers in groups more quickly
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
    int64_t count = whole(w.num_inputs, 2) / 2;
    // Up to as many rows as vectors take at a time wait for memory: reading a panel once is all there is to gain.
    if (w.kind == CHANNELS) count = num_rows > MOST_ROWS ? grouping(w).num_words : 0;
    else if (w.kind != BFLOAT_PAIRS) count = is_unpacked(w) && num_rows > FEW_GROUPED ? grouping(w).row_bytes / 4 : 0;
    return count % 8 || !count || num_rows < 1 ? 0 : count % 16 ? 8 : 16;
}

// Rows in blocks as few as there can be, all of the same number of rows: the last begins with some that the one before has.
struct Blocks {
    int64_t row, end, count, size;

    Blocks(int64_t row, int64_t end) : row(row), end(end), count((end - row + BLOCK - 1) / BLOCK), size((end - row + count - 1) / count) {}

    int64_t first(int64_t block) const { return block + 1 < count ? row + block * size : end - size; }

    // Where a row's sums are among those of all blocks.
    int64_t place(int64_t m) const { return m - row < (count - 1) * size ? m - row : m - end + count * size; }
};

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

// Load or store all sums of one block, or half of those of two, which are `apart` bytes from each other.
template <int BLOCKS, bool LOADS, int T = 0>
WITHIN void move_sums(char* sums, int64_t apart) {
    constexpr int WIDE = COLUMNS / BLOCKS;
    char* const at = sums + T / WIDE * apart + T % WIDE * LANES * 4;
    if constexpr (LOADS) tile_unit::load<T>(at, PANEL * 4);
    else tile_unit::store<T>(at, PANEL * 4);
    if constexpr (T + 1 < COLUMNS) move_sums<BLOCKS, LOADS, T + 1>(sums, apart);
}

// Words of a panel that rows meet together.
struct WordRun {
    const uint8_t* weights;
    int64_t count, step;
    bool starts;          // sums start as zeros
    const uint8_t* next;  // what is asked for, `share` bytes in each step
    int64_t share;
};

// Rows of one or two blocks, `apart` bytes from each other, times some words of a panel, added to the sums of each block [rows, PANEL] of
// float32 or int32, `sums_apart` bytes from each other. One block meets all outputs of a panel at once, two meet half of them.
template <int BLOCKS, bool FLOATS>
void tile_sums(const WordRun& part, const uint8_t* rows, int64_t stride, int64_t apart, char* sums, int64_t sums_apart) {
    const uint8_t* next = part.next;
    for (int first = 0; first < COLUMNS; first += COLUMNS / BLOCKS) {
        char* const to = sums + first * LANES * 4;
        if (part.starts) {
            tile_unit::zero<0>();
            tile_unit::zero<1>();
            tile_unit::zero<2>();
            tile_unit::zero<3>();
        } else {
            move_sums<BLOCKS, true>(to, sums_apart);
        }
        for (int64_t at = 0; at < part.count; at += part.step) {
            for (int64_t b = 0; first == 0 && b < part.share; b += 64, next += 64) __builtin_prefetch(next);
            tile_unit::load<ROWS_TILE>(rows + at * 4, stride);
            if constexpr (BLOCKS == 2) tile_unit::load<ROWS_TILE + 1>(rows + apart + at * 4, stride);
            meet<BLOCKS, FLOATS>(part.weights + (at * PANEL + first * LANES) * 4);
        }
        move_sums<BLOCKS, false>(to, sums_apart);
    }
}

// Outputs of one panel for some rows, by floats or by integers whose scales are those of the outputs. Two blocks of rows make a run. Runs
// ask for the next words, each for its share; two runs do not: what they would ask for is there before by a CPU's own guesses.
template <bool FLOATS>
void multiply_blocks(const Product& w, const Linear& layer, const uint8_t* rows, const Blocks& blocks, int64_t first, const uint8_t* panel,
                     int64_t step) {
    alignas(64) char kept[GROUPED_ROWS_TOGETHER * PANEL * 4];
    const int64_t stride = row_bytes(w), size = PANEL * 4, words = panel_bytes(w) / size, runs = (blocks.count + 1) / 2;
    const int64_t most = runs > 1 ? PART_WORDS : words, share = runs == 2 ? 0 : whole(step * size / runs, 64);
    for (int64_t at = 0; at < words; at += most) {
        const int64_t count = at + most < words ? most : words - at;
        WordRun part{panel + at * size, count, step, at == 0, panel + (at + (runs > 1 ? count : step)) * size, share};
        for (int64_t b = 0; b < blocks.count; b += 2, part.next += count / step * share) {
            const uint8_t* const x = rows + blocks.first(b) * stride + at * 4;
            char* const sums = kept + b * blocks.size * size;
            if (b + 1 == blocks.count) tile_sums<1, FLOATS>(part, x, stride, 0, sums, 0);
            else tile_sums<2, FLOATS>(part, x, stride, (blocks.first(b + 1) - blocks.first(b)) * stride, sums, blocks.size * size);
        }
    }
    for (int64_t m = blocks.row; m < blocks.end; ++m) {
        Floats sums[COLUMNS];
        std::memcpy(sums, kept + blocks.place(m) * size, sizeof sums);
        Head head{};
        if (!FLOATS) std::memcpy(&head, rows + m * stride + head_at(grouping(w), 0), sizeof head);
        for (int c = 0; c < COLUMNS && !FLOATS; ++c) {
            const Ints found = reinterpret_cast<Ints>(sums[c]) + head.start;
            sums[c] = (Floats{} + __builtin_convertvector(found, Floats) * head.scale) * load(w.scales + first + c * LANES);
        }
        finish(layer, m, first, sums);
    }
}

// Add to the sums of a block's rows what some unpacked groups make; `heads` and `x` are the first row's for the first of these groups.
template <bool MINIMUMS>
void meet_groups(const Unpacked& panel, const Grouping& groups, int64_t count, const uint8_t* heads, const uint8_t* x, int64_t stride,
                 int64_t num_rows, int64_t step, Floats* kept) {
    alignas(64) Ints found[PART_INPUTS / (8 * 4) * BLOCK * COLUMNS];  // of groups that have a step at least
    const int64_t words = groups.row_bytes / 4, size = BLOCK * COLUMNS;
    for (int64_t g = 0; g < count; ++g)
        tile_sums<1, false>(WordRun{reinterpret_cast<const uint8_t*>(panel.values + g * words * COLUMNS), words, step, true, nullptr, 0},
                            x + g * groups.row_bytes, stride, 0, reinterpret_cast<char*>(found + g * size), 0);
    for (int64_t m = 0; m < num_rows; ++m) {
        Floats sums[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) sums[c] = kept[m * COLUMNS + c];
        for (int64_t g = 0; g < count; ++g) {
            Head head;
            std::memcpy(&head, heads + m * stride + g * sizeof head, sizeof head);
            UNROLLED for (int c = 0; c < COLUMNS; ++c) {
                const Ints all = found[g * size + m * COLUMNS + c] + head.start;
                sums[c] += __builtin_convertvector(all, Floats) * (panel.scales[g * COLUMNS + c] * head.scale);
                if (MINIMUMS) sums[c] += panel.minimums[g * COLUMNS + c] * head.total;
            }
        }
        for (int c = 0; c < COLUMNS; ++c) kept[m * COLUMNS + c] = sums[c];
    }
}

// As multiply_groups.
template <int FORM>
void multiply_grouped_blocks(const Product& w, const Linear& layer, const uint8_t* rows, const Blocks& blocks, int64_t first,
                             const uint8_t* panel, int64_t step) {
    const int64_t stride = row_bytes(w);
    Floats kept[GROUPED_ROWS_TOGETHER * COLUMNS];
    for (int64_t i = 0; i < blocks.count * blocks.size * COLUMNS; ++i) kept[i] = Floats{};
    by_groups<FORM>(w, panel, [&](const Unpacked& unpacked, const Grouping& groups, int64_t g, int64_t count, const uint8_t* next) {
        const int64_t share = count * groups.bytes / blocks.count;
        for (int64_t b = 0; b < blocks.count; ++b, next += share) {
            for (int64_t i = 0; i < share; i += 64) __builtin_prefetch(next + i);
            const uint8_t* const x = rows + blocks.first(b) * stride;
            const auto meet = w.zero < 0 ? meet_groups<true> : meet_groups<false>;
            meet(unpacked, groups, count, x + head_at(groups, g), x + g * groups.row_bytes, stride, blocks.size, step, kept + b * blocks.size * COLUMNS);
        }
    });
    for (int64_t m = blocks.row; m < blocks.end; ++m) {
        Floats* const sums = kept + blocks.place(m) * COLUMNS;
        for (int c = 0; c < COLUMNS; ++c) sums[c] *= load(w.scales + first + c * LANES);
        finish(layer, m, first, sums);
    }
}

// Rows' outputs of one panel, by so many words at a time.
void multiply_tiles(const Product& w, const Linear& layer, const Input& in, int64_t row, int64_t end, int64_t first, const uint8_t* panel,
                    int64_t step) {
    for (int64_t last; row < end; row = last) {
        last = row + GROUPED_ROWS_TOGETHER < end ? row + GROUPED_ROWS_TOGETHER : end;
        const Blocks blocks(row, last);
        shape_tiles(blocks.size, step);
        if (w.kind == BFLOAT_PAIRS) multiply_blocks<true>(w, layer, in.bytes, blocks, first, panel, step);
        else if (w.kind == CHANNELS) multiply_blocks<false>(w, layer, in.bytes, blocks, first, panel, step);
        else if (w.kind == GROUPS8) multiply_grouped_blocks<INT8>(w, layer, in.bytes, blocks, first, panel, step);
        else if (w.kind == GROUPS4) multiply_grouped_blocks<INT4>(w, layer, in.bytes, blocks, first, panel, step);
        else multiply_grouped_blocks<LEVELS>(w, layer, in.bytes, blocks, first, panel, step);
    }
}
#else
constexpr bool HAS_TILES = false;
struct Tiles {};
#endif

}  // namespace
