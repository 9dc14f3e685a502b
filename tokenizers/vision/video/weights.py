"""Weights of the video tokenizer on disk: the earlier slices alone, beside a card that names their picture
weights.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ernie5.tokenizers.vision.model import VisionModel
from ernie5.tokenizers.vision.video.model import TemporalConfig, VideoModel
from ernie5.tokenizers.vision.weights_file import SHIPPED_WEIGHTS as IMAGE_WEIGHTS
from ernie5.tokenizers.vision.weights_file import read_with_card, write_with_card

# Part of the tokenizer's hash: raise it when the files' reading or the meaning of codes change.
FORMAT_VERSION = 1
VIDEO_FILE = "video.safetensors"
SHIPPED_WEIGHTS = IMAGE_WEIGHTS.with_name(VIDEO_FILE)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VideoWeights:
    """A model and what names its weights in a tokenizer's hash."""

    model: VideoModel
    identity: str


def save_video_weights(model: VideoModel, image_digest: str, path: Path, card: dict[str, object]) -> None:
    """Write ``path`` (float16 safetensors) and the card beside it (``.json``)."""
    head = {
        "format_version": FORMAT_VERSION,
        "config": model.config.as_json(),
        "image_sha256": image_digest,
    }
    write_with_card(model.past.state_dict(), path, head, card)


def load_video_weights(
    image: VisionModel, image_digest: str | None, path: Path | None = None
) -> tuple[VideoModel, dict[str, object]]:
    """A model that inflates ``image`` by the slices in ``path`` (those that ship if None), and their card.

    Args:
        image_digest: sha256 of the picture weights, which the slices were trained for; None takes any of
            the same sizes, to train on.

    Raises:
        FileNotFoundError: weights or card are missing.
        ValueError: another format version, damaged weights, or weights for other picture weights.
    """
    path = path or SHIPPED_WEIGHTS
    card, tensors = read_with_card(path, FORMAT_VERSION)
    if image_digest is not None and card.get("image_sha256") != image_digest:
        raise ValueError(
            f"{path} inflates picture weights with sha256 {card.get('image_sha256')}, these have "
            f"{image_digest}; train it again with `ernie-multi tokenizer train video`"
        )
    model = VideoModel(image, TemporalConfig(tuple(card["config"]["kernels"])))
    expected = {name: value.shape for name, value in model.past.state_dict().items()}
    if {name: value.shape for name, value in tensors.items()} != expected:
        raise ValueError(f"{path} does not fit a picture network of {image.config}")
    model.past.load_state_dict(tensors)
    return model.eval(), card


def find_video_weights(
    image: VisionModel, image_digest: str, image_path: Path | None = None
) -> VideoWeights | None:
    """The video weights beside picture weights (those that ship if None), where they were trained for them.

    Others are left out with a warning: pictures are served all the same.
    """
    path = (image_path or IMAGE_WEIGHTS).with_name(VIDEO_FILE)
    if not path.is_file():
        return None
    try:
        model, card = load_video_weights(image, image_digest, path)
    except (ValueError, FileNotFoundError) as error:
        logger.warning("no video: %s", error)
        return None
    return VideoWeights(model, f"video/{FORMAT_VERSION}/{card['sha256']}")
