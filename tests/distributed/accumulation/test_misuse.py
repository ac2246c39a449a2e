"""`accumulate_in_buckets=True` where others look for gradients, where a window breaks off, with other options."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel.distributed import _MixedPrecision

import dpfuse
from dpfuse.engine.backward_table import State
from dpfuse.engine.feeds.accumulating import Accumulating
from tests.distributed.accumulation.test_in_buckets import (
    DDP,
    assert_equal,
    built,
    gradients,
    inputs,
    loss,
    window,
    wrap,
)
from tests.distributed.failures.test_interruptions import Net as Breaking

NOT_IN_GRAD = r"while gradients of parameter '\S+' lie in its bucket, .* Run the last backward of the window outside of"


def frozen_half(net=None):
    net = net or built()
    net.sides[1].requires_grad_(False)
    return net


def right_window(model, rank, step=5):
    """As many a fresh wrapper has, on all ranks."""
    model.zero_grad()
    fresh = wrap(frozen_half(built()), gradient_as_bucket_view=model._options.gradient_as_bucket_view)
    window(fresh, rank, step)
    window(model, rank, step)
    got, expected = ([grad for grad in gradients(each) if grad is not None] for each in (model, fresh))
    assert len(got) == 6
    assert_equal(got, expected)


def looked_for_in_grad(rank, size):
    model = wrap(frozen_half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    window(model, rank, 0)
    optimizer.step()
    optimizer.zero_grad()
    with model.no_sync():
        loss(model, inputs(rank, 1, 0)).backward()
    with pytest.raises(
        dpfuse.DPFuseError, match=rf"rank {rank}: the norm of the gradients was asked for {NOT_IN_GRAD}"
    ):
        model.grad_norm()
    with pytest.raises(dpfuse.DPFuseError, match=rf"SGD\.step\(\) was called {NOT_IN_GRAD}"):
        optimizer.step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # of which nothing is in a bucket
    with pytest.raises(dpfuse.DPFuseError, match=rf"fused_allreduce_gradients\(\) was called {NOT_IN_GRAD}"):
        dpfuse.fused_allreduce_gradients(model.parameters())
    dpfuse.fused_allreduce_gradients(other.parameters())
    loss(model, inputs(rank, 1, 1)).backward()
    assert model.grad_norm().isfinite()
    optimizer.step()
    dpfuse.fused_allreduce_gradients(model.parameters())
    right_window(model, rank)


def by_hand_on_one_rank_only(rank, size):
    """The peers are not left waiting, whoever finds it."""
    model = wrap(frozen_half())
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    if rank == 1:
        with model.no_sync():
            loss(model, inputs(rank, 1, 0)).backward()
    with pytest.raises(dpfuse.DPFuseError, match="lie in its bucket"):
        dpfuse.fused_allreduce_gradients(model.parameters())
    model.zero_grad()
    right_window(model, rank)


def kept_view(rank, size):
    model = wrap(frozen_half())
    for step in range(2):
        model.zero_grad()
        window(model, rank, step)
    kept = model.module.last.weight.grad
    text = r"the gradient of parameter 'last\.weight' is a view of the buffer in which its gradients are being"
    for same_memory in (kept, kept.detach()):
        with model.no_sync():
            loss(model, inputs(rank, 2, 0)).backward()
        model.module.last.weight.grad = same_memory
        with (
            pytest.raises(dpfuse.DPFuseError, match=text),
            pytest.warns(UserWarning, match="was thrown away"),
            model.no_sync(),
        ):
            loss(model, inputs(rank, 2, 1)).backward()
        model.zero_grad()
    right_window(model, rank)
    # In the synchronised backward it is an error on every rank.
    with model.no_sync():
        loss(model, inputs(rank, 2, 0)).backward()
    if rank == 1:
        model.module.last.weight.grad = kept
    with pytest.raises(dpfuse.DPFuseError, match=text if rank == 1 else "the backward failed on rank 1 of 2"):
        loss(model, inputs(rank, 2, 1)).backward()
    right_window(model, rank)


def thrown_away_too_early(rank, size):
    model = wrap(frozen_half())
    window(model, rank, 0)
    model.zero_grad()
    with model.no_sync():
        value = loss(model, inputs(rank, 1, 0))

    def throw(grad):
        with pytest.raises(dpfuse.DPFuseError, match=r"discard_accumulated\(\) .* while a .* is LOCAL"):
            model.discard_accumulated()

    handle = model.module.first.weight.register_hook(throw)
    value.backward()
    handle.remove()
    loss(model, inputs(rank, 1, 1)).backward()
    right_window(model, rank)


def broken_window(rank, size):
    """An exception in a local backward begins the window again, on every rank or on one."""
    for broken in ((0, 1), (1,)):
        torch.manual_seed(0)
        model = dpfuse.DataParallel(Breaking(), None, 0, 0, accumulate_in_buckets=True)
        for _ in range(2):
            model.zero_grad()
            with model.no_sync():
                model(torch.ones(2, 3)).sum().backward()
            if rank in broken:
                with (
                    pytest.raises(KeyError, match="planted"),
                    pytest.warns(UserWarning, match=r"an exception .* for \d parameters, was thrown away"),
                    model.no_sync(),
                ):
                    model(torch.ones(2, 3), True).sum().backward()
                assert not any(bucket.parts.feed.held for bucket in model.reducer.buckets)
                model.zero_grad()
                with model.no_sync():
                    model(torch.ones(2, 3)).sum().backward()
            model(torch.ones(2, 3)).sum().backward()
            got = gradients(model)
            bare = Breaking()
            bare.load_state_dict(model.state_dict())
            for _micro in range(2):
                bare(torch.ones(2, 3)).sum().backward()
            assert_equal(got, [param.grad for param in bare.parameters()], rtol=1e-6, atol=1e-6)


def broken_end(rank, size):
    """An exception in the synchronised backward: what was accumulated before is not in the next one's mean."""
    torch.manual_seed(0)
    model = dpfuse.DataParallel(Breaking(), None, 0, 0, accumulate_in_buckets=True)
    for _ in range(3):
        with model.no_sync():
            model(torch.full((2, 3), 7.0)).sum().backward()
        with pytest.raises(KeyError, match="planted"):
            model(torch.ones(2, 3), True).sum().backward()
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        got = gradients(model)
        bare = Breaking()
        bare.load_state_dict(model.state_dict())
        bare(torch.ones(2, 3)).sum().backward()
        assert_equal(got, [param.grad for param in bare.parameters()], rtol=1e-6, atol=1e-6)
        model.zero_grad()


