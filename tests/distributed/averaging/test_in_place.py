"""Large private gradients are reduced where they lie: the same bits as through the buffer, and as DDP's."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext, suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dpfuse
from dpfuse.comm import collective
from dpfuse.comm.abilities import Abilities, answers_of
from dpfuse.engine.exchanges import in_place as in_place_exchange
from dpfuse.engine.exchanges.in_place import InPlace
from tests.distributed.in_place import (
    ALL,
    MATRICES,
    NONE,
    Mixed,
    Mlp,
    Net,
    Tied,
    batch,
    each_alone,
    grads,
    large_from,
    let_go,
    mean_over_ranks,
    right_steps,
    twice,
    ways,
    with_all_large,
)

# Beside DDP, and beside the buckets


class Checkpointed(Mlp):
    def forward(self, x, step):
        x.requires_grad_()
        return self.layers[2:](checkpoint(self.layers[:2], x, use_reentrant=True))


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(5, 3)

    def forward(self, x, step):
        image = x.repeat(1, 18)[:, :108].reshape(-1, 3, 6, 6).contiguous(memory_format=torch.channels_last)
        return self.head(torch.relu(self.conv(image)).mean((2, 3)))


class SometimesUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.sides = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x, step):
        return self.sides[step % 2](torch.tanh(self.body(x)))  # nobody uses the third


def beside_ddp(rank, size, build, dtype, threshold, set_to_none, steps=6, copies=True):
    torch.manual_seed(0)
    bare = build().to(dtype)
    in_place = threshold != NONE
    kept = []
    with large_from(threshold, copies=copies):
        options = {"find_unused_parameters": build is SometimesUnused}
        ours = dpfuse.DistributedDataParallel(copy.deepcopy(bare), **options)
        theirs = DistributedDataParallel(copy.deepcopy(bare), **options)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
        for step in range(steps):
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad(set_to_none=set_to_none)
                if copies:
                    let_go(ours)  # gradients that were handed out are the parameter's alone, too
                model(batch(rank, step, dtype=dtype), step + rank).square().mean().backward()
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None)
                if one.grad is not None:
                    assert one.grad.stride() == other.grad.stride()
                    if size == 2:
                        assert torch.equal(one.grad, other.grad)
                    else:
                        torch.testing.assert_close(one.grad, other.grad)
            if step and in_place and build is not SometimesUnused:  # the first step's buckets are rebuilt at its end
                assert all(ways(ours).values()), ways(ours)
            if set_to_none:
                kept += [(param.grad, param.grad.clone()) for param in ours.parameters() if param.grad is not None]
            for optimizer in optimizers:
                optimizer.step()
    assert bool(ways(ours)) == in_place
    assert all(torch.equal(gradient, then) for gradient, then in kept)  # nobody has written to them since


@pytest.mark.one_in(2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("build", [Mlp, Checkpointed, Tied, Convolutional, SometimesUnused])
def test_gradients_are_bitwise_those_of_ddp(ranks, build, set_to_none):
    threshold = in_place_exchange.LARGE if build in (Mlp, Checkpointed) else ALL
    ranks(beside_ddp, build, torch.float32, threshold, set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("build", "threshold"), [(Mixed, in_place_exchange.LARGE), (SometimesUnused, MATRICES)])
@pytest.mark.parametrize("size", [2, 3])
def test_so_are_those_beside_smaller_ones_that_lie_in_the_buffer(ranks, size, build, threshold, set_to_none):
    ranks(beside_ddp, build, torch.float32, threshold, set_to_none, 6, False, size=size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_too(ranks, dtype):
    ranks(beside_ddp, Tied, dtype, ALL, True)


def test_three_ranks_get_the_gradients_of_ddp_but_for_the_order_of_the_sum(ranks):
    ranks(beside_ddp, SometimesUnused, torch.float32, ALL, True, size=3)


def as_nccl(group, calls, *, multiplies=True):
    """Let gloo do what NCCL can: sum several tensors in one call, and perhaps multiply them while it reads."""
    answers_of(group)["cpu"] = Abilities(coalesces=True, multiplies=multiplies)

    def multiplied(tensors, factor, group):
        calls.append(([tensor.numel() for tensor in tensors], factor))
        for tensor in tensors:
            tensor.mul_(factor)
        return collective.together(collective.all_reduce(tensor, group) for tensor in tensors)

    return mock.patch.multiple(
        collective,
        all_reduce_coalesced=multiplied,
        all_reduce_multiplied=lambda tensor, factor, group: multiplied([tensor], factor, group),
        coalesced=lambda start, device, group: start(),
    )


def in_one_call(rank, size, dtype, options, in_one):
    few = mock.patch.object(in_place_exchange, "FEW", 0)  # small gradients are packed

    def gradients(calls, threshold):
        group = dist.new_group()
        with large_from(threshold), few, as_nccl(group, calls) if calls is not None else nullcontext():
            torch.manual_seed(0)
            chain = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)]).to(dtype)
            # Buckets of two layers or more; the last one carries the report.
            model = dpfuse.DataParallel(
                chain, None, 4e-4, 4e-4, gradient_as_bucket_view=False, gradient_scale=0.3, group=group, **options
            )
            for step in range(4):
                model.zero_grad()
                model(batch(rank, step, dtype=dtype)).square().mean().backward()
            return [param.grad for param in model.parameters()], model.reducer.buckets

    expected, _ = gradients(None, NONE)
    calls = []
    found, buckets = gradients(calls, 50)  # weights are large, biases are not
    assert all(map(torch.equal, found, expected))
    mixed = [bucket for bucket in buckets if isinstance(bucket.parts.exchange, InPlace) and bucket.parts.buffer.params]
    assert len(mixed) > 1
    together = [bucket for bucket in mixed if bucket.parts.exchange.multiplies_buffer]
    assert together == ([bucket for bucket in mixed if bucket.parts.report is None] if in_one else [])
    for bucket in together:
        large = [one._numel for one in bucket.parts.exchange._each]
        assert ([*large, bucket.parts.buffer.flat.numel()], bucket.parts.buffer.averaging.pre_scale) in calls


def failing_first(rank, size, where):
    calls, group = [], dist.new_group()
    with large_from(50), as_nccl(group, calls):
        torch.manual_seed(0)
        chain = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])
        model = dpfuse.DataParallel(chain, None, 4e-4, 4e-4, gradient_as_bucket_view=False, group=group)
        for step in range(3):
            model.zero_grad()
            out = model(batch(rank, step))
            if rank == 1 and step == where:
                out.register_hook(fail)
            with suppress(RuntimeError):  # on this rank its own error, on the other one what the report says
                out.square().mean().backward()
    told = [None] * size
    dist.all_gather_object(told, calls)
    assert told[0] == told[1]
    assert {factor for _, factor in calls} == {0.5}


def fail(grad):
    raise RuntimeError("planted")


@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_that_fails_before_it_has_sent_anything_starts_the_collectives_of_the_others(ranks, where):
    # On a pretended GPU it summed where the others multiplied, too: NCCL may choose other algorithms for the two.
    ranks(failing_first, where)


@pytest.mark.parametrize(
    ("dtype", "options", "in_one"),
    [
        (torch.float32, {}, True),
        (torch.float64, {}, True),
        (torch.bfloat16, {}, False),  # the factor would be rounded
        (torch.float32, {"check_finite": "warn"}, False),  # a step uses what is packed
    ],
)
def test_a_group_that_can_sums_and_multiplies_large_and_small_gradients_in_one_call(ranks, dtype, options, in_one):
    ranks(in_one_call, dtype, options, in_one)


class Few(nn.Module):
    """Its buckets hold a large weight and small biases, one of which shares its gradient's memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(8)])
        self.shared = nn.Parameter(torch.randn(5, 6))  # the gradient of the sum below is that of both summands

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + (self.shared if number == 3 else 0)
        return x


