"""Triton kernels of attention under a column-interval mask: forward, dK and dV, dQ.

Every program walks a list of visible tiles that was made before the launch, first the full ones and then the
partial ones. Nothing in the loops depends on a branch, so Triton's pipeliner turns the tile loads into
asynchronous copies; testing for visibility inside the loop (as Wang et al., arXiv 2410.01359, Algorithm 1
does) would leave them synchronous. No program adds to memory of another one: the result is deterministic.

Conventions: scores live in base 2 (``scale_log2`` is ``softmax_scale * log2(e)``); the bounds of masked
intervals are int32 ``[B, M, K, 2, padded Nk]``, columns past Nk masked for all rows; a list is int32
``splits [B * M * strips, 3]`` (begin, first partial, end) and ``tiles``. Only partial tiles may reach past
the last row or column.
"""

# A jitted function's parameters are its launch signature; upper-case ones are compile-time constants.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile_offsets(first, stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Element offsets of a tile of ``BLOCK`` rows. The tile's base is 64 bits wide, its inside 32."""
    inside = tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]
    return first.to(tl.int64) * stride + inside


@triton.jit
def _load_tile(
    pointer,
    first,
    stride,
    limit,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CUT: tl.constexpr,
):
    """Rows ``first ..`` as ``[BLOCK, BLOCK_D]``, zero past the head dim and, if ``CUT``, past ``limit``."""
    pointers = pointer + _tile_offsets(first, stride, BLOCK, BLOCK_D)
    dims = tl.arange(0, BLOCK_D)[None, :]
    rows = first + tl.arange(0, BLOCK)[:, None]
    if CUT:
        if DIM == BLOCK_D:
            return tl.load(pointers, mask=rows < limit, other=0.0)
        return tl.load(pointers, mask=(rows < limit) & (dims < DIM), other=0.0)
    if DIM == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=dims < DIM, other=0.0)


@triton.jit
def _store_tile(
    pointer, tile, first, stride, limit, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    rows = first + tl.arange(0, BLOCK)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    pointers = pointer + _tile_offsets(first, stride, BLOCK, BLOCK_D)
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=(rows < limit) & (dims < DIM))


@triton.jit
def _hide(tile, fill, rows, columns, bounds, padded_columns, INTERVALS: tl.constexpr):
    """``fill`` in the cells that an interval hides; ``rows`` and ``columns`` broadcast against each other.

    Interval by interval: a tile of flags that outlives one interval costs registers.
    """
    for interval in tl.static_range(INTERVALS):
        start = tl.load(bounds + 2 * interval * padded_columns + columns)
        end = tl.load(bounds + (2 * interval + 1) * padded_columns + columns)
        tile = tl.where((rows >= start) & (rows < end), fill, tile)
    return tile


