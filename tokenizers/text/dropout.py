"""BPE-dropout: another cut of the same text, for training (Provilkov et al., arXiv:1910.13267).

Merges are left out at random, so that a model meets a word in several spellings and learns what its parts
mean. As in SentencePiece a pair that was left out is not tried again unless one of its sides grows.

Which ones are left out is a function of (seed, position, text) alone: the draws are the bytes of SHAKE-128 of
these, so they are the same on any machine and in any order of work.
"""

from __future__ import annotations

import hashlib
import heapq
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ernie5.protocol.errors import InvalidInputError
from ernie5.tokenizers.text.model_file import ModelFile, Piece, PieceType

_DRAWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class BpeDropout:
    """How often a merge is left out.

    Attributes:
        rate: in [0, 1]; 0 is the usual cut, 1 leaves single characters. The paper takes 0.1, and 0.6 for
            Chinese and Japanese.
        seed: of the run.
        position: of the sample in the order of the run, so that a text that comes again is cut anew.
        modalities: what is cut so; other media of the text service keep their tokens.
    """

    modalities: ClassVar[tuple[str, ...]] = ("text", "code")

    rate: float
    seed: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise InvalidInputError(f"dropout rate {self.rate} is outside [0, 1]", param="dropout")
        for name, value in (("seed", self.seed), ("position", self.position)):
            if not 0 <= value < 2**64:
                raise InvalidInputError(f"{name} {value} is outside [0, 2**64)", param="dropout")

    def at(self, position: int) -> BpeDropout:
        """The same for another position."""
        return replace(self, position=position)

    def drops(self, text: str) -> Iterator[bool]:
        """Endless decisions for a text: True leaves the merge out."""
        limit = round(self.rate * 2**32)
        key = struct.pack("<QQ", self.seed, self.position) + text.encode()
        block = 0
        while True:
            stream = hashlib.shake_128(struct.pack("<Q", block) + key).digest(4 * _DRAWS_AT_ONCE)
            for draw in struct.unpack(f"<{_DRAWS_AT_ONCE}I", stream):
                yield draw < limit
            block += 1


class Merges:
    """SentencePiece's BPE, with merges that may be left out.

    Of all neighbours it joins those whose whole has the best score, and the leftmost of equals. Without
    dropout the pieces are those of SentencePiece.
    """

    def __init__(self, model: ModelFile) -> None:
        """``InvalidInputError`` where the model is no BPE, which has no merges."""
        if model.algorithm != "bpe":
            raise InvalidInputError(
                f"dropout leaves out merges, which a {model.algorithm} model doesn't have; use a BPE model",
                param="dropout",
            )
        self._pieces: dict[str, tuple[int, float]] = {
            _plain(piece): (token, piece.score)
            for token, piece in enumerate(model.pieces)
            if piece.type in (PieceType.NORMAL, PieceType.USER_DEFINED)
        }
        # Pieces that a user of SentencePiece defined are never cut nor joined.
        fixed = [_plain(piece) for piece in model.pieces if piece.type == PieceType.USER_DEFINED]
        self._fixed = (
            re.compile("|".join(map(re.escape, sorted(fixed, key=len, reverse=True)))) if fixed else None
        )
        self._bytes = model.byte_pieces()

    def ids(self, text: str, drops: Iterator[bool]) -> list[int]:
        """Ids of a text without U+2581; characters without a piece become the bytes of their UTF-8."""
        if self._fixed is None:
            return self._cut(text, drops)
        ids, start = [], 0
        for found in self._fixed.finditer(text):
            ids += self._cut(text[start : found.start()], drops)
            ids.append(self._pieces[found.group()][0])
            start = found.end()
        return ids + self._cut(text[start:], drops)

    def _cut(self, text: str, drops: Iterator[bool]) -> list[int]:
        symbols = self._merged(text, drops)
        ids: list[int] = []
        for symbol in symbols:
            found = self._pieces.get(symbol)
            if found is not None:
                ids.append(found[0])
            else:
                ids += [self._bytes[byte] for byte in symbol.encode()]
        return ids

    def _merged(self, text: str, drops: Iterator[bool]) -> Sequence[str]:
        pieces = self._pieces
        symbols = list(text)
        count = len(symbols)
        before = list(range(-1, count - 1))
        after = [*range(1, count), -1] if count else []
        # (-score, left, right, whole): the heap's order is SentencePiece's, the leftmost of equal scores.
        agenda: list[tuple[float, int, int, str]] = []

        def consider(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                whole = symbols[left] + symbols[right]
                if whole in pieces:
                    heapq.heappush(agenda, (-pieces[whole][1], left, right, whole))

        for left in range(count - 1):
            consider(left, left + 1)
        while agenda:
            _, left, right, whole = heapq.heappop(agenda)
            # One of the two may have been joined with another neighbour since.
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != whole:
                continue
            if next(drops):
                continue
            symbols[left], symbols[right] = whole, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [symbol for symbol in symbols if symbol]


def _plain(piece: Piece) -> str:
    return piece.text.replace("\u2581", " ")
