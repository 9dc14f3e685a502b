"""Text from bytes that arrive piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class IncrementalDecoder:
    """Emits text as ids arrive, never half a character.

    Pieces may be single bytes of a character; these are held back until it is complete. Bytes that can't
    become a character (a model may generate anything) turn into U+FFFD. The concatenation of all that is
    emitted equals decoding all ids at once.
    """

    def __init__(self, piece_bytes: Sequence[bytes]) -> None:
        self._piece_bytes = piece_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: int | Iterable[int]) -> str:
        """The text that these ids complete; may be empty. ``IndexError`` for an id outside the vocabulary."""
        if isinstance(ids, Iterable):
            data = b"".join(self._piece_bytes[int(token)] for token in ids)
        else:
            data = self._piece_bytes[ids]
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", final=True)
