"""Text: SentencePiece pieces with byte fallback; needs no torch."""

from ernie5.tokenizers.text.decoder import IncrementalDecoder
from ernie5.tokenizers.text.dropout import BpeDropout
from ernie5.tokenizers.text.tokenizer import TextTokenizer

__all__ = ["BpeDropout", "IncrementalDecoder", "TextTokenizer"]
