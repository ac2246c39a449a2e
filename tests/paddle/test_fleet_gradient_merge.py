"""gradient_merge against the loop that a user would write with no_sync(), and with half of it missing."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import dpfuse
import dpfuse.paddle as paddle
from dpfuse.paddle.distributed import fleet
from dpfuse.paddle.distributed.fleet import session
from tests.paddle.test_fleet import batch, net, sgd, strategy

CYCLES = 3


def merging(k_steps, avg=True, **fields):
    return strategy(gradient_merge=True, gradient_merge_configs={"k_steps": k_steps, "avg": avg}, **fields)


def loss_of(model, rank, iteration):
    return model(batch(rank, iteration)).square().mean()


def weights_of(model):
    return [param.detach().clone() for param in model.parameters()]


def merged(rank, size, k_steps, avg, idiom):
    """Weights after every iteration, and whether it has communicated."""
    fleet.init(is_collective=True, strategy=merging(k_steps, avg))
    layers = net()
    optimizer = fleet.distributed_optimizer(sgd(layers.parameters(), momentum=0.5))
    model = fleet.distributed_model(layers)
    history = []
    for iteration in range(CYCLES * k_steps):
        with dpfuse.time_communication(model) as times:
            if idiom == "torch":
                optimizer.zero_grad()
            loss_of(model, rank, iteration).backward()
            with torch.no_grad():  # a validation in between counts as nothing
                model(batch(rank))
            optimizer.step()
            if idiom == "paddle":
                optimizer.clear_grad()
        history.append((weights_of(model), times.collectives > 0))
    return history


def by_hand(rank, size, k_steps, avg):
    layers = net()
    model = dpfuse.DataParallel(layers, comm_buffer_size=32)
    optimizer = sgd(layers.parameters(), momentum=0.5)
    history = []
    for iteration in range(CYCLES * k_steps):
        is_last = iteration % k_steps == k_steps - 1
        with model.no_sync(enabled=not is_last):
            loss_of(model, rank, iteration).backward()
        if is_last:
            if avg:
                for param in layers.parameters():
                    param.grad /= k_steps
            optimizer.step()
            optimizer.zero_grad()
        history.append(weights_of(model))
    return history


@pytest.mark.one_in(2)
@pytest.mark.parametrize("idiom", ["paddle", "torch"])
@pytest.mark.parametrize(("k_steps", "avg"), [(2, True), (3, True), (3, False)])
def test_merging_equals_a_loop_with_no_sync_bit_for_bit(ranks, k_steps, avg, idiom):
    expected = ranks(by_hand, k_steps, avg)
    for got, hand in zip(ranks(merged, k_steps, avg, idiom), expected, strict=True):
        for iteration, ((weights, sent), reference) in enumerate(zip(got, hand, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(weights, reference, strict=True)), iteration
            assert sent == (iteration % k_steps == k_steps - 1)


def forward_without_backward(rank, size):
    fleet.init(is_collective=True, strategy=merging(2))
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(sgd(model.parameters(), momentum=0.5))
    for iteration in range(2 * CYCLES):
        loss_of(model, rank, iteration).backward()
        optimizer.step()
        loss_of(model, rank, 0)  # a validation without no_grad()
        optimizer.clear_grad()
    return weights_of(model)


def test_a_forward_that_nobody_steps_after_does_not_count(ranks):
    expected = [history[-1] for history in ranks(by_hand, 2, True)]
    for weights, reference in zip(ranks(forward_without_backward), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, reference, strict=True))


def everything_at_once(rank, size):
    fields = {"fp16_allreduce": True, "gradient_scale_configs": {"scale_strategy": "sum"}}
    fleet.init(is_collective=True, strategy=merging(2, **fields))
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(sgd(model.parameters()))
    for iteration in range(2):
        loss_of(model, rank, iteration).backward()
        optimizer.step()
        gradients = [param.grad for param in model.parameters()]
        optimizer.clear_grad()
    return gradients


def test_merging_combines_with_a_sum_and_with_float16(ranks):
    reference = net()
    for iteration in range(2):
        for rank in range(2):
            (loss_of(reference, rank, iteration) / 2).backward()
    for gradients in ranks(everything_at_once):
        for gradient, param in zip(gradients, reference.parameters(), strict=True):
            # float16 has 11 bits, and each rank's part is rounded before the sum.
            torch.testing.assert_close(gradient, param.grad, rtol=2**-9, atol=2**-11)


def two_pairs(rank, size):
    """Two models with an optimizer each, stepped in turn, as in adversarial training."""
    fleet.init(is_collective=True, strategy=merging(2))
    models = [fleet.distributed_model(net()) for _ in range(2)]
    optimizers = [fleet.distributed_optimizer(sgd(model.parameters())) for model in models]
    for iteration in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, rank, iteration).backward()
            optimizer.step()
            optimizer.clear_grad()
    return [weights_of(model) for model in models]


def test_optimizers_count_for_themselves_and_switch_their_own_models(ranks):
    expected = [history[1] for history in ranks(by_hand, 2, True)]
    start = weights_of(net())
    for rank_weights, reference in zip(ranks(two_pairs), expected, strict=True):
        for weights in rank_weights:
            # The first step has no momentum yet, so it is that of the loop by hand.
            assert all(torch.equal(a, b) for a, b in zip(weights, reference, strict=True))
            assert not any(torch.equal(a, b) for a, b in zip(weights, start, strict=True))


def model_alone(rank, size):
    fleet.init(is_collective=True, strategy=merging(2))
    model = fleet.distributed_model(net())
    fleet.distributed_optimizer(sgd(net().parameters()))  # of some other model
    with torch.no_grad():
        model(batch(rank))
    try:
        model(batch(rank))
    except dpfuse.DPFuseError as error:
        return str(error)
    return ""


def test_a_model_whose_iterations_nobody_counts_is_an_error(ranks):
    assert all("no optimizer of fleet.distributed_optimizer holds" in text for text in ranks(model_alone))


def optimizer_alone(rank, size):
    """The model is wrapped without fleet, so it averages every backward; the means add up to the same."""
    fleet.init(is_collective=True, strategy=merging(2))
    model = paddle.DataParallel(net().double())
    optimizer = fleet.distributed_optimizer(sgd(model.parameters()))
    weights = []
    for iteration in range(2):
        model(batch(rank, iteration).double()).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        weights.append(weights_of(model))
    return weights


def test_an_optimizer_alone_merges_what_its_model_averages(ranks):
    reference = net().double()
    for iteration in range(2):
        for rank in range(2):
            (reference(batch(rank, iteration).double()).square().mean() / 4).backward()
    start = weights_of(reference)
    sgd(reference.parameters()).step()
    for first, second in ranks(optimizer_alone):
        assert all(torch.equal(a, b) for a, b in zip(first, start, strict=True))
        torch.testing.assert_close(second, weights_of(reference), rtol=1e-13, atol=1e-15)


def merged_again(rank, size):
    """fleet.init once more: what is made then counts from the beginning, without merging."""
    fleet.init(is_collective=True, strategy=merging(2))
    old = fleet.distributed_model(net())
    old_optimizer = fleet.distributed_optimizer(sgd(old.parameters()))
    loss_of(old, rank, 0).backward()
    old_optimizer.step()
    fleet.init(is_collective=True)
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(sgd(model.parameters()))
    before = weights_of(model)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    return old.require_backward_grad_sync, [torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True)]


def test_init_replaces_what_was_before(ranks):
    assert ranks(merged_again) == [(True, [False] * 4)] * 2


# --- one process


@pytest.fixture
def one_process(monkeypatch):
    monkeypatch.setattr(session, "_session", None)

    def make(k_steps, avg=True):
        with pytest.warns(UserWarning, match="one process"):
            fleet.init(is_collective=True, strategy=merging(k_steps, avg))
        model = fleet.distributed_model(net())
        return model, fleet.distributed_optimizer(sgd(model.parameters()))

    return make


@pytest.mark.parametrize("avg", [True, False])
def test_one_process_merges_too(one_process, avg):
    model, optimizer = one_process(2, avg)
    reference = net()
    for iteration in range(2):
        loss_of(model, 0, iteration).backward()
        optimizer.step()
        optimizer.clear_grad()
        loss_of(reference, 0, iteration).backward()
    assert all(param.grad is None for param in model.parameters())
    for param in reference.parameters():
        param.grad /= 2 if avg else 1
    sgd(reference.parameters()).step()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model), weights_of(reference), strict=True))


def test_one_step_per_cycle_is_no_merging(one_process):
    model, optimizer = one_process(1)
    before = weights_of(model)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))


def test_models_and_optimizers_are_not_kept_alive(one_process):
    model, optimizer = one_process(2)
    merge = weakref.ref(optimizer._merge)
    del model, optimizer
    assert len(session._session.models) == 0
    assert merge() is None


def test_a_parameter_without_gradient_is_left_alone(one_process):
    model, optimizer = one_process(2)
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra]})
    for iteration in range(2):
        loss_of(model, 0, iteration).backward()
        optimizer.step()
    assert extra.item() == 1
