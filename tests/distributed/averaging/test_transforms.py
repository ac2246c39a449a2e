"""Transforms of `torch.func`, `functional_call`, forward-mode AD and tracing over a wrapper work as over the module.

Nothing is communicated for them, also if one rank alone uses them. The steps after them are averaged as before.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from dpfuse import DataParallel, DistributedDataParallel
from dpfuse.comm import collective

FACES = {"data_parallel": DataParallel, "ddp": DistributedDataParallel}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data(rank, step=0):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def step_is_averaged(model, bare, rank, size, step, loss=lambda out: out.square().sum()):
    """An ordinary step over the wrapper, against one process that has the batches of all ranks."""
    model.zero_grad()
    loss(model(data(rank, step))).backward()
    bare.zero_grad()
    for each in range(size):
        (loss(bare(data(each, step))) / size).backward()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def assert_same(ours, theirs):
    torch.testing.assert_close(*([*torch.utils._pytree.tree_leaves(each)] for each in (ours, theirs)))


@contextmanager
def silence():
    """No collective may be called inside."""
    refuse = mock.Mock(side_effect=AssertionError("a collective was called"))
    with ExitStack() as stack:
        for name in collective.__all__:
            if name.startswith(("all_", "broadcast", "start_")):
                stack.enter_context(mock.patch.object(collective, name, refuse))
        yield


def detached(model):
    return {name: param.detach() for name, param in model.named_parameters()}


def of_one(model, params, x):
    return functional_call(model, params, (x[None],)).square().mean()


def per_sample(model, x):
    of_params = vmap(grad(lambda params, one: of_one(model, params, one)), in_dims=(None, 0))
    return [*of_params(detached(model), x).values()]


def product_with_hessian(model, x):
    params = detached(model)
    of_params = grad(lambda params: functional_call(model, params, (x,)).square().sum())
    return [*jvp(of_params, (params,), ({name: torch.ones_like(param) for name, param in params.items()},))[1].values()]


def two_backwards(model, x):
    """The same product without a transform."""
    params = [*model.parameters()]
    first = torch.autograd.grad(model(x).square().sum(), params, create_graph=True)
    return torch.autograd.grad(first, params, [torch.ones_like(param) for param in params])


def forward_mode(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def forward_mode_of_parameters(model, x):
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(param, torch.ones_like(param)) for name, param in detached(model).items()}
        return forward_ad.unpack_dual(functional_call(model, duals, (x,))).tangent


def ensemble(model, x):
    models = [copy.deepcopy(model) for _ in range(2)]
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    return vmap(lambda p, b: functional_call(base, (p, b), (x,)))(params, buffers)


TRANSFORMS = {
    "per-sample gradients": per_sample,
    "vmap": lambda model, x: vmap(model)(x),
    "jacrev": lambda model, x: jacrev(model)(x),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "hessian": lambda model, x: hessian(lambda x: model(x).sum())(x),
    "grad of the input": lambda model, x: vmap(grad(lambda one: model(one).sum()))(x),
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),)),
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(5, 2)),
    "linearize": lambda model, x: linearize(
        lambda params: functional_call(model, params, (x,)), params := detached(model)
    )[1](params),
    "hessian-vector product": product_with_hessian,
    "hessian-vector product of two backwards": two_backwards,
    "forward-mode AD": forward_mode,
    "forward-mode AD of parameters": forward_mode_of_parameters,
    "ensemble": ensemble,
    "make_fx": lambda model, x: make_fx(model)(x)(x),
    "export": lambda model, x: torch.export.export(model, (x,), strict=False).module()(x),
}


@pytest.mark.parametrize("users", [pytest.param((0, 1), marks=pytest.mark.slow), (1,)], ids=["every rank", "one rank"])
@pytest.mark.parametrize("face", ["data_parallel", pytest.param("ddp", marks=pytest.mark.slow)])
@pytest.mark.ranks(timeout=120)
def test_a_transform_is_that_of_the_bare_module(rank, size, face, users):
    for name, function in TRANSFORMS.items():
        model, bare = FACES[face](net()), net()
        for step in range(3):
            if rank in users:
                with silence():
                    got = function(model, data(rank, step))
                assert_same(got, function(bare, data(rank, step)))
            step_is_averaged(model, bare, rank, size, step)
        assert model.reducer.completed == 3, name


@pytest.mark.parametrize("face", FACES)
def test_a_transform_may_run_at_any_time_of_a_step(rank, size, face):
    """Between a forward and its backward, inside no_sync(), and while a window accumulates."""
    model, bare = FACES[face](net(), accumulate_in_buckets=True), net()
    for step in range(3):
        model.zero_grad()
        bare.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            with model.no_sync(enabled=micro == 2 * step):
                out = model(data(rank, micro))
                if rank == 1:
                    assert_same(per_sample(model, data(rank)), per_sample(bare, data(rank)))
                out.square().sum().backward()
                if rank == 0:
                    assert_same(forward_mode(model, data(rank)), forward_mode(bare, data(rank)))
            for each in range(size):
                (bare(data(each, micro)).square().sum() / size).backward()
        for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("face", FACES)
def test_a_backward_from_a_transform_to_the_parameters_is_averaged(rank, size, face):
    """The loss has derivatives with respect to the inputs, as for a differential equation; all parameters learn."""

    def derivatives(model):
        return lambda x: vmap(grad(lambda one: model(one).square().sum()))(x)

    def over_samples(model):
        return vmap(model)

    for transformed in (derivatives, over_samples):
        model, bare = FACES[face](net()), net()
        for step in range(4):
            model.zero_grad()
            transformed(model)(data(rank, step)).square().sum().backward()
            bare.zero_grad()
            for each in range(size):
                (transformed(bare)(data(each, step)).square().sum() / size).backward()
            for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
            assert model.reducer.completed == step + 1


@pytest.mark.parametrize("face", FACES)
def test_other_leaves_in_the_places_of_all_parameters_get_their_own_gradients(rank, size, face):
    model, bare, other = FACES[face](net()), net(), net(1)
    of_other = dict(other.named_parameters())
    leaves = {
        "parameters of another model": lambda: {f"module.{name}": param for name, param in of_other.items()},
        "copies": lambda: {f"module.{n}": p.detach().clone().requires_grad_() for n, p in of_other.items()},
        "frozen copies": lambda: {f"module.{name}": param.detach() for name, param in of_other.items()},
    }
    for step, (name, make) in enumerate(leaves.items()):
        if rank == 1:
            params = make()
            with silence():
                out = functional_call(model, params, (data(rank),))
                if out.requires_grad:
                    out.sum().backward()
            expected = torch.autograd.grad(other(data(rank)).sum(), [*other.parameters()])
            assert torch.equal(out, other(data(rank))), name
            if out.requires_grad:
                assert_same([param.grad for param in params.values()], expected)
        step_is_averaged(model, bare, rank, size, step)
        assert all(param.grad is None for param in of_other.values()) == (rank == 0)
        assert model.reducer.completed == step + 1


@pytest.mark.parametrize("face", FACES)
def test_other_leaves_in_some_places_are_no_change_of_the_model(rank, size, face):
    """The head is another one; the rest of the model learns from it."""
    model, bare, head = FACES[face](net()), net(), nn.Linear(4, 2)
    for step in range(3):
        model.zero_grad()
        params = {f"module.2.{name}": param for name, param in head.named_parameters()}
        functional_call(model, params, (data(rank, step),)).square().sum().backward()
        own = [param.grad for param in head.parameters()]
        head.zero_grad()
        bare.zero_grad()
        for each in range(size):
            params = {f"2.{name}": param for name, param in head.named_parameters()}
            (functional_call(bare, params, (data(each, step),)).square().sum() / size).backward()
            if each == rank:
                local = [size * param.grad for param in head.parameters()]
            head.zero_grad()
        assert_same(own, local)
        for ours, theirs in zip(model.module[0].parameters(), bare[0].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert model.reducer.completed == step + 1
        head.zero_grad()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.layer(x))


@pytest.mark.parametrize("face", FACES)
def test_buffers_that_stand_in_are_not_overwritten(rank, size, face):
    options = {"ddp": "forward_sync_buffers", "data_parallel": "broadcast_buffers"}
    model = FACES[face](Normed(), **{options[face]: True})
    bare = Normed()
    for step in range(3):
        own = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for params in (dict(model.named_parameters()), detached(model)):
            kept = {name: buffer.clone() + (rank if buffer.is_floating_point() else 0) for name, buffer in own.items()}
            expected = {name.removeprefix("module."): buffer.clone() for name, buffer in kept.items()}
            functional_call(model, (params, kept), (data(rank, step),))
            functional_call(
                bare, ({n.removeprefix("module."): p for n, p in params.items()}, expected), data(rank, step)
            )
            assert_same(list(kept.values()), list(expected.values()))
            assert_same(dict(model.named_buffers()), own)
        model.zero_grad()
        model(data(rank, step)).square().sum().backward()
        for buffer in model.buffers():
            first = buffer.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, buffer)
        bare.load_state_dict(model.module.state_dict())
