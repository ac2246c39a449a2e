"""The rows of the table in docs/train/tensor_parallel.md: what works beside DTensors, and what is refused by name."""

from __future__ import annotations

import copy
import tempfile
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor
from torch.nn.parallel.distributed import _MixedPrecision

import dpfuse
from tests.distributed.tensor_parallel.models import (
    FACES,
    Everything,
    Sequence,
    Tied,
    local,
    loss_of,
    made,
    mesh_of_four,
    whole,
    words_of,
)
from tests.docs.pages import ROOT, blocks_of


def wrapped(kind=Tied, **options):
    """Return a model over the data-parallel dimension, its module, and the mesh."""
    mesh = mesh_of_four()
    net = made(kind, mesh["tp"])
    return dpfuse.DistributedDataParallel(net, device_mesh=mesh["dp"], **options), net, mesh


def mean_of_one_process(kind=Tied, weights=(1.0, 1.0)):
    alone = made(kind)
    for replica, weight in enumerate(weights):
        (loss_of(alone, words_of(replica, 0)) * weight / sum(weights)).backward()
    return {name: param.grad for name, param in alone.named_parameters()}


def check_means(net, expected, *, rtol=1e-4, atol=1e-6):
    for name, param in net.named_parameters():
        torch.testing.assert_close(whole(param.grad), expected[name], rtol=rtol, atol=atol, msg=name)


ROUNDED = {"rtol": 2e-2, "atol": 2e-3}
WORKING = {
    "deterministic": ({"deterministic": True}, {}),
    "16-bit wire": ({"wire_dtype": torch.bfloat16}, ROUNDED),
    "16-bit wire in float32": ({"wire_dtype": (torch.bfloat16, torch.float32)}, ROUNDED),
    "error feedback": ({"wire_dtype": torch.bfloat16, "error_feedback": True}, {"rtol": 2e-2, "atol": 1e-2}),
    "8-bit wire": ({"wire_dtype": torch.float8_e4m3fn}, {"rtol": 0.1, "atol": 0.1}),
    "check_finite": ({"check_finite": "warn"}, {}),
    "views": ({"gradient_as_bucket_view": True}, {}),
    "private": ({"gradient_as_bucket_view": False}, {}),
    "static graph": ({"static_graph": True}, {}),
    "unused parameters": ({"find_unused_parameters": True}, {}),
    "strict": ({"check": "strict", "check_training": "raise"}, {}),
    "small buckets": ({"bucket_cap_mb": 1e-4}, {}),
}
OFTEN = ("16-bit wire", "views")


@pytest.mark.ranks(size=4)
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in WORKING]
)
def test_options_that_work(rank, size, name):
    options, tolerance = WORKING[name]
    model, net, mesh = wrapped(Sequence, **options)
    expected = mean_of_one_process(Sequence)
    for _ in range(3):
        model.zero_grad()
        loss_of(model, words_of(mesh.get_local_rank("dp"), 0)).backward()
        check_means(net, expected, **tolerance)


REFUSED = {
    "accumulate_in_buckets": {"accumulate_in_buckets": True},
    "check_finite='raise'": {"check_finite": "raise"},
    "metrics": {"metrics": True},
    "mixed_precision": {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.float32, torch.float32)},
}


@pytest.mark.ranks(size=4)
@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_refused(rank, size, name):
    with pytest.raises(ValueError, match=rf"'up\.weight' is a DTensor, and the module was wrapped with {name}"):
        wrapped(**REFUSED[name])


CALLS = {
    'plan="auto"': lambda model, net: wrapped(plan="auto"),
    "autotune": lambda model, net: dpfuse.autotune(model),
    "GradScaler": lambda model, net: dpfuse.GradScaler("cpu", model=model),
    "ShardedOptimizer": lambda model, net: dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1),
    "save_checkpoint": lambda model, net: dpfuse.save_checkpoint("nowhere", model, step=1),
    "load_checkpoint": lambda model, net: dpfuse.load_checkpoint("nowhere", model),
    "fused_allreduce_gradients": lambda model, net: dpfuse.fused_allreduce_gradients(net.parameters()),
}


