// Integers in groups, for more rows than one run of them: unpacked once for all. Part of linear.h.
//
// A group ends with sums that become float32, which takes as many registers again: runs have fewer rows than those of other weights. Sums
// that wait for the next groups keep their bits.

#pragma once

namespace {

constexpr int64_t GROUPED_ROWS_TOGETHER = 240;  // for which groups of integers are unpacked once; whole blocks of tiles
constexpr int64_t STEPS = 4;  // words of groups that are unpacked, multiplied without a branch in between: groups are of whole ones
constexpr int64_t WHOLE_GROUP = 16;  // inputs that have as many words in all forms

// Whether many rows meet weights that are unpacked before.
bool is_unpacked(const Product& w) {
    return w.kind >= GROUPS8 && w.kind <= LEVELS4 && w.group <= PART_INPUTS && w.group % WHOLE_GROUP == 0;
}

// Rows that meet unpacked groups together: sums of both kinds are in registers, and there are as many as the instruction takes cycles.
constexpr int64_t GROUP_ROWS = HAS_DOT && COLUMNS == 2 ? 6 : 3;

// Integers of some groups of a panel as they are multiplied, unpacked once for many rows: [words of these groups][COLUMNS].
struct Unpacked {
    alignas(64) Words values[PART_INPUTS / 4 * (WIDENS ? 2 : 1) * COLUMNS];
    Floats scales[PART_INPUTS / WHOLE_GROUP * COLUMNS], minimums[PART_INPUTS / WHOLE_GROUP * COLUMNS];
};

template <int FORM>
void unpack_groups(const Product& w, const Grouping& groups, const uint8_t* panel, int64_t count, Words table, Unpacked* out) {
    Words* values = out->values;
    for (int64_t g = 0; g < count; ++g, panel += groups.bytes) {
        for (int64_t i = 0; i < groups.num_words; ++i)
            for (int part = 0; part < PARTS<FORM>; ++part)
                for (int c = 0; c < COLUMNS; ++c) *values++ = part_of<FORM>(words(panel + (i * COLUMNS + c) * LANES * 4), part, table);
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + groups.value_bytes);
        for (int c = 0; c < COLUMNS; ++c) {
            out->scales[g * COLUMNS + c] = widened(scales + c * LANES);
            if (w.zero < 0) out->minimums[g * COLUMNS + c] = widened(scales + PANEL + c * LANES);
        }
    }
}

