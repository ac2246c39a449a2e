"""Parameters that are on their way: each use waits for them, and gets the new values."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import time
import warnings

import pytest
import torch
from torch import nn, optim

import dpfuse
from dpfuse.errors import DPFuseError
from dpfuse.sharded.pending import Pending
from tests.sharded.against_ddp import batch, bits_differ, network

LATE = 0.2  # seconds by which rank 1 begins its step later


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def params(model):
    return list(model.module.parameters())


def averaged(model):
    shadow = [torch.zeros_like(param) for param in params(model)]
    torch._foreach_lerp_(shadow, params(model), 1.0)
    return flat(shadow)


def into_vector(model):
    return nn.utils.parameters_to_vector(model.module.last.parameters())


def saved(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    return flat(state[name] for name, _ in model.module.named_parameters())


def compiled(model):
    """The last layer, compiled, of a vector of ones."""
    return torch.compile(model.module.last, backend="eager")(torch.ones(1, 177))


def called(model):
    with torch.no_grad():
        return model.module.last(torch.ones(1, 177))


READS = {
    "detach": lambda model: flat(params(model)),
    "data": lambda model: torch.cat([param.data.flatten() for param in params(model)]),
    "numpy": lambda model: torch.cat([torch.from_numpy(param.detach().numpy()).flatten() for param in params(model)]),
    "clone": lambda model: torch.cat([param.clone().flatten() for param in params(model)]),
    "storage": lambda model: torch.cat(
        [
            torch.tensor([]).set_(p.untyped_storage(), p.storage_offset(), p.size(), p.stride()).flatten()
            for p in params(model)
        ]
    ),
    "state dict": lambda model: flat(
        model.module.state_dict(keep_vars=True)[n] for n, _ in model.module.named_parameters()
    ),
    "torch.save": saved,
    "deepcopy": lambda model: flat(copy.deepcopy(model.module).parameters()),
    "deepcopy of one": lambda model: flat(copy.deepcopy(param) for param in params(model)),
    "pickle": lambda model: flat(pickle.loads(pickle.dumps(param)) for param in params(model)),
    "moving average": averaged,
    "vector": into_vector,
    "lists": lambda model: torch.cat([torch.tensor(param.tolist()).flatten() for param in params(model)]),
    "in place": lambda model: torch.cat([param.data.mul_(1).flatten() for param in params(model)]),
    "functional call": lambda model: torch.func.functional_call(
        model.module.last, dict(model.module.last.named_parameters()), (torch.ones(1, 177),)
    ),
    "forward": called,
    "compiled": compiled,
}


def read(rank, size, name, gather):
    """What a program reads at once after a step, on the rank that is early."""
    torch.manual_seed(0)
    model = dpfuse.DataParallel(network(), comm_buffer_size=0.1, last_comm_buffer_size=0.02)
    optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, lr=0.1, gather=gather)
    waited = False
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank, torch.float32)).square().mean().backward()
        if rank and step == 2:
            time.sleep(LATE)
        optimizer.step()
        waited = any(type(param) is not nn.Parameter for param in params(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return READS[name](model).detach().clone(), waited


QUICK = ("numpy", "state dict", "deepcopy", "in place", "forward")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in READS]
)
def test_every_use_gets_the_new_values(ranks, name):
    late, early = ranks(read, name, "forward"), ranks(read, name, "step")
    assert [waited for _, waited in late + early] == [True, True, False, False]
    values = [value for value, _ in late + early]
    assert all(torch.equal(value, values[0]) for value in values)


def test_nothing_waits_before_numbers_are_read():
    layer = nn.Linear(3, 2)
    calls = []
    pending = Pending(list(layer.parameters()), lambda: calls.append(1))
    layer.zero_grad()
    assert layer.weight.shape == (2, 3)
    assert layer.weight.requires_grad
    assert layer.weight.grad is None
    assert isinstance(layer.weight, nn.Parameter)
    assert calls == []
    layer(torch.ones(1, 3))
    assert calls == [1]
    assert [type(param) for param in layer.parameters()] == [nn.Parameter] * 2
    assert vars(layer.weight) == {}
    pending.finish()
    assert calls == [1]


def test_a_class_of_the_program_is_not_replaced():
    class Own(nn.Parameter):
        pass

    params, calls = [nn.Parameter(torch.ones(2)), Own(torch.ones(2))], []
    Pending(params, lambda: calls.append(1))
    assert calls == [1]
    assert [type(param) for param in params] == [nn.Parameter, Own]


def test_a_gathering_that_fails_is_raised_by_the_first_use_and_leaves_parameters_behind():
    def fail():
        raise RuntimeError("planted")

    layer = nn.Linear(3, 2)
    Pending(list(layer.parameters()), fail)
    with pytest.raises(RuntimeError, match="planted"):
        layer(torch.ones(1, 3))
    assert type(layer.weight) is nn.Parameter


def scripted(rank, size, make):
    """Whether each forward of TorchScript, which reads in C++, had the weights of the plain optimizer."""
    losses = []
    for sharded in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 8))
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(rank))
        model = dpfuse.DataParallel(torch.jit.script(net) if make == "script" else torch.jit.trace(net, x))
        optimizer = (
            dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1, gather="forward")
            if sharded
            else optim.SGD(model.parameters(), lr=0.1)
        )
        found = []
        for _ in range(5):
            loss = model(x).square().mean()
            found.append(loss.item())
            loss.backward()
            if rank and sharded:
                time.sleep(LATE / 10)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(found)
    return losses


@pytest.mark.parametrize("make", ["script", "trace"])
@pytest.mark.filterwarnings("ignore")
def test_torchscript_waits_for_all_parameters(ranks, make):
    for ours, theirs in ranks(scripted, make):
        assert ours == pytest.approx(theirs, rel=1e-5)


def addressed(rank, size):
    """The numbers at the address of a weight, which a kernel would read, and the weight after all have come."""
    model = dpfuse.DataParallel(network())
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1, gather="forward")
    loss = model(batch(0, rank, torch.float32)).square().mean()
    loss.backward()
    if rank:
        time.sleep(LATE)
    optimizer.step()
    weight = model.module.second.weight
    nbytes = 4 * 300 * 177
    found = torch.frombuffer(bytearray(ctypes.string_at(weight.data_ptr(), nbytes)), dtype=torch.float32)
    return bits_differ([found], [weight.detach().flatten()])


def test_a_read_of_an_address_waits(ranks):
    assert ranks(addressed) == [False, False]


def saved_by_others(rank, size, folder):
    """The names in the file of a library that leaves out tensors which share a storage."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = dpfuse.DataParallel(network())
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    model(batch(0, rank, torch.float32)).square().mean().backward()
    optimizer.step()
    path = f"{folder}/{rank}.safetensors"
    safetensors.save_model(model.module, path)
    loaded = safetensors.load_file(path)
    return bits_differ([*model.module.state_dict().values()], [loaded[key] for key in model.module.state_dict()])


def test_each_parameter_has_a_storage_of_its_own(ranks, tmp_path):
    pytest.importorskip("safetensors")
    assert ranks(saved_by_others, str(tmp_path)) == [False, False]


def test_a_lookup_of_a_state_is_an_error(rank, size):
    model = dpfuse.DataParallel(network())
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    with pytest.raises(DPFuseError, match=r"state of a parameter was read in .*Call state_dict\(\) on every rank"):
        optimizer.state[model.module.scale]
