"""How much the features of an encoder tell a reader that is only linear, on pictures never trained on.

Shape legend: n pictures, D features, h x w cells, c classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.tokenizers.vision.model import VisionModel
from ernie5.tokenizers.vision.training.data import DIGIT_GRID, canvases_of
from ernie5.tokenizers.vision.vit.model import VitModel
from ernie5.tokenizers.vision.vit.targets import VitData

Encoder = Callable[[Tensor], Tensor]
"""Pictures float32 ``[n, 3, 8 h, 8 w]`` in [0, 1] to features ``[n, D, h, w]``."""

COLOURS = ("grey", "red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
_TRAINING_DIGITS = 4000


def encoders_of(tokenizer: VisionModel | None, vit: VitModel | None) -> dict[str, Encoder]:
    """``pixels`` (mean colour of each quarter of a cell), ``cnn``, ``vit``, and ``cnn+vit`` side by side."""

    def pixels(pictures: Tensor) -> Tensor:
        return F.pixel_unshuffle(F.avg_pool2d(pictures, 4), 2)

    encoders: dict[str, Encoder] = {"pixels": pixels}
    if tokenizer is not None:
        encoders["cnn"] = lambda pictures: tokenizer.encode(pictures)[0]
    if vit is not None:
        encoders["vit"] = vit
    if tokenizer is not None and vit is not None:
        encoders["cnn+vit"] = lambda pictures: torch.cat([tokenizer.encode(pictures)[0], vit(pictures)], 1)
    return encoders


@torch.no_grad()
def evaluate_features(
    encoders: Mapping[str, Encoder], data: VitData, categories: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Held-out figures of each encoder, with the number of items of each measure.

    * ``concept_across_styles``: a held-out concept's drawing in one style finds the one in another among all
      held-out concepts of that style (nearest by cosine of standardised means); mean over pairs of styles.
    * ``category``: of held-out concepts (where ``categories`` names them), by a linear probe.
    * ``colour``: the main colour of held-out drawings, ``style``: their source, ``digit``: by linear probes.

    A probe is a ridge regression on the means of the four quarters of the picture, fitted on training
    pictures; its penalty is chosen on a fifth of them.
    """
    arrays = data.arrays
    train, test = arrays.pictures, arrays.held_out
    labels = {
        "colour": (main_colour(train), main_colour(test)),
        "style": (arrays.source, arrays.held_out_source),
    }
    if categories:
        kinds = sorted(set(categories.values()))
        labels["category"] = (
            _numbered(data.names, categories, kinds),
            _numbered(data.held_out_names, categories, kinds),
        )
    some = np.linspace(0, len(arrays.digits) - 1, min(_TRAINING_DIGITS, len(arrays.digits))).astype(int)
    digits = canvases_of(arrays.digits[some], DIGIT_GRID), canvases_of(arrays.held_out_digits, DIGIT_GRID)
    labels = {name: both for name, both in labels.items() if (both[1] >= 0).any()}
    figures: dict[str, object] = {
        "items": {
            "concept_across_styles": sum(len(left) for left, _ in _pairs(data)),
            **{name: int((held_out >= 0).sum()) for name, (_, held_out) in labels.items()},
            "digit": len(arrays.held_out_digits),
        },
        "chance": {
            name: round(float(np.bincount(held_out[held_out >= 0]).max() / (held_out >= 0).sum()), 4)
            for name, (_, held_out) in labels.items()
        },
    }
    for name, encoder in encoders.items():
        seen, found = _quarters(encoder, train), _quarters(encoder, test)
        means = found.unflatten(1, (-1, 4)).mean(2)
        scores = {"concept_across_styles": retrieval(means, data)}
        for measure, (known, wanted) in labels.items():
            scores[measure] = probe(seen, known, found, wanted)
        scores["digit"] = probe(
            _quarters(encoder, digits[0]),
            arrays.digit_labels[some],
            _quarters(encoder, digits[1]),
            arrays.held_out_labels,
        )
        figures[name] = {measure: round(score, 4) for measure, score in scores.items()}
    return figures


