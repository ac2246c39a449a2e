"""Heartbeat server and clients in one process, over real connections: which messages count, which are rejected."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from dpfuse.comm.step_clock import FORWARD, StepClock
from dpfuse.comm.waiting import Board, Doing, PeerFailure, Wrapper, finish, forget_unfinished_works, leave
from dpfuse.errors import DPFuseError
from dpfuse.liveness.client import HeartbeatClient
from dpfuse.liveness.connection import MAX_UNSENT, Connection, ConnectionEndError
from dpfuse.liveness.diagnosis import End, EndKind, end_with
from dpfuse.liveness.endpoint import Endpoint, host_id, open_endpoint
from dpfuse.liveness.heartbeat import Heartbeat
from dpfuse.liveness.own_status import OwnStatus
from dpfuse.liveness.phase_lines import PhaseLines
from dpfuse.liveness.server import MAX_UNKNOWN, HeartbeatServer
from tests.patience import patience

pytestmark = pytest.mark.timeout(300)


class Job:
    """A server and its clients."""

    def __init__(self, size: int) -> None:
        self.endpoint = open_endpoint(one_host=True)
        self.living = True
        self.boards = [Board(rank) for rank in range(size)]
        common = {"size": size, "whole_job": True, "alive": lambda: self.living}
        self.server = HeartbeatServer(endpoint=self.endpoint, board=self.boards[0], **common)
        told = Endpoint.from_text(self.endpoint.text())
        clients = [HeartbeatClient(told, board=board, **common) for board in self.boards[1:]]
        self.beats: list[Heartbeat] = [self.server, *clients]
        for beat in self.beats:
            beat.start()
        until(lambda: all(self.state(0, rank).status is not None for rank in range(size)))

    def state(self, by: int, rank: int):
        return self.beats[by]._states(time.monotonic()).get(rank)

    def unknown(self) -> socket.socket:
        return socket.create_connection(self.endpoint.addresses[0], 5)

    def is_well(self) -> bool:
        """Whether every rank is heard, now."""
        asked = time.monotonic()
        heard = lambda: [self.server._peers[rank].heard for rank in range(1, len(self.beats))]  # noqa: E731
        until(lambda: all(when > asked for when in heard()))
        return all(self.state(0, rank).alive for rank in range(len(self.beats)))


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + patience(seconds)
        time.sleep(0.01)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(3)
    yield made
    for beat in made.beats:
        beat.stop()
        assert not beat.beats


def test_the_server_logs_which_rank_is_late_and_the_board_has_its_numbers(job, caplog):
    caplog.set_level("INFO", logger="dpfuse.slow")
    for board in job.boards:
        board.clock = StepClock()
    sent = 0

    def is_found() -> bool:
        nonlocal sent
        sent += 1  # each rank has 60 ms from one end of a step to the next; rank 2 is busy for 15 ms more
        for rank, board in enumerate(job.boards):
            forward = 0.05 if rank == 2 else 0.035
            board.clock._sums.append((sent, [0.0, forward * sent, 0.0, 0.0, 0.0, (0.06 - forward) * sent]))
        return bool(job.boards[0].late)

    for board in job.boards:
        board.clock.marks.append((FORWARD, 0.0, 0.0, 0.0))
    until(is_found, 30)
    late = caplog.records[0].message
    assert late.startswith("rank 2 is 15 ms (25%) late in forward since step ")
    # All ranks of this test are one thread, which is at one line.
    until(lambda: len(caplog.records) > 1)
    (_, looks) = (record.message for record in caplog.records)
    assert looks.startswith("in forward: rank 2 mostly at ")
    assert "; ranks 0-1 mostly at " in looks
    assert caplog.records[0].rank == 0
    assert job.boards[0].late["late_rank"] == 2
    assert job.boards[1].late == {}


def test_the_heartbeat_goes_on_where_judging_fails(job, caplog):
    caplog.set_level("INFO", logger="dpfuse.slow")
    job.boards[0].late = {"late_rank": 1.0}
    job.beats[0]._late = Mock(judge=Mock(side_effect=RuntimeError("planted")))
    job.boards[0].clock = StepClock()
    until(lambda: bool(caplog.records))
    assert [record.message for record in caplog.records] == [
        "slow ranks are not looked for any more: RuntimeError: planted"
    ]
    assert job.boards[0].late == {}
    job.beats[1]._send(["steps", [[1, [0.0] * 6]], []])
    job.boards[2].place = (Wrapper(0, 60.0), Doing.FORWARD, 7, -1)
    until(lambda: job.state(0, 2).status.step == 8)
    assert job.beats[0].beats
    assert job.state(0, 1).alive


def test_looks_of_another_form_end_the_connection(job):
    job.beats[0]._lines = PhaseLines(FORWARD, (2,), 3)
    job.beats[1]._send(["seen", FORWARD, {"train.py:1 in main": "many"}])
    until(lambda: job.state(0, 1).status is None)
    assert job.state(0, 2).alive


@pytest.mark.parametrize("sums", ["x", [[1]], [[1, [0.0] * 9]]])
def test_sums_of_another_form_end_the_connection(job, sums):
    job.beats[1]._send(["steps", sums, []])
    until(lambda: job.state(0, 1).status is None)
    assert job.state(0, 2).alive


def test_the_server_knows_where_every_rank_is(job):
    job.boards[2].place = (Wrapper(0, 60.0), Doing.FORWARD, 41, -1)
    until(lambda: job.state(0, 2).status.doing is Doing.FORWARD)
    assert job.state(0, 2).status.step == 42
    assert job.state(0, 1).status.doing is Doing.BETWEEN


def test_an_error_reaches_every_rank(job):
    job.beats[1].announce(end_with(ValueError("planted")))
    job.beats[1].stop()
    until(lambda: job.state(2, 1) is not None and job.state(0, 1).end is not None)
    for rank in (0, 2):
        end = job.state(rank, 1).end
        assert (end.kind, end.error, end.secondary) == (EndKind.FAILED, "ValueError: planted", False)
        assert job.boards[rank].heartbeat.explain().ranks == (1,)


def test_the_other_ranks_are_told_of_an_end_before_the_first_one_raises_and_may_be_gone(job, monkeypatch):
    known = []

    def send(peer, message, send=job.server._send):
        known.append((message[0], job.server._knows_cause()))
        send(peer, message)

    monkeypatch.setattr(job.server, "_send", send)
    job.beats[1].announce(end_with(ValueError("planted")))
    until(lambda: job.state(2, 1) is not None and job.state(0, 1).end is not None)
    assert ("end", False) in known
    assert ("end", True) not in known


def test_an_error_of_the_server_reaches_every_rank(job):
    job.server.announce(end_with(ValueError("planted")))
    job.server.stop()
    for rank in (1, 2):
        until(lambda rank=rank: job.state(rank, 0).end is not None)
        assert job.boards[rank].heartbeat.explain().text.startswith("rank 0 ended with ValueError: planted")


@pytest.mark.parametrize(
    ("doing", "kind", "text"),
    [
        (Doing.FORWARD, EndKind.FAILED, "rank 1 ended with ValueError: planted; "),
        (Doing.LOSS, EndKind.NORMAL, "If it caught an exception, let it raise the exception again"),
    ],
)
@pytest.mark.parametrize("watcher", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_group_that_is_destroyed_after_an_error_in_forward_keeps_the_error(job, watcher, doing, kind, text):
    job.boards[1].error = "ValueError: planted"
    job.boards[1].place = (Wrapper(0, 60.0), doing, 3, -1)
    job.beats[1]._alive = lambda: False
    until(lambda: not job.beats[1].beats)
    assert text in job.boards[watcher].heartbeat.explain().text
    until(lambda: job.state(watcher, 1) is not None and job.state(watcher, 1).end is not None)
    state = job.state(watcher, 1)
    assert (state.end.kind, state.status.doing) == (kind, doing)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_goes_on_beating_and_its_end_stays(job, leaver):
    leave(job.boards[leaver], RuntimeError("planted"))
    assert job.beats[leaver].beats
    for rank in {0, 1, 2} - {leaver}:
        until(lambda rank=rank: job.state(rank, leaver) is not None and job.state(rank, leaver).end is not None)
        failure = job.boards[rank].heartbeat.explain()
        assert failure.ranks == (leaver,)
        text, _, seconds = failure.text.partition("; its last heartbeat, ")
        assert text == f"rank {leaver} left its process group: RuntimeError: planted"
        assert float(seconds.split()[0]) < patience(1)
    job.beats[leaver].announce(End(EndKind.NORMAL))
    job.beats[leaver].stop()
    assert all(job.state(rank, leaver).end.kind is EndKind.LEFT for rank in {0, 1, 2} - {leaver})


@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=pytest.mark.slow)])
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


def test_a_normal_end_is_sent_to_the_ranks_that_ask(job):
    job.beats[1].announce(End(EndKind.NORMAL))
    job.beats[1].stop()
    until(lambda: job.state(0, 1).end is not None)
    assert job.state(2, 1) is None
    failure = job.boards[2].heartbeat.explain()
    assert failure.ranks == (1,)
    assert "ended without an error" in failure.text


def test_a_connection_that_closes_is_a_sudden_end(job):
    job.beats[1].stop()
    until(lambda: job.state(2, 1) is not None)
    assert "ended suddenly" in str(job.state(2, 1).end)


def test_heartbeats_end_with_their_group(job):
    job.living = False
    until(lambda: not any(beat.beats for beat in job.beats))
    ends = [job.state(rank, 0).end for rank in (1, 2) if job.state(rank, 0).end is not None]
    assert not any(end.failed for end in ends)


def test_without_an_end_there_is_no_cause(job):
    begin = time.monotonic()
    assert job.boards[1].heartbeat.explain() is None
    assert time.monotonic() - begin < patience(3)


INVALID = [
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


def test_invalid_greetings_are_rejected_and_change_nothing(job):
    for invalid in INVALID:
        with job.unknown() as unknown:
            try:
                unknown.sendall(invalid)
                assert unknown.recv(100) == b"", invalid[:20]
            except (ConnectionResetError, BrokenPipeError):
                pass  # the server closed it before it had read all
    assert job.is_well()


def test_a_rank_out_of_range_or_already_connected_is_rejected(job):
    for rank in (0, 1, 3, -1, 1.0, True, None, "1", 10**30):
        with job.unknown() as unknown:
            unknown.sendall(json.dumps(["hello", job.endpoint.token, rank]).encode() + b"\n")
            assert unknown.recv(100) == b"", rank
    assert job.is_well()


def test_connections_that_send_nothing_are_closed(job, monkeypatch):
    monkeypatch.setattr("dpfuse.liveness.server.AUTHENTICATE_WITHIN", 0.2)
    silent = [job.unknown() for _ in range(5)]
    for unknown in silent:
        assert unknown.recv(1) == b""
        unknown.close()
    assert job.is_well()


def test_the_number_of_unknown_connections_is_limited(job):
    many = [job.unknown() for _ in range(MAX_UNKNOWN + 40)]
    until(lambda: len(job.server._unknown) == MAX_UNKNOWN + 3)
    assert job.is_well()
    for unknown in many:
        unknown.close()
    until(lambda: not job.server._unknown)


def test_a_rank_that_sends_an_invalid_message_has_not_ended(job):
    job.beats[1]._connection.send(["beat", "nonsense"])
    until(lambda: job.state(0, 1).status is None)
    assert job.state(0, 1).end is None
    assert job.state(0, 2).alive


def test_own_sleep_is_not_counted_as_silence_of_others(job):
    job.server._peers[1].heard -= 100
    before = job.server._peers[1].heard
    job.server._discount(99.0)
    assert job.server._peers[1].heard - before == pytest.approx(99.0)


def test_sleep_is_not_counted_twice_where_messages_were_read_meanwhile(job):
    job.server._discount(99.0)
    job.beats[1]._discount(99.0)
    own = OwnStatus(Board(0))
    own.discount(99.0)
    now = time.monotonic()
    own.update(now)
    assert job.server._peers[1].heard <= now
    assert job.beats[1]._heard <= now
    assert own.status.age >= 0


def test_a_fork_can_abandon_a_heartbeat_that_has_ended():
    made = Job(2)
    for beat in made.beats:
        beat.stop()
        beat.close()
        assert not beat.beats


def test_of_two_ends_at_the_same_time_one_is_announced(job):
    announce = job.beats[1]._requests.announce
    ends = [End(EndKind.FAILED, f"error {number}") for number in range(8)]
    threads = [threading.Thread(target=announce, args=(end, 0.5)) for end in ends]
    for thread in threads:
        thread.start()
    until(lambda: job.state(0, 1).end is not None)
    for thread in threads:
        thread.join()
    assert job.beats[1]._requests.own_end(0.0).error == job.state(0, 1).end.error


class Unfinished:
    """A work that another rank lets end after so many questions."""

    def __init__(self, questions):
        self.questions = questions

    def is_completed(self):
        self.questions -= 1
        return self.questions < 0

    def wait(self, timeout=None):
        if timeout:
            raise RuntimeError("not done")


def test_a_failure_ends_only_the_wait_for_which_it_was_found():
    board = Board(0, frozenset({"cpu"}))
    board.peer_failure = PeerFailure("rank 1 has ended", (1,), waits=1)
    with pytest.raises(DPFuseError, match="cannot go on: rank 1 has ended"):
        finish(Unfinished(3), board)
    finish(Unfinished(3), board)  # of a collective that ends after all
    forget_unfinished_works()


def test_in_a_large_group_the_longer_interval_is_not_silence():
    common = {"board": Board(0), "whole_job": True, "alive": lambda: True}
    for size, silence in ((2, 12.0), (512, 12.0), (5120, 7.5)):  # 5120 ranks send one heartbeat in five seconds
        beat = HeartbeatServer(size, Endpoint("", ()), **common)
        assert beat._silence(now=112.0, heard=100.0) == pytest.approx(silence)
        beat.close()


def test_a_move_resets_the_age_of_the_status():
    board = Board(0)
    own = OwnStatus(board)
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    board.thread = thread.ident
    own._since -= 30
    own.update(time.monotonic())
    gate.set()
    thread.join()
    assert 29 < own.status.age < 30 + patience(10)
    assert not own.status.waits
    board.waits += 1
    own.update(time.monotonic())
    assert own.status.waits
    assert own.status.age < 29  # it has moved


def test_a_rank_whose_device_does_not_finish_waits():
    board = Board(0)
    own = OwnStatus(board)
    answers = [False, True]
    board.device_done = lambda: answers.pop(0)
    own.update(time.monotonic())
    assert not own.status.waits  # it has just moved: its device is not asked
    assert len(answers) == 2
    own._since -= 30
    own.update(time.monotonic())
    assert own.status.waits
    own.update(time.monotonic())
    assert not own.status.waits
    assert board.device_done is None


def test_a_connection_keeps_what_fits_and_drops_the_rest():
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    for _ in range(200):
        connection.send("x" * 10_000)
    assert len(connection._unsent) <= MAX_UNSENT
    other = Connection(theirs)
    got = other.receive()
    assert set(got) == {"x" * 10_000}
    connection.close()
    with pytest.raises(ConnectionEndError) as caught:
        while True:
            other.receive()
    assert caught.value.closed
    other.close()


@pytest.mark.parametrize(
    "text", ["", "null", "[]", '["t", [["example.org", 1]]]', '["t", [["127.0.0.1", 0]]]', "[1, []]"]
)
def test_a_text_that_describes_no_endpoint_is_rejected(text):
    with pytest.raises(ValueError, match="describes no endpoint"):
        Endpoint.from_text(text)


def test_on_one_host_only_loopback_is_listened_on():
    endpoint = open_endpoint(one_host=True)
    assert [host for host, _ in endpoint.addresses] == ["127.0.0.1"]
    assert Endpoint.from_text(endpoint.text()) == endpoint
    assert len(endpoint.token) == 32
    for listener in endpoint.listeners:
        listener.close()


def test_on_several_hosts_loopback_is_not_offered(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    try:
        endpoint = open_endpoint(one_host=False)
    except OSError:
        return  # this machine has no other address
    assert not any(host.startswith("127.") for host, _ in endpoint.addresses)
    for listener in endpoint.listeners:
        listener.close()


def test_the_host_id_is_stable_and_does_not_show_the_name():
    assert host_id() == host_id()
    assert len(host_id()) == 32
    assert os.uname().nodename not in host_id()
