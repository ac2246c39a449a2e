"""The judgement on ranks that wait, from states made by hand: no process, no network."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from dpfuse.comm.waiting import Doing
from dpfuse.errors import DPFuseError
from dpfuse.liveness.diagnosis import End, EndKind, RankState, Status, end_with, find_cause, judge, printable

WAITS = Status(Doing.BACKWARD, step=7, bucket=2, age=20.0, waits=True, limit=8.0)
BUSY = Status(Doing.BETWEEN, step=7, age=20.0, limit=8.0, at="eval.py:57 in evaluate")
BLOCKED = replace(BUSY, call="barrier", blocked=9.0)


def judged(*states: RankState, whole_job: bool = True):
    return judge(dict(enumerate(states)), whole_job=whole_job)


def test_no_finding_if_no_rank_waits():
    assert judged(RankState(BUSY), RankState(BUSY, silence=100.0), RankState(BUSY, end=End(EndKind.FAILED))) is None


def test_no_finding_after_a_short_wait():
    assert judged(RankState(replace(WAITS, age=3.0)), RankState(BUSY)) is None


def test_a_rank_that_computes_is_only_reported_however_long_it_takes():
    finding = judged(RankState(replace(WAITS, age=3600.0)), RankState(BUSY))
    assert not finding.fatal
    assert finding.ranks == (1,)
    assert "rank 1 is between steps, before step 7, for 20 s, at eval.py:57 in evaluate" in finding.text
    assert "rank 0 waits for bucket 2 in the backward of step 7" in finding.text


@pytest.mark.parametrize("limit", [30.0, inf])
def test_the_report_comes_after_ten_seconds(limit):
    waits = replace(WAITS, limit=limit)
    assert judged(RankState(replace(waits, age=9.9)), RankState(BUSY)) is None
    assert judged(RankState(replace(waits, age=10.1)), RankState(BUSY)).fatal is False


def test_silence_is_fatal_at_the_limit_and_is_not_called_an_end():
    assert not judged(RankState(WAITS), RankState(BUSY, silence=7.9)).fatal
    finding = judged(RankState(WAITS), RankState(BUSY, silence=8.1))
    assert finding.fatal
    assert finding.ranks == (1,)
    assert "runs no Python" in finding.text
    assert "dead" not in finding.text


def test_a_long_evaluation_and_a_blip_are_not_a_stall():
    assert not judged(RankState(replace(WAITS, age=300.0)), RankState(BUSY, silence=5.0)).fatal


def test_without_a_limit_nothing_is_fatal():
    waits = replace(WAITS, limit=inf)
    for other in (
        RankState(BUSY, silence=1e4),
        RankState(BUSY, end=End(EndKind.FAILED, ago=100.0)),
        RankState(BLOCKED),
    ):
        assert not judged(RankState(waits), other).fatal


def test_a_rank_without_any_heartbeat_is_never_called_silent():
    finding = judged(RankState(WAITS), RankState(None, silence=1e6))
    assert not finding.fatal
    assert "rank 1 has never sent a heartbeat" in finding.text


def test_a_failure_is_fatal_after_a_second():
    waits = replace(WAITS, age=1.5)
    assert judged(RankState(waits), RankState(BUSY, end=End(EndKind.FAILED, ago=0.5))) is None
    finding = judged(RankState(waits), RankState(BUSY, end=End(EndKind.FAILED, "ValueError: planted", ago=1.2)))
    assert finding.fatal
    assert "rank 1 ended with ValueError: planted" in finding.text


def test_a_rank_that_left_its_group_is_named_although_it_lives():
    left = end_with(RuntimeError("planted\nmore"), EndKind.LEFT)
    waits = replace(WAITS, age=1.5)
    assert judged(RankState(waits), RankState(BUSY, end=replace(left, ago=0.5))) is None
    finding = judged(RankState(waits), RankState(BUSY, end=replace(left, ago=1.2)))
    assert (finding.fatal, finding.ranks) == (True, (1,))
    assert finding.text.startswith("rank 1 left its process group: RuntimeError: planted\n")


def test_an_error_that_names_another_rank_is_secondary():
    named = DPFuseError("rank 2 ended")
    named.ranks = (2,)
    assert end_with(named).secondary
    assert end_with(RuntimeError("[gloo] Connection closed by peer")).secondary
    assert not end_with(RuntimeError("planted")).secondary


def test_a_normal_end_is_fatal_after_five_seconds():
    waits = replace(WAITS, limit=60.0)
    assert not judged(RankState(waits), RankState(BUSY, end=End(EndKind.NORMAL, ago=4.0))).fatal
    finding = judged(RankState(waits), RankState(BUSY, end=End(EndKind.NORMAL, ago=5.5)))
    assert finding.fatal
    assert "rank 1 ended without an error" in finding.text


def test_the_cause_is_named_and_not_the_secondary_failures():
    cause = RankState(BUSY, end=End(EndKind.FAILED, "ValueError: planted", ago=2.0))
    secondary = RankState(BUSY, end=End(EndKind.FAILED, "DPFuseError: rank 2 ended", secondary=True, ago=3.0))
    normal = RankState(BUSY, end=End(EndKind.NORMAL, ago=9.0))
    assert judged(RankState(WAITS), secondary, cause, normal).ranks == (2,)
    assert find_cause({0: RankState(WAITS), 1: secondary, 2: cause, 3: normal}).ranks == (2,)
    assert find_cause({0: RankState(WAITS), 1: secondary, 3: normal}).ranks == (3,)
    assert find_cause({0: RankState(WAITS), 1: secondary}).ranks == (1,)
    assert find_cause({0: RankState(WAITS), 1: RankState(BUSY, silence=1e3)}) is None


def test_several_causes_are_counted_and_the_first_is_named():
    ends = [End(EndKind.FAILED, "ValueError: planted", ago=3.0), End(EndKind.FAILED, ago=2.0)]
    finding = judged(RankState(WAITS), *(RankState(BUSY, end=end) for end in ends))
    assert finding.ranks == (1, 2)
    assert finding.text.startswith("ranks 1-2 ended; first, rank 1 ended with ValueError: planted\n")


def test_of_two_failures_the_first_is_the_cause():
    first, second = (RankState(BUSY, end=End(EndKind.FAILED, ago=ago)) for ago in (3.0, 2.0))
    assert find_cause({0: RankState(WAITS), 1: second, 2: first}).ranks == (2,)


def test_all_ranks_stuck_in_different_collectives_is_a_deadlock():
    finding = judged(RankState(WAITS), RankState(BLOCKED))
    assert finding.fatal
    assert finding.ranks == (1,)
    assert "blocked in torch.distributed's barrier" in finding.text
    assert "the same number of batches, or train inside `with model.join():`" in finding.text


def test_a_collective_of_the_users_may_wait_for_a_rank_outside_the_group():
    assert not judged(RankState(WAITS), RankState(BLOCKED), whole_job=False).fatal


def test_no_deadlock_while_a_rank_computes_or_has_just_moved():
    assert not judged(RankState(WAITS), RankState(BLOCKED), RankState(BUSY)).fatal
    assert not judged(RankState(WAITS), RankState(replace(BLOCKED, blocked=3.0))).fatal
    assert not judged(RankState(WAITS), RankState(BLOCKED), RankState(None)).fatal


def test_all_ranks_waiting_for_the_same_collective_is_not_fatal():
    assert not judged(RankState(WAITS), RankState(replace(WAITS, bucket=3))).fatal


def test_ranks_that_do_the_same_share_a_line():
    busy = {rank: RankState(replace(WAITS, age=20.0 + rank / 1000)) for rank in range(1000)}
    finding = judge(busy | {500: RankState(BUSY), 501: RankState(BUSY, silence=4.0)}, whole_job=True)
    lines = finding.text.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("  rank 500 is between steps")
    assert lines[2].startswith("  rank 501 has sent no heartbeat for 4 s")
    assert lines[3].startswith("  ranks 0-499, 502-999: each waits for bucket 2")


def test_a_report_is_short_however_much_ranks_differ():
    seen = {rank: RankState(replace(BUSY, step=rank)) for rank in range(1, 500)} | {0: RankState(WAITS)}
    lines = judge(seen, whole_job=True).text.splitlines()
    assert len(lines) < 20
    assert lines[-1] == "  and 488 ranks elsewhere"


def test_a_status_is_equal_after_travelling():
    for status in (WAITS, BUSY, BLOCKED, replace(WAITS, limit=inf)):
        assert Status.from_message(status.message()) == status


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 9), (0, "x"), (0, True), (1, 1.5), (2, None), (4, -1.0), (4, inf), (4, float("nan")), (5, 1), (6, "long"),
        (7, 3), (7, "x" * 100_000), (8, ["barrier"]), (9, {}),
    ],
)  # fmt: skip
def test_a_message_that_is_not_a_status_is_rejected(place, value):
    message = WAITS.message()
    message[place] = value
    with pytest.raises(ValueError):
        Status.from_message(message)
    with pytest.raises(ValueError):
        Status.from_message(message[:-1])
    with pytest.raises(ValueError):
        Status.from_message({"status": message})


def test_a_peers_text_cannot_command_a_terminal():
    assert printable("a\x1b[31mb\nc") == "a [31mb c"
    assert printable("a\nb\x07", lines=True) == "a\nb "


SAVES = Status(Doing.SAVE, step=7, age=20.0, waits=True, limit=60.0)


def test_a_call_of_every_rank_that_one_has_left_out_is_named():
    """As `if rank == 0: save_checkpoint(...)` leaves it out."""
    said = "Every rank calls save_checkpoint(): rank 0 waits in it, and rank 1 is elsewhere. Take the call out of"
    waits = replace(WAITS, limit=60.0)
    assert said in judged(RankState(SAVES), RankState(waits)).text
    assert said in judged(RankState(SAVES), RankState(replace(BLOCKED, limit=60.0))).text
    late = judged(*(RankState(replace(one, age=61.0)) for one in (SAVES, waits)))
    assert late.fatal
    assert said in late.text
    assert "batches" not in late.text
    ended = {0: RankState(SAVES), 1: RankState(BUSY, end=End(EndKind.NORMAL, ago=6.0))}
    for found in (judge(ended, whole_job=True), find_cause(ended)):
        assert said in found.text
        assert "batches" not in found.text


def test_a_rank_that_may_still_come_to_the_call_has_not_left_it_out():
    for other in (BUSY, replace(WAITS, step=6), SAVES):
        assert "Every rank calls" not in judged(RankState(SAVES), RankState(other)).text
