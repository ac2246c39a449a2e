"""Runs every contender once per round, in shuffled order, so that disturbances affect all contenders equally."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter, thread_time

import torch
import torch.distributed as dist

__all__ = [
    "Clock",
    "Rounds",
    "Step",
    "cuda_clock",
    "host_clock",
    "interleave",
    "one_thread",
    "paired_extra",
    "wall_clock",
]

Step = Callable[[], object]
Clock = Callable[[Step], tuple[float, float]]  # runs a step; (seconds that count, wall seconds)
Rounds = dict[str, list[tuple[float, float]]]  # per contender, one pair per round


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute only in this thread. Ranks share the cores, and other threads' waiting would be timed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def host_clock(step: Step) -> tuple[float, float]:
    """Return the CPU seconds of this thread and the wall seconds of `step`."""
    wall, cpu = perf_counter(), thread_time()
    step()
    return thread_time() - cpu, perf_counter() - wall


def wall_clock(step: Step) -> tuple[float, float]:
    """Return the wall seconds of `step` twice: CPU seconds mean nothing if it waits for other processes.

    All ranks start together. Otherwise a step would include the delay of another rank.
    """
    dist.barrier()
    start = perf_counter()
    step()
    seconds = perf_counter() - start
    return seconds, seconds


def cuda_clock(step: Step) -> tuple[float, float]:
    """Return the seconds between two events around `step` on an idle GPU, and the wall seconds to its end."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    wall = perf_counter()
    start.record()
    step()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3, perf_counter() - wall


def interleave(steps: Mapping[str, Step], clock: Clock, *, rounds: int, warmup: int = 3, seed: int = 0) -> Rounds:
    """Time every step once per round.

    Args:
        steps: by contender.
        clock: times one step.
        rounds: timed rounds.
        warmup: rounds before them.
        seed: of the order within the rounds. Ranks that communicate must use the same seed.

    Returns:
        The results of `clock` by contender and round.
    """
    order, names = random.Random(seed), list(steps)
    times: Rounds = {name: [] for name in names}
    for number in range(-warmup, rounds):
        order.shuffle(names)
        for name in names:
            seconds = clock(steps[name])
            if number >= 0:
                times[name].append(seconds)
    return times


def paired_extra(times: Sequence[tuple[float, float]], base: Sequence[tuple[float, float]], part: int = 0) -> float:
    """Return the median over the rounds of the time of a step minus that of `base` in the same round, in seconds.

    Example:
        >>> from bench.interleave import paired_extra
        >>> paired_extra([(3.0, 0), (9.0, 0), (4.0, 0)], [(1.0, 0), (1.0, 0), (1.0, 0)])
        3.0
    """
    return median(ours[part] - bare[part] for ours, bare in zip(times, base, strict=True))
