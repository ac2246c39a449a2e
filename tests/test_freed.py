"""The tests' own judgement of what is freed."""

from __future__ import annotations

import weakref
from threading import Timer

from tests.freed import still_held


class Thing:
    """Can be referred to weakly."""


def test_what_is_held_is_named_and_what_only_holds_itself_is_not():
    held, cycle = Thing(), Thing()
    cycle.itself = cycle
    references = [weakref.ref(held), weakref.ref(cycle)]
    del cycle
    assert still_held(references, within=0.0) == ["Thing"]


def test_what_another_thread_lets_go_of_a_moment_later_is_freed():
    things = [Thing()]
    references = [weakref.ref(things[0])]
    Timer(0.05, things.clear).start()
    assert still_held(references) == []
