"""Trains the text tokenizer: SentencePiece BPE with byte fallback, from plain text files.

``python -m ernie5.tokenizers.text.train en.txt zh.txt code.txt --names names.txt`` writes ``text.model`` and
its card ``text.json``. One CPU core, ten seconds, deterministic: equal files give an equal model.
``--fallback utf-16be`` writes characters without a piece as the ERNIE 5.0 report does: two bytes for one of
Chinese, where UTF-8 has three. Line ends and tabs, which would be two as well, then are pieces.

Each file has the same budget of bytes, so that a large one can't crowd the vocabulary; a file that mixes
simplified and traditional Chinese counts as two, for the same reason. A small file of names (of emoji, of
tasks, spoken words; one a line) is repeated, and all its characters become pieces, because short answers are
made of them. Blocks of lines are held out for the card's bytes per token.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from ernie5.protocol.errors import InvalidInputError
from ernie5.tokenizers.text.model_file import FALLBACKS, Fallback, with_fallback
from ernie5.tokenizers.text.tokenizer import MAX_TEXT_BYTES, WEIGHTS, TextTokenizer

VOCABULARY_SIZE = 8192
CHARACTERS = 4200
BUDGET_BYTES = 3_000_000
LINES_PER_BLOCK = 40
HELD_OUT_EVERY = 40
MAX_PIECE_LENGTH = 16
NAMES_REPEATED = 8
MAX_LINE_BYTES = 4096
LINE_CHARACTERS = ["\n", "\t", "\r"]

# Frequent characters that only one of the two scripts uses.
_SIMPLIFIED = frozenset("这们国时来个发会说过对学样还进种从后没为无开关见车东马书长门问间语话让认识请给经结")
_TRADITIONAL = frozenset("這們國時來個發會說過對學樣還進種從後沒為無開關見車東馬書長門問間語話讓認識請給經結")

# Always pieces, however rare in the files: ASCII, the letters of western Europe and of Russian, and the
# punctuation of Chinese. Spoken words in these languages are short, and bytes would double their tokens.
REQUIRED_CHARACTERS = "".join(
    [
        *map(chr, range(0x21, 0x7F)),
        *map(chr, range(0xC0, 0x100)),
        *map(chr, range(0x410, 0x450)),
        "Ёё¡¿«»“”‘’—…·、。〈〉《》「」『』【】！（），：；？～",
    ]
)


@dataclass(frozen=True, slots=True)
class Source:
    """The lines of one kind of text, apart for training and for measuring."""

    name: str
    training: list[str]
    held_out: list[str]


def read_lines(file: Path) -> list[str]:
    """The lines of a UTF-8 file; ``InvalidInputError`` for other bytes or no file."""
    try:
        return file.read_bytes().decode().split("\n")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise InvalidInputError(f"can't read {file}: {error.strerror}") from None


def read_sources(file: Path) -> list[Source]:
    """The file's blocks of lines; two sources where it mixes the scripts of Chinese."""
    lines = read_lines(file)
    kinds: dict[str, list[list[str]]] = {}
    for start in range(0, len(lines), LINES_PER_BLOCK):
        block = lines[start : start + LINES_PER_BLOCK]
        kinds.setdefault(_script(block, file.stem), []).append(block)
    return [
        Source(
            name,
            [line for index, block in enumerate(blocks) if index % HELD_OUT_EVERY for line in block],
            [line for block in blocks[::HELD_OUT_EVERY] for line in block],
        )
        for name, blocks in sorted(kinds.items())
    ]


def _script(block: Sequence[str], name: str) -> str:
    counts = Counter("".join(block))
    simplified = sum(counts[character] for character in _SIMPLIFIED)
    traditional = sum(counts[character] for character in _TRADITIONAL)
    return f"{name}-traditional" if traditional > simplified else name


def within_budget(lines: Sequence[str], budget: int) -> list[str]:
    """Lines spread evenly over all of them, with at most ``budget`` bytes together."""
    size = sum(len(line.encode()) for line in lines)
    if size <= budget:
        return list(lines)
    kept, taken, seen = [], 0, 0
    for line in lines:
        bytes_here = len(line.encode())
        seen += bytes_here
        if taken + bytes_here <= budget * seen / size:
            kept.append(line)
            taken += bytes_here
    return kept


def _coverage(lines: Iterable[str], characters: int) -> float:
    """The share of text that its ``characters`` most frequent characters cover."""
    counts = Counter("".join(lines))
    return sum(count for _, count in counts.most_common(characters)) / max(1, counts.total())


