"""A GradScaler that is used in a way that cannot work, or in a backward that dies, says so on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from tests.distributed.norms_and_scaling.test_check_finite import Net
from tests.distributed.norms_and_scaling.test_grad_scaler import one_gradient


def misuses(rank, size):
    """Scaled on one rank only; a second backward behind unscale_(); a loss of the module itself."""
    model = dpfuse.DataParallel(Net())
    scaler = dpfuse.GradScaler(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        scaler.scale(model()).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    texts = []
    with pytest.raises(dpfuse.DPFuseError) as error:
        (model() if rank else scaler.scale(model())).backward()
    texts.append(str(error.value))
    model.zero_grad()
    scaler.scale(model()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(dpfuse.DPFuseError) as error:
        scaler.scale(model()).backward()
    texts.append(str(error.value))
    scaler.step(optimizer)
    scaler.update()
    model.zero_grad()
    scaler.scale(model()).backward()
    with pytest.raises(dpfuse.DPFuseError) as error:
        scaler.scale(model.module()).backward()
    texts.append(str(error.value))
    model.zero_grad()
    scaler.update(2.0)
    scaler.scale(model()).backward()
    assert one_gradient(model) == 1.0, "after errors all is as before"
    return texts


def test_misuse_is_told_on_every_rank(ranks):
    for one_rank, behind, unannounced in ranks(misuses):
        assert (
            "rank 1 averages its gradients as they are, rank 0 divides its gradients by the scale of its loss"
            in one_rank
        )
        assert "takes a weight back. " in one_rank
        assert "No rank's gradients" in one_rank
        assert "and unscale_() was called; expected one synchronised backward for each step" in behind
        assert "and it went through no output of the wrapped model; expected one" in unannounced


@pytest.mark.parametrize("model", [nn.Linear(1, 1), None, "model", []])
def test_a_model_that_is_not_wrapped_is_refused(model):
    with pytest.raises(TypeError, match="model must be "):
        dpfuse.GradScaler(model=model)


class Asking(torch.optim.SGD):
    """An optimizer that unscales by itself, after torch's older contract."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        return super().step(closure)


def test_an_optimizer_that_unscales_by_itself_is_refused(group):
    model = dpfuse.DataParallel(Net())
    scaler = dpfuse.GradScaler(model=model)
    scaler.scale(model()).backward()
    with pytest.raises(dpfuse.DPFuseError, match=r"Asking\.step takes a grad_scaler"):
        scaler.step(Asking(model.parameters(), lr=0.1))


def test_a_backward_that_was_interrupted(rank, size):
    model = dpfuse.DataParallel(Net())
    scaler = dpfuse.GradScaler(model=model, init_scale=8.0)
    for step in range(4):
        model.zero_grad()
        loss = scaler.scale(model())
        if step == 2:
            handle = model.first.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            handle.remove()
            model.zero_grad()
            scaler.scale(model()).backward()
        else:
            loss.backward()
        assert one_gradient(model) == 1.0
        scaler.update(8.0)


def test_what_one_rank_cannot_begin_fails_on_all(rank, size):
    """What one rank alone cannot begin fails on all: its next backward is not taken for this one."""
    model = dpfuse.DataParallel(Net())
    scaler = dpfuse.GradScaler(model=model, init_scale=8.0)
    scaler.scale(model()).backward()
    scaler.scale(model()).backward()
    loss = model.module() if rank else model()
    with pytest.raises(
        dpfuse.DPFuseError, match="it went through no output" if rank else "the backward failed on rank 1"
    ):
        scaler.scale(loss).backward()
    model.zero_grad()
    scaler.update(8.0)
    scaler.scale(model()).backward()
    assert one_gradient(model) == 1.0