@triton.jit
def _forward_tiles(
    acc,
    total,
    peak,
    query,
    rows,
    key,
    value,
    bounds,
    tiles,
    begin,
    end,
    key_stride,
    value_stride,
    columns,
    padded_columns,
    scale_log2,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERVALS: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the listed key tiles; returns the accumulator, the row sums and the row peaks."""
    for index in range(begin, end):
        first = tl.load(tiles + index) * BLOCK_N
        k = _load_tile(key, first, key_stride, columns, BLOCK_N, DIM, BLOCK_D, PARTIAL)
        v = _load_tile(value, first, value_stride, columns, BLOCK_N, DIM, BLOCK_D, PARTIAL)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if PARTIAL:
            column = first + tl.arange(0, BLOCK_N)[None, :]
            scores = scores * scale_log2
            scores = _hide(scores, float("-inf"), rows[:, None], column, bounds, padded_columns, INTERVALS)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # A row that has seen no key yet: any finite reference keeps exp2(-inf - reference) at 0.
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - reference[:, None])
            decay = tl.exp2(peak - reference)
        else:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
            decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, total, peak


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    out,
    lost,
    lse,
    bounds,
    splits,
    tiles,
    query_stride_b,
    query_stride_n,
    query_stride_h,
    key_stride_b,
    key_stride_n,
    key_stride_h,
    value_stride_b,
    value_stride_n,
    value_stride_h,
    rows,
    columns,
    padded_columns,
    heads,
    group,
    mask_batch,
    mask_heads,
    scale_log2,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERVALS: tl.constexpr,
    PRECISION: tl.constexpr,
    KEEP: tl.constexpr,
):
    """One strip of query rows of one head: ``out``, with ``KEEP`` what rounding takes from it, ``lost``, and
    the natural log-sum-exp ``lse [B, H, Nq]``.

    Grid: (row strips, H, B). Later strips of causal masks are the longer ones, so they start first.
    """
    strips = tl.num_programs(0)
    strip = strips - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head = head // group
    mask = (batch % mask_batch) * mask_heads + key_head % mask_heads
    query += batch * query_stride_b + head.to(tl.int64) * query_stride_h
    key += batch * key_stride_b + key_head.to(tl.int64) * key_stride_h
    value += batch * value_stride_b + key_head.to(tl.int64) * value_stride_h
    bounds += mask * 2 * INTERVALS * padded_columns
    splits += (mask * strips + strip) * 3
    begin, middle, end = tl.load(splits), tl.load(splits + 1), tl.load(splits + 2)

    first = strip * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    q = _load_tile(query, first, query_stride_n, rows, BLOCK_M, DIM, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc, total, peak = _forward_tiles(
        acc, total, peak, q, row, key, value, bounds, tiles, begin, middle, key_stride_n, value_stride_n,
        columns, padded_columns, scale_log2, DIM, BLOCK_D, BLOCK_N, INTERVALS, False, PRECISION,
    )  # fmt: skip
    acc, total, peak = _forward_tiles(
        acc, total, peak, q, row, key, value, bounds, tiles, middle, end, key_stride_n, value_stride_n,
        columns, padded_columns, scale_log2, DIM, BLOCK_D, BLOCK_N, INTERVALS, True, PRECISION,
    )  # fmt: skip

    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    place = (batch * rows * heads + head) * DIM
    acc = acc / total[:, None]
    _store_tile(out + place, acc, first, heads * DIM, rows, BLOCK_M, DIM, BLOCK_D)
    if KEEP:
        acc -= acc.to(out.dtype.element_ty).to(tl.float32)
        _store_tile(lost + place, acc, first, heads * DIM, rows, BLOCK_M, DIM, BLOCK_D)
    log_sum = (peak + tl.log2(total)) * 0.6931471805599453
    tl.store(
        lse + (batch * heads + head) * rows + row, tl.where(seen, log_sum, float("-inf")), mask=row < rows
    )


@triton.jit
def delta_kernel(
    out,
    lost,
    grad_out,
    lse,
    delta,
    lse_log2,
    grad_stride_b,
    grad_stride_n,
    grad_stride_h,
    rows,
    padded_rows,
    heads,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEPT: tl.constexpr,
):
    """``delta = sum((out + lost) * grad_out)`` and the base-2 log-sum-exp, float32 ``[B, H, padded Nq]``;
    without ``KEPT`` nothing is known to be lost.

    Rows without any key and rows past Nq get +inf as log-sum-exp: their weights come out as 0, untested.
    """
    first = tl.program_id(0) * BLOCK_M
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = (batch * rows * heads + head) * DIM
    grad_out += batch * grad_stride_b + head.to(tl.int64) * grad_stride_h
    o = _load_tile(out + place, first, heads * DIM, rows, BLOCK_M, DIM, BLOCK_D, True).to(tl.float32)
    if KEPT:
        o += _load_tile(lost + place, first, heads * DIM, rows, BLOCK_M, DIM, BLOCK_D, True).to(tl.float32)
    do = _load_tile(grad_out, first, grad_stride_n, rows, BLOCK_M, DIM, BLOCK_D, True).to(tl.float32)
    row = first + tl.arange(0, BLOCK_M)
    value = tl.load(lse + (batch * heads + head) * rows + row, mask=row < rows, other=float("-inf"))
    value = tl.where(value == float("-inf"), float("inf"), value * 1.4426950408889634)
    place = (batch * heads + head) * padded_rows + row
    tl.store(delta + place, tl.sum(o * do, 1))
    tl.store(lse_log2 + place, value)


@triton.jit
def _dkdv_tiles(
    dk,
    dv,
    k,
    v,
    column,
    query,
    grad_out,
    lse_log2,
    delta,
    bounds,
    tiles,
    begin,
    end,
    query_stride,
    grad_stride,
    rows,
    padded_columns,
    scale_log2,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    INTERVALS: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Adds the listed query tiles' share to dK and dV. Scores are transposed: [keys, queries].

    ``FOLD`` starts the two score products from the negated statistics instead of subtracting those later. On
    Hopper, whose accumulators are registers anyway, that frees as many as tiles of 64 x 128 need.
    """
    for index in range(begin, end):
        first = tl.load(tiles + index) * BLOCK_M
        row = first + tl.arange(0, BLOCK_M)
        q = _load_tile(query, first, query_stride, rows, BLOCK_M, DIM, BLOCK_D, PARTIAL)
        do = _load_tile(grad_out, first, grad_stride, rows, BLOCK_M, DIM, BLOCK_D, PARTIAL)
        log_sum = tl.load(lse_log2 + row)
        mean = tl.load(delta + row)
        if FOLD:
            nothing = tl.zeros([k.shape[0], BLOCK_M], tl.float32)
            start = nothing - mean[None, :]
            grad_weights = tl.dot(v, tl.trans(do), start, input_precision=PRECISION)
            start = nothing - (log_sum * (1.0 / scale_log2))[None, :]
            scores = tl.dot(k, tl.trans(q), start, input_precision=PRECISION)
            weights = tl.exp2(scores * scale_log2)
        else:
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            weights = tl.exp2(scores * scale_log2 - log_sum[None, :])
        if PARTIAL:
            weights = _hide(weights, 0.0, row[None, :], column[:, None], bounds, padded_columns, INTERVALS)
        dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=PRECISION)
        if FOLD:
            grad_scores = weights * grad_weights
        else:
            grad_weights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            grad_scores = weights * (grad_weights - mean[None, :])
        dk = tl.dot(grad_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dkdv_kernel(
    query,
    key,
    value,
    grad_out,
    lse_log2,
    delta,
    grad_key,
    grad_value,
    bounds,
    splits,
    tiles,
    query_stride_b,
    query_stride_n,
    query_stride_h,
    key_stride_b,
    key_stride_n,
    key_stride_h,
    value_stride_b,
    value_stride_n,
    value_stride_h,
    grad_stride_b,
    grad_stride_n,
    grad_stride_h,
    rows,
    padded_rows,
    columns,
    padded_columns,
    heads,
    group,
    mask_batch,
    mask_heads,
    softmax_scale,
    scale_log2,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERVALS: tl.constexpr,
    PRECISION: tl.constexpr,
    FOLD: tl.constexpr,
):
    """One strip of key columns of one key head: dK and dV, summed over the group's query heads.

    Grid: (column strips, Hk, B).
    """
    strips = tl.num_programs(0)
    strip = tl.program_id(0)
    key_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    mask = (batch % mask_batch) * mask_heads + key_head % mask_heads
    key += batch * key_stride_b + key_head.to(tl.int64) * key_stride_h
    value += batch * value_stride_b + key_head.to(tl.int64) * value_stride_h
    bounds += mask * 2 * INTERVALS * padded_columns
    splits += (mask * strips + strip) * 3
    begin, middle, end = tl.load(splits), tl.load(splits + 1), tl.load(splits + 2)

    first = strip * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    k = _load_tile(key, first, key_stride_n, columns, BLOCK_N, DIM, BLOCK_D, True)
    v = _load_tile(value, first, value_stride_n, columns, BLOCK_N, DIM, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(group):
        head = (key_head * group + member).to(tl.int64)
        q_head = query + batch * query_stride_b + head * query_stride_h
        grad_head = grad_out + batch * grad_stride_b + head * grad_stride_h
        statistics = (batch * heads + head) * padded_rows
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, column, q_head, grad_head, lse_log2 + statistics, delta + statistics, bounds, tiles,
            begin, middle, query_stride_n, grad_stride_n, rows, padded_columns, scale_log2,
            DIM, BLOCK_D, BLOCK_M, INTERVALS, False, PRECISION, FOLD,
        )  # fmt: skip
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, column, q_head, grad_head, lse_log2 + statistics, delta + statistics, bounds, tiles,
            middle, end, query_stride_n, grad_stride_n, rows, padded_columns, scale_log2,
            DIM, BLOCK_D, BLOCK_M, INTERVALS, True, PRECISION, FOLD,
        )  # fmt: skip

    key_heads = heads // group
    place = (batch * columns * key_heads + key_head) * DIM
    _store_tile(grad_key + place, dk * softmax_scale, first, key_heads * DIM, columns, BLOCK_N, DIM, BLOCK_D)
    _store_tile(grad_value + place, dv, first, key_heads * DIM, columns, BLOCK_N, DIM, BLOCK_D)


