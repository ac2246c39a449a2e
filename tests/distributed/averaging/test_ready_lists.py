"""Which gradients are ready: parameters that fire twice, late or never, are frozen, or reached past the wrapper.

Only what a user sees: gradients, errors, warnings, and how many buckets leave while backward runs.
"""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import dpfuse
from dpfuse import DPFuseError
from tests.operations import Operations

WIDTH = 40
LAYERS = 6
ONE_LAYER = 0.004  # MB; each layer fills a bucket
VIEWS = pytest.mark.parametrize("views", [True, False], ids=["views", "private"])


class Chain(nn.Module):
    """Layers one behind the other, in an order that can be told, of which some may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.order = range(LAYERS)
        self.biases = True  # whether the last layer's bias is used
        self.reached_first = lambda: None

    def forward(self, x):
        for place, index in enumerate(self.order):
            layer = self.layers[index]
            bias = layer.bias if self.biases or index != LAYERS - 1 else None
            x = torch.tanh(nn.functional.linear(x, layer.weight, bias))
            if place == 0 and x.requires_grad:
                x.register_hook(lambda _: self.reached_first())
        return x


def wrap(net=None, **options):
    sizes = {"comm_buffer_size": ONE_LAYER, "last_comm_buffer_size": 0.0001}
    return dpfuse.DataParallel(Chain() if net is None else net, **{**sizes, **options})


def batch(rank, step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def local_gradients(model, *batches):
    bare = copy.deepcopy(model.module)
    bare.zero_grad()
    for x in batches:
        bare(x).square().sum().backward()
    return [param.grad for param in bare.parameters()]


def mean(gradients):
    means = [None if gradient is None else gradient / dist.get_world_size() for gradient in gradients]
    for value in means:
        if value is not None:
            dist.all_reduce(value)
    return means


def gradients(model):
    return [param.grad for param in model.module.parameters()]


def assert_mean(model, *batches):
    for got, expected in zip(gradients(model), mean(local_gradients(model, *batches)), strict=True):
        if expected is None:
            assert got is None
        else:
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def step(model, rank, number):
    model.zero_grad()
    model(batch(rank, number)).square().sum().backward()


def sent_early(model, rank, number):
    """How many buckets have left in a step before backward comes to the layer that is last, and in all."""
    early = []
    with Operations() as done:
        model.module.reached_first = lambda: early.append(len(done.collectives))
        step(model, rank, number)
        model.module.reached_first = lambda: None
    assert len(early) == 1
    return early[0], len(done.collectives)


# A parameter that fires twice.

SIZES = pytest.mark.parametrize(
    "sizes",
    [
        {"comm_buffer_size": 0, "last_comm_buffer_size": 0},
        {"comm_buffer_size": 25, "last_comm_buffer_size": 25},
        {"comm_buffer_size": 25, "last_comm_buffer_size": 0},  # all but `first` in a bucket that is sent before
    ],
    ids=["a bucket each", "one bucket", "two buckets"],
)


class Twice(nn.Module):
    """`a` may run twice under a reentrant checkpoint, which gives it two ready marks; `b` may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)
        self.c = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.times, self.uses_b = 1, True

    def forward(self, x):
        x = self.first(x)
        if self.uses_b:
            x = self.b(x)
        for _ in range(self.times):
            x = checkpoint(self.a, x, use_reentrant=True)
        return self.c(x)


