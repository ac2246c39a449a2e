"""Hub and spokes in one process, over real connections: who is believed, and what becomes of the others."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dpfuse.engine.waiting import Board, Doing, Wrapper, leave
from dpfuse.liveness.diagnosis import End, EndKind, end_with
from dpfuse.liveness.heartbeat import Heartbeat
from dpfuse.liveness.hub import STRANGERS, Hub
from dpfuse.liveness.line import MAX_UNSENT, Line, LineError
from dpfuse.liveness.meeting import Meeting, host_name, open_meeting
from dpfuse.liveness.spoke import Spoke

pytestmark = pytest.mark.timeout(60)


class Job:
    """A hub and its spokes."""

    def __init__(self, size: int) -> None:
        self.meeting = open_meeting(one_host=True)
        self.living = True
        self.boards = [Board(rank) for rank in range(size)]
        common = {"size": size, "whole_job": True, "alive": lambda: self.living}
        self.hub = Hub(meeting=self.meeting, board=self.boards[0], **common)
        told = Meeting.from_text(self.meeting.text())
        spokes = [Spoke(told, board=board, **common) for board in self.boards[1:]]
        self.beats: list[Heartbeat] = [self.hub, *spokes]
        for beat in self.beats:
            beat.start()
        until(lambda: all(self.seen(0, rank).status is not None for rank in range(size)))

    def seen(self, by: int, rank: int):
        return self.beats[by]._seen(time.monotonic()).get(rank)

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.meeting.places[0], 5)

    def is_well(self) -> bool:
        """Whether every rank is heard, now."""
        asked = time.monotonic()
        heard = lambda: [self.hub._peers[rank].heard for rank in range(1, len(self.beats))]  # noqa: E731
        until(lambda: all(when > asked for when in heard()))
        return all(self.seen(0, rank).alive for rank in range(len(self.beats)))


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(3)
    yield made
    for beat in made.beats:
        beat.stop()
        assert not beat.beats


def test_the_hub_knows_where_every_rank_is(job):
    job.boards[2].place = (Wrapper(0, 60.0), Doing.FORWARD, 41, -1)
    until(lambda: job.seen(0, 2).status.doing is Doing.FORWARD)
    assert job.seen(0, 2).status.step == 42
    assert job.seen(0, 1).status.doing is Doing.BETWEEN


def test_last_words_reach_everybody(job):
    job.beats[1].announce(end_with(ValueError("planted")))
    job.beats[1].stop()
    until(lambda: job.seen(2, 1) is not None)
    for rank in (0, 2):
        end = job.seen(rank, 1).end
        assert (end.kind, end.error, end.echo) == (EndKind.FAILED, "ValueError: planted", False)
        assert job.boards[rank].heartbeat.explain().ranks == (1,)


def test_last_words_of_the_hub_reach_everybody(job):
    job.hub.announce(end_with(ValueError("planted")))
    job.hub.stop()
    for rank in (1, 2):
        until(lambda rank=rank: job.seen(rank, 0).end is not None)
        assert job.boards[rank].heartbeat.explain().text.startswith("rank 0 ended with ValueError: planted")


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_goes_on_beating_and_its_end_stays(job, leaver):
    leave(job.boards[leaver], RuntimeError("planted"))
    assert job.beats[leaver].beats
    for rank in {0, 1, 2} - {leaver}:
        until(lambda rank=rank: job.seen(rank, leaver) is not None and job.seen(rank, leaver).end is not None)
        failure = job.boards[rank].heartbeat.explain()
        assert failure.ranks == (leaver,)
        assert failure.text.startswith(f"rank {leaver} left its process group: RuntimeError: planted; 0.")
    job.beats[leaver].announce(End(EndKind.NORMAL))
    job.beats[leaver].stop()
    assert all(job.seen(rank, leaver).end.kind is EndKind.LEFT for rank in {0, 1, 2} - {leaver})


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_waits_after_it_left_is_told_so(job, leaver):
    board = job.boards[leaver]
    board.place = (Wrapper(0, 60.0), Doing.BACKWARD, 3, 0)
    leave(board, RuntimeError("planted"))
    assert board.peer_failure is None
    board.waits += 1
    until(lambda: board.peer_failure is not None, 3.0)
    assert board.peer_failure.ranks == (leaver,)
    assert board.peer_failure.text.startswith("it left its process group: RuntimeError: planted; expected no further")


def test_leaving_without_a_heartbeat_does_nothing():
    leave(None, RuntimeError("planted"))
    leave(Board(0), RuntimeError("planted"))


def test_a_goodbye_is_told_to_those_who_ask(job):
    job.beats[1].announce(End(EndKind.NORMAL))
    job.beats[1].stop()
    until(lambda: job.seen(0, 1).end is not None)
    assert job.seen(2, 1) is None
    failure = job.boards[2].heartbeat.explain()
    assert failure.ranks == (1,)
    assert "ended without an error" in failure.text


def test_a_connection_that_ends_without_a_word_is_a_death(job):
    job.beats[1].stop()
    until(lambda: job.seen(2, 1) is not None)
    assert "ended suddenly" in str(job.seen(2, 1).end)


def test_a_group_that_was_destroyed_is_left(job):
    job.living = False
    until(lambda: not any(beat.beats for beat in job.beats))
    ends = [job.seen(rank, 0).end for rank in (1, 2) if job.seen(rank, 0).end is not None]
    assert not any(end.failed for end in ends)


def test_no_cause_is_made_up(job):
    begin = time.monotonic()
    assert job.boards[1].heartbeat.explain() is None
    assert time.monotonic() - begin < 3


RUBBISH = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\n\n\n",
    b"\x00\xff" * 100 + b"\n",
    b"[" * 50_000 + b"\n",
    b'["hello", "", 1]\n',
    b'["hello", 7, 1]\n',
    b'["hello", null, 1]\n["end",true,"gone",false,null]\n',
    b'{"hello": 1}\n',
    b'["beat", []]\n',
    b"x" * 100_000,
    json.dumps(["hello", "é" * 32, 1]).encode() + b"\n",
]


def test_strangers_are_hung_up_on_and_change_nothing(job):
    for rubbish in RUBBISH:
        with job.stranger() as stranger:
            try:
                stranger.sendall(rubbish)
                assert stranger.recv(100) == b"", rubbish[:20]
            except (ConnectionResetError, BrokenPipeError):
                pass  # hung up before all of it was read
    assert job.is_well()


def test_a_rank_that_is_none_or_here_already_is_hung_up_on(job):
    for rank in (0, 1, 3, -1, 1.0, True, None, "1", 10**30):
        with job.stranger() as stranger:
            stranger.sendall(json.dumps(["hello", job.meeting.token, rank]).encode() + b"\n")
            assert stranger.recv(100) == b"", rank
    assert job.is_well()


def test_strangers_who_say_nothing_are_hung_up_on(job, monkeypatch):
    monkeypatch.setattr("dpfuse.liveness.hub.INTRODUCE_WITHIN", 0.2)
    silent = [job.stranger() for _ in range(5)]
    for stranger in silent:
        assert stranger.recv(1) == b""
        stranger.close()
    assert job.is_well()


def test_strangers_are_not_kept_without_bound(job):
    many = [job.stranger() for _ in range(STRANGERS + 40)]
    until(lambda: len(job.hub._strangers) == STRANGERS + 3)
    assert job.is_well()
    for stranger in many:
        stranger.close()
    until(lambda: not job.hub._strangers)


def test_a_rank_that_speaks_nonsense_is_not_believed_dead(job):
    job.beats[1]._line.send(["beat", "nonsense"])
    until(lambda: job.seen(0, 1).status is None)
    assert job.seen(0, 1).end is None
    assert job.seen(0, 2).alive


def test_our_own_sleep_is_no_silence_of_others(job):
    job.hub._peers[1].heard -= 100
    before = job.hub._peers[1].heard
    job.hub._forgive(99.0)
    assert job.hub._peers[1].heard - before == pytest.approx(99.0)


def test_a_place_is_told_with_the_users_line_and_the_collective():
    board = Board(0)
    beat = Hub(2, Meeting("", ()), board=board, whole_job=True, alive=lambda: True)
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    board.thread = thread.ident
    beat._since -= 30
    beat._see_myself(time.monotonic())
    gate.set()
    thread.join()
    assert 29 < beat.status.age < 40
    assert not beat.status.waits
    board.waits += 1
    beat._see_myself(time.monotonic())
    assert beat.status.waits
    assert beat.status.age < 1  # it has moved
    beat.abandon()


def test_collectives_that_do_not_end_are_waiting():
    board = Board(0)
    beat = Hub(2, Meeting("", ()), board=board, whole_job=True, alive=lambda: True)
    answers = [False, True]
    board.device_done = lambda: answers.pop(0)
    beat._see_myself(time.monotonic())
    assert not beat.status.waits  # it has just moved: its device is left in peace
    assert len(answers) == 2
    beat._since -= 30
    beat._see_myself(time.monotonic())
    assert beat.status.waits
    beat._see_myself(time.monotonic())
    assert not beat.status.waits
    assert board.device_done is None
    beat.abandon()


def test_a_line_takes_what_fits_and_drops_the_rest():
    ours, theirs = socket.socketpair()
    line = Line(ours)
    for _ in range(200):
        line.send("x" * 10_000)
    assert len(line._unsent) <= MAX_UNSENT
    other = Line(theirs)
    got = other.receive()
    assert set(got) == {"x" * 10_000}
    line.close()
    with pytest.raises(LineError) as caught:
        while True:
            other.receive()
    assert caught.value.closed
    other.close()


@pytest.mark.parametrize(
    "text", ["", "null", "[]", '["t", [["example.org", 1]]]', '["t", [["127.0.0.1", 0]]]', "[1, []]"]
)
def test_what_names_no_meeting_is_refused(text):
    with pytest.raises(ValueError, match="names no meeting"):
        Meeting.from_text(text)


def test_on_one_host_nobody_listens_beyond_loopback():
    meeting = open_meeting(one_host=True)
    assert [host for host, _ in meeting.places] == ["127.0.0.1"]
    assert Meeting.from_text(meeting.text()) == meeting
    assert len(meeting.token) == 32
    for listener in meeting.listeners:
        listener.close()


def test_on_several_hosts_loopback_is_of_no_use(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    try:
        meeting = open_meeting(one_host=False)
    except OSError:
        return  # this machine has no other address
    assert not any(host.startswith("127.") for host, _ in meeting.places)
    for listener in meeting.listeners:
        listener.close()


def test_the_name_of_a_host_is_its_own():
    assert host_name() == host_name()
    assert len(host_name()) == 32
    assert os.uname().nodename not in host_name()
