"""DPF-L07: which learning rates of the ranks are told of, and with which numbers."""

from __future__ import annotations

import pytest

from dpfuse.rules.l07_other_rates import REMEDY, mean_of, note

OWN = [("Adam", [0.1, 0.3]), ("SGD", [0.2])]
OTHER = {"rank": 0, "size": 2, "own": OWN, "total": 0.5, "comparable": True, "same": False}
SAME, UNKNOWN = OTHER | {"same": True}, OTHER | {"comparable": False}


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([OTHER, OTHER, OTHER], [1, 2]),
        ([OTHER], []),
        ([SAME] * 4, []),
        ([OTHER, SAME, OTHER, SAME], []),  # as a schedule that one rank steps after the step, and another before it
        ([OTHER, UNKNOWN, OTHER], []),
        ([UNKNOWN] * 4, []),  # rates on a device, or of other parameters
        ([SAME, OTHER, OTHER], [2]),
    ],
)
def test_only_other_rates_of_the_same_parameters_in_two_backwards_running_are_told_of(seen, said):
    backwards, found = 0, []
    for number, each in enumerate(seen):
        backwards, text = note(backwards, **each)
        found += [number] * (text is not None)
    assert found == said


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (OTHER, "Rank 0 has Adam 0.1, 0.3, SGD 0.2, with a mean of 0.2; the other rank has a mean of 0.3. Expected"),
        (
            OTHER | {"rank": 2, "size": 3, "own": [("SGD", [1])]},
            "Rank 2 has SGD 1, with a mean of 1; the other ranks have a",
        ),
    ],
)
def test_the_words_have_the_rates_of_this_rank_and_the_mean_of_the_others(seen, words):
    text = note(1, **seen)[1]
    assert text.startswith(f"rank {seen['rank']}: in 2 steps running, the learning rates were not the same on all ")
    assert words in text
    assert text.endswith(REMEDY)


def test_a_rank_without_rates_sends_zero():
    assert mean_of([]) == 0
