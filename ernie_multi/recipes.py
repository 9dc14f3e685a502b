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
    parser.add_argument("--perceptual", type=float, default=0.0, help="weight of the perceptual loss")
    parser.add_argument("--adversarial", type=float, default=0.0, help="of the adversarial one; try 0.1")
    parser.add_argument("--semantic", type=float, default=0.0, help="of the semantic one; needs the teacher")
    parser.add_argument("--teacher", type=Path, help="its weights' file; default: the installed package's")
    given = parser.parse_args(arguments)

    import torch

    from ernie5.tokenizers.vision.losses import ExtraLossOptions
    from ernie5.tokenizers.vision.teacher import find_teacher, load_teacher
    from ernie5.tokenizers.vision.train import TrainingOptions, train
    from ernie5.tokenizers.vision.training_data import load_training_data

    torch.set_num_threads(given.threads)
    extra = teacher = None
    if given.perceptual or given.adversarial or given.semantic:
        extra = ExtraLossOptions(
            perceptual_weight=given.perceptual,
            adversarial_weight=given.adversarial,
            semantic_weight=given.semantic,
        )
        path = given.teacher or find_teacher()
        teacher = None if path is None else load_teacher(path)
    figures = train(
        load_training_data(given.data),
        out=given.out,
        minutes=given.minutes,
        steps=given.steps,
        resume=given.resume,
        options=TrainingOptions(seed=given.seed),
        extra=extra,
        teacher=teacher,
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


def train_video(arguments: Sequence[str] | None = None) -> None:
    """Train the slices that inflate the picture tokenizer over time."""
    parser = argparse.ArgumentParser(description="Train the video tokenizer on frozen picture weights.")
    parser.add_argument("--data", type=Path, required=True, help="folder with motion.npz and the pictures")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--image", type=Path, help="picture weights to inflate; default: those that ship")
    parser.add_argument("--init", type=Path, help="video.safetensors of another run to begin with")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="time of the processor, evaluation not counted")
    length.add_argument("--steps", type=int)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)

    import torch

    from ernie5.tokenizers.vision.video_data import VIDEO_DATA_CARD, load_video_data
    from ernie5.tokenizers.vision.video_train import VideoTrainingOptions, train_video
    from ernie5.tokenizers.vision.weights_file import load_weights

    torch.set_num_threads(given.threads)
    image, card = load_weights(given.image)
    figures = train_video(
        load_video_data(given.data),
        image,
        str(card["sha256"]),
        out=given.out,
        minutes=given.minutes,
        steps=given.steps,
        resume=given.resume,
        start_from=given.init,
        options=VideoTrainingOptions(seed=given.seed),
        card={
            "recipe": " ".join(["ernie-multi tokenizer train video", *map(str, arguments or sys.argv[1:])]),
            **VIDEO_DATA_CARD,
        },
    )
    _show(figures, None)


def evaluate_video(arguments: Sequence[str] | None = None) -> None:
    """Measure the video tokenizer beside the picture tokenizer, frame by frame, on held-out clips."""
    parser = argparse.ArgumentParser(description="Measure the video tokenizer on held-out clips.")
    parser.add_argument("--data", type=Path, required=True, help="folder with motion.npz and the pictures")
    parser.add_argument("--weights", type=Path, help="video.safetensors of a run; default: those that ship")
    parser.add_argument("--image", type=Path, help="their picture weights; default: those that ship")
    parser.add_argument("--frames", type=int, default=12, help="frames of each clip")
    parser.add_argument("--out", type=Path, help="file for the figures (JSON) and, beside it, strips")
    given = parser.parse_args(arguments)

    from ernie5.tokenizers.vision.video_data import load_video_data
    from ernie5.tokenizers.vision.video_evaluation import evaluate_video as evaluate
    from ernie5.tokenizers.vision.video_evaluation import write_strips
    from ernie5.tokenizers.vision.video_weights import load_video_weights
    from ernie5.tokenizers.vision.weights_file import load_weights

    image, card = load_weights(given.image)
    model, _ = load_video_weights(image, str(card["sha256"]), given.weights)
    data = load_video_data(given.data)
    figures = evaluate(model, data, given.frames)
    if given.out is not None:
        write_strips(model, data, given.out.with_suffix(".png"))
    _show(figures, given.out)


def evaluate_text(arguments: Sequence[str] | None = None) -> None:
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
    _show(figures, given.out)


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


def _show(figures: object, out: Path | None) -> None:
    text = json.dumps(figures, indent=2, ensure_ascii=False)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", "utf-8")
