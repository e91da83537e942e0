// Attention over a paged KV cache on a CPU: decode, chunks of prompts, whole prompts and drafts, all in one way.
//
//     write    new keys and values go to their slots
//     rows     the queries of one sequence that share a KV head: query i, head g of the group are row i * groups + g
//     item     up to ROWS rows × some KV heads × some spans of keys; threads take items as they come
//     tile     TILE keys: scores ▶ online softmax ▶ weighted values. Keys are transposed once for all rows, but not for few rows:
//              there memory is the limit, and is read in its own order
//     span     SPAN keys have a softmax of their own; spans are merged in the order of their keys
//
// Tiles and spans lie at fixed positions, and the order of every sum follows from the sequence alone. So a row has the same bits
// whatever shares its batch, and however many threads there are.
//
// Vectors are those of GCC 12 and Clang: the same source for AVX-512, AVX2 and anything else. No allocation once buffers have grown.
//
// Source: online softmax, arXiv:1805.02867, section 3; merging of spans, arXiv:2311.01282, section 3.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#if defined(__AVX512F__) || defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, BLOCK_VECS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, BLOCK_VECS = 2;
#else
constexpr int LANES = 4, BLOCK_VECS = 2;
#endif
constexpr int BLOCK_ROWS = 4;  // BLOCK_ROWS × BLOCK_VECS sums are held in registers
constexpr int TILE = 64, SPAN = 512, ROWS = 64;
constexpr int64_t ITEMS_PER_THREAD = 4;


constexpr int64_t FETCH_BYTES = 12288;  // so far ahead memory is asked for; measured
constexpr float NONE = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IVec __attribute__((vector_size(LANES * 4)));

// Mirrored by a ctypes structure in native_attention.py: the same fields in the same order, 8 bytes each.
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
  double scale, softcap;
};

enum Dtype : int64_t { FLOAT32, FLOAT16, BFLOAT16, INT8 };

inline Vec splat(float x) { return Vec{} + x; }
inline Vec load(const float *at) { return *reinterpret_cast<const Loose *>(at); }
inline void store(float *at, Vec x) { *reinterpret_cast<Loose *>(at) = x; }
template <class To, class From> inline To bits(From x) {
  To result;
  static_assert(sizeof(To) == sizeof(From), "the same size");
  std::memcpy(&result, &x, sizeof result);
  return result;
}

// ---------------------------------------------------------------------------------------------------- number formats

inline float half_to_float(uint16_t h) {
  float magnitude = bits<float>(uint32_t(h & 0x7fff) << 13) * 0x1p112f;  // subnormal numbers come out right as well
  if ((h & 0x7c00) == 0x7c00) magnitude = bits<float>(bits<uint32_t>(magnitude) | 0x7f800000);
  return h & 0x8000 ? -magnitude : magnitude;
}

inline uint16_t float_to_half(float x) {  // to nearest, ties to even; too large ones to the largest
  uint32_t sign = bits<uint32_t>(x) >> 16 & 0x8000;
  float magnitude = bits<float>(bits<uint32_t>(x) & 0x7fffffff);
  if (magnitude != magnitude) return 0x7e00;
  if (magnitude >= 65504.0f) return uint16_t(sign | 0x7bff);
  if (magnitude < 0x1p-14f) return uint16_t(sign | (bits<uint32_t>(magnitude + 0.5f) - bits<uint32_t>(0.5f)));
  uint32_t u = bits<uint32_t>(magnitude);
  return uint16_t(sign | ((u - (112u << 23) + 0xfff + (u >> 13 & 1)) >> 13));
}

inline uint16_t float_to_bfloat(float x) {
  uint32_t u = bits<uint32_t>(x);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);  // no number stays none
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

struct Plain {
  static int64_t extra() { return 0; }
  static float scale(const char *, int64_t) { return 1.0f; }
  static constexpr bool SCALED = false;
};

struct Float32 : Plain {
  static constexpr int64_t BYTES = 4;
  static float one(const char *row, int64_t at) { return reinterpret_cast<const float *>(row)[at]; }
  static Vec some(const char *row, int64_t at) { return load(reinterpret_cast<const float *>(row) + at); }
  static void write(char *row, const float *x, int64_t n) { std::memcpy(row, x, size_t(n) * 4); }
};

