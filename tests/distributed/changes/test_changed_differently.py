"""A module that changes on some ranks only, or not alike: an error on every rank, and a way on from there."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dpfuse
from dpfuse import DistributedDataParallel
from tests.distributed.changes.test_changed_everywhere import FACES, Net, Pair, add_layer, convert, grow, unfreeze


def replace_bias(net):
    net.first.bias = nn.Parameter(torch.zeros(5))


PLACES = {
    add_layer: r"parameter 'more\.\d\.weight' was added",
    replace_bias: r"parameter 'first\.bias' was replaced",
    unfreeze: r"parameter 'frozen\.weight' was unfrozen",
    convert: r"parameter 'first\.weight' was converted from float32 \(5, 3\) on cpu to float64 \(5, 3\) on cpu",
    grow: r"parameter 'head\.0\.0\.weight' was converted from float32 \(2, 4\) on cpu to float32 \(6, 4\) on cpu",
}
NOT_ALL = (
    r"module was changed on rank 1 of \d since the last synchronised backward, and not on rank 0.*expected the same "
    r"change on every rank\. Make it on all of them, or undo it\."
)


def changed_here_only(rank, size, change, face, options):
    pair = Pair(rank, size, face, **options)
    for step in range(2):
        if step or change is not convert:  # once before the first step, once later
            pair.step()
        if rank == 1:
            change(pair.wrapped.module)
        for _ in range(2):  # an error that nobody does anything about stays one
            own = rf"rank 1: {PLACES[change]} after the module was wrapped; the "
            with pytest.raises(dpfuse.DPFuseError, match=(own if rank == 1 else f"^rank {rank}: the ") + NOT_ALL):
                pair.wrapped(torch.ones(4, 3), 0).sum().backward()
        if face == "torch" and change is not replace_bias:  # buffers have travelled all the same, as what they were
            means = [torch.zeros(5, dtype=torch.float64) for _ in range(size)]
            dist.all_gather(means, pair.wrapped.module.norm.running_mean.double())
            torch.testing.assert_close(means, [means[0]] * size, rtol=1e-6, atol=1e-6)
        if rank != 1:
            change(pair.wrapped.module)
        change(pair.bare)
        for net in (pair.wrapped, pair.bare):
            net.zero_grad()
        for theirs, ours in zip(pair.bare.parameters(), pair.wrapped.module.parameters(), strict=True):
            dist.broadcast(ours.data, 0)
            theirs.data = ours.data.clone()
        for _ in range(2):
            pair.step()
        if change in (unfreeze, grow, convert):
            break


@pytest.mark.one_in(4)
@pytest.mark.parametrize("change", PLACES)
@pytest.mark.parametrize("face", FACES)
def test_a_change_on_one_rank_is_an_error_on_all_and_goes_once_all_have_it(ranks, change, face):
    ranks(changed_here_only, change, face, {"gradient_as_bucket_view": face == "paddle"})


@pytest.mark.parametrize("change", [add_layer, convert])
def test_three_ranks_hear_of_it(ranks, change):
    ranks(changed_here_only, change, "torch", {}, size=3)


OPTIONS = {
    "tiny scale": {"gradient_scale": -1e-6},
    "huge scale": {"gradient_scale": 1e6},
    "half wire": {"wire_dtype": torch.float16},
    "half wire, tiny scale": {"wire_dtype": torch.float16, "gradient_scale": 1e-6},
    "half wire, huge scale": {"wire_dtype": torch.float16, "gradient_scale": -1e6},
    "bfloat16 wire": {"wire_dtype": torch.bfloat16, "gradient_scale": -3.0},
}


def spoil(param):
    param.grad = param.grad.to_sparse()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_change_and_a_failure_stay_apart_in_every_dtype_and_at_every_scale(rank, size, dtype, options):
    for changes, text in ((add_layer, NOT_ALL), (None, "failed on rank 1 of 2|rank 1 could not pack")):
        model = FACES["paddle"](Net().to(dtype), **options)
        if rank == 1:
            if changes:
                changes(model.module)
            else:
                model.module.first.weight.register_post_accumulate_grad_hook(spoil)
        with pytest.raises(dpfuse.DPFuseError, match=text):
            (model(torch.ones(4, 3, dtype=dtype), 0).sum() * 1e-3).backward()


def test_undoing_it_is_a_remedy(rank, size):
    pair = Pair(rank, size, "torch")
    pair.step()
    kept = pair.wrapped.module.head
    if rank == 1:
        pair.wrapped.module.head = nn.Linear(4, 2)
    with pytest.raises(dpfuse.DPFuseError, match=NOT_ALL):
        pair.wrapped(torch.ones(4, 3), 0).sum().backward()
    pair.wrapped.module.head = kept
    pair.zero_grad()
    pair.bare.load_state_dict(pair.wrapped.module.state_dict())
    for _ in range(2):
        pair.step()


@pytest.mark.parametrize("kind", ["shape", "dtype", "place", "values", "values of the unfrozen", "frozen"])
def test_changes_that_differ_are_told_by_name(rank, size, kind):
    pair = Pair(rank, size, "paddle")
    pair.step()
    net = pair.wrapped.module
    match kind:
        case "shape":
            net.more.append(nn.Linear(2, 2 + rank))
            text = (
                r"rank 1 has 'parameter more\.0\.weight shape=\(3, 2\).*rank 0 has 'parameter more\.0\.weight shape=\(2"
            )
        case "dtype":
            net.to(torch.float64 if rank else torch.bfloat16)
            text = r"rank 1 has 'parameter first\.weight .*dtype=float64"
        case "place":
            (net.first if rank else net.sides[1]).bias = nn.Parameter(torch.zeros(4 + rank))
            text = r"rank 1 has 'parameter first\.bias is new, .*rank 0 has 'parameter sides\.1\.bias is new"
        case "values":
            net.first.weight = nn.Parameter(torch.full((5, 3), 1.0 + rank))
            text = r"rank 1 has 'parameter first\.weight is new, values \w{16}', rank 0 has 'parameter first\.weight"
        case "values of the unfrozen":
            net.frozen.weight.requires_grad_(True)
            net.frozen.weight.data.add_(rank)
            text = r"rank 1 has 'parameter frozen\.weight is new, values"
        case "frozen":
            net.first.bias = nn.Parameter(torch.zeros(5), requires_grad=True)
            net.sides[1].weight.requires_grad_(rank == 0)
            text = r"rank 1 has 'parameter sides\.1\.weight .*requires_grad=False"
    with pytest.raises(
        dpfuse.DPFuseError, match=r"changed after it was wrapped, differs between ranks.*" + text
    ) as error:
        pair.wrapped(torch.ones(4, 3, dtype=net.first.weight.dtype), 0).sum().backward()
    assert "Make the same change on every rank, with the same values" in str(error.value)
    if kind == "values":
        dist.broadcast(net.first.weight.data, 0)
        pair.bare.first.weight = nn.Parameter(torch.full((5, 3), 1.0))
        pair.bare.load_state_dict(net.state_dict())
        pair.zero_grad()
        for _ in range(2):
            pair.step()


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_module_that_cannot_be_used_any_more_is_an_error_on_all(rank, size, everywhere):
    pair = Pair(rank, size, "paddle")
    pair.step()
    if everywhere or rank == 1:
        pair.wrapped.module.more.append(nn.Linear(2, 2, device="meta"))
    else:
        pair.wrapped.module.more.append(nn.Linear(2, 2))
    forward = pair.wrapped.module.forward
    pair.wrapped.module.forward = lambda x, side: pair.wrapped.module.head(pair.wrapped.module.first(x)[:, :4])
    error, text = (ValueError, r"'more\.0\.weight' is on the meta device") if everywhere or rank == 1 else (
        dpfuse.DPFuseError, r"after it was wrapped, failed on rank 1: parameter 'more\.0\.weight' is on the meta"
    )  # fmt: skip
    with pytest.raises(error, match=text):
        pair.wrapped(torch.ones(4, 3), 0).sum().backward()
    pair.wrapped.module.forward = forward
    del pair.wrapped.module.more[0]
    pair.zero_grad()
    pair.bare.load_state_dict(pair.wrapped.module.state_dict())
    for _ in range(2):
        pair.step()


@pytest.mark.parametrize("changed", [(0,), (1,), (0, 1)])
def test_an_exception_in_the_step_of_the_change_is_told_and_the_change_is_not_lost(rank, size, changed):
    def explode(grad):
        raise KeyError("planted")

    pair = Pair(rank, size, "torch")
    pair.step()
    if rank in changed:
        add_layer(pair.wrapped.module)
    handle = pair.wrapped.module.first.weight.register_hook(explode) if rank == 1 else None
    with pytest.raises(KeyError if rank == 1 else dpfuse.DPFuseError):
        pair.wrapped(torch.ones(4, 3), 0).sum().backward()
    if handle is not None:
        handle.remove()
    if rank not in changed:
        add_layer(pair.wrapped.module)
    pair.zero_grad()
    add_layer(pair.bare)
    pair.wrapped.synchronize_weights()  # rank 0 waits in its backward until rank 1 comes to dpfuse again
    for theirs, ours in zip(pair.bare.parameters(), pair.wrapped.module.parameters(), strict=True):
        theirs.data = ours.data.clone()
    for _ in range(2):
        pair.step()


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.filterwarnings("ignore:.*got no gradient in this backward")
def test_with_a_communication_hook_every_change_is_an_error_on_all(rank, size, everywhere):
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, allreduce_hook)
    model(torch.ones(4, 3), 0).sum().backward()
    if everywhere or rank == 1:
        add_layer(model.module)
    text = (
        r"'more\.0\.weight' was added after the module was wrapped.*hook allreduce_hook is registered.*Wrap the module"
    )
    with pytest.raises(dpfuse.DPFuseError, match=text if everywhere else NOT_ALL):
        model(torch.ones(4, 3), 0).sum().backward()


def test_a_hook_cannot_come_before_all_ranks_know_of_a_change(rank, size):
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    add_layer(model.module)
    with model.no_sync():
        model(torch.ones(4, 3), 0).sum().backward()
    with pytest.raises(dpfuse.DPFuseError, match=r"registered after parameter 'more\.0\.weight' was added"):
        model.register_comm_hook(None, allreduce_hook)
    model(torch.ones(4, 3), 0).sum().backward()
    model.register_comm_hook(None, allreduce_hook)


def test_a_parameter_that_only_one_rank_froze_is_an_error_on_all(rank, size):
    pair = Pair(rank, size, "paddle")
    pair.step()
    if rank == 1:
        for net in (pair.wrapped.module, pair.bare):
            net.first.weight.requires_grad_(False)
    with pytest.raises(dpfuse.DPFuseError, match=rf"rank {rank}: the ranks have frozen different .* \(0, 1 of them"):
        pair.backward()


@pytest.mark.parametrize("everywhere", [True, False])
def test_sparse_gradients_take_part(rank, size, everywhere):
    net = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2))
    model = FACES["paddle"](net)
    words = torch.tensor([rank, 3, 5])
    for step in range(4):
        if step == 2 and (everywhere or rank == 1):
            net[0] = nn.Embedding.from_pretrained(torch.ones(7, 3, dtype=torch.float64), freeze=False, sparse=True)
            net[1].double()
        if step == 2 and not everywhere:
            with pytest.raises(dpfuse.DPFuseError, match=NOT_ALL):
                model(words).sum().backward()
            return
        model.zero_grad()
        model(words).sum().backward()
        expected = torch.zeros(7, 3, dtype=net[1].weight.dtype)
        for other in range(size):
            expected[[other, 3, 5]] += net[1].weight.detach().sum(0) / size
        torch.testing.assert_close(net[0].weight.grad.to_dense(), expected)


@pytest.mark.parametrize("others_have_ended", [True, False])
def test_inside_join_a_rank_without_input_cannot_follow(rank, size, others_have_ended):
    pair = Pair(rank, size, "torch")
    steps = 1 if others_have_ended and rank == 1 else 3
    text = "module was changed on rank 0 of 2 since the last synchronised backward, and not on rank 1"
    with pytest.raises(dpfuse.DPFuseError, match=text) if others_have_ended else nullcontext(), pair.wrapped.join():
        for step in range(steps):
            if step == 1:
                pair.change(add_layer)
            pair.step()
