// FlashMask attention on CPUs (Wang et al., arXiv 2410.01359): online softmax over the tiles that a plan lists
// as seen, forward and backward. Plain C interface; errors are return codes, so nothing is thrown across it.
//
// Letters as in plan.py: B rows of the batch, H query heads, Hk key heads, M mask heads, Nq, Nk, D.
#include <cmath>
#include <limits>
#include <type_traits>

#include "parallel.h"
#include "pack.h"

extern "C" {
struct Strided {  // a [B, N, H, D] tensor whose last dimension is contiguous; strides in elements
  void* data;
  int64_t batch, row, head;
};

struct Attention {
  int64_t batch, heads, key_heads, rows, columns, width;
  int64_t bfloat16;  // element type of the tensors: 0 float32, 1 bfloat16
  int64_t threads;
  double scale;
  Strided query, key, value, out;  // in the backward pass ``out`` is the forward's result
  Strided lost;                    // what rounding took from ``out``; no data where nothing is to be kept of it
  float* lse;                      // [B, H, Nq], natural logarithm; -inf where a row sees nothing
  // The mask: 1 or B batch entries, 1 or Hk mask heads.
  int64_t mask_batch, mask_heads, intervals, padded_columns, row_block, column_block;
  const int32_t* bounds;   // [masks, K, 2, padded_columns]
  const int32_t* touched;  // [masks, column blocks, K, 2]: first and last masked row over the block
  const int32_t* offsets;  // tile lists: by row strips forward, by column strips backward
  const int32_t* entries;
  // backward only
  Strided grad_out, grad_query, grad_key, grad_value;
  int64_t chunks;  // parts that the columns of one key head are cut into
};
}

namespace {

constexpr float LOG2E = 1.44269504088896341f;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr int GROUP = 8;  // tiles between two updates of the running maximum
constexpr float HUGE_SCORE = 65536.0f;
constexpr int PREFETCHED_LINES = 8;  // of the tile's values, asked for while its keys are multiplied
constexpr int MOST_SEGMENTS = 64;
constexpr int NOT_FINITE = 3;  // code of a call whose results are not all finite

template <class T>
T* at(const Strided& x, int64_t b, int64_t n, int64_t h) {
  return static_cast<T*>(x.data) + b * x.batch + n * x.row + h * x.head;
}

struct Mask {
  const Attention& a;
  int64_t index;  // which mask

  Mask(const Attention& a, int64_t b, int64_t key_head)
      : a(a), index((a.mask_batch == 1 ? 0 : b) * a.mask_heads + (a.mask_heads == 1 ? 0 : key_head)) {}

