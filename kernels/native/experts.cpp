// The sparse feed-forward on CPUs: rows gathered to their experts, SwiGLU, and each token's rows summed.
//
// Letters: T tokens, k slots a token, E experts, d width, h expert width, R routed rows (sorted by expert).
// Rows of one expert are taken in chunks of CHUNK; a chunk is the unit of work of the forward pass.
#include <cmath>

#include "pack.h"
#include "parallel.h"

extern "C" {
struct Experts {
  int64_t tokens, slots, experts, width, hidden, rows;
  int64_t input_bfloat16, weight_bfloat16;  // element types: 0 float32, 1 bfloat16
  int64_t threads;
  const void* input;            // [T, d]
  const void* gate_up;          // [E, 2h, d]
  const void* down;             // [E, d, h]
  const int32_t* slot;          // [R]: token * k + place, by expert
  const int32_t* offsets;       // [E + 1]: rows of each expert
  const int32_t* row_of_slot;   // [T * k]: where a slot's row lies, or -1
  const float* combine;         // [T * k]
  float* gates;                 // [R, 2 * padded h]: gate and up before the activation; kept for the backward pass
  float* out;                   // [T, d]
  // backward only
  const float* grad_out;        // [T, d]
  void* grad_input;             // [T, d], of the input's type
  float* grad_gate_up;          // [E, 2h, d]
  float* grad_down;             // [E, d, h]
  float* grad_combine;          // [T * k]
};
}

