"""Starting ranks on a machine with GPUs: NCCL, one card per rank, still nothing beyond loopback."""

from __future__ import annotations

import json
import os

import pytest
import torch

from dpfuse.job import spawn
from tests.distributed.processes import SCRIPTS, is_loopback, launch
from tests.distributed.scripts import functions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def visible():
    count = torch.cuda.device_count()
    return os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))


def reports(text):
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda seen: seen["rank"])


def test_every_visible_card_gets_a_rank_over_nccl():
    done = launch(SCRIPTS / "join.py", timeout=300, CUDA_VISIBLE_DEVICES=visible())
    assert done.returncode == 0, done.stderr
    assert "has NOT been destroyed" not in done.stderr  # NCCL's complaint about a group left behind
    seen = reports(done.stdout)
    assert [(s["backend"], s["device"]) for s in seen] == [("nccl", i) for i in range(torch.cuda.device_count())]
    assert [s["paddle"]["FLAGS_selected_gpus"] for s in seen] == [str(s["device"]) for s in seen]


def test_a_named_card_is_the_only_one_its_rank_sees():
    card = visible().split(",")[-1]
    done = launch("--gpus", card, SCRIPTS / "join.py", timeout=300, CUDA_VISIBLE_DEVICES=visible())
    assert done.returncode == 0, done.stderr
    assert [(s["backend"], s["device"]) for s in reports(done.stdout)] == [("nccl", 0)]


def test_nothing_listens_beyond_loopback_under_nccl():
    done = launch(SCRIPTS / "listeners.py", timeout=300, CUDA_VISIBLE_DEVICES=visible())
    assert done.returncode == 0, done.stderr
    addresses = json.loads(done.stdout)
    assert addresses
    assert all(map(is_loopback, addresses)), addresses


def test_gloo_ranks_share_a_card():
    count = torch.cuda.device_count() + 1
    done = launch(
        "--nproc_per_node",
        count,
        SCRIPTS / "join.py",
        timeout=300,
        CUDA_VISIBLE_DEVICES=visible(),
        DPFUSE_BACKEND="gloo",
    )
    assert done.returncode == 0, done.stderr
    assert [s["device"] for s in reports(done.stdout)] == [*range(count - 1), 0]


def test_more_nccl_ranks_than_cards_are_refused_by_name():
    count = torch.cuda.device_count() + 1
    words = ("--nproc_per_node", count, SCRIPTS / "join.py")
    done = launch(*words, timeout=300, CUDA_VISIBLE_DEVICES=visible())
    assert done.returncode == 1
    assert f"rank {count - 1}" in done.stderr
    assert "NCCL needs a GPU for each rank" in done.stderr
    with pytest.raises(ValueError, match=f"nprocs is {count}, but only {count - 1} GPU"):
        spawn(functions.variable, args=("RANK",), nprocs=count)


def test_spawn_takes_every_card():
    context = spawn(functions.variable, args=("WORLD_SIZE",))
    assert [queue.get() for queue in context.return_queues] == [str(len(context.processes))] * len(context.processes)
    assert len(context.processes) == torch.cuda.device_count()


def test_a_card_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="card 99 is not there"):
        spawn(functions.variable, args=("RANK",), gpus="99")


def test_fork_after_cuda_was_used_is_refused():
    torch.zeros(1, device="cuda")
    with pytest.raises(ValueError, match="start_method='fork' cannot be used once CUDA is in use"):
        spawn(functions.variable, args=("RANK",), nprocs=1, start_method="fork")
