"""Private gradients that are unpacked while backward goes on, switched on for the CPU: the same bits as at its end.

There waiting for a bucket holds up the host, so nothing overlaps; but everything happens in the order of a GPU's host.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import dpfuse
from dpfuse.comm.abilities import Abilities
from dpfuse.engine.delivery import EarlyPrivate
from tests.distributed.changes.test_rebuild import Repeating, expected_mean
from tests.distributed.in_place import ALL, NONE, Mlp, Net, Shared, batch, copied, grads, large_from, mean_over_ranks

WRAPS = {
    "small": lambda module: dpfuse.DataParallel(module, None, 1e-3, 1e-3, gradient_as_bucket_view=False),
    "torch's face": lambda module: dpfuse.DistributedDataParallel(module, bucket_cap_mb=1e-3),
    "bfloat16": lambda module: dpfuse.DataParallel(module, None, 1e-3, 1e-3, wire_dtype=torch.bfloat16),
    "float16": lambda module: dpfuse.DataParallel(module, None, 1e-3, 1e-3, wire_dtype=torch.float16),
}


@contextmanager
def switched(on):
    """Unpack early, and count how many gradients were."""
    early = []
    delivered = EarlyPrivate.delivered

    def counted(self):
        places = delivered(self)
        early.append(len(places))
        return places

    with (
        mock.patch("dpfuse.engine.assembly.abilities_of", return_value=Abilities(on_streams=on)),
        mock.patch("dpfuse.engine.assembly.LEAST", 0),
        copied(),
        mock.patch.object(EarlyPrivate, "delivered", counted),
    ):
        yield early


def both_ways(scenario, *args):
    """What `scenario` returns is the same with early unpacking and without; returns how many were unpacked early."""
    results, counts = [], []
    for on in (True, False):
        torch.manual_seed(0)
        with switched(on) as early:
            results.append(scenario(*args))
        counts.append(sum(early))
    assert len(results[0]) == len(results[1])
    for got, expected in zip(*results, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)
    assert counts[1] == 0
    return counts[0]


def steps(rank, wrap, set_to_none, micro):
    model = WRAPS[wrap](Mlp())
    seen = []
    for step in range(4):
        model.zero_grad(set_to_none=set_to_none)
        for part in range(micro):
            with model.no_sync(enabled=part < micro - 1):
                model(batch(rank, 10 * step + part), step).square().sum().backward()
        seen += grads(model)
    return seen


@pytest.mark.parametrize(
    "wrap", [pytest.param(wrap, marks=() if wrap in ("small", "bfloat16") else pytest.mark.slow) for wrap in WRAPS]
)
def test_every_step_gives_the_same_bits(rank, size, wrap):
    for large in (NONE, ALL) if wrap == "torch's face" else (NONE,):
        for set_to_none in (True, False):
            for micro in (1, 3):
                with large_from(large):
                    early = both_ways(steps, rank, wrap, set_to_none, micro)
                assert (early > 0) == (large is NONE)


def test_small_gradients_beside_large_ones_in_place(rank, size):
    with large_from(1000):  # weights are reduced in place, biases unpacked early
        assert both_ways(steps, rank, "torch's face", True, 1) > 0


def twice_without_zeroing(rank):
    model = WRAPS["small"](Mlp())
    for step in range(4):
        model(batch(rank, step), step).square().sum().backward()
    return grads(model)


def test_averaged_gradients_accumulate(rank, size):
    assert both_ways(twice_without_zeroing, rank) > 0


def replaced(rank, how):
    """The last layer's gradient is replaced while backward goes on, after its bucket was sent and unpacked."""
    model = dpfuse.DataParallel(Net(), None, 0, 0, gradient_as_bucket_view=False)
    last, first = model.module.layers[-1].weight, model.module.layers[0].weight

    def replace(grad):
        if how == "another":
            last.grad = torch.full_like(last.grad, 9.0)
        elif how == "moved":
            last.grad.data = torch.full_like(last.grad, 9.0)
        else:
            last.grad = None

    seen = []
    for step in range(4):
        model.zero_grad()
        planted = first.register_hook(replace) if step == 3 else None
        model(batch(rank, step, 4)).sum().backward()
        if planted is not None:
            planted.remove()
        seen += grads(model)
    return seen


