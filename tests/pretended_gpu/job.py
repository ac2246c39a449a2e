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

    After a program with an error the ranks may no longer fit together: those that are left run in another job.

    Args:
        face: whose programs they are.
        names: of the programs.
        folder: where the reports are written.
        ranks: how many there are.
        breaks: whether a rank may end before its report; what was found until then counts, too.

    Raises:
        AssertionError: a rank ended before it had run them all. The text has the end of its output.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    left = list(names)
    while left:
        place = folder / str(len(left))
        place.mkdir()
        run(face, left, place, ranks)
        reports = [[json.loads(line) for line in _lines(place / f"{rank}.json")] for rank in range(ranks)]
        if breaks:
            texts = [_lines(place / f"{rank}.found") for rank in range(ranks)]
            early = [{"findings": each, "error": "", "apart": 0.0} for each in texts]
            return {names[0]: [*early, *(report for each in reports for report in each)]}
        for each in zip(*reports, strict=False):
            found[each[0]["name"]] = list(each)
            if any(report["error"] for report in each):
                break
        said = [(place / f"{rank}.log").read_text()[-3000:] for rank in range(ranks)]
        assert left[0] in found, f"{left[0]!r} ended a rank:\n" + "\n".join(said)
        left = [name for name in left if name not in found]
    return found


def run(face: str, names: list[str], folder: Path, ranks: int) -> None:
    """Run programs in one job. Each rank leaves there its report, its output, and a line for each finding."""
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


def _lines(place: Path) -> list[str]:
    return place.read_text().splitlines() if place.exists() else []
