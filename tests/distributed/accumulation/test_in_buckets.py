"""`accumulate_in_buckets=True`: what is added up in the buffers is what torch's class has accumulated in `.grad`."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import dpfuse
from tests.distributed.ddp_face.test_join import DDP

FACES = {"paddle": dpfuse.DataParallel, "torch": DDP}
WINDOW = 3


class Net(nn.Module):
    """Layers of several buckets; `side` uses one of two."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(6, 9, dtype=dtype)
        self.sides = nn.ModuleList([nn.Linear(9, 7, dtype=dtype), nn.Linear(9, 7, dtype=dtype)])
        self.last = nn.Linear(7, 3, dtype=dtype)

    def forward(self, x, side=0):
        return self.last(torch.tanh(self.sides[side](torch.tanh(self.first(x.to(self.first.weight.dtype))))))


def built(net=Net, **options):
    torch.manual_seed(0)
    return net(**options)


def wrap(net=None, face="paddle", **options):
    sizes = {"paddle": {"comm_buffer_size": 2e-4, "last_comm_buffer_size": 1e-4}, "torch": {"bucket_cap_mb": 2e-4}}
    return FACES[face](net or built(), **sizes[face], accumulate_in_buckets=True, **options)


def inputs(rank, step, micro, **options):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank), **options)


def loss(model, x, **options):
    result = model(x, **options)
    return (result.real.square() + result.imag.square() if result.is_complex() else result.square()).sum()


def window(model, rank, step, **options):
    """The backwards of one window: `WINDOW` micro-batches, of which the last one synchronises."""
    for micro in range(WINDOW):
        with model.no_sync() if micro < WINDOW - 1 else contextlib.nullcontext():
            loss(model, inputs(rank, step, micro), **options).backward()


def gradients(model):
    return [param.grad for param in model.module.parameters()]


def local_gradients(net, rank, step, dtype=None, sides=(0,) * WINDOW):
    """Per micro-batch what this rank alone has, on a copy without any hook."""
    found = []
    for micro in range(WINDOW):
        bare = copy.deepcopy(net)
        loss(bare, inputs(rank, step, micro), side=sides[micro]).backward()
        found.append([None if p.grad is None else p.grad.to(dtype or p.grad.dtype) for p in bare.parameters()])
    return found


def summed(found, factor):
    """Sums over micro-batches times the factor, then over the ranks; zeros where there is no gradient."""
    sums = []
    for parts in zip(*found, strict=True):
        present = [part * factor for part in parts if part is not None]
        total = present[0].clone()
        for part in present[1:]:
            total += part
        sums.append(total)
    for total in sums:
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
    return sums


def assert_equal(got, expected, **tolerance):
    for one, other in zip(got, expected, strict=True):
        if tolerance:
            torch.testing.assert_close(one, other, **tolerance)
        else:
            assert torch.equal(one, other)


def as_torch(rank, size, face, views, zeroed):
    nets = [built(), built()]
    for net in nets:
        net.sides[1].requires_grad_(False)  # torch's class would search the graph for it
    ours = wrap(nets[0], face=face, gradient_as_bucket_view=views)
    theirs = TorchDDP(nets[1], gradient_as_bucket_view=views)
    for step in range(4):
        for model in (ours, theirs):
            window(model, rank, step)
        trained = [(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)]
        for got, expected in trained:
            assert (got is None) == (expected is None)
        pairs = [pair for pair in trained if pair[0] is not None]
        assert len(pairs) == 6
        # Two numbers have but one sum, and halves of them are exact.
        tolerance = {} if size == 2 else {"rtol": 1e-5, "atol": 1e-6}
        assert_equal(*zip(*pairs, strict=True), **tolerance)
        for model in (ours, theirs):
            if zeroed != "never":
                model.zero_grad(set_to_none=zeroed == "to none")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("zeroed", ["to none", "in place", "never"])
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("face", FACES)
def test_gradients_have_the_bits_of_torchs_class(ranks, face, views, zeroed):
    ranks(as_torch, face, views, zeroed)


