// Few rows for each KV head, as in a decode or with a few drafts: memory is the limit.
//
// Memory is read in its own order, KEYS keys with all heads at a time, the keys of a tile, then its values; nothing is transposed
// but sums. It is asked for a fixed distance ahead of what is computed, across tiles and into the next item.

#pragma once

#include "attention_layer.h"

namespace {

constexpr int FEW_ROWS = 16, ROWS_AT_ONCE = 4, KEYS = 4;
constexpr int PARTS = LANES / KEYS;      // of a vector of scores
constexpr int64_t AHEAD_BYTES = 12288;  // so far ahead memory is asked for; measured

// Scores of R rows and KEYS keys, each still in PARTS parts: out[r × LANES × PARTS]. Keys lie `at` bytes behind the addresses given.
template <class Cache, int R>
__attribute__((noinline)) void score_keys(const float *queries, int64_t stride, const char *const *keys, int64_t at, int64_t dim, float *out) {
  Vec sums[R][KEYS] = {};
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) {
    Vec query[R];
    UNROLL for (int r = 0; r < R; r++) query[r] = in_register(load(queries + r * stride + d));
    UNROLL for (int k = 0; k < KEYS; k++) {
      Vec x = in_register(Cache::some(keys[k] + at, d));
      UNROLL for (int r = 0; r < R; r++) sums[r][k] += x * query[r];
    }
  }
  if (d < dim)
    UNROLL for (int k = 0; k < KEYS; k++) {
      Vec x = partial_vector<Cache>(keys[k] + at, d, dim);
      UNROLL for (int r = 0; r < R; r++) sums[r][k] += x * load(queries + r * stride + d);
    }
  UNROLL for (int r = 0; r < R; r++) store(out + r * LANES * PARTS, fold<1, KEYS>(sums[r]));
}

// sums[r] += weights[r] · values, for V vectors of elements of R rows; of K keys, or of count if K is 0.
template <class Cache, int R, int V, int K>
ALWAYS void add_vectors(float *sums, int64_t stride, const float *weights, int64_t apart, const char *const *values, int64_t at,
                        int64_t d, int64_t dim, int count) {
  Vec held[R][V];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) held[r][v] = load(sums + r * stride + d + v * LANES);
  UNROLL for (int k = 0; k < (K ? K : count); k++) {
    Vec x[V];
    UNROLL for (int v = 0; v < V; v++)
      x[v] = in_register(V == 1 ? element_vector<Cache>(values[k] + at, d, dim) : Cache::some(values[k] + at, d + v * LANES));
    UNROLL for (int r = 0; r < R; r++) {
      const Vec weight = in_register(splat(weights[r * apart + k]));
      UNROLL for (int v = 0; v < V; v++) held[r][v] += x[v] * weight;
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) store(sums + r * stride + d + v * LANES, held[r][v]);
}

// sums[r] += weights[r] · values, for R rows and at most KEYS keys.
template <class Cache, int R>
__attribute__((noinline)) void add_values(float *sums, int64_t stride, const float *weights, const char *const *values, int64_t at, int64_t dim, int count) {
  constexpr int V = R * 4 * 4 <= REGISTERS * 3 ? 4 : 2;
  float scaled[R * KEYS];
  int64_t apart = TILE;
  if (Cache::SCALED) {
    for (int k = 0; k < count; k++) {
      float scale = Cache::scale(values[k] + at, dim);
      UNROLL for (int r = 0; r < R; r++) scaled[r * KEYS + k] = weights[r * TILE + k] * scale;
    }
    weights = scaled, apart = KEYS;
  }
  int64_t d = 0;
  if (count == KEYS)
    for (; d + V * LANES <= dim; d += V * LANES) add_vectors<Cache, R, V, KEYS>(sums, stride, weights, apart, values, at, d, dim, count);
  for (; d < dim; d += LANES) add_vectors<Cache, R, 1, 0>(sums, stride, weights, apart, values, at, d, dim, count);
}

#define BY_ROWS(rows, function, ...)                   \
  switch (rows) {                                      \
    case 1: function<Cache, 1>(__VA_ARGS__); break;    \
    case 2: function<Cache, 2>(__VA_ARGS__); break;    \
    case 3: function<Cache, 3>(__VA_ARGS__); break;    \
    default: function<Cache, 4>(__VA_ARGS__); break;   \
  }