@pytest.mark.ranks(size=4)
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_refused(rank, size, name):
    model, net, mesh = wrapped()
    loss_of(model, words_of(mesh.get_local_rank("dp"), 0)).backward()
    with pytest.raises((TypeError, ValueError, dpfuse.DPFuseError), match=r"DTensor"):
        CALLS[name](model, net)
    model.zero_grad()  # and training goes on
    loss_of(model, words_of(mesh.get_local_rank("dp"), 0)).backward()
    check_means(net, mean_of_one_process())


@pytest.mark.one_in(2)
@pytest.mark.ranks(size=4)
@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.bf16_compress_hook])
def test_communication_hooks_get_the_local_gradients(rank, size, hook):
    model, net, mesh = wrapped()
    seen = []

    def noting(state, bucket):
        seen.extend(
            tuple(param.shape) == tuple(grad.shape)
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
        )
        return hook(state, bucket)

    model.register_comm_hook(mesh["dp"].get_group(), noting)
    loss_of(model, words_of(mesh.get_local_rank("dp"), 0)).backward()
    check_means(net, mean_of_one_process(), **ROUNDED)
    assert seen
    assert all(seen)


@pytest.mark.ranks(size=4)
def test_a_rank_may_run_out_of_inputs(rank, size):
    model, net, mesh = wrapped()
    replica = mesh.get_local_rank("dp")
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
    with model.join():  # the ranks of one replica have as many batches
        for step in range(2 + replica):
            optimizer.zero_grad()
            loss_of(model, words_of(replica, step)).backward()
            optimizer.step()
    for param in net.parameters():
        others = [torch.empty_like(local(param)) for _ in range(2)]
        dist.all_gather(others, local(param).detach().contiguous(), mesh["dp"].get_group())
        assert torch.equal(others[0], others[1])


@pytest.mark.ranks(size=4)
def test_weights_of_gradients(rank, size):
    model, net, mesh = wrapped()
    replica = mesh.get_local_rank("dp")
    model.set_gradient_weight(1.0 + 2.0 * replica)
    loss_of(model, words_of(replica, 0)).backward()
    check_means(net, mean_of_one_process(weights=(1.0, 3.0)))


@pytest.mark.ranks(size=4)
def test_a_gradient_that_is_held_is_not_overwritten(rank, size):
    model, net, mesh = wrapped()
    loss_of(model, words_of(mesh.get_local_rank("dp"), 0)).backward()
    held = {name: param.grad for name, param in net.named_parameters()}
    before = {name: local(grad).clone() for name, grad in held.items()}
    model.zero_grad()
    loss_of(model, words_of(mesh.get_local_rank("dp"), 1)).backward()
    assert all(torch.equal(local(held[name]), before[name]) for name in held)


@pytest.mark.ranks(size=4)
def test_a_state_dict_is_saved_and_loaded(rank, size):
    model, net, mesh = wrapped()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)
    states = None
    for step in range(4):
        if step == 2:
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        loss_of(model, words_of(mesh.get_local_rank("dp"), step)).backward()
        optimizer.step()
    assert states is not None
    assert isinstance(states[0]["module.up.weight"], DTensor)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    expected = {name: local(param).detach().clone() for name, param in net.named_parameters()}
    again, other, _ = wrapped()
    again.load_state_dict(states[0])
    optimizer = torch.optim.AdamW(other.parameters(), 1e-2, foreach=False)
    optimizer.load_state_dict(states[1])
    assert other.head.weight is other.embedding.weight
    assert all(torch.equal(local(param), expected[name]) for name, param in other.named_parameters())


@pytest.mark.slow
@pytest.mark.ranks(size=4)
def test_torch_saves_and_loads_in_parts(rank, size):
    import torch.distributed.checkpoint as dcp

    model, net, _ = wrapped()
    shared = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(net.state_dict(), checkpoint_id=shared[0])
        expected = {name: local(value).clone() for name, value in net.state_dict().items()}
        with torch.no_grad():
            for param in net.parameters():
                local(param).zero_()
        state = net.state_dict()
        dcp.load(state, checkpoint_id=shared[0])
    model.module.load_state_dict(state)
    assert all(torch.equal(local(value), expected[name]) for name, value in net.state_dict().items())