  // Hides the masked elements of a tile: calls hide(row, interval bounds) for rows and intervals that matter.
  template <class Hide>
  void each(int64_t block, int first_row, int rows, Hide hide) const {
    const int64_t blocks = a.padded_columns / a.column_block;
    const int32_t* touched = a.touched + (index * blocks + block) * a.intervals * 2;
    for (int64_t k = 0; k < a.intervals; k++) {
      if (touched[2 * k] >= first_row + rows || touched[2 * k + 1] <= first_row) continue;
      const int32_t* start = a.bounds + ((index * a.intervals + k) * 2) * a.padded_columns + block * a.column_block;
      hide(start, start + a.padded_columns);
    }
  }
};

// A tile of queries row by row, as the left operand.
template <class T>
void copy_rows(float* to, const T* from, int64_t row, int n, int width, int padded, bool negate) {
  for (int r = 0; r < n; r++) {
    for (int d = 0; d < width; d++) to[r * padded + d] = negate ? -to_float(from[r * row + d]) : to_float(from[r * row + d]);
    for (int d = width; d < padded; d++) to[r * padded + d] = 0;
  }
}
template <class T>
void copy_rows(uint32_t* to, const T* from, int64_t row, int n, int width, int padded, bool negate) {
  uint16_t* halves = reinterpret_cast<uint16_t*>(to);
  for (int r = 0; r < n; r++)
    for (int d = 0; d < padded; d++)
      halves[r * padded + d] = d < width ? from[r * row + d].bits ^ (negate ? 0x8000 : 0) : 0;
}

// --- forward ---------------------------------------------------------------------------------------------

// Weights of one row in place: scores become 2**(score * scale - new maximum). Returns their sum.
INLINE float exponentials(float* s, int columns, float scale, float maximum) {
  const Vector factor = broadcast(scale), shift = broadcast(maximum);
  Vector total{}, second{};
  for (int j = 0; j < columns; j += 2 * LANES) {
    Vector x = exp2_negative(load(s + j) * factor - shift);
    Vector y = exp2_negative(load(s + j + LANES) * factor - shift);
    store(s + j, x);
    store(s + j + LANES, y);
    total += x;
    second += y;
  }
  return sum_of(total + second);
}

INLINE float largest(const float* s, int columns) {
  Vector best = load(s), second = load(s + LANES);
  for (int j = 2 * LANES; j < columns; j += 2 * LANES) {
    best = maximum(best, load(s + j));
    second = maximum(second, load(s + j + LANES));
  }
  return maximum_of(maximum(best, second));
}

INLINE void hide_row(float* s, int columns, int row, const int32_t* start, const int32_t* end, float value) {
  const Integers here = broadcast((int32_t)row);
  const Vector hidden = broadcast(value);
  for (int j = 0; j < columns; j += LANES)
    store(s + j, (load(start + j) <= here) & (here < load(end + j)) ? hidden : load(s + j));
}

// Whether n floats, a multiple of LANES, are all finite: 0 times anything else is NaN.
INLINE bool all_finite(const float* x, ptrdiff_t n) {
  Vector total{};
  for (ptrdiff_t i = 0; i < n; i += LANES) total += load(x + i) * Vector{};
  return sum_of(total) == 0;
}

// Weights as the left operand of their product with the values.
INLINE float* as_left(float* weights, float*, int, int) { return weights; }
INLINE uint32_t* as_left(const float* weights, uint32_t* to, int rows, int stride) {
  uint16_t* halves = reinterpret_cast<uint16_t*>(to);
  for (int i = 0; i < rows * stride; i++) halves[i] = to_bf16(weights[i]);
  return to;
}

template <class T, class Kind>
int forward(const Attention& a) {
  using Unit = typename Kind::Unit;
  constexpr int PER_UNIT = std::is_same<Unit, uint32_t>::value ? 2 : 1;
  const int width = (int)a.width, padded = round_up(width, PANEL), steps = padded / PER_UNIT;
  const int row_block = (int)a.row_block, column_block = (int)a.column_block, group = GROUP * column_block;
  const int64_t blocks = a.padded_columns / column_block, strips = (a.rows + row_block - 1) / row_block;
  const int64_t tile = (int64_t)column_block * steps;  // units of one packed tile of keys or values
  const int64_t per_head = blocks * tile, sharing = a.heads / a.key_heads;
  Buffer<Unit> keys(a.batch * a.key_heads * per_head), values(a.batch * a.key_heads * per_head);
  int failure = parallel(a.batch * a.key_heads * blocks, a.threads, [&] {
    return [&](int64_t task) {
      const int64_t block = task % blocks, head = task / blocks % a.key_heads, b = task / blocks / a.key_heads;
      const int64_t first = block * column_block;
      const int n = (int)std::min<int64_t>(column_block, a.columns - first);
      pack_transposed(keys.data + task * tile, at<const T>(a.key, b, first, head), a.key.row, n, column_block, width, padded);
      pack_panels(values.data + task * tile, at<const T>(a.value, b, first, head), a.value.row, n, column_block, width, padded);
    };
  });
  if (failure) return failure;
  const bool negate = a.scale < 0;
  const float scale = (float)std::fabs(a.scale) * LOG2E;

  std::atomic<bool> finite{true};
  failure = parallel(a.batch * a.heads * strips, a.threads, [&] {
    auto left = std::make_shared<Buffer<Unit>>((size_t)row_block * steps);
    auto scores = std::make_shared<Buffer<float>>((size_t)row_block * group);
    auto weights = std::make_shared<Buffer<Unit>>(PER_UNIT == 2 ? (size_t)row_block * group / 2 : 1);
    auto sums = std::make_shared<Buffer<float>>((size_t)row_block * (padded + 2));
    return [&, left, scores, weights, sums](int64_t task) {
      const int64_t strip = task % strips, h = task / strips % a.heads, b = task / strips / a.heads;
      const int64_t key_head = h / sharing;
      const Mask mask(a, b, key_head);
      const int first_row = (int)strip * row_block, rows = (int)std::min<int64_t>(row_block, a.rows - first_row);
      const Unit* packed_keys = keys.data + (b * a.key_heads + key_head) * per_head;
      const Unit* packed_values = values.data + (b * a.key_heads + key_head) * per_head;
      float *s = scores->data, *sum = sums->data, *maxima = sum + row_block * padded, *totals = maxima + row_block;
      copy_rows(left->data, at<const T>(a.query, b, first_row, h), a.query.row, rows, width, padded, negate);
      std::fill(sum, sum + (size_t)rows * padded, 0.0f);
      std::fill(maxima, maxima + rows, -INFINITE);
      std::fill(totals, totals + rows, 0.0f);
      const int32_t* entry = a.entries + a.offsets[mask.index * strips + strip];
      const int32_t* end = a.entries + a.offsets[mask.index * strips + strip + 1];
      while (entry < end) {
        const Unit* seen[GROUP];
        int count = 0;
        for (; count < GROUP && entry < end; count++, entry++) {
          const int64_t block = *entry >> 1;
          const Unit* key = packed_keys + block * tile;
          seen[count] = packed_values + block * tile;
          float* here = s + count * column_block;
          product<Kind>(rows, column_block / PANEL, 1, steps, {left->data, steps, 1, 0}, &key, (ptrdiff_t)steps * PANEL,
                        here, group, false, seen[count], PREFETCHED_LINES);
          if (*entry & 1 || (block + 1) * column_block > a.columns)
            mask.each(block, first_row, rows, [&](const int32_t* from, const int32_t* to) {
              for (int r = 0; r < rows; r++)
                hide_row(here + r * group, column_block, first_row + r, from, to, -INFINITE);
            });
        }
        const int columns = count * column_block;
        for (int r = 0; r < rows; r++) {
          float* row = s + r * group;
          const float before = maxima[r], top = largest(row, columns), now = std::max(before, top * scale);
          const float shift = now == -INFINITE ? 0.0f : now;
          // The product with the scale is rounded, by more than an exponent can bear if scores are huge: then the
          // largest is taken off before.
          const bool huge = std::fabs(shift) > HUGE_SCORE && now != before;
          if (huge)
            for (int j = 0; j < columns; j += LANES) store(row + j, load(row + j) - broadcast(top));
          const float total = exponentials(row, columns, scale, huge ? 0.0f : shift);
          if (now != before) {
            const float shrink = std::exp2(before - shift);
            totals[r] *= shrink;
            const Vector factor = broadcast(shrink);
            float* to = sum + r * padded;
            for (int d = 0; d < padded; d += LANES) store(to + d, load(to + d) * factor);
          }
          totals[r] += total;
          maxima[r] = now;
        }
        const Unit* p = as_left(s, weights->data, rows, group);
        product<Kind>(rows, padded / PANEL, count, column_block / PER_UNIT,
                      {p, group / PER_UNIT, 1, column_block / PER_UNIT}, seen,
                      (ptrdiff_t)(column_block / PER_UNIT) * PANEL, sum, padded, true);
      }
      for (int r = 0; r < rows; r++) {
        T* to = at<T>(a.out, b, first_row + r, h);
        const bool blind = totals[r] == 0;  // sees nothing; a sum of NaN is none
        const float inverse = blind ? 0.0f : 1.0f / totals[r];
        for (int d = 0; d < width; d++) put(to + d, sum[r * padded + d] * inverse);
        if (a.lost.data) {
          T* rest = at<T>(a.lost, b, first_row + r, h);
          for (int d = 0; d < width; d++) put(rest + d, sum[r * padded + d] * inverse - to_float(to[d]));
        }
        a.lse[(b * a.heads + h) * a.rows + first_row + r] =
            blind ? -INFINITE : (maxima[r] + std::log2(totals[r])) / LOG2E;
        if (!std::isfinite(totals[r])) finite = false;
      }
      if (!all_finite(sum, (ptrdiff_t)rows * padded)) finite = false;
    };
  });
  return failure ? failure : finite ? 0 : NOT_FINITE;
}

// --- backward --------------------------------------------------------------------------------------------

template <class T>
int backward(const Attention& a) {
  const int width = (int)a.width, padded = round_up(width, PANEL), panels = padded / PANEL;
  const int row_block = (int)a.row_block, column_block = (int)a.column_block;
  const int64_t strips = (a.rows + row_block - 1) / row_block, blocks = a.padded_columns / column_block;
  const int64_t tile = (int64_t)row_block * padded, per_head = strips * tile, sharing = a.heads / a.key_heads;
  const float scale = (float)a.scale;
  // Queries and gradients in panels serve as left and as right operands alike.
  Buffer<float> queries(a.batch * a.heads * per_head), gradients(a.batch * a.heads * per_head);
  Buffer<float> deltas(a.batch * a.heads * a.rows);
  // Every chunk of columns adds up its own part of the queries' gradient; the parts are summed in order, so
  // that the result does not depend on which thread came first.
  Buffer<float> partial(a.chunks * a.batch * a.heads * per_head);
  int failure = parallel(a.batch * a.heads * strips, a.threads, [&] {
    return [&](int64_t task) {
      const int64_t strip = task % strips, h = task / strips % a.heads, b = task / strips / a.heads;
      const int64_t first = strip * row_block;
      const int n = (int)std::min<int64_t>(row_block, a.rows - first);
      pack_panels(queries.data + task * tile, at<const T>(a.query, b, first, h), a.query.row, n, row_block, width, padded);
      pack_panels(gradients.data + task * tile, at<const T>(a.grad_out, b, first, h), a.grad_out.row, n, row_block, width, padded);
      for (int r = 0; r < n; r++) {
        const T *x = at<const T>(a.out, b, first + r, h), *g = at<const T>(a.grad_out, b, first + r, h);
        float delta = 0;
        for (int d = 0; d < width; d++) delta += to_float(x[d]) * to_float(g[d]);
        if (a.lost.data) {  // a row that sees few keys has gradients no larger than what rounding does to delta
          const T* rest = at<const T>(a.lost, b, first + r, h);
          for (int d = 0; d < width; d++) delta += to_float(rest[d]) * to_float(g[d]);
        }
        deltas.data[(b * a.heads + h) * a.rows + first + r] = delta;
      }
    };
  });
  if (failure) return failure;

  std::atomic<bool> finite{true};
  failure = parallel(a.batch * a.key_heads * a.chunks, a.threads, [&] {
    auto scratch = std::make_shared<Buffer<float>>((size_t)column_block * (5 * padded + 2 * row_block));
    return [&, scratch](int64_t task) {
      const int64_t chunk = task % a.chunks, key_head = task / a.chunks % a.key_heads, b = task / a.chunks / a.key_heads;
      const Mask mask(a, b, key_head);
      const int32_t* offsets = a.offsets + mask.index * blocks;
      const int64_t packed = (int64_t)column_block * padded;
      float *key_t = scratch->data, *value_t = key_t + packed, *key = value_t + packed;
      float *grad_key = key + packed, *grad_value = grad_key + packed;
      float *weights = grad_value + packed, *slopes = weights + column_block * row_block;
      for (int64_t h = key_head * sharing; h < (key_head + 1) * sharing; h++) {
        float* to = partial.data + ((chunk * a.batch + b) * a.heads + h) * per_head;
        std::fill(to, to + per_head, 0.0f);
      }
      // Chunks hold about equally many visible tiles.
      const int64_t visible = offsets[blocks] - offsets[0];
      for (int64_t block = 0; block < blocks; block++) {
        const int64_t middle = offsets[block] - offsets[0];
        if ((visible ? std::min(middle * a.chunks / visible, a.chunks - 1) : 0) != chunk) continue;
        const int first_column = (int)block * column_block;
        const int columns = (int)std::min<int64_t>(column_block, a.columns - first_column);
        pack_transposed(key_t, at<const T>(a.key, b, first_column, key_head), a.key.row, columns, column_block, width, padded);
        pack_transposed(value_t, at<const T>(a.value, b, first_column, key_head), a.value.row, columns, column_block, width, padded);
        pack_panels(key, at<const T>(a.key, b, first_column, key_head), a.key.row, columns, column_block, width, padded);
        std::fill(grad_key, grad_key + 2 * packed, 0.0f);
        const float *key_segments[MOST_SEGMENTS], *value_segments[MOST_SEGMENTS], *one = key;
        for (int p = 0; p < panels; p++) {
          key_segments[p] = key_t + p * PANEL * PANEL;
          value_segments[p] = value_t + p * PANEL * PANEL;
        }
        for (int64_t h = key_head * sharing; h < (key_head + 1) * sharing; h++) {
          const int64_t head = b * a.heads + h;
          for (const int32_t* entry = a.entries + offsets[block]; entry < a.entries + offsets[block + 1]; entry++) {
            const int64_t strip = *entry >> 1;
            const int first_row = (int)strip * row_block, rows = (int)std::min<int64_t>(row_block, a.rows - first_row);
            const float* query = queries.data + head * per_head + strip * tile;
            const float* gradient = gradients.data + head * per_head + strip * tile;
            const float *lse = a.lse + head * a.rows + first_row, *delta = deltas.data + head * a.rows + first_row;
            const Left<float> query_left{query, PANEL, 1, (ptrdiff_t)row_block * PANEL};
            const Left<float> gradient_left{gradient, PANEL, 1, (ptrdiff_t)row_block * PANEL};
            product<Single>(rows, column_block / PANEL, panels, PANEL, query_left, key_segments, (ptrdiff_t)padded * PANEL,
                            weights, column_block, false);
            product<Single>(rows, column_block / PANEL, panels, PANEL, gradient_left, value_segments,
                            (ptrdiff_t)padded * PANEL, slopes, column_block, false);
            if (*entry & 1 || columns < column_block)
              mask.each(block, first_row, rows, [&](const int32_t* from, const int32_t* to) {
                const float hidden = scale < 0 ? INFINITE : -INFINITE;
                for (int r = 0; r < rows; r++)
                  hide_row(weights + r * column_block, column_block, first_row + r, from, to, hidden);
              });
            for (int r = 0; r < rows; r++) {
              float *w = weights + r * column_block, *g = slopes + r * column_block;
              const Vector factor = broadcast(scale * LOG2E), shift = broadcast(lse[r] == -INFINITE ? INFINITE : lse[r] * LOG2E);
              const Vector mean = broadcast(delta[r]);
              for (int j = 0; j < column_block; j += LANES) {
                const Vector p = exp2_negative(load(w + j) * factor - shift);
                store(w + j, p);
                store(g + j, p * (load(g + j) - mean));
              }
            }
            product<Single>(column_block, panels, 1, rows, {weights, 1, column_block, 0}, &gradient,
                            (ptrdiff_t)row_block * PANEL, grad_value, padded, true);
            product<Single>(column_block, panels, 1, rows, {slopes, 1, column_block, 0}, &query,
                            (ptrdiff_t)row_block * PANEL, grad_key, padded, true);
            float* to = partial.data + (chunk * a.batch * a.heads + head) * per_head + strip * tile;
            product<Single>(rows, panels, 1, column_block, {slopes, column_block, 1, 0}, &one,
                            (ptrdiff_t)column_block * PANEL, to, padded, true);
          }
        }
        for (int j = 0; j < columns; j++) {
          T* to_key = at<T>(a.grad_key, b, first_column + j, key_head);
          T* to_value = at<T>(a.grad_value, b, first_column + j, key_head);
          for (int d = 0; d < width; d++) {
            put(to_key + d, grad_key[j * padded + d] * scale);
            put(to_value + d, grad_value[j * padded + d]);
          }
        }
        const ptrdiff_t made = (ptrdiff_t)columns * padded;
        if (!all_finite(grad_key, made) || !all_finite(grad_value, made)) finite = false;
      }
    };
  });
  if (failure) return failure;

  failure = parallel(a.batch * a.heads * strips, a.threads, [&] {
    return [&](int64_t task) {
      const int64_t strip = task % strips, h = task / strips % a.heads, b = task / strips / a.heads;
      const int n = (int)std::min<int64_t>(row_block, a.rows - strip * row_block);
      for (int64_t chunk = 0; chunk < a.chunks; chunk++)
        if (!all_finite(partial.data + chunk * a.batch * a.heads * per_head + task * tile, (ptrdiff_t)n * padded))
          finite = false;
      for (int r = 0; r < n; r++) {
        T* to = at<T>(a.grad_query, b, strip * row_block + r, h);
        for (int d = 0; d < width; d++) {
          float total = 0;
          for (int64_t chunk = 0; chunk < a.chunks; chunk++)
            total += partial.data[chunk * a.batch * a.heads * per_head + task * tile + (ptrdiff_t)r * padded + d];
          put(to + d, total * scale);
        }
      }
    };
  });
  return failure ? failure : finite ? 0 : NOT_FINITE;
}

}  // namespace

extern "C" {
// 0: done; 1: out of memory; 2: anything else; 3: done, but a result is not finite. Then it may hold what comes of a
// hidden number that is not: its weight of 0 times NaN or infinity.
__attribute__((visibility("default"))) int flashmask_forward(const Attention* a) {
  return guarded([&] {
    if (!a->bfloat16) return forward<float, Single>(*a);
#if BF16_DOT
    return forward<bf16, Pairs>(*a);
#else
    return forward<bf16, Single>(*a);
#endif
  });
}
__attribute__((visibility("default"))) int flashmask_backward(const Attention* a) {
  return guarded([&] { return a->bfloat16 ? backward<bf16>(*a) : backward<float>(*a); });
}
// The size that the caller's own description of the structure must have.
__attribute__((visibility("default"))) int64_t flashmask_attention_size() { return sizeof(Attention); }
__attribute__((visibility("default"))) int64_t vector_panel() { return PANEL; }
}