def few_beside_large(rank, size, dtype, options, multiplies, some_stay):
    def gradients(calls, few):
        group = dist.new_group()
        patched = mock.patch.object(in_place_exchange, "FEW", few)
        with large_from(70), patched, as_nccl(group, calls, multiplies=multiplies):
            torch.manual_seed(0)
            module = Few().to(dtype)
            model = dpfuse.DataParallel(module, None, 4e-4, 4e-4, gradient_as_bucket_view=False, group=group, **options)
            found = []
            for step in range(6):
                if step != 3:  # once, gradients are accumulated
                    model.zero_grad()
                if step == 4:
                    module.layers[6].bias.requires_grad_(False)
                model(batch(rank, step, dtype=dtype)).square().mean().backward()
                found += grads(model)
            return found, model.reducer.buckets

    expected, packed = gradients([], 0)
    calls = []
    found, buckets = gradients(calls, 16)
    assert all((one is None) == (other is None) for one, other in zip(found, expected, strict=True))
    assert all(one is None or torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [bucket.plan.params for bucket in buckets] == [bucket.plan.params for bucket in packed]
    with_large = [b for b in buckets if isinstance(b.parts.exchange, InPlace) and b.parts.report is None]
    assert len(with_large) > 1
    assert all(bool(bucket.parts.buffer.params) != some_stay for bucket in with_large)
    if some_stay:
        assert any(len(numels) > 2 and min(numels) == 6 for numels, _ in calls)


@pytest.mark.parametrize(
    ("dtype", "options", "multiplies", "some_stay"),
    [
        (torch.float32, {"gradient_scale": 0.3}, True, True),
        (torch.float64, {"gradient_scale": 0.3}, True, True),
        (torch.float32, {}, False, True),  # one kernel multiplies all by one half
        (torch.bfloat16, {}, True, True),
        (torch.float32, {"gradient_scale": 0.3}, False, False),  # a kernel would multiply each
        (torch.bfloat16, {"gradient_scale": 0.3}, True, False),
        (torch.float32, {"check_finite": "warn"}, True, False),  # a step uses what is packed
    ],
)
def test_small_gradients_stay_where_they_are_beside_large_ones(ranks, dtype, options, multiplies, some_stay):
    ranks(few_beside_large, dtype, options, multiplies, some_stay)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2])
