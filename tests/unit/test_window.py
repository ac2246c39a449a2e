"""What a rank counts between two synchronised backwards, and what it compares of that."""

from __future__ import annotations

from itertools import product

import pytest

from dpfuse.engine.sync_decision import NEVER, Window
from dpfuse.engine.sync_requests import AFTER, NOTHING, Asked


def counts(window):
    """The numbers of backwards and forwards that the report compares."""
    return tuple(field.value() for field in window.fields())


def forward(window, *, counts=True, watched=True):
    window.forward_begins(counts=counts)
    began = window.began
    window.forward_ends(watched=watched, trains=True)
    return began


def test_backwards_and_forwards_are_counted_until_a_synchronised_backward_is_over():
    window = Window()
    for number in range(1, 200):
        window.reached(forward(window))
        window.backward_begins(announced=True)
        window.backward_ends()
        assert counts(window) == (number, 0)
    forward(window)
    assert counts(window) == (199, 1)
    window.begin()
    assert counts(window) == (0, 0)


def test_a_forward_in_eval_mode_or_without_watched_outputs_is_not_counted():
    window = Window()
    assert forward(window, counts=False) == NEVER
    forward(window, watched=False)
    assert counts(window) == (0, 0)


def test_what_is_not_compared_is_zero_on_every_rank():
    window = Window(counts_forwards=False)
    forward(window)
    window.backward_ends()
    assert counts(window) == (1, 0)
    window.compare_backwards(False)
    assert counts(window) == (0, 0)
    window.compare_backwards(True)
    assert counts(window) == (1, 0)


def test_a_forward_that_was_forgotten_is_not_counted_down_by_its_backward():
    window = Window()
    began = forward(window)
    assert counts(window) == (0, 1)
    window.forget_forwards()
    window.reached(began)
    assert counts(window) == (0, 0)


def test_only_a_backward_that_comes_by_no_output_stands_for_the_forwards():
    for announced, reaches, watched, left in (
        (False, False, True, 0),
        (True, False, True, 2),
        (False, True, True, 1),
        (False, False, False, 1),  # where outputs cannot be watched no backward comes by any
    ):
        window = Window()
        for is_watched in (True, watched):
            began = forward(window, watched=is_watched)
        window.backward_begins(announced=announced)
        if reaches:
            window.reached(began)
        window.gradients_accumulated()
        assert counts(window) == (0, left)


@pytest.mark.parametrize("watched", [True, False])
def test_a_forward_that_runs_a_whole_backward_counts_in_no_later_window(watched):
    window = Window()
    window.forward_begins(counts=True)
    window.begin()
    began = window.began
    window.forward_ends(watched=watched, trains=True)
    window.reached(began)
    assert counts(window) == (0, 0)


def test_a_backward_that_dies_begins_the_count_again_and_is_remembered():
    window = Window()
    window.backward_ends()
    window.backward_dies()
    assert (counts(window), window.died) == ((0, 0), True)
    window.begin_again()
    assert not window.died
    window.backward_dies()
    window.begin()
    assert not window.died


def test_the_words_of_a_number_are_grammatical():
    backwards, forwards = Window().fields()
    assert backwards.words(0) == "has run 1 backward since the last averaged one"
    assert backwards.words(2) == "has run 3 backwards since the last averaged one"
    assert forwards.words(1) == "has run 1 forward without a backward"
    assert forwards.words(0) == "has run 0 forwards without a backward"


FORWARDS = [(trains, sync) for trains in (True, False) for sync in (True, False)]


@pytest.mark.parametrize("count", range(6))
def test_what_forwards_ask_for_is_that_of_those_in_training_mode_if_there_are_any(count):
    """Each series of so many forwards, against what the words say."""
    for series in product(FORWARDS, repeat=count):
        window, asked = Window(), NOTHING
        for trains, sync in series:
            window.require_sync = sync
            window.forward_ends(watched=True, trains=trains)
            asked = AFTER[asked, trains, sync]
        deciding = [sync for trains, sync in series if trains] or [sync for _, sync in series]
        assert asked.sync == (any(deciding) if series else None)
        assert asked.by_eval == any(sync for trains, sync in series if not trains)
        assert window.owes_backward == any(deciding)


def test_each_forward_has_an_entry_wherever_it_comes():
    assert {*AFTER} == {(asked, *forward) for asked in Asked for forward in FORWARDS}
    assert {*AFTER.values()} == {*Asked} - {NOTHING}


def test_a_switch_that_is_no_bool_counts_as_one():
    window = Window()
    window.require_sync = 2
    window.forward_ends(watched=True, trains=1)
    assert window.backward_begins(announced=True)
