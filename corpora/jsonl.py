"""JSONL corpora: one sample a line, its segments as text, as base64 or as paths inside the file's folder.

A line is ``{"segments": [{"modality": "image", "role": "context", "path": "cat.jpg"}, {"modality": "text",
"role": "target", "text": "cat"}], "metadata": {…}, "split": "train"}``; ``metadata`` and ``split`` may be
left out. A segment carries exactly one of ``text``, ``base64`` and ``path``, and perhaps ``content_type``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ernie5.corpora.items import MEDIA_TYPES
from ernie5.corpora.sources import inside, read_medium, split_of
from ernie5.corpora.webdataset import MAX_MEMBER
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.samples import Sample, Segment

_SEGMENT_KEYS = frozenset({"modality", "role", "text", "base64", "path", "content_type", "metadata"})
_LINE_KEYS = frozenset({"segments", "metadata", "split"})


class JsonLines:
    """Samples of one split of a JSONL file, by number; lines are found once and parsed when read.

    Empty lines are skipped. A line that can't be parsed counts as a sample of the split that the file's name
    tells, and raises when it is read.
    """

    def __init__(self, path: Path, split: str) -> None:
        self.path, self.split = path, split
        self.lines: list[tuple[int, int, int, str]] = []
        """Line number from 1, offset, size and task of each sample."""
        default, digest, offset = split_of(path.name), hashlib.sha256(split.encode()), 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip():
                        task, own = _peek(line, default)
                        if own == split:
                            self.lines.append((number, offset, len(line), task))
                    offset += len(line)
        except OSError as error:
            raise InvalidInputError(f"{path} can't be opened ({error.strerror})") from None
        self._fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.lines)

    def fingerprint(self) -> str:
        """Hash of the file's bytes and the split, hex."""
        return self._fingerprint

    def sample(self, index: int) -> Sample:
        """Read a sample.

        Raises:
            InvalidInputError: the line is no sample, or a path leads out of the folder or can't be read;
                the message begins with file and line.
        """
        number, offset, size, task = self.lines[index]
        where = f"{self.path}, line {number}"
        with self.path.open("rb") as file:
            file.seek(offset)
            line = file.read(size)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{where}: not JSON ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get("segments"), list):
            raise InvalidInputError(f"{where}: expected an object with a list 'segments'")
        unknown = set(record) - _LINE_KEYS
        if unknown:
            raise InvalidInputError(
                f"{where}: unknown key {sorted(unknown)[0]!r}; a line has {', '.join(sorted(_LINE_KEYS))}"
            )
        metadata = record.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise InvalidInputError(f"{where}: 'metadata' is a {type(metadata).__name__}, not an object")
        segments = [
            self._segment(entry, f"{where}, segment {n}") for n, entry in enumerate(record["segments"])
        ]
        try:
            return Sample(
                segments=tuple(segments),
                metadata={"task": task, "item": f"line-{number}", "split": self.split, **metadata},
            )
        except ValidationError as error:
            raise InvalidInputError(f"{where}: {_reason(error)}") from None

    def _segment(self, entry: Any, where: str) -> Segment:
        if not isinstance(entry, dict):
            raise InvalidInputError(f"{where}: expected an object, got a {type(entry).__name__}")
        unknown = set(entry) - _SEGMENT_KEYS
        if unknown:
            raise InvalidInputError(
                f"{where}: unknown key {min(unknown)!r}; a segment has {', '.join(sorted(_SEGMENT_KEYS))}"
            )
        if sum(key in entry for key in ("text", "base64", "path")) != 1:
            raise InvalidInputError(f"{where}: a segment carries exactly one of text, base64 and path")
        fields = {
            key: entry[key]
            for key in ("modality", "role", "text", "content_type", "metadata")
            if key in entry
        }
        try:
            if "base64" in entry:
                text = entry["base64"]
                if not isinstance(text, str) or len(text) > MAX_MEMBER * 4 // 3:
                    raise InvalidInputError(
                        f"{where}: 'base64' must be a string of at most {MAX_MEMBER} bytes"
                    )
                fields["data"] = base64.b64decode(text, validate=True)
            if "path" in entry:
                if not isinstance(entry["path"], str):
                    raise InvalidInputError(f"{where}: 'path' must be a string")
                path = inside(self.path.parent, entry["path"], where)
                fields["data"] = read_medium(path, where)
                known = MEDIA_TYPES.get(path.suffix.lstrip(".").lower())
                if known:
                    fields.setdefault("content_type", known[1])
            return Segment(**fields)
        except binascii.Error as error:
            raise InvalidInputError(f"{where}: 'base64' can't be decoded ({error})") from None
        except ValidationError as error:
            raise InvalidInputError(f"{where}: {_reason(error)}") from None


def _peek(line: bytes, default: str) -> tuple[str, str]:
    """Task and split of a line; only lines that name one of them are parsed."""
    if b'"task"' not in line and b'"split"' not in line:
        return "sample", default
    try:
        record = json.loads(line)
        metadata = record.get("metadata") or {}
        return str(metadata.get("task", "sample")), str(
            record.get("split") or metadata.get("split") or default
        )
    except (ValueError, AttributeError, RecursionError):
        return "sample", default


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first["loc"] else first["msg"]
