"""The picture tokenizer: what `ernie-multi tokenizer train vision` and `evaluate vision` do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ernie_multi.recipes.output import command_line, show


def train(arguments: Sequence[str] | None = None) -> None:
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
    parser.add_argument("--structure", type=float, default=0.25, help="weight of 1 - SSIM")
    parser.add_argument("--perceptual", type=float, default=0.0, help="weight of the perceptual loss")
    parser.add_argument("--adversarial", type=float, default=0.0, help="of the adversarial one; try 0.1")
    parser.add_argument("--semantic", type=float, default=0.0, help="of the semantic one; needs the teacher")
    parser.add_argument("--teacher", type=Path, help="its weights' file; default: the installed package's")
    given = parser.parse_args(arguments)

    import torch

    from ernie5.tokenizers.vision.training.data import load_training_data
    from ernie5.tokenizers.vision.training.losses import ExtraLossOptions
    from ernie5.tokenizers.vision.training.teacher import find_teacher, load_teacher
    from ernie5.tokenizers.vision.training.train import TrainingOptions
    from ernie5.tokenizers.vision.training.train import train as train_pictures

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
    figures = train_pictures(
        load_training_data(given.data),
        out=given.out,
        minutes=given.minutes,
        steps=given.steps,
        resume=given.resume,
        options=TrainingOptions(seed=given.seed, structure_weight=given.structure),
        extra=extra,
        teacher=teacher,
        card={"command": command_line("ernie-multi tokenizer train vision", arguments)},
    )
    show(figures, None)


def evaluate(arguments: Sequence[str] | None = None) -> None:
    """Measure the picture tokenizer on held-out pictures and digits."""
    parser = argparse.ArgumentParser(description="Measure the picture tokenizer on held-out pictures.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder of pictures (*.npz)")
    source.add_argument("--pictures", type=Path, help="folder of picture files: PSNR and SSIM of all of them")
    parser.add_argument("--weights", type=Path, help="image.safetensors of a run; default: those that ship")
    parser.add_argument(
        "--out", type=Path, help="file for the figures (JSON) and, beside it, a grid of samples"
    )
    given = parser.parse_args(arguments)

    from ernie5.tokenizers.vision.training.data import load_training_data
    from ernie5.tokenizers.vision.training.evaluation import evaluate as measure
    from ernie5.tokenizers.vision.training.evaluation import evaluate_folder, write_sample_grid
    from ernie5.tokenizers.vision.training.judge import train_judge
    from ernie5.tokenizers.vision.weights_file import load_weights

    model, _ = load_weights(given.weights)
    if given.pictures is not None:
        show(evaluate_folder(model.eval(), given.pictures), given.out)
        return
    data = load_training_data(given.data)
    figures = measure(model, data, train_judge(data.digits, data.digit_labels))
    if given.out is not None:
        write_sample_grid(model, data, given.out.with_suffix(".png"))
    show(figures, given.out)
