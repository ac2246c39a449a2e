"""DPF-L02: which steps in a row count, and when it is said."""

from __future__ import annotations

import pytest

from dpfuse.rules.l02_nothing_averaged import STEPS, note, text_of

LOCAL, AVERAGED, BOTH, NOTHING = (False, True), (True, False), (True, True), (False, False)


@pytest.mark.parametrize(
    ("seen", "steps"),
    [
        ([LOCAL] * STEPS, STEPS),
        ([LOCAL] * (STEPS - 1), STEPS - 1),
        ([LOCAL, NOTHING] * STEPS, STEPS),  # steps without a backward of this model
        ([AVERAGED, *[LOCAL] * STEPS], STEPS),
        ([*[LOCAL] * (STEPS - 1), BOTH, *[LOCAL] * 3], 3),  # accumulation
        ([*[LOCAL] * (STEPS - 1), AVERAGED, LOCAL], 1),
        ([NOTHING] * (2 * STEPS), 0),
        ([AVERAGED] * (2 * STEPS), 0),
    ],
)
def test_steps_on_local_gradients_are_counted_since_an_average(seen, steps):
    count = 0
    for averaged, local in seen:
        count = note(count, averaged=averaged, local=local)
    assert count == steps


def test_the_words_tell_how_many_steps_of_which_optimizer():
    text = text_of(1, 20, "AdamW")
    assert text.startswith("rank 1: AdamW made 20 steps in a row on gradients of this rank alone. No backward was ")
    assert "leave no_sync(), or set require_backward_grad_sync to True" in text
