"""Loops that would take gradient_merge apart are right, or an error that says what to do; never silently wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.paddle.distributed import fleet
from tests.paddle.test_fleet import batch, net, sgd
from tests.paddle.test_fleet_gradient_merge import loss_of, merging, weights_of

SCALES = ["avg", "sum"]


def pair(k_steps=2, scale="avg", module=None):
    fleet.init(is_collective=True, strategy=merging(k_steps, gradient_scale_configs={"scale_strategy": scale}))
    model = fleet.distributed_model(net() if module is None else module)
    return model, fleet.distributed_optimizer(sgd(model.parameters(), lr=0.125))


def train(model, optimizers, rank, iterations):
    for iteration in iterations:
        loss_of(model, rank, iteration).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.clear_grad()


def message_of(function, *args):
    try:
        function(*args)
    except dpfuse.DPFuseError as error:
        return str(error)
    return "nothing was raised"


def plain(rank, size, scale):
    model, optimizer = pair(scale=scale)
    train(model, [optimizer], rank, range(4))
    return weights_of(model)


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def clipped_in_the_step(rank, size, k_steps):
    model, optimizer = pair(k_steps)
    assert "register_step_pre_hook" in message_of(model.clip_grad_norm_, 1.0)

    def clip(optimizer, args, kwargs):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    optimizer.register_step_pre_hook(clip)
    before = weights_of(model)
    train(model, [optimizer], rank, range(k_steps))
    change = [(new - old) / 0.125 for new, old in zip(weights_of(model), before, strict=True)]
    return torch.nn.utils.get_total_norm(change).item()


@pytest.mark.parametrize("k_steps", [2, 4])
def test_clipping_acts_on_the_merged_mean(ranks, k_steps):
    assert ranks(clipped_in_the_step, k_steps) == pytest.approx([0.01, 0.01], rel=1e-3)


# --- several optimizers over one model


def halves(model):
    return [fleet.distributed_optimizer(sgd(model.module[i].parameters(), lr=0.125)) for i in (0, 2)]


def two_optimizers(rank, size, scale):
    fleet.init(is_collective=True, strategy=merging(2, gradient_scale_configs={"scale_strategy": scale}))
    model = fleet.distributed_model(net())
    train(model, halves(model), rank, range(4))
    return weights_of(model)


@pytest.mark.parametrize("scale", SCALES)
def test_two_optimizers_that_step_together_are_as_one(ranks, scale):
    for got, expected in zip(ranks(two_optimizers, scale), ranks(plain, scale), strict=True):
        assert equal(got, expected)


def out_of_step(rank, size, how):
    model, optimizer = pair()
    del optimizer
    optimizers = halves(model)
    train(model, optimizers[:1], rank, [0])
    with torch.no_grad():
        model(batch(rank))
    return message_of(train, model, optimizers[1:] if how == "in turn" else optimizers, rank, [1]), weights_of(model)


@pytest.mark.parametrize("how", ["in turn", "one starts late"])
def test_optimizers_that_do_not_step_together_are_an_error(ranks, how):
    start = weights_of(net())
    for text, weights in ranks(out_of_step, how):
        assert "SGD after 0 of 2 iterations; SGD after 1 of 2 iterations" in text
        assert "step each before the next forward" in text
        assert equal(weights, start)


def mended(rank, size):
    model, optimizer = pair()
    optimizers = [optimizer, fleet.distributed_optimizer(sgd(model.module[2].parameters(), lr=0.0))]
    train(model, optimizers[:1], rank, [7])
    first = message_of(loss_of, model, rank, 0)
    for each in optimizers:
        each.restart()
    train(model, optimizers, rank, [0, 1])
    train(model, optimizers[1:], rank, [7])
    second = message_of(loss_of, model, rank, 0)
    del optimizers, each
    optimizer.restart()
    train(model, [optimizer], rank, [2, 3])
    return first, second, weights_of(model)


def test_restarting_or_deleting_optimizers_makes_them_agree_again(ranks):
    for (first, second, weights), expected in zip(ranks(mended), ranks(plain, "avg"), strict=True):
        assert "different iterations" in first
        assert "different iterations" in second
        assert equal(weights, expected)


def without_merging(rank, size):
    """An optimizer of a later strategy steps in every iteration, so the model must communicate in every one."""
    model, old = pair()
    fleet.init(is_collective=True)
    new = fleet.distributed_optimizer(sgd(model.parameters(), lr=0.125))
    text = message_of(loss_of, model, rank, 0)
    del old
    train(model, [new], rank, range(2))
    return text, weights_of(model)


def test_optimizers_of_two_strategies_over_one_model_are_an_error(ranks):
    reference = net()
    for iteration in range(2):
        for rank in range(2):
            (loss_of(reference, rank, iteration) / 2).backward()
        optimizer = sgd(reference.parameters(), lr=0.125)
        optimizer.step()
        optimizer.zero_grad()
    for text, weights in ranks(without_merging):
        assert "SGD after 0 of 1 iterations; SGD after 0 of 2 iterations" in text
        torch.testing.assert_close(weights, weights_of(reference))


# --- steps past the wrapper


def past_the_wrapper(rank, size, what):
    model, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = {
        "inner": optimizer.inner_opt.step,
        "scaler on inner": lambda: scaler.step(optimizer.inner_opt),
        "scaler": lambda: scaler.step(optimizer),
        "closure": lambda: optimizer.step(lambda: None),
    }[what]
    texts = []
    for iteration in range(2):
        scaler.scale(loss_of(model, rank, 10 + iteration)).backward()
        texts.append(message_of(step))
        if iteration == 0:
            optimizer.step()
            optimizer.clear_grad()
    optimizer.restart()
    train(model, [optimizer], rank, range(4))
    return texts, weights_of(model)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("inner", r"step() of SGD was called, but gradient_merge counts"),
        ("scaler on inner", r"step() of SGD was called, but gradient_merge counts"),
        ("scaler", "gradient_merge got a GradScaler to step with"),
        ("closure", "gradient_merge got a closure to step with"),
    ],
)
def test_steps_that_merging_cannot_take_are_refused_and_leave_no_trace(ranks, what, expected):
    for (texts, weights), reference in zip(ranks(past_the_wrapper, what), ranks(plain, "avg"), strict=True):
        assert all(expected in text for text in texts), texts
        assert equal(weights, reference)


def inner_alone(rank, size):
    _model, optimizer = pair()
    inner = optimizer.inner_opt
    twice = fleet.distributed_optimizer(inner)
    text = message_of(inner.step)
    del optimizer, twice
    inner.step()
    return text


def test_an_optimizer_is_free_again_without_its_wrapper(ranks):
    assert all("gradient_merge counts" in text for text in ranks(inner_alone))


def under_no_sync(rank, size):
    model, _optimizer = pair()

    def body(enabled):
        with model.no_sync(enabled=enabled):
            loss_of(model, rank, 0)

    return [message_of(body, enabled) for enabled in (True, False)]


def test_no_sync_is_refused(ranks):
    for texts in ranks(under_no_sync):
        assert all("gradient_merge decides when this model communicates" in text for text in texts)


# --- forwards that no backward follows


def validated(rank, size, scale, on):
    model, optimizer = pair(scale=scale)
    for iteration in range(4):
        loss_of(model, rank, iteration).backward()
        if rank in on:
            model(batch(rank, 9))  # without no_grad()
        optimizer.step()
        optimizer.clear_grad()
    return weights_of(model)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("on", [(0,), (0, 1)])
def test_a_validation_between_backward_and_step_changes_nothing(ranks, scale, on):
    for got, expected in zip(ranks(validated, scale, on), ranks(plain, scale), strict=True):
        assert equal(got, expected)


def ahead(rank, size, scale):
    """The next iteration's forward runs before this one's step."""
    model, optimizer = pair(scale=scale)
    outputs = model(batch(rank, 0))
    for iteration in range(4):
        outputs.square().mean().backward()
        # Not before the step that changes the weights.
        outputs = model(batch(rank, iteration + 1)) if iteration % 2 == 0 else None
        optimizer.step()
        optimizer.clear_grad()
        outputs = model(batch(rank, iteration + 1)) if outputs is None else outputs
    return weights_of(model)


@pytest.mark.parametrize("scale", SCALES)
def test_a_forward_before_the_step_belongs_to_the_iteration_of_its_backward(ranks, scale):
    for got, expected in zip(ranks(ahead, scale), ranks(plain, scale), strict=True):
        assert equal(got, expected)


class Method(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = net()

    def loss(self, x):
        return self.layers(x).square().mean()


def by_method(rank, size, scale):
    """The wrapper's forward is never called, so nothing is announced."""
    model, optimizer = pair(scale=scale, module=Method())
    for iteration in range(4):
        model.loss(batch(rank, iteration)).backward()
        optimizer.step()
        optimizer.clear_grad()
    return weights_of(model)


