"""Times the calls of some methods of one object, without what reading the clock takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import thread_time
from typing import Any

from bench.step_time import StepTimes
from dpfuse.engine.events import Events, Watcher

__all__ = ["time_calls"]


def time_calls(
    run: Callable[[], None], owners: Sequence[Watcher], events: Events, steps: int, rounds: int
) -> StepTimes:
    """Time the methods of objects that hear a training, while it runs. They stay timed.

    The difference of two whole steps tells nothing where it is below their noise. This tells what is inside the calls,
    and not what they do to the caches.

    Args:
        run: makes `steps` steps, which call the methods.
        owners: the objects. Their methods of `Watcher`, and `tell` if they have it, are replaced. None of these may
            call another one.
        events: call these methods.
        steps: in a run.
        rounds: how often it runs.

    Returns:
        CPU seconds of this thread for one step, in all fields. The fact "calls" is their number in a step.
    """
    seconds, calls = 0.0, 0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal seconds, calls
            began = thread_time()
            result = method(*arguments, **named)
            seconds += thread_time() - began
            calls += 1
            return result

        return call

    nothing = timed(lambda *arguments, **named: None)
    for _ in range(1000):
        nothing(None, announced=True)
    clock = seconds / calls
    for owner in owners:
        for name in [name for name in (*vars(Watcher), "tell") if not name.startswith("_")]:
            if getattr(type(owner), name, None) is not getattr(Watcher, name, None):
                setattr(owner, name, timed(getattr(owner, name)))
    events.refresh()
    times = StepTimes()
    for _ in range(rounds):
        seconds, calls = 0.0, 0
        run()
        times.seconds.append((seconds - calls * clock) / steps)
    times.wall = times.extra = median(times.seconds)
    times.extra_lowest, times.extra_highest = min(times.seconds), max(times.seconds)
    times.facts = {"calls": calls / steps}
    return times
