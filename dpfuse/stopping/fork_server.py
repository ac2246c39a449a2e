"""The fork server of multiprocessing, started so that it outlives signals: its children end with it. Knows no loader.

`in_fork_server` is what the server imports.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Collection
from multiprocessing import forkserver, spawn, util
from typing import Any

from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseWarning

__all__ = ["ForkServer"]

IMPORTED = "dpfuse.stopping.in_fork_server"


class ForkServer:
    """Starts the fork server of this process."""

    def __init__(self) -> None:
        self._pid = 0  # of the server that outlives signals
        self._has_warned = False

    def start(self, numbers: Collection[int]) -> None:
        """Start the server if there is none; it begins with these signals blocked. Where it dies of them, warn once."""
        server: Any = forkserver._forkserver
        running: int | None = server._forkserver_pid
        outlives = self._imports(server) if running is None else running == self._pid
        if not outlives:  # it could not unblock them for its children
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        server.ensure_running()
        if outlives:
            self._pid = server._forkserver_pid
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        if not self._has_warned:
            self._has_warned = True
            why = "cannot import dpfuse" if running is None else "was started before dpfuse.stop_on_signals()"
            names = " or ".join(sorted(signal.Signals(number).name for number in numbers))
            warn_at_user(
                DPFuseWarning(
                    f'the workers of this loader begin with "forkserver", and the server of multiprocessing {why}, '
                    f"expected one that outlives {names}: a launcher may send this signal to all processes of a rank, "
                    "and it ends the server and the workers. Install dpfuse, and call stop_on_signals() before any "
                    'process begins with "forkserver"; or give the loader multiprocessing_context="spawn".'
                )
            )

    @staticmethod
    def _imports(server: Any) -> bool:
        """Have the server import what it needs; return whether it can. It has other paths than this process."""
        options: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        words = [spawn.get_executable(), *options, "-c", f"import {IMPORTED}"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        if done.returncode == 0 and IMPORTED not in server._preload_modules:
            forkserver.set_forkserver_preload([*server._preload_modules, IMPORTED])
        return done.returncode == 0