def test_a_factor_rounds_as_in_a_pack(rank, size, dtype):
    def scenario():
        model = dpfuse.DataParallel(
            Tied().to(dtype), None, 0, 0, gradient_as_bucket_view=False, gradient_scale=0.3, find_unused_parameters=True
        )
        model(batch(rank, 0, dtype=dtype), 0).square().sum().backward()
        return grads(model)

    twice(scenario)


def test_accumulated_gradients_and_second_backwards_get_the_same_bits(rank, size):
    def scenario():
        model = each_alone(Tied(), find_unused_parameters=True)
        seen = []
        for step in range(3):  # never zeroed
            with model.no_sync():
                model(batch(rank, step), 0).square().mean().backward()
            loss = model(batch(rank, 10 + step), 0).square().mean()
            loss.backward(retain_graph=True)
            seen += grads(model)
            loss.backward()
            seen += grads(model)
        return seen

    twice(scenario)


# Neighbours


def test_ranks_without_input_take_part_with_zeros(rank, size):
    def scenario():
        model = each_alone(Net(), find_unused_parameters=True)
        seen = []
        with model.join():
            for step in range(3 + 2 * rank):
                model.zero_grad()
                model(batch(rank, step, 4)).sum().backward()
                seen += grads(model)
        return seen + grads(model)

    twice(scenario)


def copied(rank, size):
    model = each_alone(Net(), find_unused_parameters=True)
    right_steps(model, rank, size)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        right_steps(twin, rank, size)
    right_steps(model, rank, size)


def test_copies_and_the_copied_average_in_place(ranks):
    ranks(with_all_large, copied)


def test_measurements_count_what_is_sent_in_place(rank, size):
    bytes_sent = []
    for threshold in (ALL, NONE):
        with large_from(threshold):
            model = each_alone(Net(), find_unused_parameters=True)
            right_steps(model, rank, size) if threshold == ALL else model(batch(rank, 0, 4)).sum().backward()
            with dpfuse.time_communication(model) as times, torch.profiler.profile() as profiler:
                model(batch(rank, 0, 4)).sum().backward()
            assert times.steps == 1
            assert times.collectives == len(model.bucket_plan.buckets)
            assert times.seconds > 0
            names = [event.key for event in profiler.key_averages()]
            assert sum(name.startswith("dpfuse::all_reduce") for name in names) == times.collectives
            bytes_sent.append(times.nbytes)
    in_place, fused = bytes_sent
    assert in_place == fused  # slots of one parameter have no padding


def by_hand(rank, size):
    torch.manual_seed(rank)
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(5, 3), (7,), (), (2, 3, 2)]]
    for param in params:
        param.grad = torch.randn(param.shape)
    expected = [mean_over_ranks(param.grad, size) for param in params]
    before = [param.grad for param in params]
    with mock.patch.object(in_place_exchange, "flatten", None), mock.patch.object(in_place_exchange, "unflatten", None):
        dpfuse.fused_allreduce_gradients(params)  # nothing is copied
    for param, mean, given in zip(params, expected, before, strict=True):
        assert param.grad is given
        assert torch.equal(param.grad, mean)
    flat = torch.cat([mean.view(-1) for mean in expected]) * (rank + 1)
    pieces = flat.split([param.numel() for param in params])
    for param, piece in zip(params, pieces, strict=True):
        param.grad = piece.view_as(param)
    expected = mean_over_ranks(flat.clone(), size)
    dpfuse.fused_allreduce_gradients(params)
    assert torch.equal(flat, expected)


def test_averaging_by_hand_is_in_place_too(ranks):
    ranks(with_all_large, by_hand)


def where_it_is_off(rank, size):
    def kinds(model):
        return {type(bucket.parts.exchange) for bucket in model.reducer.buckets}

    assert kinds(dpfuse.DataParallel(Net(), gradient_as_bucket_view=False)) == {InPlace}
    assert InPlace not in kinds(dpfuse.DataParallel(Net()))
    assert InPlace not in kinds(dpfuse.DataParallel(Net(), gradient_as_bucket_view=False, wire_dtype=torch.bfloat16))
    assert InPlace not in kinds(dpfuse.DataParallel(Net().to(torch.complex64), gradient_as_bucket_view=False))
    hooked = dpfuse.DistributedDataParallel(Net())
    hooked.register_comm_hook(None, allreduce_hook)
    assert InPlace not in kinds(hooked)


def test_it_is_off_where_the_buffer_is_needed(ranks):
    ranks(with_all_large, where_it_is_off)
