"""What the person at the screen sees: progress while training runs, the summary after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["Check", "ProgressDisplay", "show_summary"]

SECONDS_BETWEEN_LINES = 5.0


class ProgressDisplay:
    """A bar on a terminal; a line now and then where the output goes to a file or a pipe.

    Args:
        console: where to write; a quiet one writes nothing.
        total: steps until the end.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._next_line = monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # Redrawn seldom: whatever is drawn takes its time from the training that is being timed.
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
        """`steps` more are done; `text` says how it goes."""
        self._done += steps
        self._bar.update(self._task, advance=steps, description=text)
        if self._console.is_terminal or (monotonic() < self._next_line and self._done < self._total):
            return
        self._console.print(f"{text}, step {self._done} of {self._total}", highlight=False, soft_wrap=True)
        self._next_line = monotonic() + SECONDS_BETWEEN_LINES


@dataclass(frozen=True)
class Check:
    """Something that must be so for the demonstration to succeed."""

    name: str
    passed: bool


def show_summary(
    console: Console, facts: Mapping[str, str], races: Mapping[str, Sequence[str]], plan: str, checks: Sequence[Check]
) -> None:
    """Everything that the training found, at its end.

    Args:
        console: where to write.
        facts: a name and a text each.
        races: the heading and the cells of each column of the side-by-side table; the first one names the rows.
        plan: lines that explain the buckets.
        checks: what was checked.
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
        verdict = "[green]passed[/]" if check.passed else "[bold red]FAILED[/]"
        console.print(f"{verdict}  {check.name}", highlight=False, soft_wrap=True)
