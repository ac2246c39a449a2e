"""Gradients and parameters are the user's: a program may convert, swap, copy and free them after steps."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial, wraps
from weakref import ref

import pytest
import torch
from torch import nn

import dpfuse
from tests.freed import still_held

CHECKS = {
    "check_training": "raise",
    "check_finite": "raise",
    "metrics": True,
}
FACES = {
    "paddle": partial(dpfuse.DataParallel, **CHECKS),
    "torch": partial(dpfuse.DistributedDataParallel, **CHECKS),
    "torch, views": partial(dpfuse.DistributedDataParallel, gradient_as_bucket_view=True, **CHECKS),
    "torch, without checks": partial(dpfuse.DistributedDataParallel, check_training="off"),
}


def make(face, seed=4):
    torch.manual_seed(seed)
    model = FACES[face](nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 4)))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def batch(rank, step, dtype):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def train(model, optimizer, rank, size, step, *, steps=True):
    """Make one step, and compare the gradients with the mean of those of all ranks, computed here."""
    module, params = model.module, list(model.parameters())
    dtype = params[0].dtype
    optimizer.zero_grad()
    found = []
    for other in range(size):
        plain = copy.deepcopy(module)
        found.append(torch.autograd.grad(plain(batch(other, step, dtype)).square().mean(), list(plain.parameters())))
    model(batch(rank, step, dtype)).square().mean().backward()
    for param, grads in zip(params, zip(*found, strict=True), strict=True):
        assert param.grad.dtype == dtype
        torch.testing.assert_close(param.grad, sum(grads) / size, rtol=1e-4, atol=1e-6)
    norm = torch.stack([param.grad.norm() for param in params]).norm()
    torch.testing.assert_close(model.clip_grad_norm_(1e6), norm, check_dtype=False)
    if steps:
        optimizer.step()


def swapping(test):
    """Have torch swap parameters where it converts or loads them, in the process of the rank."""

    @wraps(test)
    def run(*args, **kwargs):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            test(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return run


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
@swapping
def test_a_module_is_converted_by_swapping(rank, size, face):
    """With gradients of an averaged backward, after it was stepped or not."""
    model, optimizer = make(face)
    step = 0
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        model.to(dtype)
        for steps in (True, False):
            train(model, optimizer, rank, size, step, steps=steps)
            step += 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
@swapping
def test_a_state_is_loaded_by_swapping(rank, size, face):
    model, optimizer = make(face)
    for step in range(4):
        train(model, optimizer, rank, size, step)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(state, assign=step == 2)
        if step == 2:  # the parameters are others now
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("what", ["parameter", "gradient", "both"])
@pytest.mark.parametrize("face", FACES)
def test_tensors_are_swapped(rank, size, face, what):
    model, optimizer = make(face)
    for step in range(6):
        train(model, optimizer, rank, size, step)
        if step in (1, 3):
            for param in model.parameters():
                grad, param.grad = param.grad, None  # torch swaps no gradient that a parameter has
                if what != "parameter":
                    torch.utils.swap_tensors(grad, grad.clone())
                if what != "gradient":
                    torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))
                param.grad = grad


def test_hooks_of_swapped_parameters_are_called(rank, size):
    """Torch leaves them with the memory; a bucket would then be sent when backward has ended, without overlap."""
    model, optimizer = make("torch, without checks")
    called = []
    for step in range(5):
        train(model, optimizer, rank, size, step)
        if step == 2:
            optimizer.zero_grad()
            for param in model.parameters():
                torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))
                param.register_post_accumulate_grad_hook(called.append)
    assert len(called) == 2 * len(list(model.parameters()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
def test_gradients_are_freed_when_a_program_drops_them(rank, size, face):
    model, optimizer = make(face)
    for step in range(3):
        train(model, optimizer, rank, size, step)
        for param in model.parameters():
            own = param.grad = param.grad.clone()
            held = ref(own)
            del own
            param.grad = None
            assert not still_held([held])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
def test_gradients_and_parameters_are_copied_and_saved(rank, size, face):
    model, optimizer = make(face)
    for step in range(3):
        train(model, optimizer, rank, size, step)
        for param in model.parameters():
            for tensor in (param, param.grad):
                file = io.BytesIO()
                torch.save(tensor, file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                for other in (saved, pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor), copy.copy(tensor)):
                    assert torch.equal(other, tensor)
    twin = copy.deepcopy(model)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.05), rank, size, 3)
    train(model, optimizer, rank, size, 4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
def test_parameters_are_deleted(rank, size, face):
    """Their gradients count no more in a norm, although their places in the buckets stay."""
    model, optimizer = make(face)
    for step in range(2):
        train(model, optimizer, rank, size, step)
    model.module[2] = nn.Identity()
    for step in range(2, 5):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(model, optimizer, rank, size, step)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
def test_a_model_is_deleted(rank, size, face):
    model, optimizer = make(face)
    for step in range(3):
        train(model, optimizer, rank, size, step)
    held = [ref(param) for param in model.parameters()]
    del model, optimizer
    assert not still_held(held)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
def test_memory_is_made_anew(rank, size, face):
    """As programs do that build a model without memory: all parameters are new objects."""
    model, optimizer = make(face)
    for step in range(2):
        train(model, optimizer, rank, size, step)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer.zero_grad()
    model.to_empty(device="cpu")
    model.load_state_dict(values)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2, 5):
        train(model, optimizer, rank, size, step)


def averaged_by_hand(module, rank, size, step):
    """Make a backward, and compare the averaged gradients with the mean of those of all ranks, computed here."""
    params = list(module.parameters())
    found = []
    for other in range(size):
        loss = module(batch(other, step, params[0].dtype)).square().mean()
        found.append(torch.autograd.grad(loss, params))
    for param, grad in zip(params, found[rank], strict=True):
        param.grad = grad.clone()
    dpfuse.fused_allreduce_gradients(params)
    for param, grads in zip(params, zip(*found, strict=True), strict=True):
        torch.testing.assert_close(param.grad, sum(grads) / size)


@pytest.mark.parametrize("way", ["swap", "convert", "replace the memory"])
@swapping
def test_parameters_that_were_averaged_by_hand_are_changed(rank, size, way):
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(8):
        averaged_by_hand(module, rank, size, step)
        optimizer.step()
        if way == "convert":
            module.to(torch.float64 if step % 2 else torch.float32)
        for param in module.parameters():
            if way == "swap" and step in (2, 3, 6):
                param.grad = None
                torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))
            elif way == "replace the memory":
                param.data = param.data - 0.1 * param.grad


def test_modules_that_were_averaged_by_hand_are_freed(rank, size):
    for step in range(3):
        torch.manual_seed(4)
        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        for _ in range(3):
            averaged_by_hand(module, rank, size, step)
        held = list(map(ref, module.parameters()))
        del module
        assert not still_held(held)
