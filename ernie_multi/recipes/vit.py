"""The semantic encoder of pictures: what `ernie-multi tokenizer train vit` and `evaluate vit` do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ernie_multi.recipes.output import command_line, show


def train(arguments: Sequence[str] | None = None) -> None:
    """Train the semantic encoder of the understanding path."""
    parser = argparse.ArgumentParser(description="Train the semantic encoder of pictures.")
    parser.add_argument("--data", type=Path, required=True, help="folder of pictures (*.npz)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument(
        "--teacher",
        help="file of the teacher's weights, or `none` to learn from labels alone; default: that of the "
        "installed package, or none",
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument(
        "--minutes", type=float, help="time of the processor, teacher and evaluation not counted"
    )
    length.add_argument("--steps", type=int)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument(
        "--image", type=Path, help="picture weights to compare with; default: those that ship"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)

    import torch

    from ernie5.tokenizers.vision.training.data import DATA_CARD
    from ernie5.tokenizers.vision.training.teacher import PACKAGE, find_teacher, load_teacher
    from ernie5.tokenizers.vision.vit.targets import load_vit_data
    from ernie5.tokenizers.vision.vit.train import VitOptions, train_vit
    from ernie5.tokenizers.vision.weights_file import load_weights

    torch.set_num_threads(given.threads)
    teacher = None
    if given.teacher != "none":
        path = Path(given.teacher) if given.teacher else find_teacher()
        if path is None:
            print(f"{PACKAGE} is not installed: learning from labels alone", file=sys.stderr)
        else:
            teacher = load_teacher(path)
    figures = train_vit(
        load_vit_data(given.data),
        teacher,
        out=given.out,
        minutes=given.minutes,
        steps=given.steps,
        resume=given.resume,
        options=VitOptions(seed=given.seed),
        card={
            "command": command_line("ernie-multi tokenizer train vit", arguments),
            **DATA_CARD,
        },
        beside=load_weights(given.image)[0],
        categories=_categories(),
    )
    show(figures, None)


def evaluate(arguments: Sequence[str] | None = None) -> None:
    """Measure what the features of the two encoders tell, alone and side by side."""
    parser = argparse.ArgumentParser(description="Measure the encoders of pictures on held-out ones.")
    parser.add_argument("--data", type=Path, required=True, help="folder of pictures (*.npz)")
    parser.add_argument("--weights", type=Path, help="vit.safetensors of a run; default: those that ship")
    parser.add_argument("--image", type=Path, help="picture weights beside them; default: those that ship")
    parser.add_argument("--out", type=Path, help="file for the figures (JSON)")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)

    import torch

    from ernie5.tokenizers.vision.vit.evaluation import encoders_of, evaluate_features
    from ernie5.tokenizers.vision.vit.model import load_vit
    from ernie5.tokenizers.vision.vit.targets import load_vit_data
    from ernie5.tokenizers.vision.weights_file import load_weights

    torch.set_num_threads(given.threads)
    encoders = encoders_of(load_weights(given.image)[0], load_vit(given.weights)[0])
    show(evaluate_features(encoders, load_vit_data(given.data), _categories()), given.out)


def _categories() -> dict[str, str] | None:
    """Unicode's category of each emoji by its name, where the corpora's packages are at hand."""
    from ernie5.corpora.builders.packages import PACKAGES
    from ernie5.corpora.builders.pictures import emoji_categories, emoji_names
    from ernie5.corpora.corpus import data_home

    home = data_home()
    if not all((home / "packages" / PACKAGES[name].file).is_file() for name in ("twemoji", "names")):
        return None
    categories = emoji_categories(home)
    return {
        emoji.names["en"].lower(): categories[emoji.code]
        for emoji in emoji_names(home)
        if emoji.code in categories
    }
