"""Shards of a WebDataset: tar files, plain or in seekable zstd frames, read at random.

A shard holds the files of each item next to one another, named ``<item id>.<extension>``. Compressed
shards use the published seekable format of zstd: independent frames, then a skippable frame with their
sizes, so every ``zstd``/``tar`` reads them while this module decompresses only the frame an item lies in.
A foreign single-frame ``.tar.zst`` is unpacked once into an unnamed temporary file.

Writing is deterministic: members in the order given, no times, no owners.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import os
import struct
import tarfile
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from ernie5.protocol.errors import InvalidInputError

BLOCK = 512
FRAME_TARGET = 1 << 18
"""Uncompressed bytes after which the writer begins a new frame (256 KiB)."""
MAX_MEMBER = 1 << 28
"""Largest member that is read (256 MiB); larger ones are refused."""
MAX_FRAME = 1 << 29
"""Largest uncompressed frame that is taken from a seek table (512 MiB)."""
MAX_UNPACKED = 1 << 36
"""Largest foreign compressed shard that is unpacked (64 GiB)."""

_SKIPPABLE_MAGIC = 0x184D2A5E
_SEEKABLE_MAGIC = 0x8F92EAB1
_LEVEL = 19
_ZEROS = bytes(BLOCK)


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside a shard: its name and where its bytes lie in the uncompressed tar."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """What a written shard holds.

    ``sha256`` covers the file on disk, ``content_sha256`` the uncompressed tar, which does not depend on
    the version of the compressor.
    """

    path: Path
    items: int
    size: int
    sha256: str
    content_sha256: str


def split_name(name: str) -> tuple[str, str]:
    """Item id and lower-case extension of a member: everything before and after the first dot of the file.

    >>> split_name("train/0007.speech.ogg")
    ('train/0007', 'speech.ogg')
    """
    folder, _, file = name.rpartition("/")
    key, _, extension = file.partition(".")
    return (f"{folder}/{key}" if folder else key), extension.lower()


# ---------------------------------------------------------------------------------------- writing


def _tar_member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o644
    header = info.tobuf(format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape")
    return header + data + bytes(-len(data) % BLOCK)


def check_item_id(item_id: str) -> None:
    """Raises ValueError if the name in ``item_id`` holds a dot, where readers would cut it."""
    if "." in item_id.rpartition("/")[2]:
        raise ValueError(f"item id {item_id!r} holds a dot; readers cut the name at the first dot")


def write_shard(path: Path, items: Iterable[tuple[str, Mapping[str, bytes]]]) -> ShardSummary:
    """Write ``(item id, {extension: bytes})`` pairs as a shard; ``.zst`` at the end of the name compresses.

    The file appears whole or not at all (written beside its place, then renamed).

    Raises:
        ValueError: an item id with a dot, which readers would cut, or an id written twice.
    """
    compress = path.suffix == ".zst"
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=True)
    content, table = hashlib.sha256(), []
    seen: set[str] = set()
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            pending = bytearray()

            def flush() -> None:
                if not pending:
                    return
                content.update(pending)
                frame = compressor.compress(bytes(pending)) if compress else bytes(pending)
                table.append((len(frame), len(pending)))
                file.write(frame)
                pending.clear()

            for item_id, files in items:
                check_item_id(item_id)
                if item_id in seen:
                    raise ValueError(f"item id {item_id!r} is written twice to {path.name}")
                seen.add(item_id)
                for extension in sorted(files):
                    pending += _tar_member(f"{item_id}.{extension}", files[extension])
                if len(pending) >= FRAME_TARGET:
                    flush()
            pending += bytes(2 * BLOCK)
            flush()
            if compress:
                file.write(_seek_table(table))
        digest = file_digest(partial)
        size = partial.stat().st_size
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return ShardSummary(path, len(seen), size, digest, content.hexdigest())


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _seek_table(frames: Sequence[tuple[int, int]]) -> bytes:
    entries = b"".join(struct.pack("<II", *sizes) for sizes in frames)
    footer = struct.pack("<IBI", len(frames), 0, _SEEKABLE_MAGIC)
    return struct.pack("<II", _SKIPPABLE_MAGIC, len(entries) + len(footer)) + entries + footer


# ---------------------------------------------------------------------------------------- reading


class _Frames:
    """Uncompressed bytes of a seekable zstd file at any offset, a few frames kept."""

    def __init__(self, file: BinaryIO, path: Path, frames: list[tuple[int, int]], kept: int = 8) -> None:
        self.file, self.path, self.kept = file, path, kept
        self.starts, self.places, position, start = [], [], 0, 0
        for packed, unpacked in frames:
            self.starts.append(start)
            self.places.append((position, packed, unpacked))
            position, start = position + packed, start + unpacked
        self.length = start
        self.cache: OrderedDict[int, bytes] = OrderedDict()

    def _frame(self, number: int) -> bytes:
        if number in self.cache:
            self.cache.move_to_end(number)
            return self.cache[number]
        position, packed, unpacked = self.places[number]
        raw = os.pread(self.file.fileno(), packed, position)
        try:
            data = zstandard.ZstdDecompressor().decompress(raw, max_output_size=unpacked)
        except zstandard.ZstdError as error:
            raise InvalidInputError(
                f"{self.path}: frame {number} at byte {position} is damaged ({error})"
            ) from None
        if len(data) != unpacked:
            raise InvalidInputError(
                f"{self.path}: frame {number} holds {len(data)} bytes, its seek table says {unpacked}"
            )
        self.cache[number] = data
        while len(self.cache) > self.kept:
            self.cache.popitem(last=False)
        return data

    def read(self, offset: int, size: int) -> bytes:
        parts, end = [], min(offset + size, self.length)
        number = bisect.bisect_right(self.starts, offset) - 1
        while offset < end:
            start = self.starts[number]
            part = self._frame(number)[offset - start : end - start]
            parts.append(part)
            offset += len(part)
            number += 1
        return b"".join(parts)


class _Plain:
    """Bytes of an uncompressed file at any offset."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.length = os.fstat(file.fileno()).st_size

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self.file.fileno(), size, offset)


