// One layer's call: where its numbers lie, which rows and keys there are, what is written before attention and after it.

#pragma once

#include "attention_formats.h"
#include "attention_softmax.h"

namespace {

constexpr int SPAN = 512, ROWS = 192;

// Mirrored by a ctypes structure in native.py: the same fields in the same order, 8 bytes each.
struct Call {
  const char *query, *new_keys, *new_values;
  char *output, *keys, *values;
  const float *sinks;  // of each head, or null
  const int32_t *tables;
  const int64_t *slots;
  const int32_t *rows, *starts, *query_lens, *firsts;  // of each sequence; firsts count tokens of the pass
  int64_t num_sequences, num_tokens, num_heads, num_kv_heads, key_dim, value_dim, block_size, table_stride;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides, elements
  int64_t window, num_threads, dtype, cache_dtype;
  Options options;
};

struct Item {
  int64_t sequence, row, num_rows, head, num_heads, span, num_spans;
  float *states;  // of its only span, where spans are shared out; null: spans are merged as they come
};

struct Tile {  // keys [first, first + count) of a sequence, of which its rows see none before the first one
  int64_t first;
  int count;
  int64_t slots[TILE];  // beyond count they repeat the last one: finite, and never seen
};

template <class Cache> struct Layer {
  const Call &c;
  int64_t groups, query_stride, padded, key_bytes, value_bytes;

  explicit Layer(const Call &call)
      : c(call), groups(c.num_heads / c.num_kv_heads), query_stride(round_up(c.key_dim)), padded(round_up(c.value_dim)),
        key_bytes(c.key_dim * Cache::BYTES + Cache::extra()), value_bytes(c.value_dim * Cache::BYTES + Cache::extra()) {}

  static int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

  // Keys that any row of an item sees: [begin, end).
  int64_t end(const Item &item) const { return c.starts[item.sequence] + (item.row + item.num_rows - 1) / groups + 1; }
  int64_t begin(const Item &item) const {
    int64_t first = c.window ? c.starts[item.sequence] + item.row / groups - c.window + 1 : 0;
    return first > 0 ? first : 0;
  }
  // The same within its spans.
  int64_t first_key(const Item &item) const { return begin(item) > item.span * SPAN ? begin(item) : item.span * SPAN; }
  int64_t last_key(const Item &item) const {
    int64_t last = (item.span + item.num_spans) * SPAN;
    return end(item) < last ? end(item) : last;
  }

  const char *key_row(int64_t slot, int64_t head) const { return c.keys + (slot * c.num_kv_heads + head) * key_bytes; }
  const char *value_row(int64_t slot, int64_t head) const { return c.values + (slot * c.num_kv_heads + head) * value_bytes; }

  // The keys from first to last in the tile with the first one; tiles lie at multiples of TILE.
  void find(const Item &item, int64_t first, int64_t last, Tile &tile) const {
    const int32_t *table = c.tables + c.rows[item.sequence] * c.table_stride;
    int64_t column = first / c.block_size, offset = first % c.block_size, bound = first / TILE * TILE + TILE;
    tile.first = first;
    tile.count = int((last < bound ? last : bound) - first);
    for (int k = 0; k < tile.count; k++) {
      tile.slots[k] = table[column] * c.block_size + offset;
      if (++offset == c.block_size) column++, offset = 0;
    }
    for (int k = tile.count; k < TILE; k++) tile.slots[k] = tile.count ? tile.slots[tile.count - 1] : 0;
  }

  // What some rows of an item see of a tile.
  void find_seen(const Item &item, int64_t row, int count, const Tile &tile, Seen *seen) const {
    int64_t query = (item.row + row) / groups, group = (item.row + row) % groups;
    for (int i = 0; i < count; i++) {
      int64_t last = c.starts[item.sequence] + query + 1 - tile.first, first = c.window ? last - c.window : 0;
      seen[i] = {int(first < 0 ? 0 : first < TILE ? first : TILE), int(last < tile.count ? last : tile.count)};
      if (++group == groups) query++, group = 0;
    }
  }

  void write(int64_t token) const {
    for (int64_t head = 0; head < c.num_kv_heads; head++) {
      int64_t place = c.slots[token] * c.num_kv_heads + head;
      write_head(c.new_keys, token * c.key_token + head * c.key_head, c.key_dim, c.keys + place * key_bytes);
      write_head(c.new_values, token * c.value_token + head * c.value_head, c.value_dim, c.values + place * value_bytes);
    }
  }

  void write_head(const char *from, int64_t at, int64_t dim, char *to) const {
    float found[1024];
    if (c.dtype == c.cache_dtype) {
      int64_t bytes = c.dtype == FLOAT32 ? 4 : 2;
      std::memcpy(to, from + at * bytes, size_t(dim * bytes));
      return;
    }
    read_floats(c.dtype, from, at, dim, 1.0f, found);
    Cache::write(to, found, dim);
  }

  void load_queries(const Item &item, float *queries) const {
    for (int64_t head = 0; head < item.num_heads; head++)
      for (int64_t r = 0; r < item.num_rows; r++, queries += query_stride) {
        int64_t row = item.row + r, token = c.firsts[item.sequence] + row / groups;
        int64_t at = token * c.query_token + ((item.head + head) * groups + row % groups) * c.query_head;
        read_floats(c.dtype, c.query, at, c.key_dim, float(c.options.scale), queries);
        for (int64_t d = c.key_dim; d < query_stride; d++) queries[d] = 0;
      }
  }

  void finish(const Item &item, States states) const {
    int64_t bytes = c.dtype == FLOAT32 ? 4 : 2;
    for (int64_t head = 0, row = 0; head < item.num_heads; head++)
      for (int64_t r = 0; r < item.num_rows; r++, row++) {
        int64_t token = c.firsts[item.sequence] + (item.row + r) / groups;
        int64_t query_head = (item.head + head) * groups + (item.row + r) % groups;
        float factor = 1.0f / states.total(row);
        if (c.sinks) {
          float sink = c.sinks[query_head], most = states.most(row), now = sink > most ? sink : most;
          float shrink = exponential(most - now);
          factor = shrink / (states.total(row) * shrink + exponential(sink - now));
        }
        float *sums = states.sums(row);
        for (int64_t d = 0; d < padded; d += LANES) store(sums + d, load(sums + d) * factor);
        write_floats(c.dtype, c.output + (token * c.num_heads + query_head) * c.value_dim * bytes, 0, sums, c.value_dim);
      }
  }
};

}  // namespace