def train(
    files: Sequence[Path | str],
    out: Path | str = WEIGHTS,
    vocabulary_size: int = VOCABULARY_SIZE,
    *,
    names: Path | str | None = None,
    budget: int = BUDGET_BYTES,
    characters: int = CHARACTERS,
    fallback: Fallback = "utf-8",
) -> Path:
    """Train on UTF-8 text ``files``; writes ``text.model`` and ``text.json`` into the folder ``out``.

    All characters of ``names`` and about ``characters`` others, the most frequent, become pieces; the rest of
    the vocabulary is 256 bytes and merges. ``fallback`` encodes characters without a piece.

    Raises:
        InvalidInputError: a file isn't UTF-8 (its name is in the message), or there is too little text for
            ``vocabulary_size``.
    """
    sources = [source for file in files for source in read_sources(Path(file))]
    samples = {source.name: within_budget(source.training, budget) for source in sources}
    short = read_lines(Path(names)) if names is not None else []
    required = "".join(sorted(set(REQUIRED_CHARACTERS).union(*short) - {" "}))
    lines = [
        line
        for sample in (*samples.values(), short * NAMES_REPEATED)
        for line in sample
        if 0 < len(line.encode()) <= MAX_LINE_BYTES
    ]
    model = io.BytesIO()
    more: dict[str, Any] = {"user_defined_symbols": LINE_CHARACTERS} if fallback == "utf-16be" else {}
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary_size,
            character_coverage=_coverage(lines, characters),
            required_chars=required,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentencepiece_length=MAX_PIECE_LENGTH,
            # Beginnings, ends and padding are markers of the unified vocabulary; only <unk> has to be.
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=1,
            minloglevel=1,
            **more,
        )
    except RuntimeError as error:
        raise InvalidInputError(
            f"can't train {vocabulary_size} pieces on {len(lines)} lines: {error}"
        ) from None
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.model"
    path.write_bytes(with_fallback(model.getvalue(), fallback))
    tokenizer = TextTokenizer.load(path)
    card = {
        "kind": f"SentencePiece BPE, byte fallback in {fallback.upper()}, identity normaliser",
        "vocabulary_size": tokenizer.vocabulary_size,
        "hash": tokenizer.hash,
        "command": "python -m ernie5.tokenizers.text.train "
        + " ".join(Path(file).name for file in files)
        + (f" --names {Path(names).name}" if names is not None else "")
        + (f" --fallback {fallback}" if fallback != "utf-8" else ""),
        "characters": characters,
        "budget_bytes_per_source": budget,
        "files": {
            Path(file).name: {
                "bytes": Path(file).stat().st_size,
                "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest(),
            }
            for file in (*files, *([names] if names is not None else []))
        },
        "training_bytes": {
            name: sum(len(line.encode()) for line in sample) for name, sample in samples.items()
        },
        "held_out": {source.name: measure(tokenizer, source.held_out) for source in sources},
        **({"names": measure(tokenizer, short)} if short else {}),
    }
    (folder / "text.json").write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def measure(tokenizer: TextTokenizer, lines: Sequence[str]) -> dict[str, float | int]:
    """Bytes and characters per token, and the share of tokens that are single fallback bytes."""
    text = "\n".join(lines)
    ids = np.concatenate([tokenizer.ids(part) for part in _portions(text)])
    line_end = tokenizer.ids("\n")
    # A line end, which is a byte too, is no character that the vocabulary should have had.
    fallback = int(tokenizer.is_byte[ids].sum()) - text.count("\n") * int(tokenizer.is_byte[line_end].sum())
    return {
        "bytes": len(text.encode()),
        "tokens": len(ids),
        "bytes_per_token": round(len(text.encode()) / len(ids), 3),
        "characters_per_token": round(len(text) / len(ids), 3),
        "fallback_share": round(fallback / len(ids), 5),
    }


def _portions(text: str) -> Iterator[str]:
    """Portions, ended by a line end where there is one, that the tokenizer takes."""
    size = MAX_TEXT_BYTES // 4  # a character has at most four bytes
    start = 0
    while start < len(text) or start == 0:
        end = start + size
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the text tokenizer on plain text files.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--names", type=Path, help="a file of short texts, one a line")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--vocabulary-size", type=int, default=VOCABULARY_SIZE)
    parser.add_argument("--characters", type=int, default=CHARACTERS)
    parser.add_argument(
        "--fallback", choices=FALLBACKS, default="utf-8", help="encoding of characters without a piece"
    )
    arguments = parser.parse_args()
    path = train(
        arguments.files,
        arguments.out,
        arguments.vocabulary_size,
        names=arguments.names,
        characters=arguments.characters,
        fallback=arguments.fallback,
    )
    print(path)
    print((path.parent / "text.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
