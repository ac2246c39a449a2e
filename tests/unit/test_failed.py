"""Which errors count as those of a collective, after which it is unknown where the peers wait."""

from __future__ import annotations

import builtins
import dataclasses
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from dpfuse.comm import collective
from dpfuse.comm.failed import has_raised
from dpfuse.errors import DPFuseError


class SlottedError(Exception):
    __slots__ = ()

    def __setattr__(self, name, value):
        raise AttributeError(name)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    text: str = "planted"


class AnsweringError(Exception):
    """Has every attribute."""

    def __getattr__(self, name):
        return name


class Failing:
    """A group in which each collective raises an error."""

    def __init__(self, error, fails=""):
        self._error, self._fails = error, fails

    def size(self):
        return 2

    def rank(self):
        return 0

    def __getattr__(self, name):
        def call(*arguments):
            if self._fails in ("", name):
                raise self._error
            return dist.Work()

        return call


FLAT = torch.ones(4)
CPU = torch.device("cpu")


def first_of_two(group):
    """The second collective of several raises, when the first has begun."""
    begun = []

    def start():
        begun.append(True)
        yield dist.Work()
        raise MemoryError("planted")

    try:
        collective.together(start())
    finally:
        assert begun


CALLS = {
    "all_reduce": lambda group: collective.all_reduce(FLAT, group),
    "all_reduce_together": lambda group: collective.all_reduce_together([FLAT], [], 1.0, group),
    "all_reduce_max": lambda group: collective.all_reduce_max(FLAT, group),
    "all_gather": lambda group: collective.all_gather(FLAT, group),
    "start_all_to_all": lambda group: collective.start_all_to_all(FLAT, FLAT, group),
    "start_reduce_scatter": lambda group: collective.start_reduce_scatter(FLAT[:2], FLAT, group),
    "start_all_gather_into": lambda group: collective.start_all_gather_into(FLAT, FLAT[:2], group),
    "start_all_gather_parts": lambda group: collective.start_all_gather_parts(FLAT, [0, 2, 4], group),
    "broadcast": lambda group: collective.broadcast(FLAT, group),
    "coalesced": lambda group: collective.coalesced(lambda: None, CPU, group),
}


def caught(function, *arguments):
    with pytest.raises(BaseException) as info:
        function(*arguments)
    return info.value


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "error", [RuntimeError("any"), KeyboardInterrupt(), SlottedError("any"), FrozenError()], ids=repr
)
def test_what_a_call_of_a_group_raises_counts_and_stays_the_same_object(name, error):
    assert caught(CALLS[name], Failing(error)) is error
    assert has_raised(error)


def test_an_error_behind_the_first_of_several_collectives_counts():
    assert has_raised(caught(first_of_two, None))


@pytest.mark.parametrize("fails", ["_start_coalescing", "_end_coalescing"])
def test_an_error_at_either_end_of_coalescing_counts(fails):
    assert has_raised(caught(CALLS["coalesced"], Failing(RuntimeError("planted"), fails)))


def fails_in_start(group):
    def start():
        raise ValueError("planted")

    collective.coalesced(start, CPU, group)


def test_an_error_between_the_ends_of_coalescing_counts():
    """Those that began before it are sent."""
    assert has_raised(caught(fails_in_start, Failing(RuntimeError("planted"), "none")))


@pytest.mark.parametrize("wrong", [3, "group", object(), [None]])
def test_a_wrong_group_is_no_failed_collective(wrong):
    error = caught(collective.resolve_group, wrong)
    assert isinstance(error, TypeError)
    assert not has_raised(error)


def test_an_error_beside_the_call_does_not_count(monkeypatch):
    """As a lookup of what a group can do, memory for what arrives, or a factor."""
    group = Failing(RuntimeError("not reached"))

    def fail(*arguments):
        raise MemoryError("planted")

    monkeypatch.setattr(collective, "abilities_of", fail)
    assert not has_raised(caught(collective.all_reduce_together, [FLAT], [], 1.0, group))
    monkeypatch.setattr(torch, "empty_like", fail)
    assert not has_raised(caught(collective.start_all_gather, FLAT, group))
    monkeypatch.setattr(dist, "BroadcastOptions", fail)
    assert not has_raised(caught(collective.start_broadcast, FLAT, group, 0))


def failed_collective():
    return caught(collective.all_reduce, FLAT, Failing(RuntimeError("planted")))


def wrapped_from():
    raise DPFuseError("wrapped") from failed_collective()


def wrapped_without_from():
    try:
        raise failed_collective()
    except RuntimeError:
        raise ValueError("wrapped")  # noqa: B904


def hidden():
    try:
        raise failed_collective()
    except RuntimeError:
        raise ValueError("wrapped") from None


def twice():
    raise KeyError("wrapped again") from caught(wrapped_from)


def raised_again():
    raise failed_collective().with_traceback(None)


def in_a_circle():
    error, other = failed_collective(), ValueError("other")
    error.__context__, other.__context__ = other, error
    raise other


def in_a_thread():
    errors = []
    thread = threading.Thread(target=lambda: errors.append(failed_collective()))
    thread.start()
    thread.join()
    raise errors[0]


@pytest.mark.parametrize(
    "function", [wrapped_from, wrapped_without_from, hidden, twice, raised_again, in_a_circle, in_a_thread]
)
def test_an_error_that_comes_from_that_of_a_collective_counts(function):
    assert has_raised(caught(function))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of exceptions came with Python 3.11")
def test_a_group_of_exceptions_counts_if_one_of_them_does():
    assert has_raised(builtins.ExceptionGroup("several", [ValueError("other"), failed_collective()]))
    assert not has_raised(builtins.ExceptionGroup("several", [ValueError("other")]))


def test_other_errors_do_not_count():
    circle = ValueError("one")
    circle.__context__ = KeyError("two")
    circle.__context__.__context__ = circle
    for error in (circle, AnsweringError("any"), SlottedError("any"), FrozenError()):
        assert not has_raised(error)
