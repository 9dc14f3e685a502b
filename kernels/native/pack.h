// Operands of products, copied into the order in which the innermost loop of gemm.h reads them.
#pragma once
#include <algorithm>

#include "gemm.h"

namespace {

// [n x D] rows as the transposed operand: panel by panel of PANEL rows, D steps each; zeros beyond n and D.
template <class T>
void pack_transposed(float* to, const T* from, int64_t row, int n, int block, int width, int padded) {
  for (int first = 0; first < block; first += PANEL) {
    float* panel = to + (ptrdiff_t)first * padded;
    int here = n - first < PANEL ? (n > first ? n - first : 0) : PANEL;
    const T* source = from + first * row;
    if (here == PANEL)
      for (int d = 0; d < width; d++)
        for (int j = 0; j < PANEL; j++) panel[d * PANEL + j] = to_float(source[j * row + d]);
    else
      for (int d = 0; d < width; d++)
        for (int j = 0; j < PANEL; j++) panel[d * PANEL + j] = j < here ? to_float(source[j * row + d]) : 0.0f;
    std::fill(panel + width * PANEL, panel + padded * PANEL, 0.0f);
  }
}
template <class T>
void pack_transposed(uint32_t* to, const T* from, int64_t row, int n, int block, int width, int padded) {
  static_assert(sizeof(T) == 2, "pairs are made of bfloat16");
  const int steps = padded / 2;
  for (int first = 0; first < block; first += PANEL) {
    uint32_t* panel = to + (ptrdiff_t)first * steps;
    for (int j = 0; j < PANEL; j++) {
      const bool real = first + j < n;
      const T* source = from + (first + j) * row;
      for (int s = 0; s < steps; s++) {
        uint32_t low = real && 2 * s < width ? source[2 * s].bits : 0;
        uint32_t high = real && 2 * s + 1 < width ? source[2 * s + 1].bits : 0;
        panel[s * PANEL + j] = low | high << 16;
      }
    }
  }
}

// [n x D] rows as they lie, cut into panels of PANEL columns with `block` rows each; zeros beyond n and D.
template <class T>
void pack_panels(float* to, const T* from, int64_t row, int n, int block, int width, int padded) {
  for (int first = 0; first < padded; first += PANEL) {
    float* panel = to + (ptrdiff_t)first * block;
    const int here = width - first < PANEL ? width - first : PANEL;
    for (int j = 0; j < block; j++, panel += PANEL) {
      const T* source = from + j * row + first;
      int d = 0;
      if (j < n)
        for (; d < here; d++) panel[d] = to_float(source[d]);
      for (; d < PANEL; d++) panel[d] = 0;
    }
  }
}
template <class T>
void pack_panels(uint32_t* to, const T* from, int64_t row, int n, int block, int width, int padded) {
  for (int first = 0; first < padded; first += PANEL) {
    uint32_t* panel = to + (ptrdiff_t)first * (block / 2);
    for (int j = 0; j < block; j += 2, panel += PANEL)
      for (int d = 0; d < PANEL; d++) {
        const bool real = first + d < width;
        uint32_t low = real && j < n ? from[j * row + first + d].bits : 0;
        uint32_t high = real && j + 1 < n ? from[(j + 1) * row + first + d].bits : 0;
        panel[d] = low | high << 16;
      }
  }
}

}  // namespace
