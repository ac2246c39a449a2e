"""A job that ends at a known time asks to stop while a step and a checkpoint still fit in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.stopping import deadline as module
from dpfuse.stopping import knowledge
from dpfuse.stopping.deadline import Deadline, DeadlineWatch, deadline
from dpfuse.stopping.wish import wish

pytestmark = pytest.mark.filterwarnings("ignore:there is no process group")


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
            mock.patch.dict(deadline.__dict__),
            mock.patch.object(knowledge, "_deadline", DeadlineWatch()),
        ):
            yield clock
    finally:
        dpfuse.forget_stop()


@pytest.fixture
def clock() -> Iterator[Clock]:
    with pretended() as clock:
        yield clock


def steps_until_asked(clock: Clock, seconds: list[float]) -> int | None:
    """The step, from 0, at whose beginning a loop asks whose steps take so long."""
    watch = DeadlineWatch()
    for step, each in enumerate(seconds):
        watch.look()
        if wish.words:
            return step
        clock.now += each
    return None


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
    deadline.grace, deadline.end = 32.0, 1100.0
    if saving is not None:
        with deadline.saving():
            clock.now += saving
        clock.now -= saving
    assert steps_until_asked(clock, [1.0] * 100) == first
    assert wish.words.startswith("deadline ")


def test_a_checkpoint_that_fails_tells_nothing_of_its_time(clock: Clock) -> None:
    deadline.grace, deadline.end = 0.0, 1010.0
    with pytest.raises(OSError, match="full"), deadline.saving():
        clock.now += 9
        raise OSError("full")
    clock.now = 1000.0
    assert not deadline.is_near(0)


def test_one_long_step_is_no_reason(clock: Clock) -> None:
    """It may hold an evaluation. Steps that stay long are one."""
    deadline.grace, deadline.end = 0.0, 1500.0
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


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "12:00", "2026-13-01"])
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
    with dpfuse.stop_on_signals("SIGUSR1", grace=60):
        assert (deadline.end, deadline.grace) == (1500.0, 60.0)
        monkeypatch.setenv("DPFUSE_DEADLINE", "1400")
        dpfuse.DataParallel(nn.Linear(2, 2))
        assert deadline.end == 1400.0
        monkeypatch.delenv("DPFUSE_DEADLINE")
    assert (deadline.end, deadline.grace) == (math.inf, 30.0)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "UNKNOWN")
    with dpfuse.stop_on_signals("SIGUSR1"):
        assert deadline.end == math.inf


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
            deadline.grace, deadline.end = 8.0, 1100.0
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
    deadline.grace, deadline.end = 0.0, 1050.0
    for step in range(100):
        if model.stop_requested:
            return step
        clock.now += 1
    return -1


def test_a_process_without_a_group_stops_in_time(clock: Clock) -> None:
    assert alone(clock) == 48


def test_a_loop_without_a_backward_stops_in_time(clock: Clock) -> None:
    deadline.grace, deadline.end = 0.0, 1050.0
    batch = 0
    while not dpfuse.agree_to_stop():
        clock.now += 1
        batch += 1
    assert batch == 48
