"""The picture tokenizer: any picture to multi-scale bit codes and back; clips too, with weights for video.

On one device kind a picture gets the same codes whatever else is in the batch: the network runs on
batches of one fixed size per grid (one picture on a CPU; 16 on a GPU, filled up with blanks), in float32
unless an :class:`~ernie5.tokenizers.vision.execution.Execution` says otherwise.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ernie5.kernels.scales import accumulate, join_codes, quantise
from ernie5.protocol.errors import (
    ErnieMultiError,
    InvalidInputError,
    InvalidMediaError,
    TokenizerMismatchError,
    UnsupportedMediaError,
)
from ernie5.protocol.grids import schedule_for
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import ResizePad, ScalesLayout, TokenSpan
from ernie5.tokenizers.base import Medium
from ernie5.tokenizers.vision.execution import Execution
from ernie5.tokenizers.vision.model import STRIDE, VisionModel
from ernie5.tokenizers.vision.preprocessing import ImageLimits, fit_to_canvas, open_image, restore
from ernie5.tokenizers.vision.video.coder import VideoCoder
from ernie5.tokenizers.vision.video.weights import VideoWeights, find_video_weights
from ernie5.tokenizers.vision.vit.model import VitModel, VitWeights, load_vit_weights
from ernie5.tokenizers.vision.weights_file import FORMAT_VERSION, load_weights

Picture = bytes | Image.Image
Result = TypeVar("Result")

FEATURE_ENCODER, SEMANTIC_ENCODER = "cnn", "vit"
# Final grids above this many cells are refused on decoding: a span from the wire names its own grid.
MAX_CELLS = 32 * 32
_CONTAINERS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}


class VisionTokenizer:
    """Encodes pictures to spans (:class:`~ernie5.protocol.tokens.TokenSpan`) of scales and decodes them.

    Attributes:
        hash: identifies weights, format version, device kind, dtype and bit width; the semantic encoder's
            too where it is loaded.
        modalities: ``image``, and ``video`` where there are weights for it.
        video: codes clips (:class:`~ernie5.tokenizers.vision.video.coder.VideoCoder`); None without such
            weights.
        bits: bits of one cell's code; those of a smaller width are the low bits of a larger one's.
        feature_width: C of the ``cnn`` features, float16 ``[N, 4, C]``: 2x2 neighbouring cells of the
            encoder's trunk before it is projected to bits, N in row-major order. Those of the semantic
            encoder, ``vit``, have the same form and a width of their own.
    """

    modalities: tuple[str, ...] = ("image",)

    def __init__(
        self,
        model: VisionModel,
        weights_digest: str,
        device: torch.device,
        limits: ImageLimits,
        bits: int | None = None,
        execution: Execution | None = None,
        video: VideoWeights | None = None,
        vit: VitWeights | None = None,
    ) -> None:
        widths = model.config.bit_widths
        if bits is not None and bits not in widths:
            raise ValueError(f"these weights code {' or '.join(map(str, widths))} bits a cell, not {bits}")
        self.execution = execution or Execution(device)
        self.device = device
        self.limits = limits
        self.execution.place(model)
        self._model = model
        self.bits = bits or widths[0]
        self.feature_width = model.config.trunk_width
        identity = f"vision/{FORMAT_VERSION}/{weights_digest}/{self.execution.identity}/{self.bits}"
        if video is not None:
            identity += f"/{video.identity}"
        self._vit: VitModel | None = None
        if vit is not None:
            # Codes are the same without it, but spans are cached with their features under this hash.
            identity += f"/{vit.identity}"
            self._vit = vit.model
            self.execution.place(vit.model)
        self.hash = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self.video: VideoCoder | None = None
        if video is not None:
            self.modalities = ("image", "video")
            self.video = VideoCoder(
                video.model, bits=self.bits, execution=self.execution, tokenizer=self.hash
            )

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        device: str | torch.device | None = None,
        limits: ImageLimits | None = None,
        bits: int | None = None,
        execution: Execution | None = None,
        vit: Path | bool = False,
    ) -> VisionTokenizer:
        """Load weights (the shipped ones if ``path`` is None) onto ``device`` (CUDA where present if None).

        ``video.safetensors`` beside them, if it was trained for them, adds clips.

        ``bits`` is one of the weights' bit widths, the smallest if None. ``execution`` names the device too,
        and dtype and compilation. ``vit`` adds the features of the semantic encoder: True for the one that
        ships, or a path.

        Raises:
            FileNotFoundError, ValueError: see :func:`~ernie5.tokenizers.vision.weights_file.load_weights`;
                or another number of bits.
        """
        execution = execution or Execution(device)
        model, card = load_weights(None if path is None else Path(path))
        place = torch.device(execution.device or "cpu")
        digest = str(card["sha256"])
        video = find_video_weights(model, digest, None if path is None else Path(path))
        semantic = load_vit_weights(None if vit is True else vit) if vit else None
        return cls(model, digest, place, limits or ImageLimits(), bits, execution, video, semantic)

    def encode(self, image: Picture, *, features: bool = True, latent: bool = False) -> TokenSpan:
        """Tokenise one picture (file bytes or a Pillow picture).

        Args:
            features: add the ``cnn`` features, for understanding, and ``vit`` where that is loaded.
            latent: add the latent before quantisation, float16 ``[h, w, d]``.

        Raises:
            InvalidMediaError, MediaTooLargeError: see :func:`.preprocessing.open_image`.
        """
        return _only(self.encode_batch([image], features=features, latent=latent))

    def decode(self, span: TokenSpan) -> Image.Image:
        """Draw a span; padding cropped, back at the source's size up to 512 pixels a side.

        Raises:
            TokenizerMismatchError: the span comes from other weights, another device kind or dtype.
            InvalidInputError: the span is no picture, or its layout is not this tokenizer's.
        """
        return _only(self.decode_batch([span]))

    def encode_batch(
        self, images: Sequence[Picture], *, features: bool = True, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]:
        """Tokenise pictures; a bad one yields its error in its place."""
        results: list[TokenSpan | ErnieMultiError | None] = [None] * len(images)
        by_grid: dict[tuple[int, int], list[tuple[int, np.ndarray, ResizePad]]] = {}
        for index, image in enumerate(images):
            try:
                canvas, transform = fit_to_canvas(open_image(image, self.limits))
            except ErnieMultiError as error:
                results[index] = error
                continue
            grid = (transform.canvas_height // STRIDE, transform.canvas_width // STRIDE)
            by_grid.setdefault(grid, []).append((index, canvas, transform))
        for grid, entries in by_grid.items():
            canvases = [canvas for _, canvas, _ in entries]
            trunks, latents = self._encode_canvases(canvases)
            maps = {FEATURE_ENCODER: trunks} if features else {}
            if features and self._vit is not None:
                maps[SEMANTIC_ENCODER] = self._see_canvases(canvases, self._vit)
            codes = join_codes(quantise(latents, schedule_for(grid))).numpy().astype(np.uint32)
            codes &= np.uint32((1 << self.bits) - 1)
            latents = self._model.latent_of_width(latents, self.bits)
            for place, ((index, _, transform), cells, code) in enumerate(zip(entries, latents, codes)):
                results[index] = TokenSpan(
                    modality="image",
                    layout=ScalesLayout(self.bits, schedule_for(grid), transform=transform),
                    codes=code.copy(),
                    tokenizer=self.hash,
                    features={name: _merge_neighbours(values[place]) for name, values in maps.items()},
                    latent=_half(cells.permute(1, 2, 0)) if latent else None,
                )
        return [result for result in results if result is not None]

    def decode_batch(self, spans: Sequence[TokenSpan]) -> list[Image.Image | ErnieMultiError]:
        """Draw spans; a bad one yields its error in its place."""
        results: list[Image.Image | ErnieMultiError | None] = [None] * len(spans)
        by_schedule: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for index, span in enumerate(spans):
            try:
                self._check_span(span)
            except ErnieMultiError as error:
                results[index] = error
                continue
            assert isinstance(span.layout, ScalesLayout)
            by_schedule.setdefault(span.layout.schedule, []).append(index)
        for schedule, members in by_schedule.items():
            codes = np.stack([spans[index].codes for index in members])
            canvases = self._decode_sums(accumulate(codes, schedule, self.bits))
            for index, canvas in zip(members, canvases):
                layout = spans[index].layout
                assert isinstance(layout, ScalesLayout)
                try:
                    results[index] = restore(canvas, layout.transform)
                except ErnieMultiError as error:
                    results[index] = error
        return [result for result in results if result is not None]

    def encode_segments(
        self, segments: Sequence[Segment], *, features: bool = True, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]:
        """Tokenise segments as :class:`~ernie5.tokenizers.base.Tokenizer` says."""
        results: list[TokenSpan | ErnieMultiError | None] = [None] * len(segments)
        media: dict[str, list[tuple[int, bytes]]] = {modality: [] for modality in self.modalities}
        for index, segment in enumerate(segments):
            if segment.modality not in media:
                results[index] = UnsupportedMediaError(
                    f"the vision tokenizer takes {', '.join(self.modalities)}, not {segment.modality}",
                    param="modality",
                )
            elif segment.data is None:
                results[index] = InvalidMediaError(
                    f"a segment of {segment.modality} carries the bytes of a file", param="data"
                )
            else:
                media[segment.modality].append((index, segment.data))
        for modality, found in media.items():
            encode = self.video.encode_batch if modality == "video" and self.video else self.encode_batch
            spans = encode([data for _, data in found], features=features, latent=latent)
            for (index, _), span in zip(found, spans):
                results[index] = span
        return [result for result in results if result is not None]

    def decode_spans(
        self, spans: Sequence[TokenSpan], *, content_type: str | None = None
    ) -> list[Medium | ErnieMultiError]:
        """Spans to files: pictures to image/png (the default), image/jpeg or image/webp (lossless); clips to
        what :func:`~ernie5.tokenizers.vision.video.files.write_clip` writes.
        """
        results: list[Medium | ErnieMultiError | None] = [None] * len(spans)
        clips: list[int] = []
        for index, span in enumerate(spans):
            if span.modality != "video" or self.video is None:
                continue
            try:
                self._check_origin(span)
                clips.append(index)
            except ErnieMultiError as error:
                results[index] = error
        if clips and self.video is not None:
            decoded = self.video.decode_files([spans[index] for index in clips], content_type)
            for index, medium in zip(clips, decoded):
                results[index] = medium
        rest = [index for index, result in enumerate(results) if result is None]
        for index, medium in zip(rest, self._decode_pictures([spans[index] for index in rest], content_type)):
            results[index] = medium
        return [result for result in results if result is not None]

    def _decode_pictures(
        self, spans: Sequence[TokenSpan], content_type: str | None
    ) -> list[Medium | ErnieMultiError]:
        content_type = content_type or "image/png"
        container = _CONTAINERS.get(content_type)
        if container is None:
            error = UnsupportedMediaError(
                f"pictures come as {', '.join(_CONTAINERS)}, not {content_type}", param="content_type"
            )
            return [error for _ in spans]
        return [
            picture
            if isinstance(picture, ErnieMultiError)
            else Medium(_to_file(picture, container), content_type)
            for picture in self.decode_batch(spans)
        ]

    def _check_origin(self, span: TokenSpan) -> None:
        if span.modality not in self.modalities:
            raise UnsupportedMediaError(
                f"the vision tokenizer draws {', '.join(self.modalities)}, not {span.modality}",
                param="modality",
            )
        if span.tokenizer != self.hash:
            raise TokenizerMismatchError(
                f"span was made by tokenizer {span.tokenizer}, this one is {self.hash} "
                f"({self.execution.identity}); decode it with the tokenizer it came from",
                param="tokenizer",
            )

    def _check_span(self, span: TokenSpan) -> None:
        self._check_origin(span)
        layout = span.layout
        if not isinstance(layout, ScalesLayout) or layout.bits != self.bits or layout.frames != 1:
            raise InvalidInputError(
                f"span is not one frame of {self.bits}-bit scales: {layout}", param="layout"
            )
        height, width = layout.final_grid
        if height * width > MAX_CELLS or layout.schedule != schedule_for(layout.final_grid):
            raise InvalidInputError(
                f"schedule {layout.schedule} is not the one of a grid of at most {MAX_CELLS} cells",
                param="layout",
            )

    def _encode_canvases(self, canvases: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Canvases, uint8 ``[H, W, 3]``, to trunks ``[n, C, h, w]`` and latents ``[n, d, h, w]``."""
        pixels = torch.from_numpy(np.stack(canvases)).permute(0, 3, 1, 2).float() / 255
        trunks, latents = [], []
        for part in pixels.split(self.execution.batch):
            trunk, latent = self.execution.run(self._model.encode, part)
            trunks.append(trunk)
            latents.append(latent)
        return torch.cat(trunks), torch.cat(latents)

    def _see_canvases(self, canvases: list[np.ndarray], vit: VitModel) -> Tensor:
        """Canvases, uint8 ``[H, W, 3]``, to the semantic encoder's features ``[n, D, h, w]``."""
        pixels = torch.from_numpy(np.stack(canvases)).permute(0, 3, 1, 2).float() / 255
        parts = pixels.split(self.execution.batch)
        return torch.cat([self.execution.run(vit.forward, part)[0] for part in parts])

    def _decode_sums(self, sums: Tensor) -> np.ndarray:
        """Sums of scales ``[n, d, h, w]`` to uint8 ``[n, H, W, 3]``."""
        parts = [self.execution.run(self._model.decode, part)[0] for part in sums.split(self.execution.batch)]
        pixels = (torch.cat(parts).clamp(0, 1) * 255).round().to(torch.uint8)
        return np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy())


def _only(results: list[Result | ErnieMultiError]) -> Result:
    (result,) = results
    if isinstance(result, ErnieMultiError):
        raise result
    return result


def _merge_neighbours(trunk: Tensor) -> np.ndarray:
    """Trunk ``[C, h, w]`` to float16 ``[h/2 w/2, 4, C]``; an odd edge is repeated."""
    height, width = trunk.shape[-2:]
    if height % 2 or width % 2:
        trunk = torch.nn.functional.pad(trunk[None], (0, width % 2, 0, height % 2), mode="replicate")[0]
    blocks = trunk.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
    return _half(blocks.permute(1, 3, 2, 4, 0).flatten(2, 3).flatten(0, 1))


def _half(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.clamp(-65504, 65504).half().numpy())


def _to_file(picture: Image.Image, container: str) -> bytes:
    buffer = io.BytesIO()
    # Each container takes the options it knows.
    picture.save(buffer, container, quality=95, lossless=True)
    return buffer.getvalue()