namespace {

constexpr int CHUNK = 96;
constexpr int CHUNKS = 4;   // of an expert's rows that a weight's gradient adds up at a time
constexpr int SLICE = 96;   // rows of a weight's gradient that one task makes
constexpr int FEW = 8;      // rows of an expert up to which its weights are used as they lie
constexpr int DEPTH = 256;  // steps of K that stay in the first-level cache
// Cache lines of the next block of B that every group of rows asks for, so that all have come when it is used.
constexpr int PREFETCHED_LINES = DEPTH * PANEL * 4 / 64 / (CHUNK / TILE_ROWS);
constexpr float LOG2E = 1.44269504088896341f;

struct Chunk {
  int expert;
  int64_t first;
  int rows;
};

std::vector<Chunk> chunks_of(const Experts& a) {
  std::vector<Chunk> found;
  for (int e = 0; e < a.experts; e++)
    for (int64_t first = a.offsets[e]; first < a.offsets[e + 1]; first += CHUNK)
      found.push_back({e, first, (int)std::min<int64_t>(CHUNK, a.offsets[e + 1] - first)});
  return found;
}

// C = A B, panel after panel, with K cut into blocks: a block of B and the panel's C stay in the first-level cache.
void deep_product(int rows, int panels, int depth, Left<float> a, const float* b, ptrdiff_t b_panel, float* c,
                  ptrdiff_t c_row) {
  for (int p = 0; p < panels; p++)
    for (int first = 0; first < depth; first += DEPTH) {
      const float* here = b + p * b_panel + (ptrdiff_t)first * PANEL;
      Left<float> left = a;
      left.data += first * a.step;
      const int here_depth = std::min(DEPTH, depth - first);
      product<Single>(rows, 1, 1, here_depth, left, &here, 0, c + p * PANEL, c_row, first > 0,
                      here + here_depth * PANEL, PREFETCHED_LINES);
    }
}

// C = A W^T with W as it lies, [n x depth]: for so few rows packing W would cost more than using it.
template <int ROWS, class W>
void direct_rows(int n, int depth, const float* a, int a_row, const W* w, float* c, ptrdiff_t c_row) {
  constexpr int BLOCK = ROWS <= 2 ? 4 : 2;
  const int whole = depth / LANES * LANES;
  for (int first = 0; first < n; first += BLOCK) {
    const int here = std::min(BLOCK, n - first);
    const W* source[BLOCK];
    for (int i = 0; i < BLOCK; i++) source[i] = w + (ptrdiff_t)(first + std::min(i, here - 1)) * depth;
    Vector sum[ROWS][BLOCK] = {};
    for (int k = 0; k < whole; k += LANES)
#pragma GCC unroll 4
      for (int i = 0; i < BLOCK; i++) {
        const Vector weight = load(source[i] + k);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sum[r][i] += weight * load(a + r * a_row + k);
      }
    for (int r = 0; r < ROWS; r++)
      for (int i = 0; i < here; i++) {
        float total = sum_of(sum[r][i]);
        for (int k = whole; k < depth; k++) total += to_float(source[i][k]) * a[r * a_row + k];
        c[r * c_row + first + i] = total;
      }
  }
}

template <class W>
void direct_product(int rows, int n, int depth, const float* a, int a_row, const W* w, float* c, ptrdiff_t c_row) {
  for (int r = 0; r < rows; r += 4, a += 4 * a_row, c += 4 * c_row) switch (std::min(4, rows - r)) {
      case 1: direct_rows<1>(n, depth, a, a_row, w, c, c_row); break;
      case 2: direct_rows<2>(n, depth, a, a_row, w, c, c_row); break;
      case 3: direct_rows<3>(n, depth, a, a_row, w, c, c_row); break;
      default: direct_rows<4>(n, depth, a, a_row, w, c, c_row);
    }
}

// Weights of the experts with at least ``least`` rows in panels, made in parallel: ``pack`` fills one expert's.
template <class Pack>
int pack_experts(const Experts& a, int least, Pack pack) {
  return parallel(a.experts, a.threads, [&] {
    return [&](int64_t e) {
      if (a.offsets[e + 1] - a.offsets[e] >= least) pack(e);
    };
  });
}

template <class T>
void gather(float* to, const T* from, const int32_t* slot, int rows, int64_t slots, int width, int stride) {
  for (int r = 0; r < rows; r++) {
    const T* source = from + slot[r] / slots * width;
    for (int d = 0; d < width; d++) to[r * stride + d] = to_float(source[d]);
  }
}

// out[t] = sum of the token's rows, in the order of its slots.
template <class T>
int combine_rows(const Experts& a, const float* rows, int padded, T* out) {
  const int64_t block = 64, blocks = (a.tokens + block - 1) / block;
  return parallel(blocks, a.threads, [&] {
    auto sum = std::make_shared<Buffer<float>>(padded);
    return [&, sum](int64_t task) {
      for (int64_t t = task * block; t < std::min(a.tokens, (task + 1) * block); t++) {
        float* total = sum->data;
        std::fill(total, total + padded, 0.0f);
        for (int64_t j = 0; j < a.slots; j++) {
          const int64_t row = a.row_of_slot[t * a.slots + j];
          if (row < 0) continue;
          for (int d = 0; d < padded; d += LANES) store(total + d, load(total + d) + load(rows + row * padded + d));
        }
        for (int64_t d = 0; d < a.width; d++) put(out + t * a.width + d, total[d]);
      }
    };
  });
}

// 1 / (1 + exp(-x)) without overflow.
INLINE Vector sigmoid(Vector x) {
  const Vector one = broadcast(1.0f), zero{};
  const Vector small = exp2_negative((x < zero ? x : zero - x) * broadcast(LOG2E));
  return (x < zero ? small : one) / (one + small);
}

template <class X, class W>
int forward(const Experts& a) {
  const int d = (int)a.width, h = (int)a.hidden, dp = round_up(d, PANEL), hp = round_up(h, PANEL);
  const X* input = static_cast<const X*>(a.input);
  const W *gate_up = static_cast<const W*>(a.gate_up), *down = static_cast<const W*>(a.down);
  Buffer<float> in_panels(a.experts * 2 * hp * d), out_panels(a.experts * dp * h);
  Buffer<float> rows_out((size_t)a.rows * dp);
  int failure = pack_experts(a, FEW + 1, [&](int64_t e) {
    float* to = in_panels.data + e * 2 * hp * d;
    pack_transposed(to, gate_up + e * 2 * h * d, d, h, hp, d, d);
    pack_transposed(to + (ptrdiff_t)hp * d, gate_up + (e * 2 + 1) * h * d, d, h, hp, d, d);
    pack_transposed(out_panels.data + e * dp * h, down + e * d * h, h, d, dp, h, h);
  });
  if (failure) return failure;
  const std::vector<Chunk> chunks = chunks_of(a);
  failure = parallel((int64_t)chunks.size(), a.threads, [&] {
    auto scratch = std::make_shared<Buffer<float>>((size_t)CHUNK * (d + hp));
    return [&, scratch](int64_t task) {
      const Chunk c = chunks[task];
      float *x = scratch->data, *hidden = x + CHUNK * d, *gates = a.gates + c.first * 2 * hp;
      const bool few = a.offsets[c.expert + 1] - a.offsets[c.expert] <= FEW;
      gather(x, input, a.slot + c.first, c.rows, a.slots, d, d);
      if (few) {
        const W* w = gate_up + (ptrdiff_t)c.expert * 2 * h * d;
        std::fill(gates, gates + (ptrdiff_t)c.rows * 2 * hp, 0.0f);
        direct_product(c.rows, h, d, x, d, w, gates, 2 * hp);
        direct_product(c.rows, h, d, x, d, w + (ptrdiff_t)h * d, gates + hp, 2 * hp);
      } else {
        deep_product(c.rows, 2 * hp / PANEL, d, {x, d, 1, 0}, in_panels.data + (ptrdiff_t)c.expert * 2 * hp * d,
                     (ptrdiff_t)d * PANEL, gates, 2 * hp);
      }
      for (int r = 0; r < c.rows; r++) {
        const float *gate = gates + (ptrdiff_t)r * 2 * hp, *up = gate + hp;
        const Vector weight = broadcast(a.combine[a.slot[c.first + r]]);
        for (int i = 0; i < hp; i += LANES) {
          const Vector g = load(gate + i);
          store(hidden + r * hp + i, g * sigmoid(g) * load(up + i) * weight);
        }
      }
      float* out = rows_out.data + c.first * dp;
      if (few) {
        for (int r = 0; r < c.rows; r++) std::fill(out + r * dp + d, out + (r + 1) * dp, 0.0f);
        direct_product(c.rows, d, h, hidden, hp, down + (ptrdiff_t)c.expert * d * h, out, dp);
      } else {
        deep_product(c.rows, dp / PANEL, h, {hidden, hp, 1, 0}, out_panels.data + (ptrdiff_t)c.expert * dp * h,
                     (ptrdiff_t)h * PANEL, out, dp);
      }
    };
  });
  return failure ? failure : combine_rows(a, rows_out.data, dp, a.out);
}

// Rows [first, first + m) of one expert's weight gradient: the sum over its routed rows of left^T right. ``copy`` puts
// columns of a chunk of the left operand into groups of TILE_ROWS, step after step; the right one lies in panels, chunk
// by chunk.
template <class Copy>
void weight_gradient(const Experts& a, int64_t e, int m, int columns, const float* right, float* left, float* c,
                     Copy copy, float* to, int n) {
  const int64_t begin = a.offsets[e], end = a.offsets[e + 1];
  const int groups = round_up(m, TILE_ROWS) / TILE_ROWS, depth = CHUNKS * CHUNK;
  for (int64_t row = begin; row < end; row += depth) {
    const int rows = (int)std::min<int64_t>(depth, end - row);
    for (int k = 0; k < rows; k++) copy(left + k * TILE_ROWS, row + k, (ptrdiff_t)depth * TILE_ROWS);
    for (int p = 0; p < columns / PANEL; p++)
      for (int g = 0; g < groups; g++)
        for (int k = 0; k < rows; k += CHUNK) {
          const int here = std::min(CHUNK, rows - k);
          const float* b = right + (row + k) * columns + (ptrdiff_t)p * here * PANEL;
          tile_product<Single, TILE_ROWS>(1, here, {left + ((ptrdiff_t)g * depth + k) * TILE_ROWS, 1, TILE_ROWS, 0}, &b, 0,
                                          c + (ptrdiff_t)g * TILE_ROWS * columns + p * PANEL, columns, row + k > begin);
        }
  }
  for (int r = 0; r < m; r++)
    if (begin == end)
      std::fill(to + (ptrdiff_t)r * n, to + (ptrdiff_t)(r + 1) * n, 0.0f);
    else
      std::copy(c + (ptrdiff_t)r * columns, c + (ptrdiff_t)r * columns + n, to + (ptrdiff_t)r * n);
}

// One step of a left operand in groups of TILE_ROWS; zeros fill the last group.
template <class T>
INLINE void copy_step(float* to, const T* from, int m, ptrdiff_t group) {
  for (int first = 0; first < m; first += TILE_ROWS, to += group)
    for (int i = 0; i < TILE_ROWS; i++) to[i] = first + i < m ? to_float(from[first + i]) : 0.0f;
}

template <class X, class W>
int backward(const Experts& a) {
  const int d = (int)a.width, h = (int)a.hidden, dp = round_up(d, PANEL), hp = round_up(h, PANEL);
  const X* input = static_cast<const X*>(a.input);
  const W *gate_up = static_cast<const W*>(a.gate_up), *down = static_cast<const W*>(a.down);
  Buffer<float> down_panels(a.experts * hp * d), gate_up_panels(a.experts * dp * 2 * hp);
  // By rows: the gates' gradients as they lie; by chunks in panels: hidden states and inputs.
  Buffer<float> slopes((size_t)a.rows * 2 * hp), hidden_panels((size_t)a.rows * hp), input_panels((size_t)a.rows * dp);
  Buffer<float> rows_out((size_t)a.rows * dp);
  int failure = pack_experts(a, 1, [&](int64_t e) {
    pack_panels(down_panels.data + e * hp * d, down + e * d * h, h, d, d, h, hp);
    // Rows h..hp meet only zeros of the padded gates; they are packed as zeros.
    float* to = gate_up_panels.data + e * dp * 2 * hp;
    for (int half = 0; half < 2; half++)
      for (int p = 0; p < dp / PANEL; p++)
        pack_panels(to + ((ptrdiff_t)p * 2 + half) * hp * PANEL, gate_up + (e * 2 + half) * h * d + p * PANEL, d, h, hp,
                    std::min(PANEL, d - p * PANEL), PANEL);
  });
  if (failure) return failure;
  const std::vector<Chunk> chunks = chunks_of(a);
  failure = parallel((int64_t)chunks.size(), a.threads, [&] {
    auto scratch = std::make_shared<Buffer<float>>((size_t)CHUNK * (std::max(d, hp) + hp));
    return [&, scratch](int64_t task) {
      const Chunk c = chunks[task];
      const int32_t* slot = a.slot + c.first;
      float *rows = scratch->data, *grad = rows + CHUNK * std::max(d, hp), *hidden = rows;
      gather(rows, a.grad_out, slot, c.rows, a.slots, d, d);
      deep_product(c.rows, hp / PANEL, d, {rows, d, 1, 0}, down_panels.data + (ptrdiff_t)c.expert * hp * d,
                   (ptrdiff_t)d * PANEL, grad, hp);
      for (int r = 0; r < c.rows; r++) {
        const float *gate = a.gates + (c.first + r) * 2 * hp, *up = gate + hp;
        float* slope = slopes.data + (c.first + r) * 2 * hp;
        const Vector weight = broadcast(a.combine[slot[r]]), one = broadcast(1.0f);
        Vector dot{};
        for (int i = 0; i < hp; i += LANES) {
          const Vector g = load(gate + i), u = load(up + i), s = sigmoid(g), active = g * s, dh = load(grad + r * hp + i);
          dot += active * u * dh;
          store(hidden + r * hp + i, active * u * weight);
          store(slope + i, dh * weight * u * s * (one + g * (one - s)));
          store(slope + hp + i, dh * weight * active);
        }
        a.grad_combine[slot[r]] = sum_of(dot);
      }
      pack_panels(hidden_panels.data + c.first * hp, hidden, hp, c.rows, c.rows, hp, hp);
      deep_product(c.rows, dp / PANEL, 2 * hp, {slopes.data + c.first * 2 * hp, 2 * hp, 1, 0},
                   gate_up_panels.data + (ptrdiff_t)c.expert * dp * 2 * hp, (ptrdiff_t)2 * hp * PANEL,
                   rows_out.data + c.first * dp, dp);
      float* panels = input_panels.data + c.first * dp;
      for (int p = 0; p < dp; p += PANEL)
        for (int r = 0; r < c.rows; r++) {
          const X* source = input + slot[r] / a.slots * d + p;
          for (int i = 0; i < PANEL; i++) *panels++ = p + i < d ? to_float(source[i]) : 0.0f;
        }
    };
  });
  if (failure) return failure;
  failure = combine_rows(a, rows_out.data, dp, static_cast<X*>(a.grad_input));
  if (failure) return failure;

  // Each task owns whole rows of one weight's gradient and adds up in the order of the routed rows.
  const int up_slices = (h + SLICE - 1) / SLICE, down_slices = (d + SLICE - 1) / SLICE, each = 2 * up_slices + down_slices;
  return parallel(a.experts * each, a.threads, [&] {
    auto scratch = std::make_shared<Buffer<float>>((size_t)SLICE * (CHUNKS * CHUNK + std::max(dp, hp)));
    return [&, scratch](int64_t task) {
      const int64_t e = task / each, part = task % each;
      float *left = scratch->data, *c = left + SLICE * CHUNKS * CHUNK;
      if (part < 2 * up_slices) {
        const int half = (int)(part / up_slices), first = (int)(part % up_slices) * SLICE, m = std::min(SLICE, h - first);
        auto copy = [&](float* to, int64_t row, ptrdiff_t group) {
          copy_step(to, slopes.data + row * 2 * hp + half * hp + first, m, group);
        };
        weight_gradient(a, e, m, dp, input_panels.data, left, c, copy, a.grad_gate_up + ((e * 2 + half) * h + first) * d, d);
      } else {
        const int first = (int)(part - 2 * up_slices) * SLICE, m = std::min(SLICE, d - first);
        auto copy = [&](float* to, int64_t row, ptrdiff_t group) {
          copy_step(to, a.grad_out + a.slot[row] / a.slots * d + first, m, group);
        };
        weight_gradient(a, e, m, hp, hidden_panels.data, left, c, copy, a.grad_down + (e * d + first) * h, h);
      }
    };
  });
}

template <class Call>
int by_types(const Experts& a, Call call) {
  return guarded([&] {
    if (a.input_bfloat16) return a.weight_bfloat16 ? call(bf16{}, bf16{}) : call(bf16{}, float{});
    return a.weight_bfloat16 ? call(float{}, bf16{}) : call(float{}, float{});
  });
}

}  // namespace

extern "C" {
// 0: done; 1: out of memory; 2: anything else.
__attribute__((visibility("default"))) int experts_forward(const Experts* a) {
  return by_types(*a, [&](auto x, auto w) { return forward<decltype(x), decltype(w)>(*a); });
}
__attribute__((visibility("default"))) int experts_backward(const Experts* a) {
  return by_types(*a, [&](auto x, auto w) { return backward<decltype(x), decltype(w)>(*a); });
}
__attribute__((visibility("default"))) int64_t experts_size() { return sizeof(Experts); }
}
