"""DPF-L08: which modes of the ranks are told of, and what is to be done about each."""

from __future__ import annotations

import pytest

from dpfuse.rules.l08_other_modes import AUTOCAST, TRAIN, note

NONE, SOME, ALL = (0, False), (1, True), (3, True)  # of 3 ranks, and whether this one is among them


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([{"training": SOME}] * 3, [1, 2]),
        ([{"training": SOME}], []),
        ([{"training": ALL, "float16": NONE, "bfloat16": ALL}] * 3, []),
        ([{"training": NONE}] * 3, []),
        ([{"training": SOME}, {"training": ALL}] * 3, []),  # ranks that switch one after the other
        ([{"training": SOME}, {"training": ALL, "float16": SOME}], [1]),
    ],
)
def test_only_modes_that_differ_in_two_backwards_running_are_told_of(seen, said):
    backwards, found = 0, []
    for number, modes in enumerate(seen):
        backwards, text = note(backwards, 0, 3, modes)
        found += [number] * (text is not None)
    assert found == said


@pytest.mark.parametrize(
    ("modes", "ran", "do"),
    [
        ({"training": SOME}, "1 of 3 in training mode, this rank among them", TRAIN),
        ({"float16": (2, False)}, "2 of 3 under autocast with float16, this rank not", AUTOCAST),
        (
            {"training": ALL, "float16": SOME, "bfloat16": (2, False)},
            "1 of 3 under autocast with float16, this rank among them; 2 of 3 under autocast with bfloat16, this rank "
            "not",
            AUTOCAST,
        ),
        (
            {"training": SOME, "bfloat16": SOME},
            "1 of 3 in training mode, this rank among them; 1 of 3 under autocast with bfloat16, this rank among them",
            f"{TRAIN} and {AUTOCAST}",
        ),
    ],
)
def test_the_words_name_each_mode_that_differs_and_its_remedy(modes, ran, do):
    assert note(1, 1, 3, modes)[1] == (
        "rank 1: in 2 backwards running, the ranks had run their forwards in different modes: "
        f"{ran}. Expected the same on every rank: {do}."
    )
