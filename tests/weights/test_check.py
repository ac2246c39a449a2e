"""What `check_training` tells of weights, how often, and what ends it."""

from __future__ import annotations

import logging
import random
import re
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import dpfuse
from dpfuse import DPFuseError, WeightsWarning
from dpfuse.weights.check import LOOK_AGAIN
from dpfuse.weights.hashing import Hashing
from tests.weights.drifts import flip

BOUND = 64


class Net(nn.Module):
    """One layer that is trained, and frozen tensors, which no step changes."""

    def __init__(self, count=10):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.still = nn.ParameterList(
            nn.Parameter(torch.randn(3 + place, 5), requires_grad=False) for place in range(count)
        )

    def forward(self, x):
        return self.layer(x)


class Trained:
    """A wrapped network that is trained step by step, and what it was told."""

    def __init__(self, rank, face=dpfuse.DataParallel, net=None, **options):
        self.net = net or Net()
        self.model = face(self.net, **{"check_training": "warn"} | options)
        self.optimizer = SGD([*self.net.layer.parameters()], lr=0.01)
        self.rank, self.told = rank, []

    def step(self, count=1):
        for _ in range(count):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.model(torch.full((2, 4), self.rank + 1.0)).square().mean().backward()
            self.told += [str(each.message) for each in caught if isinstance(each.message, WeightsWarning)]
            self.optimizer.step()
            self.optimizer.zero_grad()

    def named(self):
        return [re.search(r"parameters? '([\w.]+)'", text)[1] for text in self.told]


def flips(rank, size, rounds):
    trained, chance = Trained(rank), random.Random(0)
    trained.step(3)
    for _ in range(rounds):
        trained.told.clear()
        flipped = set()
        for place, param in enumerate(trained.net.still):
            where, which, bit = chance.randrange(size), chance.randrange(param.numel()), chance.randrange(32)
            if where == rank:
                flip(param, which, bit)
            flipped.add(f"still.{place}")
        for _ in range(BOUND):
            trained.step()
        found = {name for text in trained.told for name in re.findall(r"'(still\.\d+)'", text)}
        count = sum(int(re.search(r"; (\d+) of 12 differ", text)[1]) for text in trained.told)
        assert count == len(flipped) == 10, trained.told
        assert found <= flipped
        assert set(trained.model._sync.weights.known) == flipped
        trained.model.synchronize_weights()
        assert not trained.model._sync.weights.known


@pytest.mark.ranks(timeout=120)
def test_random_bits_that_flip_are_all_found_and_none_twice(rank, size):
    flips(rank, size, 3)


@pytest.mark.slow
@pytest.mark.ranks(size=3, timeout=900)
def test_a_thousand_random_bits_that_flip(rank, size):
    flips(rank, size, 100)


def test_one_bit_is_called_one_bit(rank, size):
    trained = Trained(rank)
    if rank == 0:
        flip(trained.net.still[2], 4, 3)
    trained.step(BOUND)
    (text,) = trained.told
    assert "expected equal bits. It is one bit, as after a fault of memory. They became different" in text
    assert "1 of 25 elements differ" in text


def test_a_factor_is_named(rank, size):
    trained = Trained(rank)
    if rank == 1:
        for param in trained.net.still:
            param.data.mul_(0.5)
    trained.step(BOUND)
    assert "The values differ by the factor 0.5, as after weight decay or a scaling on some ranks." in trained.told[0]
    assert "They are parameters 'still.0', 'still.1', 'still.2' and 7 more; 10 of 12 differ." in trained.told[0]


def test_a_known_difference_is_told_once_and_others_are_still_found(rank, size):
    trained = Trained(rank)
    if rank == 1:
        trained.net.still[3].data[0, 0] += 1
    trained.step(3 * BOUND)
    assert trained.named() == ["still.3"]
    if rank == 0:
        trained.net.still[7].data[0, 0] += 1
    trained.step(BOUND)
    assert trained.named() == ["still.3", "still.7"]
    trained.model.synchronize_weights()
    if rank == 1:
        trained.net.still[3].data[0, 0] += 1
    trained.step(BOUND)
    assert trained.named() == ["still.3", "still.7", "still.3"]


def test_a_difference_that_a_program_takes_back_is_no_longer_known(rank, size):
    trained = Trained(rank)
    if rank == 1:
        trained.net.still[3].data[0, 0] += 1
    trained.step(BOUND)
    assert [*trained.model._sync.weights.known] == ["still.3"]
    if rank == 1:
        trained.net.still[3].data[0, 0] -= 1
        trained.net.still[3].data.copy_(Net().still[3])
    trained.step(LOOK_AGAIN + 2)
    assert not trained.model._sync.weights.known
    if rank == 1:
        trained.net.still[3].data[0, 0] += 1
    trained.step(BOUND)
    assert trained.named() == ["still.3", "still.3"]


