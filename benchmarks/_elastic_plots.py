"""Pictures of the elastic benchmark: curves of sub-models while training, and what they keep in the end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from ernie5.backbone.training.validation import VALIDATION, read_validation

_COLOURS = {
    "full": "black",
    "d60": "tab:blue",
    "w50": "tab:orange",
    "k1": "tab:green",
    "d60-w50-k1": "tab:red",
}
_ARMS = {"fixed": "fixed twin", "elastic": "elastic"}


def draw_curves(runs: Mapping[str, Path], path: Path) -> None:
    """Validation loss of each named sub-model over the steps, one panel an arm."""
    figure, axes = plt.subplots(1, len(runs), figsize=(5 * len(runs), 3.6), sharey=True, squeeze=False)
    for axis, (arm, folder) in zip(axes[0], runs.items()):
        rows = read_validation(folder / VALIDATION)
        for name, colour in _COLOURS.items():
            own = [row for row in rows if row["model"] == name]
            steps, losses = [int(row["step"]) for row in own], [float(row["loss"]) for row in own]
            axis.plot(steps, losses, marker=".", color=colour, label=name)
        axis.set_title(_ARMS.get(arm, arm))
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("validation loss / blind guess")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_kept(results: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path) -> None:
    """Accuracy kept and rise of the text loss without retraining: mean over seeds, a dot for each."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for shift, (arm, colour) in enumerate((("fixed", "tab:grey"), ("elastic", "tab:blue"))):
        kept, risen = [], []
        for name in names:
            scores = [result["arms"][arm]["scores"] for result in results]
            kept.append([100 * _accuracy(some[name]) / _accuracy(some["full"]) for some in scores])
            risen.append([100 * (some[name]["text"] / some["full"]["text"] - 1) for some in scores])
        for axis, values in ((left, kept), (right, risen)):
            places = [index + 0.4 * shift - 0.2 for index in range(len(names))]
            axis.bar(
                places, [statistics.fmean(seeds) for seeds in values], 0.38, color=colour, label=_ARMS[arm]
            )
            for place, seeds in zip(places, values):
                axis.plot([place] * len(seeds), seeds, "k.", markersize=4)
    for axis, title in ((left, "accuracy kept, %"), (right, "rise of the text loss, %")):
        axis.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=8)
        axis.set_title(title)
        axis.grid(axis="y", alpha=0.3)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _accuracy(score: Mapping[str, float]) -> float:
    return (score["digits"] + score["captions"]) / 2
