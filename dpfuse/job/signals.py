"""The signals that a launcher gets: which go on to its ranks, and which ask the job to end. Knows no torchrun.

| Signal | What the launcher does |
|---|---|
| SIGUSR1, SIGUSR2 | sends it to each rank, each time; nothing ends |
| SIGTERM, SIGINT, SIGHUP, SIGQUIT | sends the first one to each rank; kills the ranks that have not ended in time |
| SIGINT after one of these | kills the ranks at once |

A Python program that has a handler for SIGTERM, SIGHUP or SIGQUIT gets it alone, so that it can end its work: the
workers of its DataLoader may die of it. Otherwise the processes that a rank has started get the signal, too.

Meanwhile the launcher supervises its ranks as before. `rank_program.keep_signals` is the other half: it keeps SIGUSR1
and SIGUSR2 for the program of a rank.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

from dpfuse.job.rank_program import KEPT_SIGNALS

__all__ = ["Signals", "held_for_ranks"]

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A wrapper of the launcher may pass on a Ctrl-C that the terminal has sent to both of them.
ONE_DELIVERY = 0.5  # seconds
LEAVING = 10.0  # seconds that the launcher gets to end by itself after its ranks were killed


@contextmanager
def held_for_ranks() -> Iterator[None]:
    """Let processes that this thread starts begin with SIGUSR1 and SIGUSR2 blocked, so that these stay pending."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, KEPT_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signals:
    """Passes signals on to the ranks, while it is entered.

    The main thread may wait in C for a long time, and Python calls handlers there only. So Python writes the numbers of
    signals into a pipe, and another thread reads them.

    Args:
        last: whether the process ends after this. Then SIGUSR1 and SIGUSR2 are ignored from there on.

    Attributes:
        asked: the first signal that has asked the job to end; None if there was none.
    """

    def __init__(self, *, last: bool) -> None:
        self.asked: signal.Signals | None = None
        self._last = last
        self._lock = threading.Lock()
        self._ranks: Sequence[subprocess.Popen[bytes]] | None = None  # None while there are none, and none are started
        self._waiting: set[int] = set()  # for ranks
        self._ends: Collection[int] = ()
        self._spared: Collection[int] = ()
        self._handled: Collection[int] = ()
        self._seconds = 0.0
        self._asked_at = self._deadline = float("inf")
        self._killed = False

    def __enter__(self) -> Signals:
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:  # as torchrun does; no other thread can have handlers
            self._before = {number: signal.getsignal(number) for number in (*KEPT_SIGNALS, *ENDING)}
            self._told, write = os.pipe()
            os.set_blocking(write, False)
            self._write, self._wakeup_before = write, signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            for number in KEPT_SIGNALS:
                signal.signal(number, _do_nothing)
            self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT_SIGNALS)
            self._thread = threading.Thread(target=self._read, daemon=True, name="dpfuse-signals")
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._in_main_thread:
            return
        for number, handler in self._before.items():
            if self._last and number in KEPT_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            elif handler is not None:  # None: not installed by Python
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write)
        self._thread.join()
        os.close(self._told)

    def end_by(self, names: str, seconds: float, spared: Collection[int] = (), handled: Collection[int] = ()) -> str:
        """Say which signals ask the job to end, and how long ranks may take.

        Args:
            names: of the signals, separated by commas.
            seconds: from the first of them.
            spared: those of them that only ranks get, and not the processes that they have started.
            handled: those that only ranks get which have a handler for it.

        Returns:
            The names without SIGHUP if it is ignored, as under `nohup`.
        """
        listed = [name.strip() for name in names.split(",")]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            listed = [name for name in listed if name != signal.SIGHUP.name]
        found = {getattr(signal, name, None) for name in listed}
        self._ends = {number for number in found if isinstance(number, signal.Signals)} - {*KEPT_SIGNALS}
        self._seconds, self._spared, self._handled = seconds, spared, handled
        return ",".join(listed)

    def acts_on(self, number: int) -> bool:
        """Whether this object does all that the signal asks for; otherwise the main thread must raise an exception."""
        return self._ranks is not None or number in KEPT_SIGNALS

    def ranks_start(self) -> None:
        """Take note that ranks are being started."""
        self._ranks = ()

    def ranks_started(self, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        """Take note of the ranks, and pass on what has waited for them."""
        with self._lock:
            self._ranks = ranks
            for number in sorted(self._waiting):
                self._pass_on(number)
            self._waiting.clear()
            if self.asked is not None:
                self._to_ranks(self.asked)

    def ranks_restart(self) -> None:
        """Take note that there are no ranks until others are started."""
        with self._lock:
            self._ranks = None

    def wait_for(self, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        """Wait until ranks that were asked to end have ended, or until their time is over."""
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, self._asked_at + self._seconds - time.monotonic()))

    def _read(self) -> None:
        while True:
            left = self._deadline - time.monotonic()
            ready, _, _ = select.select([self._told], [], [], max(0.0, left) if left < float("inf") else None)
            if not ready:
                self._end()
                continue
            numbers = os.read(self._told, 512)
            if not numbers:  # closed
                return
            for number in numbers:
                self._got(number)

    def _got(self, number: int) -> None:
        now = time.monotonic()
        with self._lock:
            if number in KEPT_SIGNALS:
                if self._ranks:
                    self._pass_on(number)
                else:
                    self._waiting.add(number)
            elif number in self._ends and self.asked is None:
                self.asked = signal.Signals(number)
                self._asked_at, self._deadline = now, now + self._seconds
                self._to_ranks(number)
            elif number == signal.SIGINT and now > self._asked_at + ONE_DELIVERY and not self._killed:
                self._deadline = now

    def _pass_on(self, number: int) -> None:
        for rank in self._ranks or ():
            if _takes(rank.pid, number):
                rank.send_signal(number)

    def _to_ranks(self, number: int) -> None:
        for rank in self._ranks or ():
            if rank.poll() is None:
                alone = number in self._spared or (number in self._handled and _has_handler(rank.pid, number))
                with suppress(ProcessLookupError):
                    (os.kill if alone else os.killpg)(rank.pid, number)

    def _end(self) -> None:
        """Kill the ranks; if the launcher does not end after that, end it as well."""
        assert self.asked is not None
        if self._killed:
            print(
                f"dpfuse.launch: got {self.asked.name}; no rank is left here, but other machines have not ended; this "
                "launcher ends now",
                file=sys.stderr,
                flush=True,
            )
            os._exit(128 + self.asked)
        with self._lock:
            self._killed = True
            self._deadline = time.monotonic() + LEAVING
            self._to_ranks(signal.SIGKILL)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Be a handler: so the signal does not end this process, and processes that it starts have none."""


def _has_handler(pid: int, number: int) -> bool:
    return bool(_masks_of(pid).get("SigCgt", 0) >> (number - 1) & 1)


def _takes(pid: int, number: int) -> bool:
    """Whether a process has blocked or ignored a signal, or has a handler for it; True on a system without /proc."""
    masks = _masks_of(pid)
    # The C library blocks all signals for a moment while a process starts another one. A program blocks no SIGSEGV.
    while masks.get("SigBlk", 0) >> (signal.SIGSEGV - 1) & 1:
        time.sleep(0.001)
        masks = _masks_of(pid)
    return not masks or any(mask >> (number - 1) & 1 for mask in masks.values())


def _masks_of(pid: int) -> dict[str, int]:
    """Return which signals a process has blocked, ignores, and has handlers for; empty if that is not known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    found = (line.split() for line in lines if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")))
    return {name.rstrip(":"): int(mask, 16) for name, mask in found}
