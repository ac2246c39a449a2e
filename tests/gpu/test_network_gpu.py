"""The simulated network on a GPU: kernels that spin on a stream of their own, behind which waiting streams go on."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.baselines import BARE, wrappers
from bench.network import simulated_network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SECONDS = 0.02
CONTENDERS = {name: wrap for name, wrap in wrappers().items() if not name.startswith(BARE)}


def seconds_of(function) -> float:
    """Of the GPU, which was idle before."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def test_messages_take_their_time_one_after_the_other():
    def send_two():
        works = [dist.all_reduce(torch.ones(4, device="cuda"), async_op=True) for _ in range(2)]
        for work in works:
            work.wait()

    with simulated_network(lambda _: SECONDS, "cuda"):
        assert seconds_of(send_two) == pytest.approx(2 * SECONDS, rel=0.05)


def test_streams_that_do_not_wait_go_on():
    with simulated_network(lambda _: SECONDS, "cuda"):
        works = []
        assert seconds_of(lambda: works.append(dist.all_reduce(torch.ones(4, device="cuda"), async_op=True))) < SECONDS
        works[0].wait()


def test_a_message_is_sent_behind_what_was_queued():
    def spin_and_send():
        torch.cuda._sleep(20_000_000)
        dist.all_reduce(torch.ones(4, device="cuda"))

    with simulated_network(lambda _: SECONDS, "cuda"):
        assert seconds_of(spin_and_send) >= seconds_of(lambda: torch.cuda._sleep(20_000_000)) + 0.95 * SECONDS


@pytest.mark.parametrize("name", CONTENDERS)
def test_wrappers_run_unchanged_wait_for_the_link_and_average_rightly(name):
    base, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).cuda(), torch.randn(5, 3, device="cuda")
    base(x).square().sum().backward()
    with simulated_network(device="cuda") as network:
        model = copy.deepcopy(base)
        wrapped = CONTENDERS[name](model)

        def step():
            model.zero_grad()
            wrapped(x).square().sum().backward()

        for _ in range(3):
            step()
        network.cost = lambda _: SECONDS
        assert seconds_of(step) >= 0.95 * SECONDS
        for param, expected in zip(model.parameters(), base.parameters(), strict=True):
            assert torch.equal(param.grad, expected.grad)
