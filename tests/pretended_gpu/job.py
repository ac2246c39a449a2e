"""Starts the ranks of a job on pretended GPUs, and reads what they report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

__all__ = ["reports_of"]

LIMIT = 1200  # seconds for all programs of a face


def reports_of(
    face: str, names: list[str], folder: Path, *, ranks: int = 2, breaks: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Run programs in one job, and return the reports of its ranks by name.

    Args:
        face: whose programs they are.
        names: of the programs.
        folder: where the reports are written.
        ranks: how many there are.
        breaks: whether a rank may end before its report; what was found until then counts, too.

    Raises:
        AssertionError: a rank ended before it had run them all. The text has the end of its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = {"PRETENDED_PEERS": "real", "PRETENDED_JOB": uuid4().hex, "PRETENDED_DEVICES": "1"}
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-m", "tests.pretended_gpu.two_ranks", face]
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PRETENDED_FINDINGS": str(folder / f"{rank}.found")}
        with open(folder / f"{rank}.log", "w") as log:
            arguments = [*command, str(folder / f"{rank}.json"), *names]
            environment = {**os.environ, **job, **device, **own}
            processes.append(subprocess.Popen(arguments, env=environment, stdout=log, stderr=log))
    try:
        for process in processes:
            process.wait(LIMIT)
    finally:
        for process in processes:
            process.kill()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for rank in range(ranks):
        reports = [json.loads(line) for line in _lines(folder / f"{rank}.json")]
        for report in reports:
            found[report["name"]].append(report)
        if breaks:
            found[names[0]].append({"findings": _lines(folder / f"{rank}.found"), "error": "", "apart": 0.0})
            continue
        said = (folder / f"{rank}.log").read_text()[-3000:]
        assert len(reports) == len(names), f"rank {rank} has run {len(reports)} of {len(names)} programs:\n{said}"
    return found


def _lines(place: Path) -> list[str]:
    return place.read_text().splitlines() if place.exists() else []