@triton.jit
def _dq_tiles(
    dq,
    q,
    do,
    log_sum,
    mean,
    rows,
    key,
    value,
    bounds,
    tiles,
    begin,
    end,
    key_stride,
    value_stride,
    columns,
    padded_columns,
    scale_log2,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERVALS: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the listed key tiles' share to dQ."""
    for index in range(begin, end):
        first = tl.load(tiles + index) * BLOCK_N
        k = _load_tile(key, first, key_stride, columns, BLOCK_N, DIM, BLOCK_D, PARTIAL)
        v = _load_tile(value, first, value_stride, columns, BLOCK_N, DIM, BLOCK_D, PARTIAL)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weights = tl.exp2(scores * scale_log2 - log_sum[:, None])
        if PARTIAL:
            column = first + tl.arange(0, BLOCK_N)[None, :]
            weights = _hide(weights, 0.0, rows[:, None], column, bounds, padded_columns, INTERVALS)
        grad_weights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - mean[:, None])
        dq = tl.dot(grad_scores.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def dq_kernel(
    query,
    key,
    value,
    grad_out,
    lse_log2,
    delta,
    grad_query,
    bounds,
    splits,
    tiles,
    query_stride_b,
    query_stride_n,
    query_stride_h,
    key_stride_b,
    key_stride_n,
    key_stride_h,
    value_stride_b,
    value_stride_n,
    value_stride_h,
    grad_stride_b,
    grad_stride_n,
    grad_stride_h,
    rows,
    padded_rows,
    columns,
    padded_columns,
    heads,
    group,
    mask_batch,
    mask_heads,
    softmax_scale,
    scale_log2,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERVALS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One strip of query rows of one head: dQ. Grid: (row strips, H, B), longer strips first."""
    strips = tl.num_programs(0)
    strip = strips - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head = head // group
    mask = (batch % mask_batch) * mask_heads + key_head % mask_heads
    query += batch * query_stride_b + head.to(tl.int64) * query_stride_h
    grad_out += batch * grad_stride_b + head.to(tl.int64) * grad_stride_h
    key += batch * key_stride_b + key_head.to(tl.int64) * key_stride_h
    value += batch * value_stride_b + key_head.to(tl.int64) * value_stride_h
    bounds += mask * 2 * INTERVALS * padded_columns
    splits += (mask * strips + strip) * 3
    begin, middle, end = tl.load(splits), tl.load(splits + 1), tl.load(splits + 2)

    first = strip * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    statistics = (batch * heads + head) * padded_rows + row
    q = _load_tile(query, first, query_stride_n, rows, BLOCK_M, DIM, BLOCK_D, True)
    do = _load_tile(grad_out, first, grad_stride_n, rows, BLOCK_M, DIM, BLOCK_D, True)
    log_sum, mean = tl.load(lse_log2 + statistics), tl.load(delta + statistics)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = _dq_tiles(
        dq, q, do, log_sum, mean, row, key, value, bounds, tiles, begin, middle, key_stride_n, value_stride_n,
        columns, padded_columns, scale_log2, DIM, BLOCK_D, BLOCK_N, INTERVALS, False, PRECISION,
    )  # fmt: skip
    dq = _dq_tiles(
        dq, q, do, log_sum, mean, row, key, value, bounds, tiles, middle, end, key_stride_n, value_stride_n,
        columns, padded_columns, scale_log2, DIM, BLOCK_D, BLOCK_N, INTERVALS, True, PRECISION,
    )  # fmt: skip
    grad_query += (batch * rows * heads + head) * DIM
    _store_tile(grad_query, dq * softmax_scale, first, heads * DIM, rows, BLOCK_M, DIM, BLOCK_D)
