"""What ranks must have alike: data that differs is an error on every rank, in bounded time, and never a silent loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dpfuse import DPFuseError
from dpfuse.paddle import Model
from dpfuse.paddle.callbacks import Callback
from dpfuse.paddle.io import DistributedBatchSampler
from dpfuse.paddle.metric import Accuracy
from tests.paddle.models import Stream, assert_every_rank_says, make_data, make_model


def call_with_different_data(rank, size, call, what):
    data = make_data(24)
    if what == "samples":
        source, options = make_data(24 - rank), {"batch_size": 4}
    elif what == "batch_size":
        source, options = data, {"batch_size": 4 + rank}  # as many batches on both
    elif what == "epoch":
        source, options = DataLoader(data, batch_sampler=DistributedBatchSampler(data, 4, shuffle=True)), {}
        if rank == 1:
            next(iter(source))
    elif what == "seed":
        source, options = DataLoader(data, 4, sampler=DistributedSampler(data, seed=rank)), {}
    elif what == "shuffle":
        source, options = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=rank == 0)), {}
    else:
        source, options = DataLoader(data, batch_sampler=DistributedBatchSampler(data, 5, drop_last=rank == 0)), {}
    try:
        getattr(make_model(), call)(source, verbose=0, **options)
    except DPFuseError as error:
        return str(error)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("samples", ["24 samples", "23 samples"]),
        ("batch_size", ["batch_size = 4", "batch_size = 5"]),
        ("epoch", ["epoch = 0", "epoch = 1"]),
        ("seed", ["seed = 0", "seed = 1"]),
        ("shuffle", ["shuffle = True", "shuffle = False"]),
        ("drop_last", ["2 batches", "3 batches"]),
    ],
)
def test_shares_that_do_not_make_up_the_whole_are_refused(ranks, call, what, texts):
    assert_every_rank_says(ranks(call_with_different_data, call, what, timeout=20), texts)


def evaluate_whole(rank, size):
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = make_model(net, metrics=Accuracy())
    data = make_data(23)
    model.fit(data, batch_size=4, verbose=0)  # running statistics are each rank's own
    results = []
    for source in (DataLoader(data, 4), data):
        found = model.evaluate(source, 4, verbose=0)
        results.append((found, model.predict(source, 4, stack_outputs=True, verbose=0)[0].tolist()))
    return results


def test_a_plain_loader_gives_every_rank_the_same(ranks):
    (whole, shared), second = ranks(evaluate_whole)
    assert second[0] == whole
    assert whole[0]["acc"] == shared[0]["acc"]
    np.testing.assert_allclose(whole[1], shared[1], rtol=1e-5, atol=1e-6)


def test_a_plain_loader_that_shuffles_is_pointed_out(rank, size):
    model = make_model()
    loader = DataLoader(make_data(), 4, shuffle=True)
    for call in (model.evaluate, model.predict):
        if rank == 0:
            with pytest.warns(UserWarning, match="shuffles"):
                call(loader, verbose=0)
        else:
            call(loader, verbose=0)


def fit_streams(rank, size, batches, accumulate):
    data = make_data(20)
    model = make_model()
    try:
        mine = [data[i : i + 2] for i in range(0, 2 * batches[rank], 2)]
        model.fit(Stream(mine), epochs=2, verbose=0, accumulate_grad_batches=accumulate)
    except (DPFuseError, ValueError) as error:
        message = str(error)
    # The ranks are still in step.
    make_model().fit(data, batch_size=4, verbose=0)
    return message


@pytest.mark.parametrize(
    ("batches", "accumulate", "texts"),
    [
        ((3, 4), 1, ["rank 0 has 'train_data: step 3, the last'", "rank 1 has 'train_data: step 3'"]),
        ((4, 3), 2, ["step 4, the last", "step 3, the last"]),
        ((4, 5), 2, ["step 4, the last", "step 4'"]),
        ((0, 2), 2, ["no batch", "step 2, the last"]),
        ((0, 0), 1, ["train_data gave no batch"]),
    ],
)
def test_loaders_without_length_that_end_apart_are_an_error_on_all_ranks(ranks, batches, accumulate, texts):
    assert_every_rank_says(ranks(fit_streams, batches, accumulate, timeout=20), texts)


class OnRank0(Callback):
    def __init__(self, source):
        self.source = source

    def on_epoch_end(self, epoch, logs=None):
        if dist.get_rank() == 0:
            self.model.evaluate(self.source, 4, verbose=0)


def evaluate_on_rank_0(rank, size, whole, with_evaluation):
    data = make_data()
    model = make_model(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    callback = OnRank0(DataLoader(data, 4) if whole else data)
    evaluation = make_data(6) if with_evaluation else None
    try:
        model.fit(data, evaluation, batch_size=4, epochs=2, verbose=0, callbacks=callback)
    except DPFuseError as error:
        # The ranks are still in step.
        Model(nn.Identity()).predict(TensorDataset(torch.ones(3, 1)), verbose=0)
        return str(error)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("with_evaluation", "elsewhere"), [(False, "the end of an epoch"), (True, "buffers")])
def test_a_call_on_one_rank_alone_is_named_on_all(ranks, whole, with_evaluation, elsewhere):
    texts = ["different calls: rank 0 has reached 'the call of evaluate'", elsewhere]
    assert_every_rank_says(ranks(evaluate_on_rank_0, whole, with_evaluation, timeout=20), texts)


@pytest.mark.ranks(timeout=20)
def test_networks_without_parameters_are_compared(rank, size):
    net = nn.Module()
    net.forward = lambda x: x
    net.register_buffer("state", torch.zeros(2 + rank))
    with pytest.raises(DPFuseError, match=r"the ranks' network differ.*rank 1 has 'state: torch.float32\[3\]'"):
        Model(net)