def hides_nothing(rank, size, views, sizes):
    """`a` fires twice where it fired once at first, and no rank uses `b`, which may lie in the same bucket."""
    model = wrap(Twice(), **sizes, find_unused_parameters=True, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    for number in range(2):
        model.zero_grad()
        model(batch(rank, number).requires_grad_()).square().sum().backward()
    model.zero_grad()
    before = model.module.b.weight.detach().clone()
    model.module.times, model.module.uses_b = 2, False
    x = batch(rank, 3).requires_grad_()
    error = ""
    try:
        model(x).square().sum().backward()
        assert_mean(model, x.detach().requires_grad_())
    except DPFuseError as raised:  # more often than at first may be an error, on all ranks
        error = str(raised)
        assert "'a.weight'" in error
        for layer in (model.module.a, model.module.c, model.module.first):
            layer.weight.grad = None
    assert model.module.b.weight.grad is None
    optimizer.step()
    assert torch.equal(model.module.b.weight, before)
    return bool(error)


@pytest.mark.one_in(2)
@VIEWS
@SIZES
def test_a_parameter_that_fires_twice_hides_none_that_no_rank_used(ranks, views, sizes):
    assert len(set(ranks(hides_nothing, views, sizes))) == 1


@pytest.mark.one_in(2)
@VIEWS
@SIZES
def test_a_parameter_that_always_fires_twice_hides_none_that_no_rank_used(rank, size, views, sizes):
    """`a` fires twice in every step, and `b` is used at first and then by no rank."""
    net = Twice()
    net.times = 2
    model = wrap(net, **sizes, find_unused_parameters=True, gradient_as_bucket_view=views)
    for number in range(6):
        net.uses_b = number < 3
        model.zero_grad()
        x = batch(rank, number).requires_grad_()
        model(x).square().sum().backward()
        assert_mean(model, x.detach().requires_grad_())
        assert (net.b.weight.grad is None) == (number >= 3)


def twice_later(rank, size, where, sizes):
    """In step 3 `a` fires twice on some ranks, though once at first: no rank goes on with a part of its gradient."""
    model = wrap(Twice(), **sizes)
    for number in range(3):
        model.zero_grad()
        model(batch(rank, number).requires_grad_()).square().sum().backward()
    model.zero_grad()
    model.module.times = 2 if rank in where else 1
    x = batch(rank, 3).requires_grad_()
    error = ""
    try:
        model(x).square().sum().backward()
        assert_mean(model, x.detach().requires_grad_())
    except DPFuseError as raised:
        error = str(raised)
        assert re.search("'a.weight'" if rank in where else f"rank {where[0]}", error), error
    model.module.times = 1
    model.zero_grad()
    x = batch(rank, 4).requires_grad_()
    model(x).square().sum().backward()
    assert_mean(model, x.detach().requires_grad_())
    return bool(error)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", [(0,), (1,), (0, 1)], ids=str)
@SIZES
def test_firing_more_often_than_at_first_is_right_or_an_error_on_every_rank_in_that_backward(ranks, where, sizes):
    errors = ranks(twice_later, where, sizes)
    assert len(set(errors)) == 1
    if sizes["comm_buffer_size"] == 0:
        assert errors[0], "the bucket was sent before the second mark"


# Parameters that are frozen and unfrozen after wrapping.


def first_bucket(model):
    """The parameters of the bucket that is sent first, with their names."""
    names = dict(model.module.named_parameters())
    return [[*names.items()][index] for index in model.bucket_plan.buckets[0].params]


@VIEWS
def test_freezing_a_parameter_of_the_first_bucket_keeps_buckets_leaving_during_backward(rank, size, views):
    model = wrap(gradient_as_bucket_view=views, find_unused_parameters=True)
    for number in range(3):
        step(model, rank, number)
    plan = model.bucket_plan
    before = sent_early(model, rank, 3)
    assert before[0] >= LAYERS - 3
    name, frozen = first_bucket(model)[0]
    frozen.requires_grad_(False)
    step(model, rank, 4)
    seen = [sent_early(model, rank, number) for number in range(5, 8)]
    assert_mean(model, batch(rank, 7))
    assert frozen.grad is None
    assert model.bucket_plan == plan
    frozen.requires_grad_(True)
    step(model, rank, 8)
    assert_mean(model, batch(rank, 8))
    seen += [sent_early(model, rank, number) for number in range(9, 12)]
    assert_mean(model, batch(rank, 11))
    assert model.bucket_plan == plan
    assert seen == [before] * 6, f"{seen} instead of {before}, with {name} frozen and then unfrozen"


def test_freezing_the_whole_first_bucket_keeps_the_others_leaving_during_backward(rank, size):
    """All parameters of the first bucket: it is still sent, and it keeps no other waiting."""
    model = wrap(find_unused_parameters=True)
    for number in range(3):
        step(model, rank, number)
    before = sent_early(model, rank, 3)
    frozen = [param for _, param in first_bucket(model)]
    for param in frozen:
        param.requires_grad_(False)
    step(model, rank, 4)
    seen = [sent_early(model, rank, number) for number in range(5, 8)]
    assert_mean(model, batch(rank, 7))
    assert all(param.grad is None for param in frozen)
    assert {early for early, _ in seen} == {before[0]}, f"{seen} instead of {before}"


def frozen_quietly(rank, size):
    model = wrap()
    for number in range(3):
        step(model, rank, number)
    first_bucket(model)[0][1].requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3, 20):
            step(model, rank, number)
    return [str(warning.message) for warning in caught]


