"""The text tokenizer: what `ernie-multi tokenizer evaluate text` and `import` do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ernie_multi.recipes.output import show


def evaluate(arguments: Sequence[str] | None = None) -> None:
    """Bytes and characters per token of text files, beside other tokenizers'."""
    parser = argparse.ArgumentParser(
        description="Measure the text tokenizer: bytes and characters per token."
    )
    parser.add_argument("files", nargs="+", type=Path, help="UTF-8 text")
    parser.add_argument("--weights", type=Path, help="text.model; default: the one that ships")
    parser.add_argument("--fallback", choices=("utf-8", "utf-16be"), help="default: the model's own")
    parser.add_argument("--held-out", action="store_true", help="only the lines that training holds out")
    parser.add_argument(
        "--against",
        nargs="+",
        type=Path,
        default=[],
        help="tokenizer.json files of Hugging Face (needs the package tokenizers)",
    )
    parser.add_argument("--out", type=Path, help="file for the figures (JSON)")
    given = parser.parse_args(arguments)

    from ernie5.tokenizers.text.comparison import bytes_per_token, foreign, texts_of
    from ernie5.tokenizers.text.tokenizer import TextTokenizer
    from ernie5.tokenizers.text.train import measure

    tokenizer = TextTokenizer.load(given.weights, fallback=given.fallback)
    texts = texts_of(given.files, held_out=given.held_out)
    figures: dict[str, object] = {name: measure(tokenizer, lines) for name, lines in texts.items()}
    for file in given.against:
        figures[f"against {file}"] = bytes_per_token(foreign(file), texts)
    show(figures, given.out)


def import_text(model: Path, out: Path, fallback: str | None = None) -> None:
    """Make a SentencePiece model of others a text tokenizer, and say what was changed."""
    from ernie5.tokenizers.text.importing import write_import
    from ernie5.tokenizers.text.model_file import as_fallback
    from ernie5.tokenizers.text.tokenizer import TextTokenizer

    changes = write_import(model, out, fallback=as_fallback(fallback) if fallback is not None else None)
    tokenizer = TextTokenizer.load(out)
    print(f"{out}: {tokenizer.vocabulary_size:,} pieces, {tokenizer.fallback}, hash {tokenizer.hash}")
    for change in changes or ["taken as it is"]:
        print(f"  {change}")
