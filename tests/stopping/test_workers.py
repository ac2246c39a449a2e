"""Workers of a loader outlive the signals that ask all ranks to stop, and end with their loader."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import dpfuse
from dpfuse.stopping.worker_start import WorkerStart
from tests.distributed.processes import SCRIPTS, all_gone, clean_environment, pids_in, run
from tests.patience import patience

USR1, TERM = signal.SIGUSR1, signal.SIGTERM
SECONDS = 3.0  # that torch waits for a worker, in these tests
TORCHRUN = ("torch.distributed.run", "--standalone")
SLOW = pytest.mark.slow


class Samples(Dataset[Any]):
    """In some of them a worker sleeps for ever."""

    def __init__(self, stuck: int | None = None) -> None:
        self.stuck = stuck

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, place: int) -> torch.Tensor:
        while self.stuck is not None and place >= self.stuck:
            time.sleep(600)
        return torch.ones(1)


class Programs(Samples):
    """Each sample is made by a program: the signals that it has blocked or ignores, as bits."""

    def __getitem__(self, place: int) -> torch.Tensor:
        text = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
        return torch.tensor([int(mask, 16) & 0xFFFFFFFF for mask in re.findall(r"Sig(?:Blk|Ign):\t(\w+)", text)])


def loader_of(samples: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(samples, **{"batch_size": 1, "num_workers": 2, "multiprocessing_context": "fork"} | options)


def pids_of(batches: Any) -> list[int]:
    return [worker.pid for worker in batches._workers]


@pytest.fixture(autouse=True)
def _torch_waits_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_stuck_workers_outlive_a_signal_and_end_together_when_their_loader_is_closed() -> None:
    with dpfuse.stop_on_signals():
        batches = iter(loader_of(Samples(stuck=2)))
        pids = pids_of(batches)
        next(batches), next(batches)
        for pid in pids:
            os.kill(pid, TERM)
            os.kill(pid, USR1)
        assert not any(all_gone([pid], within=0.2) for pid in pids)
        began = time.monotonic()
        del batches
        assert time.monotonic() - began < 2 * SECONDS  # torch waits for each worker
        assert all_gone(pids, within=1)
    dpfuse.forget_stop()


@pytest.mark.timeout(60)
def test_workers_that_begin_after_the_handlers_are_closed_are_torchs() -> None:
    given: list[int] = []
    loader = loader_of(Samples(), num_workers=1, worker_init_fn=given.append)
    dpfuse.stop_on_signals().close()
    batches = iter(loader)
    next(batches)
    assert loader.worker_init_fn == given.append
    os.kill(pids_of(batches)[0], TERM)
    assert all_gone(pids_of(batches), within=10)


@pytest.mark.timeout(60)
def test_the_init_function_of_the_loader_is_called_in_each_worker_and_may_install_handlers(tmp_path: Path) -> None:
    def init(worker: int) -> None:
        (tmp_path / str(worker)).touch()
        signal.signal(USR1, lambda *_: (tmp_path / f"heard{worker}").touch())

    with dpfuse.stop_on_signals():
        loader = loader_of(Samples(), worker_init_fn=init)
        batches = iter(loader)
        next(batches), next(batches)
        assert loader.worker_init_fn is init
        os.kill(pids_of(batches)[1], USR1)
        while not (tmp_path / "heard1").exists():
            time.sleep(0.01)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "heard1"}


@pytest.mark.timeout(60)
def test_programs_that_a_worker_starts_can_be_ended() -> None:
    with dpfuse.stop_on_signals():
        masks = next(iter(loader_of(Programs())))
    for number in (TERM, USR1):
        assert not (masks >> (number - 1) & 1).any()
    assert not {TERM, USR1} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.timeout(60)
def test_a_worker_that_is_killed_is_an_error_of_torch() -> None:
    with dpfuse.stop_on_signals():
        batches = iter(loader_of(Samples()))
        next(batches)
        # A batch that this worker has sent may be lost with it, which is another error. So none is read.
        with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*is killed by signal"):
            os.kill(pids_of(batches)[0], signal.SIGKILL)
            time.sleep(30)


@pytest.mark.parametrize("loader_lives", [True, False])
def test_a_worker_that_began_after_its_program_had_ended_ends_on_the_signal(loader_lives: bool) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def work() -> None:
        start = WorkerStart([TERM], None)
        start._loader = os.getppid() if loader_lives else ended.pid
        start(0)
        os.kill(os.getpid(), TERM)
        os._exit(0)

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join(patience(20))
    assert worker.exitcode == (0 if loader_lives else -TERM)


PROGRAM = """
import os, signal, sys, warnings
import dpfuse
from tests.stopping.test_workers import Samples, loader_of, pids_of