@pytest.mark.parametrize("zeroed", ["to none", "never"])
def test_three_ranks_have_the_gradients_of_torchs_class(ranks, zeroed):
    ranks(as_torch, "torch", False, zeroed, size=3)


def test_gradients_are_released_while_a_local_backward_runs(rank, size):
    """Within a local backward, gradients are taken bucket by bucket; after it none is left."""
    net, seen = built(), []
    net.sides[1].requires_grad_(False)
    model, first, last = wrap(net), net.first, net.last
    for step in range(3):
        for micro in range(WINDOW):
            with model.no_sync(enabled=micro < WINDOW - 1):
                value = loss(model, inputs(rank, step, micro))
            handle = first.weight.register_hook(lambda grad: seen.append(last.weight.grad is None))
            value.backward()
            handle.remove()
            if micro < WINDOW - 1:
                assert gradients(model) == [None] * 8
        model.zero_grad()
    # In the synchronised ones `.grad` is the view already, but for the very first, which sends at its end.
    assert seen == [True, True, False] * 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_16_bit_gradients_are_rounded_once_and_wider_ones_keep_their_dtype(rank, size, dtype, views):
    """16-bit gradients are added up in float32, over micro-batches and ranks, and rounded once."""
    model = wrap(built(dtype=dtype), gradient_as_bucket_view=views, find_unused_parameters=True)
    wide = torch.promote_types(dtype, torch.float32)
    for step in range(3):
        expected = summed(
            [found[:4] + found[6:] for found in local_gradients(model.module, rank, step, wide)], 1 / size
        )
        window(model, rank, step)
        got = gradients(model)
        assert got[4:6] == [None, None]
        assert_equal(got[:4] + got[6:], [total.to(dtype) for total in expected])
        model.zero_grad()


@pytest.mark.parametrize("views", [True, False])
def test_windows_may_change_their_length_and_what_they_use_on_all_ranks(rank, size, views):
    """What the window before has told must not be in the report of this one."""
    model = wrap(gradient_as_bucket_view=views, find_unused_parameters=True)
    for step, sides in enumerate([(0, 1), (1, 1, 0), (0, 0), (0, 1, 0, 1), (1, 1, 1)]):
        for micro, side in enumerate(sides):
            with model.no_sync(enabled=micro < len(sides) - 1):
                value = loss(model, inputs(rank, step, micro), side=side)
            value.backward()
        for side in (0, 1):
            unused = [param.grad is None for param in model.module.sides[side].parameters()]
            assert unused == [side not in sides] * 2
        model.zero_grad()


@pytest.mark.parametrize("views", [True, False])
def test_a_parameter_counts_as_used_if_some_micro_batch_used_it(rank, size, views):
    """Used in an earlier micro-batch, on one rank only, in none: whatever was accumulated is averaged."""
    for mine, other in [((1, 0, 0), (0, 0, 0)), ((0, 0, 1), (0, 1, 0)), ((1, 1, 0), (0, 1, 0)), ((0,) * 3, (0,) * 3)]:
        model = wrap(gradient_as_bucket_view=views, find_unused_parameters=True)
        for step in range(3):
            sides = mine if rank == 0 else other
            found = local_gradients(model.module, rank, step, sides=sides)
            zeros = [torch.zeros_like(param) for param in model.module.parameters()]
            expected = summed([*found, zeros], 1 / size)
            for micro, side in enumerate(sides):
                with model.no_sync(enabled=micro < WINDOW - 1):
                    value = loss(model, inputs(rank, step, micro), side=side)
                value.backward()
            somewhere = {index for side in {*mine, *other} for index in (2 + 2 * side, 3 + 2 * side)} | {0, 1, 6, 7}
            for index, (got, total) in enumerate(zip(gradients(model), expected, strict=True)):
                if index in somewhere:
                    torch.testing.assert_close(got, total, rtol=1e-6, atol=1e-7)
                else:
                    assert got is None
            model.zero_grad()


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6, sparse=True)
        self.net = Net()

    def forward(self, x):
        rows = (x[:, 0].abs() * 7).long() % 11
        return self.net(x + self.table(rows))


