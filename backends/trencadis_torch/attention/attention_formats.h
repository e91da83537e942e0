// Numbers as tensors and caches hold them: float32, float16, bfloat16, and int8 with a scale. Computed is in float32.

#pragma once

#include "attention_vectors.h"

#if defined(__AVX512F__) || defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

enum Dtype : int64_t { FLOAT32, FLOAT16, BFLOAT16, INT8 };

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

template <class Cache> __attribute__((noinline)) Vec partial_vector(const char *row, int64_t at, int64_t dim) {
  Vec result{};
  for (int64_t i = at; i < dim; i++) result[i - at] = Cache::one(row, i);
  return result;
}

template <class Cache> ALWAYS Vec element_vector(const char *row, int64_t at, int64_t dim) {
  return at + LANES <= dim ? Cache::some(row, at) : partial_vector<Cache>(row, at, dim);
}

template <class Format> void read_as(const char *from, int64_t n, float factor, float *to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, Format::some(from, i) * factor);
  for (; i < n; i++) to[i] = Format::one(from, i) * factor;
}

inline void read_floats(int64_t dtype, const char *from, int64_t at, int64_t n, float factor, float *to) {
  if (dtype == FLOAT32) read_as<Float32>(from + at * 4, n, factor, to);
  else if (dtype == FLOAT16) read_as<Float16>(from + at * 2, n, factor, to);
  else read_as<BFloat16>(from + at * 2, n, factor, to);
}

inline void write_floats(int64_t dtype, char *to, int64_t at, const float *from, int64_t n) {
  if (dtype == FLOAT32) Float32::write(to + at * 4, from, n);
  else if (dtype == FLOAT16) Float16::write(to + at * 2, from, n);
  else BFloat16::write(to + at * 2, from, n);
}

}  // namespace
