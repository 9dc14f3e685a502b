"""Geographic tracks: GPX or GeoJSON; positions within a metre.

Latitude and longitude lie on a grid of 1e-5 degree (1.1 m), elevation on decimetres, time on seconds. Each
point is told as the difference from the one before, of grid positions, so that errors don't add up. Canonical
text: a line a point, ``latitude longitude elevation time`` as integers, ``-`` where a point lacks one; an
empty line between segments.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.protocol.modalities import MODALITIES
from ernie5.tokenizers.modalities.boxes import read_json, read_number
from ernie5.tokenizers.modalities.codec import SAMPLES, Figure, SampleFile, TextCodec

GPX, GEOJSON = "application/gpx+xml", "application/geo+json"
MAX_POINTS = 20_000
STEPS = 100_000  # a degree
_EARTH = 6_371_008.8  # mean radius, m
_MAX_ELEVATION = 100_000.0  # m, either way
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Point:
    """Degrees (WGS 84), metres, seconds since 1970 in UTC."""

    latitude: float
    longitude: float
    elevation: float | None = None
    time: float | None = None


Track = tuple[tuple[Point, ...], ...]  # segments


class TrackCodec(TextCodec[Track]):
    """Segments of points; names, waypoints and extensions of the file are not kept."""

    modality = MODALITIES["track"]
    content_types = (GPX, GEOJSON)
    promise = "points in order, each within 1 m, 0.05 m of elevation and 0.5 s"
    max_bytes = 8 << 20
    sample = SampleFile(
        SAMPLES / "track.gpx",
        GPX,
        "first 60 points of a ride at Cerkniško jezero, 2010, test file of PyPI gpxpy 1.6.2 (Tomo Krajina)",
        "Apache-2.0",
    )

    def read(self, data: bytes, content_type: str) -> Track:
        track = _read_gpx(data) if content_type == GPX else _read_geojson(data)
        points = sum(map(len, track))
        if not points:
            raise InvalidMediaError("the track has no points", param="data")
        if points > MAX_POINTS:
            raise MediaTooLargeError(
                f"{points} points exceed the limit of {MAX_POINTS}; thin it out", param="data"
            )
        return track

    def write(self, value: Track, content_type: str) -> bytes:
        return (_gpx(value) if content_type == GPX else _geojson(value)).encode()

    def to_text(self, value: Track) -> str:
        return "\n\n".join("\n".join(_lines(segment)) for segment in value)

    def from_text(self, text: str) -> Track:
        return tuple(_segment(block.split("\n")) for block in text.split("\n\n"))

    def compare(self, original: Track, decoded: Track) -> Figure:
        name = "largest distance"
        if [len(segment) for segment in original] != [len(segment) for segment in decoded]:
            return Figure(name, math.inf, "m", 1.0)
        pairs = zip((p for s in original for p in s), (p for s in decoded for p in s))
        return Figure(name, max(distance(left, right) for left, right in pairs), "m", 1.0)


def distance(left: Point, right: Point) -> float:
    """Great-circle distance in metres, by the haversine formula."""
    phi, psi = math.radians(left.latitude), math.radians(right.latitude)
    across = math.radians(right.longitude - left.longitude)
    haversine = math.sin((psi - phi) / 2) ** 2 + math.cos(phi) * math.cos(psi) * math.sin(across / 2) ** 2
    return 2 * _EARTH * math.asin(math.sqrt(min(1.0, haversine)))


def _grid(point: Point) -> tuple[int, int, int | None, int | None]:
    return (
        round(point.latitude * STEPS),
        round(point.longitude * STEPS),
        None if point.elevation is None else round(point.elevation * 10),
        None if point.time is None else round(point.time),
    )


def _lines(segment: tuple[Point, ...]) -> list[str]:
    last = [0, 0, 0, 0]
    lines = []
    for point in segment:
        words = []
        for axis, value in enumerate(_grid(point)):
            words.append("-" if value is None else str(value - last[axis]))
            last[axis] = last[axis] if value is None else value
        lines.append(" ".join(words))
    return lines


def _segment(lines: list[str]) -> tuple[Point, ...]:
    last = [0, 0, 0, 0]
    points = []
    for line in lines:
        words = line.split(" ")
        if (
            len(words) != 4
            or not all(re.fullmatch(r"-|-?\d{1,12}", word) for word in words)
            or "-" in words[:2]
        ):
            raise InvalidInputError(f"{line[:60]!r} is no point of a track", param="codes")
        last = [value if word == "-" else value + int(word) for value, word in zip(last, words)]
        latitude, longitude = last[0] / STEPS, last[1] / STEPS
        elevation = None if words[2] == "-" else last[2] / 10
        time = None if words[3] == "-" else float(last[3])
        try:
            points.append(_checked(latitude, longitude, elevation, time))
        except InvalidMediaError as error:
            raise InvalidInputError(error.message, param="codes") from None
    return tuple(points)


def _checked(latitude: float, longitude: float, elevation: float | None, time: float | None) -> Point:
    if not (-90 <= latitude <= 90 and -180 <= longitude <= 180):
        raise InvalidMediaError(
            f"latitude {latitude}, longitude {longitude} lies not on the globe", param="data"
        )
    if elevation is not None and not abs(elevation) <= _MAX_ELEVATION:
        raise InvalidMediaError(f"elevation {elevation} m is beyond {_MAX_ELEVATION:.0f} m", param="data")
    if time is not None and not -62_135_596_800 <= time <= 253_402_300_799:
        raise InvalidMediaError(f"time {time} s lies outside the years 1 to 9999", param="data")
    return Point(latitude, longitude, elevation, time)


class _GpxReader:
    """Collects ``trkpt`` and ``rtept`` elements; a document type is refused, so nothing expands."""

    def __init__(self) -> None:
        self.segments: list[list[Point]] = []
        self._path: list[str] = []
        self._place: tuple[float, float] = (0.0, 0.0)
        self._found: dict[str, str] = {}
        self._points = 0

    def doctype(self, *_: Any) -> None:
        raise InvalidMediaError("GPX with a document type declaration is refused", param="data")

    def start(self, name: str, attributes: dict[str, str]) -> None:
        tag = name.rpartition(":")[2]
        self._path.append(tag)
        if len(self._path) > _MAX_DEPTH:
            raise InvalidMediaError(f"GPX nests deeper than {_MAX_DEPTH} elements", param="data")
        if tag in ("trkseg", "rte"):
            self.segments.append([])
        elif tag in ("trkpt", "rtept"):
            if not self.segments:
                raise InvalidMediaError(f"<{tag}> lies outside a track segment", param="data")
            self._place = (_number(attributes.get("lat"), "lat"), _number(attributes.get("lon"), "lon"))
            self._found = {}

    def text(self, text: str) -> None:
        if (
            len(self._path) >= 2
            and self._path[-2] in ("trkpt", "rtept")
            and self._path[-1] in ("ele", "time")
        ):
            self._found[self._path[-1]] = (self._found.get(self._path[-1], "") + text)[:64]

    def end(self, name: str) -> None:
        tag = self._path.pop()
        if tag not in ("trkpt", "rtept"):
            return
        self._points += 1
        if self._points > MAX_POINTS:
            raise MediaTooLargeError(f"more than {MAX_POINTS} points; thin the track out", param="data")
        elevation, time = self._found.get("ele", "").strip(), self._found.get("time", "").strip()
        self.segments[-1].append(
            _checked(
                *self._place, _number(elevation, "ele") if elevation else None, _time(time) if time else None
            )
        )


def _read_gpx(data: bytes) -> Track:
    reader, parser = _GpxReader(), expat.ParserCreate()
    parser.StartDoctypeDeclHandler = reader.doctype
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise InvalidMediaError(f"GPX is no well-formed XML: {error}", param="data") from None
    except (LookupError, UnicodeError) as error:
        raise InvalidMediaError(f"GPX in an unknown encoding: {error}", param="data") from None
    return tuple(tuple(segment) for segment in reader.segments if segment)


def _number(text: str | None, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidMediaError(f"{where} of a point must be a finite number, got {text!r:.40}", param="data")
    return value


def _time(text: str) -> float:
    # Devices write up to nanoseconds; datetime takes six digits.
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?", text)
    try:
        if match is None:
            raise ValueError
        whole = datetime.fromisoformat(match[1] + (match[3] or "Z"))
    except ValueError:
        raise InvalidMediaError(
            f"time of a point must be as 2010-08-06T10:36:35Z, got {text!r}", param="data"
        ) from None
    return whole.timestamp() + float(match[2] or 0)


def _read_geojson(data: bytes) -> Track:
    value = read_json(data, "GeoJSON")
    for wrapped, inner in (("FeatureCollection", "features"), ("Feature", "geometry")):
        if isinstance(value, dict) and value.get("type") == wrapped:
            value = value.get(inner)
        if wrapped == "FeatureCollection" and isinstance(value, list):
            if len(value) != 1:
                raise InvalidMediaError(f"{len(value)} features; a track is one", param="features")
            value = value[0]
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("LineString", "MultiLineString"):
        raise InvalidMediaError(f"a track is a LineString or MultiLineString, not {kind!r:.40}", param="type")
    coordinates = value.get("coordinates")
    lines = [coordinates] if kind == "LineString" else coordinates
    if not isinstance(lines, list) or not all(isinstance(line, list) for line in lines):
        raise InvalidMediaError("coordinates must be lists of positions", param="coordinates")
    if sum(map(len, lines)) > MAX_POINTS:
        raise MediaTooLargeError(f"more than {MAX_POINTS} points; thin the track out", param="coordinates")
    return tuple(tuple(map(_position, line)) for line in lines if line)


def _position(item: Any) -> Point:
    if not isinstance(item, list) or len(item) not in (2, 3):
        raise InvalidMediaError(
            f"a position is [longitude, latitude] or with elevation, got {item!r:.60}", param="coordinates"
        )
    longitude, latitude, *rest = (read_number(number, "coordinates") for number in item)
    return _checked(latitude, longitude, rest[0] if rest else None, None)


def _gpx(track: Track) -> str:
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<gpx version="1.1" creator="ernie-multi" xmlns="http://www.topografix.com/GPX/1/1"><trk>',
    ]
    for segment in track:
        lines.append("<trkseg>")
        for point in segment:
            inner = "" if point.elevation is None else f"<ele>{point.elevation:.1f}</ele>"
            if point.time is not None:
                moment = datetime.fromtimestamp(point.time, UTC)
                inner += f"<time>{moment.strftime('%Y').zfill(4)}-{moment.strftime('%m-%dT%H:%M:%SZ')}</time>"
            place = [quoteattr(f"{degrees:.5f}") for degrees in (point.latitude, point.longitude)]
            lines.append(f"<trkpt lat={place[0]} lon={place[1]}>{inner}</trkpt>")
        lines.append("</trkseg>")
    return "\n".join([*lines, "</trk></gpx>", ""])


def _geojson(track: Track) -> str:
    lines = [
        [
            [
                round(p.longitude, 5),
                round(p.latitude, 5),
                *([] if p.elevation is None else [round(p.elevation, 1)]),
            ]
            for p in segment
        ]
        for segment in track
    ]
    single = len(lines) == 1
    return json.dumps(
        {"type": "LineString" if single else "MultiLineString", "coordinates": lines[0] if single else lines}
    )