def test_sparse_gradients_accumulate_in_grad_beside_the_buckets(rank, size):
    ours, theirs = wrap(built(Rows), find_unused_parameters=True), built(Rows)
    for step in range(3):
        theirs.zero_grad()
        for micro in range(WINDOW):
            loss(theirs, inputs(rank, step, micro)).backward()
        window(ours, rank, step)
        for got, local in zip(gradients(ours), theirs.parameters(), strict=True):
            if local.grad is None:
                assert got is None
                continue
            expected = (local.grad.to_dense() if local.grad.is_sparse else local.grad) / size
            dist.all_reduce(expected)
            torch.testing.assert_close(got.to_dense(), expected)
        ours.zero_grad()


@pytest.mark.parametrize("size", [2, 3])
def test_deterministic_sums_depend_on_no_bucket_size(rank, size):
    """The definition of `deterministic`, on sums: no bucket size changes a bit."""
    results = []
    for cap in (1e-4, 25):
        model = dpfuse.DataParallel(
            built(), None, cap, cap, True, deterministic=True, accumulate_in_buckets=True
        )  # fmt: skip
        for step in range(2):
            model.zero_grad()
            window(model, rank, step)
        results.append([grad for grad in gradients(model) if grad is not None])
    assert_equal(*results)
    found = [[part for part in parts if part is not None] for parts in local_gradients(model.module, rank, 1)]
    sums = []
    for parts in zip(*found, strict=True):
        total = parts[0] * (1 / size)
        for part in parts[1:]:
            total.add_(part, alpha=1 / size)
        everywhere = [torch.empty_like(total) for _ in range(size)]
        dist.all_gather(everywhere, total)
        sums.append(sum(everywhere[1:], everywhere[0]))
    assert_equal(results[0], sums, rtol=1e-6, atol=1e-7)


def test_values_that_are_not_finite_are_found_in_the_sum(rank, size):
    """The sum is what is looked at: whatever a micro-batch brought in, in a parameter the last one did not use too."""
    model = wrap(check_finite="raise", find_unused_parameters=True)
    for step in range(2):
        window(model, rank, step)
        model.zero_grad()
    with model.no_sync():
        loss(model, inputs(rank, 2, 0) * (torch.inf if rank == 1 else 1), side=1).backward()
    with pytest.raises(dpfuse.DPFuseError, match=r"'sides\.1\.weight'" if rank == 1 else "failed on rank 1 of 2"):
        loss(model, inputs(rank, 2, 1)).backward()
    model.zero_grad()
    window(model, rank, 3)
    assert all(grad is None or grad.isfinite().all() for grad in gradients(model))


def test_other_hooks_see_gradients_and_checkpoints_may_fire_twice(rank, size):
    """Another hook on a parameter sees its gradient before it is taken; reentrant checkpoints fire twice."""
    model, seen = wrap(), []
    model.module.last.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    for step in range(3):
        expected = summed(
            [[part for part in parts if part is not None] for parts in local_gradients(model.module, rank, step)],
            1 / size,
        )
        for micro in range(WINDOW):
            x = inputs(rank, step, micro, requires_grad=True)
            with model.no_sync(enabled=micro < WINDOW - 1):
                halves = [checkpoint(model, half, use_reentrant=True) for half in x.split([1, 3])]
                value = torch.cat(halves).square().sum()
                value.backward()
        got = [grad for grad in gradients(model) if grad is not None]
        assert_equal(got, expected, rtol=1e-5, atol=1e-6)
        model.zero_grad()
    assert len(seen) == 3 * WINDOW * 2


def test_optimizers_in_backward_step_on_the_sums(rank, size):
    from torch.distributed.optim import _apply_optimizer_in_backward

    results = []
    for wrapper, options in ((DDP, {"accumulate_in_buckets": True}), (DDP, {})):
        net = built()
        for param in net.sides[1].parameters():
            param.requires_grad_(False)
        _apply_optimizer_in_backward(torch.optim.SGD, [p for p in net.parameters() if p.requires_grad], {"lr": 0.1})
        model = wrapper(net, **options)
        for step in range(3):
            window(model, rank, step)
        results.append([param.detach() for param in net.parameters()])
    assert_equal(*results)
