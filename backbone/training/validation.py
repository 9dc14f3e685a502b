"""Validation losses of sub-models during training: a table, and curves for TensorBoard.

An elastic run trains many models at once, so one curve says little: a sub-model may get worse while the full
model gets better. Each of a few named sub-models is measured on the same held-out rows every so many steps.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ernie5.backbone.elastic.calibration import Loss, measure_loss
from ernie5.backbone.elastic.subnetwork import choose_subnetwork
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.objectives.next_group import MODALITIES
from ernie5.backbone.rows import RowBatch

VALIDATION = "validation.csv"
_COLUMNS = ("step", "model", "loss", *MODALITIES, "exact")


@dataclass(frozen=True)
class Shares:
    """A sub-model by what it keeps; None keeps all."""

    depth: float | None = None
    width: float | None = None
    top_k: int | None = None


NAMED: Mapping[str, Shares] = {
    "full": Shares(),
    "d60": Shares(depth=0.6),
    "w50": Shares(width=0.5),
    "k1": Shares(top_k=1),
    "d60-w50-k1": Shares(0.6, 0.5, 1),
}


class SubModelValidation:
    """Measures named sub-models on held-out rows and appends to ``validation.csv`` and TensorBoard's log.

    Sub-models are chosen without data, as a request that asks for a share gets them: evenly spaced layers,
    and the experts in demand at that step.
    """

    def __init__(
        self,
        batches: Sequence[RowBatch],
        out: Path,
        *,
        every: int,
        named: Mapping[str, Shares] = NAMED,
        tensorboard: bool = True,
    ) -> None:
        """
        Args:
            batches: held-out rows.
            out: the run's folder; the table goes to ``out/validation.csv``, curves to ``out/tensorboard``.
            every: steps between two measurements.
            named: the sub-models, by the name of their curve.

        Raises:
            ValueError: ``every`` is below 1.
        """
        if every < 1:
            raise ValueError(f"validation every {every} steps; give at least 1")
        self.batches, self.every, self.named = batches, every, named
        self.table = out / VALIDATION
        out.mkdir(parents=True, exist_ok=True)
        self._curves = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._curves = SummaryWriter(str(out / "tensorboard"))  # type: ignore[no-untyped-call]

    def resume(self, step: int) -> None:
        """Drop what was measured after ``step``: those steps will be taken again."""
        rows = [row for row in read_validation(self.table) if int(row["step"]) <= step]
        if rows or self.table.exists():
            self._write(rows, "w")

    def after(self, model: Backbone, step: int) -> dict[str, Loss]:
        """Measure if ``step`` is a multiple of ``every``; the loss by sub-model, empty if not measured."""
        return self.measure(model, step) if step % self.every == 0 else {}

    def measure(self, model: Backbone, step: int) -> dict[str, Loss]:
        """Measure now."""
        losses: dict[str, Loss] = {}
        for name, shares in self.named.items():
            chosen = choose_subnetwork(model, shares.depth, shares.width, shares.top_k)
            losses[name] = measure_loss(model, self.batches, chosen)
        rows = [
            {"step": str(step), "model": name, "loss": f"{loss.total:.6f}"}
            | {modality: f"{nats:.6f}" for modality, nats in loss.nats.items()}
            | ({} if loss.exact is None else {"exact": f"{loss.exact:.6f}"})
            for name, loss in losses.items()
        ]
        self._write(rows, "a")
        if self._curves is not None:
            for name, loss in losses.items():
                self._curves.add_scalar(f"validation/{name}", loss.total, step)  # type: ignore[no-untyped-call]
            self._curves.flush()  # type: ignore[no-untyped-call]
        return losses

    def close(self) -> None:
        """Close TensorBoard's log."""
        if self._curves is not None:
            self._curves.close()  # type: ignore[no-untyped-call]

    def _write(self, rows: Sequence[Mapping[str, str]], mode: str) -> None:
        new = mode == "w" or not self.table.exists()
        with self.table.open(mode, newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS, restval="")
            if new:
                writer.writeheader()
            writer.writerows(rows)


def read_validation(table: Path) -> list[dict[str, str]]:
    """Rows of a ``validation.csv``; none if there is no such file."""
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("loss")]