@pytest.mark.parametrize("scale", SCALES)
def test_a_loss_of_the_modules_own_method_merges_too(ranks, scale):
    for got, expected in zip(ranks(by_method, scale), ranks(plain, scale), strict=True):
        assert equal(got, expected)


# --- after an exception


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("planted")


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.breaks = net(), False

    def forward(self, x):
        hidden = self.layers[:2](x)
        return self.layers[2](Boom.apply(hidden) if self.breaks else hidden)


def repeated(rank, size, fails_in):
    model, optimizer = pair(module=Fragile())
    train(model, [optimizer], rank, range(2))
    train(model, [optimizer], rank, range(8, 8 + fails_in))
    model.module.breaks = True
    with pytest.raises(KeyError, match="planted"):
        loss_of(model, rank, 9).backward()
    model.module.breaks = False
    left = model.module.layers[2].bias.grad is not None
    optimizer.clear_grad()
    optimizer.restart()
    dropped = all(param.grad is None for param in model.parameters())
    train(model, [optimizer], rank, range(2, 4))
    return left, dropped, weights_of(model)


@pytest.mark.parametrize("fails_in", [0, 1])
def test_a_cycle_is_repeated_after_an_exception(ranks, fails_in):
    for (left, dropped, weights), expected in zip(ranks(repeated, fails_in), ranks(plain, "avg"), strict=True):
        assert (left, dropped) == (True, True)
        assert equal(weights, expected)