def probe(seen: Tensor, known: np.ndarray, found: Tensor, wanted: np.ndarray) -> float:
    """Share of ``found`` [m, D] that a linear reader fitted on ``seen`` [n, D] names as ``wanted``.

    Labels are int [n] and [m]; negative ones are left out.
    """
    seen, known = seen[torch.from_numpy(known >= 0)], known[known >= 0]
    found, wanted = found[torch.from_numpy(wanted >= 0)], wanted[wanted >= 0]
    mean, deviation = seen.mean(0), seen.std(0) + 1e-4
    seen = F.pad((seen - mean) / deviation, (0, 1), value=1.0).double()
    found = F.pad((found - mean) / deviation, (0, 1), value=1.0).double()
    classes = torch.eye(int(max(known.max(), wanted.max())) + 1, dtype=torch.float64)
    targets, known_labels = classes[torch.from_numpy(known).long()], torch.from_numpy(known).long()
    held_in = torch.arange(len(seen)) % 5 == 0
    chosen = max(
        _PENALTIES,
        key=lambda penalty: float(
            (
                (seen[held_in] @ _ridge(seen[~held_in], targets[~held_in], penalty)).argmax(1)
                == known_labels[held_in]
            )
            .double()
            .mean()
        ),
    )
    read = (found @ _ridge(seen, targets, chosen)).argmax(1)
    return float((read == torch.from_numpy(wanted).long()).double().mean())


def retrieval(found: Tensor, data: VitData) -> float:
    """Share of held-out pictures whose nearest in another source has their name, by features ``[m, D]``.

    Nearest by cosine, each feature standardised; the mean over ordered pairs of sources.
    """
    found = F.normalize((found - found.mean(0)) / (found.std(0) + 1e-4), dim=1)
    right = [
        float(((found[left] @ found[other].T).argmax(1) == torch.arange(len(left))).double().mean())
        for left, other in _pairs(data)
    ]
    return sum(right) / len(right) if right else float("nan")


def main_colour(pictures: np.ndarray) -> np.ndarray:
    """Indices into :data:`COLOURS` of uint8 ``[n, 3, H, W]``: the hue with the largest sum of saturations.

    Grey where less than 4 % of the picture is as good as fully saturated.
    """
    from PIL import Image

    found = np.zeros(len(pictures), np.int64)
    # Upper ends of the hues, of 256, of COLOURS[1:]; what is above is red again.
    ends = np.array([10, 28, 48, 115, 140, 178, 207, 243])
    for index, picture in enumerate(pictures):
        hue, saturation, value = np.asarray(
            Image.fromarray(picture.transpose(1, 2, 0)).convert("HSV"), np.float64
        ).transpose(2, 0, 1)
        chroma = (saturation * value / 255**2).ravel()
        bins = np.searchsorted(ends, hue.ravel(), side="right") % len(ends)
        sums = np.bincount(bins, chroma, len(ends))
        if sums.sum() >= 0.04 * chroma.size:
            found[index] = 1 + int(sums.argmax())
    return found


def _ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    gram = x.T @ x
    gram.diagonal().add_(penalty * len(x))
    return torch.linalg.solve(gram, x.T @ y)


def _quarters(encoder: Encoder, pictures: np.ndarray) -> Tensor:
    """uint8 ``[n, 3, H, W]`` to the means of each quarter, ``[n, 4 D]``, one feature's quarters in a row."""
    parts = [
        F.adaptive_avg_pool2d(encoder(torch.from_numpy(pictures[start : start + 64]).float() / 255), 2)
        for start in range(0, len(pictures), 64)
    ]
    return torch.cat(parts).flatten(1)


def _pairs(data: VitData) -> list[tuple[list[int], list[int]]]:
    """For every ordered pair of sources: places in the held-out pictures of the names that both have once."""
    source = data.arrays.held_out_source
    by_source: list[dict[str, int]] = []
    for number in range(len(data.arrays.sources)):
        names: dict[str, int] = {}
        for place in np.flatnonzero(source == number).tolist():
            names.setdefault(data.held_out_names[place], place)
        by_source.append(names)
    pairs = []
    for left in by_source:
        for right in by_source:
            shared = [name for name in left if name in right]
            if left is not right and len(shared) > 1:
                pairs.append(([left[name] for name in shared], [right[name] for name in shared]))
    return pairs


def _numbered(names: tuple[str, ...], categories: Mapping[str, str], kinds: list[str]) -> np.ndarray:
    return np.array([kinds.index(categories[name]) if name in categories else -1 for name in names])
