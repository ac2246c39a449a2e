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
    face: str, names: list[str], folder: Path, *, ranks: int = 2, plants: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Run programs, or plants, in one job, and return the reports of its ranks by name.

    Args:
        face: whose programs they are.
        names: of the programs or plants.
        folder: where the reports are written.
        ranks: how many there are.
        plants: whether the names are those of plants.

    Raises:
        AssertionError: a rank ended before it had run them all. The text has the end of its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = {"PRETENDED_PEERS": "real", "PRETENDED_JOB": uuid4().hex, "PRETENDED_DEVICES": "1"}
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-m", "tests.pretended_gpu.two_ranks", face]
    processes, outputs = [], [folder / f"{rank}.json" for rank in range(ranks)]
    for rank, output in enumerate(outputs):
        environment = {**os.environ, **job, **device, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = [str(output), *(["--plants"] if plants else []), *names]
        with open(folder / f"{rank}.log", "w") as log:
            processes.append(subprocess.Popen([*command, *arguments], env=environment, stdout=log, stderr=log))
    try:
        for process in processes:
            process.wait(LIMIT)
    finally:
        for process in processes:
            process.kill()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for rank, output in enumerate(outputs):
        lines = output.read_text().splitlines() if output.exists() else []
        for line in lines:
            report = json.loads(line)
            found[report["name"]].append(report)
        said = (folder / f"{rank}.log").read_text()[-3000:]
        assert len(lines) == len(names), f"rank {rank} has run {len(lines)} of {len(names)} programs:\n{said}"
    return found