def test_a_frozen_parameter_is_no_unused_one_and_holds_nothing_up(ranks):
    assert ranks(frozen_quietly) == [[], []]


@pytest.mark.one_in(2)
@VIEWS
@pytest.mark.parametrize("when", [1, 3])
def test_what_is_left_in_the_grad_of_a_frozen_parameter_is_neither_sent_nor_written(rank, size, views, when):
    model = wrap(gradient_as_bucket_view=views, find_unused_parameters=True)
    for number in range(when):
        step(model, rank, number)
    model.zero_grad()
    _, frozen = first_bucket(model)[0]
    frozen.requires_grad_(False)
    own = torch.full_like(frozen, 7.0 + rank)
    for number in range(3):
        frozen.grad = own
        model(batch(rank, 10 + number)).square().sum().backward()
        assert frozen.grad is own
        assert torch.equal(own, torch.full_like(own, 7.0 + rank))
        frozen.grad = None
        assert_mean(model, batch(rank, 10 + number))
        model.zero_grad()
    frozen.requires_grad_(True)
    step(model, rank, 20)
    assert_mean(model, batch(rank, 20))


def test_a_private_gradient_of_the_step_before_survives_freezing(rank, size):
    model = wrap(gradient_as_bucket_view=False, find_unused_parameters=True)
    for number in range(3):
        step(model, rank, number)
    _, frozen = first_bucket(model)[0]
    frozen.requires_grad_(False)
    kept, value = frozen.grad, frozen.grad.clone()
    for param in model.module.parameters():
        if param is not frozen:
            param.grad = None
    model(batch(rank, 3)).square().sum().backward()
    assert frozen.grad is kept
    assert torch.equal(kept, value)


def frozen_on_one(rank, size, where, warm):
    model = wrap(find_unused_parameters=True)
    for number in range(warm):
        step(model, rank, number)
    name, frozen = first_bucket(model)[0]
    if rank == where:
        frozen.requires_grad_(False)
    model.zero_grad()
    with pytest.raises(DPFuseError, match=r"froz|freez|requires_grad") as error:
        model(batch(rank, 5)).square().sum().backward()
    if rank == where:
        frozen.requires_grad_(True)
    step(model, rank, 6)
    assert_mean(model, batch(rank, 6))
    return name, str(error.value)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("warm", [1, 3])
def test_freezing_on_one_rank_only_is_a_named_error_on_every_rank(ranks, where, warm):
    for _, text in ranks(frozen_on_one, where, warm):
        assert re.search(r"\branks? \d", text), text


# A bucket that keeps others waiting.


