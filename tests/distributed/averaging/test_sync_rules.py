"""When a backward synchronises, and what it averages: one test per rule, on two ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfuse


def wrap(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return dpfuse.DataParallel(net, comm_buffer_size=0, last_comm_buffer_size=0, **options)


def inputs(rank, seed=0):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * seed + rank))


def local_gradients(model, *batches):
    """What this rank alone would accumulate, on a copy without any hook."""
    bare = copy.deepcopy(model.module)
    bare.zero_grad()
    for x in batches:
        bare(x).pow(2).sum().backward()
    return [param.grad for param in bare.parameters()]


def mean(gradients):
    """The mean over ranks, computed by torch alone."""
    means = [gradient / dist.get_world_size() for gradient in gradients]
    for gradient in means:
        dist.all_reduce(gradient)
    return means


def gradients(model):
    return [param.grad for param in model.module.parameters()]


def assert_local(model, *batches):
    torch.testing.assert_close(gradients(model), local_gradients(model, *batches), rtol=0, atol=0)


def assert_averaged(model, *batches):
    # The mean of a sum of micro-batches and the sum of their means differ in rounding.
    torch.testing.assert_close(gradients(model), mean(local_gradients(model, *batches)), rtol=1e-6, atol=1e-7)


def loss(model, x):
    return model(x).pow(2).sum()


def forward_inside_backward_outside(rank, size):
    model = wrap()
    with model.no_sync():
        value = loss(model, inputs(rank))
    value.backward()
    assert_local(model, inputs(rank))
    loss(model, inputs(rank, 1)).backward()
    assert_averaged(model, inputs(rank), inputs(rank, 1))


def forward_outside_backward_inside(rank, size):
    model = wrap()
    value = loss(model, inputs(rank))
    with model.no_sync():
        value.backward()
    assert_averaged(model, inputs(rank))


def synchronised_forward_wins(rank, size):
    model = wrap()
    model(inputs(rank, 1))  # a forward without backward, for metrics
    with model.no_sync():
        loss(model, inputs(rank)).backward()
    assert_averaged(model, inputs(rank))


def forward_without_grad_is_invisible(rank, size):
    model = wrap()
    with torch.no_grad():
        model(inputs(rank, 1))
    with model.no_sync():
        loss(model, inputs(rank)).backward()
    assert_local(model, inputs(rank))
    if rank == 0:  # an evaluation on one rank only: no collective, so nobody waits
        with torch.no_grad():
            model(inputs(rank, 2))
        model.eval()
        with torch.inference_mode():
            model(inputs(rank, 2))
        model.train()
    loss(model, inputs(rank, 3)).backward()
    assert_averaged(model, inputs(rank), inputs(rank, 3))


def two_forwards_then_two_backwards(rank, size):
    model = wrap()
    for _ in range(3):
        first, second = loss(model, inputs(rank)), loss(model, inputs(rank, 1))
        first.backward()
        second.backward()
        assert_averaged(model, inputs(rank), inputs(rank, 1))
        model.zero_grad()


def two_forwards_then_one_backward(rank, size):
    model = wrap()
    for _ in range(3):
        (loss(model, inputs(rank)) + loss(model, inputs(rank, 1))).backward()
        assert_averaged(model, inputs(rank), inputs(rank, 1))
        model.zero_grad()


def module_called_directly_after_a_local_forward(rank, size):
    model = wrap()
    with model.no_sync():
        loss(model, inputs(rank)).backward()
    loss(model.module, inputs(rank, 1)).backward()
    assert_averaged(model, inputs(rank), inputs(rank, 1))


def switches(rank, size):
    model = wrap()
    with model.no_sync(), model.no_sync():
        loss(model, inputs(rank)).backward()
    assert_local(model, inputs(rank))
    assert model.require_backward_grad_sync
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    assert model.require_backward_grad_sync
    with model.no_sync():
        with model.no_sync(enabled=False):
            assert not model.require_backward_grad_sync
        with model.no_sync():
            pass
        assert not model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    loss(model, inputs(rank)).backward()
    assert_local(model, inputs(rank), inputs(rank))
    model.require_backward_grad_sync = True
    with model.no_sync(enabled=False):
        loss(model, inputs(rank)).backward()
    assert_averaged(model, *[inputs(rank)] * 3)
    model.zero_grad()
    with model.no_sync():
        value = loss(model, inputs(rank))
    model.reducer.prepare_for_backward([value])
    value.backward()
    assert_averaged(model, inputs(rank))


def two_wrappers_in_one_graph(rank, size):
    generator, critic = wrap(), dpfuse.DataParallel(nn.Linear(2, 1))
    for step in range(3):
        critic(generator(inputs(rank, step))).sum().backward()
        bare = nn.Sequential(generator.module, critic.module)
        result = [param.grad.clone() for param in bare.parameters()]
        bare = copy.deepcopy(bare)
        bare.zero_grad()
        bare(inputs(rank, step)).sum().backward()
        torch.testing.assert_close(result, mean([param.grad for param in bare.parameters()]))
        generator.zero_grad()
        critic.zero_grad()


def gradients_are_views_or_private(rank, size):
    for views in (True, False):
        model = wrap(gradient_as_bucket_view=views)
        kept = []
        for step in range(3):
            loss(model, inputs(rank, step)).backward()
            kept.append((model.module[0].weight.grad, model.module[0].weight.grad.clone()))
            buffers = {b.parts.buffer.flat.untyped_storage().data_ptr() for b in model.reducer.buckets}
            for gradient in gradients(model) if step or views else ():  # the first step ends with new buffers
                assert gradient.untyped_storage().data_ptr() in buffers
                assert gradient._is_view() == views
            model.zero_grad()
        reused = [torch.equal(kept_view, value) for kept_view, value in kept]
        # The second step's view was overwritten by the third; the first ran on the buffers of the first plan, which the
        # rebuild may have kept.
        assert reused[1:] == ([False, True] if views else [True, True])


def assigning_to_grad_data(rank, size):
    model = wrap()
    for step in range(4):
        loss(model, inputs(rank, step)).backward()
        assert_averaged(model, inputs(rank, step))
        for param in model.module.parameters():  # takes a view that dpfuse handed out to other memory
            param.grad.data = param.grad.data * 2
        halved = [gradient / 2 for gradient in gradients(model)]
        expected = mean(local_gradients(model, inputs(rank, step)))
        torch.testing.assert_close(halved, expected, rtol=1e-6, atol=1e-7)
        model.zero_grad()


@pytest.mark.parametrize(
    "rule",
    [
        forward_inside_backward_outside, forward_outside_backward_inside, synchronised_forward_wins,
        forward_without_grad_is_invisible,
        two_forwards_then_two_backwards, two_forwards_then_one_backward,
        module_called_directly_after_a_local_forward, switches,
        two_wrappers_in_one_graph, gradients_are_views_or_private, assigning_to_grad_data,
    ],
)  # fmt: skip
def test_rule(ranks, rule):
    ranks(rule)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_wrapper_inside_a_checkpoint_is_averaged(rank, size, reentrant):
    model = wrap()
    for step in range(3):
        x = inputs(rank, step).requires_grad_()
        halves = [checkpoint(model, half, use_reentrant=reentrant) for half in x.split([2, 3])]
        torch.cat(halves).pow(2).sum().backward()
        assert_averaged(model, inputs(rank, step))
        model.zero_grad()


def test_autograd_grad_is_not_reduced(rank, size):
    model = wrap()
    with dpfuse.time_communication(model) as sent:
        for step in range(3):
            x = inputs(rank, step).requires_grad_()
            value = loss(model, x)
            torch.autograd.grad(value, x, retain_graph=True)
            torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
            assert sent.collectives == step * 4
            assert gradients(model) == [None] * 4
            with model.no_sync():  # the forward ran outside, and autograd.grad has not used it up
                value.backward()
            assert_averaged(model, inputs(rank, step))
            model.zero_grad()
    assert (sent.steps, sent.collectives) == (3, 12)
