"""The list of trials: every value of every property occurs in at least five of them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["TRIALS", "Trial", "run_trial", "words_of"]

SEED, COUNT = 56, 60
TARGETS = ("launcher", "one rank", "all", "one rank twice")
MOMENTS = ("forward", "backward", "step", "evaluation", "saving", "window", "start")
KINDS = ("plain", "sharded", "lightning", "trainer")


@dataclass(frozen=True)
class Trial:
    """One training that gets a signal, and goes on.

    Args:
        kind: of the program.
        ranks: that train until the signal.
        rest: ranks that go on.
        workers: of each rank's loader.
        number: the name of the signal.
        target: what gets it.
        moment: when.
        step: in which step of the optimizer, from 0.
        source: the rank in which the moment comes; it sends the signal.
    """

    kind: str
    ranks: int
    rest: int
    workers: int
    number: str
    target: str
    moment: str
    step: int
    source: int

    def __str__(self) -> str:
        return (
            f"{self.kind}, {self.ranks} ranks and then {self.rest}, {self.workers} workers: {self.number} to "
            f"{self.target}, {self.moment} of step {self.step}, rank {self.source}"
        )


def words_of(folder: Path, part: str, trial: Trial, *, with_signal: bool) -> list[str]:
    """Return the arguments of a program: it trains the "first" part of a trial, or the "rest"."""
    return [str(folder), part, trial.kind, str(trial.workers), json.dumps(asdict(trial) if with_signal else None)]


def run_trial(main: Callable[[Path, str, str, int, Trial | None], None]) -> None:
    """Call the function of a program with the arguments that `words_of` has made."""
    folder, part, kind, workers, trial = sys.argv[1:]
    told = json.loads(trial)
    main(Path(folder), part, kind, int(workers), told and Trial(**told))


def _trials() -> list[Trial]:
    chosen = random.Random(SEED)

    def column(*values: object) -> list[object]:
        cells = [values[place % len(values)] for place in range(COUNT)]
        chosen.shuffle(cells)
        return cells

    columns = {
        "kind": column(*KINDS),
        "ranks": column(2, 3),
        "rest": column(1, 2, 3, "as many"),
        "workers": column(0, 2),
        "number": column("SIGUSR1", "SIGTERM"),
        "target": column(*TARGETS),
        "moment": column(*MOMENTS),
        "step": column(0, 1, 2),
        "source": column(0, 1),
    }
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return [Trial(**_possible(row)) for row in rows]  # type: ignore[arg-type]


def _possible(row: dict[str, object]) -> dict[str, object]:
    if row["moment"] == "saving":
        row["source"] = 0  # which writes
    if row["target"] == "all" and row["workers"]:
        row["number"] = "SIGUSR1"  # SIGTERM to every process ends the workers, as torch's own handler wants it
    if row["kind"] == "trainer":
        row["rest"] = "as many"  # it goes on inside an epoch with as many ranks only
    if row["rest"] == "as many":
        row["rest"] = row["ranks"]
    return row


TRIALS = _trials()
