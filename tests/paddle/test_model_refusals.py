"""Model: mixed precision, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import dpfuse
from dpfuse import DPFuseError
from dpfuse.paddle import Model
from dpfuse.paddle.metric import Accuracy
from tests.paddle.models import assert_same_parameters, make_data, make_model, make_net


@pytest.mark.parametrize("amp", ["O1", {"level": "O1"}, {"init_loss_scaling": 8.0, "use_dynamic_loss_scaling": False}])
def test_mixed_precision_on_the_cpu_is_bfloat16_autocast(amp):
    data = make_data()
    seen = []
    net = make_net()
    net[0].register_forward_hook(lambda module, taken, given: seen.append(given.dtype))
    model = Model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs=amp)
    model.fit(data, batch_size=4, verbose=0, shuffle=False)
    model.evaluate(data, batch_size=22, verbose=0)
    assert seen == [torch.bfloat16] * 6 + [torch.float32]

    plain = make_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for i in range(0, 22, 4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(plain(data.tensors[0][i : i + 4]), data.tensors[1][i : i + 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(net, plain)


@pytest.mark.parametrize("amp", [None, "O0", {"level": "O0"}])
def test_without_mixed_precision_everything_is_float32(amp):
    seen = []
    model = Model(make_net())
    model.network.register_forward_hook(lambda module, taken, given: seen.append(given.dtype))
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), amp_configs=amp)
    model.train_batch(*make_data()[:4])
    assert seen == [torch.float32]


@pytest.mark.parametrize(
    ("amp", "error", "text"),
    [
        ("O2", ValueError, "O2"),
        ("O3", ValueError, "expected 'O0' or 'O1'"),
        ({"level": "O2"}, ValueError, "not supported"),
        ({"levle": "O1"}, ValueError, "Did you mean 'level'"),
        ({"custom_white_list": {"conv2d"}}, ValueError, "unknown key"),
        ({"use_dynamic_loss_scaling": 1}, TypeError, "True or False"),
        (1, TypeError, "amp_configs"),
    ],
)
def test_amp_settings_that_do_not_work_are_refused(amp, error, text):
    with pytest.raises(error, match=text):
        Model(make_net()).prepare(amp_configs=amp)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": torch.optim.SGD}, "optimizer"),
        ({"optimizer": "sgd"}, "torch.optim.Optimizer"),
        ({"loss": nn.CrossEntropyLoss}, "pass an instance"),
        ({"loss": 3}, "loss must be"),
        ({"metrics": Accuracy}, "is no metric"),
        ({"metrics": [Accuracy(), object()]}, "torchmetrics"),
    ],
)
def test_prepare_refuses_what_it_cannot_use(arguments, text):
    with pytest.raises(TypeError, match=text):
        Model(make_net()).prepare(**arguments)


@pytest.mark.parametrize("network", [nn.Linear, "net", None])
def test_the_network_must_be_a_module(network):
    with pytest.raises(TypeError, match="network must be"):
        Model(network)


def test_a_wrapped_network_is_refused():
    with pytest.warns(UserWarning, match="no process group"), pytest.raises(TypeError, match=r"network\.module"):
        Model(dpfuse.DataParallel(make_net()))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"train_data": None}, ValueError, "train_data must be given"),
        ({"train_data": 3}, TypeError, "train_data must be a torch Dataset"),
        ({"eval_data": 3}, TypeError, "eval_data must be"),
        ({"epochs": 0}, ValueError, "epochs must be"),
        ({"epochs": 1.5}, TypeError, "epochs must be an integer, got 1.5"),
        ({"eval_freq": 0}, ValueError, "eval_freq"),
        ({"accumulate_grad_batches": 0}, ValueError, "accumulate_grad_batches"),
        ({"num_iters": 0}, ValueError, "num_iters"),
        ({"log_freq": 0}, ValueError, "log_freq"),
        ({"save_freq": 0}, ValueError, "save_freq"),
        ({"verbose": 3}, ValueError, "verbose"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": (1, 2, 3)}, ValueError, "batch_size"),
        ({"callbacks": [print]}, TypeError, "callbacks"),
        ({"train_data": []}, ValueError, "train_data gave no batch"),
        ({"batch_size": 50, "drop_last": True}, ValueError, "train_data gave no batch"),
        ({"eval_data": []}, ValueError, "eval_data gave no batch"),
    ],
)
def test_fit_refuses_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        make_model().fit(**{"train_data": make_data(), "batch_size": 4, "verbose": 0, **arguments})


def test_an_iterator_that_is_used_up_is_named():
    data = make_data()
    with pytest.raises(ValueError, match="used up"):
        make_model().fit(iter([data[:4], data[4:8]]), epochs=2, verbose=0)


@pytest.mark.parametrize("missing", ["optimizer", "loss"])
def test_training_needs_an_optimizer_and_a_loss(missing):
    model = Model(make_net())
    ready = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": nn.CrossEntropyLoss()}
    model.prepare(**{**ready, missing: None})
    for train in (lambda: model.fit(make_data(), verbose=0), lambda: model.train_batch(*make_data()[:2])):
        with pytest.raises(DPFuseError, match="prepare"):
            train()


def test_a_loss_for_every_sample_is_refused():
    model = Model(make_net())
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match="reduction='mean'"):
        model.train_batch(*make_data()[:4])


def test_a_network_that_returns_a_dict_is_refused():
    class Named(nn.Module):
        def forward(self, x):
            return {"scores": x}

    with pytest.raises(TypeError, match="the network returned dict"):
        Model(Named()).predict_batch(torch.ones(2, 2))


def test_bfloat16_outputs_become_float32_arrays():
    model = Model(nn.Linear(2, 2).bfloat16())
    assert model.predict_batch(torch.ones(1, 2, dtype=torch.bfloat16))[0].dtype == np.float32


def test_an_nan_loss_is_reported_as_it_is():
    model = Model(make_net())
    model.prepare(loss=lambda scores, labels: scores.sum() * math.nan)
    assert math.isnan(model.evaluate(make_data(), verbose=0)["loss"][0])
