"""Text from pieces that arrive one by one."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import numpy as np

from ernie5.tokenizers.text.model_file import Fallback


class IncrementalDecoder:
    """Emits text as ids arrive, never half a character.

    Pieces may be single bytes of a character; these are held back until it is complete. Bytes that can't
    become a character (a model may generate anything) turn into U+FFFD. The concatenation of all that is
    emitted equals decoding all ids at once.
    """

    def __init__(
        self,
        piece_bytes: Sequence[bytes],
        is_byte: np.ndarray | None = None,
        fallback: Fallback = "utf-8",
    ) -> None:
        """``piece_bytes`` are the pieces in UTF-8, the single bytes as they are.

        In UTF-16BE the bytes of a character are of another encoding than the pieces around them, so
        ``is_byte`` (bool ``[V]``) is needed to tell them apart.
        """
        self._piece_bytes = piece_bytes
        self._is_byte = is_byte if fallback == "utf-16be" else None
        self._decoder = codecs.getincrementaldecoder(fallback)("replace")

    def push(self, ids: int | Iterable[int]) -> str:
        """The text that these ids complete; may be empty. ``IndexError`` for an id outside the vocabulary."""
        tokens = [int(token) for token in ids] if isinstance(ids, Iterable) else [ids]
        if self._is_byte is None:
            return self._decoder.decode(b"".join([self._piece_bytes[token] for token in tokens]))
        shown: list[str] = []
        for token in tokens:
            piece = self._piece_bytes[token]
            if self._is_byte[token]:
                shown.append(self._decoder.decode(piece))
            else:  # a whole piece ends what was begun
                shown += (self.finish(), piece.decode())
        return "".join(shown)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character, else nothing."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
