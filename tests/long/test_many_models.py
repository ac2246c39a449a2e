"""A model is wrapped and dropped a thousand times in one process, as in a notebook: nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.clients.everything_on import OPTIONS
from tests.growth import Size
from tests.ranks import RankPool, pools_by_size

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}
WAYS = {
    "defaults": {},
    "everything on": OPTIONS,
    "accumulating": {"accumulate_in_buckets": True},
    "narrow": {"wire_dtype": torch.bfloat16, "error_feedback": True},
    "deterministic": {"deterministic": True},
}


@pytest.fixture(scope="module")
def _pools() -> Iterator[dict[int, RankPool]]:
    """Processes for these tests alone: what other tests have left there may open and close files at any time."""
    yield from pools_by_size()


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def train(model, optimizer):
    inputs = torch.randn(4, 8)
    for _ in range(2):
        with model.no_sync():
            model(inputs).sum().backward()
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(face, options):
    model = FACES[face](net(), **options)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def left_after_a_forward(face, options):
    model = whole(face, options)
    return model, model(torch.randn(4, 8))


def left_inside_a_window(face, options):
    model = whole(face, options)
    with model.no_sync():
        model(torch.randn(4, 8)).sum().backward()
    return model


def refused(face, options):
    """A cell that raises; the notebook keeps the error, and with it the frames."""
    model = whole(face, options)
    try:
        FACES[face](net(), comm_buffer_size=-1) if face == "dp" else FACES[face](net(), bucket_cap_mb=-1)
    except ValueError as error:
        return model, error
    raise AssertionError("a negative size was taken")


def patched(face, options):
    with dpfuse.patch(**options):
        model = nn.parallel.DistributedDataParallel(net())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def timed(face, options):
    model = whole(face, options)
    with dpfuse.time_communication(model):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


CELLS = (whole, left_after_a_forward, left_inside_a_window, refused, patched, timed)


def grown(run, rounds, ours=0):
    """Run some rounds, then as many as are said, and fail if the process holds more after these."""
    run(12)  # twice each cell
    before = Size.settled()
    run(rounds)
    Size.settled().assert_not_grown(before, megabytes=16, objects=300 + rounds // 4, ours=ours)


LONG = [pytest.mark.slow, pytest.mark.nightly]
CASES = [
    pytest.param("dp", "everything on", 30, marks=pytest.mark.slow),
    *[pytest.param(face, way, 1000, marks=LONG) for face in FACES for way in WAYS],
]


@pytest.mark.parametrize(("face", "way", "rounds"), CASES)
@pytest.mark.ranks(timeout=900)
def test_models_that_are_wrapped_and_dropped_leave_nothing(rank, size, face, way, rounds):
    def run(rounds):
        for number in range(rounds):
            CELLS[number % len(CELLS)](face, WAYS[way])

    grown(run, rounds, ours=2)  # of the heartbeat's thread; each cell runs five times or more, and so would leave five


def wrapped(model, group):
    model = dpfuse.DataParallel(model, group=group)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def by_hand(model, group):
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        dpfuse.fused_allreduce_gradients(model.parameters(), group)


def sharded(model, group):
    model = dpfuse.DataParallel(model, group=group)
    train(model, dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize("use", [wrapped, by_hand, sharded])
@pytest.mark.parametrize("keeps_model", [True, False], ids=["one model", "a new model"])
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.ranks(timeout=300)
def test_process_groups_that_are_used_and_destroyed_leave_nothing(rank, size, keeps_model, use):
    """As where the first cell of a notebook ends the job and begins a new one."""
    kept = net()

    def run(rounds):
        for _ in range(rounds):
            group = dist.new_group()
            use(kept if keeps_model else net(), group)
            dist.barrier()
            dist.destroy_process_group(group)

    # Some heartbeats that have ended are forgotten when the next one begins. Each has about 14 objects.
    grown(run, 80, ours=70)
