// Softmax as keys come: what rows have summed up so far, and how the next tile of scores changes it.
//
// Source: online softmax, arXiv:1805.02867, section 3; merging of spans, arXiv:2311.01282, section 3.

#pragma once

#include "attention_vectors.h"

namespace {

constexpr int TILE = 64;  // keys whose scores are softened at once; they lie TILE floats apart from row to row

struct Options {  // of attention: NUMBERS of options.py, in that order
  double scale, softcap;
};

// A row's state: its weighted values, then its largest score and the sum of its weights.
struct States {
  float *base;
  int64_t padded;
  int64_t stride() const { return padded + LANES; }
  float *sums(int64_t row) const { return base + row * stride(); }
  float &most(int64_t row) const { return sums(row)[padded]; }
  float &total(int64_t row) const { return sums(row)[padded + 1]; }
  void clear(int64_t row) const {
    std::memset(sums(row), 0, size_t(stride()) * 4);
    most(row) = NONE;
  }
};

struct Seen {  // keys [first, last) of a tile
  int first, last;
  bool is_empty() const { return first >= last; }
  bool is_whole() const { return first == 0 && last == TILE; }
};

// The largest score of a row that it sees; others become NONE.
ALWAYS float largest_score(float *scores, Seen seen, int vectors) {
  IVec lane;
  UNROLL for (int i = 0; i < LANES; i++) lane[i] = i;
  Vec largest = splat(NONE);
  for (int v = 0; v < vectors; v++) {
    IVec key = lane + v * LANES;
    Vec x = (key >= seen.first) & (key < seen.last) ? load(scores + v * LANES) : splat(NONE);
    largest = x > largest ? x : largest;
    store(scores + v * LANES, x);
  }
  return largest_of(largest);
}

ALWAYS float largest_score(const float *scores) {  // of a whole tile
  Vec largest = load(scores);
  UNROLL for (int v = 1; v < TILE / LANES; v++) {
    Vec x = load(scores + v * LANES);
    largest = x > largest ? x : largest;
  }
  return largest_of(largest);
}

// Scores become weights; returns their sum.
ALWAYS float weigh(float *scores, int vectors, float most) {
  Vec sum{};
  for (int v = 0; v < vectors; v++) {
    Vec weight = exponential(load(scores + v * LANES) - most);
    store(scores + v * LANES, weight);
    sum += weight;
  }
  return sum_of(sum);
}

ALWAYS float weigh(float *scores, float most) {  // of a whole tile
  Vec sum{};
  UNROLL for (int v = 0; v < TILE / LANES; v++) {
    Vec weight = bounded_exponential(load(scores + v * LANES) - most);
    store(scores + v * LANES, weight);
    sum += weight;
  }
  return sum_of(sum);
}

inline void cap(float *scores, int vectors, float softcap) {
  for (int v = 0; v < vectors; v++) store(scores + v * LANES, tangent(load(scores + v * LANES) / softcap) * softcap);
}

// Scores of at most LANES rows become weights, 0 where a row sees nothing; shrink: by how much what each summed before shrinks.
__attribute__((noinline)) void soften(float *scores, const Seen *seen, int rows, int count, const Options &options,
                                      States states, int64_t row, float *shrink) {
  const float softcap = float(options.softcap);
  const int vectors = (count + LANES - 1) / LANES;
  float before[LANES] = {}, now[LANES] = {};
  for (int i = 0; i < rows; i++) {
    float *mine = scores + i * TILE;
    if (seen[i].is_empty()) {
      std::memset(mine, 0, sizeof(float) * size_t(vectors) * LANES);
      continue;
    }
    if (softcap != 0.0f) cap(mine, vectors, softcap);
    float most = seen[i].is_whole() ? largest_score(mine) : largest_score(mine, seen[i], vectors);
    before[i] = states.most(row + i);
    now[i] = most > before[i] ? most : before[i];
  }
  store(shrink, exponential(load(before) - load(now)));
  for (int i = 0; i < rows; i++) {
    float *mine = scores + i * TILE;
    if (seen[i].is_empty()) continue;
    float added = seen[i].is_whole() ? weigh(mine, now[i]) : weigh(mine, vectors, now[i]);
    states.total(row + i) = states.total(row + i) * shrink[i] + added;
    states.most(row + i) = now[i];
  }
}

// Adds the state of a row over other keys.
inline void merge(States all, States part, int64_t row) {
  float more = part.most(row), now = all.most(row);
  if (more == NONE && part.total(row) == 0) return;
  now = more > now ? more : now;
  float old = exponential(all.most(row) - now), fresh = exponential(more - now);
  for (int64_t d = 0; d < all.padded; d += LANES) {
    float *sums = all.sums(row) + d;
    store(sums, load(sums) * old + load(part.sums(row) + d) * fresh);
  }
  all.total(row) = all.total(row) * old + part.total(row) * fresh;
  all.most(row) = now;
}

}  // namespace
