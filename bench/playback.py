"""Hands durations that were measured elsewhere, in turns, to pytest-benchmark: its statistics, storage, compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import pytest

__all__ = ["play_back", "played_back", "remembered"]


class _PlaybackClock:
    """A timer that stands still but for what is played back."""

    __name__ = "playback"

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


_CLOCK = _PlaybackClock()

# pytest-benchmark runs one contender's rounds after the other's; on a machine that drifts, that compares the
# hours of the day. So all contenders of a case are timed in turns, and each then plays its rounds back.
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
    """`measure`, called once per set of (hashable) arguments; a failure too is remembered and raised again."""

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