def test_an_error_comes_on_every_rank_once_and_gradients_are_right_then(rank, size):
    trained = Trained(rank, check_training="raise")
    if rank == 0:
        trained.net.layer.bias.data[0] += 1
    steps = 0
    with pytest.raises(DPFuseError, match=f"^DPF-W01: rank {rank}: the weights of the ranks differ") as caught:
        while steps < BOUND:
            steps += 1
            trained.step()
    assert caught.value.code == "DPF-W01"
    assert trained.net.layer.weight.grad is not None
    trained.optimizer.zero_grad()
    trained.step(3 * BOUND)
    trained.model.synchronize_weights()
    trained.step(2 * BOUND)


@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
def test_the_defaults_of_the_faces(group, face):
    default = "raise" if face is dpfuse.DataParallel else "warn"
    assert face(Net())._options.common["check_training"] == default
    with pytest.raises(ValueError, match="check_training must be one of 'raise', 'warn', 'log', 'off', got 'error'"):
        face(Net(), check_training="error")


def test_off_compares_nothing_and_sends_nothing(rank, size):
    trained, other = Trained(rank, check_training="off"), Trained(rank)
    assert trained.model._sync.weights is None
    elements = [each.model.reducer.in_use.report.numel for each in (trained, other)]
    assert 68 < elements[1] - elements[0] <= 132, "a hash of 32 bits, three questions, and what is told of the loop"
    flags = 2  # one for each parameter that trains
    assert 4 * (elements[1] - flags) <= 1024, "bytes of the report, at any number of ranks"
    if rank == 0:
        trained.net.still[0].data.add_(1)
    trained.step(2 * BOUND)
    assert trained.told == []


def test_a_filter_makes_it_an_error(rank, size):
    trained = Trained(rank)
    if rank == 0:
        trained.net.still[0].data.add_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", WeightsWarning)
        with pytest.raises(WeightsWarning, match="DPF-W01") as caught:
            for _ in range(BOUND):
                trained.model(torch.ones(2, 4)).sum().backward()
                trained.optimizer.step()
    assert caught.value.code == "DPF-W01"


