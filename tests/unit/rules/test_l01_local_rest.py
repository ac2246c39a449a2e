"""DPF-L01: which local rests of a gradient make a rank suspect, and how often it looks."""

from __future__ import annotations

import pytest

from dpfuse.rules.l01_local_rest import RARELY, Looks, note, wants_look

REST = "SGD", "net.weight", 2, "train.py:7"


def steps(kept, count):
    """The steps in which a rank looks, and those in which it suspects; `kept` tells what a look finds in each."""
    memory, looks, suspected = Looks(), [], []
    for step in range(count):
        looks += [step] * (wanted := wants_look(memory))
        memory, text = note(memory, *REST, kept=wanted and kept(step))
        suspected += [step] * (text is not None)
    return looks, suspected


@pytest.mark.parametrize(
    ("kept", "looks", "suspected"),
    [
        (lambda step: True, [0, 1, 3, 7, 15, 31, 63, 127, 191], [0, 1, 3, 7, 15, 31, 63, 127, 191]),
        (lambda step: False, [0, 1, 2, 4, 8, 16, 32, 64, 128], []),  # the program averages before each step
        (
            lambda step: step >= 5,
            [0, 1, 2, 4, 8, 9, 11, 15, 23, 39, 71, 135, 199],
            [8, 9, 11, 15, 23, 39, 71, 135, 199],
        ),
        (lambda step: step < 1, [0, 1, 2, 3, 5, 9, 17, 33, 65, 129], [0]),
    ],
)
def test_ranks_that_add_the_same_or_average_by_hand_are_looked_at_ever_less_often(kept, looks, suspected):
    assert steps(kept, 200) == (looks, suspected)
    assert RARELY == 64


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (REST, "'net.weight', and then 2 backwards that were not synchronised (the last at train.py:7); expected"),
        (("Adam", "w", 1, "a.py:3"), "of 'w', and then one backward that was not synchronised (at a.py:3);"),
        (("Adam", "w", 1, ""), "and then one backward that was not synchronised; expected the"),
    ],
)
def test_the_words_name_what_was_added_and_where(rest, words):
    text = note(Looks(), *rest, kept=True)[1]
    assert text.startswith(f"{rest[0]} has stepped on gradients that are not the mean over the ranks.")
    assert words in text
