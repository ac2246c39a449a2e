"""replicate(): the module itself averages. Its gradients are those of torch's `replicate`, bit for bit."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel.distributed import _MixedPrecision

import dpfuse


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Block(), Block(), nn.Linear(6, 1))


def batch(rank, step=0):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_of(gradients):
    means = [gradient.clone() for gradient in gradients]
    for mean in means:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return means


def bare_mean(model, rank):
    """The gradients of a copy, averaged by hand."""
    model(batch(rank)).square().mean().backward()
    return mean_of(param.grad for param in model.parameters())


def train(model, rank, steps=4):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model(batch(rank, 2 * step + micro)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def of_torch(weight):
    return weight.to_local() if hasattr(weight, "to_local") else weight


@pytest.mark.parametrize("by_parts", [False, True], ids=["whole", "parts, then the whole"])
def test_it_trains_as_replicate_of_torch_bit_for_bit(rank, size, by_parts):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("replicate",))
    ours, theirs = net(), net()
    for model, replicate in ((ours, dpfuse.replicate), (theirs, torch_replicate)):
        for part in model[1:3] if by_parts else ():
            replicate(part, mesh=mesh)
        replicate(model, mesh=mesh)
        train(model, rank)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, of_torch(theirs.state_dict()[name])), name


def test_the_module_stays_the_same_object_with_hooks_that_run_once(rank, size):
    model, calls = net(), []
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    params, keys = list(model.parameters()), list(model.state_dict())
    assert dpfuse.replicate(model) is model
    assert isinstance(model, nn.Sequential)
    assert (type(model).__name__, type(model).__module__) == ("ReplicatedSequential", nn.Sequential.__module__)
    assert all(here is there for here, there in zip(model.parameters(), params, strict=True))
    assert list(model.state_dict()) == keys
    assert len(list(model.modules())) == len(list(net().modules()))
    model(batch(rank)).sum().backward()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("own_group", [False, True])
def test_parts_over_the_same_ranks_share_the_buckets_of_the_whole(rank, size, own_group):
    model = net()
    expected = bare_mean(net(), rank)
    over = {"process_group": dist.new_group()} if own_group else {}
    for part in model[1:3]:
        dpfuse.replicate(part, **over)
    dpfuse.replicate(model, **over)
    assert type(model[1]) is Block
    plan = model.replicated_by.bucket_plan
    assert sorted(spec.name for spec in plan.specs) == sorted(name for name, _ in model.named_parameters())
    with dpfuse.time_communication(model.replicated_by) as times:
        model(batch(rank)).square().mean().backward()
    assert times.collectives == len(plan.buckets)
    assert all(torch.equal(p.grad, mean) for p, mean in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("inner_first", [False, True], ids=["nested parts", "parts"])
def test_a_part_with_other_ranks_keeps_them(rank, size, inner_first):
    """As experts, which other ranks hold, too. Here the part's group has one rank: its gradients stay local."""
    model, alone = net(), [dist.new_group([other]) for other in range(size)][rank]
    local = net()
    local(batch(rank)).square().mean().backward()
    means = bare_mean(net(), rank)
    kept = model[1]
    if inner_first:  # inside a part that has the ranks of the whole
        dpfuse.replicate(kept, process_group=alone)
        dpfuse.replicate(model[2])
    else:
        dpfuse.replicate(kept.linear)  # joins the whole, although the part around it does not
        dpfuse.replicate(kept, process_group=alone)
    dpfuse.replicate(model)
    assert type(kept).__name__ == "ReplicatedBlock"
    model(batch(rank)).square().mean().backward()
    for (name, param), own, mean in zip(model.named_parameters(), local.parameters(), means, strict=True):
        is_local = name.startswith("1.") and (inner_first or "linear" not in name)
        assert torch.equal(param.grad, own.grad if is_local else mean), name


def test_a_failed_call_leaves_the_parts_as_they_were(rank, size):
    model = net()
    expected = bare_mean(nn.Sequential(*[copy.deepcopy(layer) for layer in net()]), rank)
    dpfuse.replicate(model[1])
    with pytest.raises(RuntimeError, match=re.escape("Only 1D device mesh is supported")):
        dpfuse.replicate(model, mesh=init_device_mesh("cpu", (1, size)))
    with pytest.raises(TypeError, match="no_such_option"):
        dpfuse.replicate(model, no_such_option=1)
    assert type(model[1]).__name__ == "ReplicatedBlock"
    model(batch(rank)).square().mean().backward()
    means = dict(zip([name for name, _ in model.named_parameters()], expected, strict=True))
    assert all(torch.equal(param.grad, means[f"1.{name}"]) for name, param in model[1].named_parameters())


