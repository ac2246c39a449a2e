"""Handlers of signals that ask all ranks to stop. Knows the wish of this process and its deadline, and no rank."""

from __future__ import annotations

import math
import os
import signal
import threading
from types import FrameType
from typing import Any

from dpfuse.errors import DPFuseError
from dpfuse.stopping.deadline import GRACE, deadline
from dpfuse.stopping.wish import wish
from dpfuse.stopping.workers import workers

__all__ = ["USUAL", "StopSignals", "stop_on_signals"]

USUAL = ("SIGTERM", "SIGUSR1")
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # how another process ends one


def stop_on_signals(*signals: str | int, grace: float = GRACE) -> StopSignals:
    """Let these signals ask all ranks to stop together, instead of ending this process. Call it before the training.

    A handler only notes the wish: see `dpfuse.request_stop`. A handler of the program that was there is called after
    it, and should not end the process. The first SIGINT (Ctrl-C) asks; each further one raises KeyboardInterrupt.
    Processes that this one forks ask nothing. Workers of a DataLoader outlive these signals if they begin while the
    handlers are installed.

    This process also asks without a signal where it knows when the job ends: from `DPFUSE_DEADLINE`, or from Slurm
    (`SLURM_JOB_END_TIME`). It asks once three steps, and 1.5 times the last `dpfuse.save_checkpoint`, no longer fit in.
    And it asks where torchrun has started it and has ended, as SIGUSR1 ends torchrun.

    Args:
        signals: names or numbers; none means "SIGTERM" and "SIGUSR1".
        grace: seconds that the cluster leaves between its signal and the end. Until a checkpoint was saved, it is
            expected to take a quarter of them.

    Returns:
        What takes the handlers off again: its `close()`, or the end of a `with` block.

    Raises:
        TypeError: `grace` is not a number.
        ValueError: there is no such signal, or no process can handle it, as SIGKILL; `grace` is negative or not finite;
            `DPFUSE_DEADLINE` is no time.
        DPFuseError: this is not the main thread, in which alone Python installs handlers; or the handler that is there
            is none of Python.

    Example:
        >>> import os, signal, dpfuse
        >>> with dpfuse.stop_on_signals("SIGUSR1"):
        ...     os.kill(os.getpid(), signal.SIGUSR1)  # as a cluster does
        ...     dpfuse.agree_to_stop()
        True
        >>> dpfuse.forget_stop()
    """
    numbers = [_number_of(each) for each in signals or USUAL]
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise DPFuseError(
            f"stop_on_signals() was called in the thread {thread.name!r}, expected the main thread: Python installs "
            "handlers of signals only there. Call it there, before the training begins."
        )
    for number in numbers:
        if signal.getsignal(number) is None:
            raise DPFuseError(
                f"{signal.Signals(number).name} has a handler that Python has not installed, expected one that can be "
                "called after dpfuse's. Pass other signals."
            )
    if isinstance(grace, bool) or not isinstance(grace, (int, float)):
        raise TypeError(
            f"stop_on_signals() got grace={grace!r} of type {type(grace).__name__}, expected seconds, such as 60."
        )
    if not 0 <= grace < math.inf:
        raise ValueError(f"stop_on_signals() got grace={grace}, expected seconds from 0 on, such as 60.")
    return StopSignals(numbers, float(grace))


class StopSignals:
    """The handlers that `stop_on_signals` has installed."""

    def __init__(self, numbers: list[int], grace: float) -> None:
        deadline.open(grace)
        self._grace = grace
        self._process = os.getpid()
        self._closed = False
        self._came: set[int] = set()
        self._before: dict[int, Any] = {}
        self._numbers = tuple(dict.fromkeys(numbers))
        workers.open(self._numbers)
        for number in self._numbers:
            self._before[number] = signal.getsignal(number)  # first: a signal may come as the handler is installed
            signal.signal(number, self._note)

    def close(self) -> None:
        """Install the handlers again that were there before, except where the program has installed others since."""
        if self._closed:
            return
        self._closed = True  # another handler may still call this one
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)
        workers.close(self._numbers)
        deadline.close(self._grace)

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        before, is_child = self._before[number], os.getpid() != self._process
        if not (is_child or self._closed):
            first = number not in self._came
            self._came.add(number)
            wish.make(signal.Signals(number).name)
            if first and before is signal.default_int_handler:
                return
        elif before == signal.SIG_DFL and (number in ENDING or not is_child):
            # A parent ends its children so. Without a handler, other signals would end the workers of a DataLoader.
            signal.signal(number, before)
            os.kill(os.getpid(), number)
        if callable(before):
            before(number, frame)


def _number_of(one: str | int) -> int:
    try:
        number = signal.Signals[one] if isinstance(one, str) else signal.Signals(one)
    except (KeyError, ValueError):
        raise ValueError(
            f"stop_on_signals() got {one!r}, expected the name or the number of a signal, such as 'SIGUSR1'."
        ) from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(
            f"stop_on_signals() got {number.name}, expected a signal that a process can handle, such as 'SIGTERM': "
            f"{number.name} acts at once."
        )
    return number
