"""Sensor series of several channels: CSV or ``.npy`` in and out; codebooks as the audio tokenizer has them.

A fixed residual quantiser: a frame holds four successive samples of one channel, and level q refines each by
two bits, one of 256 points of a lattice in four dimensions, within the cell that the earlier levels chose.
After q levels a sample is known to within range / 2^(2q + 1), so with all eight to 1/131072 of the channel's
range; dropping levels coarsens it, as it does with sounds. Two frames a channel come first: its minimum and
its range, each a big-endian float64, one byte a level, so that with fewer levels they lose digits at the end
(`error_bound` counts that in).

Frames run block by block, the channels side by side. CSV has a line of names, and a first column ``time`` in
seconds with even steps gives the rate; without it a sample a second is assumed. Time starts at 0 when
decoded.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.tokens import CodebooksLayout, TokenSpan
from ernie5.tokenizers.modalities.arrays import NPY, check_finite, read_npy, write_npy
from ernie5.tokenizers.modalities.codec import SAMPLES, Codec, Figure, SampleFile, utf8
from ernie5.tokenizers.modalities.features import encoder_shapes, fill

LEVELS = 8
BLOCK = 4  # samples a frame
MAX_CHANNELS = 64
MAX_VALUES = 1 << 20
_HEADER = 2  # frames a channel
_UNEVEN = 1e-3  # how far a step of the time column may be from the mean, relative


@dataclass(frozen=True, slots=True)
class Series:
    """``values`` float64 ``[samples, channels]`` at ``rate`` Hz; ``names`` of the channels, where known."""

    values: np.ndarray
    rate: float = 1.0
    names: tuple[str, ...] = field(default=())


class SeriesCodec(Codec[Series]):
    """Samples within 1/131072 of their channel's range."""

    modality = MODALITIES["series"]
    content_types = ("text/csv", NPY)
    promise = "each sample within 1/131072 of its channel's range; fewer levels coarser by 4 each"
    sample = SampleFile(
        SAMPLES / "series.csv",
        "text/csv",
        "weather of Seattle, 120 days of 2012: rain, highest and lowest temperature, wind; NOAA, by way of "
        "PyPI vega_datasets 0.9.0, days turned into seconds",
        "public domain",
    )

    def read(self, data: bytes, content_type: str) -> Series:
        series = Series(read_npy(data, "series", 2)) if content_type == NPY else _read_csv(data)
        _check(series)
        return series

    def write(self, value: Series, content_type: str) -> bytes:
        if content_type == NPY:
            return write_npy(value.values)
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        names = value.names or [f"channel{number}" for number in range(value.values.shape[1])]
        writer.writerow(["time", *names])
        for number, row in enumerate(value.values):
            writer.writerow([repr(number / value.rate), *(repr(float(sample)) for sample in row)])
        return text.getvalue().encode()

    def encode(self, value: Series, base: Any, *, features: bool = False) -> TokenSpan:
        samples, channels = value.values.shape
        levels, codebook = _codebooks(base)
        low = value.values.min(axis=0)
        extent = value.values.max(axis=0) - low
        blocks = _blocks(value.values)
        units = (blocks - low[:, None]) / np.where(extent > 0, extent, 1.0)[:, None]
        body = _to_codes(units.reshape(-1, BLOCK))
        codes = np.zeros((_HEADER * channels + len(body), levels), np.int16)
        kept = min(levels, LEVELS)
        header = np.stack((low, extent), 1).astype(">f8").reshape(-1).view(np.uint8).reshape(-1, LEVELS)
        codes[: len(header), :kept] = header[:, :kept]
        codes[len(header) :, :kept] = body[:, :kept]
        layout = CodebooksLayout(
            codebook_size=codebook,
            levels=levels,
            frame_rate=channels * value.rate / BLOCK,
            sample_rate=value.rate,
            samples=samples,
            channels=channels,
        )
        rows = np.concatenate((np.zeros((len(header), BLOCK)), units.reshape(-1, BLOCK) * 2 - 1))
        return TokenSpan(
            self.modality.name,
            layout,
            codes,
            base.hash,
            features=fill(rows[:, None], encoder_shapes(base, "speech")) if features else {},
            metadata={"channels": list(value.names)} if value.names else {},
        )

    def decode(self, span: TokenSpan, base: Any) -> Series:
        """The series of a span, of all its levels or of the first ones that were kept."""
        self.check_span(span, base)
        layout = span.layout
        assert isinstance(layout, CodebooksLayout)
        samples, channels = layout.samples, layout.channels
        blocks = -(-samples // BLOCK)
        if not samples or channels > MAX_CHANNELS or len(span.codes) != channels * (_HEADER + blocks):
            raise InvalidInputError(
                f"{len(span.codes)} frames are not {_HEADER} + {blocks} for each of {channels} channels",
                param="codes",
            )
        kept = min(layout.levels, LEVELS)
        codes = np.zeros((len(span.codes), LEVELS), np.uint8)
        codes[:, :kept] = span.codes[:, :kept]
        if kept and int(span.codes[:, :kept].max()) > 255:
            raise InvalidInputError("a series has codes up to 255", param="codes")
        header = codes[: _HEADER * channels].view(">f8").reshape(channels, _HEADER).astype(np.float64)
        if not np.isfinite(header.sum(1)).all() or (header[:, 1] < 0).any():
            raise InvalidInputError("minimum and range of a channel are no finite numbers", param="codes")
        low, extent = header.T
        units = _from_codes(codes[_HEADER * channels :], kept).reshape(blocks, channels, BLOCK)
        values = (low[:, None] + units * extent[:, None]).transpose(0, 2, 1).reshape(-1, channels)[:samples]
        named = span.metadata.get("channels")
        names = tuple(map(str, named)) if isinstance(named, list) and len(named) == channels else ()
        return Series(np.ascontiguousarray(values), layout.sample_rate, names)

    def compare(self, original: Series, decoded: Series) -> Figure:
        name, unit, limit = "largest error", "of the channel's range", 2.0 ** -(2 * LEVELS + 1) + 1e-9
        if original.values.shape != decoded.values.shape:
            return Figure(name, math.inf, unit, limit)
        extent = np.ptp(original.values, axis=0)
        error = np.abs(original.values - decoded.values).max(axis=0) / np.where(extent > 0, extent, 1.0)
        return Figure(name, float(error.max()), unit, limit)


def error_bound(low: float, extent: float, levels: int = LEVELS) -> float:
    """The largest error of a sample of a channel after so many levels (at least 2), header included.

    The header's float64 keeps 8 * levels - 12 bits of its mantissa; below the smallest normal number, the
    same steps as at it.
    """
    lost = 0.0 if levels >= LEVELS else 2.0 ** -(8 * levels - 12)
    header = abs(low) + extent + 2 * np.finfo(np.float64).smallest_normal
    return float(extent * 2.0 ** -(2 * levels + 1) + header * (lost + 2.0**-50))


def _codebooks(base: Any) -> tuple[int, int]:
    """Levels and codes a level of the audio tokenizer."""
    levels, codebook = int(base.levels), int(base.codec.config.codebook_size)
    if codebook < 256:
        raise InvalidInputError(f"series need 256 codes a level, this audio tokenizer has {codebook}")
    return levels, codebook


def _blocks(values: np.ndarray) -> np.ndarray:
    """``[samples, channels]`` to ``[blocks, channels, BLOCK]``, the last sample repeated to fill up."""
    padded = np.pad(values, ((0, -len(values) % BLOCK), (0, 0)), mode="edge")
    return padded.reshape(-1, BLOCK, values.shape[1]).transpose(0, 2, 1)


def _to_codes(units: np.ndarray) -> np.ndarray:
    """``[n, BLOCK]`` in [0, 1] to uint8 ``[n, LEVELS]``: level q holds the q-th pair of bits of each."""
    whole = np.minimum((units * (1 << 2 * LEVELS)).astype(np.int64), (1 << 2 * LEVELS) - 1)
    shifts = 2 * np.arange(LEVELS - 1, -1, -1)
    digits = (whole[:, None, :] >> shifts[:, None]) & 3
    return (digits << 2 * np.arange(BLOCK)).sum(axis=2).astype(np.uint8)


def _from_codes(codes: np.ndarray, levels: int) -> np.ndarray:
    """The centres of the cells that the first ``levels`` levels chose, ``[n, BLOCK]`` in [0, 1]."""
    digits = (codes[:, :levels, None].astype(np.int64) >> 2 * np.arange(BLOCK)) & 3
    weights = 4 ** np.arange(levels - 1, -1, -1, dtype=np.int64)
    return ((digits * weights[:, None]).sum(axis=1) + 0.5) / 4.0**levels


def _check(series: Series) -> None:
    samples, channels = series.values.shape
    if not samples or not channels:
        raise InvalidMediaError(
            f"the series is empty: {samples} samples of {channels} channels", param="data"
        )
    if channels > MAX_CHANNELS or samples * channels > MAX_VALUES:
        raise MediaTooLargeError(
            f"{samples} samples of {channels} channels exceed {MAX_CHANNELS} channels or {MAX_VALUES} values",
            param="data",
        )
    check_finite(series.values, "series")
    with np.errstate(over="ignore"):
        if not np.isfinite(np.ptp(series.values, axis=0)).all():
            raise InvalidMediaError("the range of a channel exceeds float64", param="data")
    if not 1e-9 < series.rate < 1e9 / MAX_CHANNELS:
        raise InvalidMediaError(f"{series.rate} samples a second is no rate of a sensor", param="data")


def _read_csv(data: bytes) -> Series:
    reader = csv.reader(io.StringIO(utf8(data, "series"), newline=""), strict=True)
    rows: list[list[float]] = []
    names: list[str] = []
    try:
        names = next(reader, [])
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                raise InvalidMediaError(
                    f"line {reader.line_num} has {len(cells)} values, the head {len(names)} names",
                    param="data",
                )
            rows.append([float(cell) for cell in cells])
            if len(rows) * len(names) > MAX_VALUES + len(rows):
                raise MediaTooLargeError(f"series exceeds {MAX_VALUES} values", param="data")
    except (csv.Error, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidMediaError(f"series: line {reader.line_num}: {error}", param="data") from None
    values = np.array(rows, np.float64).reshape(len(rows), len(names))
    if names[:1] != ["time"]:
        return Series(values, names=tuple(names))
    check_finite(values, "series")
    return Series(values[:, 1:], _rate(values[:, 0]), tuple(names[1:]))


def _rate(time: np.ndarray) -> float:
    if len(time) < 2:
        return 1.0
    step = (time[-1] - time[0]) / (len(time) - 1)
    if not step > 0 or np.abs(np.diff(time) - step).max() > _UNEVEN * step:
        raise InvalidMediaError(
            "the column time must rise in even steps; resample the series first", param="time"
        )
    return float(1 / step)
