"""Training that goes on: two fits, or a fit after a load, are one fit of all epochs; samplers learn the epoch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from dpfuse.paddle.callbacks import Callback, LRScheduler
from tests.paddle.models import assert_same_parameters, make_data, make_model


def continue_training(rank, size, folder, accumulate):
    data = make_data(23)
    options = {"batch_size": 3, "verbose": 0, "accumulate_grad_batches": accumulate}
    whole, twice, resumed = (
        make_model(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))) for _ in range(3)
    )
    for other in (twice, resumed):
        other.network.load_state_dict(whole.network.state_dict())
    whole.fit(data, epochs=3, **options)
    twice.fit(data, save_dir=folder, **options)
    if dist.is_initialized():
        dist.barrier()
    resumed.load(f"{folder}/0")
    for other in (twice, resumed):
        other.fit(data, epochs=2, **options)
        assert_same_parameters(whole.network, other.network)
    # A fresh start has the first order again.
    resumed.load(f"{folder}/0", reset_optimizer=True)
    assert resumed._stepper.epochs == 0


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_in_parts_is_training_in_one(accumulate, tmp_path):
    continue_training(0, 1, str(tmp_path), accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_in_parts_is_training_in_one_on_ranks(ranks, accumulate, tmp_path):
    ranks(continue_training, str(tmp_path), accumulate)


class Rates(Callback):
    """Keeps the learning rate of each batch."""

    def __init__(self):
        self.rates = []

    def on_train_batch_begin(self, step, logs=None):
        self.rates.append(self.model._stepper.optimizer.param_groups[0]["lr"])


def rates_of(model, epochs, schedulers, folder=None, by_step=False):
    rates = Rates()
    own = [LRScheduler(each, by_step=by_step, by_epoch=not by_step) for each in schedulers]
    model.fit(make_data(8), batch_size=4, epochs=epochs, verbose=0, callbacks=[*own, rates], save_dir=folder)
    return rates.rates


def halving(model):
    return LambdaLR(model._stepper.optimizer, lambda steps: 0.5**steps)


def falling(model):
    return MultiStepLR(model._stepper.optimizer, [1, 3], gamma=0.25)


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("makers", [[halving], [falling, halving]])
@pytest.mark.parametrize("when", ["before the load", "after the load"])
def test_a_learning_rate_goes_on_after_a_load(tmp_path, makers, by_step, when):
    whole = make_model()
    expected = rates_of(whole, 3, [make(whole) for make in makers], by_step=by_step)
    model = make_model()
    first = rates_of(model, 1, [make(model) for make in makers], str(tmp_path), by_step=by_step)
    resumed = make_model()
    schedulers = [make(resumed) for make in makers] if when == "before the load" else []
    resumed.load(tmp_path / "0")
    schedulers = schedulers or [make(resumed) for make in makers]
    resumed.save(tmp_path / "again")
    assert first + rates_of(resumed, 2, schedulers, by_step=by_step) == expected
    resumed.load(tmp_path / "again")  # a file that was written between a load and the next training
    assert rates_of(resumed, 2, schedulers, by_step=by_step) == expected[len(first) :]
    assert len(set(expected)) > 2
    resumed.load(tmp_path / "0", reset_optimizer=True)
    begin = rates_of(resumed, 1, [], by_step=by_step)
    assert begin == [begin[0]] * 2  # no scheduler, nothing to go on with


def test_another_kind_of_scheduler_begins_with_a_warning(tmp_path):
    model = make_model()
    rates_of(model, 1, [halving(model)], str(tmp_path))
    model.load(tmp_path / "0")
    with pytest.warns(UserWarning, match="was trained with LambdaLR, expected MultiStepLR, which fit got"):
        rates_of(model, 1, [falling(model)])


class Unsaved(LambdaLR):
    """Its state has what no file of parameters may hold."""

    def state_dict(self):
        return {**super().state_dict(), "seen": {1}}


def test_a_scheduler_that_cannot_be_saved_is_told_of_and_the_rest_is_saved(tmp_path):
    model = make_model()
    with pytest.warns(UserWarning, match=r"schedule is not saved: the state of Unsaved\['seen'\] is a set"):
        rates_of(model, 1, [Unsaved(model._stepper.optimizer, lambda steps: 1.0)], str(tmp_path))
    model.load(tmp_path / "final")
    assert model._stepper.epochs == 1


class Seen(TensorDataset):
    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.seen = []

    def __getitem__(self, index):
        self.seen.append(index)
        return super().__getitem__(index)


class SetEpoch(Callback):
    def __init__(self, sampler):
        self.sampler = sampler

    def on_epoch_begin(self, epoch, logs=None):
        self.sampler.set_epoch(10 + epoch)


@pytest.mark.parametrize("as_batch_sampler", [False, True])
@pytest.mark.parametrize(("start", "by_callback"), [(0, False), (5, False), (0, True)])
def test_torchs_sampler_goes_on_from_its_own_epoch(as_batch_sampler, start, by_callback):
    data = Seen(*make_data(8).tensors)
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    expected = []
    for epoch in range(10 if by_callback else start, (10 if by_callback else start) + 4):
        sampler.set_epoch(epoch)
        expected += list(sampler)
    sampler.set_epoch(start)
    batches = {"batch_sampler": BatchSampler(sampler, 2, False)} if as_batch_sampler else {"sampler": sampler}
    loader = DataLoader(data, **batches)
    callback = SetEpoch(sampler) if by_callback else None
    model = make_model()
    if by_callback:
        model.fit(loader, epochs=4, verbose=0, callbacks=callback)
    else:
        model.fit(loader, epochs=3, verbose=0)
        model.fit(loader, verbose=0)
    assert data.seen == expected


def test_samplers_of_any_kind_are_left_to_themselves():
    data = Seen(*make_data(8).tensors)
    for options in ({"batch_size": 2, "sampler": [3, 1, 2, 5]}, {"batch_sampler": [[3, 1], [2, 5]]}):
        make_model().fit(DataLoader(data, **options), epochs=2, verbose=0)
        assert data.seen == [3, 1, 2, 5] * 2
        data.seen.clear()


def test_a_dataset_is_shuffled_anew_by_the_next_fit():
    orders = []
    data = Seen(*make_data(8).tensors)
    for fits in ((2,), (1, 1)):
        model = make_model()
        for epochs in fits:
            model.fit(data, batch_size=4, epochs=epochs, verbose=0)
        orders.append(data.seen[:])
        data.seen.clear()
    assert orders[0] == orders[1]
    assert orders[0][:8] != orders[0][8:]


def test_only_the_batches_that_are_trained_on_are_read():
    data = make_data(20)
    source = iter([data[i : i + 2] for i in range(0, 20, 2)])
    make_model().fit(source, num_iters=4, verbose=0)
    assert torch.equal(next(source)[0], data[8:10][0])
