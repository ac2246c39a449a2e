"""Ends a process of the program: after its steps, with the other ranks, or after the ranks that it has started."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dpfuse.commands.doctor.rank_of_process import RankOfProcess
from dpfuse.commands.doctor.run_request import DONE, OVER, RunRequest, all_done
from dpfuse.commands.doctor.waiting_time import WaitingTime

__all__ = ["ProcessEnd"]

LONGEST_WAIT = 60.0  # seconds for the other ranks at the end
LOOK = 0.5  # seconds between two looks whether another rank has ended


class ProcessEnd:
    """Ends this process, so that no code of the program after the loop saves or uploads anything.

    Args:
        request: of the doctor.
        write: called before the end. It writes down what was learnt.

    Attributes:
        rank: that this process is.
        patience: is told of each step.
    """

    def __init__(self, request: RunRequest, write: Callable[[], None]) -> None:
        self.rank = RankOfProcess()
        self.patience = WaitingTime()
        self._request = request
        self._folder = Path(request.folder)
        self._write = write
        self._waits = 0  # the process whose thread waits for the others
        self._ends = threading.Lock()  # held by the thread that ends this process

    def trains(self) -> None:
        """Note that this process is a rank. From then on it ends with the others."""
        self.rank.trains()
        if self._waits != self.rank.process:
            self._waits = self.rank.process
            self.patience.begin()
            threading.Thread(target=self._end_with_the_others, daemon=True).start()

    def after(self, steps: int) -> None:
        """End this process if an optimizer has made so many steps as the doctor wants, or a scaler has skipped them."""
        if steps >= self._request.steps:
            self._end()

    def follow_the_ranks(self) -> None:
        """End this process after the ranks, where the program starts these itself."""
        if self._request.own_ranks:
            threading.Thread(target=self._end_behind_the_ranks, daemon=True).start()

    def _end(self) -> None:
        if not self._ends.acquire(blocking=False):
            time.sleep(LONGEST_WAIT)  # the other thread does it
        self._write()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # An ended rank closes its connections, and another one may still receive.
        draft = self._folder / f"ends{self.rank.number}"
        draft.write_text(str(self.rank.size))
        draft.replace(self._folder / f"{DONE}{self.rank.number}")
        # A rank that has made fewer steps ends itself by then.
        until = time.monotonic() + max(LONGEST_WAIT, 2 * self.patience.seconds)
        while not all_done(self._folder) and time.monotonic() < until:
            time.sleep(0.01)
        while self._request.own_ranks and not self._is_over() and time.monotonic() < until:
            time.sleep(0.01)  # the process that has started this one would go on
        os._exit(0)

    def _end_with_the_others(self) -> None:
        """End this process once it waits for ranks that have ended, since these take no part any more."""
        while not list(self._folder.glob(f"{DONE}*")) or not self.patience.is_over:
            time.sleep(LOOK)
        self._end()

    def _end_behind_the_ranks(self) -> None:
        """End a process that has started the ranks, or belongs to them, before it runs the code that follows them."""
        while not all_done(self._folder) and not self._is_over():
            time.sleep(LOOK / 5)
        if self._waits != os.getpid():
            self._write()
            while not self._is_over():
                time.sleep(LOOK / 5)
            os._exit(0)

    def _is_over(self) -> bool:
        return (self._folder / OVER).exists() or not self._folder.exists()
