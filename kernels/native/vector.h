// Vectors of VECTOR_LANES floats by the compiler's vector extension: one source for SSE2, NEON, AVX2 and
// AVX-512. A wider vector than the machine has is split by the compiler, so every variant can be tested
// anywhere.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef VECTOR_LANES
#if defined(__AVX512F__)
#define VECTOR_LANES 16
#elif defined(__AVX2__)
#define VECTOR_LANES 8
#else
#define VECTOR_LANES 4
#endif
#endif
#ifndef BF16_DOT  // products of pairs of bfloat16 with float32 sums, in one instruction
#if defined(__AVX512BF16__)
#define BF16_DOT 1
#else
#define BF16_DOT 0
#endif
#endif

constexpr int LANES = VECTOR_LANES;
typedef float Vector __attribute__((vector_size(4 * VECTOR_LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * VECTOR_LANES)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * VECTOR_LANES)));

#define INLINE static inline __attribute__((always_inline))

INLINE Vector load(const float* p) { Vector v; std::memcpy(&v, p, sizeof v); return v; }
INLINE Integers load(const int32_t* p) { Integers v; std::memcpy(&v, p, sizeof v); return v; }
INLINE Unsigned load(const uint32_t* p) { Unsigned v; std::memcpy(&v, p, sizeof v); return v; }
INLINE void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }
INLINE Vector broadcast(float x) { return x - Vector{}; }
INLINE Integers broadcast(int32_t x) { return x - Integers{}; }
INLINE Unsigned broadcast(uint32_t x) { return x - Unsigned{}; }

INLINE Vector maximum(Vector a, Vector b) {
#if defined(__AVX512F__) && VECTOR_LANES == 16
  return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__) && VECTOR_LANES == 8
  return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// As above: the second operand where one of them is NaN.
INLINE Vector minimum(Vector a, Vector b) {
#if defined(__AVX512F__) && VECTOR_LANES == 16
  return (Vector)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__) && VECTOR_LANES == 8
  return (Vector)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// Halves are added until one lane is left.
typedef float Four __attribute__((vector_size(16)));
template <class Join>
INLINE float reduced(Vector v, Join join) {
  Four part[LANES / 4];
  std::memcpy(part, &v, sizeof v);
  for (int half = LANES / 8; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] = join(part[i], part[i + half]);
  Four low = join(part[0], (Four){part[0][2], part[0][3], part[0][0], part[0][1]});
  return join(low, (Four){low[1], low[0], low[3], low[2]})[0];
}
INLINE float sum_of(Vector v) {
  return reduced(v, [](Four a, Four b) { return a + b; });
}
INLINE float maximum_of(Vector v) {
  return reduced(v, [](Four a, Four b) { return a > b ? a : b; });
}

// 2**x for x <= 0, to about 2e-7; exactly 0 at -127 and below, exactly 1 at 0 and above (arguments above are rounding
// errors of a difference that is at most 0). NaN stays NaN: both bounds give back their second operand then. Adding 1.5 * 2**23 rounds
// to the nearest integer, which then stands in the low bits of the sum; shifted into the exponent it scales the
// polynomial of the fraction. At the clamped -127 that leaves no bit of 1.0.
INLINE Vector exp2_negative(Vector x) {
  const Vector magic = broadcast(12582912.0f);
  Vector clamped = minimum(Vector{}, maximum(broadcast(-127.0f), x));
  Vector shifted = clamped + magic;
  Vector f = clamped - (shifted - magic);
  Vector p = broadcast(1.326472722e-03f);
  p = p * f + broadcast(9.671512671e-03f);
  p = p * f + broadcast(5.550733743e-02f);
  p = p * f + broadcast(2.402224208e-01f);
  p = p * f + broadcast(6.931469776e-01f);
  p = p * f + broadcast(1.0f);
  return (Vector)((Integers)p + ((Integers)shifted << 23));
}

// bfloat16 is the upper half of a float32.
INLINE float from_bf16(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

INLINE uint16_t to_bf16(float x) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct bf16 { uint16_t bits; };
typedef uint16_t Halves __attribute__((vector_size(2 * VECTOR_LANES)));
INLINE Vector load(const bf16* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
  return (Vector)(__builtin_convertvector(h, Unsigned) << 16);
}
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return from_bf16(x.bits); }
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) { p->bits = to_bf16(x); }
