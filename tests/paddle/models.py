"""The network, data and Model that the tests of the high-level API share."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpfuse.paddle import Model
from dpfuse.paddle.callbacks import Callback


def make_data(samples=22):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 5, generator=generator)
    return TensorDataset(x, torch.randint(3, (samples,), generator=generator))


def make_net(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 3))


def make_model(net=None, metrics=None, momentum=0.9, **options):
    model = Model(make_net() if net is None else net, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model.prepare(optimizer, nn.CrossEntropyLoss(), metrics)
    return model


def assert_same_parameters(one, other):
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def make_rank_model(rank=0, metrics=None):
    net = make_net()
    with torch.no_grad():
        net[0].weight.add_(rank)  # overwritten by rank 0's
    return make_model(net, metrics)


def assert_every_rank_says(results, texts):
    first, second = results
    assert first == second
    for text in texts:
        assert text in first


class Stream:
    """Batches without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Recorder(Callback):
    """Writes down every call: (hook, step or epoch, logs)."""

    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda *args: self.calls.append((name, *args))
        return super().__getattribute__(name)

    def logs(self, hook):
        return [call[-1] for call in self.calls if call[0] == hook]


class TorchMean:
    """A metric of torchmetrics' protocol: update(preds, target), compute(), reset()."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.count = torch.zeros(()), 0

    def update(self, preds, target):
        assert isinstance(preds, torch.Tensor)
        assert isinstance(target, torch.Tensor)
        self.total += (preds.argmax(-1) == target).sum()
        self.count += len(target)

    def compute(self):
        return self.total / self.count
