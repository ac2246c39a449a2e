"""Two wrapped models share an encoder or a head: each backward averages it once, whatever lies in its gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse

SMALL = 1e-5  # MB: several buckets, which are sent while backward runs
FACES = {
    "dp": dpfuse.DataParallel,
    "dp, small": partial(dpfuse.DataParallel, comm_buffer_size=SMALL, last_comm_buffer_size=SMALL),
    "ddp": dpfuse.DistributedDataParallel,
    "ddp, small": partial(dpfuse.DistributedDataParallel, bucket_cap_mb=SMALL),
    "unused": partial(dpfuse.DistributedDataParallel, bucket_cap_mb=SMALL, find_unused_parameters=True),
    "narrow": partial(dpfuse.DataParallel, wire_dtype=torch.bfloat16),
    "deterministic": partial(dpfuse.DistributedDataParallel, deterministic=True),
}


def models_of(shares, wrap):
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if shares == "head":
        return [wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), part)) for _ in range(2)]
    return [wrap(nn.Sequential(part, nn.Linear(4, 4), nn.Linear(4, 2))) for _ in range(2)]


def trained(wrap, ranks, *, shares, order, set_to_none):
    """The gradients of each step; without a wrapper, of the batches of all ranks."""
    models, found = models_of(shares, wrap), []
    for step in range(8):
        for model in models:
            model.zero_grad(set_to_none)

        def loss_of(number, step=step):
            batches = [torch.full((3, 4), 1.0 + rank + step) for rank in ranks]
            return sum(models[number](batch).square().mean() for batch in batches) / len(ranks)

        first = step % 2
        if order == "in turn":
            loss_of(first).backward()
        elif order == "forwards together":
            losses = [loss_of(number) for number in (0, 1)]
            losses[first].backward()
            losses[1 - first].backward()
        else:
            (loss_of(first) + loss_of(1 - first)).backward()
        params = [param for model in models for param in model.parameters()]
        found.append([torch.zeros_like(param) if param.grad is None else param.grad.clone() for param in params])
    return found


@pytest.mark.ranks(timeout=60)
@pytest.mark.parametrize("order", ["in turn", "forwards together", "one backward"])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("shares", ["encoder", "head"])
def test_models_that_share_a_part_have_the_gradients_of_one_process(rank, size, shares, face, order):
    close = {"rtol": 0.05, "atol": 0.02} if face == "narrow" else {}
    for set_to_none in (True, False):
        how = {"shares": shares, "order": order, "set_to_none": set_to_none}
        expected = trained(lambda module: module, range(size), **how)
        torch.testing.assert_close(trained(FACES[face], [rank], **how), expected, **close)


@pytest.mark.ranks(timeout=60)
@pytest.mark.parametrize(("shares", "part", "names"), [("head", 1, "'1"), ("encoder", 2, "'2"), ("head", 2, "'2")])
def test_a_backward_past_all_wrappers_is_told(rank, size, shares, part, names):
    """Through the part that has been ready last so far, the backward would be noticed."""
    models = models_of(shares, dpfuse.DataParallel)
    for _ in range(3):
        for model in models:
            model(torch.ones(3, 4)).sum().backward()
    models[1](torch.ones(3, 4)).sum().backward()
    models[1].module[part](torch.ones(3, 4)).sum().backward()
    with pytest.raises(dpfuse.DPFuseError, match=rf"parameters? {names}[\s\S]*were not averaged"):
        models[1](torch.ones(3, 4))


@pytest.mark.ranks(timeout=60)
@pytest.mark.parametrize("at_once", [True, False], ids=["one optimizer", "two optimizers"])
def test_a_backward_past_one_wrapper_averages_what_that_has_alone(rank, size, at_once):
    torch.manual_seed(0)
    encoder, head = nn.Linear(4, 4), nn.Linear(4, 2)
    inner, outer = dpfuse.DataParallel(encoder), dpfuse.DataParallel(nn.Sequential(encoder, head))
    sets = [[*encoder.parameters(), *head.parameters()]] if at_once else [encoder.parameters(), head.parameters()]
    optimizers = [torch.optim.SGD(params, lr=0.0) for params in sets]
    for step in range(6):
        batch = torch.full((3, 4), 1.0 + rank + step)
        (outer(batch) if step < 3 else head(inner(batch))).square().sum().backward()
        for param in (*encoder.parameters(), *head.parameters()):
            mean = param.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(param.grad, mean / size)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def planted(_grad):
    raise KeyError("planted")


@pytest.mark.ranks(timeout=60)
@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("local", [False, True], ids=["averaged", "inside no_sync"])
@pytest.mark.parametrize("shares", ["encoder", "head"])
def test_a_failed_backward_of_one_model_is_told_before_the_other_one_goes_on(rank, size, shares, local, fails):
    """Inside of `no_sync()` no other rank waits for it, and nothing is told."""
    models = models_of(shares, dpfuse.DataParallel)
    for step in range(6):
        hook = models[fails].module[1].weight.register_hook(planted) if rank == 0 and step == 3 else None
        for number in (fails, 1 - fails):
            batch = torch.full((3, 4), 1.0 + rank + step)
            for model in models:
                model.zero_grad()
            died = step == 3 and number == fails
            with (
                pytest.raises((KeyError, dpfuse.DPFuseError)) if died else nullcontext(),
                models[number].no_sync(enabled=died and local),
            ):
                if died and local and rank:
                    raise KeyError("a batch that this rank does not have")
                models[number](batch).square().sum().backward()
            if not died:
                expected = copy.deepcopy(models[number].module)
                expected.zero_grad()
                expected(batch).square().sum().backward()
                for param, alone in zip(models[number].parameters(), expected.parameters(), strict=True):
                    dist.all_reduce(alone.grad)
                    torch.testing.assert_close(param.grad, alone.grad / size)
        if hook is not None:
            hook.remove()


@pytest.mark.ranks(timeout=60)
@pytest.mark.parametrize("shares", ["encoder", "head"])
def test_what_each_model_would_do_again_is_refused(rank, size, shares):
    models = models_of(shares, dpfuse.DataParallel)
    scaler = dpfuse.GradScaler("cpu", model=models)
    for scaled in (True, False):
        for model in models:
            model.zero_grad()
            if not scaled:
                model.set_gradient_weight(3 + rank, reduction="sum")
        loss = sum(model(torch.ones(3, 4)).sum() for model in models)
        with pytest.raises(dpfuse.DPFuseError, match="which each model would do; expected a backward for each model"):
            (scaler.scale(loss) if scaled else loss).backward()


@pytest.mark.ranks(timeout=60)
@pytest.mark.parametrize("between", [True, False], ids=["zeroed between", "added up"])
@pytest.mark.parametrize("shares", ["encoder", "head"])
def test_a_scaler_unscales_a_shared_part_once(rank, size, shares, between):
    models, plain = models_of(shares, dpfuse.DataParallel), models_of(shares, lambda module: module)
    params = [list(dict.fromkeys(param for model in some for param in model.parameters())) for some in (models, plain)]
    scaler = dpfuse.GradScaler("cpu", init_scale=8.0, growth_interval=2, model=models)
    optimizers = [torch.optim.SGD(some, lr=0.0) for some in params]
    for step in range(6):
        for number in (0, 1):
            if between or not number:
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=bool(step % 2))
            batch = torch.full((3, 4), 1.0 + step)
            scaler.scale(models[number](batch).sum()).backward()
            plain[number](batch).sum().backward()
            if between or number:
                scaler.unscale_(optimizers[0])
                torch.testing.assert_close([param.grad for param in params[0]], [param.grad for param in params[1]])
                scaler.step(optimizers[0])
                scaler.update()


@pytest.mark.ranks(timeout=60)
@pytest.mark.parametrize("shares", ["encoder", "head"])
def test_each_model_weighs_the_gradients_of_its_own_backward(rank, size, shares):
    models = models_of(shares, dpfuse.DataParallel)
    plain = models_of(shares, lambda module: module)
    for step in range(4):
        for some in (models, plain):
            for model in some:
                model.zero_grad(set_to_none=step < 2)
        for number in (0, 1):
            models[number].set_gradient_weight(1.0 + rank + number, reduction="sum")
            models[number](torch.full((3, 4), 1.0 + rank + step)).sum().backward()
            total = sum(1.0 + other + number for other in range(size))
            (
                sum(plain[number](torch.full((3, 4), 1.0 + other + step)).sum() for other in range(size)) / total
            ).backward()
        for model, one in zip(models, plain, strict=True):
            torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in one.parameters()])