def _read_seek_table(file: BinaryIO, path: Path) -> list[tuple[int, int]] | None:
    """The frames (packed, unpacked size) of a seekable file, or ``None`` for any other zstd file."""
    length = file.seek(0, io.SEEK_END)
    if length < 17:
        return None
    file.seek(length - 9)
    count, descriptor, magic = struct.unpack("<IBI", file.read(9))
    if magic != _SEEKABLE_MAGIC:
        return None
    width = 12 if descriptor & 0x80 else 8
    size = count * width + 9
    if descriptor & 0x7C or size + 8 > length:
        raise InvalidInputError(
            f"{path}: the seek table of {count} frames does not fit a file of {length} bytes"
        )
    file.seek(length - size - 8)
    table = file.read(size + 8)
    frames = [struct.unpack_from("<II", table, 8 + width * index) for index in range(count)]
    if sum(packed for packed, _ in frames) != length - size - 8 or any(u > MAX_FRAME for _, u in frames):
        raise InvalidInputError(
            f"{path}: the seek table's sizes do not add up to the file, or pass {MAX_FRAME} bytes"
        )
    return frames


def _unpack(file: BinaryIO, path: Path) -> BinaryIO:
    """A foreign compressed shard, unpacked into a temporary file that vanishes when closed."""
    unpacked = tempfile.TemporaryFile(prefix="shard-")  # noqa: SIM115 - lives as long as the shard
    file.seek(0)
    total, whole, rest = 0, True, b""
    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        while chunk := rest or file.read(1 << 18):
            data = frame.decompress(chunk)
            total += len(data)
            if total > MAX_UNPACKED:
                raise InvalidInputError(f"{path} unpacks to over {MAX_UNPACKED} bytes; use plain .tar shards")
            unpacked.write(data)
            whole, rest = frame.eof, frame.unused_data
            if whole:
                frame = zstandard.ZstdDecompressor().decompressobj()
        if not whole or total == 0:
            raise InvalidInputError(f"{path} is truncated: its last zstd frame has no end")
    except zstandard.ZstdError as error:
        raise InvalidInputError(f"{path} is not a readable zstd file ({error})") from None
    unpacked.flush()
    return unpacked


