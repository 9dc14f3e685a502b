"""Video files to the frames that the tokenizer codes, and decoded frames to files.

Animated WebP, GIF and PNG are read by Pillow; MP4, QuickTime, WebM, Matroska, AVI, Ogg, FLV, MPEG, ASF, RM
and SWF by FFmpeg through PyAV. The first bytes decide, and FFmpeg is told the container, so that no input can
make it open a playlist or an address. A file's own timeline (rates may vary) is sampled at even steps over
its whole length; frames become canvases one by one, so memory is bounded by a full frame and the canvases.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ernie5.protocol.errors import (
    ErnieMultiError,
    InvalidMediaError,
    MediaTooLargeError,
    UnavailableError,
    UnsupportedMediaError,
)
from ernie5.protocol.tokens import ResizePad
from ernie5.tokenizers.vision.model import STRIDE
from ernie5.tokenizers.vision.preprocessing import FORMATS, ImageLimits, fit_to_canvas, open_image

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# First bytes (at an offset) to the name FFmpeg has for the container.
_CONTAINERS: tuple[tuple[int, bytes, str], ...] = (
    (4, b"ftyp", "mov"),
    (4, b"moov", "mov"),
    (4, b"mdat", "mov"),
    (4, b"wide", "mov"),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (8, b"AVI ", "avi"),
    (0, b"OggS", "ogg"),
    (0, b"FLV", "flv"),
    (0, b"\x00\x00\x01\xba", "mpeg"),
    (0, b"\x00\x00\x01\xb3", "mpegvideo"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "asf"),
    (0, b".RMF", "rm"),
    (0, b"FWS", "swf"),
    (0, b"DKIF", "ivf"),
)
_TRANSPORT_PACKET = 188
# What players show in place of 0 or 10 ms, which old tools wrote for "as fast as can be".
_HURRIED_MS, _UNHURRIED_MS = 10, 100
_WRITTEN = {"image/webp": "WEBP", "image/gif": "GIF", "video/mp4": "mp4", "video/webm": "webm"}
# Pixels of all frames together up to which WebP is written without loss; it takes about a second.
_LOSSLESS_PIXELS = 1_000_000


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """What a video file may hold, and what is kept of it.

    ``frame_rate`` (frames a second) and ``frames`` bound what is kept: a longer clip is sampled more sparsely
    over its whole length. The others refuse: bytes, seconds, frames of the source, pixels of a frame (in
    ``image``, with its sides), and pixels of all frames, which bounds the time of decoding.
    """

    frame_rate: float = 12.5
    frames: int = 64
    bytes: int = 50 * 1024 * 1024
    seconds: float = 120.0
    source_frames: int = 10_000
    total_pixels: int = 2_000_000_000
    image: ImageLimits = field(default_factory=lambda: ImageLimits(max_pixels=8_847_360, max_side=8_192))

    def check_length(self, frames: int, seconds: float, width: int, height: int) -> None:
        """Raise ``MediaTooLargeError`` where a clip of this size is above a limit."""
        self.image.check_size(width, height)
        if frames > self.source_frames:
            raise MediaTooLargeError(
                f"video has {frames:,} or more frames; the limit is {self.source_frames:,}; cut it"
            )
        if seconds > self.seconds:
            raise MediaTooLargeError(
                f"video lasts {seconds:,.1f} s; the limit is {self.seconds:,.0f} s; cut it"
            )
        if frames * width * height > self.total_pixels:
            raise MediaTooLargeError(
                f"video of {frames:,} frames of {width}x{height} pixels is above the limit of "
                f"{self.total_pixels:,} pixels altogether; shrink or cut it"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """Canvases, uint8 ``[T, H, W, 3]``, evenly spaced over ``seconds``; all fitted by one ``transform``."""

    frames: np.ndarray
    transform: ResizePad
    seconds: float

    @property
    def grid(self) -> tuple[int, int]:
        return self.frames.shape[1] // STRIDE, self.frames.shape[2] // STRIDE

    @property
    def frame_rate(self) -> float:
        """Frames a second; 1 where the file names no length."""
        return len(self.frames) / self.seconds if self.seconds > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which moments of a clip are kept: ``times`` in seconds from its start, rising."""

    times: tuple[float, ...]
    seconds: float


