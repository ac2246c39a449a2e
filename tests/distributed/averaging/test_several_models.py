"""Models that share a backward, with each other or with collectives of the program, where ranks use other parameters.

Collectives of one group pair up by their order. A bucket that leaves later on one rank would be added to another one.
"""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.utils.checkpoint import checkpoint

import dpfuse
from dpfuse.engine.reducer import Reducer
from dpfuse.paddle.distributed.fleet.sync_batch_norm import SyncBatchNorm

WIDTH = 8
SMALL = {"bucket_cap_mb": 1e-4}  # one or two parameters to a bucket
TORCH, OURS = nn.parallel.DistributedDataParallel, dpfuse.DistributedDataParallel
MIXED = "has sent the buckets of its wrapped models in another order"


class Parts(nn.Module):
    """A chain of layers of which each call says which are used; gradients become ready in the order of `names`."""

    def __init__(self, reentrant="", bias=True):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=bias) for name in "abc"})
        self.reentrant = reentrant

    def forward(self, x, used="abc"):
        x = x * 1
        for name in reversed(used):
            layer = self.layers[name]
            x = checkpoint(layer, x, use_reentrant=True) if name in self.reentrant else layer(x)
        return x


class Summed(torch.autograd.Function):
    """As SyncBatchNorm does: backward sums its gradient over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Normalized(Parts):
    """The program's own collective comes between the layers."""

    def forward(self, x, used="abc"):
        for name in reversed(used):
            x = Summed.apply(self.layers[name](x))
        return x