warnings.simplefilter("ignore")  # of torch, about many workers
dpfuse.stop_on_signals()
batches = iter(loader_of(Samples(stuck=6), num_workers=6))
print(*(f"pid={pid}" for pid in pids_of(batches)), flush=True)
next(batches), next(batches)
if sys.argv[1] == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[1] == "fails":
    raise ValueError("of the program")
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", ["ends", pytest.param("fails", marks=SLOW), pytest.param("is killed", marks=SLOW)])
def test_a_program_leaves_no_stuck_worker_behind(end: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    log = tmp_path / "log"
    with log.open("w") as file:  # a worker that is left keeps a pipe open
        process = subprocess.Popen(
            [sys.executable, tmp_path / "program.py", end],
            env=clean_environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        process.wait(patience(60))
    pids = pids_in(log.read_text())
    assert len(pids) == 6
    if end == "is killed":  # a launcher then ends the group
        assert not all_gone(pids, within=0.2)
        os.killpg(process.pid, TERM)
    assert all_gone(pids, within=10)  # torch would wait for six workers, one after the other
    told = log.read_text()
    assert process.returncode == {"ends": 0, "fails": 1, "is killed": -signal.SIGKILL}[end], told
    assert ("Traceback" in told) == (end == "fails")
    assert "DataLoader" not in told


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("launcher", "method", "number", "to"),
    [
        ((), "fork", TERM, "group"),
        pytest.param((), "spawn", USR1, "group", marks=SLOW),
        pytest.param((), "forkserver", TERM, "group", marks=SLOW),
        pytest.param((), "spawn", TERM, "group", marks=SLOW),
        pytest.param((), "forkserver", USR1, "group", marks=SLOW),
        pytest.param((*TORCHRUN, "--nproc_per_node=2"), "fork", TERM, "launcher", marks=SLOW),
        pytest.param((*TORCHRUN, "--nproc_per_node=2"), "spawn", TERM, "launcher", marks=SLOW),
        pytest.param((*TORCHRUN, "--nproc_per_node=2"), "spawn", USR1, "ranks", marks=SLOW),
        pytest.param((*TORCHRUN, "--nproc_per_node=2"), "fork", USR1, "launcher", marks=SLOW),  # which ends of it
        pytest.param(("dpfuse.launch", "--nproc_per_node=2"), "fork", TERM, "ranks", marks=SLOW),
        pytest.param(("dpfuse.launch", "--nproc_per_node=2"), "spawn", TERM, "launcher", marks=SLOW),
    ],
)
def test_a_signal_to_all_processes_of_a_rank_stops_all_ranks_in_the_same_step(launcher, method, number, to, tmp_path):
    """Torchrun passes SIGTERM on to all processes of a rank."""
    words = [sys.executable, *(("-m", *launcher) if launcher else ()), SCRIPTS / "stop_with_workers.py"]
    ranks = 2 if launcher else 1
    job = subprocess.Popen(
        [*map(str, words), method, str(tmp_path)],
        env=clean_environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    read = ""
    while len(pids_in(read)) < 3 * ranks:
        line = job.stdout.readline()
        assert line, read + job.communicate()[1]
        read += line
    if to == "launcher":
        job.send_signal(number)
    else:
        for group in {os.getpgid(pid) for pid in pids_in(read)}:
            os.killpg(group, number)
    out, told = job.communicate(timeout=patience(60))
    assert all_gone(pids_in(read), within=10), told
    # Ranks write to one pipe, so that two lines may become one.
    found = re.findall(r"rank \d stopped in step (\d+): rank \d (got SIG[A-Z]+[12]?|has lost its launcher)", out)
    assert len(found) == ranks, out + told
    ends = launcher[:1] == TORCHRUN[:1] and (number, to) == (USR1, "launcher")
    assert set(found) == {(found[0][0], "has lost its launcher" if ends else f"got {number.name}")}
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{int(found[0][0]):010}.pt"]
    assert "DataLoader" not in told
    by_signal = -USR1 if ends else 1 if "torch.distributed.run" in launcher and to == "launcher" else 0
    assert job.returncode == by_signal, told
    if method == "forkserver":
        assert f"own process ended by {TERM:d}" in out


LATE = """
import dpfuse, multiprocessing, time
from tests.stopping.test_workers import Samples, loader_of

if __name__ == "__main__":
    own = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(0,))
    own.start()
    own.join()
    dpfuse.stop_on_signals()
    for _ in range(2):
        iter(loader_of(Samples(), multiprocessing_context="forkserver"))
"""


@pytest.mark.timeout(120)
def test_a_fork_server_that_runs_already_is_a_warning_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LATE)
    done = run(tmp_path / "program.py", warm_ranks=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was started before dpfuse.stop_on_signals()") == 1
    assert "program.py:11: DPFuseWarning" in done.stderr
