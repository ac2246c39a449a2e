"""The simulated network: one link, first come, first served. Each message takes its time, and waiting is optional."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from time import perf_counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from bench.baselines import BARE, wrappers
from bench.network import Network, simulated_network
from dpfuse.tune import CostTable

SECONDS = 0.05  # of a message; only lower bounds are asserted, whatever else the machine does
CONTENDERS = {name: wrap for name, wrap in wrappers().items() if not name.startswith(BARE)} | {
    "dpfuse.DistributedDataParallel": dpfuse.DistributedDataParallel
}


def send(numel: int = 4) -> tuple[dist.Work, Callable[[], float | None]]:
    """Start an all-reduce: its work, and what tells when it landed, if it has."""
    landed: list[float] = []
    work = dist.all_reduce(torch.ones(numel), async_op=True)
    work.get_future().add_done_callback(lambda _: landed.append(perf_counter()))
    return work, lambda: landed[0] if landed else None


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def test_a_message_takes_what_its_bytes_cost():
    with simulated_network(CostTable.affine(SECONDS / 2, 8000)):
        begin = perf_counter()
        dist.all_reduce(torch.ones(100))  # 400 bytes, as long again
        assert perf_counter() - begin >= SECONDS / 2 + 400 / 8000


def test_until_then_its_work_is_not_done():
    with simulated_network(lambda _: SECONDS):
        begin = perf_counter()
        work, _ = send()
        done = work.is_completed()
        assert not done or perf_counter() - begin >= SECONDS
        work.wait()
        assert work.is_completed()


def test_messages_land_one_after_the_other():
    with simulated_network(lambda nbytes: SECONDS * nbytes):
        begin = perf_counter()
        sent = [send(numel=1), send(numel=0), send(numel=1)]  # the second costs nothing, but has to wait
    first, second, third = (landed() for _, landed in sent)
    assert begin + 4 * SECONDS <= first <= second
    assert begin + 8 * SECONDS <= third


def test_a_link_that_was_idle_has_nothing_to_catch_up_with():
    with simulated_network(lambda _: SECONDS) as network:
        dist.all_reduce(torch.ones(1))
        network.cost = lambda _: 2 * SECONDS
        begin = perf_counter()
        dist.all_reduce(torch.ones(1))
        assert perf_counter() - begin >= 2 * SECONDS


def test_without_a_link_everything_is_done_at_once():
    with simulated_network():
        work, _ = send()
        assert work.is_completed()


@pytest.mark.parametrize(
    "collective",
    [
        lambda tensor: dist.all_reduce(tensor),
        lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MAX),
        lambda tensor: dist.broadcast(tensor, 0),
        lambda tensor: dist.all_gather([torch.empty_like(tensor)], tensor),
        lambda tensor: dist.barrier(),
    ],
)
def test_every_collective_travels_and_changes_nothing(collective):
    with simulated_network(lambda _: SECONDS):
        tensor, begin = torch.tensor([1.0, -2.0]), perf_counter()
        collective(tensor)
        assert perf_counter() - begin >= SECONDS
        assert tensor.tolist() == [1.0, -2.0]


def test_what_is_gathered_is_what_was_sent():
    with simulated_network():
        row = torch.empty(2)
        dist.all_gather([row], torch.tensor([3.0, 4.0]))
        assert row.tolist() == [3.0, 4.0]


def gradients(model: nn.Module, wrapped: nn.Module, x: Tensor) -> list[Tensor]:
    wrapped(x).square().sum().backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    return grads


@pytest.mark.parametrize("name", CONTENDERS)
def test_wrappers_run_unchanged_wait_for_the_link_and_average_rightly(name):
    base, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    expected = gradients(base, base, x)
    with simulated_network() as network:
        model = copy.deepcopy(base)
        wrapped = CONTENDERS[name](model)
        for _ in range(3):  # the first one only records, and the buckets are made again
            gradients(model, wrapped, x)
        network.cost = lambda _: SECONDS
        begin = perf_counter()
        grads = gradients(model, wrapped, x)
        assert perf_counter() - begin >= SECONDS
        assert all(map(torch.equal, grads, expected))


@pytest.mark.slow
def test_autotune_finds_the_buckets_for_the_link():
    linears = [nn.Linear(40, 40, bias=False) for _ in range(4)]
    with simulated_network() as network:
        model, x = dpfuse.DataParallel(nn.Sequential(*linears), None, 0, 0), torch.randn(2, 40)
        network.cost = CostTable.affine(SECONDS, 1e12)
        tuning = dpfuse.autotune(model, steps=2, cost=network.cost)
        while not tuning.done:
            model(x).sum().backward()
        assert len(tuning.old_plan.buckets) == 4
        assert (tuning.error, tuning.kept, len(model.bucket_plan.buckets)) == ("", True, 1)


def test_the_end_waits_for_what_was_sent_and_leaves_nothing_behind():
    before = threads()
    for _ in range(2):
        with simulated_network(lambda _: SECONDS):
            work, _ = send()
        assert work.is_completed()
        assert not dist.is_initialized()
        assert threads() == before


def test_an_error_inside_ends_the_network_too():
    before = threads()
    with pytest.raises(ZeroDivisionError), simulated_network():
        raise ZeroDivisionError
    assert not dist.is_initialized()
    assert threads() == before


def test_there_is_one_default_group_at_a_time():
    with simulated_network():
        before = threads()
        with pytest.raises(ValueError, match="twice"), simulated_network():
            pass
        assert dist.is_initialized()
        assert threads() == before


def test_behind_the_end_nothing_is_sent():
    network = Network()
    network.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        network.barrier(dist.BarrierOptions())


def test_a_cost_that_is_no_time_is_told():
    with simulated_network(lambda _: -1.0), pytest.raises(ValueError, match=r"-1\.0.*4 bytes"):
        dist.all_reduce(torch.ones(1))
