"""Models to and from Hugging Face: weights by the backbone, the tokenizer's files beside them."""

from __future__ import annotations

from pathlib import Path

import torch

from ernie5.backbone.elastic.subnetwork import choose_subnetwork
from ernie5.backbone.interop import UpcycledExperts, export_model, import_model
from ernie5.backbone.interop.tokenizer import SENTENCEPIECE_FILE, padded, why_not_lossless, write_tokenizer
from ernie5.backbone.training.checkpoint import load_model, save_model
from ernie5.protocol.errors import TokenizerMismatchError
from ernie5.protocol.vocabulary import UnifiedVocabulary
from ernie5.tokenizers.text.tokenizer import WEIGHTS, TextTokenizer
from ernie_multi.models import find_model, write_whole

TEXT_MODEL = "text.model"


def export_hf(
    model: Path | None,
    out: Path,
    *,
    depth: float | None = None,
    width: float | None = None,
    top_k: int | None = None,
    dtype: str = "float32",
) -> None:
    """Write the text path of a model, or of a sub-network of it, as a Hugging Face folder.

    Raises:
        InvalidInputError: no model, one that the format can't express, or a folder that isn't empty.
        TokenizerMismatchError: the model was trained with another text tokenizer than is at hand.
    """
    folder = find_model(model)
    backbone, hashes = load_model(folder)
    text = text_model(folder)
    tokenizer = TextTokenizer(text)
    expected = hashes.get("text")
    if expected is not None and tokenizer.hash != expected:
        raise TokenizerMismatchError(
            f"the model in {folder} was trained with text tokenizer {expected[:12]}, at hand is "
            f"{tokenizer.hash[:12]}; put its file into the model's folder as {TEXT_MODEL}"
        )
    chosen = None
    if not (depth is width is top_k is None):
        chosen = choose_subnetwork(backbone, depth, width, top_k)

    def write(target: Path) -> None:
        export_model(backbone, target, subnetwork=chosen, dtype=getattr(torch, dtype))
        write_tokenizer(text, UnifiedVocabulary(backbone.config.text_vocabulary), target)

    write_whole(out, write)
    print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


def import_hf(
    source: Path,
    out: Path,
    *,
    experts: int | None = None,
    top_k: int | None = None,
    expert_width: int | None = None,
    seed: int = 0,
) -> None:
    """Write a Hugging Face folder of the Ernie 4.5 family as a model folder, a start for training.

    The options give routed experts to a dense network. The folder's SentencePiece model becomes the text
    tokenizer; where there is none, or none that keeps text as it is, a line says so and the model folder has
    no text tokenizer.

    Raises:
        InvalidInputError: no such folder, a network that can't be expressed, or a folder that isn't empty.
    """
    upcycled = None
    if not (experts is top_k is expert_width is None):
        plain = UpcycledExperts()
        upcycled = UpcycledExperts(experts or plain.count, top_k or plain.top_k, expert_width)
    model = import_model(source, experts=upcycled, seed=seed)
    text, note = _foreign_tokenizer(source, model.config.text_vocabulary)

    def write(target: Path) -> None:
        save_model(target, model, {} if text is None else {"text": TextTokenizer(text).hash})
        if text is not None:
            (target / TEXT_MODEL).write_bytes(text)

    write_whole(out, write)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{out}: {parameters:,} parameters; {note}")


def text_model(folder: Path) -> bytes:
    """The SentencePiece file that a model was trained with: its folder's own, else the shipped one."""
    own = folder / TEXT_MODEL
    return (own if own.is_file() else WEIGHTS / TEXT_MODEL).read_bytes()


def _foreign_tokenizer(source: Path, size: int) -> tuple[bytes | None, str]:
    """The text tokenizer of an imported folder, and a line about it."""
    path = source / SENTENCEPIECE_FILE
    if not path.is_file():
        return None, f"no text tokenizer: {source} has no {SENTENCEPIECE_FILE}"
    try:
        model = path.read_bytes()
        reason = why_not_lossless(model)
        if reason is not None:
            return None, f"no text tokenizer: that of {source} can't be one, {reason}"
        model = padded(model, size)
        return model, f"text tokenizer {TextTokenizer(model).hash[:12]} of {size} pieces"
    except (ValueError, RuntimeError) as error:
        return None, f"no text tokenizer: that of {source} can't be one, {error}"
