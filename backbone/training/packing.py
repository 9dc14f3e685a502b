"""Packing in order: samples fill rows as they come, so that what a step consumed is one run of positions.

A sample that doesn't fit the rest of a row opens the next one. Order-preserving packing wastes a few per cent
of a row and buys a trainer state of a single number: the next unpacked position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ernie5.backbone.layout import SampleLayout


@dataclass
class PackedStep:
    """Rows of one step, the position after the last sample in them, and how many samples were left out."""

    rows: list[list[SampleLayout]] = field(default_factory=list)
    next_position: int = 0
    skipped: int = 0

    @property
    def used(self) -> int:
        return sum(len(sample) for row in self.rows for sample in row)


def pack_steps(
    samples: Iterator[tuple[int, SampleLayout | None]], rows: int, length: int
) -> Iterator[PackedStep]:
    """Group an ordered stream of (position, sample) into steps of ``rows`` rows of ``length`` positions.

    None stands for a position without a sample (a tombstone, or one longer than a row): it is counted in
    ``skipped``. The last, unfilled step of a finite stream is yielded too.
    """
    step = PackedStep()
    filled = length + 1  # no row is open
    for position, sample in samples:
        if sample is None:
            step.skipped += 1
            step.next_position = position + 1
            continue
        if len(sample) > length:
            raise ValueError(f"sample at {position} has {len(sample)} positions, a row holds {length}")
        if filled + len(sample) > length:
            if len(step.rows) == rows:
                yield step
                step = PackedStep(next_position=position)
            step.rows.append([])
            filled = 0
        step.rows[-1].append(sample)
        filled += len(sample)
        step.next_position = position + 1
    if step.rows:
        yield step