struct Float16 : Plain {
  static constexpr int64_t BYTES = 2;
  static float one(const char *row, int64_t at) { return half_to_float(reinterpret_cast<const uint16_t *>(row)[at]); }
  static Vec some(const char *row, int64_t at) {
#if defined(__AVX512F__)
    return Vec(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(row + 2 * at))));
#elif defined(__F16C__) && defined(__AVX__)
    return Vec(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(row + 2 * at))));
#else
    IVec wide = __builtin_convertvector(*reinterpret_cast<const Halves *>(row + 2 * at), IVec);
    IVec found = IVec(Vec((wide & 0x7fff) << 13) * 0x1p112f) | (wide & 0x8000) << 16;
    return Vec((wide & 0x7c00) == 0x7c00 ? found | 0x7f800000 : found);
#endif
  }
  static void write(char *row, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) reinterpret_cast<uint16_t *>(row)[i] = float_to_half(x[i]);
  }
};

struct BFloat16 : Plain {
  static constexpr int64_t BYTES = 2;
  static float one(const char *row, int64_t at) {
    return bits<float>(uint32_t(reinterpret_cast<const uint16_t *>(row)[at]) << 16);
  }
  static Vec some(const char *row, int64_t at) {
    return Vec(__builtin_convertvector(*reinterpret_cast<const Halves *>(row + 2 * at), IVec) << 16);
  }
  static void write(char *row, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) reinterpret_cast<uint16_t *>(row)[i] = float_to_bfloat(x[i]);
  }
};

struct Int8 {  // behind the elements of each head lies their scale, a float32
  static constexpr int64_t BYTES = 1;
  static constexpr bool SCALED = true;
  static int64_t extra() { return 4; }
  static float scale(const char *row, int64_t dim) {
    float found;
    std::memcpy(&found, row + dim, 4);
    return found;
  }
  static float one(const char *row, int64_t at) { return reinterpret_cast<const int8_t *>(row)[at]; }
  static Vec some(const char *row, int64_t at) {
#if defined(__AVX512F__)
    return Vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(row + at)))));
#elif defined(__AVX2__)
    return Vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(row + at)))));
#else
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const Bytes *>(row + at), IVec), Vec);
#endif
  }
  static void write(char *row, const float *x, int64_t n) {
    float most = 0;
    for (int64_t i = 0; i < n; i++) most = __builtin_fabsf(x[i]) > most ? __builtin_fabsf(x[i]) : most;
    float step = most / 127.0f, inverse = step > 0 ? 1.0f / step : 0.0f;
    for (int64_t i = 0; i < n; i++) {
      float level = __builtin_rintf(x[i] * inverse);
      row[i] = char(int8_t(level > 127 ? 127 : level < -127 ? -127 : level));
    }
    std::memcpy(row + n, &step, 4);
  }
};

void read_floats(int64_t dtype, const char *from, int64_t at, int64_t n, float factor, float *to) {
  for (int64_t i = 0; i < n; i++) {
    float x = dtype == FLOAT32 ? Float32::one(from, at + i) : dtype == FLOAT16 ? Float16::one(from, at + i) : BFloat16::one(from, at + i);
    to[i] = x * factor;
  }
}

void write_floats(int64_t dtype, char *to, int64_t at, const float *from, int64_t n) {
  if (dtype == FLOAT32) Float32::write(to + at * 4, from, n);
  else if (dtype == FLOAT16) Float16::write(to + at * 2, from, n);
  else BFloat16::write(to + at * 2, from, n);
}

// ------------------------------------------------------------------------------------------------------- mathematics

