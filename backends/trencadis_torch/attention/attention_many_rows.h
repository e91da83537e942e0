// Many rows for each KV head, as in a prompt or a chunk of one: two products of matrices with a softmax between them.
//
// Keys of a tile are transposed once for all rows of an item, its values laid side by side. Blocks of rows then go through scores, softmax and
// weighted values one after the other, while keys and values stay in the first level of the cache.

#pragma once

#include "attention_layer.h"

namespace {

constexpr int BLOCK_ROWS = REGISTERS == 32 ? 6 : 4, BLOCK_VECS = REGISTERS == 32 ? 4 : 2;  // so many sums are held in registers

// Transposed: out[d × TILE + k]. Of rows there are as many as fill the last vector.
template <class Cache> void pack_keys(const char *const *rows, int count, int64_t dim, float *out) {
  for (int k = 0; k < count; k += LANES) {
    float scales[LANES];
    for (int j = 0; j < LANES; j++) scales[j] = Cache::scale(rows[k + j], dim);
    for (int64_t d = 0; d < dim; d += LANES) {
      Vec v[LANES];
      UNROLL for (int j = 0; j < LANES; j++) v[j] = element_vector<Cache>(rows[k + j], d, dim);
      transpose(v);
      if (d + LANES <= dim) {
        UNROLL for (int j = 0; j < LANES; j++) store(out + (d + j) * TILE + k, Cache::SCALED ? v[j] * load(scales) : v[j]);
      } else {
        for (int64_t j = 0; j < dim - d; j++) store(out + (d + j) * TILE + k, Cache::SCALED ? v[j] * load(scales) : v[j]);
      }
    }
  }
}

template <class Cache> void pack_values(const char *const *rows, int count, int64_t dim, int64_t stride, float *out) {
  for (int k = 0; k < count; k++) {
    float scale = Cache::scale(rows[k], dim);
    for (int64_t d = 0; d < dim; d += LANES) {
      Vec v = element_vector<Cache>(rows[k], d, dim);
      store(out + k * stride + d, Cache::SCALED ? v * scale : v);
    }
  }
}

// Scores of R rows and V vectors of keys.
template <int R, int V> __attribute__((noinline)) void score_vectors(const float *query, int64_t stride, const float *keys, int64_t dim, float *scores) {
  Vec sums[R][V] = {};
  for (int64_t d = 0; d < dim; d++) {
    Vec key[V];
    UNROLL for (int v = 0; v < V; v++) key[v] = in_register(load(keys + d * TILE + v * LANES));
    UNROLL for (int r = 0; r < R; r++) {
      const Vec x = in_register(splat(query[r * stride + d]));
      UNROLL for (int v = 0; v < V; v++) sums[r][v] += key[v] * x;
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) store(scores + r * TILE + v * LANES, sums[r][v]);
}

template <int R> void score_rows(const float *query, int64_t stride, const float *keys, int64_t dim, int count, float *scores) {
  int k = 0;
  for (; k + (BLOCK_VECS - 1) * LANES < count; k += BLOCK_VECS * LANES) score_vectors<R, BLOCK_VECS>(query, stride, keys + k, dim, scores + k);
  for (; k + LANES < count; k += 2 * LANES) score_vectors<R, 2>(query, stride, keys + k, dim, scores + k);
  if (k < count) score_vectors<R, 1>(query, stride, keys + k, dim, scores + k);
}

// sums[r] = sums[r] × shrink[r] + weights[r] · values, for V vectors of elements.
template <int R, int V>
__attribute__((noinline)) void weigh_vectors(float *sums, int64_t stride, const float *shrink, const float *weights, const float *values, int64_t dim, int count) {
  Vec held[R][V];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) held[r][v] = load(sums + r * stride + v * LANES) * shrink[r];
  for (int k = 0; k < count; k++) {
    Vec value[V];
    UNROLL for (int v = 0; v < V; v++) value[v] = in_register(load(values + k * dim + v * LANES));
    UNROLL for (int r = 0; r < R; r++) {
      const Vec x = in_register(splat(weights[r * TILE + k]));
      UNROLL for (int v = 0; v < V; v++) held[r][v] += value[v] * x;
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) store(sums + r * stride + v * LANES, held[r][v]);
}

template <int R>
void weigh_rows(float *sums, int64_t stride, const float *shrink, const float *weights, const float *values, int64_t dim, int count) {
  int64_t d = 0;
  for (; d + BLOCK_VECS * LANES <= dim; d += BLOCK_VECS * LANES)
    weigh_vectors<R, BLOCK_VECS>(sums + d, stride, shrink, weights, values + d, dim, count);
  for (; d + 2 * LANES <= dim; d += 2 * LANES) weigh_vectors<R, 2>(sums + d, stride, shrink, weights, values + d, dim, count);
  if (d < dim) weigh_vectors<R, 1>(sums + d, stride, shrink, weights, values + d, dim, count);
}

template <class Cache> class ManyRows {
 public:
  // scratch: for TILE transposed keys, TILE values, and the scores of one block.
  ManyRows(const Layer<Cache> &layer, const Item &item, float *scratch)
      : l(layer), item_(item), keys_(scratch), values_(keys_ + layer.c.key_dim * TILE), scores_(values_ + TILE * layer.padded) {}

  // Adds the keys of one span to the states of all rows.
  void attend(int64_t span, const float *queries, States states) const {
    int64_t first = l.first_key(item_), last = l.last_key(item_);
    if (first < span * SPAN) first = span * SPAN;
    if (last > (span + 1) * SPAN) last = (span + 1) * SPAN;
    Tile tile, next;
    for (l.find(item_, first, last, tile); tile.count; tile = next) {
      l.find(item_, tile.first + tile.count, last, next);
      for (int64_t head = 0; head < item_.num_heads; head++) {
        pack(tile, item_.head + head);
        const bool is_last = head + 1 == item_.num_heads;
        attend_tile(tile, head, queries, states, is_last ? next : tile, is_last ? item_.head : item_.head + head + 1);
      }
    }
  }

 private:
  const Layer<Cache> &l;
  const Item &item_;
  float *keys_, *values_, *scores_;

  void pack(const Tile &tile, int64_t head) const {
    const char *rows[TILE];
    for (int k = 0; k < TILE; k++) rows[k] = l.key_row(tile.slots[k], head);
    pack_keys<Cache>(rows, tile.count, l.c.key_dim, keys_);
    for (int k = 0; k < TILE; k++) rows[k] = l.value_row(tile.slots[k], head);
    pack_values<Cache>(rows, tile.count, l.c.value_dim, l.padded, values_);
  }

  // Meanwhile memory brings what is packed next.
  void attend_tile(const Tile &tile, int64_t head, const float *queries, States states, const Tile &next, int64_t next_head) const {
    int64_t asked = 0;
    for (int64_t r = 0, count; r < item_.num_rows; r += count) {
      const int64_t left = item_.num_rows - r, blocks = (left + BLOCK_ROWS - 1) / BLOCK_ROWS, row = head * item_.num_rows + r;
      count = (left + blocks - 1) / blocks;
      for (int64_t until = next.count - (next.count - asked) * (blocks - 1) / blocks; asked < until; asked++) ask(next.slots[asked], next_head);
      const float *query = queries + row * l.query_stride;
      switch (count) {
        case 1: attend_rows<1>(tile, r, row, query, states); break;
        case 2: attend_rows<2>(tile, r, row, query, states); break;
        case 3: attend_rows<3>(tile, r, row, query, states); break;
        case 4: attend_rows<4>(tile, r, row, query, states); break;
        case 5: attend_rows<5>(tile, r, row, query, states); break;
        default: attend_rows<6>(tile, r, row, query, states);
      }
    }
  }

  void ask(int64_t slot, int64_t head) const {
    for (int64_t i = 0; i < l.key_bytes; i += 64) fetch<2>(l.key_row(slot, head) + i);
    for (int64_t i = 0; i < l.value_bytes; i += 64) fetch<2>(l.value_row(slot, head) + i);
  }

  template <int R> void attend_rows(const Tile &tile, int64_t r, int64_t row, const float *query, States states) const {
    Seen seen[R];
    l.find_seen(item_, r, R, tile, seen);
    const int count = seen[R - 1].last;  // positions grow with the rows
    if (count <= 0 || seen[0].first >= tile.count) return;
    score_rows<R>(query, l.query_stride, keys_, l.c.key_dim, count, scores_);
    float shrink[LANES];
    soften(scores_, seen, R, count, l.c.options, states, row, shrink);
    weigh_rows<R>(states.sums(row), states.stride(), shrink, scores_, values_, l.padded, count);
  }
};

}  // namespace
