"""Where the output of the ranks goes under `--log_dir`: one file per rank, the first one's on the console too.

Imported only when a job is started: torchrun is not part of `import torch`.
"""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import replace

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

__all__ = ["WorkerLogs", "tail", "worker_log"]

TAIL_LINES = 20
TAIL_BYTES = 64 * 1024


def worker_log(folder: str, local_rank: int) -> str:
    """The log of one rank, named as Paddle's launcher names it."""
    return os.path.join(folder, f"workerlog.{local_rank}")


class WorkerLogs(DefaultLogsSpecs):
    """`folder/workerlog.N` for each local rank N; torchrun's own files stay in `log_dir`.

    Only stdout is sent there: two streams opened on one file would overwrite each other, so rank_program.py lets stderr
    follow.

    Args:
        folder: where the logs go; made if it is not there.
        log_dir: for the ranks' error notes.
        echoed: local ranks whose log is shown on the console as well.
    """

    def __init__(self, folder: str, log_dir: str, echoed: Set[int]) -> None:
        super().__init__(log_dir=log_dir)
        os.makedirs(folder, exist_ok=True)
        self._folder = folder
        self._echoed = echoed

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = {local_rank: worker_log(self._folder, local_rank) for local_rank in envs}
        restarts = int(envs[0].get("TORCHELASTIC_RESTART_COUNT", "0"))
        if restarts:
            # Each start truncates its logs; those of the attempt that failed are the ones to read.
            for log in filter(os.path.exists, logs.values()):
                os.replace(log, f"{log}.attempt{restarts - 1}")
        echo = {local_rank: log for local_rank, log in logs.items() if local_rank in self._echoed}
        return replace(super().reify(envs), stdouts=logs, tee_stdouts=echo)


def tail(path: str) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])
