"""The video tokenizer: what `ernie-multi tokenizer train video` and `evaluate video` do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ernie_multi.recipes.output import command_line, show


def train(arguments: Sequence[str] | None = None) -> None:
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

    from ernie5.tokenizers.vision.video.data import VIDEO_DATA_CARD, load_video_data
    from ernie5.tokenizers.vision.video.train import VideoTrainingOptions, train_video
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
            "command": command_line("ernie-multi tokenizer train video", arguments),
            **VIDEO_DATA_CARD,
        },
    )
    show(figures, None)


def evaluate(arguments: Sequence[str] | None = None) -> None:
    """Measure the video tokenizer beside the picture tokenizer, frame by frame, on held-out clips."""
    parser = argparse.ArgumentParser(description="Measure the video tokenizer on held-out clips.")
    parser.add_argument("--data", type=Path, required=True, help="folder with motion.npz and the pictures")
    parser.add_argument("--weights", type=Path, help="video.safetensors of a run; default: those that ship")
    parser.add_argument("--image", type=Path, help="their picture weights; default: those that ship")
    parser.add_argument("--frames", type=int, default=12, help="frames of each clip")
    parser.add_argument("--out", type=Path, help="file for the figures (JSON) and, beside it, strips")
    given = parser.parse_args(arguments)

    from ernie5.tokenizers.vision.video.data import load_video_data
    from ernie5.tokenizers.vision.video.evaluation import evaluate_video, write_strips
    from ernie5.tokenizers.vision.video.weights import load_video_weights
    from ernie5.tokenizers.vision.weights_file import load_weights

    image, card = load_weights(given.image)
    model, _ = load_video_weights(image, str(card["sha256"]), given.weights)
    data = load_video_data(given.data)
    figures = evaluate_video(model, data, given.frames)
    if given.out is not None:
        write_strips(model, data, given.out.with_suffix(".png"))
    show(figures, given.out)
