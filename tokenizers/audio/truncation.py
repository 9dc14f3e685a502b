"""Sounds that were cut off on their way, found before a decoder reads them as shorter ones.

Every format here says somewhere how much there should be; :func:`refuse_truncated` compares that with what
is there. A size that a writer to a pipe left open (0 or all ones) says nothing, and such a file passes, as
does one with tags or other bytes behind its sound.

Not told: an MP3 file without a Xing header, ADTS cut between two frames, Ogg cut between two pages, and
formats that declare no length.
"""

from __future__ import annotations

import struct

from ernie5.protocol.errors import InvalidMediaError

# Sizes from here on are what a writer to a pipe leaves because it does not know better.
_UNKNOWN_32 = 0x7FFF_0000
_UNKNOWN_64 = 1 << 62
# The size of a VOC block has 24 bits; a longer sound in one block has a size that means nothing.
_LARGEST_VOC = (1 << 24) - 1

_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
# Layer III, kbit/s by the header's index; 0 is free format, whose frames have no declared length.
_BITRATES = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),  # MPEG 1
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),  # MPEG 2 and 2.5
}


def refuse_truncated(data: bytes) -> None:
    """Looks at WAV, RF64, W64, AIFF, AU, CAF, NIST, VOC, Ogg, Matroska, WebM, MP3 and ADTS; others pass.

    Raises:
        InvalidMediaError: the file ends before the sound that it declares.
    """
    start = data[:4]
    if start in (b"RIFF", b"RIFX", b"RF64") and data[8:12] == b"WAVE":
        _check_wav(data)
    elif start == b"riff" and data[24:28] == b"wave":
        _check_w64(data)
    elif start == b"FORM" and len(data) >= 8:
        (size,) = struct.unpack_from(">I", data, 4)
        if size < _UNKNOWN_32:
            _compare("AIFF" if data[8:11] == b"AIF" else "IFF", 8 + size, len(data), "bytes")
    elif start in (b".snd", b"dns.") and len(data) >= 12:
        offset, size = struct.unpack_from(">II" if start == b".snd" else "<II", data, 4)
        if size < _UNKNOWN_32:
            _compare("AU", size, len(data) - offset)
    elif start == b"caff":
        _check_caf(data)
    elif start == b"NIST":
        _check_nist(data)
    elif data.startswith(b"Creative Voice File"):
        _check_voc(data)
    elif start == b"OggS":
        _check_ogg(data)
    elif start == _EBML:
        _check_matroska(data)
    elif data[:3] == b"ID3" or _mp3_frame(data, 0):
        _check_mp3(data)
    elif _adts_frame(data, 0):
        _check_adts(data)


def _compare(kind: str, declared: int, there: int, what: str = "bytes of samples") -> None:
    if declared > there:
        raise InvalidMediaError(
            f"the {kind} file is truncated: {declared:,} {what} declared, {max(0, there):,} there"
        )


def _check_wav(data: bytes) -> None:
    order, rf64 = (">" if data[:4] == b"RIFX" else "<"), data[:4] == b"RF64"
    kind = "RF64" if rf64 else "WAV"
    position, long_size = 12, 0
    while position + 8 <= len(data):
        name, (size,) = data[position : position + 4], struct.unpack_from(order + "I", data, position + 4)
        position += 8
        if name == b"ds64" and position + 16 <= len(data):
            (long_size,) = struct.unpack_from("<Q", data, position + 8)
        if name == b"data":
            if rf64 and size == 0xFFFF_FFFF and long_size < _UNKNOWN_64:
                size, known = long_size, True
            else:
                known = size < _UNKNOWN_32
            if known:
                _compare(kind, size, len(data) - position)
            return
        position += size + size % 2
    raise InvalidMediaError(f"the {kind} file is truncated: it has no data chunk")


def _check_w64(data: bytes) -> None:
    # Chunks are a GUID of 16 bytes, a size that counts the 24 bytes of both, and padding to 8 bytes.
    position = 40
    while position + 24 <= len(data):
        (size,) = struct.unpack_from("<Q", data, position + 16)
        if data[position : position + 4] == b"data":
            if size < _UNKNOWN_64:
                _compare("W64", size - 24, len(data) - position - 24)
            return
        position += max(24, (size + 7) & ~7)
    raise InvalidMediaError("the W64 file is truncated: it has no data chunk")


def _check_caf(data: bytes) -> None:
    position = 8
    while position + 12 <= len(data):
        (size,) = struct.unpack_from(">Q", data, position + 4)
        if data[position : position + 4] == b"data":
            if size < _UNKNOWN_64:
                _compare("CAF", size, len(data) - position - 12)
            return
        position += 12 + size
    raise InvalidMediaError("the CAF file is truncated: it has no data chunk")


