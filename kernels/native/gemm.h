// Products of small tiles. C[M x N] (+)= A[M x K] B[K x N] with B packed in panels of PANEL columns, so that
// the innermost loop reads it in order, and A read element by element from any two strides.
#pragma once
#include "vector.h"

constexpr int PANEL_VECTORS = 2;
constexpr int PANEL = PANEL_VECTORS * LANES;
// Accumulators fill the registers: 12 of 16, or 24 of 32.
constexpr int TILE_ROWS = LANES == 16 ? 12 : 6;

INLINE int round_up(int n, int to) { return (n + to - 1) / to * to; }

// How one step of a product is made: a unit of A is one float, or a pair of bfloat16 that meets a pair of B.
struct Single {
  using Unit = float;
  static inline __attribute__((always_inline)) Vector step(Vector sum, const float* b, float a) { return sum + load(b) * broadcast(a); }
};
struct Pairs {
  using Unit = uint32_t;
  static inline __attribute__((always_inline)) Vector step(Vector sum, const uint32_t* b, uint32_t a) {
    Unsigned pair = load(b);
#if defined(__AVX512BF16__) && VECTOR_LANES == 16
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)pair, (__m512bh)_mm512_set1_epi32(a));
#else
    sum += (Vector)(pair << 16) * broadcast(from_bf16((uint16_t)a));
    return sum + (Vector)(pair & 0xffff0000u) * broadcast(from_bf16((uint16_t)(a >> 16)));
#endif
  }
};

// The K dimension is cut into segments of equal length that need not lie side by side: tiles of keys that
// are seen, or panels of an operand packed for another product.
template <class Unit>
struct Left {
  const Unit* data;
  ptrdiff_t row, step, segment;  // strides between rows, along K inside a segment, between segments
};

template <class Kind, int ROWS>
INLINE void tile_product(int segments, int length, Left<typename Kind::Unit> a, const typename Kind::Unit* const* b,
                         ptrdiff_t b_offset, float* c, ptrdiff_t c_row, bool add) {
  using Unit = typename Kind::Unit;
  Vector sum[ROWS][PANEL_VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] = add ? load(c + r * c_row + v * LANES) : Vector{};
  for (int s = 0; s < segments; s++) {
    const Unit* left = a.data + s * a.segment;
    const Unit* right = b[s] + b_offset;
    for (int k = 0; k < length; k++) {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        Unit x = left[r * a.row];
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] = Kind::step(sum[r][v], right + v * LANES, x);
      }
      left += a.step;
      right += PANEL;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) store(c + r * c_row + v * LANES, sum[r][v]);
}

template <class Kind, int ROWS>
struct Rest {  // the last rows of a tile, fewer than TILE_ROWS
  static inline __attribute__((always_inline)) void run(int rows, int segments, int length, Left<typename Kind::Unit> a,
                  const typename Kind::Unit* const* b, ptrdiff_t b_offset, float* c, ptrdiff_t c_row, bool add) {
    if (rows == ROWS) tile_product<Kind, ROWS>(segments, length, a, b, b_offset, c, c_row, add);
    else Rest<Kind, ROWS - 1>::run(rows, segments, length, a, b, b_offset, c, c_row, add);
  }
};
template <class Kind>
struct Rest<Kind, 0> {
  static inline __attribute__((always_inline)) void run(int, int, int, Left<typename Kind::Unit>, const typename Kind::Unit* const*, ptrdiff_t, float*,
                  ptrdiff_t, bool) {}
};

// C [rows x panels * PANEL] (+)= A B; panel p of segment s of B starts at b[s] + p * b_panel. While it works, memory at
// ``next`` that comes after these panels is asked for: `next_lines` cache lines for every TILE_ROWS rows.
template <class Kind>
static void product(int rows, int panels, int segments, int length, Left<typename Kind::Unit> a,
                    const typename Kind::Unit* const* b, ptrdiff_t b_panel, float* c, ptrdiff_t c_row, bool add,
                    const typename Kind::Unit* next = nullptr, int next_lines = 0) {
  for (int p = 0; p < panels; p++) {
    int r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS) {
      for (int i = 0; i < next_lines; i++, next += 16) __builtin_prefetch(next);
      Left<typename Kind::Unit> here = a;
      here.data += r * a.row;
      tile_product<Kind, TILE_ROWS>(segments, length, here, b, p * b_panel, c + r * c_row + p * PANEL, c_row, add);
    }
    if (r < rows) {
      Left<typename Kind::Unit> here = a;
      here.data += r * a.row;
      Rest<Kind, TILE_ROWS - 1>::run(rows - r, segments, length, here, b, p * b_panel, c + r * c_row + p * PANEL,
                                     c_row, add);
    }
  }
}
