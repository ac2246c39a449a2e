"""Prints the progress of an epoch: a bar (of rich) on a terminal, lines elsewhere. Knows no model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np

__all__ = ["EpochDisplay"]


class EpochDisplay:
    """Prints the steps of one epoch: a line every `log_freq` steps and for the last one, or a bar.

    There is a bar if it is asked for, rich is installed and the output is a terminal.
    """

    def __init__(self, steps: int | None, log_freq: int, bar: bool) -> None:
        self._steps = steps
        self._log_freq = log_freq
        self._started = perf_counter()
        self._shown = 0
        self._last: tuple[int, Mapping[str, Any]] = (0, {})
        self._bar: Any = _bar(steps) if bar and sys.stdout.isatty() else None

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        """Show that `step` steps are done."""
        self._last = (step, values)
        if self._bar is not None:
            self._bar.update(0, completed=step, description=_text(values))
        elif step % self._log_freq == 0 or step == self._steps:
            self._line()

    def finish(self) -> None:
        """Show the last step if it was not shown."""
        if self._bar is None and self._last[0] > self._shown:
            self._line()

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self) -> None:
        step, values = self._last
        self._shown = step
        total = "" if self._steps is None else f"/{self._steps}"
        pace = 1000 * (perf_counter() - self._started) / step
        print(
            " - ".join(part for part in (f"step {step}{total}", _text(values), f"{pace:.0f}ms/step") if part),
            flush=True,
        )


def _bar(steps: int | None) -> Any:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    # Few redraws, because each one takes time from training.
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, refresh_per_second=4)
    bar.add_task("", total=steps)
    bar.start()
    return bar


def _text(values: Mapping[str, Any]) -> str:
    return " - ".join(f"{name}: {_number(value)}" for name, value in values.items())


def _number(value: Any) -> str:
    if isinstance(value, (list, tuple, np.ndarray)):
        return " ".join(map(_number, np.ravel(np.asarray(value))))
    return f"{value:.4f}" if isinstance(value, (float, np.floating)) else str(value)
