"""The output of the ranks under `--log_dir`: one file per rank; the console shows that of the first rank, too.

Imported only when a job starts, because `import torch` does not import torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import replace

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

__all__ = ["WorkerLogs", "last_lines", "worker_log"]

LAST_LINES = 20
LAST_BYTES = 64 * 1024


def worker_log(folder: str, local_rank: int) -> str:
    """Return the path of the log of one rank; Paddle's launcher uses the same names."""
    return os.path.join(folder, f"workerlog.{local_rank}")


class WorkerLogs(DefaultLogsSpecs):
    """Sends the output of each local rank N to `folder/workerlog.N`; torchrun's own files stay in `log_dir`.

    torchrun redirects only stdout: two streams opened on one file would overwrite each other. rank_program.py then
    redirects stderr to stdout.

    Args:
        folder: of the logs; made if it does not exist.
        log_dir: for the ranks' error records.
        shown: local ranks whose log the console shows as well.
    """

    def __init__(self, folder: str, log_dir: str, shown: Set[int]) -> None:
        super().__init__(log_dir=log_dir)
        os.makedirs(folder, exist_ok=True)
        self._folder = folder
        self._shown = shown

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = {local_rank: worker_log(self._folder, local_rank) for local_rank in envs}
        restarts = int(envs[0].get("TORCHELASTIC_RESTART_COUNT", "0"))
        if restarts:
            # Each start truncates its logs, so the logs of the failed attempt are renamed.
            for log in filter(os.path.exists, logs.values()):
                os.replace(log, f"{log}.attempt{restarts - 1}")
        shown = {local_rank: log for local_rank, log in logs.items() if local_rank in self._shown}
        return replace(super().reify(envs), stdouts=logs, tee_stdouts=shown)


def last_lines(path: str) -> str:
    """Return the last lines of a log; empty if there is no log."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LAST_LINES:])