# --- copies


def copied(rank, size):
    model, optimizer = pair()
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone(batch(rank))
    text = message_of(loss_of, clone, rank, 0)
    clone_optimizer = fleet.distributed_optimizer(sgd(clone.parameters(), lr=0.125))
    train(clone, [clone_optimizer], rank, range(2))
    train(model, [optimizer], rank, range(4))
    train(clone, [clone_optimizer], rank, range(2, 4))
    return text, weights_of(model), weights_of(clone)


def test_a_copy_has_a_cycle_of_its_own_or_is_refused(ranks):
    for (text, model, clone), expected in zip(ranks(copied), ranks(plain, "avg"), strict=True):
        assert "no optimizer of fleet.distributed_optimizer holds" in text
        assert equal(model, expected)
        assert equal(clone, expected)


# --- with a scheduler


def scheduled(rank, size):
    """A rate per iteration; the step takes that of the last iteration of its cycle."""
    fleet.init(is_collective=True, strategy=merging(2))
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(sgd(model.parameters(), lr=0.5))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for iteration in range(4):
        train(model, [optimizer], rank, [iteration])
        scheduler.step()
    return weights_of(model), optimizer.get_lr()


def test_a_scheduler_steps_in_every_iteration(ranks):
    reference = net()
    for cycle, rate in enumerate([0.25, 0.0625]):
        for iteration in (2 * cycle, 2 * cycle + 1):
            for rank in range(2):
                (loss_of(reference, rank, iteration) / 4).backward()
        optimizer = sgd(reference.parameters(), lr=rate)
        optimizer.step()
        optimizer.zero_grad()
    for weights, rate in ranks(scheduled):
        assert rate == 0.03125
        torch.testing.assert_close(weights, weights_of(reference))