// Add to rows' sums what some unpacked groups make; `heads` and `x` are the first row's for the first of these groups.
template <int ROWS, int FORM>
void unpacked_rows(const Unpacked& panel, const Grouping& groups, int64_t count, bool has_minimums, const uint8_t* heads, const uint8_t* x,
                   int64_t stride, Floats* kept) {
    Floats sums[ROWS][COLUMNS];
    UNROLLED for (int m = 0; m < ROWS; ++m)
        UNROLLED for (int c = 0; c < COLUMNS; ++c) sums[m][c] = kept[m * COLUMNS + c];
    const int64_t steps = groups.num_words * PARTS<FORM>, chunk = FORM == INT4 && WIDENS ? CHUNK * PARTS<FORM> : steps;
    const Words* values = panel.values;
    for (int64_t g = 0; g < count; ++g, heads += sizeof(Head), x += groups.row_bytes) {
        Ints all[ROWS][COLUMNS];
        UNROLLED for (int m = 0; m < ROWS; ++m) {
            int32_t start;
            std::memcpy(&start, heads + m * stride + offsetof(Head, start), 4);
            UNROLLED for (int c = 0; c < COLUMNS; ++c) all[m][c] = Ints{} + start;
        }
        for (int64_t begin = 0; begin < steps; begin += chunk) {
            const int64_t end = begin + chunk < steps ? begin + chunk : steps;
            Ints parts[ROWS][COLUMNS];
            UNROLLED for (int m = 0; m < ROWS; ++m)
                UNROLLED for (int c = 0; c < COLUMNS; ++c) parts[m][c] = begun<FORM>(all[m][c]);
            for (int64_t i = begin; i < end; i += STEPS, values += STEPS * COLUMNS)
                UNROLLED for (int s = 0; s < STEPS; ++s)
                    UNROLLED for (int m = 0; m < ROWS; ++m) {
                        int32_t four;
                        std::memcpy(&four, x + m * stride + (i + s) * 4, 4);
                        UNROLLED for (int c = 0; c < COLUMNS; ++c) parts[m][c] = dot<FORM>(parts[m][c], values[s * COLUMNS + c], four);
                    }
            UNROLLED for (int m = 0; m < ROWS; ++m)
                UNROLLED for (int c = 0; c < COLUMNS; ++c) all[m][c] = ended<FORM>(all[m][c], parts[m][c]);
        }
        UNROLLED for (int m = 0; m < ROWS; ++m) {
            float scale, total;
            std::memcpy(&scale, heads + m * stride + offsetof(Head, scale), 4);
            std::memcpy(&total, heads + m * stride + offsetof(Head, total), 4);
            UNROLLED for (int c = 0; c < COLUMNS; ++c) {
                sums[m][c] += __builtin_convertvector(all[m][c], Floats) * (panel.scales[g * COLUMNS + c] * scale);
                if (has_minimums) sums[m][c] += panel.minimums[g * COLUMNS + c] * total;
            }
        }
    }
    UNROLLED for (int m = 0; m < ROWS; ++m)
        UNROLLED for (int c = 0; c < COLUMNS; ++c) kept[m * COLUMNS + c] = sums[m][c];
}

// Unpack a panel's groups, some after others, and have rows `meet` them: how many from which on, and where the next ones begin.
template <int FORM, typename Meet>
void by_groups(const Product& w, const uint8_t* panel, const Meet& meet) {
    const Grouping groups = grouping(w);
    const int64_t together = PART_INPUTS / w.group;
    const Words table = FORM == LEVELS ? table_of(w) : Words{};
    Unpacked unpacked;
    for (int64_t g = 0; g < groups.count; g += together) {
        const int64_t count = g + together < groups.count ? together : groups.count - g;
        unpack_groups<FORM>(w, groups, panel, count, table, &unpacked);
        panel += count * groups.bytes;
        meet(unpacked, groups, g, count, panel);
    }
}

// Outputs of one panel of integers in groups for some rows, more than one run of them. Sums that wait between groups keep their bits.
template <int FORM>
void multiply_groups(const Product& w, const Linear& layer, const uint8_t* rows, int64_t row, int64_t end, int64_t first, const uint8_t* panel) {
    const int64_t stride = row_bytes(w), runs = (end - row + GROUP_ROWS - 1) / GROUP_ROWS;
    Floats kept[GROUPED_ROWS_TOGETHER * COLUMNS];
    for (int64_t i = 0; i < (end - row) * COLUMNS; ++i) kept[i] = Floats{};
    by_groups<FORM>(w, panel, [&](const Unpacked& unpacked, const Grouping& groups, int64_t g, int64_t count, const uint8_t* next) {
        Floats* sums = kept;
        const int64_t share = count * groups.bytes / runs;  // each run asks for its share of the next groups
        in_runs(row, end, [&](int64_t m, int size) {
            for (int64_t i = 0; i < share; i += 64) __builtin_prefetch(next + i);
            next += share;
            const uint8_t* const x = rows + m * stride;
            BY_SIZE(size, unpacked_rows, (unpacked, groups, count, w.zero < 0, x + head_at(groups, g), x + g * groups.row_bytes, stride, sums), FORM)
            sums += size * COLUMNS;
        }, GROUP_ROWS);
    });
    for (int64_t m = row; m < end; ++m) {
        Floats* const sums = kept + (m - row) * COLUMNS;
        for (int c = 0; c < COLUMNS; ++c) sums[c] *= load(w.scales + first + c * LANES);
        finish(layer, m, first, sums);
    }
}

}  // namespace
