"""A job that ends at a known time asks to stop while a step and a checkpoint still fit in."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.stopping import deadline as module
from dpfuse.stopping import request
from dpfuse.stopping.deadline import Deadline, DeadlineWatch, deadline
from dpfuse.stopping.wish import reason_of, wish

pytestmark = [
    pytest.mark.filterwarnings("ignore:there is no process group"),
    pytest.mark.filterwarnings("ignore:the deadline of this job"),
]


def test_the_end_of_torchrun_asks_after_handlers_are_installed(monkeypatch):
    watch = DeadlineWatch()
    parent = [7]
    monkeypatch.setattr(module.os, "getppid", lambda: parent[0])
    for started, handlers, asks in [(False, True, False), (True, False, False), (True, True, True)]:
        parent[0] = 7
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x") if started else monkeypatch.delenv("TORCHELASTIC_RUN_ID", False)
        with dpfuse.stop_on_signals() if handlers else nullcontext():
            watch.look()
            assert not wish.words
            parent[0] = 1
            watch.look()
            assert wish.words == ("launcher" if asks else "")
    assert str(reason_of([wish.words])) == "rank 0 has lost its launcher"
    dpfuse.forget_stop()
    watch.look()
    assert not wish.words


class Clock:
    """Both clocks of the deadline, which go on when they are told to.

    Args:
        now: seconds since the epoch.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def pretended(now: float = 1000.0) -> Iterator[Clock]:
    """This clock, and afterwards the deadline and the wish of this process as they were."""
    clock = Clock(now)
    try:
        with (
            mock.patch.object(module, "time", clock),
            mock.patch.object(module, "monotonic", clock),
            mock.patch.dict(deadline.__dict__, {"_graces": [], "_saving": None}),
            mock.patch.object(request, "_deadline", DeadlineWatch()),
        ):
            yield clock
    finally:
        dpfuse.forget_stop()


def end_at(end: float, grace: float = 0.0) -> None:
    """Let the job end then."""
    deadline.open(grace)
    deadline.end = end


@pytest.fixture
def clock() -> Iterator[Clock]:
    before = signal.getsignal(signal.SIGUSR1)
    with pretended() as clock:
        yield clock
    signal.signal(signal.SIGUSR1, before)


def steps_until_asked(clock: Clock, seconds: list[float], more: int = 0) -> int | None:
    """The step, from 0, at whose beginning a loop asks whose steps take so long."""
    watch = DeadlineWatch(more)
    for step, each in enumerate(seconds):
        watch.look()
        if wish.words:
            return step
        clock.now += each
    return None


def test_several_looks_in_a_step_count_as_one(clock: Clock) -> None:
    """As with two backwards of one model in each step."""
    end_at(1500.0)
    assert steps_until_asked(clock, [0.1, 59.9] * 20) in (11, 12)  # 330 to 360 of 500 seconds are over, 180 are needed


def test_without_a_deadline_nothing_asks(clock: Clock) -> None:
    assert steps_until_asked(clock, [1e6] * 5) is None


@pytest.mark.parametrize(
    ("saving", "first"),
    [
        (None, 86),  # of 100 seconds 3 are for steps, and 12 for a checkpoint of a quarter of 32
        (20.0, 68),
        (0.0, 98),
    ],
)
def test_it_asks_when_three_steps_and_a_checkpoint_would_end_too_late(
    clock: Clock, saving: float | None, first: int
) -> None:
    end_at(1100.0, grace=32.0)
    if saving is not None:
        with deadline.saving():
            clock.now += saving
        clock.now -= saving
    assert steps_until_asked(clock, [1.0] * 100) == first
    assert wish.words.startswith("deadline ")


def test_it_asks_earlier_where_more_steps_follow_the_wish(clock: Clock) -> None:
    """As beside other dimensions of a mesh."""
    end_at(1100.0, grace=32.0)
    assert steps_until_asked(clock, [1.0] * 100, more=4) == 82


def test_a_checkpoint_that_fails_tells_nothing_of_its_time(clock: Clock) -> None:
    end_at(1010.0)
    with pytest.raises(OSError, match="full"), deadline.saving():
        clock.now += 9
        raise OSError("full")
    clock.now = 1000.0
    assert not deadline.is_near(0)


def test_one_long_step_is_no_reason(clock: Clock) -> None:
    """It may hold an evaluation. Steps that stay long are one."""
    end_at(1500.0)
    assert steps_until_asked(clock, [300.0, *[1.0] * 10, 100.0, *[1.0] * 10]) is None
    clock.now = 1000.0
    assert steps_until_asked(clock, [100.0] * 5) == 3


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("1767225600", 1767225600.0),
        ("1767225600.5", 1767225600.5),
        ("2026-01-01T00:00:00+00:00", 1767225600.0),
        ("2026-01-01 01:00:00+01:00", 1767225600.0),
        ("", math.inf),
    ],
)
def test_the_variable_is_a_time(monkeypatch: pytest.MonkeyPatch, text: str, end: float) -> None:
    monkeypatch.setenv("DPFUSE_DEADLINE", text)
    read = Deadline()
    read.read()
    assert read.end == end


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "12:00", "2026-13-01", "20261231", "2026", "-5"])
def test_another_text_is_refused_where_a_model_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, text: str
) -> None:
    monkeypatch.setenv("DPFUSE_DEADLINE", text)
    with pytest.raises(ValueError, match=f"DPFUSE_DEADLINE is '{text}', expected when the job ends"):
        dpfuse.DataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="DPFUSE_DEADLINE"):
        dpfuse.stop_on_signals()