def _plain_headers(source: _Frames | _Plain) -> list[tuple[str, int, int]] | None:
    """Name, offset and size of each file of a tar of plain ustar entries only, as the writer makes them.

    ``None`` for any other tar, and for one that ends early or has a wrong checksum: tarfile tells of that.
    """
    found: list[tuple[str, int, int]] = []
    offset = 0
    while True:
        header = source.read(offset, BLOCK)
        if len(header) < BLOCK:
            return None
        if header == _ZEROS:
            return found
        name, kind = header[:100].rstrip(b"\0"), header[156:157]
        plain = kind == b"0" and header[257:263] == b"ustar\0" and header[345] == 0
        try:
            length = int(header[124:136].rstrip(b"\0 "), 8)
            checksum = int(header[148:156].rstrip(b"\0 "), 8)
        except ValueError:
            return None
        # The checksum counts its own field as eight spaces.
        if not plain or length < 0 or checksum != sum(header) - sum(header[148:156]) + 256:
            return None
        start = offset + BLOCK
        offset = start + length + -length % BLOCK
        if offset > source.length:
            return None
        found.append((name.decode("utf-8", "surrogateescape"), start, length))


class Shard:
    """One shard, its members indexed when it is opened; ``items`` maps item ids to their files.

    Reads use positions (``pread``), so one shard serves several threads.

    Raises:
        InvalidInputError: the file is no tar or its compression is damaged; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file: BinaryIO = path.open("rb")
        except OSError as error:
            raise InvalidInputError(f"shard {path} can't be opened: {error.strerror}") from None
        self._source: _Frames | _Plain
        try:
            if path.suffix == ".zst":
                frames = _read_seek_table(file, path)
                if frames is None:
                    unpacked = _unpack(file, path)
                    file.close()
                    file = unpacked
                    self._source = _Plain(file)
                else:
                    self._source = _Frames(file, path, frames)
            else:
                self._source = _Plain(file)
            self._file = file
            self.items: dict[str, dict[str, Member]] = {}
            self._index()
        except BaseException:
            file.close()
            raise

    def _index(self) -> None:
        for name, offset, size in _plain_headers(self._source) or self._all_headers():
            if not name.rpartition("/")[2].startswith("."):
                item_id, extension = split_name(name)
                self.items.setdefault(item_id, {})[extension] = Member(name, offset, size)

    def _all_headers(self) -> Iterator[tuple[str, int, int]]:
        """Name, offset and size of each file, by the standard library: any kind of tar, but slowly."""
        reader = io.BufferedReader(_Window(self._source), 1 << 16)  # type: ignore[type-var]
        try:
            with tarfile.open(fileobj=reader, mode="r:") as tar:
                for info in tar:
                    if info.isreg():
                        yield info.name, info.offset_data, info.size
                    # tarfile keeps every header; the index replaces them.
                    tar.members = []  # type: ignore[attr-defined]
        except tarfile.TarError as error:
            raise InvalidInputError(f"{self.path} is not a readable tar file ({error})") from None

    def read(self, member: Member) -> bytes:
        """The bytes of a member; `InvalidInputError` where it is truncated or above ``MAX_MEMBER``."""
        if member.size > MAX_MEMBER:
            raise InvalidInputError(
                f"{self.path}: member {member.name} has {member.size} bytes; at most {MAX_MEMBER} are read"
            )
        data = self._source.read(member.offset, member.size)
        if len(data) != member.size:
            raise InvalidInputError(
                f"{self.path}: member {member.name} is truncated, {len(data)} of {member.size} bytes"
            )
        return data

    def close(self) -> None:
        """Release the file."""
        self._file.close()


class _Window(io.RawIOBase):
    """A raw, seekable stream over a source, for tarfile's header scan."""

    def __init__(self, source: _Frames | _Plain) -> None:
        self.source, self.position = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self.position, self.source.length)[whence]
        self.position = max(0, base + offset)
        return self.position

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        data = self.source.read(self.position, len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)
