"""Plays faults on stages: two at a time, each in a folder of its own, and judges what came of them."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.distributed.machines import namespaces
from tests.distributed.processes import clean_environment, python
from tests.faults.fault import Fault, Run, Verdict
from tests.faults.job import TORCH
from tests.faults.judge import judge
from tests.faults.network import CABLES

__all__ = ["Stage", "playing"]

SIZE = 2
STAGES = 2
# In seconds. Ours must end by themselves; torch's end by the time-out of their group, which is 1800 by default.
TIMEOUTS = dict.fromkeys(TORCH, 15.0)
OURS = 120.0


class Stage:
    """A process that forks the ranks of one fault after another; see `tests.faults.stage`.

    Args:
        entry: a command that the process is started by, to be somewhere else.
    """

    def __init__(self, *entry: str) -> None:
        self._process = subprocess.Popen(
            [*entry, python(warm=not entry), "-m", "tests.faults.stage"],
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """What it saw of the ranks."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the stage ended with exit code {self._process.wait()}; see what it printed")
        seen: dict[str, Any] = json.loads(line)
        return seen

    def close(self) -> None:
        """End it, and with it whoever it has forked."""
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


def play(fault: Fault, face: str, stage: Stage) -> Verdict:
    """The verdict on a fault, played on one stage with the wrapper `face`."""
    timeout = TIMEOUTS.get(face, OURS)
    with tempfile.TemporaryDirectory(prefix="dpfuse-fault-") as name:
        folder = Path(name)
        seen = stage.ask(
            name=fault.name, face=face, ranks=list(range(SIZE)), size=SIZE, folder=name, timeout=timeout,
            limit=fault.limit + (timeout if face in TORCH else 0), variables={"GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
        return judge(fault.on(face), gathered(folder, seen), timeout)


def play_apart(fault: Fault, face: str) -> Verdict:
    """The verdict on a fault of the network, played on two machines, with a stage on each."""
    timeout = TIMEOUTS.get(face, OURS)
    with tempfile.TemporaryDirectory(prefix="dpfuse-fault-") as name, ExitStack() as cleanup:
        machines = namespaces(cleanup)
        stages = [Stage(*entry) for entry in machines.entries]
        pool = cleanup.enter_context(ThreadPoolExecutor(SIZE))
        for stage in stages:
            cleanup.callback(stage.close)
        answers = [
            pool.submit(
                stage.ask, name=fault.name, face=face, ranks=[rank], size=SIZE, folder=name, timeout=timeout,
                limit=fault.limit + (timeout if face in TORCH else 0), store=[machines.addresses[0], machines.port],
                variables={"GLOO_SOCKET_IFNAME": f"cable{rank}"},
            )
            for rank, stage in enumerate(stages)
        ]  # fmt: skip
        folder = Path(name)
        while not all((folder / f"ready-{rank}").exists() for rank in range(SIZE)):
            if any(answer.done() for answer in answers):
                break  # by an error, which will be read
            time.sleep(0.05)
        planted = time.monotonic()
        CABLES[fault.cable](machines)
        seen = [answer.result() for answer in answers]
        codes, ended = ([value for part in seen for value in part[key]] for key in ("codes", "ended"))
        run = gathered(folder, {"codes": codes, "ended": ended, "left": sum(part["left"] for part in seen)})
        run.told[0].append({"at": planted, "planted": True})
        return judge(fault, run, timeout)


def gathered(folder: Path, seen: dict[str, Any]) -> Run:
    """What the ranks told and printed, with what their stage saw."""
    told = [[json.loads(line) for line in (folder / f"told-{rank}").read_text().splitlines()] for rank in range(SIZE)]
    printed = [(folder / f"printed-{rank}").read_text(errors="replace") for rank in range(SIZE)]
    return Run(seen["codes"], seen["ended"], told, printed, seen["left"])


@contextmanager
def playing(plays: Iterable[tuple[Fault, str]]) -> Iterator[dict[tuple[str, str], Future[Verdict]]]:
    """Futures of the verdicts on all of `plays`, by names of fault and face, in that order."""
    stages: SimpleQueue[Stage] = SimpleQueue()
    started = [Stage() for _ in range(STAGES)]
    for stage in started:
        stages.put(stage)

    def one(fault: Fault, face: str) -> Verdict:
        if fault.cable:
            return play_apart(fault, face)
        stage = stages.get()
        try:
            return play(fault, face, stage)
        finally:
            stages.put(stage)

    pool = ThreadPoolExecutor(STAGES)
    try:
        yield {(fault.name, face): pool.submit(one, fault, face) for fault, face in plays}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for stage in started:
            stage.close()
