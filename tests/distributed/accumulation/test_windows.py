"""What may happen inside a window whose gradients accumulate in the buckets."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from tests.distributed.accumulation.test_in_buckets import (
    WINDOW,
    assert_equal,
    built,
    gradients,
    inputs,
    loss,
    window,
    wrap,
)
from tests.distributed.ddp_face.test_join import DDP, assert_same, train


def test_a_module_may_change_inside_a_window_and_nothing_gets_lost(rank, size):
    def convert(model):
        model.double()

    def add(model):
        model.module.more = nn.Linear(3, 3)  # never used

    def replace(model):
        model.module.last.bias = nn.Parameter(torch.ones(3))

    def freeze(model):
        model.module.first.requires_grad_(False)

    for change in (convert, add, replace, freeze):
        for views in (True, False):
            model = wrap(gradient_as_bucket_view=views, find_unused_parameters=True)
            bare = copy.deepcopy(model.module)
            holder = nn.Module()
            holder.module = bare
            window(model, rank, 0)
            model.zero_grad()
            for micro in range(WINDOW):
                if micro == 1:
                    change(model)
                    change(holder)
                loss(bare, inputs(rank, 1, micro)).backward()
                with model.no_sync(enabled=micro < WINDOW - 1):
                    value = loss(model, inputs(rank, 1, micro))
                value.backward()
            for got, local in zip(model.module.parameters(), bare.parameters(), strict=True):
                if local.grad is None:
                    assert got.grad is None
                    continue
                assert got.grad.dtype == local.grad.dtype
                expected = local.grad / size  # of what was frozen too, as without the option
                dist.all_reduce(expected)
                torch.testing.assert_close(got.grad, expected, rtol=1e-5, atol=1e-6)


def test_a_copy_made_inside_a_window_begins_without_gradients(rank, size):
    """A copy begins without gradients, as torch copies parameters; the original's window goes on."""
    model, reference = wrap(), wrap()
    for each in (model, reference):
        window(each, rank, 0)
        each.zero_grad()
        with each.no_sync():
            loss(each, inputs(rank, 1, 0)).backward()
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        window(clone, rank, 2)
        fresh = wrap()
        window(fresh, rank, 2)
        assert_equal([g for g in gradients(clone) if g is not None], [g for g in gradients(fresh) if g is not None])
    for each in (model, reference):
        loss(each, inputs(rank, 1, 1)).backward()
    assert_equal([g for g in gradients(model) if g is not None], [g for g in gradients(reference) if g is not None])
    with model.no_sync():
        loss(model, inputs(rank, 1, 0)).backward()
    del clone, fresh


def test_a_window_that_was_thrown_away_leaves_no_trace(rank, size):
    model, reference = wrap(find_unused_parameters=True), wrap(find_unused_parameters=True)
    window(reference, rank, 1)
    expected = [grad for grad in gradients(reference) if grad is not None]

    def spoil():
        with model.no_sync():
            loss(model, inputs(rank, 9, 0) * torch.nan).backward()

    for throw in (model.discard_accumulated, model.zero_grad, lambda: model.zero_grad(set_to_none=False)):
        for everywhere in (True, False):
            if everywhere or rank == 0:  # who throws a window away begins it again, so the ranks are not apart
                spoil()
                throw()
                assert all(param.grad is None for param in model.module.parameters())
            window(model, rank, 1)
            assert_equal([grad for grad in gradients(model) if grad is not None], expected)
            model.module.zero_grad()


def uneven(rank, size, counts, accumulate):
    options = {"accumulate": accumulate, "net": {"optional": True}}
    ours = train(DDP, rank, counts, accumulate_in_buckets=True, **options)
    theirs = train(TorchDDP, rank, counts, **options)
    assert_same(ours, theirs, size)
    for divide in (True, False):
        joined = {"join": {"divide_by_initial_world_size": divide}, "accumulate": accumulate}
        assert_same(
            train(DDP, rank, counts, accumulate_in_buckets=True, **joined), train(TorchDDP, rank, counts, **joined), 3
        )


@pytest.mark.parametrize("counts", [(3, 8), (8, 3), (4, 4)])
def test_ranks_may_run_out_of_inputs_inside_a_window(ranks, counts):
    ranks(uneven, counts, 2)


def test_loss_scale_and_weights_are_those_of_the_whole_window(rank, size):
    """A loss scale and the weights of the ranks multiply the whole window."""
    results = []
    for accumulates in (True, False):
        model = dpfuse.DataParallel(built(), None, 2e-4, 1e-4, True, accumulate_in_buckets=accumulates)
        scaler = dpfuse.GradScaler(init_scale=1024.0, model=model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            model.set_gradient_weight(3.0 + rank)
            for micro in range(WINDOW):
                with model.no_sync(enabled=micro < WINDOW - 1):
                    value = loss(model, inputs(rank, step, micro))
                    if step == 2 and micro == 0 and rank == 1:
                        value = value * torch.inf
                    scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0  # the third step was skipped, on both ranks
        results.append([param.detach() for param in model.module.parameters()])
    assert_equal(*results, rtol=1e-5, atol=1e-6)
