"""Batch normalisation over two ranks against a single process that has the whole batch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from dpfuse.paddle.distributed import fleet
from dpfuse.paddle.distributed.fleet.sync_batch_norm import SyncBatchNorm
from tests.paddle.test_fleet import strategy

TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}  # float64; sums are taken in another order


def net(**options):
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, **options), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4)
    ).double()


def batches(sizes, steps=2):
    torch.manual_seed(6)
    return [[torch.randn(size, 2, 4, 4, dtype=torch.float64) + 1 for size in sizes] for _ in range(steps)]


def loss_of(outputs):
    weight = torch.arange(outputs.shape[1], dtype=outputs.dtype)
    return (outputs.sigmoid() * weight).sum()


def train(rank, size, sizes, options):
    layers = SyncBatchNorm.convert_sync_batchnorm(net(**options))
    results = []
    for step in batches(sizes):
        inputs = step[rank].requires_grad_()
        outputs = layers(inputs)
        loss_of(outputs).backward()
        results.append((outputs.detach(), inputs.grad))
    layers.eval()
    with torch.no_grad():
        results.append((layers(inputs),))
    gradients = [param.grad for param in layers.parameters()]
    return results, gradients, list(layers.buffers())


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2), (6, 0)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_two_ranks_equal_one_process_with_the_whole_batch(ranks, sizes, options):
    reference, expected = net(**options), []
    for step in batches(sizes):
        inputs = torch.cat(step).requires_grad_()
        outputs = reference(inputs)
        loss_of(outputs).backward()
        expected.append((outputs.detach(), inputs.grad))
    reference.eval()
    results = ranks(train, sizes, options)
    for index, whole in enumerate(expected):
        for part, tensor in enumerate(whole):
            got = torch.cat([steps[index][part] for steps, _, _ in results])
            torch.testing.assert_close(got, tensor, **TOLERANCE)
    # Losses are sums, so the whole batch's gradients are the sum of the ranks'.
    for param, *parts in zip(reference.parameters(), *(gradients for _, gradients, _ in results), strict=True):
        torch.testing.assert_close(sum(parts), param.grad, **TOLERANCE)
    for _, _, buffers in results:
        for got, buffer in zip(buffers, reference.buffers(), strict=True):
            torch.testing.assert_close(got, buffer, **TOLERANCE)
    if options.get("track_running_stats", True):
        for rank, (steps, _, _) in enumerate(results):
            torch.testing.assert_close(steps[-1][0], reference(batches(sizes)[-1][rank]), **TOLERANCE)


def without_bias(rank, size):
    layer = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, affine=True).double())
    layer.bias = None
    torch.manual_seed(rank)
    x = torch.randn(4, 3, dtype=torch.float64)
    return x, layer(x).detach()


def test_a_layer_without_bias_is_only_scaled(ranks):
    inputs, outputs = (torch.cat(parts) for parts in zip(*ranks(without_bias), strict=True))
    torch.testing.assert_close(outputs, nn.BatchNorm1d(3).double()(inputs).detach(), **TOLERANCE)


def low_precision(rank, size):
    layer = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))
    torch.manual_seed(rank)
    x = torch.randn(50, 3).bfloat16()
    y = layer(x)
    return y.dtype, x, y.detach().float(), layer.running_mean.dtype


def test_bfloat16_is_normalised_in_float32(ranks):
    results = ranks(low_precision)
    x = torch.cat([result[1] for result in results]).float()
    y = torch.cat([result[2] for result in results])
    assert all((result[0], result[3]) == (torch.bfloat16, torch.float32) for result in results)
    torch.testing.assert_close(y, nn.BatchNorm1d(3)(x).detach(), rtol=2**-8, atol=0)  # one rounding to bfloat16


def one_value(rank, size):
    layer = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))
    try:
        layer(torch.ones(1 - rank, 3))
    except ValueError as error:
        return str(error)
    return ""


def test_a_single_value_per_channel_is_an_error_on_every_rank(ranks):
    assert all("got 1 values per channel over all ranks" in text for text in ranks(one_value))


def test_conversion_keeps_parameters_and_leaves_everything_else_alone():
    model = net()
    optimized = list(model.parameters())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert [type(layer).__name__ for layer in model] == [
        "Conv2d", "SyncBatchNorm", "ReLU", "Flatten", "Linear", "SyncBatchNorm",
    ]  # fmt: skip
    assert all(a is b for a, b in zip(model.parameters(), optimized, strict=True))
    assert list(model.state_dict()) == list(net().state_dict())


def test_one_process_is_ordinary_batch_normalisation():
    model, reference = SyncBatchNorm.convert_sync_batchnorm(net()), net()
    x = batches((4,))[0][0]
    assert torch.equal(model(x), reference(x))


def through_fleet(rank, size):
    fleet.init(is_collective=True, strategy=strategy(sync_batch_norm=True, fuse_grad_size_in_MB=0))
    layers = net()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(layers.parameters(), lr=0.1))
    model = fleet.distributed_model(layers)
    for step in batches((4, 4)):
        (loss_of(model(step[rank])) / 4).backward()
        optimizer.step()
        optimizer.clear_grad()
    copies = [copy.deepcopy(model._layers[1]), pickle.loads(pickle.dumps(model._layers[1]))]
    assert [type(layer) for layer in copies] == [SyncBatchNorm] * 2
    return model.state_dict()


def test_fleet_trains_as_one_process_with_the_whole_batch(ranks):
    reference = net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in batches((4, 4)):
        optimizer.zero_grad()
        (loss_of(reference(torch.cat(step))) / 8).backward()
        optimizer.step()
    for state in ranks(through_fleet):
        torch.testing.assert_close(state, reference.state_dict(), **TOLERANCE)


class Branches(nn.Module):
    """A layer that only some ranks use comes after the normalisation of the rest, in backward before it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.extra = nn.Linear(4, 4)

    def forward(self, x, use_extra):
        y = self.body(x)
        return self.extra(y) if use_extra else y


def skip_on_rank_1(rank, size):
    fleet.init(
        is_collective=True,
        strategy=strategy(sync_batch_norm=True, fuse_all_reduce_ops=False, find_unused_parameters=True),
    )
    torch.manual_seed(0)
    model = fleet.distributed_model(Branches())
    for _ in range(3):
        model.clear_gradients()
        model(torch.randn(4, 4), use_extra=rank == 0).square().sum().backward()
    return [param.grad.tolist() for param in model.parameters()]


def test_a_layer_that_one_rank_leaves_out_does_not_disturb_the_order(ranks):
    results = ranks(skip_on_rank_1)
    assert results[0] == results[1]