@pytest.mark.filterwarnings("ignore:.*got no gradient in this backward")
def test_what_was_replaced_meanwhile_is_unpacked_again(rank, size):
    for how in ("another", "moved", "none"):
        with large_from(NONE):
            assert both_ways(replaced, rank, how) > 0


def test_memory_that_backward_still_reads_is_not_written(rank, size):
    bare = Shared()
    with switched(True), large_from(NONE):
        model, local = dpfuse.DistributedDataParallel(copy.deepcopy(bare), bucket_cap_mb=1e-9), copy.deepcopy(bare)
        for step in range(4):
            for one in (model, local):
                one.zero_grad()
                one(batch(rank, step)).square().sum().backward()
            for param, alone in zip(model.parameters(), local.parameters(), strict=True):
                assert torch.equal(param.grad, mean_over_ranks(alone.grad, size))


def test_a_second_wrapper_reads_what_was_accumulated(rank, size):
    """A second wrapper packs later what the first has accumulated, not what it has averaged."""
    bare = Net()
    x = batch(rank, 0, 4)
    local = copy.deepcopy(bare)
    local(x).sum().backward()
    expected = [mean_over_ranks(param.grad, size) for param in local.parameters() if param.grad is not None]
    with switched(True) as early, large_from(NONE):
        inner = dpfuse.DistributedDataParallel(bare, bucket_cap_mb=1e-9, find_unused_parameters=True)
        outer = dpfuse.DistributedDataParallel(inner, bucket_cap_mb=1e-9, find_unused_parameters=True)
        for _ in range(3):
            bare.zero_grad()
            outer(x).sum().backward()
        assert sum(early) == 0
    for param, mean in zip((p for p in bare.parameters() if p.grad is not None), expected, strict=True):
        torch.testing.assert_close(param.grad, mean)


def test_an_interrupted_backward_leaves_zeros(rank, size):
    """Zeroed in place after an exception in a backward whose first buckets were unpacked already."""
    with switched(True) as early, large_from(NONE):
        model = dpfuse.DistributedDataParallel(Net(), bucket_cap_mb=1e-9, find_unused_parameters=True)
        for step in range(3):
            model.zero_grad(set_to_none=False)
            model(batch(rank, step, 4)).sum().backward()
        assert sum(early) > 0
        model.zero_grad(set_to_none=False)
        with pytest.raises(KeyError, match="planted"):
            model(batch(rank, 0, 4), True).sum().backward()
        kept = model.module.layers[-1].weight.grad
        assert kept.ne(0).any(), "it was unpacked before the exception"
        out = model(batch(rank, 1, 4)).sum()  # which drains what was sent
        assert kept.eq(0).all()
        model.zero_grad(set_to_none=False)
        out.backward()
        again = grads(model)
        model.zero_grad()
        model(batch(rank, 1, 4)).sum().backward()
        for got, expected in zip(again, grads(model), strict=True):
            assert (got is None or got.eq(0).all()) if expected is None else torch.equal(got, expected)


def test_a_late_gradient_is_an_error_on_every_rank(rank, size):
    """A gradient that comes once more than expected, on one rank: every rank raises, and loses what was unpacked."""
    with switched(True) as early, large_from(NONE):
        model = dpfuse.DataParallel(Repeating(), None, 0, 0, gradient_as_bucket_view=False)
        x = torch.full((2, 4), rank + 1.0, requires_grad=True)
        for _ in range(3):
            model.zero_grad()
            model(x, 1).sum().backward()
        assert sum(early) > 0
        model.zero_grad()
        with pytest.raises(dpfuse.DPFuseError, match="rank 1"):
            model(x, 1 + rank).sum().backward()
        if rank == 1:
            assert all(param.grad.eq(0).all() for param in (model.module.second.weight, model.module.second.bias))
        model.zero_grad()
        model(x, 1).sum().backward()
        expected = expected_mean(model, x.detach(), 1)
        torch.testing.assert_close([param.grad for param in model.module.parameters()], expected)