def sample_times(starts: Sequence[float], seconds: float, limits: VideoLimits) -> Sampling:
    """Evenly spaced moments of a clip whose frames are shown from ``starts`` (seconds, rising) on.

    No more a second than the source has, nor than the limits allow. Each lies half a source frame after its
    step's begin, so that rounded timestamps do no harm.

    >>> sample_times([0.0, 0.1, 0.2], 0.3, VideoLimits()).times
    (0.05, 0.15, 0.25)
    """
    gaps = np.diff(np.asarray(starts, dtype=np.float64))
    gaps = gaps[gaps > 1e-6]
    if not len(gaps) or seconds <= 0:
        return Sampling((0.0,), max(seconds, 0.0))
    # Variable rates: the quicker parts count. Even ones: the mean, which rounding of timestamps spares.
    quick, mean = float(np.quantile(gaps, 0.1, method="lower")), float(gaps.mean())
    gap = mean if quick > 0.7 * mean else quick
    allowed = int(seconds * limits.frame_rate + 1e-6)
    count = max(1, min(limits.frames, allowed, round(seconds / gap)))
    step = seconds / count
    return Sampling(tuple(round(step * k + min(gap, step) / 2, 9) for k in range(count)), seconds)


def read_clip(source: bytes, limits: VideoLimits | None = None) -> Clip:
    """Decode a video file, or a picture file as a clip of one frame.

    Frames are upright RGB: rotation and EXIF data applied, pixels made square, white where transparent.

    Raises:
        InvalidMediaError: empty, truncated, unknown or damaged data, or no frame.
        MediaTooLargeError: above a limit; sizes and lengths in headers are checked before decoding.
    """
    limits = limits or VideoLimits()
    if not source:
        raise InvalidMediaError("video is empty: 0 bytes")
    if len(source) > limits.bytes:
        raise MediaTooLargeError(
            f"video of {len(source):,} bytes is above the limit of {limits.bytes:,} bytes"
        )
    container = _container(source)
    try:
        return _read_ffmpeg(source, container, limits) if container else _read_pillow(source, limits)
    except ErnieMultiError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaTooLargeError(f"video is too large: {error}") from None
    except MemoryError:
        raise MediaTooLargeError("video does not fit the memory; shrink it first") from None
    except Image.UnidentifiedImageError:
        raise InvalidMediaError(
            "data is no video in a known format (WebP, GIF, PNG, MP4, QuickTime, WebM, Matroska, AVI, Ogg, "
            "FLV, MPEG, ASF, RealMedia, SWF)"
        ) from None
    # Decoders raise nearly any type on damaged data.
    except Exception as error:
        raise InvalidMediaError(f"video can't be decoded: {error or type(error).__name__}") from error


def write_clip(
    frames: Sequence[Image.Image], frame_rate: float, content_type: str | None = None
) -> tuple[bytes, str]:
    """Frames of one size to a file; returns its bytes and type.

    ``image/webp`` (the default), ``image/gif``, ``video/mp4`` (H.264) or ``video/webm`` (VP9). MP4 and WebM
    repeat an odd last row or column.

    Raises:
        UnsupportedMediaError: another content type.
    """
    content_type = content_type or "image/webp"
    written = _WRITTEN.get(content_type)
    if written is None:
        raise UnsupportedMediaError(
            f"videos come as {', '.join(_WRITTEN)}, not {content_type}", param="content_type"
        )
    if written in ("WEBP", "GIF"):
        return _write_pillow(frames, frame_rate, written), content_type
    return _write_ffmpeg(frames, frame_rate, written), content_type


