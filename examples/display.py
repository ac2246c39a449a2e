"""The output of the demos: progress during training, and a summary or a curve after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["Check", "ProgressDisplay", "show_curve", "show_summary"]

SECONDS_BETWEEN_LINES = 5.0
WIDTH, HEIGHT = 72, 10  # of a curve, in characters


class ProgressDisplay:
    """Shows a bar on a terminal, or a line from time to time if the output is a file or a pipe.

    Args:
        console: prints the output; a quiet one prints nothing.
        total: number of steps.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._next_line = monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # Few redraws, because each one takes time from the training that is timed.
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=2)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, steps: int, text: str) -> None:
        """Show that `steps` more steps are done, with `text`."""
        self._done += steps
        self._bar.update(self._task, advance=steps, description=text)
        if self._console.is_terminal or (monotonic() < self._next_line and self._done < self._total):
            return
        self._console.print(f"{text}, step {self._done} of {self._total}", highlight=False, soft_wrap=True)
        self._next_line = monotonic() + SECONDS_BETWEEN_LINES


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
