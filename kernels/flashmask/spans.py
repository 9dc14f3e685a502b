"""The masks of multimodal rows: spans of one kind each, joined into documents and packed side by side.

A span says, for each of its columns, which row of the span sees it first and which later rows don't see it.
What follows in the document sees the whole span, dropped frames excepted; other documents see nothing of it.
That is at most three masked intervals a column: before the first row that sees it, the hidden rows, and after
the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ernie5.kernels.flashmask.masks import masked, parts

_END = torch.iinfo(torch.int32).max  # of the document, wherever that is


@dataclass(frozen=True, eq=False)
class Span:
    """n columns; rows count from the span's start.

    Attributes:
        first_visible: int64 ``[n]``, the first row that sees a column.
        hidden: int64 ``[n, 2]``, later rows ``[start, end)`` that don't see it; empty where equal.
    """

    first_visible: Tensor
    hidden: Tensor

    def __len__(self) -> int:
        return len(self.first_visible)


def text(count: int) -> Span:
    """Causal positions: text, markers."""
    return Span(torch.arange(count), torch.zeros(count, 2, dtype=torch.int64))


def blocks(sizes: Sequence[int]) -> Span:
    """Blocks that see themselves in both directions and the blocks before: the scales of a generated picture,
    the frames of a video, or, with one block, a picture to be understood."""
    first, _ = parts(sum(sizes), sizes)
    return Span(first, torch.zeros(len(first), 2, dtype=torch.int64))


def image_window(height: int, width: int, radius: int) -> Span:
    """A picture in raster order; a cell sees the grid rows at most ``radius`` above or below its own."""
    y = torch.arange(height).repeat_interleave(width)
    end = torch.full_like(y, height * width)
    after = ((y + radius + 1) * width).minimum(end)
    return Span((y - radius).clamp(min=0) * width, torch.stack((after, end), -1))


def sound_window(frames: int, window: int, anchor_every: int | None = None) -> Span:
    """Sound frames; each sees the last ``window`` frames, its own included, and all anchors before it: the
    frames whose number is a multiple of ``anchor_every``."""
    if window < 1:
        raise ValueError(f"a window of sound takes at least the frame itself, got {window}")
    frame = torch.arange(frames)
    hidden = torch.stack(((frame + window).clamp(max=frames), torch.full_like(frame, frames)), -1)
    if anchor_every is not None:
        hidden[::anchor_every] = 0
    return Span(frame, hidden)


def video(sizes: Sequence[int], dropped: Sequence[bool] | Tensor, window: int | None = None) -> Span:
    """Frames of ``sizes`` cells each; a frame sees itself in both directions and earlier frames.

    Args:
        dropped: bool per frame; a dropped frame is hidden from all later rows of the document, what follows
            the video included (random masking of historical frames, ERNIE 5.0 report, section 2.2.3).
        window: how many frames a frame sees, its own included; all earlier ones by default. What follows
            the video sees all of them.
    """
    size = torch.as_tensor(sizes, dtype=torch.int64)
    ends = size.cumsum(0)
    total = int(ends[-1])
    number = torch.arange(len(size))
    hidden_from = torch.full_like(size, total)
    if window is not None:
        if window < 1:
            raise ValueError(f"a window of frames takes at least the frame itself, got {window}")
        hidden_from = ends[(number + window - 1).clamp(max=len(size) - 1)]
    gone = torch.as_tensor(dropped, dtype=torch.bool)
    start = torch.where(gone, ends, hidden_from)
    end = torch.where(gone, _END, total)
    first = (ends - size).repeat_interleave(size)
    return Span(first, torch.stack((start, end), -1).repeat_interleave(size, 0))


def packed(rows: int, columns: int, documents: Sequence[Sequence[Span]]) -> Tensor:
    """Documents side by side as masked row intervals, int32 ``[1, 1, Nk, 3, 2]``.

    What remains of the columns is padding: a causal document of its own. Rows are aligned at the bottom
    right.

    Raises:
        ValueError: the documents have more positions than there are columns.
    """
    spans = [span for spans in documents for span in spans]
    used = sum(map(len, spans))
    if used > columns:
        raise ValueError(f"documents of {used} positions do not fit {columns} columns")
    spans.append(text(columns - used))
    origin, _ = parts(columns, [len(span) for span in spans])
    _, end = parts(columns, [*(sum(map(len, spans)) for spans in documents), columns - used])
    first = torch.cat([span.first_visible for span in spans]) + origin
    hidden = torch.cat([span.hidden for span in spans]) + origin[:, None]
    start, stop = torch.minimum(hidden, end[:, None]).unbind(-1)
    return masked(rows, columns, (None, first), (start, stop), (end, None))


def dynamic_window(
    rows: int, columns: int, lengths: Sequence[int] | Tensor, windows: Tensor, sinks: int = 0
) -> Tensor:
    """Packed causal documents, each with a window of its own; int32 ``[1, 1, Nk, 2, 2]``.

    Args:
        lengths: positions of each document.
        windows: whole numbers ``[documents]``; a position sees the last so many positions, its own
            included. See :func:`windows_by_length`.
        sinks: how many positions at each document's start stay visible to all of it; they keep attention
            stable where the window is narrow (StreamingLLM, arXiv 2309.17453).
    """
    start, end = parts(columns, lengths)
    j = torch.arange(columns)
    window = torch.as_tensor(windows).repeat_interleave(torch.as_tensor(lengths))
    last = torch.where(j < start + sinks, end, torch.minimum(j + window, end))
    return masked(rows, columns, (None, j), (last, None))


def windows_by_length(
    lengths: Sequence[int] | Tensor,
    tiers: Sequence[tuple[int, int]] = ((0, 4096), (16384, 2048), (65536, 1024)),
) -> Tensor:
    """The window for documents of each length, int64 ``[documents]``.

    ``tiers`` are ascending (length, window): a document longer than a tier's length gets its window, the
    last such tier deciding. So short documents have full attention, and beyond the first window the cost per
    token is flat or falls.
    """
    length = torch.as_tensor(lengths, dtype=torch.int64)
    bounds = torch.tensor([bound for bound, _ in tiers])
    windows = torch.tensor([window for _, window in tiers])
    if bool((bounds.diff() <= 0).any()) or bounds[0] != 0 or bool((windows < 1).any()):
        raise ValueError(f"tiers ascend from length 0 and have windows of at least 1, got {list(tiers)}")
    return windows[(torch.searchsorted(bounds, length) - 1).clamp(min=0)]
