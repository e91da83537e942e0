// Vectors of one register, and the mathematics on them. Those of GCC 12 and Clang: the same source for AVX-512, AVX2 and anything else.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define ALWAYS inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
constexpr float NONE = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IVec __attribute__((vector_size(LANES * 4)));

ALWAYS Vec splat(float x) { return x - Vec{}; }  // x + 0 would be an addition: -0 is no neutral one
ALWAYS Vec load(const float *at) { return *reinterpret_cast<const Loose *>(at); }
ALWAYS void store(float *at, Vec x) { *reinterpret_cast<Loose *>(at) = x; }
template <class To, class From> ALWAYS To bits(From x) {
  To result;
  static_assert(sizeof(To) == sizeof(From), "the same size");
  std::memcpy(&result, &x, sizeof result);
  return result;
}

// The same vector, in a register from here on: compilers load it again for each use otherwise.
ALWAYS Vec in_register(Vec x) {
#if defined(__x86_64__) && defined(__GNUC__)
  __asm__("" : "+v"(x));
#endif
  return x;
}

// Memory asked for, into the first or the second level of the cache.
template <int LEVEL> ALWAYS void fetch(const char *from) { __builtin_prefetch(from, 0, LEVEL == 1 ? 3 : 2); }

// ------------------------------------------------------------------------------------------------ lanes among each other

// Of a and b each P sums that repeat in groups of P lanes, in parts; result: 2 P sums, those of a first, in half as many parts.
template <int P, std::size_t... I> ALWAYS Vec merged(Vec a, Vec b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (int(I) / P % 2 ? int(I) - P + LANES : int(I))...) +
         __builtin_shufflevector(a, b, (int(I) / P % 2 ? int(I) + LANES : int(I) + P)...);
}

// COUNT vectors of P sums each become one of COUNT × P: with all LANES of them, lane i is the sum of the lanes of v[i].
template <int P, int COUNT> ALWAYS Vec fold(const Vec *v) {
  if constexpr (COUNT == 1) return v[0];
  else return merged<P * COUNT / 2>(fold<P, COUNT / 2>(v), fold<P, COUNT / 2>(v + COUNT / 2), std::make_index_sequence<LANES>());
}

template <int P, std::size_t... I> ALWAYS Vec turned(Vec x, std::index_sequence<I...>) {
  return __builtin_shufflevector(x, x, int((I + P) % LANES)...);
}

template <int P = LANES / 2> ALWAYS float largest_of(Vec x) {
  Vec other = turned<P>(x, std::make_index_sequence<LANES>());
  x = other > x ? other : x;
  if constexpr (P == 1) return x[0];
  else return largest_of<P / 2>(x);
}

template <int P = LANES / 2> ALWAYS float sum_of(Vec x) {
  x += turned<P>(x, std::make_index_sequence<LANES>());
  if constexpr (P == 1) return x[0];
  else return sum_of<P / 2>(x);
}

template <std::size_t... I> ALWAYS Vec low_halves(Vec a, Vec b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, int(I / 2 + I % 2 * LANES)...);
}
template <std::size_t... I> ALWAYS Vec high_halves(Vec a, Vec b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, int(LANES / 2 + I / 2 + I % 2 * LANES)...);
}

ALWAYS void transpose(Vec *v) {  // LANES vectors; each of log2 stages interleaves the halves
  for (int width = 1; width < LANES; width *= 2) {
    Vec next[LANES];
    UNROLL for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = low_halves(v[i], v[i + LANES / 2], std::make_index_sequence<LANES>());
      next[2 * i + 1] = high_halves(v[i], v[i + LANES / 2], std::make_index_sequence<LANES>());
    }
    UNROLL for (int i = 0; i < LANES; i++) v[i] = next[i];
  }
}

// ------------------------------------------------------------------------------------------------------------- functions

// e ** x for -87 <= x <= 88, relative error under 2e-7; e ** -87 below. Polynomial: Cephes, expf.
ALWAYS Vec bounded_exponential(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  constexpr float ROUND = 12582912.0f;  // 1.5 × 2 ** 23: added to x, leaves an integer in the lowest bits
  Vec shifted = x * 1.44269504088896341f + (ROUND + 127.0f);
  Vec n = shifted - (ROUND + 127.0f);
  Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  return p * bits<Vec>(bits<IVec>(shifted) << 23);
}

ALWAYS Vec exponential(Vec x) { return x < -87.0f ? Vec{} : bounded_exponential(x); }

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

}  // namespace
