"""Several collectives as one work: their order, time limits, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from dpfuse.comm.work import StagedWork

SHORT = timedelta(milliseconds=1)


class Landing(dist.Work):
    """Lands after so many waits with a limit, or fails then."""

    def __init__(self, name: str, told: list[str], waits: int = 0, error: str = "") -> None:
        super().__init__()
        told.append(f"{name} starts")
        self._name, self._told, self._left, self._error = name, told, waits, error
        self._landed = not waits

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if timeout and self._left:
            self._left -= 1
            raise RuntimeError("too short")
        self._landed = True
        if self._error:
            raise RuntimeError(self._error)
        self._told.append(f"{self._name} was waited for")
        return True

    def is_completed(self) -> bool:
        return self._landed


def two(told: list[str], first: int = 0, second: int = 0) -> Iterator[dist.Work]:
    yield Landing("a", told, first)
    told.append("between")
    yield Landing("b", told, second)
    told.append("end")


def test_each_collective_starts_when_the_one_before_was_waited_for() -> None:
    told: list[str] = []
    work = StagedWork(two(told), 2)
    assert told == ["a starts"]
    assert not work.is_completed()  # a wait would start another one
    assert work.wait()
    landed = ["a was waited for"]
    assert told == ["a starts", *landed, *landed, "between", "b starts", "b was waited for", "end"]
    assert work.is_completed()
    assert work.get_future().done()
    assert work.wait()
    assert told[-1] == "end"


def test_a_wait_that_was_too_short_can_be_repeated_in_each_stage() -> None:
    told: list[str] = []
    work = StagedWork(two(told, first=1, second=2), 2)
    for expected in ("a starts", "b starts", "b starts"):
        with pytest.raises(RuntimeError, match="too short"):
            work.wait(SHORT)
        assert told[-1] == expected
        assert not work.is_completed()
        assert not work.get_future().done()
    assert work.wait(SHORT)
    assert told.count("between") == told.count("end") == 1


@pytest.mark.parametrize("failing", ["a", "b"])
def test_a_failed_collective_raises_at_each_wait(failing: str) -> None:
    def stages() -> Iterator[dist.Work]:
        for name in ("a", "b"):
            yield Landing(name, [], error="planted" if name == failing else "")

    work = StagedWork(stages(), 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="planted"):
            work.wait()
        assert work.is_completed()


@pytest.mark.parametrize("place", ["between", "after"])
def test_an_error_of_this_rank_raises_at_each_wait(place: str) -> None:
    def stages() -> Iterator[dist.Work]:
        yield Landing("a", [])
        if place == "between":
            raise MemoryError("planted")
        yield Landing("b", [])
        raise MemoryError("planted")

    work = StagedWork(stages(), 2)
    for _ in range(2):
        with pytest.raises(MemoryError, match="planted"):
            work.wait()
        assert work.is_completed()
        assert work.get_future().done()


def test_a_late_work_starts_when_it_is_waited_for() -> None:
    told: list[str] = []
    work = StagedWork(two(told), 2, late=True)
    assert told == []
    assert not work.is_completed()
    assert work.wait()
    assert told[0] == "a starts"
    assert told[-1] == "end"


@pytest.mark.parametrize("fails", ["starts", "lands"])
def test_an_error_is_explained_but_not_a_time_limit(fails: str) -> None:
    def stages() -> Iterator[dist.Work]:
        if fails == "starts":
            raise RuntimeError("planted")
        yield Landing("a", [], 1, "planted")

    work = StagedWork(stages(), late=True, explain=lambda error: ValueError(f"explained: {error}"))
    if fails == "lands":
        with pytest.raises(RuntimeError, match="too short"):
            work.wait(SHORT)
    with pytest.raises(ValueError, match="explained: planted") as caught:
        work.wait(SHORT)
    assert str(caught.value.__cause__) == "planted"