def test_ignored_parameters_stay_local(rank, size):
    model, local = net(), net()
    expected = bare_mean(net(), rank)
    dpfuse.replicate(model, ignored_params={model[0].weight})
    for each in (model, local):
        each(batch(rank)).square().mean().backward()
    assert torch.equal(model[0].weight.grad, local[0].weight.grad)
    assert torch.equal(model[0].bias.grad, expected[1])
    assert "0.weight" not in {spec.name for spec in model.replicated_by.bucket_plan.specs}


def test_buffers_are_sent_once(rank, size):
    model = net()
    with torch.no_grad():
        model[1].norm.running_mean.fill_(rank)
    dpfuse.replicate(model)
    assert model[1].norm.running_mean.sum() == 0
    model(batch(rank)).sum().backward()
    means = [torch.empty(6) for _ in range(size)]
    dist.all_gather(means, model[1].norm.running_mean)
    assert not torch.equal(*means)


def test_mixed_precision_of_the_ddp_face(rank, size):
    model, wrapped = (
        net()[:1],
        dpfuse.DistributedDataParallel(net()[:1], mixed_precision=_MixedPrecision(torch.bfloat16)),
    )
    dpfuse.replicate(model, mixed_precision=_MixedPrecision(torch.bfloat16))
    outputs = [each(batch(rank)) for each in (model, wrapped)]
    for output in outputs:
        output.square().sum().backward()
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(*outputs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), wrapped.parameters(), strict=True))


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle])
def test_a_copy_is_bare(rank, size, way):
    model = net()
    dpfuse.replicate(model[1], process_group=dist.new_group())
    dpfuse.replicate(model)
    other = way(model)
    assert [type(each) for each in other.modules()] == [type(each) for each in net().modules()]
    other(batch(rank)).square().mean().backward()
    local = net()
    local(batch(rank)).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(other.parameters(), local.parameters(), strict=True))
    dpfuse.replicate(other)
    other.zero_grad()
    other(batch(rank)).square().mean().backward()
    expected = bare_mean(net(), rank)
    assert all(torch.equal(p.grad, mean) for p, mean in zip(other.parameters(), expected, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["compile()", "torch.compile"])
def test_it_is_compiled(rank, size, how):
    model, expected = net(), bare_mean(net(), rank)
    dpfuse.replicate(model)
    if how == "compile()":
        model.compile(backend="aot_eager")
    call = torch.compile(model, backend="aot_eager") if how == "torch.compile" else model
    for _ in range(2):
        model.zero_grad()
        for part in (model[1].norm, model[2].norm):
            part.reset_running_stats()
        call(batch(rank)).square().mean().backward()
        for param, mean in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, mean)


def test_an_error_in_the_forward_leaves_it_usable(rank, size):
    model, expected = net(), bare_mean(net(), rank)
    dpfuse.replicate(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(3, 5))
    model(batch(rank)).square().mean().backward()
    assert all(torch.equal(p.grad, mean) for p, mean in zip(model.parameters(), expected, strict=True))


def test_it_can_be_wrapped_by_hand_after_its_end(rank, size):
    """A module that is wrapped again is told about, as one inside a wrapper is."""
    model = dpfuse.replicate(net())
    with pytest.warns(UserWarning, match="wrapped twice: got a ReplicatedSequential"):
        dpfuse.DataParallel(model)


MISUSES = {
    "a class": (lambda: nn.Linear, TypeError, "module must be a torch.nn.Module, got the class Linear"),
    "a list": (lambda: [net()], TypeError, "module must be a torch.nn.Module, got list"),
    "twice": (lambda: dpfuse.replicate(net()), ValueError, "Sequential was replicated before, expected"),
    "a wrapper": (
        lambda: dpfuse.DataParallel(net()),
        TypeError,
        "module is a DataParallel, expected the module",
    ),
    "a script": (
        lambda: torch.jit.script(nn.Linear(2, 2)),
        TypeError,
        "expected one that TorchScript has not",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", MISUSES)
def test_what_cannot_be_replicated_is_named_on_each_rank(rank, size, what):
    make, error, message = MISUSES[what]
    module = make()
    with pytest.raises(error, match=re.escape(message)):
        dpfuse.replicate(module)
    # On one rank: the others do not wait for it.
    with pytest.raises((error, dpfuse.DPFuseError)) as caught:
        dpfuse.replicate(module if rank == 1 else net())
    assert message in str(caught.value)


def test_parameters_of_another_model_cannot_be_ignored(rank, size):
    with pytest.raises(ValueError, match=re.escape("ignored_params has 1 that are no parameters of this Sequential")):
        dpfuse.replicate(net(), ignored_params={nn.Parameter(torch.ones(1))})