def _container(data: bytes) -> str | None:
    """FFmpeg's name of the container, or None for Pillow's."""
    for offset, mark, name in _CONTAINERS:
        if data[offset : offset + len(mark)] == mark:
            return name
    packets = data[: 3 * _TRANSPORT_PACKET : _TRANSPORT_PACKET]
    return "mpegts" if packets == b"GGG" else None


class _Canvases:
    """Fits frames to the canvas that the first one chooses, padding in that one's border colour."""

    def __init__(self) -> None:
        self.transform: ResizePad | None = None
        self._first: np.ndarray | None = None

    def fit(self, picture: Image.Image) -> np.ndarray:
        if self.transform is None or self._first is None:
            self._first, self.transform = fit_to_canvas(picture)
            return self._first
        place = self.transform
        size = (place.source_width, place.source_height)
        if picture.size != size:  # some streams change size on their way
            picture = picture.resize(size, Image.Resampling.BILINEAR)
        fitted, _ = fit_to_canvas(picture, (place.canvas_height // STRIDE, place.canvas_width // STRIDE))
        canvas = self._first.copy()
        inside = (slice(place.top, place.top + place.height), slice(place.left, place.left + place.width))
        canvas[inside] = fitted[inside]
        return canvas

    def clip(self, canvases: Sequence[np.ndarray], seconds: float) -> Clip:
        assert self.transform is not None
        return Clip(np.stack(canvases), self.transform, seconds)


def _read_pillow(data: bytes, limits: VideoLimits) -> Clip:
    canvases, starts, seconds = [], [], 0.0
    fitter = _Canvases()
    with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
        limits.image.check_size(*picture.size)
        count = getattr(picture, "n_frames", 1) if picture.format in ("WEBP", "GIF", "PNG") else 1
        limits.check_length(count, 0.0, *picture.size)
        for index in range(count):
            picture.seek(index)
            picture.load()
            limits.image.check_size(*picture.size)
            canvases.append(fitter.fit(open_image(picture, limits.image)))
            starts.append(seconds)
            shown = float(picture.info.get("duration") or 0)
            # A single picture has no length unless its file names one.
            seconds += (shown if shown > _HURRIED_MS or count == 1 else _UNHURRIED_MS) / 1000
            limits.check_length(index + 1, seconds, *picture.size)
    chosen = sample_times(starts, seconds, limits)
    at = np.searchsorted(np.asarray(starts), chosen.times, side="right") - 1
    return fitter.clip([canvases[index] for index in at], seconds)


def _pyav() -> Any:
    """PyAV, which only these containers need.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        return importlib.import_module("av")
    except ModuleNotFoundError:
        raise UnavailableError(
            "PyAV is not installed, so this service takes animated WebP, GIF and PNG alone: "
            "pip install 'ernie-multi[vision]'"
        ) from None


def _read_ffmpeg(data: bytes, container: str, limits: VideoLimits) -> Clip:
    av = _pyav()
    try:
        with av.open(io.BytesIO(data), mode="r", format=container) as file:
            starts, seconds = _timeline(file, _video_stream(file, limits), limits)
        chosen = sample_times(starts, seconds, limits)
        with av.open(io.BytesIO(data), mode="r", format=container) as file:
            return _decode(file, chosen, limits)
    except av.error.FFmpegError as error:
        raise InvalidMediaError(f"video can't be decoded: {error.strerror}") from error


def _video_stream(file: InputContainer, limits: VideoLimits) -> VideoStream:
    """The first video stream that is no cover picture; it decodes in this thread alone."""
    for stream in file.streams.video:
        if not stream.disposition & type(stream.disposition).attached_pic:
            stream.thread_type = "NONE"
            # The decoder's own check: a stream may change its size after the header.
            stream.codec_context.options = {"max_pixels": str(limits.image.max_pixels)}
            return stream
    raise InvalidMediaError("the file has no video track")


def _timeline(file: InputContainer, stream: VideoStream, limits: VideoLimits) -> tuple[list[float], float]:
    """When each frame is shown, in seconds from the first, and the length in all; nothing is decoded."""
    width, height = stream.codec_context.width, stream.codec_context.height
    limits.check_length(stream.frames or 1, 0.0, max(1, width), max(1, height))
    unit = float(stream.time_base or 0)
    declared = float(stream.duration) * unit if stream.duration else (file.duration or 0) / 1e6
    limits.check_length(1, declared, max(1, width), max(1, height))
    stamps: list[int | None] = []
    shown = 0
    for packet in file.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        stamps.append(packet.pts if packet.pts is not None else packet.dts)
        shown = packet.duration or shown
        limits.check_length(len(stamps), 0.0, max(1, width), max(1, height))
    if not stamps:
        raise InvalidMediaError("the video has no frame")
    if len(stamps) < 0.95 * (stream.frames or 0) - 2:
        raise InvalidMediaError(
            f"the video is truncated: {stream.frames:,} frames declared, {len(stamps):,} there"
        )
    known = sorted({stamp for stamp in stamps if stamp is not None})
    if len(known) < 0.5 * len(stamps) or unit <= 0:  # elementary streams have none
        gap = 1 / float(stream.average_rate or stream.guessed_rate or 25)
        starts = [gap * index for index in range(len(stamps))]
        seconds = gap * len(stamps)
    else:
        starts = [(stamp - known[0]) * unit for stamp in known]
        last = shown * unit if shown > 0 else (starts[-1] / (len(starts) - 1) if len(starts) > 1 else 0.0)
        seconds = starts[-1] + last
    limits.check_length(len(starts), seconds, max(1, width), max(1, height))
    return starts, seconds


def _decode(file: InputContainer, chosen: Sampling, limits: VideoLimits) -> Clip:
    """The frames shown at the chosen moments; decoding ends with the last of them."""
    stream = _video_stream(file, limits)
    fitter = _Canvases()
    canvases: list[np.ndarray] = []
    wanted = iter(chosen.times)
    moment: float | None = next(wanted)
    shown: VideoFrame | None = None
    canvas: np.ndarray | None = None
    start, gap = 0.0, 0.0
    for count, (start, frame) in enumerate(_timed(file, stream), 1):
        limits.check_length(count, 0.0, frame.width, frame.height)
        while moment is not None and shown is not None and moment < start:
            canvas = fitter.fit(_upright(shown, stream)) if canvas is None else canvas
            canvases.append(canvas)
            moment = next(wanted, None)
        if moment is None:
            break
        shown, canvas = frame, None
        gap = max(gap, float(frame.duration or 0) * float(stream.time_base or 0))
    if shown is None:
        raise InvalidMediaError("the video has no frame that can be decoded")
    step = chosen.seconds / len(chosen.times)
    while moment is not None:
        # The rest of the moments belong to the last frame, which some containers show for a while.
        if moment > start + max(4 * gap, 2 * step, 0.5):
            raise InvalidMediaError(
                f"the video is damaged: it lasts {chosen.seconds:.2f} s, frames end at {start:.2f} s"
            )
        canvas = fitter.fit(_upright(shown, stream)) if canvas is None else canvas
        canvases.append(canvas)
        moment = next(wanted, None)
    return fitter.clip(canvases, chosen.seconds)


def _timed(file: InputContainer, stream: VideoStream) -> Iterator[tuple[float, VideoFrame]]:
    """Frames with the second, counted from the first, from which they are shown."""
    gap = 1 / float(stream.average_rate or stream.guessed_rate or 25)
    first: float | None = None
    index = 0
    for packet in file.demux(stream):
        # An empty packet on the way repeats a frame (Theora); the one at the end fetches the last frames.
        if packet.size == 0 and packet.pts is not None:
            continue
        for frame in packet.decode():
            stamp = frame.time if frame.time is not None else gap * index
            first = stamp if first is None else first
            yield stamp - first, frame
            index += 1


def _upright(frame: VideoFrame, stream: VideoStream) -> Image.Image:
    """An RGB picture of a frame: over white where transparent, pixels square, turned as its data say."""
    alpha = any(component.is_alpha for component in frame.format.components)
    if alpha:
        picture = Image.fromarray(frame.to_ndarray(format="rgba"))
        over = Image.new("RGBA", picture.size, "white")
        over.alpha_composite(picture)
        picture = over.convert("RGB")
    else:
        picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
    aspect = stream.sample_aspect_ratio
    if aspect and aspect != 1 and Fraction(1, 8) <= aspect <= 8:
        picture = picture.resize((max(1, round(picture.width * aspect)), picture.height))
    turned = int(getattr(frame, "rotation", 0) or 0) % 360  # degrees counterclockwise
    return picture.rotate(turned, expand=True) if turned else picture


def _milliseconds(count: int, frame_rate: float, unit: int) -> list[int]:
    """How long each frame is shown, in multiples of ``unit`` ms, without drift over the whole."""
    edges = [max(k, round(k * 1000 / frame_rate / unit)) for k in range(count + 1)]
    return [max(1, after - before) * unit for before, after in pairwise(edges)]


def _write_pillow(frames: Sequence[Image.Image], frame_rate: float, container: str) -> bytes:
    shown = _milliseconds(len(frames), frame_rate, 1 if container == "WEBP" else 10)
    options: dict[str, Any] = {"loop": 0, "disposal": 1}
    if container == "WEBP":
        # Equal neighbours become one frame, shown as long as both; and a single frame has no length in WebP.
        still = len(frames) > 1 and all(frame == frames[0] for frame in frames[1:])
        frames = [*frames[:-1], _nudged(frames[-1])] if still else frames
        pixels = len(frames) * frames[0].width * frames[0].height
        lossless = still or pixels <= _LOSSLESS_PIXELS
        options = {"loop": 0, "lossless": lossless, "quality": 90, "method": 2}
    buffer = io.BytesIO()
    duration = shown if len(frames) > 1 else shown[0]
    frames[0].save(
        buffer, container, save_all=True, append_images=list(frames[1:]), duration=duration, **options
    )
    return buffer.getvalue()


def _nudged(picture: Image.Image) -> Image.Image:
    """The picture with one corner pixel a level brighter or darker, which no eye sees."""
    picture = picture.copy()
    pixel = picture.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    red, *others = pixel
    picture.putpixel((0, 0), (red - 1 if red else 1, *others))
    return picture


def _write_ffmpeg(frames: Sequence[Image.Image], frame_rate: float, container: str) -> bytes:
    av = _pyav()
    rate = Fraction(frame_rate).limit_denominator(1001)
    codec, options = ("libx264", {"crf": "14"}) if container == "mp4" else ("libvpx-vp9", {"crf": "16"})
    buffer = io.BytesIO()
    try:
        with av.open(buffer, mode="w", format=container) as file:
            stream = file.add_stream(codec, rate=rate, options={**options, "threads": "1"})
            stream.width, stream.height = ((side + 1) // 2 * 2 for side in frames[0].size)
            stream.pix_fmt = "yuv420p"
            for picture in frames:
                pixels = np.asarray(picture)
                odd = ((0, pixels.shape[0] % 2), (0, pixels.shape[1] % 2), (0, 0))
                pixels = np.pad(pixels, odd, mode="edge")
                file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            file.mux(stream.encode(None))
    except av.error.FFmpegError as error:
        width, height = frames[0].size
        raise InvalidMediaError(
            f"{len(frames)} frames of {width}x{height} pixels can't be written as {container}: "
            f"{error.strerror}"
        ) from error
    return buffer.getvalue()
