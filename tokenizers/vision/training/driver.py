"""The loop of a training run: steps until it is as long as wanted, a bar, and pauses to measure and to save.

What a step does and what a checkpoint holds is the run's own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Run(Protocol):
    """A run that may stop after any step and go on from its checkpoint.

    Attributes:
        step: number of steps done.
        seconds: of the processor, spent in them.
    """

    step: int
    seconds: float

    def advance(self, progress: float) -> object:
        """Do one step at ``progress`` in [0, 1) of the run."""

    def note(self) -> str:
        """Where the run stands, in a few figures for the bar."""

    def log(self) -> None:
        """Add a point to the run's curve."""

    def save(self) -> None:
        """Write the checkpoint."""

    def restore(self) -> None:
        """Go on from the checkpoint, if there is one."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is: ``minutes`` of the processor, or ``steps``.

    Raises:
        ValueError: not exactly one of the two is given.
    """

    minutes: float | None
    steps: int | None

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("give either minutes or steps")

    @property
    def total(self) -> float:
        """In seconds, or in steps."""
        return self.minutes * 60 if self.minutes is not None else float(self.steps or 0)

    def spent(self, run: Run) -> float:
        """What of :attr:`total` the run has behind it."""
        return run.seconds if self.minutes is not None else float(run.step)


def drive(run: Run, title: str, length: Length, *, pause_seconds: float, resume: bool) -> None:
    """Advance ``run`` to ``length``, with a log and a checkpoint each ``pause_seconds`` of its own seconds.

    The caller saves the end, with what more it has to say about it.

    Args:
        title: of the bar.
        resume: go on from the run's checkpoint if there is one.
    """
    if resume:
        run.restore()
    next_pause = run.seconds + pause_seconds
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task(title, total=length.total, note="")
        while (spent := length.spent(run)) < length.total:
            run.advance(spent / length.total)
            progress.update(bar, completed=spent, note=f"step {run.step} {run.note()}")
            if run.seconds >= next_pause:
                next_pause = run.seconds + pause_seconds
                run.log()
                run.save()
