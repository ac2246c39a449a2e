"""Jobs in which nothing goes wrong end well, every one of them."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.distributed.processes import SCRIPTS, launch
from tests.faults.player import STAGES, Stage

JOBS = int(os.environ.get("DPFUSE_TEST_JOBS", "40"))
LAUNCHED = 10  # one job in so many is started by the launcher, which takes far longer than to fork


def forked(stage: Stage) -> tuple[object, ...]:
    """One job whose ranks are ordinary programs; their exit codes."""
    with tempfile.TemporaryDirectory(prefix="dpfuse-job-") as folder:
        seen = stage.ask(
            name="plain", face="dpfuse", ranks=[0, 1], size=2, folder=folder, timeout=60.0, limit=60.0, whole=True,
            variables={"GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
        return (*seen["codes"], seen["left"])


def launched() -> tuple[object, ...]:
    """One job under the launcher; its exit code and what it printed as an error."""
    done = launch("--nproc_per_node=2", SCRIPTS / "plain_job.py", warm=False)
    return (done.returncode, done.stderr)


def jobs_of(stage: Stage, count: int) -> Counter[tuple[object, ...]]:
    """How that many jobs ended."""
    return Counter(launched() if number % LAUNCHED == 0 else forked(stage) for number in range(count))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_ordinary_job_ends_well() -> None:
    began = time.monotonic()
    with ExitStack() as cleanup:
        stages = [Stage() for _ in range(STAGES)]
        for stage in stages:
            cleanup.callback(stage.close)
        pool = cleanup.enter_context(ThreadPoolExecutor(STAGES))
        counts = [JOBS // STAGES + (number < JOBS % STAGES) for number in range(STAGES)]
        ended = sum(pool.map(jobs_of, stages, counts), start=Counter[tuple[object, ...]]())
    print(f"{JOBS} jobs in {time.monotonic() - began:.0f} s: {dict(ended)}")  # shown by pytest -rP
    assert ended.keys() == {(0, 0, 0), (0, "")}
    assert ended.total() == JOBS