def broken_where_warnings_are_errors(rank, size):
    """The backward that died is over all the same."""
    model = dpfuse.DataParallel(Breaking(), None, 0, 0, accumulate_in_buckets=True)
    with model.no_sync():
        model(torch.ones(2, 3)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError, match="planted"), model.no_sync():
            model(torch.ones(2, 3), True).sum().backward()
    assert model.reducer.state is State.IDLE


def broken_after_a_change(rank, size):
    """What the buckets of a changed model hold is thrown away with the backward that failed, on one rank or on all."""
    for changed in ((0, 1), (1,)):
        torch.manual_seed(0)
        model = dpfuse.DataParallel(Breaking(), None, 0, 0, accumulate_in_buckets=True)
        model(torch.ones(2, 3)).sum().backward()
        if rank in changed:
            model.double()
        dtype = next(model.parameters()).dtype
        with model.no_sync():
            model(torch.full((2, 3), 7.0, dtype=dtype)).sum().backward()
        breaks = len(changed) == size
        with pytest.raises(KeyError if breaks else dpfuse.DPFuseError):
            model(torch.ones(2, 3, dtype=dtype), breaks).sum().backward()
        if not breaks:
            model.float()
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
        bare = copy.deepcopy(model.module)
        for each in (model, bare):
            each(torch.ones(2, 3, dtype=next(bare.parameters()).dtype)).sum().backward()
        assert_equal(gradients(model), [param.grad for param in bare.parameters()], rtol=1e-6, atol=1e-6)


def wrapped_again(rank, size):
    """A wrapper that goes leaves gradients where they are without the option, and takes no part any more."""
    net, bare = frozen_half(), frozen_half()
    model = wrap(net)
    with model.no_sync():
        loss(model, inputs(rank, 0, 0)).backward()
    del model
    model = wrap(net)
    loss(bare, inputs(rank, 0, 0)).backward()
    got, expected = ([param.grad for param in each.parameters() if param.grad is not None] for each in (net, bare))
    assert len(got) == 6
    assert_equal(got, expected)
    right_window(model, rank)
    torch.optim.SGD(net.parameters(), lr=0.0).step()