// e ** x for x <= 88, relative error under 2e-7; 0 below -87. Polynomial: Cephes, expf.
inline Vec exponential(Vec x) {
  Vec safe = x < -87.0f ? splat(-87.0f) : x;
  Vec n = (safe * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // adding 1.5 × 2 ** 23 rounds
  Vec r = (safe - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Vec power = Vec((__builtin_convertvector(n, IVec) + 127) << 23);
  return x < -87.0f ? Vec{} : p * power;
}

inline float exponential(float x) { return exponential(splat(x))[0]; }

// Polynomial for small arguments: Cephes, tanhf.
inline Vec tangent(Vec x) {
  Vec magnitude = x < 0.0f ? -x : x;
  Vec small = magnitude > 0.625f ? Vec{} : magnitude, square = small * small;
  Vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square + -5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square + -3.33332819422e-1f;
  p = p * square * small + small;
  Vec bounded = magnitude > 10.0f ? splat(10.0f) : magnitude;
  Vec far = 1.0f - 2.0f / (exponential(bounded + bounded) + 1.0f);
  Vec result = magnitude > 0.625f ? far : p;
  result = x == x ? result : x;
  return x < 0.0f ? -result : result;
}

#if defined(__AVX512F__)
#define LOW_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define LOW_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW_HALVES 0, 4, 1, 5
#define HIGH_HALVES 2, 6, 3, 7
#endif

inline Vec interleave_low(Vec a, Vec b) { return __builtin_shufflevector(a, b, LOW_HALVES); }
inline Vec interleave_high(Vec a, Vec b) { return __builtin_shufflevector(a, b, HIGH_HALVES); }

inline void transpose(Vec *v) {  // LANES vectors; each of log2 stages interleaves the halves
  for (int width = 1; width < LANES; width *= 2) {
    Vec next[LANES];
    for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = interleave_low(v[i], v[i + LANES / 2]);
      next[2 * i + 1] = interleave_high(v[i], v[i + LANES / 2]);
    }
    for (int i = 0; i < LANES; i++) v[i] = next[i];
  }
}

inline Vec sum_lanes(const float *from) {  // of LANES vectors, the sum of each
  Vec v[LANES];
  for (int i = 0; i < LANES; i++) v[i] = load(from + i * LANES);
  transpose(v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}

// ----------------------------------------------------------------------------------------------------------- kernels

struct Ahead {  // rows of the next head, or of the next tile
  const char *keys[TILE], *values[TILE];
  int64_t key_bytes, value_bytes;
};

template <class Cache> inline Vec element_vector(const char *row, int64_t at, int64_t dim) {
  if (at + LANES <= dim) return Cache::some(row, at);
  Vec result{};
  for (int64_t i = at; i < dim; i++) result[i - at] = Cache::one(row, i);
  return result;
}

inline void fetch(const char *from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Transposed keys: out[d × TILE + k]. Of rows there are as many as fill the last vector. Meanwhile memory brings what is read next.
template <class Cache>
void pack_keys(const char *const *rows, int count, int64_t dim, float *out, const Ahead &ahead) {
  for (int k = 0; k < count; k += LANES) {
    for (int j = k; j < k + LANES; j++) {
      fetch(ahead.keys[j], ahead.key_bytes);
      fetch(ahead.values[j], ahead.value_bytes);
    }
    float scales[LANES];
    for (int j = 0; j < LANES; j++) scales[j] = Cache::scale(rows[k + j], dim);
    for (int64_t d = 0; d < dim; d += LANES) {
      Vec v[LANES];
      for (int j = 0; j < LANES; j++) v[j] = element_vector<Cache>(rows[k + j], d, dim);
      transpose(v);
      int used = dim - d < LANES ? int(dim - d) : LANES;
      for (int j = 0; j < used; j++) store(out + (d + j) * TILE + k, Cache::SCALED ? v[j] * load(scales) : v[j]);
    }
  }
}

template <class Cache> void unpack_values(const char *const *rows, int count, int64_t dim, int64_t stride, float *out) {
  for (int k = 0; k < count; k++) {
    float scale = Cache::scale(rows[k], dim);
    for (int64_t d = 0; d < dim; d += LANES) {
      Vec v = element_vector<Cache>(rows[k], d, dim);
      store(out + k * stride + d, Cache::SCALED ? v * scale : v);
    }
  }
}

// Scores of R rows and count keys, rounded up to whole register blocks.
template <int R> void score_rows(const float *query, int64_t stride, const float *keys, int64_t dim, int count, float *scores) {
  for (int k = 0; k < count; k += BLOCK_VECS * LANES) {
    Vec sums[R][BLOCK_VECS] = {};
    for (int64_t d = 0; d < dim; d++) {
      Vec key[BLOCK_VECS];
      for (int v = 0; v < BLOCK_VECS; v++) key[v] = load(keys + d * TILE + k + v * LANES);
      for (int r = 0; r < R; r++)
        for (int v = 0; v < BLOCK_VECS; v++) sums[r][v] += key[v] * query[r * stride + d];
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < BLOCK_VECS; v++) store(scores + r * TILE + k + v * LANES, sums[r][v]);
  }
}

// sums[r] = sums[r] × shrink[r] + weights[r] · values, for V vectors of elements.
template <int R, int V>
void weigh_values(float *sums, int64_t stride, const float *shrink, const float *weights, const float *const *values, int64_t at, int count) {
  Vec held[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) held[r][v] = load(sums + r * stride + at + v * LANES) * shrink[r];
  for (int k = 0; k < count; k++) {
    Vec value[V];
    for (int v = 0; v < V; v++) value[v] = load(values[k] + at + v * LANES);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) held[r][v] += value[v] * weights[r * TILE + k];
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(sums + r * stride + at + v * LANES, held[r][v]);
}

template <int R>
void weigh_rows(float *sums, int64_t stride, const float *shrink, const float *weights, const float *const *values, int64_t dim, int count) {
  int64_t at = 0;
  for (; at + BLOCK_VECS * LANES <= dim; at += BLOCK_VECS * LANES)
    weigh_values<R, BLOCK_VECS>(sums, stride, shrink, weights, values, at, count);
  for (; at < dim; at += LANES) weigh_values<R, 1>(sums, stride, shrink, weights, values, at, count);
}

// Dot products of R rows with one key, not yet summed over their lanes: out[r × stride].
template <class Cache, int R> inline void multiply_key(const float *query, int64_t query_stride, const char *key, int64_t dim, float *out, int64_t stride) {
  Vec sums[R] = {};
  for (int64_t d = 0; d < dim; d += LANES) {
    Vec x = element_vector<Cache>(key, d, dim);
    for (int r = 0; r < R; r++) sums[r] += x * load(query + r * query_stride + d);
  }
  for (int r = 0; r < R; r++) store(out + r * stride, sums[r]);
}

// sums[r] += weights[r] · values, for R rows and K keys of one head.
template <class Cache, int R, int K>
inline void add_values(float *sums, int64_t stride, const float (*weights)[R], const char *const *values, int64_t dim) {
  for (int64_t d = 0; d < dim; d += LANES) {
    Vec held[R];
    for (int r = 0; r < R; r++) held[r] = load(sums + r * stride + d);
    for (int k = 0; k < K; k++) {
      Vec x = element_vector<Cache>(values[k], d, dim);
      for (int r = 0; r < R; r++) held[r] += x * weights[k][r];
    }
    for (int r = 0; r < R; r++) store(sums + r * stride + d, held[r]);
  }
}

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

// Scores of a row become weights, 0 where it sees nothing; returns by how much what was summed before shrinks.
float soften(float *scores, int first, int last, int count, float softcap, float &most, float &total) {
  int vectors = (count + LANES - 1) / LANES;
  if (first >= last) {
    std::memset(scores, 0, sizeof(float) * size_t(vectors) * LANES);
    return 1.0f;
  }
  IVec lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  Vec largest = splat(NONE);
  for (int v = 0; v < vectors; v++) {
    Vec x = load(scores + v * LANES);
    if (softcap != 0.0f) x = tangent(x / softcap) * softcap;
    IVec key = lane + v * LANES;
    x = (key >= first) & (key < last) ? x : splat(NONE);
    largest = x > largest ? x : largest;
    store(scores + v * LANES, x);
  }
  float now = most;
  for (int i = 0; i < LANES; i++) now = largest[i] > now ? largest[i] : now;
  float shrink = exponential(most - now);
  Vec sum{};
  for (int v = 0; v < vectors; v++) {
    Vec weight = exponential(load(scores + v * LANES) - now);
    store(scores + v * LANES, weight);
    sum += weight;
  }
  float added = 0;
  for (int i = 0; i < LANES; i++) added += sum[i];
  total = total * shrink + added;
  most = now;
  return shrink;
}

// ------------------------------------------------------------------------------------------------------------- items

struct Item {
  int64_t sequence, row, num_rows, head, num_heads, span, num_spans;
  float *states;  // of its only span, where spans are shared out; null: spans are merged as they come
};

class Buffer {  // grows, and is kept
 public:
  Buffer() = default;
  Buffer(const Buffer &) = delete;
  ~Buffer() { std::free(data_); }
  float *take(int64_t floats) {  // null: no memory
    if (floats > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<float *>(std::aligned_alloc(64, (size_t(floats) * 4 + 63) / 64 * 64));
      size_ = data_ ? floats : 0;
    }
    return data_;
  }

 private:
  float *data_ = nullptr;
  int64_t size_ = 0;
};

struct Plan {
  std::vector<Item> items, parts;
  Buffer states;
};

thread_local Buffer scratch;
thread_local Plan plan_;  // of the thread that made it; read by its team until the call ends

template <class Cache> class Attention {
 public:
  explicit Attention(const Call &call)
      : c(call), groups(c.num_heads / c.num_kv_heads), query_stride(round_up(c.key_dim)), padded(round_up(c.value_dim)),
        key_bytes(c.key_dim * Cache::BYTES + Cache::extra()), value_bytes(c.value_dim * Cache::BYTES + Cache::extra()),
        in_place(Cache::BYTES == 4 && c.value_dim % LANES == 0) {}

  // All threads of a team call it, with the same call; false in one that found no memory. One of them plans for all.
  bool run() const {
#pragma omp for schedule(static) nowait
    for (int64_t token = 0; token < c.num_tokens; token++) write(token);
    const Plan *plan;
#pragma omp single copyprivate(plan)
    plan = make_plan();
    if (!plan) return false;
    const std::vector<Item> &items = plan->items, &parts = plan->parts.empty() ? items : plan->parts;
    const int64_t count = int64_t(parts.size()), gathered = plan->parts.empty() ? 0 : int64_t(items.size());
    float *mine = scratch.take(scratch_floats());
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++)
      if (mine) attend(parts[size_t(i)], mine);
    if (gathered) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < gathered; i++)
        if (mine) gather(items[size_t(i)], mine);
    }
    return mine != nullptr;
  }

  bool is_small() const {  // waiting for another thread costs more than a few microseconds of work
    int64_t work = 0;
    for (int64_t s = 0; s < c.num_sequences; s++) {
      int64_t before = c.window && c.window < c.starts[s] ? c.window : c.starts[s];
      work += (before + c.query_lens[s]) * (16 + c.query_lens[s] * groups);
    }
    return work * c.num_kv_heads * (c.key_dim + c.value_dim) < 1 << 19;
  }

 private:
  const Call &c;
  int64_t groups, query_stride, padded, key_bytes, value_bytes;
  bool in_place;

  static int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
  int64_t end(const Item &item) const { return c.starts[item.sequence] + (item.row + item.num_rows - 1) / groups + 1; }
  int64_t begin(const Item &item) const {
    int64_t first = c.window ? c.starts[item.sequence] + item.row / groups - c.window + 1 : 0;
    return first > 0 ? first : 0;
  }
  int64_t state_floats(const Item &item) const { return item.num_heads * item.num_rows * (padded + LANES); }
  int64_t scratch_floats() const {
    return (c.key_dim + BLOCK_VECS) * TILE + TILE * padded + ROWS * (TILE + 1) + ROWS * (query_stride + 2 * (padded + LANES)) +
           ROWS * LANES * (LANES + 1) + 64;
  }

  const Plan *make_plan() const {
    try {
      fill(plan_);
      return &plan_;
    } catch (const std::bad_alloc &) {
      return nullptr;
    }
  }

  // Items are the largest pieces of work that keep all threads busy; there are parts too, if spans must be shared out for that.
  void fill(Plan &plan) const {
    int64_t wanted = c.num_threads > 1 ? ITEMS_PER_THREAD * c.num_threads : 1, spans = 0;
    plan.parts.clear();
    for (int64_t heads = ROWS;; heads = (heads + 1) / 2) {
      spans = list_items(heads, plan.items);
      if (int64_t(plan.items.size()) >= wanted || spans >= wanted || heads == 1) break;
    }
    if (int64_t(plan.items.size()) >= wanted || spans == int64_t(plan.items.size())) return;
    int64_t floats = 0;
    for (const Item &item : plan.items) floats += item.num_spans * state_floats(item);
    float *states = plan.states.take(floats);
    if (!states) throw std::bad_alloc();
    for (Item &item : plan.items) {
      item.states = states;
      for (int64_t i = 0; i < item.num_spans; i++, states += state_floats(item))
        plan.parts.push_back({item.sequence, item.row, item.num_rows, item.head, item.num_heads, item.span + i, 1, states});
    }
  }

  int64_t list_items(int64_t most_heads, std::vector<Item> &items) const {
    int64_t spans = 0;
    items.clear();
    for (int64_t s = 0; s < c.num_sequences; s++)
      for (int64_t row = 0, rows = c.query_lens[s] * groups; row < rows; row += ROWS) {
        int64_t count = rows - row < ROWS ? rows - row : ROWS;
        int64_t heads = ROWS / count < most_heads ? ROWS / count : most_heads;
        for (int64_t head = 0; head < c.num_kv_heads; head += heads) {
          Item item{s, row, count, head, c.num_kv_heads - head < heads ? c.num_kv_heads - head : heads, 0, 0, nullptr};
          item.span = begin(item) / SPAN;
          item.num_spans = (end(item) - 1) / SPAN - item.span + 1;
          spans += item.num_spans;
          items.push_back(item);
        }
      }
    return spans;
  }

  void write(int64_t token) const {
    for (int64_t head = 0; head < c.num_kv_heads; head++) {
      store_new(c.new_keys, token * c.key_token + head * c.key_head, c.key_dim,
                c.keys + (c.slots[token] * c.num_kv_heads + head) * key_bytes);
      store_new(c.new_values, token * c.value_token + head * c.value_head, c.value_dim,
                c.values + (c.slots[token] * c.num_kv_heads + head) * value_bytes);
    }
  }

  void store_new(const char *from, int64_t at, int64_t dim, char *to) const {
    float found[1024];
    if (c.dtype == c.cache_dtype) {
      int64_t bytes = c.dtype == FLOAT32 ? 4 : 2;
      std::memcpy(to, from + at * bytes, size_t(dim * bytes));
      return;
    }
    read_floats(c.dtype, from, at, dim, 1.0f, found);
    Cache::write(to, found, dim);
  }

  void attend(const Item &item, float *mine) const {
    float *queries = mine, *states = queries + ROWS * query_stride, *merged = states + ROWS * (padded + LANES);
    float *rest = merged + ROWS * (padded + LANES);
    load_queries(item, queries);
    int64_t rows = item.num_heads * item.num_rows;
    States part{item.states ? item.states : states, padded}, all{merged, padded};
    for (int64_t i = 0; i < item.num_spans; i++) {
      for (int64_t row = 0; row < rows; row++) part.clear(row);
      attend_span(item, item.span + i, queries, part, rest);
      if (item.states) return;
      if (item.num_spans == 1) return finish(item, part);
      for (int64_t row = 0; row < rows; row++) {
        if (i == 0) all.clear(row);
        merge(all, part, row);
      }
    }
    finish(item, all);
  }

  void gather(const Item &item, float *mine) const {
    States all{mine, padded};
    for (int64_t row = 0; row < item.num_heads * item.num_rows; row++) {
      all.clear(row);
      for (int64_t i = 0; i < item.num_spans; i++) merge(all, {item.states + i * state_floats(item), padded}, row);
    }
    finish(item, all);
  }

  void load_queries(const Item &item, float *queries) const {
    for (int64_t head = 0; head < item.num_heads; head++)
      for (int64_t r = 0; r < item.num_rows; r++, queries += query_stride) {
        int64_t row = item.row + r, token = c.firsts[item.sequence] + row / groups;
        int64_t at = token * c.query_token + ((item.head + head) * groups + row % groups) * c.query_head;
        read_floats(c.dtype, c.query, at, c.key_dim, float(c.scale), queries);
        for (int64_t d = c.key_dim; d < query_stride; d++) queries[d] = 0;
      }
  }

  void attend_span(const Item &item, int64_t span, const float *queries, States states, float *rest) const {
    float *keys = rest, *values = keys + (c.key_dim + BLOCK_VECS) * TILE, *scores = values + TILE * padded;
    int64_t first = begin(item), last = end(item);
    const int32_t *table = c.tables + c.rows[item.sequence] * c.table_stride;
    if (first < span * SPAN) first = span * SPAN;
    if (last > (span + 1) * SPAN) last = (span + 1) * SPAN;
    switch (item.num_rows <= BLOCK_ROWS ? item.num_rows : 0) {
      case 1: return attend_few<1>(item, table, first, last, queries, states, rest);
      case 2: return attend_few<2>(item, table, first, last, queries, states, rest);
      case 3: return attend_few<3>(item, table, first, last, queries, states, rest);
      case 4: return attend_few<4>(item, table, first, last, queries, states, rest);
    }
    int64_t slots[TILE], next[TILE];
    find_slots(table, first / TILE * TILE, last, next);
    for (int64_t tile = first / TILE * TILE; tile < last; tile += TILE) {
      int count = int(last - tile < TILE ? last - tile : TILE);
      std::memcpy(slots, next, sizeof slots);
      find_slots(table, tile + TILE, last, next);
      for (int64_t head = 0; head < item.num_heads; head++) {
        const char *rows[TILE];
        const float *ready[TILE];
        Ahead ahead;
        ahead.key_bytes = key_bytes, ahead.value_bytes = value_bytes;
        bool is_last = head + 1 == item.num_heads;
        for (int k = 0; k < TILE; k++) {
          rows[k] = key_row(slots[k], item.head + head);
          ahead.keys[k] = is_last ? key_row(next[k], item.head) : rows[k] + key_bytes;
          ahead.values[k] = is_last ? value_row(next[k], item.head) : value_row(slots[k], item.head + head + 1);
        }
        pack_keys<Cache>(rows, count, c.key_dim, keys, ahead);
        for (int k = 0; k < TILE; k++) {
          rows[k] = value_row(slots[k], item.head + head);
          ready[k] = in_place ? reinterpret_cast<const float *>(rows[k]) : values + k * padded;
        }
        if (!in_place) unpack_values<Cache>(rows, count, c.value_dim, padded, values);
        attend_tile(item, tile, count, head, queries, states, keys, ready, scores);
      }
    }
  }

  // Few rows a head, as in a decode: memory is read in its own order, key by key with all heads, and nothing is transposed but sums.
  template <int R>
  void attend_few(const Item &item, const int32_t *table, int64_t first, int64_t last, const float *queries, States states, float *rest) const {
    float *products = rest, *scores = products + ROWS * LANES * LANES, *scales = scores + ROWS * TILE;
    int64_t slots[TILE];
    int ahead = int(FETCH_BYTES / (item.num_heads * key_bytes) + 1);  // keys
    for (int64_t tile = first / TILE * TILE; tile < last; tile += TILE) {
      int count = int(last - tile < TILE ? last - tile : TILE);
      find_slots(table, tile, last, slots);
      for (int k = 0; k < count; k += LANES) {
        for (int j = 0; j < LANES; j++)
          for (int64_t head = 0; head < item.num_heads; head++) {
            const char *key = key_row(slots[k + j], item.head + head);
            fetch(key_row(slots[k + j + ahead < TILE ? k + j + ahead : TILE - 1], item.head + head), key_bytes);
            multiply_key<Cache, R>(queries + head * R * query_stride, query_stride, key, c.key_dim,
                                   products + head * R * LANES * LANES + j * LANES, LANES * LANES);
            if (Cache::SCALED) scales[head * LANES + j] = Cache::scale(key, c.key_dim);
          }
        for (int64_t row = 0; row < item.num_heads * R; row++) {
          Vec found = sum_lanes(products + row * LANES * LANES);
          store(scores + row * TILE + k, Cache::SCALED ? found * load(scales + row / R * LANES) : found);
        }
      }
      int seen = 0;
      for (int64_t row = 0; row < item.num_heads * R; row++) {
        int64_t position = c.starts[item.sequence] + (item.row + row % R) / groups;
        int64_t end = position + 1 - tile, begin = c.window ? end - c.window : 0;
        int stop = int(end < count ? end : count), start = int(begin < 0 ? 0 : begin < TILE ? begin : TILE);
        float shrink = soften(scores + row * TILE, start, stop, count, float(c.softcap), states.most(row), states.total(row));
        float *sums = states.sums(row);
        for (int64_t d = 0; d < padded; d += LANES) store(sums + d, load(sums + d) * shrink);
        seen = stop > seen ? stop : seen;
      }
      int k = 0;
      for (; k + 4 <= seen; k += 4) add_keys<R, 4>(item, slots + k, scores + k, states, k + 4 + ahead <= TILE ? ahead : 0);
      for (; k < seen; k++) add_keys<R, 1>(item, slots + k, scores + k, states, 0);
    }
  }

  template <int R, int K> void add_keys(const Item &item, const int64_t *slots, const float *scores, States states, int ahead) const {
    for (int64_t head = 0; head < item.num_heads; head++) {
      const char *values[K];
      float weights[K][R];
      for (int k = 0; k < K; k++) {
        values[k] = value_row(slots[k], item.head + head);
        if (ahead) fetch(value_row(slots[k + ahead], item.head + head), value_bytes);
        float scale = Cache::scale(values[k], c.value_dim);
        for (int r = 0; r < R; r++) weights[k][r] = scores[(head * R + r) * TILE + k] * scale;
      }
      add_values<Cache, R, K>(states.sums(head * R), states.stride(), weights, values, c.value_dim);
    }
  }

  const char *key_row(int64_t slot, int64_t head) const { return c.keys + (slot * c.num_kv_heads + head) * key_bytes; }
  const char *value_row(int64_t slot, int64_t head) const {
    return c.values + (slot * c.num_kv_heads + head) * value_bytes;
  }

  // Slots of a tile; those beyond the last key repeat it: finite, and never seen.
  void find_slots(const int32_t *table, int64_t tile, int64_t last, int64_t *slots) const {
    int64_t column = tile / c.block_size, offset = tile % c.block_size;
    for (int k = 0; k < TILE; k++) {
      if (tile + k >= last) {
        slots[k] = k ? slots[k - 1] : 0;
        continue;
      }
      slots[k] = table[column] * c.block_size + offset;
      if (++offset == c.block_size) column++, offset = 0;
    }
  }

  void attend_tile(const Item &item, int64_t tile, int count, int64_t head, const float *queries, States states,
                   const float *keys, const float *const *values, float *scores) const {
    for (int64_t r = 0; r < item.num_rows; r += BLOCK_ROWS) {
      int64_t row = head * item.num_rows + r, left = item.num_rows - r;
      const float *query = queries + row * query_stride;
      if (left >= 4) attend_rows<4>(item, tile, count, r, row, query, states, keys, values, scores);
      else if (left == 3) attend_rows<3>(item, tile, count, r, row, query, states, keys, values, scores);
      else if (left == 2) attend_rows<2>(item, tile, count, r, row, query, states, keys, values, scores);
      else attend_rows<1>(item, tile, count, r, row, query, states, keys, values, scores);
    }
  }

  template <int R>
  void attend_rows(const Item &item, int64_t tile, int count, int64_t r, int64_t row, const float *query, States states,
                   const float *keys, const float *const *values, float *scores) const {
    int firsts[R], lasts[R];
    for (int i = 0; i < R; i++) {
      int64_t position = c.starts[item.sequence] + (item.row + r + i) / groups;
      int64_t last = position + 1 - tile, first = c.window ? last - c.window : 0;
      lasts[i] = int(last < count ? last : count);
      firsts[i] = int(first < 0 ? 0 : first < TILE ? first : TILE);
    }
    int seen = lasts[R - 1];  // positions grow with the rows
    if (seen <= 0 || firsts[0] >= count) return;
    score_rows<R>(query, query_stride, keys, c.key_dim, seen, scores);
    float shrink[R];
    for (int i = 0; i < R; i++)
      shrink[i] = soften(scores + i * TILE, firsts[i], lasts[i], seen, float(c.softcap), states.most(row + i), states.total(row + i));
    weigh_rows<R>(states.sums(row), states.stride(), shrink, scores, values, padded, seen);
  }

  void merge(States all, States part, int64_t row) const {
    float more = part.most(row), now = all.most(row);
    if (more == NONE && part.total(row) == 0) return;
    now = more > now ? more : now;
    float old = exponential(all.most(row) - now), fresh = exponential(more - now);
    for (int64_t d = 0; d < padded; d += LANES) {
      float *sums = all.sums(row) + d;
      store(sums, load(sums) * old + load(part.sums(row) + d) * fresh);
    }
    all.total(row) = all.total(row) * old + part.total(row) * fresh;
    all.most(row) = now;
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

extern "C" {

int64_t trencadis_call_bytes() { return sizeof(Call); }

// One layer's attention in a team that there is already: every thread of it calls, with the same call, whose num_threads is the
// team's. Nobody returns before all is done. Returns 0; 1 in a thread that found no memory.
int64_t trencadis_attend_in_team(const Call *call) {
  switch (call->cache_dtype) {
    case FLOAT32: return Attention<Float32>(*call).run() ? 0 : 1;
    case FLOAT16: return Attention<Float16>(*call).run() ? 0 : 1;
    case BFLOAT16: return Attention<BFloat16>(*call).run() ? 0 : 1;
    default: return Attention<Int8>(*call).run() ? 0 : 1;
  }
}

// The same with threads of its own. Returns 0; 1 if there is no memory.
int64_t trencadis_attend(const Call *call) {
  int threads = Attention<Float32>(*call).is_small() ? 1 : int(call->num_threads);
  int64_t failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(+ : failed)
  failed += trencadis_attend_in_team(call);
  return failed ? 1 : 0;
}
}