@pytest.mark.ranks(size=4)
@pytest.mark.parametrize("drifts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_weights_are_compared_between_the_replicas(rank, size, drifts):
    model, net, mesh = wrapped()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
    tells = drifts and mesh.get_local_rank("tp") == 1
    message = r"up\.weight" if tells else None
    with pytest.warns(dpfuse.WeightsWarning, match=message) if tells else nullcontext():
        for step in range(70):  # each is hashed once in 64 steps
            optimizer.zero_grad()
            loss_of(model, words_of(mesh.get_local_rank("dp"), step)).backward()
            optimizer.step()
            if drifts and rank == 3:  # its part of one parameter alone
                with torch.no_grad():
                    local(net.up.weight).add_(1e-3)
    model.synchronize_weights()
    parts = [torch.empty_like(local(net.up.weight)) for _ in range(2)]
    dist.all_gather(parts, local(net.up.weight).detach().contiguous(), mesh["dp"].get_group())
    assert torch.equal(*parts)


@pytest.mark.ranks(size=4)
@pytest.mark.parametrize("face", ["DataParallel", pytest.param("views", marks=pytest.mark.slow)])
@pytest.mark.parametrize("trained", [False, True])
def test_a_copy_of_the_model_trains(rank, size, face, trained):
    mesh = mesh_of_four()
    model = FACES[face](made(Tied, mesh["tp"]), mesh)
    if trained:
        loss_of(model, words_of(mesh.get_local_rank("dp"), 0)).backward()
    model = copy.deepcopy(model)
    model.zero_grad()  # torch copies gradients that are DTensors, and no others
    loss_of(model, words_of(mesh.get_local_rank("dp"), 0)).backward()
    check_means(model.module, mean_of_one_process())


def mesh_scaler():
    """Return the class that the page shows."""
    page = ROOT / "docs/train/tensor_parallel.md"
    (block,) = (each for each in blocks_of(page) if "class MeshGradScaler" in each.text)
    names: dict[str, object] = {}
    exec(block.text, names)
    return names["MeshGradScaler"]


def overflow(net, mesh):
    """As where a product overflows in the part that the second rank of each tensor-parallel group has."""
    if mesh.get_local_rank("tp") == 1:
        net.up.weight.grad.to_local().fill_(float("inf"))


def trained_with(scaler, model, net, mesh, steps=4):
    """Return the scales, and which steps were made."""
    plain = [param for param in net.parameters() if not isinstance(param, DTensor)]
    divided = [param for param in net.parameters() if isinstance(param, DTensor)]
    optimizer = torch.optim.SGD([{"params": each} for each in (plain, divided) if each], lr=0.1)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        before = [local(param).detach().clone() for param in net.parameters()]
        scaler.scale(loss_of(model, words_of(mesh.get_local_rank("dp"), step))).backward()
        if step == 1:
            overflow(net, mesh)
        scaler.step(optimizer)
        scaler.update()
        seen.append((not all(map(torch.equal, before, map(local, net.parameters()))), scaler.get_scale()))
    return seen


@pytest.mark.one_in(2)
@pytest.mark.ranks(size=4)
@pytest.mark.parametrize("kind", [Tied, Everything])
def test_the_scaler_of_the_page_skips_on_all_ranks(rank, size, kind):
    """With every parameter a DTensor, of which the first is replicated, torch's scaler skips on some ranks only."""
    model, net, mesh = wrapped(kind)
    scaler = mesh_scaler()("cpu", mesh["tp"].get_group(), init_scale=4.0)
    seen = trained_with(scaler, model, net, mesh)
    assert seen == [(True, 4.0), (False, 2.0), (True, 2.0), (True, 2.0)]
    alone = made(kind)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in (0, 2, 3):
        optimizer.zero_grad()
        for replica in range(2):
            (loss_of(alone, words_of(replica, step)) / 2).backward()
        optimizer.step()
    for name, param in alone.named_parameters():
        torch.testing.assert_close(whole(net.get_parameter(name)), param, rtol=1e-4, atol=1e-5, msg=name)