def filled_meanwhile(rank, size):
    """Another thread may begin or end a window while an optimizer looks for gradients."""
    models = [wrap(frozen_half()) for _ in range(3)]
    for model in models:
        with model.no_sync():
            loss(model, inputs(rank, 0, 0)).backward()

    def holds_of(self, wanted):
        for model in models:
            model.discard_accumulated()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accumulating, "holds_of", holds_of)
        torch.optim.SGD(models[0].parameters(), lr=0.0).step()
    right_window(models[0], rank)


def left_out_on_one_rank(rank, size):
    """The canary counts as ever: a rank that accumulated more often than the others is noticed."""
    model = wrap(frozen_half())
    for micro in range(1 + rank):
        with model.no_sync():
            loss(model, inputs(rank, 0, micro)).backward()
    with pytest.raises(dpfuse.DPFuseError, match="rank 1 has run 3 backwards since the last averaged one"):
        loss(model, inputs(rank, 0, 2)).backward()
    right_window(model, rank)


def wrong_gradient(rank, size):
    model = wrap(frozen_half())
    with model.no_sync():
        loss(model, inputs(rank, 0, 0)).backward()
    model.module.double()  # which the wrapper would see in a forward of its own
    with (
        pytest.raises(ValueError, match=r"'\S+' got dtype torch\.float64, expected torch\.float32"),
        pytest.warns(UserWarning, match="was thrown away"),
        model.no_sync(),
    ):
        loss(model.module, inputs(rank, 0, 1)).backward()
    model.module.float()
    right_window(model, rank)


def options_that_differ(rank, size):
    with pytest.raises(dpfuse.DPFuseError, match="option accumulate_in_buckets = "):
        dpfuse.DataParallel(built(), accumulate_in_buckets=rank == 0)


@pytest.mark.parametrize(
    "case",
    [
        looked_for_in_grad, by_hand_on_one_rank_only, kept_view, thrown_away_too_early, broken_window, broken_end,
        broken_where_warnings_are_errors, broken_after_a_change, wrapped_again, filled_meanwhile,
        left_out_on_one_rank, wrong_gradient, options_that_differ,
    ],
)  # fmt: skip
def test_misuse_is_an_error_and_the_next_window_is_right(ranks, case):
    ranks(case)


def test_options_that_exclude_each_other(group):
    text = r"accumulate_in_buckets=True was passed with {}, expected one .* or let torch\.float32 travel"
    with pytest.raises(ValueError, match=text.format(r"wire_dtype=torch\.bfloat16")):
        dpfuse.DataParallel(built(), accumulate_in_buckets=True, wire_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=text.format(r"reduce_dtype=torch\.bfloat16 of mixed_precision")):
        DDP(built(), accumulate_in_buckets=True, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"accumulate_in_buckets must be True or False, got 1 of type int"):
        dpfuse.DataParallel(built(), accumulate_in_buckets=1)
    first = dpfuse.DataParallel(built())
    with pytest.raises(ValueError, match=r"another wrapper .* gradient_scale, accumulate_in_buckets or .* set"):
        dpfuse.DataParallel(first.module, accumulate_in_buckets=True)
    model = DDP(built(), accumulate_in_buckets=True)
    with pytest.raises(dpfuse.DPFuseError, match=r"hook was registered with accumulate_in_buckets=True, expected one"):
        model.register_comm_hook(None, allreduce_hook)


def test_mixed_precision_accumulates_if_gradients_travel_in_float32(group):
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours = wrap(frozen_half(), "torch", mixed_precision=precision)
    plain = DDP(frozen_half(), mixed_precision=precision)
    for step in range(3):
        for model in (ours, plain):
            window(model, 0, step)
        assert_equal(*([grad for grad in gradients(model) if grad is not None] for model in (ours, plain)))
        ours.zero_grad()
        plain.zero_grad()


def test_without_the_option_there_is_nothing_to_throw_away(group):
    model = dpfuse.DataParallel(frozen_half())
    with model.no_sync():
        loss(model, inputs(0, 0, 0)).backward()
    before = [grad.clone() for grad in gradients(model) if grad is not None]
    value = loss(model.module, inputs(0, 0, 0))
    value.register_hook(lambda grad: model.discard_accumulated())  # in a backward, too
    torch.autograd.grad(value, model.module.first.weight)
    assert_equal([grad for grad in gradients(model) if grad is not None], before)
