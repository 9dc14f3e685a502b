"""Command lines of tokenizer recipes that are functions elsewhere: what `ernie-multi tokenizer` calls.

Each function parses the arguments after the tokenizer's name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def train_vision(arguments: Sequence[str] | None = None) -> None:
    """Train the picture tokenizer."""
    parser = argparse.ArgumentParser(description="Train the picture tokenizer.")
    parser.add_argument("--data", type=Path, required=True, help="folder of pictures (*.npz)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="training time, evaluation not counted")
    length.add_argument("--steps", type=int)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)

    import torch

    from ernie5.tokenizers.vision.train import TrainingOptions, train
    from ernie5.tokenizers.vision.training_data import load_training_data

    torch.set_num_threads(given.threads)
    figures = train(
        load_training_data(given.data),
        out=given.out,
        minutes=given.minutes,
        steps=given.steps,
        resume=given.resume,
        options=TrainingOptions(seed=given.seed),
        card={
            "recipe": " ".join(["ernie-multi tokenizer train vision", *map(str, arguments or sys.argv[1:])])
        },
    )
    _show(figures, None)


def evaluate_vision(arguments: Sequence[str] | None = None) -> None:
    """Measure the picture tokenizer on held-out pictures and digits."""
    parser = argparse.ArgumentParser(description="Measure the picture tokenizer on held-out pictures.")
    parser.add_argument("--data", type=Path, required=True, help="folder of pictures (*.npz)")
    parser.add_argument("--weights", type=Path, help="image.safetensors of a run; default: those that ship")
    parser.add_argument(
        "--out", type=Path, help="file for the figures (JSON) and, beside it, a grid of samples"
    )
    given = parser.parse_args(arguments)

    from ernie5.tokenizers.vision.evaluation import evaluate, write_sample_grid
    from ernie5.tokenizers.vision.judge import train_judge
    from ernie5.tokenizers.vision.training_data import load_training_data
    from ernie5.tokenizers.vision.weights_file import load_weights

    model, _ = load_weights(given.weights)
    data = load_training_data(given.data)
    figures = evaluate(model, data, train_judge(data.digits, data.digit_labels))
    if given.out is not None:
        write_sample_grid(model, data, given.out.with_suffix(".png"))
    _show(figures, given.out)


def evaluate_text(arguments: Sequence[str] | None = None) -> None:
    """Bytes and characters per token of text files."""
    parser = argparse.ArgumentParser(
        description="Measure the text tokenizer: bytes and characters per token."
    )
    parser.add_argument("files", nargs="+", type=Path, help="UTF-8 text")
    parser.add_argument("--weights", type=Path, help="text.model; default: the one that ships")
    parser.add_argument("--out", type=Path, help="file for the figures (JSON)")
    given = parser.parse_args(arguments)

    from ernie5.tokenizers.text.tokenizer import TextTokenizer
    from ernie5.tokenizers.text.train import measure

    tokenizer = TextTokenizer.load(given.weights)
    figures = {str(file): measure(tokenizer, file.read_text("utf-8").split("\n")) for file in given.files}
    _show(figures, given.out)


def _show(figures: object, out: Path | None) -> None:
    text = json.dumps(figures, indent=2, ensure_ascii=False)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", "utf-8")
