"""Ranks that die, freeze, stall, leave or are cut off, on real processes: which rank is named, and when."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.comm.waiting import board_of
from dpfuse.liveness.diagnosis import WARN_AFTER
from tests.distributed.launch.test_two_nodes import Machines, namespaces
from tests.distributed.processes import SCRIPTS, free_port, pids_in, start
from tests.patience import patience

pytestmark = pytest.mark.timeout(600)

LIMIT = 60  # seconds that a job may take to end, of which importing torch on a busy machine takes most


class Job:
    """Two ranks of scripts/stall.py, and what they print; warm ones do not take Python apart at their end.

    Their stall_timeout is a limit below which no heartbeat comes late, so it grows on a busy machine.
    """

    def __init__(self, what: str, stall_timeout: float, *, warm: bool = True, **variables: str) -> None:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        words = (SCRIPTS / "stall.py", what, stall_timeout)
        self.ranks = [start(*words, warm=warm, RANK=str(rank), **common, **variables) for rank in (0, 1)]

    def finish(self, but: int | None = None) -> list[str]:
        """What each rank printed, errors included; rank `but`, which never ends by itself, is killed at last."""
        told = ["", ""]
        try:
            for rank, process in enumerate(self.ranks):
                if rank != but:
                    told[rank] = "".join(process.communicate(timeout=patience(LIMIT)))
        finally:
            for process in self.ranks:
                process.kill()
            for rank, process in enumerate(self.ranks):
                told[rank] = told[rank] or "".join(process.communicate())
        return told

    @property
    def codes(self) -> list[int | None]:
        return [process.returncode for process in self.ranks]


def whole(seconds: float) -> int:
    """These seconds, more on a busy machine, as errors show them."""
    return math.ceil(patience(seconds))


def error_of(text: str) -> tuple[float, str]:
    """After how many seconds a rank raised a DPFuseError, and its text."""
    found = re.search(r"^DPFuseError after ([\d.]+) s: (.*)", text, re.MULTILINE)
    assert found, text
    return float(found[1]), found[2]


@pytest.mark.slow
def test_a_rank_that_is_a_forward_ahead_with_its_buffers_is_a_deadlock():
    limit = whole(3)
    job = Job("ahead", limit)
    for rank, told in enumerate(job.finish()):
        seconds, text = error_of(told)
        assert seconds < limit + patience(5)
        assert f"all ranks have waited for {limit} s, which is stall_timeout, but not for the same" in text, rank
    assert job.codes == [1, 1]


@pytest.mark.slow
def test_a_killed_rank_is_named_at_once():
    job = Job("kill", 60)
    told = job.finish()
    assert job.codes == [1, -signal.SIGKILL]
    seconds, text = error_of(told[0])
    assert seconds < patience(5)
    assert re.match(
        r"rank 0 waits for bucket \d in the backward of step 4 and cannot go on: rank 1 ended suddenly", text
    )


@pytest.mark.slow
def test_a_rank_that_raises_is_named_with_its_exception_on_the_other_face_too():
    job = Job("hook-raise", 60, warm=False, FAULTY="0")
    told = job.finish()
    assert job.codes == [1, 1]
    seconds, text = error_of(told[1])
    assert seconds < patience(5)
    assert "rank 0 ended with ValueError: planted; " in text
    assert "runs the forward of step 4" in text
    assert "DPFuseError" not in told[0]


@pytest.mark.parametrize("faulty", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_leaves_its_group_is_named_and_lives(faulty):
    job = Job("leave-group", 60, FAULTY=str(faulty))
    told = job.finish()
    peer = 1 - faulty
    assert [job.codes[faulty], job.codes[peer]] == [0, 1], told
    seconds, text = error_of(told[peer])
    assert seconds < patience(5)
    assert f"rank {peer} waits for bucket" in text
    assert f"cannot go on: rank {faulty} left its process group: RuntimeError: planted" in text
    assert "well" in told[faulty]
    assert "DPFuseError" not in told[faulty]


@pytest.mark.slow
def test_a_frozen_rank_is_reported_and_given_up():
    limit = whole(4)
    job = Job("freeze", limit)
    told = job.finish(but=1)
    assert job.codes == [1, -signal.SIGKILL]
    seconds, text = error_of(told[0])
    assert limit - 1 < seconds < limit + patience(5)
    assert f"rank 1 sent no heartbeat for {limit} s, which is stall_timeout" in text
    warning = re.search(r"dpfuse: after (\d+) s (rank 0 still waits|ranks 0-1 still wait) for others:", told[0])
    assert warning, told[0]
    assert min(WARN_AFTER, limit // 2) <= int(warning[1]) < limit + patience(5)  # from half the limit on
    warned = warning.start()
    silence = re.search(r"rank 1 has sent no heartbeat for (\d+) s: it runs no Python", told[0])
    assert silence, told[0]
    assert 3 <= int(silence[1]) < limit + patience(5)
    assert re.search(r"in the backward of step 4, for \d+ s, at stall\.py:", told[0][warned:])


@pytest.mark.slow
def test_a_rank_that_has_fewer_steps_is_named():
    job = Job("leave", 60)
    told = job.finish()
    assert job.codes == [1, 0]
    seconds, text = error_of(told[0])
    assert seconds < patience(10)
    assert "rank 1 ended without an error" in text


@pytest.mark.slow
def test_a_rank_that_stays_in_a_collective_of_its_own_is_a_deadlock():
    limit = whole(2)
    job = Job("barrier", limit)
    told = job.finish()
    seconds, text = error_of(told[0])
    assert seconds < limit + patience(5)
    assert f"all ranks have waited for {limit} s, which is stall_timeout, but not for the same" in text
    assert "rank 1 is between steps, before step 4 and is blocked in torch.distributed's barrier" in told[0]
    assert job.codes == [1, 1]


@pytest.mark.slow
def test_a_long_evaluation_is_waited_for():
    limit = patience(1.5)
    job = Job(f"evaluate{4 / 1.5 * limit}", limit, FAULTY="0")
    told = job.finish()
    assert job.codes == [0, 0], told
    assert "rank 1 still waits for others:" in told[0]
    assert re.search(r"rank 0 is between steps, before step 4, for \d+ s, at stall.py:\d+ in evaluate", told[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "limit", "why"),
    [
        ("lame-freeze", 3, "sent no heartbeat for {limit} s"),
        ("lame-kill", 60, "ended"),
    ],
)
def test_a_rank_whose_collectives_never_end_is_ended(what, limit, why):
    """As with NCCL: the CPU cannot wait for its works."""
    limit = whole(limit)
    begin = time.monotonic()
    job = Job(what, limit)
    told = job.finish(but=1 if what == "lame-freeze" else None)
    assert job.codes[0] == 1
    assert f"dpfuse: rank 0 ends because it cannot go on: rank 1 {why.format(limit=limit)}" in told[0]
    assert "Traceback" not in told[0]
    assert time.monotonic() - begin < patience(40)  # it would sleep as long


@pytest.mark.slow
def test_python_held_for_seconds_is_no_stall():
    job = Job("hold4", patience(8))
    told = job.finish()
    assert job.codes == [0, 0], told


@pytest.mark.slow
def test_a_job_that_was_suspended_goes_on():
    limit = patience(3)
    job = Job("none", limit, STEPS="80", PAUSE="0.05")
    pids = [pids_in(process.stdout.readline())[0] for process in job.ranks]
    for process in job.ranks:
        assert "step" in process.stdout.readline()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * limit)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    told = job.finish()
    assert job.codes == [0, 0], told


@pytest.mark.slow
@pytest.mark.parametrize("what", ["exit", "kill"])
def test_the_other_ends_of_a_rank(what):
    job = Job(what, 60, FAULTY="0", DESTROY="1")
    told = job.finish()
    assert job.codes == [7 if what == "exit" else -signal.SIGKILL, 1]
    assert "rank 0 ended" in error_of(told[1])[1]


@pytest.fixture(scope="module")
def cable() -> Iterator[Machines]:
    with ExitStack() as cleanup:
        try:
            yield namespaces(cleanup)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "seconds_down"), [(4, None), (10, 5)])
def test_a_link_that_is_cut(cable, limit, seconds_down):
    variables = {"WORLD_SIZE": 2, "MASTER_ADDR": cable.addresses[0], "MASTER_PORT": cable.port, "OMP_NUM_THREADS": 1}
    variables |= {"STEPS": 10_000 if seconds_down is None else 150, "PAUSE": 0.1}
    ranks = []
    for rank in (0, 1):
        own = [f"{name}={value}" for name, value in variables.items()]
        own += [f"RANK={rank}", f"GLOO_SOCKET_IFNAME=cable{rank}"]
        ranks.append(cable.start(rank, "env", *own, sys.executable, SCRIPTS / "stall.py", "none", limit))
    try:
        for process in ranks:
            while not process.stdout.readline().startswith("step 3"):
                assert process.poll() is None, process.communicate()
        assert cable.start(0, "ip", "link", "set", "cable0", "down").wait(patience(10)) == 0
        cut = time.monotonic()
        if seconds_down is not None:
            time.sleep(seconds_down)
            assert cable.start(0, "ip", "link", "set", "cable0", "up").wait(patience(10)) == 0
        told = ["".join(process.communicate(timeout=patience(LIMIT))) for process in ranks]
        took = time.monotonic() - cut
    finally:
        cable.start(0, "ip", "link", "set", "cable0", "up").wait(patience(10))
        cable.end_all()
    codes = [process.returncode for process in ranks]
    if seconds_down is not None:
        assert codes == [0, 0], told
        return
    assert codes == [1, 1]
    for rank in (0, 1):
        assert f"rank {1 - rank} sent no heartbeat for {limit} s" in error_of(told[rank])[1]
    assert took < limit + patience(2 + 3)  # Python's own end on a busy machine comes on top


def heartbeats() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "dpfuse-heartbeat"}


def wrap(rank: int, size: int) -> dict[str, object]:
    """How many heartbeats came with each wrapper. Those of earlier groups may end meanwhile: none is counted."""
    before = heartbeats()
    for _ in range(2):
        dpfuse.DataParallel(nn.Linear(3, 2))(torch.ones(2, 3)).sum().backward()
    default = heartbeats() - before
    alone = dist.new_group([rank], use_local_synchronization=True)
    dpfuse.DataParallel(nn.Linear(3, 2), group=alone)(torch.ones(2, 3)).sum().backward()
    of_alone = len(heartbeats() - before - default)
    others = []
    for _ in range(2):
        known = heartbeats()
        group = dist.new_group(list(range(size)))
        dpfuse.DataParallel(nn.Linear(3, 2), group=group)(torch.ones(2, 3)).sum().backward()
        new = heartbeats() - known
        others.append(len(new))
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        for thread in new:
            thread.join(patience(5))
            assert not thread.is_alive()
        dist.barrier()
    counted = board_of(dist.group.WORLD).heartbeat
    return {"default": len(default), "exists": counted is not None, "alone": of_alone, "others": others}


def test_one_thread_for_a_group_and_none_for_one_rank(ranks):
    for told in ranks(wrap):
        assert told["default"] in (0, 1)  # none where an earlier test has used the default group
        assert (told["exists"], told["alone"], told["others"]) == (True, 0, [1, 1])


def in_a_thread(rank: int, size: int) -> float:
    results: list[float] = []

    def train() -> None:
        model = dpfuse.DataParallel(nn.Linear(3, 1))
        model(torch.full((2, 3), float(rank))).sum().backward()
        results.append(model.module.weight.grad.sum().item())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(patience(30))
    return results[0]


def test_a_wrapper_lives_in_a_thread(ranks):
    assert ranks(in_a_thread) == [3.0, 3.0]


def fork(rank: int, size: int) -> int:
    dpfuse.DataParallel(nn.Linear(3, 1))
    child = os.fork()
    if child == 0:
        os._exit(len(threading.enumerate()) - 1)
    _, status = os.waitpid(child, 0)
    model = dpfuse.DataParallel(nn.Linear(3, 1))
    model(torch.ones(2, 3)).sum().backward()
    return os.waitstatus_to_exitcode(status)


def test_a_fork_leaves_the_heartbeat_to_its_parent(ranks):
    assert ranks(fork) == [0, 0]


@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0, ValueError, "stall_timeout must be > 0 s, got 0"),
        (-1.0, ValueError, "stall_timeout must be > 0 s, got -1.0"),
        (float("nan"), ValueError, "stall_timeout must be > 0 s, got nan"),
        ("8", TypeError, "stall_timeout must be a number of seconds, got '8' of type str"),
        (True, TypeError, "stall_timeout must be a number of seconds, got True of type bool"),
        (None, TypeError, "stall_timeout must be a number of seconds, got None of type NoneType"),
    ],
)
def test_a_stall_timeout_that_is_none(group, face, value, error, text):
    with pytest.raises(error, match=re.escape(text)):
        face(nn.Linear(2, 2), stall_timeout=value)


def differing(rank: int, size: int) -> str:
    try:
        dpfuse.DataParallel(nn.Linear(2, 2), stall_timeout=60.0 + rank)
    except dpfuse.DPFuseError as error:
        return str(error)
    return ""


def test_ranks_agree_on_the_stall_timeout(ranks):
    for text in ranks(differing):
        assert "rank 1 has 'option stall_timeout = 61.0', rank 0 has 'option stall_timeout = 60.0'" in text
