"""The output of the demos: progress during training, and a summary or a curve after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from time import monotonic
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

__all__ = ["Check", "RaceDisplay", "show_checks", "show_curve", "show_summary"]

SECONDS_BETWEEN_LINES = 5.0
WIDTH, HEIGHT = 72, 10  # of a curve, in characters


class RaceDisplay:
    """Shows how fast each of several trainings is: a table on a terminal, lines if the output is a file or a pipe.

    Args:
        console: prints the output; a quiet one prints nothing.
        total: number of steps of each training.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._next_line = self._begin = monotonic()
        # Only `advance` draws, because a thread that draws takes time from the training that is timed.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> RaceDisplay:
        if not self._console.quiet and self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def advance(self, steps: int, text: str, seconds: Mapping[str, float]) -> None:
        """Show that each training has done `steps` more steps.

        Args:
            steps: their number.
            text: what to show beside it.
            seconds: of each training until now, by its name.
        """
        first = not self._done
        self._done += steps
        whole = (monotonic() - self._begin) / self._done * self._total
        if first:
            self._print(f"By the time of the first {steps} steps of each, this takes {whole:.0f} s on this machine.")
        text += f", step {self._done} of {self._total}"
        rates = {name: f"{self._done / spent:.1f}" for name, spent in seconds.items()}
        if self._console.is_terminal:
            table = Table("", Column("steps/s", justify="right"))
            for name, rate in rates.items():
                table.add_row(name, rate)
            left = whole * (1 - self._done / self._total)
            self._live.update(Group(Text(f"{text}, {left:.0f} s to go"), table), refresh=True)
        elif monotonic() >= self._next_line or self._done == self._total:
            self._print(f"{text}; steps/s: {', '.join(f'{name} {rate}' for name, rate in rates.items())}")
            self._next_line = monotonic() + SECONDS_BETWEEN_LINES

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Check:
    """A check that must pass for the demo to succeed."""

    name: str
    passed: bool


def show_summary(
    console: Console, facts: Mapping[str, str], races: Mapping[str, Sequence[str]], plan: str, checks: Sequence[Check]
) -> None:
    """Print the results of the training.

    Args:
        console: prints the output.
        facts: texts by name.
        races: the columns of the comparison, cells by heading. The first column has the names of the rows.
        plan: lines that explain the buckets.
        checks: the checks with their results.
    """
    side_by_side = Table()
    for index, heading in enumerate(races):
        side_by_side.add_column(heading, justify="right" if index else "left")
    for cells in zip(*races.values(), strict=True):
        side_by_side.add_row(*cells)
    width = max(map(len, facts))
    console.print()
    for name, text in facts.items():
        console.print(f"{name:{width}}  {text}", highlight=False, markup=False, soft_wrap=True)
    console.print(side_by_side)
    console.print("Buckets of dpfuse, in the order in which they are sent:", highlight=False)
    console.print(plan, highlight=False, markup=False, soft_wrap=True)
    show_checks(console, checks)


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print each check with its result."""
    console.print()
    for check in checks:
        result = "[green]passed[/]" if check.passed else "[bold red]FAILED[/]"
        console.print(f"{result}  {check.name}", highlight=False, soft_wrap=True)


def show_curve(console: Console, parts: Mapping[str, Sequence[float]]) -> None:
    """Print the numbers of all parts as one curve, and under it where each part begins.

    Args:
        console: prints the output.
        parts: the numbers, by the name of their part. There is at least one.
    """
    values = [value for part in parts.values() for value in part]
    width = min(WIDTH, len(values))
    edges = [len(values) * column // width for column in range(width + 1)]
    means = [fmean(values[begin:end]) for begin, end in pairwise(edges)]
    highest, step = max(means), (max(means) - min(means)) / (HEIGHT - 1) or 1.0
    rows = [round((highest - mean) / step) for mean in means]
    names, begin = "", 0
    for name, part in parts.items():
        names = names.ljust(begin * width // len(values)) + f"│{name} "
        begin += len(part)
    console.print()
    for row in range(HEIGHT):
        curve = "".join("•" if at == row else " " for at in rows).rstrip()
        console.print(f"{highest - row * step:6.3f} {curve}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{'':6} {names.rstrip()}", highlight=False, markup=False, soft_wrap=True)
