"""Model on real ranks: training as torch's DDP does it; evaluation and prediction as one process does them."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import dpfuse
from dpfuse import DPFuseError
from dpfuse.paddle import Model
from dpfuse.paddle.callbacks import Callback, EarlyStopping
from dpfuse.paddle.io import DistributedBatchSampler
from dpfuse.paddle.metric import Accuracy
from tests.paddle.models import (
    Recorder,
    Stream,
    TorchMean,
    assert_every_rank_says,
    assert_same_parameters,
    make_data,
    make_net,
    make_rank_model,
)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fit_equals_a_ddp_loop_bitwise(rank, size, accumulate):
    data = make_data(23)
    model = make_rank_model(rank)
    model.fit(data, batch_size=3, epochs=3, verbose=0, accumulate_grad_batches=accumulate)

    ddp = DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_sampler=DistributedBatchSampler(data, 3, shuffle=True))
    for _ in range(3):
        for step, (x, y) in enumerate(loader):
            if (step + 1) % accumulate == 0 or step + 1 == len(loader):
                nn.functional.cross_entropy(ddp(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with ddp.no_sync():
                    nn.functional.cross_entropy(ddp(x), y).backward()
    assert_same_parameters(model.network, ddp.module)


class OwnOrder(DistributedSampler):
    """A sampler whose order only its class knows."""


def told_of_evaluation(rank, size):
    data = make_data(8)
    loader = DataLoader(data, 2, sampler=OwnOrder(data, shuffle=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_rank_model().fit(data, loader, batch_size=2, verbose=0)
    return [(str(each.message)[:40], os.path.basename(each.filename)) for each in caught]


def test_fit_says_that_an_evaluation_is_each_ranks_own(ranks):
    expected = ("eval_data has an unknown order, so that ", "test_model_ranks.py")
    assert ranks(told_of_evaluation) == [[expected], []]


def collectives_of_an_epoch(rank, size, accumulate):
    model = make_rank_model()
    with dpfuse.time_communication(model._stepper.parallel) as times:
        model.fit(make_data(28), batch_size=2, verbose=0, accumulate_grad_batches=accumulate)
    return times.steps


def test_accumulation_communicates_only_for_the_last_batch_of_a_window(ranks):
    assert ranks(collectives_of_an_epoch, 1) == [7, 7]
    assert ranks(collectives_of_an_epoch, 3) == [3, 3]


def test_what_a_loader_without_length_leaves_over_is_averaged_too(rank, size):
    data = make_data(20)
    mine = [data[i : i + 2] for i in range(2 * rank, 20, 4)]
    models = [make_rank_model(), make_rank_model()]
    for model, source in zip(models, (mine, Stream(mine)), strict=True):
        model.fit(source, verbose=0, epochs=2, accumulate_grad_batches=2)
    assert_same_parameters(*(model.network for model in models))


def evaluated(model, source, batch_size):
    return model.evaluate(source, batch_size, verbose=0), model.predict(source, batch_size, verbose=0)


def compute_evaluation(rank, size, samples, batch_size, kind):
    data = make_data(samples)
    model = make_rank_model(metrics=[Accuracy(topk=(1, 2)), TorchMean()])
    if kind == "dataset":
        source = data
    elif kind == "distributed sampler":
        source = DataLoader(data, batch_size, sampler=DistributedSampler(data, shuffle=False))
    else:
        source = DataLoader(data, batch_size)
    return evaluated(model, source, batch_size)


def on_one_process(samples, batch_size):
    model = make_rank_model(metrics=[Accuracy(topk=(1, 2)), TorchMean()])
    return evaluated(model, make_data(samples), batch_size)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("samples", "batch_size", "kind", "size"),
    [
        (23, 4, "dataset", 2),
        (24, 4, "dataset", 2),
        (1, 4, "dataset", 2),
        (23, 4, "dataset", 3),
        (2, 1, "dataset", 3),
        (23, 4, "distributed sampler", 2),
        (23, 4, "distributed sampler", 3),
        (23, 4, "whole", 2),
    ],
)
def test_evaluate_and_predict_equal_one_process_and_are_the_same_on_all_ranks(ranks, samples, batch_size, kind, size):
    results, outputs = on_one_process(samples, batch_size)
    every = ranks(compute_evaluation, samples, batch_size, kind, size=size)
    for found, predicted in every:
        assert found["loss"] == every[0][0]["loss"], "to the last bit"
        counts = ("acc_top1", "acc_top2", "torchmean")
        assert [found[name] for name in counts] == [results[name] for name in counts]
        # The last batch is split over the ranks, and a matrix product of fewer rows may round otherwise.
        assert found["loss"] == pytest.approx(results["loss"], rel=1e-6)
        assert [array.shape for array in predicted[0]] == [array.shape for array in outputs[0]]
        np.testing.assert_allclose(np.concatenate(predicted[0]), np.concatenate(outputs[0]), rtol=1e-5, atol=1e-6)


class Numbers(TensorDataset):
    """Sample i is (i,), so that outputs say where they come from."""

    def __init__(self, samples):
        super().__init__(torch.arange(float(samples))[:, None])


def predict_numbers(rank, size, kind):
    data = Numbers(23)
    sampler = {
        "ours": DistributedBatchSampler(data, 4, shuffle=True),
        "ours, short dropped": DistributedBatchSampler(data, 5, drop_last=True),
        "torch's": BatchSampler(DistributedSampler(data, shuffle=True, seed=3), 4, drop_last=False),
        "torch's, rest dropped": BatchSampler(DistributedSampler(data, shuffle=False, drop_last=True), 4, False),
    }[kind]
    if kind == "ours":
        list(sampler)  # one epoch has gone by: the order is another one
    loader = DataLoader(data, batch_sampler=sampler)
    (batches,) = Model(nn.Identity()).predict(loader, verbose=0)
    return np.concatenate(batches)[:, 0].tolist()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ours", range(23)),
        ("ours, short dropped", range(20)),
        ("torch's", range(23)),
        ("torch's, rest dropped", range(22)),
    ],
)
def test_predictions_come_in_the_order_of_the_dataset_whatever_the_sampler_does(ranks, kind, expected):
    assert ranks(predict_numbers, kind) == [list(map(float, expected))] * 2


def evaluate_running_statistics(rank, size):
    net = nn.BatchNorm1d(1)
    model = Model(net)
    net.running_mean.fill_(rank)
    return np.concatenate(model.predict(Numbers(5), verbose=0)[0]).tolist(), net.running_mean.item()


def test_running_statistics_of_rank_0_count(ranks):
    net = nn.BatchNorm1d(1).eval()
    expected = net(Numbers(5).tensors[0]).tolist()
    assert ranks(evaluate_running_statistics) == [(expected, 0.0)] * 2


class Odd(nn.Module):
    """Gives rank 1 other outputs."""

    def __init__(self, rank, how):
        super().__init__()
        self.rank, self.how = rank, how

    def forward(self, x):
        if self.rank == 0:
            return x
        return {
            "width": torch.cat([x, x], 1),
            "dtype": x.double(),
            "count": (x, x),
            "rows": torch.cat([x, x]),
            "scalar": x.sum(),
        }[self.how]


def predict_oddly(rank, size, how):
    model = Model(Odd(rank, how))
    try:
        model.predict(Numbers(8), batch_size=2, verbose=0)
    except DPFuseError as error:
        # The ranks are still in step.
        (good,) = Model(nn.Identity()).predict(Numbers(3), stack_outputs=True, verbose=0)
        return str(error), good.tolist()


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("width", ["tensor 1: torch.float32[*, 1]", "tensor 1: torch.float32[*, 2]"]),
        ("dtype", ["torch.float32", "torch.float64"]),
        ("count", ["rank 1 has"]),
        ("rows", ["rank 1", "(4, 1)", "batch of 2 samples"]),
        ("scalar", ["rank 1", "shape ()"]),
    ],
)
def test_outputs_that_differ_between_ranks_are_the_same_error_everywhere(ranks, how, texts):
    (first, rows), second = ranks(predict_oddly, how, timeout=20)
    assert (first, rows) == second
    assert rows == [[0.0], [1.0], [2.0]]
    for text in texts:
        assert text in first


def exotic_rows(rank, size):
    class Exotic(nn.Module):
        def forward(self, x):
            n = x.long()[:, 0]
            wide = torch.stack([x, x + 0.5], 2).transpose(1, 2)  # not contiguous
            return n, x[:, 0] > 3, x.bfloat16(), wide, x[:, :0], torch.complex(x, -x)

    found = Model(Exotic()).predict(Numbers(7), batch_size=2, stack_outputs=True, verbose=0)
    return [array.dtype.name for array in found], [array.tolist() for array in found]


def test_outputs_of_every_dtype_and_layout_are_gathered(ranks):
    x = np.arange(7.0)
    expected = [x, x > 3, x[:, None], np.stack([x, x + 0.5], 1)[:, :, None], np.zeros((7, 0)), (x - 1j * x)[:, None]]
    for dtypes, found in ranks(exotic_rows):
        assert dtypes == ["int64", "bool", "float32", "float32", "float32", "complex64"]
        assert found == [array.tolist() for array in expected]


def fit_unevenly(rank, size, what):
    model = make_rank_model()
    arguments = {"train_data": [make_data()[:2]] * 3, "verbose": 0}
    other = {
        "length": {"train_data": [make_data()[:2]] * (3 + rank)},
        "epochs": {"epochs": 1 + rank},
        "accumulate": {"accumulate_grad_batches": 1 + rank},
        "dealing": {"eval_data": make_data() if rank else [make_data()[:2]]},
        "eval length": {"eval_data": make_data(8 + 8 * rank)},
    }[what]
    try:
        model.fit(**{**arguments, **other})
    except DPFuseError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("length", ["rank 0 has 'len(train_data) = 3'", "rank 1 has 'len(train_data) = 4'"]),
        ("epochs", ["epochs = 1", "epochs = 2"]),
        ("accumulate", ["accumulate_grad_batches = 2"]),
        ("dealing", ["rank 0 has 'eval_data: any batches, unknown'", "rank 1 has 'eval_data: 11 batches, shared'"]),
        ("eval length", ["4 batches", "8 batches"]),
    ],
)
def test_fit_compares_what_the_ranks_were_given(ranks, what, texts):
    assert_every_rank_says(ranks(fit_unevenly, what, timeout=20), texts)


class StopOnRank1(Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = dist.get_rank() == 1 and epoch == 1


def stop_on_one_rank(rank, size):
    recorder = Recorder()
    make_rank_model().fit(make_data(), batch_size=4, epochs=5, verbose=0, callbacks=[StopOnRank1(), recorder])
    return len(recorder.logs("on_epoch_end"))


def test_a_stop_that_one_rank_decides_stops_all(ranks):
    assert ranks(stop_on_one_rank, timeout=20) == [2, 2]


def stop_early(rank, size, folder):
    model = make_rank_model(metrics=Accuracy())
    for group in model._stepper.optimizer.param_groups:
        group["lr"] = 0.0  # nothing gets better
    recorder = Recorder()
    stopper = EarlyStopping(patience=2, verbose=0)
    data = make_data(23)
    model.fit(data, data, 4, epochs=9, save_dir=folder, save_freq=9, verbose=0, callbacks=[stopper, recorder])
    # fit returns when the files are there.
    return len(recorder.logs("on_epoch_end")), sorted(os.listdir(folder))


def test_early_stopping_stops_all_ranks_and_saves_once(ranks, tmp_path):
    names = [f"{stem}.{kind}" for stem in ("0", "best_model", "final") for kind in ("pdopt", "pdparams")]
    assert ranks(stop_early, str(tmp_path), timeout=20) == [(3, names)] * 2
