"""Progress of a build: bars on a terminal, lines elsewhere, one place to keep the builders free of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


def progress_bars() -> Progress:
    """Bars on standard error, so that standard output stays free for results."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


class Report:
    """What a builder tells of itself; ``progress`` may be ``None`` for silence."""

    def __init__(self, progress: Progress | None, name: str) -> None:
        self.progress, self.name = progress, name

    def track(self, things: Iterable[T], step: str, total: int | None = None) -> Iterator[T]:
        """Pass ``things`` on, moving a bar named after the corpus and ``step``."""
        if self.progress is None:
            yield from things
            return
        task = self.progress.add_task(f"{self.name}: {step}", total=total)
        for thing in things:
            yield thing
            self.progress.advance(task)
        self.progress.update(task, total=self.progress.tasks[task].completed)

    def say(self, line: str) -> None:
        """One line above the bars."""
        if self.progress is not None:
            self.progress.console.print(f"{self.name}: {line}")
