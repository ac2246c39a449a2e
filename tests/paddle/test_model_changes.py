"""A network that changes between trainings, or has nothing to train: on real ranks it is the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dpfuse.paddle import Model
from dpfuse.paddle.callbacks import Callback
from dpfuse.paddle.io import DistributedBatchSampler
from tests.paddle.models import assert_same_parameters, make_data, make_net


def train(model, data, **options):
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    model.fit(data, batch_size=4, shuffle=False, verbose=0, **options)


@pytest.mark.parametrize("change", ["head", "head before fit", "head, evaluated", "double"])
@pytest.mark.ranks(timeout=30)
def test_a_network_that_was_changed_is_averaged_as_it_is_now(rank, size, change):
    model = Model(make_net())
    data = make_data()
    if change != "head before fit":
        train(model, data)
    if change == "double":
        model.network.double()
        data = TensorDataset(data.tensors[0].double(), data.tensors[1])
    else:
        torch.manual_seed(rank)
        model.network[3] = nn.Linear(8, 3)
    weights = model.network[3].weight.detach().clone()
    if change == "head, evaluated":
        expected = weights.clone()
        dist.broadcast(expected, 0)
        model.evaluate(data, 4, verbose=0)
        assert torch.equal(model.network[3].weight, expected)
    # As DDP does it from here.
    net = make_net().to(weights.dtype)
    net.load_state_dict(model.network.state_dict())
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(model, data)
    for x, y in DataLoader(data, batch_sampler=DistributedBatchSampler(data, 4)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    assert_same_parameters(model.network, net)


class Thaw(Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.network[0].requires_grad_(epoch >= 1)


def unfreeze_in_a_callback(rank, size):
    model = Model(make_net())
    before = model.network[0].weight.clone()
    train(model, make_data(), epochs=2, callbacks=Thaw())
    assert not torch.equal(model.network[0].weight, before)
    return [param.tolist() for param in model.parameters()]


def test_a_callback_may_unfreeze_layers_at_the_start_of_an_epoch(ranks):
    first, second = ranks(unfreeze_in_a_callback, timeout=30)
    assert first == second


def predict_with_nothing_to_train(rank, size):
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False)).requires_grad_(False)
    net[1].running_mean.fill_(rank)
    model = Model(net)
    data = TensorDataset(torch.arange(6.0)[:, None])
    found = [model.predict(data, 2, stack_outputs=True, verbose=0)[0].tolist()]
    net[1].running_mean.fill_(rank)  # later changes of buffers are rank 0's too
    found.append(model.predict(data, 2, stack_outputs=True, verbose=0)[0].tolist())
    net[0] = nn.Linear(1, 1).requires_grad_(False)
    found.append(model.predict(DataLoader(data, 2), stack_outputs=True, verbose=0)[0].tolist())
    return found


def test_a_network_with_nothing_to_train_is_rank_0s_everywhere(ranks):
    first, second = ranks(predict_with_nothing_to_train, timeout=30)
    assert first == second
    assert first[0] == first[1]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False)).eval()
    np.testing.assert_allclose(first[0], net(torch.arange(6.0)[:, None]).tolist(), rtol=1e-5)
