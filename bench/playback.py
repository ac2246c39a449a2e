"""Gives durations that were measured in turns to pytest-benchmark, for its statistics, storage and comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import pytest

__all__ = ["play_back", "played_back", "remembered"]


class _PlaybackClock:
    """A timer that advances only by the durations that are played back."""

    __name__ = "playback"

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


_CLOCK = _PlaybackClock()

# pytest-benchmark runs all rounds of one contender before the next contender, so a drift of the machine distorts the
# comparison. Here all contenders of a case are timed in turns, and their durations are played back.
played_back = pytest.mark.benchmark(timer=_CLOCK, disable_gc=False, warmup=False)


def play_back(benchmark: Any, seconds: Sequence[float], info: Mapping[str, Any]) -> None:
    """Let `benchmark` record `seconds` as its rounds; the test must be marked `@played_back`.

    Args:
        benchmark: pytest-benchmark's fixture.
        seconds: one per round.
        info: for the record; `suite`, `case` and `variant` among them.
    """
    remaining = iter(seconds)

    def advance() -> None:
        _CLOCK.now += next(remaining)

    benchmark.group = f"{info['suite']}: {info['case']}"
    benchmark.extra_info.update(info)
    benchmark.pedantic(advance, rounds=len(seconds))


def remembered(measure: Callable[..., Any]) -> Callable[..., Any]:
    """Return `measure` with a cache by its (hashable) arguments. An error is also stored and raised again."""

    @cache
    def attempt(*args: Any) -> tuple[Any, Exception | None]:
        try:
            return measure(*args), None
        except Exception as error:
            return None, error

    @wraps(measure)
    def call(*args: Any) -> Any:
        result, error = attempt(*args)
        if error is not None:
            raise error
        return result

    return call
