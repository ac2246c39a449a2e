"""The clock of the phases: what belongs to which phase, what waits and collections take from it, when it tells."""

from __future__ import annotations

import gc
import threading

import pytest

from dpfuse.comm.step_clock import (
    BACKWARD,
    DELIVERED,
    FEW,
    FORWARD,
    LOADER,
    MANY,
    NAMES,
    OPTIMIZER,
    PAUSE,
    STEPPED,
    StepClock,
)


@pytest.fixture
def now(monkeypatch):
    """A clock that the test moves."""

    class Now:
        value = 100.0

    monkeypatch.setattr("dpfuse.comm.step_clock.perf_counter", lambda: Now.value)
    return Now


def mark(clock, kind, time, waited=0.0):
    """As the journal: an average ends a step."""
    clock.marks.append((kind, time, waited, clock.collected))
    if kind == DELIVERED:
        clock.add_up()


def step(clock, now, waited=0.0, *, optimizers=1):
    """One step; waits in backward."""
    now.value += 1
    mark(clock, FORWARD, now.value, waited)
    now.value += 2
    mark(clock, BACKWARD, now.value, waited)
    now.value += 4
    mark(clock, DELIVERED, now.value, waited + 1)
    for _ in range(optimizers):
        now.value += 8
        mark(clock, STEPPED, now.value, waited + 1)
    return waited + 1


@pytest.mark.parametrize("optimizers", [1, 3])
def test_each_phase_has_its_time_and_waiting_has_the_rest(now, optimizers):
    clock = StepClock()
    waited = step(clock, now, optimizers=optimizers)
    step(clock, now, waited)
    (first, second) = clock.taken()
    assert first == (1, [1, 2, 3, 0, 0, 1])
    assert second == (2, [2, 4, 6, 8 * optimizers, 0, 2])
    assert len(NAMES) == len(second[1])
    assert sum(second[1]) == now.value - 100 - 8  # the step of the last optimizer is part of the next sums


def test_what_was_waited_for_before_the_clock_began_does_not_count(now):
    clock = StepClock(50.0)
    step(clock, now, 50.0)
    ((_, seconds),) = clock.taken()
    assert seconds == [1, 2, 3, 0, 0, 51]  # of which only differences are used


def test_without_an_optimizer_that_tells_of_its_steps_the_optimizer_has_all_up_to_the_forward(now):
    clock = StepClock()
    step(clock, now, optimizers=0)
    step(clock, now, 1.0, optimizers=0)
    assert clock.taken()[-1][1] == [1, 4, 6, 1, 0, 2]


def test_the_time_between_two_backwards_without_a_step_of_the_optimizer_is_that_of_the_loader(now):
    """Gradients are averaged in each of four backwards, after which the optimizer steps."""
    clock, waited = StepClock(), 0.0
    for number in range(1, 9):
        waited = step(clock, now, waited, optimizers=number % 4 == 0)
    sums = [seconds for _, seconds in clock.taken()]
    told, window = sums[3], [after - before for after, before in zip(sums[7], sums[3], strict=True)]
    # In the first window it is not known yet whether an optimizer tells.
    assert told == [1, 2 * 4, 3 * 4, 3, 0, 4]
    assert window == [4, 2 * 4, 3 * 4, 8, 0, 4]


def test_a_collection_counts_though_another_thread_ends_the_step(now):
    """A thread of autograd's, as on GPUs."""
    clock = StepClock()
    mark(clock, FORWARD, now.value)
    other = threading.Thread(target=mark, args=(clock, DELIVERED, now.value))
    other.start()
    other.join()
    clock.collection(begins=True)
    now.value += 16
    clock.collection(begins=False)
    mark(clock, DELIVERED, now.value)
    assert clock.taken()[-1][1] == [0, 0, 0, 0, 16, 0]


def test_an_optimizer_that_steps_in_backward_is_part_of_backward(now):
    clock = StepClock()
    mark(clock, BACKWARD, now.value)
    now.value += 1
    mark(clock, STEPPED, now.value)
    now.value += 1
    assert clock.phase == BACKWARD
    mark(clock, DELIVERED, now.value)
    assert clock.taken()[0][1][BACKWARD] == 2


def test_a_collection_is_taken_from_the_phase_in_which_it_runs(now):
    clock = StepClock()

    def collect(moment, _):
        now.value += 16 if moment == "start" else 0

    gc.disable()  # only when the test says so
    gc.callbacks.append(collect)  # behind that of the clock, so it makes a collection longer
    try:
        mark(clock, FORWARD, now.value)
        gc.collect()
        now.value += 1
        mark(clock, DELIVERED, now.value)
    finally:
        gc.callbacks.remove(collect)
        gc.enable()
    assert clock.taken()[0][1] == [0, 1, 0, 0, 16, 0]


def test_a_clock_that_is_freed_leaves_no_callback():
    before = list(gc.callbacks)
    clock = StepClock()
    assert len(gc.callbacks) == len(before) + 1
    del clock
    gc.collect()
    assert gc.callbacks == before


def test_many_steps_between_two_heartbeats_are_told_of_more_rarely(now):
    clock = StepClock()

    def told(steps):
        for _ in range(steps):
            mark(clock, DELIVERED, now.value)
        return [number for number, _ in clock.taken()]

    assert len(told(MANY + 1)) == MANY + 1
    numbers = told(2 * MANY + 2)
    assert len(numbers) == MANY + 1
    assert all(number % 2 == 0 for number in numbers)
    assert all(number % 4 == 0 for number in told(100))
    assert len(told(8 * FEW)) == FEW
    assert told(10)[0] % 4 == 0
    assert told(0) == []


@pytest.mark.parametrize("kinds", [[], [FORWARD], [FORWARD, BACKWARD], [BACKWARD, DELIVERED], [DELIVERED, STEPPED]])
def test_another_thread_sees_which_phase_runs_whether_marks_are_added_up_or_not(now, kinds):
    clock = StepClock()
    clock.marks += [(kind, now.value, 0.0, 0.0) for kind in kinds]
    expected = {STEPPED: LOADER, DELIVERED: OPTIMIZER}.get(kinds[-1], kinds[-1]) if kinds else LOADER
    assert clock.phase == expected
    clock.add_up()
    assert (clock.phase, clock.marks) == (expected, [])


def test_marks_are_due_some_time_after_they_were_added_up(now):
    clock = StepClock()
    assert clock.due == now.value
    now.value += 1
    clock.add_up()
    assert clock.due == now.value + PAUSE
