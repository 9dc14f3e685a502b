"""Other tokenizers on the same text: bytes per token, and whether the text comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.tokenizers.text.train import LINES_PER_BLOCK, read_lines, read_sources


@dataclass(frozen=True, slots=True)
class ForeignTokenizer:
    """Encode, decode and the number of pieces of another tokenizer."""

    vocabulary_size: int
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


def foreign(file: Path) -> ForeignTokenizer:
    """A ``tokenizer.json`` of Hugging Face, without the markers that it puts around a text.

    Raises:
        UnavailableError: the package ``tokenizers`` is missing.
        InvalidInputError: no such file, or no tokenizer in it.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UnavailableError("to compare, install tokenizers: pip install 'ernie-multi[interop]'") from None
    if not file.is_file():
        raise InvalidInputError(f"there is no file {file}", param="against")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises Exception itself
        raise InvalidInputError(f"{file} holds no tokenizer: {error}", param="against") from None
    return ForeignTokenizer(
        tokenizer.get_vocab_size(),
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
    )


def texts_of(files: Sequence[Path], *, held_out: bool = False) -> dict[str, list[str]]:
    """Name to lines: of whole files, or of the sources' lines that training holds out."""
    if held_out:
        return {source.name: source.held_out for file in files for source in read_sources(file)}
    return {str(file): read_lines(file) for file in files}


def bytes_per_token(tokenizer: ForeignTokenizer, texts: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Bytes per token of each text, in blocks of lines, and whether each block came back exactly.

    Blocks, because tokenizers that cut no words apart before merging take time that grows with the square of
    a text.
    """
    figures: dict[str, object] = {"vocabulary_size": tokenizer.vocabulary_size}
    exact = True
    for name, lines in texts.items():
        blocks = [
            "\n".join(lines[start : start + LINES_PER_BLOCK]) + "\n"
            for start in range(0, len(lines), LINES_PER_BLOCK)
        ]
        ids = [tokenizer.encode(block) for block in blocks]
        exact = exact and all(tokenizer.decode(each) == block for each, block in zip(ids, blocks))
        size = sum(len(block.encode()) for block in blocks)
        figures[name] = round(size / max(1, sum(map(len, ids))), 3)
    figures["exact"] = exact
    return figures
