"""Which sizes are recommended, for invented times."""

from __future__ import annotations

import pytest

from dpfuse.commands.recommendation import recommend
from dpfuse.commands.sweep import Row

QUIET = (0.0, 0.001, -0.001, 0.002, -0.001)  # parts of a step that turns differ by
DRIFT = (0.0, 0.3, 0.1, 0.6, 0.2)


def row(name, sizes, step, parts=QUIET):
    return Row(name, sizes, 3, tuple((step * (1 + part), step * (1 + part)) for part in parts))


def default(step=10.0, parts=QUIET):
    return row("25 / 1 MB", (25.0, 1.0), step, parts)


def tuned(step, parts=QUIET):
    return row("tuned", (25.0, 1.0), step, parts)


PEERS = [row("no averaging", None, 1.0), row("torch DDP", None, 5.0)]


@pytest.mark.parametrize(
    ("others", "arguments"),
    [
        ([], ""),
        ([row("8 / 1 MB", (8.0, 1.0), 9.9)], ""),  # within 2 %
        ([row("8 / 1 MB", (8.0, 1.0), 9.0)], "comm_buffer_size=8"),
        ([row("25 / 0.1 MB", (25.0, 0.1), 9.0)], "last_comm_buffer_size=0.1"),
        ([row("8 / 0.1 MB", (8.0, 0.1), 9.0)], "comm_buffer_size=8, last_comm_buffer_size=0.1"),
        ([row("inf / 0 MB", (float("inf"), 0.0), 9.0)], 'comm_buffer_size=float("inf"), last_comm_buffer_size=0'),
        ([tuned(9.0)], 'plan="auto"'),
        # One size is simpler than two, and two are simpler than tuning, where they are as fast.
        ([row("a", (8.0, 0.1), 9.0), row("b", (8.0, 1.0), 9.1)], "comm_buffer_size=8"),
        ([row("a", (8.0, 0.1), 9.0), row("b", (8.0, 1.0), 9.5)], "comm_buffer_size=8, last_comm_buffer_size=0.1"),
        ([tuned(8.95), row("a", (8.0, 0.1), 9.0)], "comm_buffer_size=8, last_comm_buffer_size=0.1"),
        ([tuned(8.0), row("a", (8.0, 0.1), 9.0)], 'plan="auto"'),
        # Of two that are equally simple, the faster one.
        ([row("a", (8.0, 1.0), 9.0), row("b", (2.0, 1.0), 8.9)], "comm_buffer_size=2"),
    ],
)
def test_the_simplest_of_the_fastest_is_taken(others, arguments):
    found = recommend([*PEERS, default(), *others])
    assert found.arguments == arguments
    assert (found.gain > 0) == bool(arguments)


def test_drift_that_meets_all_alike_hides_nothing():
    rows = [default(10.0, DRIFT), row("8 / 1 MB", (8.0, 1.0), 9.0, DRIFT)]
    assert recommend(rows).arguments == "comm_buffer_size=8"


def test_noise_that_does_not_is_no_reason_to_change():
    rows = [default(10.0, DRIFT), row("8 / 1 MB", (8.0, 1.0), 9.0, DRIFT[::-1])]
    found = recommend(rows)
    assert found.arguments == ""
    assert "no other size is faster by more than noise (8 / 1 MB: " in found.reason


def test_more_rounds_tell_more():
    parts = (0.0, 0.1, -0.1, 0.2, -0.2)
    rows = [(default(10.0, parts * times), row("8 / 1 MB", (8.0, 1.0), 8.5, parts[::-1] * times)) for times in (1, 25)]
    few, many = map(recommend, rows)
    assert few.reason.endswith("more --rounds may decide")
    assert many.arguments == "comm_buffer_size=8"


def test_few_rounds_are_told():
    rows = [default(10.0, (0.0,)), row("8 / 1 MB", (8.0, 1.0), 9.0, (0.0,))]
    assert recommend(rows).reason.endswith("with fewer than 5 rounds the noise is not known well")
    assert recommend(rows[:1]).reason.endswith("with fewer than 5 rounds the noise is not known well")
