"""The verdict on ranks that wait, from tables made by hand: no process, no network."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from dpfuse.engine.waiting import Doing
from dpfuse.errors import DPFuseError
from dpfuse.liveness.diagnosis import End, EndKind, Seen, Status, blame, clean, end_with, judge

WAITS = Status(Doing.BACKWARD, step=7, bucket=2, age=20.0, waits=True, limit=8.0)
BUSY = Status(Doing.BETWEEN, step=7, age=20.0, limit=8.0, at="eval.py:57 in evaluate")
BLOCKED = replace(BUSY, call="barrier", blocked=9.0)


def judged(*seen: Seen, whole_job: bool = True):
    return judge(dict(enumerate(seen)), whole_job=whole_job)


def test_nobody_waits():
    assert judged(Seen(BUSY), Seen(BUSY, silence=100.0), Seen(BUSY, end=End(EndKind.FAILED))) is None


def test_a_short_wait_is_no_news():
    assert judged(Seen(replace(WAITS, age=3.0)), Seen(BUSY)) is None


def test_a_rank_that_computes_is_only_reported_however_long_it_takes():
    finding = judged(Seen(replace(WAITS, age=3600.0)), Seen(BUSY))
    assert not finding.fatal
    assert finding.ranks == (1,)
    assert "rank 1 is between steps, before step 7, for 20 s, at eval.py:57 in evaluate" in finding.text
    assert "rank 0 waits for bucket 2 in the backward of step 7" in finding.text


@pytest.mark.parametrize("limit", [30.0, inf])
def test_the_report_comes_after_ten_seconds(limit):
    waits = replace(WAITS, limit=limit)
    assert judged(Seen(replace(waits, age=9.9)), Seen(BUSY)) is None
    assert judged(Seen(replace(waits, age=10.1)), Seen(BUSY)).fatal is False


def test_silence_is_fatal_at_the_limit_and_is_not_called_death():
    assert not judged(Seen(WAITS), Seen(BUSY, silence=7.9)).fatal
    finding = judged(Seen(WAITS), Seen(BUSY, silence=8.1))
    assert finding.fatal
    assert finding.ranks == (1,)
    assert "runs no Python" in finding.text
    assert "dead" not in finding.text


def test_a_long_evaluation_and_a_blip_are_not_a_stall():
    assert not judged(Seen(replace(WAITS, age=300.0)), Seen(BUSY, silence=5.0)).fatal


def test_without_a_limit_nothing_is_fatal():
    waits = replace(WAITS, limit=inf)
    for other in (Seen(BUSY, silence=1e4), Seen(BUSY, end=End(EndKind.FAILED, ago=100.0)), Seen(BLOCKED)):
        assert not judged(Seen(waits), other).fatal


def test_a_rank_that_was_never_heard_of_is_never_called_silent():
    finding = judged(Seen(WAITS), Seen(None, silence=1e6))
    assert not finding.fatal
    assert "rank 1 was never heard of" in finding.text


def test_a_death_is_fatal_after_a_moment():
    waits = replace(WAITS, age=1.5)
    assert judged(Seen(waits), Seen(BUSY, end=End(EndKind.FAILED, ago=0.5))) is None
    finding = judged(Seen(waits), Seen(BUSY, end=End(EndKind.FAILED, "ValueError: planted", ago=1.2)))
    assert finding.fatal
    assert "rank 1 ended with ValueError: planted" in finding.text


def test_a_rank_that_left_its_group_is_named_although_it_lives():
    left = end_with(RuntimeError("planted\nmore"), EndKind.LEFT)
    waits = replace(WAITS, age=1.5)
    assert judged(Seen(waits), Seen(BUSY, end=replace(left, ago=0.5))) is None
    finding = judged(Seen(waits), Seen(BUSY, end=replace(left, ago=1.2)))
    assert (finding.fatal, finding.ranks) == (True, (1,))
    assert finding.text.startswith("rank 1 left its process group: RuntimeError: planted\n")


def test_an_error_that_names_another_rank_is_an_echo():
    named = DPFuseError("rank 2 ended")
    named.ranks = (2,)
    assert end_with(named).echo
    assert end_with(RuntimeError("[gloo] Connection closed by peer")).echo
    assert not end_with(RuntimeError("planted")).echo


def test_a_goodbye_is_fatal_once_its_last_data_must_have_come():
    waits = replace(WAITS, limit=60.0)
    assert not judged(Seen(waits), Seen(BUSY, end=End(EndKind.NORMAL, ago=4.0))).fatal
    finding = judged(Seen(waits), Seen(BUSY, end=End(EndKind.NORMAL, ago=5.5)))
    assert finding.fatal
    assert "rank 1 ended without an error" in finding.text


def test_the_cause_is_named_and_not_its_echo():
    cause = Seen(BUSY, end=End(EndKind.FAILED, "ValueError: planted", ago=2.0))
    echo = Seen(BUSY, end=End(EndKind.FAILED, "DPFuseError: rank 2 ended", echo=True, ago=3.0))
    left = Seen(BUSY, end=End(EndKind.NORMAL, ago=9.0))
    assert judged(Seen(WAITS), echo, cause, left).ranks == (2,)
    assert blame({0: Seen(WAITS), 1: echo, 2: cause, 3: left}).ranks == (2,)
    assert blame({0: Seen(WAITS), 1: echo, 3: left}).ranks == (3,)
    assert blame({0: Seen(WAITS), 1: echo}).ranks == (1,)
    assert blame({0: Seen(WAITS), 1: Seen(BUSY, silence=1e3)}) is None


def test_of_two_deaths_the_first_is_the_cause():
    first, second = (Seen(BUSY, end=End(EndKind.FAILED, ago=ago)) for ago in (3.0, 2.0))
    assert blame({0: Seen(WAITS), 1: second, 2: first}).ranks == (2,)


def test_all_ranks_stuck_in_different_collectives_is_a_deadlock():
    finding = judged(Seen(WAITS), Seen(BLOCKED))
    assert finding.fatal
    assert finding.ranks == (1,)
    assert "blocked in torch.distributed's barrier" in finding.text


def test_a_collective_of_the_users_may_wait_for_a_rank_outside_the_group():
    assert not judged(Seen(WAITS), Seen(BLOCKED), whole_job=False).fatal


def test_no_deadlock_while_somebody_computes_or_has_just_moved():
    assert not judged(Seen(WAITS), Seen(BLOCKED), Seen(BUSY)).fatal
    assert not judged(Seen(WAITS), Seen(replace(BLOCKED, blocked=3.0))).fatal
    assert not judged(Seen(WAITS), Seen(BLOCKED), Seen(None)).fatal


def test_all_ranks_waiting_for_the_same_may_have_a_slow_network():
    assert not judged(Seen(WAITS), Seen(replace(WAITS, bucket=3))).fatal


def test_ranks_that_do_the_same_share_a_line():
    busy = {rank: Seen(replace(WAITS, age=20.0 + rank / 1000)) for rank in range(1000)}
    finding = judge(busy | {500: Seen(BUSY), 501: Seen(BUSY, silence=4.0)}, whole_job=True)
    lines = finding.text.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("  rank 500 is between steps")
    assert lines[2].startswith("  rank 501 has sent no heartbeat for 4 s")
    assert lines[3].startswith("  ranks 0-499, 502-999 waits for bucket 2")


def test_a_report_is_short_however_much_ranks_differ():
    seen = {rank: Seen(replace(BUSY, step=rank)) for rank in range(1, 500)} | {0: Seen(WAITS)}
    lines = judge(seen, whole_job=True).text.splitlines()
    assert len(lines) == 14
    assert lines[-1] == "  and 488 ranks elsewhere"


def test_a_status_survives_its_way():
    for status in (WAITS, BUSY, BLOCKED, replace(WAITS, limit=inf)):
        assert Status.from_message(status.message()) == status


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 9), (0, "x"), (0, True), (1, 1.5), (2, None), (4, -1.0), (4, inf), (4, float("nan")), (5, 1), (6, "long"),
        (7, 3), (7, "x" * 100_000), (8, ["barrier"]), (9, {}),
    ],
)  # fmt: skip
def test_what_is_no_status_is_refused(place, value):
    message = WAITS.message()
    message[place] = value
    with pytest.raises(ValueError):
        Status.from_message(message)
    with pytest.raises(ValueError):
        Status.from_message(message[:-1])
    with pytest.raises(ValueError):
        Status.from_message({"status": message})


def test_a_peers_text_cannot_command_a_terminal():
    assert clean("a\x1b[31mb\nc") == "a [31mb c"
    assert clean("a\nb\x07", lines=True) == "a\nb "