def _check_nist(data: bytes) -> None:
    """SPHERE: lines ``name -type value`` in a header whose length is its second line."""
    lines = data[:4096].split(b"\n")
    fields = {line.split()[0]: line.split()[2] for line in lines if len(line.split()) == 3}
    names = (b"sample_count", b"channel_count", b"sample_n_bytes")
    # A coding after a comma is a compression, so that the samples say nothing of the bytes.
    if b"," in fields.get(b"sample_coding", b""):
        return
    try:
        header = int(lines[1])
        samples, channels, width = (int(fields[name]) for name in names)
    except (IndexError, KeyError, ValueError):
        return
    _compare("NIST", samples * channels * width, len(data) - header)


def _check_voc(data: bytes) -> None:
    if not 26 <= len(data) <= _LARGEST_VOC:
        return
    (position,) = struct.unpack_from("<H", data, 20)
    while position + 4 <= len(data) and 1 <= data[position] <= 9:
        size = int.from_bytes(data[position + 1 : position + 4], "little")
        position += 4
        _compare("VOC", size, len(data) - position, "bytes in a block")
        position += size


def _check_ogg(data: bytes) -> None:
    last_page = data.rfind(b"OggS")
    segments = data[last_page + 26] if last_page + 27 <= len(data) else 256
    table = data[last_page + 27 : last_page + 27 + segments]
    end = last_page + 27 + segments + sum(table)
    # A page's name may be cut too.
    if len(table) < segments or end > len(data) or data[end:] in (b"O", b"Og", b"Ogg"):
        raise InvalidMediaError("the Ogg file is truncated: its last page is incomplete")


def _check_matroska(data: bytes) -> None:
    size, position = _ebml_size(data, 4)
    if size is None or data[position + size : position + size + 4] != _SEGMENT:
        return
    size, position = _ebml_size(data, position + size + 4)
    if size is not None:
        _compare("Matroska or WebM", size, len(data) - position, "bytes")


def _ebml_size(data: bytes, position: int) -> tuple[int | None, int]:
    """A size and where it ends (RFC 8794, 4 and 6.2); None when it is unknown (all ones) or cut off."""
    if position >= len(data) or not data[position]:
        return None, position
    length = 9 - data[position].bit_length()
    ones = (1 << 7 * length) - 1
    value = int.from_bytes(data[position : position + length], "big") & ones
    known = value != ones and position + length <= len(data)
    return (value if known else None), position + length


def _check_mp3(data: bytes) -> None:
    """Two counts in the Xing header, bytes and frames, must both say that something is missing.

    Some writers count tags among the bytes, others the header's own frame among the frames.
    """
    start = 0
    while data[start : start + 3] == b"ID3" and start + 10 <= len(data):
        size = sum((data[start + 6 + i] & 0x7F) << 7 * (3 - i) for i in range(4))
        start += 10 + size + (10 if data[start + 5] & 0x10 else 0)  # with a footer
    if not _mp3_frame(data, start):
        return
    first = data[start : start + 64]
    header = start + max(first.find(b"Xing"), first.find(b"Info"))
    if header < start or header + 16 > len(data):
        return
    flags, frames, size = struct.unpack_from(">III", data, header + 4)
    if flags & 3 != 3 or start + size <= len(data):
        return
    position, whole = start, -1  # the header's own frame is none of those it counts
    while (length := _mp3_frame(data, position)) and position + length <= len(data):
        position += length
        whole += 1
    if whole < frames:
        _compare("MP3", size, len(data) - start, "bytes")


def _mp3_frame(data: bytes, position: int) -> int:
    """Bytes of the layer III frame that starts at ``position``, 0 if none does (ISO 11172-3, 2.4.1.3)."""
    if position + 4 > len(data) or data[position] != 0xFF or data[position + 1] & 0xE6 != 0xE2:
        return 0
    version, bitrate = data[position + 1] >> 3 & 3, data[position + 2] >> 4
    rate, padding = data[position + 2] >> 2 & 3, data[position + 2] >> 1 & 1
    if version == 1 or bitrate in (0, 15) or rate == 3:
        return 0
    hertz = (44_100, 48_000, 32_000)[rate] >> {3: 0, 2: 1, 0: 2}[version]
    return (144 if version == 3 else 72) * _BITRATES[version == 3][bitrate] * 1000 // hertz + padding


def _check_adts(data: bytes) -> None:
    position = 0
    while length := _adts_frame(data, position):
        _compare("ADTS", length, len(data) - position, "bytes in a frame")
        position += length


def _adts_frame(data: bytes, position: int) -> int:
    """Bytes of the ADTS frame that starts at ``position``, 0 if none does (ISO 13818-7, 6.2)."""
    if position + 7 > len(data) or data[position] != 0xFF or data[position + 1] & 0xF6 != 0xF0:
        return 0
    length = (data[position + 3] & 3) << 11 | data[position + 4] << 3 | data[position + 5] >> 5
    return length if length >= 7 else 0