template <class Cache> class FewRows {
 public:
  // next: the item that this thread probably takes afterwards, or null.
  FewRows(const Layer<Cache> &layer, const Item &item, const Item *next)
      : l(layer), item_(item), next_(next && next->num_rows <= FEW_ROWS ? next : nullptr),
        position_(l.first_key(item)), last_(l.last_key(item)) {
    look_up(item_, position_, last_, places_[0]);
    look_behind();
    ask(AHEAD_BYTES / 64);
  }

  // Adds the keys of one span to the states of all rows; spans come in their order.
  void attend(int64_t span, const float *queries, States states, float *scores) {
    const int64_t bound = (span + 1) * SPAN;
    while (position_ < bound && position_ < last_) {
      score(queries, scores);
      add(soften_rows(scores, states), scores, states);
      advance();
    }
  }

 private:
  struct Place {
    Tile tile;
    int64_t bytes[2];           // of a key and of a value, with all heads of the item
    const char *rows[2][TILE];  // of keys, of values
  };

  const Layer<Cache> &l;
  const Item &item_, *next_;
  int64_t position_, last_;
  Place places_[2];                            // of the keys computed with, and of those behind them
  int now_ = 0, asked_ = 0, row_ = 0;          // asked for are: keys, values, the next keys, the next values; row by row
  const char *at_ = nullptr, *end_ = nullptr;  // of such a row

  void look_up(const Item &item, int64_t first, int64_t last, Place &place) const {
    l.find(item, first, last, place.tile);
    for (int k = 0; k < TILE; k++) {
      place.rows[0][k] = l.key_row(place.tile.slots[k], item.head);
      place.rows[1][k] = l.value_row(place.tile.slots[k], item.head);
    }
    place.bytes[0] = item.num_heads * l.key_bytes, place.bytes[1] = item.num_heads * l.value_bytes;
  }

  void look_behind() {
    const int64_t behind = position_ + places_[now_].tile.count;
    if (behind < last_) look_up(item_, behind, last_, places_[now_ ^ 1]);
    else if (next_) look_up(*next_, l.first_key(*next_), l.last_key(*next_), places_[now_ ^ 1]);
    else places_[now_ ^ 1].tile.count = 0;
  }

  void advance() {
    position_ += places_[now_].tile.count;
    if (position_ >= last_) return;
    now_ ^= 1;
    if (asked_ < 2) at_ = end_ = nullptr, asked_ = 2, row_ = 0;
    asked_ -= 2;
    look_behind();
  }

  void ask(int64_t lines) {
    while (lines > 0) {
      if (at_ >= end_ && !next_row()) return;
      int64_t left = (end_ - at_ + 63) / 64, count = lines < left ? lines : left;
      for (int64_t i = 0; i < count; i++) fetch<1>(at_ + i * 64);
      at_ += count * 64, lines -= count;
    }
  }

  bool next_row() {
    while (asked_ <= 3 && row_ >= places_[now_ ^ (asked_ >> 1)].tile.count) asked_++, row_ = 0;
    if (asked_ > 3) return false;
    const Place &place = places_[now_ ^ (asked_ >> 1)];
    at_ = place.rows[asked_ & 1][row_++];
    end_ = at_ + place.bytes[asked_ & 1];
    return true;
  }

  void score(const float *queries, float *scores) {
    const Place &place = places_[now_];
    float *parts = scores + ROWS * TILE;
    for (int k = 0; k < place.tile.count; k += LANES) {
      for (int part = 0; part < PARTS; part++)
        for (int64_t head = 0; head < item_.num_heads; head++) {
          ask((l.key_bytes * KEYS + 63) / 64);
          for (int64_t r = 0; r < item_.num_rows; r += ROWS_AT_ONCE) {
            const int64_t row = head * item_.num_rows + r;
            BY_ROWS(item_.num_rows - r, score_keys, queries + row * l.query_stride, l.query_stride,
                    place.rows[0] + k + part * KEYS, head * l.key_bytes, l.c.key_dim, parts + (row * PARTS + part) * LANES)
          }
        }
      for (int64_t head = 0, row = 0; head < item_.num_heads; head++) {
        float scales[LANES];
        if (Cache::SCALED)
          for (int j = 0; j < LANES; j++) scales[j] = Cache::scale(place.rows[0][k + j] + head * l.key_bytes, l.c.key_dim);
        for (int64_t r = 0; r < item_.num_rows; r++, row++) {
          Vec found[PARTS];
          UNROLL for (int part = 0; part < PARTS; part++) found[part] = load(parts + (row * PARTS + part) * LANES);
          Vec score = fold<KEYS, PARTS>(found);
          store(scores + row * TILE + k, Cache::SCALED ? score * load(scales) : score);
        }
      }
    }
  }

  // Returns how many of the tile's keys are seen by some row.
  int soften_rows(float *scores, States states) const {
    const Tile &tile = places_[now_].tile;
    const int64_t rows = item_.num_heads * item_.num_rows;
    Seen seen[LANES];
    float shrink[LANES];
    int most = 0;
    for (int64_t first = 0; first < rows; first += LANES) {
      const int count = int(rows - first < LANES ? rows - first : LANES);
      for (int i = 0; i < count; i++) {
        l.find_seen(item_, (first + i) % item_.num_rows, 1, tile, seen + i);
        most = seen[i].last > most ? seen[i].last : most;
      }
      soften(scores + first * TILE, seen, count, tile.count, l.c.options, states, first, shrink);
      for (int i = 0; i < count; i++) {
        float *sums = states.sums(first + i);
        for (int64_t d = 0; d < l.padded; d += LANES) store(sums + d, load(sums + d) * shrink[i]);
      }
    }
    return most;
  }

  void add(int count, const float *scores, States states) {
    const Place &place = places_[now_];
    for (int k = 0; k < count; k += KEYS)
      for (int64_t head = 0; head < item_.num_heads; head++) {
        ask((l.value_bytes * KEYS + 63) / 64);
        for (int64_t r = 0; r < item_.num_rows; r += ROWS_AT_ONCE) {
          const int64_t row = head * item_.num_rows + r;
          BY_ROWS(item_.num_rows - r, add_values, states.sums(row), states.stride(), scores + row * TILE + k, place.rows[1] + k,
                  head * l.value_bytes, l.c.value_dim, count - k < KEYS ? count - k : KEYS)
        }
      }
  }
};

#undef BY_ROWS

}  // namespace
