"""Clips to multi-scale bit codes and back, frame by frame, as the inflated picture network codes them.

A clip has a frame's codes for each frame, one after the other; each is coded by itself at its own scales,
with what the network remembers of the frames before. Frames run one by one on batches of one fixed size (one
clip on a CPU; on a GPU as many as pictures), so a clip gets the same codes whatever else is in the batch and
however it is cut into chunks, and a clip of one frame gets the codes of the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ernie5.kernels.scales import accumulate, join_codes, quantise
from ernie5.protocol.errors import ErnieMultiError, InvalidInputError
from ernie5.protocol.grids import schedule_for
from ernie5.protocol.tokens import ScalesLayout, TokenSpan
from ernie5.tokenizers.base import Medium
from ernie5.tokenizers.vision.execution import Execution
from ernie5.tokenizers.vision.model import STRIDE
from ernie5.tokenizers.vision.preprocessing import restore
from ernie5.tokenizers.vision.video.files import Clip, VideoLimits, read_clip, write_clip
from ernie5.tokenizers.vision.video.model import Memory, VideoModel

FRAMES_PER_FEATURE = 4
"""Neighbouring frames of one understanding token: K = 4 frames x 2 x 2 cells."""
RATE_KEY = "frame_rate"
"""Of a span's metadata: frames a second. Without it (a generated clip) the limits' rate is taken."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedClip:
    """Frames of one size and how many are shown a second."""

    frames: list[Image.Image]
    frame_rate: float

    @property
    def seconds(self) -> float:
        return len(self.frames) / self.frame_rate


@dataclass(frozen=True, slots=True, eq=False)
class CodedFrames:
    """Some frames of n streams: codes uint32 ``[n, T, cells]``, trunk ``[n, T, C, h, w]``, latent
    ``[n, T, bits, h, w]``.
    """

    codes: np.ndarray
    trunk: Tensor
    latent: Tensor