def test_slurm_counts_for_programs_that_ask_for_it(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1500")
    dpfuse.DataParallel(nn.Linear(2, 2))
    assert deadline.end == math.inf
    with dpfuse.stop_on_signals("SIGUSR1"):
        assert deadline.end == 1500.0
        monkeypatch.setenv("DPFUSE_DEADLINE", "2001-09-09T01:46:41Z")
        dpfuse.DataParallel(nn.Linear(2, 2))
        assert deadline.end == 1500.0
        monkeypatch.setenv("SLURM_JOB_END_TIME", "1900000000")
        dpfuse.DataParallel(nn.Linear(2, 2))
        assert deadline.end == 1000000001.0
        monkeypatch.delenv("DPFUSE_DEADLINE")
    assert deadline.end == math.inf
    monkeypatch.setenv("SLURM_JOB_END_TIME", "UNKNOWN")
    with dpfuse.stop_on_signals("SIGUSR1"):
        assert deadline.end == math.inf


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_handlers_that_are_closed_in_any_order_forget_the_end_of_the_job(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, order: tuple[int, int]
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1500")
    both = [dpfuse.stop_on_signals("SIGUSR1", grace=grace) for grace in (60, 10)]
    both[order[0]].close()
    assert deadline.end == 1500.0
    clock.now = 1490.0
    assert deadline.is_near(0.0) == (order[0] == 1)  # a quarter of 60, one and a half times
    both[order[1]].close()
    assert deadline.end == math.inf


def test_a_call_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1500")
    monkeypatch.setenv("DPFUSE_DEADLINE", "soon")
    with pytest.raises(ValueError, match="DPFUSE_DEADLINE"):
        dpfuse.stop_on_signals("SIGUSR1")
    monkeypatch.delenv("DPFUSE_DEADLINE")
    dpfuse.DataParallel(nn.Linear(2, 2))
    assert deadline.end == math.inf


def test_a_deadline_that_has_passed_is_told_of(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """It stops each training after its first step, as where a variable was set long before."""
    monkeypatch.setenv("DPFUSE_DEADLINE", "1000000001")
    clock.now = 1000000002.0
    with pytest.warns(UserWarning, match="the deadline of this job, 2001-09-09 .* has passed, so each training stops"):
        dpfuse.DataParallel(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("grace", "error", "message"),
    [
        (-1, ValueError, "got grace=-1, expected seconds from 0 on"),
        (math.inf, ValueError, "got grace=inf"),
        (math.nan, ValueError, "got grace=nan"),
        ("60", TypeError, "got grace='60' of type str"),
        (True, TypeError, "got grace=True of type bool"),
    ],
)
def test_a_grace_that_cannot_be_is_refused(grace: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dpfuse.stop_on_signals("SIGUSR1", grace=grace)  # type: ignore[arg-type]


def trained(rank, size, folder):
    """Only rank 1 has a deadline: 100 seconds; each step takes one, and the checkpoint in step 3 takes 20."""
    with pretended() as clock:
        model = dpfuse.DataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if rank == 1:
            end_at(1100.0, grace=8.0)
        for step in range(100):
            with model.no_sync():
                model(torch.ones(3, 4)).sum().backward()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            clock.now += 1
            if step == 3:
                with mock.patch("dpfuse.checkpoint.save_load.get_random_state", side_effect=lambda: clock.wait(20.0)):
                    dpfuse.save_checkpoint(folder, model, optimizer, step=step)
            if model.stop_requested:
                break
        return step, model.stop_reason.ranks, model.stop_reason.cause, str(model.stop_reason)[:28]


def test_all_ranks_stop_in_time_where_one_of_them_knows_the_end(ranks, tmp_path):
    told = ranks(trained, str(tmp_path))
    assert told == [(48, (1,), "deadline", "rank 1 is near its deadline,")] * 2


def alone(clock: Clock) -> int:
    model = dpfuse.DataParallel(nn.Linear(4, 2))  # which reads the environment
    end_at(1050.0)
    for step in range(100):
        if model.stop_requested:
            return step
        clock.now += 1
    return -1


def test_a_process_without_a_group_stops_in_time(clock: Clock) -> None:
    assert alone(clock) == 48


def test_a_loop_without_a_backward_stops_in_time(clock: Clock) -> None:
    end_at(1050.0)
    batch = 0
    while not dpfuse.agree_to_stop():
        clock.now += 1
        batch += 1
    assert batch == 48
