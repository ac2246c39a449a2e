"""Signals that ask all ranks to stop: handlers in one process, and jobs whose launcher or rank gets them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dpfuse
from dpfuse.job.stopped import all_stopped, note_stopped
from dpfuse.stopping.wish import wish
from tests.distributed.launch.test_signals import Job
from tests.distributed.processes import SCRIPTS
from tests.patience import patience

USR1, TERM, INT = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (USR1, TERM, INT)}
    yield
    dpfuse.forget_stop()
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_handler_notes_the_wish_and_calls_the_one_that_was_there_each_time() -> None:
    got: list[int] = []
    signal.signal(USR1, lambda number, frame: got.append(number))
    with dpfuse.stop_on_signals() as handlers:
        send(USR1)
        assert (wish.words, got) == ("SIGUSR1", [USR1])
        send(TERM)
        send(USR1)
        assert (wish.words, got) == ("SIGUSR1", [USR1, USR1])
    send(USR1)
    assert len(got) == 3
    handlers.close()
    assert signal.getsignal(TERM) is signal.SIG_DFL


def test_a_handler_that_the_program_has_installed_later_stays() -> None:
    handlers = dpfuse.stop_on_signals("SIGUSR1")
    signal.signal(USR1, signal.SIG_IGN)
    handlers.close()
    assert signal.getsignal(USR1) is signal.SIG_IGN


def test_the_second_ctrl_c_interrupts() -> None:
    signal.signal(INT, signal.default_int_handler)
    with dpfuse.stop_on_signals(INT):
        send(INT)
        assert wish.words == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            send(INT)


def test_the_first_ctrl_c_only_asks_after_another_wish_and_among_several_handlers() -> None:
    signal.signal(INT, signal.default_int_handler)
    dpfuse.request_stop("before")
    with dpfuse.stop_on_signals(INT), dpfuse.stop_on_signals(INT):
        send(INT)
        with pytest.raises(KeyboardInterrupt):
            send(INT)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_handlers_that_are_closed_in_any_order_ask_no_more(order: tuple[int, int]) -> None:
    both = [dpfuse.stop_on_signals(TERM) for _ in range(2)]
    for place in order:
        both[place].close()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [TERM])
        send(TERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == TERM
    assert not wish.words


def test_a_signal_that_comes_as_the_handler_is_installed_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's ranks keep one that comes early until then."""
    install = signal.signal

    def installed(number: int, handler: Any) -> Any:
        before = install(number, handler)
        send(number)
        return before

    monkeypatch.setattr(signal, "signal", installed)
    handlers = dpfuse.stop_on_signals(USR1)
    monkeypatch.undo()
    handlers.close()
    assert wish.words == "SIGUSR1"


def test_two_calls_for_one_signal_ask_once() -> None:
    with dpfuse.stop_on_signals("SIGUSR1", USR1), dpfuse.stop_on_signals("SIGUSR1"):
        send(USR1)
    assert wish.words == "SIGUSR1"
    assert signal.getsignal(USR1) is signal.SIG_DFL


@pytest.mark.parametrize(("number", "ends"), [(USR1, False), (TERM, True)])
def test_a_forked_child_asks_nothing_and_can_be_ended(number: int, ends: bool) -> None:
    with dpfuse.stop_on_signals():
        child = os.fork()
        if child == 0:
            send(number)
            os._exit(3 if wish.words else 0)
        _, status = os.waitpid(child, 0)
    assert (os.WIFSIGNALED(status), status & 0x7F if ends else os.WEXITSTATUS(status)) == (ends, TERM if ends else 0)
    assert not wish.words


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("USR1", r"got 'USR1', expected the name or the number of a signal, such as 'SIGUSR1'\."),
        (4711, r"got 4711, expected the name or the number of a signal"),
        ("SIGKILL", r"got SIGKILL, expected a signal that a process can handle, such as 'SIGTERM'"),
    ],
)
def test_a_signal_that_cannot_ask_is_refused(given: str | int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpfuse.stop_on_signals("SIGUSR1", given)
    assert signal.getsignal(USR1) is signal.SIG_DFL


def test_another_thread_is_refused_by_name() -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            dpfuse.stop_on_signals()
        except dpfuse.DPFuseError as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="mine")
    thread.start()
    thread.join()
    assert "in the thread 'mine', expected the main thread" in str(errors[0])


def test_an_exit_code_that_cannot_be_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dpfuse.launch", "--requeue_exit", "256", "--nproc_per_node", "1", __file__],
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 2
    assert "--requeue_exit: got 256, expected an exit code from 0 to 255" in done.stderr


def test_a_rank_that_was_not_told_leaves_no_note(tmp_path: Path) -> None:
    records = [str(tmp_path / f"error{rank}.json") for rank in range(2)]
    assert not all_stopped([])
    note_stopped(records[0])
    assert not all_stopped(records)
    note_stopped(records[1])
    assert all_stopped(records)
    note_stopped(str(tmp_path / "no folder" / "error.json"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "to", "workers"),
    [
        (USR1, "one rank", 2),
        pytest.param(TERM, "launcher", 2, marks=pytest.mark.slow),
        pytest.param(USR1, "launcher", 2, marks=pytest.mark.slow),
        pytest.param(TERM, "one rank", 2, marks=pytest.mark.slow),
        pytest.param(TERM, "all", 0, marks=pytest.mark.slow),
        pytest.param(USR1, "all", 2, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_of_a_job_stop_in_the_same_step(tmp_path, number, to, workers) -> None:
    with Job(tmp_path, "--nproc_per_node=2", "--requeue_exit=85", SCRIPTS / "stop_together.py", workers) as job:
        job.wait_for_ranks()
        if to == "one rank":
            os.kill(job.pids[1], number)
        else:
            job.send(number, to)
        code, told = job.ended()
    assert code == 85, told
    assert "dpfuse.launch: the ranks have stopped together" in told
    found = dict(re.findall(r"rank (\d) stopped in (step \d+: .*)\n", job.read))
    assert len(found) == 2, told
    assert len(set(found.values())) == 1
    assert f"got {number.name}" in found["0"]
    assert "Traceback" not in told