def holds_others_up(rank, size):
    model = wrap()
    with warnings.catch_warnings(record=True) as early:
        warnings.simplefilter("always")
        for number in range(3):
            step(model, rank, number)
    assert not early
    first = [name for name, _ in first_bucket(model)]
    assert f"layers.{LAYERS - 1}.bias" in first
    model.module.biases = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3, 30):
            step(model, rank, number)
    assert_mean(model, batch(rank, 29))
    return [text for text in (str(one.message) for one in caught) if "got no gradient in this backward" not in text]


def test_a_bucket_that_holds_others_up_is_named_once_with_the_remedy(ranks):
    for texts in ranks(holds_others_up):
        assert len(texts) == 1, texts
        assert f"layers.{LAYERS - 1}.bias" in texts[0]
        assert re.search("requires_grad_|[Ff]reeze|[Ww]rap", texts[0])


def test_a_bucket_that_is_late_once_or_twice_is_not_worth_a_warning(ranks):
    assert ranks(late_now_and_then) == [[], []]


def late_now_and_then(rank, size):
    model = wrap(find_unused_parameters=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(12):
            model.module.biases = number % 6 != 4
            step(model, rank, number)
            assert_mean(model, batch(rank, number))
    return [str(one.message) for one in caught]


# Backwards that no output of the wrapper announces.


def reaching_a_part(rank, size, part, follow, views):
    """`part` of the parameters, without the wrapper's forward; `follow` is what the program does then.

    Another backward of this kind may run no code of the library: a hook in C is all that it reaches.
    """
    model = wrap(gradient_as_bucket_view=views, find_unused_parameters=True)
    params = {name: param for name, param in model.module.named_parameters() if re.fullmatch(part, name)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    errors = []
    for number in range(3):
        step(model, rank, number)
    for again in range(2):
        model.zero_grad()
        try:
            ((1.0 + rank + again) * sum(param.sum() for param in params.values())).backward()
            if not all(bool((param.grad == (size + 1) / 2 + again).all()) for param in params.values()):
                {
                    "forward": lambda: model(batch(rank, 5)),
                    "optimizer": optimizer.step,
                }[follow]()
                pytest.fail("gradients are this rank's own, and nothing has said so")
        except DPFuseError as raised:
            errors.append(str(raised))
            assert any(name in errors[-1] for name in params), errors[-1]
        for number in range(10, 12):
            step(model, rank, number)
            assert_mean(model, batch(rank, number))
    return len(errors)


@pytest.mark.one_in(2)
@VIEWS
@pytest.mark.parametrize("follow", ["forward", "optimizer"])
@pytest.mark.parametrize("part", [r"layers\.0\.weight", r"layers\.0\.bias", r"layers\.[35]\..*", r"layers\.5\.weight"])
def test_a_backward_without_the_wrappers_forward_that_reaches_a_part_is_averaged_or_named(ranks, part, follow, views):
    assert len(set(ranks(reaching_a_part, part, follow, views))) == 1


@pytest.mark.parametrize("part", [r"layers\.0\.weight", r"layers\.[35]\..*", r"layers\.5\.bias"])
def test_a_backward_inside_no_sync_that_reaches_a_part_is_local(rank, size, part):
    model = wrap(find_unused_parameters=True)
    params = dict(model.module.named_parameters())
    names = [name for name in params if re.fullmatch(part, name)]
    for number in range(3):
        step(model, rank, number)
    model.zero_grad()
    with model.no_sync():
        (sum(params[name].sum() for name in names) * (1.0 + rank)).backward()
    for name, param in params.items():
        assert torch.equal(param.grad, torch.full_like(param, 1.0 + rank)) if name in names else param.grad is None
    model(batch(rank, 3)).square().sum().backward()
    expected = mean(local_gradients(model, batch(rank, 3)))
    for (name, param), value in zip(params.items(), expected, strict=True):
        torch.testing.assert_close(param.grad, value + (1.5 if name in names else 0.0), rtol=1e-6, atol=1e-6)


@VIEWS
def test_backwards_that_no_forward_announces_are_averaged_outside_of_no_sync_and_local_inside(rank, size, views):
    """Backwards of `model.module`'s own outputs, outside and inside no_sync(), and a second backward of one graph."""
    model = wrap(gradient_as_bucket_view=views)
    for number in range(4):
        model.zero_grad()
        model.module(batch(rank, number)).square().sum().backward()
        assert_mean(model, batch(rank, number))
        model.zero_grad()
        with model.no_sync():
            model.module(batch(rank, number)).square().sum().backward()
        for got, local in zip(gradients(model), local_gradients(model, batch(rank, number)), strict=True):
            assert torch.equal(got, local)
        model.module(batch(rank, number + 1)).square().sum().backward()
        assert_mean(model, batch(rank, number), batch(rank, number + 1))
        model.zero_grad()
        loss = model(batch(rank, number)).square().sum()
        loss.backward(retain_graph=True)
        assert_mean(model, batch(rank, number))
        loss.backward()
        assert_mean(model, batch(rank, number), batch(rank, number))
        loss = model(batch(rank, number)).square().sum()
        model.zero_grad()
        loss.backward(retain_graph=True)
        with model.no_sync():
            loss.backward()
        own, means = local_gradients(model, batch(rank, number)), mean(local_gradients(model, batch(rank, number)))
        for got, local, averaged in zip(gradients(model), own, means, strict=True):
            torch.testing.assert_close(got, averaged + local, rtol=1e-6, atol=1e-6)
        step(model, rank, number)  # what was added alone was zeroed


# An order that changes.


@pytest.mark.one_in(2)
@VIEWS
@pytest.mark.parametrize("alike", [True, False], ids=["the same everywhere", "another on each rank"])
def test_gradients_are_those_of_ddp_whatever_the_order_of_each_step(rank, size, views, alike):
    """Every step runs the layers in another order, the same or another one on each rank; DDP does the same."""
    ours, theirs = wrap(gradient_as_bucket_view=views), TorchDDP(Chain(), bucket_cap_mb=ONE_LAYER)
    for number in range(12):
        generator = torch.Generator().manual_seed(number if alike else 100 * rank + number)
        order = torch.randperm(LAYERS, generator=generator).tolist()
        for model in (ours, theirs):
            model.module.order = order
            step(model, rank, number)
        for got, expected in zip(gradients(ours), gradients(theirs), strict=True):
            assert torch.equal(got, expected)


def test_what_a_window_accumulated_before_a_parameter_was_frozen_is_averaged(rank, size):
    for views in (True, False):
        model = dpfuse.DataParallel(nn.Linear(2, 1), gradient_as_bucket_view=views)
        for _ in range(2):  # also with the buckets that the first backward has made anew
            model.requires_grad_(True)
            with model.no_sync():
                model(torch.full((1, 2), rank + 1.0)).sum().backward()
            model.module.weight.requires_grad_(False)
            model(torch.ones(1, 2)).sum().backward()
            assert model.module.weight.grad.tolist() == [[1.5, 1.5]], "it has accumulated 1 and 2"
            assert model.module.bias.grad.tolist() == [2.0]
            model.zero_grad()


LARGE_ROWS = 600_000  # of float32, 2.4 MB: such a gradient is reduced in its own memory


@pytest.mark.parametrize("kind", ["large", "sparse", "hooked"])
def test_so_is_what_travels_outside_the_buffer(rank, size, kind):
    """The weight of `kind` travels outside the buffer; it is frozen inside a window, and the bias is not."""
    weight = nn.Linear(1, LARGE_ROWS) if kind == "large" else nn.Embedding(4, 2, sparse=True)
    batch = torch.ones(1, 1) if kind == "large" else torch.tensor([0, 2])
    last = nn.Linear(LARGE_ROWS if kind == "large" else 2, 1)
    model = dpfuse.DistributedDataParallel(nn.Sequential(weight, last))
    if kind == "hooked":
        model.register_comm_hook(None, allreduce_hook)
    for _ in range(2):
        model.requires_grad_(True)
        with model.no_sync():
            (model(batch).sum() * (rank + 1)).backward()
        own = weight.weight.grad.clone()
        weight.weight.requires_grad_(False)
        model(batch).sum().backward()
        mean = weight.weight.grad
        assert mean.is_sparse == (kind != "large")
        assert torch.allclose(mean.to_dense(), own.to_dense() * (1.5 / (rank + 1)))
        left = mean.clone()
        model(batch).sum().backward()
        assert torch.equal(weight.weight.grad.to_dense(), left.to_dense()), "it was averaged before"
        model.zero_grad()


@pytest.mark.parametrize("large", [False, True], ids=["in the buffer", "in place"])
def test_a_rank_that_accumulated_nothing_gets_the_same_mean(rank, size, large):
    """Rank 0 alone uses a layer inside a window, in which it is frozen on both ranks."""
    layer = nn.Linear(1, LARGE_ROWS if large else 3)
    model = dpfuse.DataParallel(nn.ModuleList([layer, nn.Linear(1, 1)]), gradient_as_bucket_view=False)
    model.module.forward = lambda x, use: model.module[1](x).sum() + (layer(x).sum() if use else 0)
    for _ in range(2):
        model.requires_grad_(True)
        with model.no_sync():
            model(torch.ones(1, 1), use=rank == 0).backward()
        layer.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a frozen parameter is not one that a user forgot
            model(torch.ones(1, 1), use=False).backward()
        assert layer.weight.grad is not None
        assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 0.5))
        model.zero_grad()
        layer.weight.grad = layer.bias.grad = None
        with model.no_sync():
            model(torch.ones(1, 1), use=False).backward()
        model(torch.ones(1, 1), use=False).backward()
        assert layer.weight.grad is None, "it was frozen before this window"
        model.zero_grad()