def test_the_warning_has_the_line_of_the_user(rank, size):
    trained = Trained(rank)
    if rank == 0:
        trained.net.still[0].data.add_(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(BOUND):
            trained.model(torch.ones(2, 4)).sum().backward()
            trained.optimizer.step()
    assert [each.filename for each in caught if each.category is WeightsWarning] == [__file__]


@pytest.mark.parametrize("level", ["warn", "raise"])
def test_a_rank_with_other_parameters_ends_the_comparison_with_a_warning(rank, size, level):
    trained = Trained(rank, check_training=level)
    trained.step(2)
    if rank == 1:
        trained.net.still[4] = nn.Parameter(torch.zeros(1, 1), requires_grad=False)
    trained.step(2 * BOUND)
    (text,) = trained.told
    assert text.startswith(f"DPF-W02: rank {rank}: Rank 1 has parameters of another name, shape or dtype"), text
    assert trained.model._sync.weights.off == "the ranks have other parameters"


def test_a_rank_that_cannot_hash_ends_its_part_and_trains_on(rank, size):
    trained = Trained(rank)
    trained.step(2)
    trained.net.still[0].data.add_(rank)
    error = RuntimeError("no memory left") if rank == 1 else None
    with patch.object(Hashing, "write", autospec=True, side_effect=error):
        trained.step(2 * BOUND)
    assert trained.told == []
    assert ("no memory left" in trained.model._sync.weights.off) == (rank == 1)


def test_weights_that_are_synchronized_must_be_the_same_tensors(rank, size):
    trained = Trained(rank)
    trained.net.still[1].data.add_(rank)
    trained.net.layer.bias.data.add_(rank)
    trained.model.synchronize_weights()
    fresh = Net()
    assert torch.equal(trained.net.still[1], fresh.still[1])
    assert torch.equal(trained.net.layer.bias, fresh.layer.bias)
    if rank == 1:
        trained.net.still[1] = nn.Parameter(torch.zeros(7, 7), requires_grad=False)
    with pytest.raises(DPFuseError, match="the weights to be synchronized") as caught:
        trained.model.synchronize_weights()
    assert "parameter 'still.1' (4, 5) torch.float32" in str(caught.value)
    assert "Change the module in the same way on every rank." in str(caught.value)


def test_no_weights_are_synchronized_while_a_backward_runs(rank, size):
    trained = Trained(rank)
    outputs = trained.model(torch.ones(2, 4))
    outputs.register_hook(lambda grad: trained.model.synchronize_weights())
    with pytest.raises(DPFuseError, match=r"synchronize_weights\(\) was called while a backward is"):
        outputs.sum().backward()


def test_a_checkpoint_and_the_metrics_tell_of_a_known_difference(rank, size, tmp_path):
    folder = tmp_path
    trained = Trained(rank, metrics=True)
    trained.step(2)
    assert "weights_differ_since" not in trained.model.metrics()
    dpfuse.save_checkpoint(folder, trained.model, step=1)
    trained.net.layer.weight.data.add_(rank)
    trained.step(BOUND)
    since = trained.model.metrics()["weights_differ_since"]
    assert 2 < since <= BOUND + 2
    with pytest.warns(WeightsWarning, match=f"DPF-W01: rank {rank}: a checkpoint is saved while the weights") as caught:
        dpfuse.save_checkpoint(folder, trained.model, step=2)
    text = str(caught[0].message)
    assert f"parameter 'layer.weight' differs since averaged backward {since:.0f}" in text
    trained.model.synchronize_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpfuse.save_checkpoint(folder, trained.model, step=3)
    assert "weights_differ_since" not in trained.model.metrics()


def test_a_program_that_sends_weights_behind_each_step_is_left_alone(rank, size):
    trained, heard = Trained(rank), []
    log, handler = logging.getLogger("dpfuse.weights"), logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel("INFO")
    try:
        for _ in range(4 * BOUND):
            for param in trained.net.parameters():
                param.data.add_(rank)  # as if only an owner had made its step
            trained.optimizer.step()
            for param in trained.net.parameters():
                dist.broadcast(param.data, 0)
            trained.model(torch.ones(2, 4)).sum().backward()
    finally:
        log.removeHandler(handler)
        log.setLevel("NOTSET")
    assert trained.told == []
    assert "are equal in the next backward" in trained.model._sync.weights.off
    assert [f"rank {rank}: weights are not compared between ranks any more" in text for text in heard] == [True]


def test_a_changed_module_is_hashed_from_the_next_step_on(rank, size):
    """Ranks must change to other slices behind the same step, also where that step hashes nothing."""
    trained = Trained(rank)
    trained.step(3)
    trained.net.late = nn.Parameter(torch.ones(3), requires_grad=False)
    made, make = [], Hashing.__init__

    def note(self, tensors, *others):
        made.append(list(tensors))
        make(self, tensors, *others)

    with patch.object(Hashing, "__init__", note):
        trained.step()
        assert len(made) == 1
        trained.step(BOUND)
        assert len(made) == 1


def test_a_module_may_change_behind_the_step_after_which_known_differences_are_looked_at_again(rank, size):
    trained = Trained(rank)
    trained.net.still[3].data.add_(rank)
    trained.step(BOUND)
    for _ in range(LOOK_AGAIN + 2):
        if "late" in dict(trained.net.named_parameters()):
            del trained.net.late
        else:
            trained.net.late = nn.Parameter(torch.ones(3), requires_grad=False)
        trained.step()
    assert trained.named() == ["still.3"]
    assert (trained.model._sync.weights.off, [*trained.model._sync.weights.known]) == ("", ["still.3"])


def test_a_rank_that_left_out_a_step_hashes_with_the_others_again(rank, size):
    trained = Trained(rank)
    trained.optimizer = SGD([*trained.net.layer.parameters()], lr=0.0)
    trained.step(BOUND)
    step = trained.optimizer.step
    if rank == 1:
        trained.optimizer.step = lambda: None
    trained.step()
    trained.optimizer.step = step
    trained.step(BOUND)
    assert not trained.told
    assert trained.model._sync.weights._false_alarms.in_a_row == 1
    if rank == 0:
        flip(trained.net.still[2], 4, 3)
    trained.step(BOUND)
    assert trained.named() == ["still.2"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_frozen_ones_of_each_rank_are_a_warning_that_says_so_and_trained_ones_an_error(rank, size, compiled):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    trained = Trained(rank, net=nn.ModuleDict({"layer": net}), check_training="raise")
    trained.model.module.forward = net.forward
    if compiled:  # this gives the parameters other names, and is no change of the model
        net[2] = torch.compile(net[2], backend="eager")
    net[1].weight.data.fill_(rank)
    trained.step(BOUND)
    (text,) = trained.told
    assert "It is parameter 'layer.1.weight'; 1 of 6 differ. No gradient of it is averaged." in text
    assert "If each rank is to have its own, ignore this warning." in text
    assert [*trained.model._sync.weights.known] == ["layer.1.weight"]
    assert trained.model._sync.differing_weights == {}, "no checkpoint warns of them"
    if rank == 1:
        net[2].weight.data[0, 0] += 1
    with pytest.raises(dpfuse.DPFuseError, match=r"^DPF-W01: .*It is parameter 'layer\.2\.[\w.]*weight'; 1 of 6"):
        trained.step(BOUND)
    torch._dynamo.reset()
