"""A GradScaler at one rank, or without any, is torch's for all that it is not told of."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import dpfuse
from tests.distributed.norms_and_scaling.test_check_finite import Net
from tests.distributed.norms_and_scaling.test_grad_scaler import one_gradient


def test_the_loss_may_be_several_tensors(group):
    model = dpfuse.DataParallel(Net())
    scaler = dpfuse.GradScaler(model=model, init_scale=8.0)
    for outputs in ([model(), model()], (model(), torch.ones(2)), map(Net.forward, [model.module] * 2)):
        model.zero_grad()
        kind = type(outputs)
        scaled = scaler.scale(outputs)
        assert type(scaled) is kind
        losses = [loss for loss in scaled if loss.requires_grad]
        sum(losses).backward()
        assert one_gradient(model) == len(losses)
        scaler.update(8.0)
    with pytest.raises(ValueError, match="Tensor or an iterable of Tensors"):
        scaler.scale(3.0)


def test_it_is_torchs_where_nothing_is_wrapped_or_scaled(group):
    model = dpfuse.DataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    off = dpfuse.GradScaler(model=model, enabled=False)
    assert not off.is_enabled()
    off.scale(model()).backward()
    off.step(optimizer)
    off.update()
    assert off.state_dict() == {}
    assert model.module.first.eq(0.5).all()
    assert not model._sync.factors.attached
    theirs = torch.amp.GradScaler("cpu", init_scale=4.0)
    ours = dpfuse.GradScaler(model=model, growth_interval=1)
    assert isinstance(ours, torch.amp.GradScaler)
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == 4.0
    theirs.load_state_dict(ours.state_dict())
    for scaler in (theirs, ours, pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        model.zero_grad()
        scaler.scale(model()).backward()
        assert one_gradient(model) == (1.0 if scaler is ours else scaler.get_scale())
        scaler.unscale_(optimizer)
        assert one_gradient(model) == 1.0
        scaler.step(optimizer)
        scaler.update()


def test_without_a_process_group_it_works_like_torchs():
    with pytest.warns(UserWarning, match="no process group"):
        model = dpfuse.DataParallel(Net())
    scaler = dpfuse.GradScaler("cpu", 4.0, model=model)
    scaler.scale(model()).backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert one_gradient(model) == 1.0
