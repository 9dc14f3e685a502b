"""The loop of training runs: as long as asked for, with pauses of its own time, and on from where it was."""

import pytest

from ernie5.tokenizers.vision.training.driver import Length, drive


class Counting:
    """A run whose steps take two seconds each; tells what it was asked to do."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.seconds, self.kept = 0, 0.0, step
        self.told: list[object] = []

    def advance(self, progress: float) -> None:
        self.told.append(progress)
        self.step, self.seconds = self.step + 1, self.seconds + 2

    def note(self) -> str:
        return "well"

    def log(self) -> None:
        self.told.append("log")

    def save(self) -> None:
        self.told.append("save")

    def restore(self) -> None:
        self.step, self.seconds = self.kept, 2.0 * self.kept


@pytest.mark.parametrize("length", [Length(None, 5), Length(10 / 60, None)], ids=["steps", "minutes"])
def test_a_run_is_as_long_as_asked_for_and_pauses(length):
    run = Counting()
    drive(run, "run", length, pause_seconds=4, resume=False)
    assert run.told == [0.0, 0.2, "log", "save", 0.4, 0.6, "log", "save", 0.8]


def test_a_resumed_run_does_what_is_left(capsys):
    run = Counting(step=4)
    drive(run, "some run", Length(None, 6), pause_seconds=3, resume=True)
    assert run.told == [4 / 6, 5 / 6, "log", "save"]
    assert "some run" in (said := capsys.readouterr().out) and "step 6 well" in said
    drive(run, "run", Length(None, 4), pause_seconds=3, resume=True)
    assert len(run.told) == 4, "it was as long as that already"


def test_a_length_is_minutes_or_steps():
    for both in ((None, None), (1.0, 1)):
        with pytest.raises(ValueError, match="either minutes or steps"):
            Length(*both)
    assert Length(None, 0).total == 0