def batch(rank, step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def grads_of(*models):
    return {
        f"{number}.{name}": None if param.grad is None else param.grad.clone()
        for number, model in enumerate(models)
        for name, param in model.module.named_parameters()
    }


def made(face, *modules, **options):
    torch.manual_seed(0)
    return [face(module(), **{**SMALL, **options}) for module in modules]


def both(modules, step, steps=5, ours=None, **options):
    """Run the same steps with dpfuse and with torch's class, and compare all gradients."""
    found = []
    for face, given in ((OURS, ours if ours is not None else options), (TORCH, options)):
        models, seen = made(face, *modules, **given), []
        for number in range(steps):
            for model in models:
                model.zero_grad()
            step(models, number)
            seen.append(grads_of(*models))
        found.append(seen)
    for number, (got, expected) in enumerate(zip(*found, strict=True)):
        for name, grad in expected.items():
            where = f"{name} in step {number}"
            if grad is None or got[name] is None:  # where no rank uses it, torch leaves zeros or None
                assert not any(value is not None and value.any() for value in (grad, got[name])), where
            else:
                torch.testing.assert_close(got[name], grad, msg=lambda text, where=where: f"{where}: {text}")


def varied(rank, step, missing):
    """All layers at first; then all ranks but the first one leave out `missing`, in turn where there are several."""
    drop = missing[step % len(missing)] if step >= 2 and rank > 0 else ""
    return "".join(name for name in "abc" if name not in drop)


CASES = {"first": ["a"], "middle": ["b"], "last": ["c"], "two": ["ab"], "changing": ["a", "", "c", "bc"]}
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("middle", "last", "two")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("outer", [True, False], ids=["outer", "inner"])
@pytest.mark.parametrize("case", ["first", *SLOW, "changing"])
@pytest.mark.parametrize("flag", [True, False], ids=["flag", "no flag"])
def test_two_models_of_which_ranks_use_other_parameters_get_the_gradients_of_torch(rank, size, case, outer, flag):
    def step(models, number):
        a, b = models
        used = varied(rank, number, CASES[case])
        loss = a(b(batch(rank, number)), used) if outer else a(b(batch(rank, number), used))
        loss.square().sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both([Parts, Parts], step, ours={"find_unused_parameters": flag}, find_unused_parameters=True)


@pytest.mark.ranks(size=3, timeout=120)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_three_ranks(rank, size, views):
    def step(models, number):
        a, b = models
        used = "abc" if number < 2 else ["abc", "bc", "ca"][(rank + number) % 3]
        a(b(batch(rank, number), used), used[::-1]).square().sum().backward()

    both([Parts, Parts], step, find_unused_parameters=True, gradient_as_bucket_view=views)


@pytest.mark.parametrize("outer", [True, False], ids=["outer", "inner"])
def test_a_model_none_of_whose_parameters_a_rank_uses(rank, size, outer):
    a, b = made(OURS, Parts, Parts, find_unused_parameters=True)
    for number in range(5):
        for model in (a, b):
            model.zero_grad()
        used = ["abc", "" if rank and number >= 2 else "abc"]
        inputs = [batch(other, number).requires_grad_() for other in range(size)]
        a(b(inputs[rank], used[outer]), used[not outer]).square().sum().backward()
        alone = [copy.deepcopy(model.module) for model in (a, b)]
        for module in alone:
            module.zero_grad()
        for other in range(size):
            used = ["abc", "" if other and number >= 2 else "abc"]
            (alone[0](alone[1](inputs[other].detach(), used[outer]), used[not outer]).square().sum() / size).backward()
        for model, module in zip((a, b), alone, strict=True):
            for got, expected in zip(model.module.parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(got.grad, expected.grad)


def test_models_side_by_side_in_a_loss(rank, size):
    def step(models, number):
        used = varied(rank, number, ["a", "b", "c", "ab"])
        sum(model(batch(rank, number), used).square().sum() for model in models).backward()

    both([Parts, Parts, Parts], step, steps=7, find_unused_parameters=True)


@pytest.mark.parametrize("missing", [["a"], ["b"], ["c"], ["b", "c", "ca"]], ids=str)
def test_collectives_of_the_program_in_the_same_backward(rank, size, missing):
    """Layers are dropped by each rank for itself, at the end of the chain, so that collectives stay as many."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.trunk = Parts(), Normalized()

        def forward(self, x, used):
            return self.heads(self.trunk(x), used)

    def step(models, number):
        models[0](batch(rank, number), varied(rank, number, missing)).square().sum().backward()

    both([Heads], step, steps=6, find_unused_parameters=True)
    both([Heads], step, steps=6, find_unused_parameters=True, bucket_cap_mb=4e-4)


def test_heads_that_each_rank_chooses_above_a_synchronised_batch_norm(rank, size):
    """Without the flag: a SyncBatchNorm tells that collectives are in the backward. Torch has none for CPUs."""

    class Heads(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Linear(WIDTH, WIDTH), norm(WIDTH))

        def forward(self, x, head):
            return self.heads[head](self.trunk(x))

    torch.manual_seed(0)
    alone = Heads(nn.BatchNorm1d)
    module = Heads(SyncBatchNorm)
    module.load_state_dict(alone.state_dict())
    model = OURS(module, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(6):
            heads = [(number + other * (number > 1)) % 4 for other in range(size)]
            model.zero_grad()
            alone.zero_grad()
            model(batch(rank, number), heads[rank]).square().sum().backward()
            features = alone.trunk(torch.cat([batch(other, number) for other in range(size)])).chunk(size)
            losses = [alone.heads[heads[other]](features[other]).square().sum() for other in range(size)]
            (sum(losses) / size).backward()
            for (name, got), expected in zip(module.named_parameters(), alone.parameters(), strict=True):
                if got.grad is not None and expected.grad is not None:
                    torch.testing.assert_close(got.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")
                else:
                    assert got.grad is expected.grad is None or not (got.grad if expected.grad is None else 1).any()


@pytest.mark.parametrize("flag", [True, False], ids=["flag", "no flag"])
def test_windows_and_frozen_layers(rank, size, flag):
    """Backwards inside no_sync() use other layers than the last one, and a layer is frozen for some steps."""

    def step(models, number):
        a, b = models
        for model in models:
            model.module.layers["b"].requires_grad_(number not in (3, 4))
        with a.no_sync(), b.no_sync():
            a(b(batch(rank, number)), "ac" if rank else "abc").square().sum().backward()
        a(b(batch(rank, number + 50)), varied(rank, number, ["c", "a"])).square().sum().backward()

    def run(**options):
        models = made(OURS, Parts, Parts, find_unused_parameters=flag, **options)
        seen = []
        for number in range(7):
            for model in models:
                model.zero_grad()
            step(models, number)
            seen.append(grads_of(*models))
        return seen

    def alone():
        torch.manual_seed(0)
        models = [Parts(), Parts()]
        for number in range(7):
            for module in models:
                module.zero_grad()
                module.layers["b"].requires_grad_(number not in (3, 4))
            a, b = models
            for other in range(size):
                loss = a(b(batch(other, number)), "ac" if other else "abc").square().sum()
                loss += a(b(batch(other, number + 50)), varied(other, number, ["c", "a"])).square().sum()
                (loss / size).backward()
            yield [param.grad for module in models for param in module.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for options in ({}, {"gradient_as_bucket_view": True}, {"accumulate_in_buckets": True}):
            for got, expected in zip(run(**options), alone(), strict=True):
                for (name, grad), other in zip(got.items(), expected, strict=True):
                    assert (grad is None) == (other is None), name
                    if grad is not None:
                        torch.testing.assert_close(grad, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("count", [1, 2])
def test_a_reentrant_checkpoint_hides_its_parameters_from_the_graph(rank, size, count):
    """Torch's class refuses them together with the flag, so the same layers without checkpoints are the oracle."""
    torch.manual_seed(0)
    models = [OURS(Parts(reentrant="abc"), find_unused_parameters=True, **SMALL) for _ in range(count)]
    alone = [copy.deepcopy(model.module) for model in models]
    for number in range(5):
        for module in (*models, *alone):
            module.zero_grad()
        x = batch(rank, number).requires_grad_()
        for model in models:
            x = model(x, "abc" if number < 3 or rank == 0 or count > 1 else "ac")
        x.square().sum().backward()
        for other in range(size):
            x = batch(other, number)
            for module in alone:
                module.reentrant = ""
                x = module(x, "abc" if number < 3 or other == 0 or count > 1 else "ac")
            (x.square().sum() / size).backward()
        for model, module in zip(models, alone, strict=True):
            for got, expected in zip(model.module.parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(got.grad, expected.grad)


def test_a_reentrant_checkpoint_on_one_rank_counts_on_all(rank, size):
    models = made(OURS, lambda: Parts(reentrant="b" * rank), Parts, find_unused_parameters=True)
    models[1](models[0](batch(rank, 0).requires_grad_())).sum().backward()
    assert [model.reducer.in_use.hidden for model in models] == [True, False]


def test_a_reentrant_checkpoint_that_comes_later_is_a_named_error_once(rank, size):
    (model,) = made(OURS, Parts, find_unused_parameters=True)
    for number in range(2):
        model(batch(rank, number)).sum().backward()
    model.module.reentrant = "b"
    with pytest.raises(dpfuse.DPFuseError, match="became ready after its bucket was sent"):
        model(batch(rank, 3).requires_grad_()).square().sum().backward()
    model.zero_grad()
    alone = copy.deepcopy(model.module)
    model(batch(rank, 4).requires_grad_()).square().sum().backward()
    for other in range(size):
        (alone(batch(other, 4).requires_grad_()).square().sum() / size).backward()
    for got, expected in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def test_a_gradient_that_the_program_writes_itself_is_not_lost(rank, size):
    """Its bucket has left when the program writes it, unless that is the last one."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            param.grad = torch.ones_like(param)
            return grad

    (model,) = made(OURS, Parts, find_unused_parameters=True)
    for number in range(2):
        model(batch(rank, number)).sum().backward()
    model.zero_grad()
    param = model.module.layers["a"].weight
    model.module.layers["c"].register_forward_hook(lambda layer, inputs, output: Writes.apply(output))
    with pytest.raises(dpfuse.DPFuseError, match=r"'layers\.a\.weight' became ready after its bucket was sent"):
        model(batch(rank, 3), "bc").square().sum().backward()


def swapped(rank, a, b, x):
    """The two models run in another order on rank 1, and `a` runs at the end, so that it is the first to be reached."""
    y = b(a(x)) if rank else a(b(x))
    return a(y).sum()


def test_another_order_of_buckets_is_a_named_error_of_every_rank_and_model(rank, size):
    a, b = made(OURS, Parts, Parts)
    for number in range(3):
        a(b(batch(rank, number))).sum().backward()
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    optimizer.zero_grad()
    with pytest.raises(dpfuse.DPFuseError, match=MIXED) as error:
        swapped(rank, a, b, batch(rank, 3)).backward()
    assert "rank 0" in str(error.value)
    assert "rank 1" in str(error.value)
    assert "find_unused_parameters=True" in str(error.value)
    optimizer.zero_grad()
    for number in range(4, 6):  # nothing of it is left
        a(b(batch(rank, number))).sum().backward()
    same_on_all(a, b)


def test_the_guard_sees_buckets_that_wait_on_one_rank(rank, size):
    """Without the rule that the other tests are about."""
    a, b = made(OURS, *[lambda: Parts(bias=False)] * 2, find_unused_parameters=True)
    for number in range(2):
        a(b(batch(rank, number))).sum().backward()
    with pytest.MonkeyPatch.context() as patch:  # a fixture would not be undone in the ranks
        patch.setattr(Reducer, "_send_due", lambda self, ended: None)
        patch.setattr(Reducer, "_leave_out", lambda self: None)
        with pytest.raises(dpfuse.DPFuseError, match=MIXED):
            a(b(batch(rank, 2)), "ac" if rank else "abc").sum().backward()


def same_on_all(*models):
    for model in models:
        for name, param in model.module.named_parameters():
            rows = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, param.grad.contiguous())
            assert all(torch.equal(rows[0], row) for row in rows), name


def blow_once(blows):
    def blow(grad):
        if blows.pop():
            raise KeyError("planted")

    return blow


def test_the_guard_says_nothing_of_right_programs(rank, size):
    a, b = made(OURS, Parts, Parts, find_unused_parameters=True)

    def together(number, models=(a, b)):
        for model in models:
            model.zero_grad()
        models[0](models[1](batch(rank, number))).sum().backward()
        same_on_all(*models)

    def in_turn(number):
        for model in (a, b, a):
            model.zero_grad()
            model(batch(rank, number)).sum().backward()
            same_on_all(model)

    together(0)
    in_turn(1)
    together(2)
    # A copy is made at another time on each rank, and an old model lives on longer on one of them.
    clone = copy.deepcopy(a) if rank else None
    in_turn(3)
    clone = clone or copy.deepcopy(a)
    together(4, (clone, b))
    in_turn(5)
    del clone
    if rank:
        gc.collect()
    together(6)
    # Backwards die on all ranks, at another place on each.
    for model in (b, a):
        model.zero_grad()
        y = a(b(batch(rank, 7)))
        handle = model.module.layers["b" if rank else "a"].weight.register_hook(blow_once([True]))
        with pytest.raises(KeyError, match="planted"):
            y.sum().backward()
        handle.remove()
        for other in (a, b):
            other.zero_grad()
        together(8)
    in_turn(9)
    # One rank looks at a gradient that is added to no parameter. The others open no backward then.
    if rank:
        x = batch(rank, 9).requires_grad_()
        torch.autograd.grad(a(b(x)).sum(), x)
    in_turn(10)
    together(10)
    # The models change, everywhere.
    for model in (a, b):
        model.module.layers["d"] = nn.Linear(WIDTH, WIDTH)
        nn.init.ones_(model.module.layers["d"].weight)
        nn.init.ones_(model.module.layers["d"].bias)
    for number in range(11, 14):
        for model in (a, b):
            model.zero_grad()
        a(b(batch(rank, number), "abcd"), "bd" if rank else "abcd").sum().backward()
        same_on_all(a, b)


def test_the_guard_says_nothing_after_a_backward_that_reached_one_model_more_on_a_rank(rank, size):
    a, b, c = made(OURS, *[lambda: Parts(bias=False)] * 3)  # so nothing of b is sent
    for number in range(2):
        a(b(c(batch(rank, number)))).sum().backward()
    dies_in = (b if rank else a).module.layers["a"].weight
    handle = dies_in.register_hook(blow_once([True]))
    y = a(b(batch(rank, 2)))
    with pytest.raises(KeyError, match="planted"):
        y.sum().backward()
    handle.remove()
    for number in range(3, 6):
        for model in (a, c):
            model.zero_grad()
            model(batch(rank, number)).sum().backward()
            same_on_all(model)


def test_the_guard_says_nothing_where_ranks_join_early(rank, size):
    a, b = made(OURS, Parts, Parts)
    for _epoch in range(2):
        with Join([a, b]):
            for number in range(3 + rank):
                for model in (a, b):
                    model.zero_grad()
                    model(batch(rank, number)).sum().backward()
    for model in (a, b):
        model.zero_grad()
        model(batch(rank, 20)).sum().backward()
    same_on_all(a, b)


def test_a_generator_may_run_through_a_frozen_discriminator_inside_no_sync(rank, size):
    """A discriminator that is frozen sends zeros, unless its forward says that its backward is local."""
    generator, critic = made(OURS, Parts, Parts)
    for number in range(4):
        for model in (generator, critic):
            model.zero_grad()
        critic(batch(rank, number)).sum().backward()
        critic.requires_grad_(False)
        with dpfuse.time_communication(critic) as times:
            with critic.no_sync():
                y = critic(generator(batch(rank, number + 50)))
            y.sum().backward()
        assert (times.steps, times.nbytes) == (0, 0)
        critic.requires_grad_(True)
        same_on_all(generator, critic)
