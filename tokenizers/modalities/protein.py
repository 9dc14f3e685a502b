"""Proteins: FASTA records of one-letter amino acid codes (IUPAC-IUB, 1983); exact.

Canonical text: for each record ``>header`` and the sequence on one line, in capitals.
"""

from __future__ import annotations

import re

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError
from ernie5.protocol.modalities import MODALITIES
from ernie5.tokenizers.modalities.codec import SAMPLES, Figure, SampleFile, TextCodec, utf8

# (header, sequence) of each record.
Records = tuple[tuple[str, str], ...]

_LETTERS = re.compile(r"[A-Z*-]+")
_LINE_END = re.compile("\r\n|\n|\r")
_LINE = 60


class ProteinCodec(TextCodec[Records]):
    """Headers and sequences exact; lower case becomes upper case, line breaks are not kept."""

    modality = MODALITIES["protein"]
    content_types = ("text/x-fasta",)
    promise = "headers and sequences exact"
    sample = SampleFile(
        SAMPLES / "protein.fasta", content_types[0], "human insulin with its signal peptide, P01308", "a fact"
    )

    def read(self, data: bytes, content_type: str) -> Records:
        records: list[tuple[str, list[str]]] = []
        # Not splitlines, which would end a header at form feeds and Unicode's own separators.
        for number, line in enumerate(_LINE_END.split(utf8(data, "FASTA")), 1):
            if line.startswith(">"):
                records.append((line[1:].strip(), []))
            elif line.strip():
                letters = line.strip()
                # Capitals of other alphabets' letters can be amino acid codes: ß would be two serines.
                letters = letters.upper() if letters.isascii() else letters
                if not records:
                    raise InvalidMediaError(f"line {number} comes before the first '>' header", param="data")
                if not _LETTERS.fullmatch(letters):
                    raise InvalidMediaError(
                        f"line {number} holds other than amino acid letters, '*' and '-': {letters[:40]!r}",
                        param="data",
                    )
                records[-1][1].append(letters)
        if not records:
            raise InvalidMediaError(
                "FASTA holds no record; a record begins with '>' and a name", param="data"
            )
        for header, parts in records:
            if not parts:
                raise InvalidMediaError(f"record {header[:40]!r} has no sequence", param="data")
        return tuple((header, "".join(parts)) for header, parts in records)

    def write(self, value: Records, content_type: str) -> bytes:
        lines = []
        for header, sequence in value:
            lines.append(f">{header}")
            lines += [sequence[start : start + _LINE] for start in range(0, len(sequence), _LINE)]
        return ("\n".join(lines) + "\n").encode()

    def to_text(self, value: Records) -> str:
        return "\n".join(f">{header}\n{sequence}" for header, sequence in value)

    def from_text(self, text: str) -> Records:
        lines = text.split("\n")
        if len(lines) % 2:
            raise InvalidInputError(
                "a protein's tokens must be pairs of header and sequence lines", param="codes"
            )
        records = []
        for header, sequence in zip(lines[::2], lines[1::2]):
            if not header.startswith(">") or not _LETTERS.fullmatch(sequence):
                raise InvalidInputError(f"{header[:40]!r} and {sequence[:40]!r} are no record", param="codes")
            records.append((header[1:], sequence))
        return tuple(records)

    def compare(self, original: Records, decoded: Records) -> Figure:
        wrong = sum(left != right for left, right in zip(original, decoded)) + abs(
            len(original) - len(decoded)
        )
        return Figure("records that differ", wrong, "", 0)