class ClipEncoder:
    """Codes n streams of canvases chunk by chunk; the chunks' codes, put together, are those of the whole."""

    def __init__(self, coder: VideoCoder) -> None:
        self._coder = coder
        self._memory: Memory = {}

    def push(self, canvases: np.ndarray) -> CodedFrames:
        """The next frames of each stream, uint8 ``[n, T, H, W, 3]``, T at least 1; n no more than a batch."""
        coder = self._coder
        grid = (canvases.shape[2] // STRIDE, canvases.shape[3] // STRIDE)
        pixels = torch.from_numpy(canvases).permute(1, 0, 4, 2, 3).float() / 255
        trunks, latents = [], []
        for frames in pixels:
            (trunk, latent), self._memory = coder.run(coder.model.encode_frame, frames, self._memory)
            trunks.append(trunk)
            latents.append(latent)
        latent = torch.stack(latents, 1)
        codes = join_codes(quantise(latent, schedule_for(grid))).numpy().astype(np.uint32)
        codes &= np.uint32((1 << coder.bits) - 1)
        width = coder.model.image.latent_of_width(latent.flatten(0, 1), coder.bits)
        return CodedFrames(codes, torch.stack(trunks, 1), width.unflatten(0, latent.shape[:2]))


class ClipDecoder:
    """Draws n streams of codes chunk by chunk, the same as whole."""

    def __init__(self, coder: VideoCoder, grid: tuple[int, int]) -> None:
        self._coder = coder
        self._schedule = schedule_for(grid)
        self._memory: Memory = {}

    def push(self, codes: np.ndarray) -> np.ndarray:
        """The next frames' codes of each stream ``[n, T, cells]`` to canvases uint8 ``[n, T, H, W, 3]``."""
        coder = self._coder
        sums = accumulate(codes, self._schedule, coder.bits).transpose(0, 1)
        drawn = []
        for frames in sums:
            (canvas,), self._memory = coder.run(coder.model.decode_frame, frames, self._memory)
            drawn.append((canvas.clamp(0, 1) * 255).round().to(torch.uint8))
        return np.ascontiguousarray(torch.stack(drawn, 1).permute(0, 1, 3, 4, 2).numpy())


class VideoCoder:
    """Encodes clips to spans and decodes them with one model, in one way of running it, at one bit width.

    Args:
        model: with its picture network.
        bits: one of the picture network's bit widths.
        execution: that of pictures. What remembers frames is never compiled, so where pictures are, the codes
            of a clip of one frame may differ from theirs in a few bits.
        tokenizer: hash that spans bear.
    """

    def __init__(
        self,
        model: VideoModel,
        *,
        bits: int,
        execution: Execution,
        tokenizer: str,
        limits: VideoLimits | None = None,
    ) -> None:
        self.execution = replace(execution, compile=False)
        self.execution.place(model)
        self.model, self.bits, self.tokenizer = model, bits, tokenizer
        self.limits = limits or VideoLimits()

    def encode_batch(
        self, clips: Sequence[bytes | Clip], *, features: bool = True, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]:
        """Tokenise clips; a bad one yields its error in its place.

        Features are float16 ``[N, 16, C]``: 2x2 cells of 4 frames, N by fours of frames (the last frame
        repeated), then row-major. The latent is float16 ``[T h, w, bits]``, frame above frame.
        """
        results: list[TokenSpan | ErnieMultiError | None] = [None] * len(clips)
        by_grid: dict[tuple[int, int], list[tuple[int, Clip]]] = {}
        for index, source in enumerate(clips):
            try:
                clip = source if isinstance(source, Clip) else read_clip(source, self.limits)
            except ErnieMultiError as error:
                results[index] = error
                continue
            by_grid.setdefault(clip.grid, []).append((index, clip))
        for entries in by_grid.values():
            for start in range(0, len(entries), self.execution.batch):
                part = entries[start : start + self.execution.batch]
                coded = ClipEncoder(self).push(_side_by_side([clip.frames for _, clip in part]))
                for row, (index, clip) in enumerate(part):
                    results[index] = self._span(clip, coded, row, features, latent)
        return [result for result in results if result is not None]

    def decode_batch(self, spans: Sequence[TokenSpan]) -> list[DecodedClip | ErnieMultiError]:
        """Draw spans of this tokenizer; padding cropped, frames at the source's size up to 512 pixels a side.

        A bad span yields its error in its place. The caller has checked modality and tokenizer.
        """
        results: list[DecodedClip | ErnieMultiError | None] = [None] * len(spans)
        by_grid: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for index, span in enumerate(spans):
            try:
                rate = self._check_span(span)
            except ErnieMultiError as error:
                results[index] = error
                continue
            assert isinstance(span.layout, ScalesLayout)
            by_grid.setdefault(span.layout.final_grid, []).append((index, rate))
        for grid, entries in by_grid.items():
            for start in range(0, len(entries), self.execution.batch):
                part = entries[start : start + self.execution.batch]
                codes = [spans[index].codes.reshape(_frames(spans[index]), -1) for index, _ in part]
                drawn = ClipDecoder(self, grid).push(_side_by_side(codes))
                for row, (index, rate) in enumerate(part):
                    results[index] = self._restored(spans[index], drawn[row], rate)
        return [result for result in results if result is not None]

    def decode_files(
        self, spans: Sequence[TokenSpan], content_type: str | None = None
    ) -> list[Medium | ErnieMultiError]:
        """Spans to files: image/webp (the default), image/gif, video/mp4 or video/webm."""
        results: list[Medium | ErnieMultiError] = []
        for clip in self.decode_batch(spans):
            try:
                if isinstance(clip, ErnieMultiError):
                    raise clip
                results.append(Medium(*write_clip(clip.frames, clip.frame_rate, content_type)))
            except ErnieMultiError as error:
                results.append(error)
        return results

    def run(
        self,
        function: Callable[[Tensor, Memory], tuple[object, ...]],
        frames: Tensor,
        memory: Memory,
    ) -> tuple[tuple[Tensor, ...], Memory]:
        """One frame of each stream through ``function``: its tensors, on the CPU, and its memory.

        The memory stays on the device, blanks included.
        """
        if len(frames) > self.execution.batch:
            raise ValueError(f"{len(frames)} streams are more than a batch of {self.execution.batch}")
        kept: list[Memory] = []

        def step(part: Tensor) -> tuple[Tensor, ...]:
            *outputs, after = function(part, memory)
            kept.append(cast(Memory, after))
            return tuple(cast(list[Tensor], outputs))

        return self.execution.run(step, frames), kept[0]

    def _span(self, clip: Clip, coded: CodedFrames, row: int, features: bool, latent: bool) -> TokenSpan:
        frames = len(clip.frames)
        cells = coded.latent[row, :frames].permute(0, 2, 3, 1).flatten(0, 1)
        return TokenSpan(
            modality="video",
            layout=ScalesLayout(self.bits, schedule_for(clip.grid), frames, clip.transform),
            codes=np.ascontiguousarray(coded.codes[row, :frames]).reshape(-1),
            tokenizer=self.tokenizer,
            features={"cnn": merge_neighbours(coded.trunk[row, :frames])} if features else {},
            latent=_half(cells) if latent else None,
            metadata={RATE_KEY: round(clip.frame_rate, 6)},
        )

    def _check_span(self, span: TokenSpan) -> float:
        """The span's frame rate; raises ``InvalidInputError`` where it isn't a clip of this tokenizer."""
        layout = span.layout
        if not isinstance(layout, ScalesLayout) or layout.bits != self.bits:
            raise InvalidInputError(f"span is not a clip of {self.bits}-bit scales: {layout}", param="layout")
        if layout.frames > self.limits.frames:
            raise InvalidInputError(
                f"span has {layout.frames} frames; the limit is {self.limits.frames}; decode it in parts",
                param="layout",
            )
        height, width = layout.final_grid
        if height * width > 32 * 32 or layout.schedule != schedule_for(layout.final_grid):
            raise InvalidInputError(
                f"schedule {layout.schedule} is not the one of a grid of at most 1024 cells", param="layout"
            )
        rate = span.metadata.get(RATE_KEY, self.limits.frame_rate)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.001 <= rate <= 1000:
            raise InvalidInputError(
                f"frame rate {rate!r} is not a number in [0.001, 1000]", param=f"metadata.{RATE_KEY}"
            )
        return float(rate)

    def _restored(self, span: TokenSpan, canvases: np.ndarray, rate: float) -> DecodedClip | ErnieMultiError:
        layout = span.layout
        assert isinstance(layout, ScalesLayout)
        try:
            frames = [restore(canvas, layout.transform) for canvas in canvases[: layout.frames]]
        except ErnieMultiError as error:
            return error
        return DecodedClip(frames, rate)


def merge_neighbours(trunk: Tensor) -> np.ndarray:
    """Trunk ``[T, C, h, w]`` to float16 ``[N, 16, C]``, N = ceil(T/4) h/2 w/2; odd edges are repeated."""
    frames, _, height, width = trunk.shape
    missing = -frames % FRAMES_PER_FEATURE
    # Frames as the depth of a volume, so that one padding repeats the last of each axis.
    volume = trunk.transpose(0, 1)[None]
    if missing or height % 2 or width % 2:
        volume = F.pad(volume, (0, width % 2, 0, height % 2, 0, missing), mode="replicate")
    blocks = volume[0].unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).unflatten(1, (-1, FRAMES_PER_FEATURE))
    # [C, T/4, 4, h/2, 2, w/2, 2] to [T/4, h/2, w/2, 4, 2, 2, C]
    return _half(blocks.permute(1, 3, 5, 2, 4, 6, 0).flatten(3, 5).flatten(0, 2))


def _side_by_side(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays ``[T, …]`` of several lengths as one ``[n, longest, …]``, zeros behind the shorter ones."""
    longest = max(map(len, arrays))
    stacked = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in enumerate(arrays):
        stacked[row, : len(array)] = array
    return stacked


def _frames(span: TokenSpan) -> int:
    assert isinstance(span.layout, ScalesLayout)
    return span.layout.frames


def _half(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.clamp(-65504, 65504).half().numpy())