def test_a_parameter_without_any_gradient_that_is_frozen_stays_without(rank, size):
    """A layer is frozen inside a window in which no rank has used it."""
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    first, second = model.module
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        model.zero_grad()
    with model.no_sync():
        first(torch.ones(2, 3)).sum().backward()
    second.requires_grad_(False)
    model(torch.ones(2, 3)).sum().backward()
    assert second.weight.grad is None
    assert second.bias.grad is None


@pytest.mark.one_in(2)
@VIEWS
def test_a_penalty_with_a_backward_of_its_own_is_averaged_as_its_error_says(rank, size, views):
    """After the backward of the loss it is averaged or named; in the loss, and before it in no_sync(), averaged."""
    model = wrap(gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(3):
        step(model, rank, number)
    named = []
    for number, param in enumerate(model.parameters()):
        expected = mean(local_gradients(model, batch(rank, number)))
        model.zero_grad()
        model(batch(rank, number)).square().sum().backward()
        param.abs().sum().backward()
        try:
            optimizer.step()
        except DPFuseError as error:
            named.append(str(error))
        else:
            assert_close_but_for(model, expected, param)
        for inside in (False, True):
            model.zero_grad()
            penalty = param.abs().sum()
            if inside:
                with model.no_sync():
                    penalty.backward()
            loss = model(batch(rank, number)).square().sum()
            (loss if inside else loss + penalty).backward()
            optimizer.step()
            assert_close_but_for(model, expected, param)
    assert named
    assert all(
        "Add a penalty on parameters to the loss, or run its backward first, inside no_sync()" in e for e in named
    )


def assert_close_but_for(model, expected, penalized):
    """The gradients are these, but for the sign that a penalty on one parameter adds."""
    for param, value in zip(model.parameters(), expected, strict=True):
        value = value + param.detach().sign() if param is penalized else value
        torch.testing.assert_close(param.grad, value, rtol=1e-6, atol=1e-6)
