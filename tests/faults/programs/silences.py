"""Ranks that say nothing for a while, and go on; and a network that does."""

from __future__ import annotations

import ctypes
import time

from tests.faults.job import Job, Net

STALL = 2.0  # seconds; the suite's stall_timeout is longer


def stall_short(job: Job) -> None:
    model = job.wrap(Net())
    job.step(model)
    if job.rank == 1:
        job.plant()
        time.sleep(STALL)
    job.steps(model)


def gil_held(job: Job) -> None:
    model = job.wrap(Net())
    job.step(model)
    if job.rank == 1:
        job.plant()
        ctypes.PyDLL(None).usleep(int(STALL * 1e6))  # a PyDLL does not let go of the GIL
    job.steps(model)


def plain(job: Job) -> None:
    job.steps(job.wrap(Net()), 5)


def steps_through_a_fault(job: Job) -> None:
    """Steps before the network has its fault, during it, and after it."""
    model = job.wrap(Net())
    for number in range(40):
        job.step(model)
        time.sleep(0.1)
        if number == 10:
            (job.folder / f"ready-{job.rank}").touch()
