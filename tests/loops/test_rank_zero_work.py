"""Does only the first rank work, do the others wait for it, and do they learn of it when it fails?"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.comm.waiting import board_of
from dpfuse.errors import DPFuseError
from tests.distributed.processes import free_port, start
from tests.patience import patience


def test_the_others_wait_for_rank_0(rank, size):
    model = dpfuse.DataParallel(nn.Linear(4, 2))
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        began = time.monotonic()
        with model.rank_zero_work() as mine:
            assert mine == (rank == 0)
            if mine:
                time.sleep(0.8)
                with torch.no_grad():
                    model(torch.ones(3, 4))
        assert time.monotonic() - began > 0.7
        model(torch.ones(3, 4)).sum().backward()


def test_sections_may_follow_each_other_at_once(rank, size):
    model, other = dpfuse.DataParallel(nn.Linear(4, 2)), dpfuse.DataParallel(nn.Linear(2, 2))
    for _ in range(3):
        for each in (model, other):
            with each.rank_zero_work():
                pass
    board = board_of(model._group)
    assert board.finished <= board.sections
    assert rank == 0 or board.finished >= 6


def test_a_section_inside_another_one_is_refused_on_all_ranks(rank, size):
    model = dpfuse.DataParallel(nn.Linear(4, 2))
    refused = pytest.raises(DPFuseError, match="inside another one of the same group")
    with model.rank_zero_work(), refused, model.rank_zero_work():
        pass
    with model.rank_zero_work():
        pass


def test_one_rank_works_always(group):
    with dpfuse.DataParallel(nn.Linear(4, 2)).rank_zero_work() as mine:
        assert mine


@pytest.mark.filterwarnings("ignore:there is no process group")
def test_without_a_group_it_works():
    with dpfuse.DataParallel(nn.Linear(4, 2)).rank_zero_work() as mine:
        assert mine


def test_a_group_without_a_heartbeat_is_refused_on_all_ranks(rank, size):
    model = dpfuse.DataParallel(nn.Linear(4, 2))
    board = board_of(model._group)
    heartbeat, board.heartbeat = board.heartbeat, None
    try:
        refused = pytest.raises(DPFuseError, match=r"rank_zero_work\(\) was called for a group without a heartbeat")
        with refused, model.rank_zero_work():
            pass
    finally:
        board.heartbeat = heartbeat


PROGRAM = """
import os, signal, sys, time, torch, dpfuse
dpfuse.init_parallel_env()
model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
model(torch.ones(3, 4)).sum().backward()
began = time.monotonic()
try:
    with model.rank_zero_work() as mine:
        if mine:
            time.sleep(0.3)
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "raise":
                raise ValueError("the disk is full")
    print("went on")
except dpfuse.DPFuseError as error:
    print("told", error.ranks, error)
except ValueError as error:
    print("own", error)
    time.sleep(3)
"""


def run(folder, end):
    """What each rank of the program printed."""
    (folder / "work.py").write_text(PROGRAM)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DPFUSE_BACKEND": "gloo"}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [start(folder / "work.py", end, warm=end != "kill", RANK=str(rank), **common) for rank in (0, 1)]
    return ["".join(process.communicate(timeout=patience(60))) for process in ranks]


def test_rank_0_may_end_right_after_its_work(tmp_path):
    told = run(tmp_path, "end")
    assert told[1].strip() == "went on", told


@pytest.mark.parametrize(("end", "reason"), [("raise", "ValueError: the disk is full"), ("kill", "ended suddenly")])
@pytest.mark.slow
def test_the_others_are_told_why_rank_0_could_not_finish(tmp_path, end, reason):
    told = run(tmp_path, end)
    assert "told (0,) rank 1 waits for the other ranks between steps, before step 2 and cannot go on" in told[1], told
    assert reason in told[1]
