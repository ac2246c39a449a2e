"""Others use the memory of parameters: views, other processes. They see what the plain optimizer lets them see."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpfuse
from dpfuse.sharded.held_memory import is_held
from tests.one_in import one_in
from tests.sharded.against_ddp import batch, bits_differ, network, trained_beside

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}
ALL = {"size": 2}


class NeedsWhole(torch.optim.SGD):
    needs_whole_tensors = True


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {}),
    "whole tensors": (NeedsWhole, {}),
    "in backward": (torch.optim.AdamW, {"step_in_backward": True}),
    "masters": (torch.optim.AdamW, {"master_dtype": torch.float32}),
}


def data(param: Tensor) -> Any:
    kept = param.data
    return lambda: kept


def view(param: Tensor) -> Any:
    kept = param.detach().view_as(param)
    return lambda: kept


def array(param: Tensor) -> Any:
    kept = param.detach().numpy()
    return lambda: torch.from_numpy(kept)


def storage(param: Tensor) -> Any:
    kept, offset, size, stride = param.untyped_storage(), param.storage_offset(), param.shape, param.stride()
    return lambda: torch.empty(0, dtype=param.dtype).set_(kept, offset, size, stride)


KEEPING = [data, view, array, storage]


def held_places(optimizer: Any) -> int:
    return sum(len(shard.flat_params.apart) for shard in optimizer._shards._shards)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("when", ["before", 0, 2])
@pytest.mark.parametrize("keep", KEEPING, ids=lambda one: one.__name__)
@pytest.mark.parametrize("face", FACES)
def test_what_a_program_keeps_is_what_it_trains(rank, size, face, keep, when):
    """It clamps parameters by what it keeps. Beside it torch's class and the plain optimizer do the same."""
    kept: dict[nn.Module, list[Any]] = {}

    def groups(module):
        if when == "before":
            kept[module] = list(map(keep, module.parameters()))
        return [{"params": [*module.parameters()]}]

    def around(step, model, optimizer):
        if step == when:
            kept[model.module] = list(map(keep, model.module.parameters()))
        for read in kept.get(model.module, ()):
            read().clamp_(-0.1, 0.1)

    differing, _, ours, _, sharded = trained_beside(
        torch.optim.AdamW, 5, groups=groups, around=around, face=FACES[face], lr=0.05
    )
    assert differing == []
    assert not bits_differ([read() for read in kept[ours.module]], [param.detach() for param in ours.parameters()])
    if when == "before":
        assert held_places(sharded) == len(kept[ours.module])


def train(kind: str, rank: int, keep: Any, dtype: torch.dtype, steps: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    """Clamp parameters by what was kept before all, or by what is read anew; return parameters and what was kept."""
    optimizer_class, options = KINDS[kind]
    model = dpfuse.DataParallel(network(dtype), comm_buffer_size=0.1, last_comm_buffer_size=0.02)
    params = [*model.module.parameters()]
    kept = [keep(param) for param in params] if keep is not None else []
    optimizer = dpfuse.ShardedOptimizer(model, optimizer_class, lr=0.05, **options)
    for step in range(steps):
        model(batch(step, rank, dtype)).square().mean().backward()
        if kind != "in backward":
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        for tensor in [read() for read in kept] if kept else [param.data for param in params]:
            tensor.clamp_(-0.1, 0.1)
    assert (held_places(optimizer) > 0) == bool(kept)
    return [param.detach() for param in params], [read() for read in kept]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", one_in(2, [data, storage]), ids=lambda one: one.__name__)
def test_each_kind_of_update_is_as_without_what_is_kept(rank, size, keep, kind):
    dtype = torch.bfloat16 if kind == "masters" else torch.float32
    params, kept = train(kind, rank, keep, dtype)
    alone, _ = train(kind, rank, None, dtype)
    assert not bits_differ(params, kept)
    assert not bits_differ(params, alone)


class Joined(torch.autograd.Function):
    """The tensor of which parts are views, without a copy."""

    @staticmethod
    def forward(ctx, whole, *parts):
        ctx.sizes = [len(part) for part in parts]
        return whole.detach().view_as(whole)

    @staticmethod
    def backward(ctx, grad):
        return None, *grad.split(ctx.sizes)


class Attention(nn.Module):
    """Its query, key and value weights are views of one tensor, with which the forward multiplies."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        whole = torch.randn(12, 6) * 0.4
        self.__dict__["whole"] = whole if fused else None
        self.q, self.k, self.v = (nn.Parameter(part) for part in whole.split(4))
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.q, self.k, self.v
        whole = torch.cat(parts) if self.whole is None else Joined.apply(self.whole, *parts)
        return self.out(torch.tanh(x @ whole.T))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("face", FACES)
def test_weights_that_are_views_of_one_tensor(rank, size, face, kind):
    optimizer_class, options = KINDS[kind]
    ends = []
    for fused in (True, False):
        model = FACES[face](Attention(fused=fused))
        optimizer = dpfuse.ShardedOptimizer(model, optimizer_class, lr=0.05, **options)
        for step in range(6):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([param.detach() for param in model.parameters()])
        assert held_places(optimizer) == 3  # also where only the three use that memory
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


def answer(net: nn.Module, pipe: Any) -> None:
    torch.set_num_threads(1)
    while pipe.recv():
        pipe.send([param.detach().clone().numpy() for param in net.parameters()])


@pytest.mark.parametrize("kind", one_in(5, KINDS))
@pytest.mark.parametrize("when", ["before", 0, 3])
def test_another_process_reads_the_weights(rank, size, when, kind):
    optimizer_class, options = KINDS[kind]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    here, there = multiprocessing.Pipe()

    def start():
        net.share_memory()
        process = multiprocessing.get_context("fork").Process(target=answer, args=(net, there), daemon=True)
        process.start()
        return process

    process = start() if when == "before" else None
    try:
        model = dpfuse.DataParallel(net)
        optimizer = dpfuse.ShardedOptimizer(model, optimizer_class, lr=0.05, **options)
        for step in range(5):
            if step == when:
                process = start()
            model(torch.full((2, 6), float(rank + step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        here.send(True)
        assert here.poll(20)
        seen = list(map(torch.from_numpy, here.recv()))
        here.send(False)
    finally:
        if process is not None:
            process.kill()
    assert not bits_differ(seen, [param.detach() for param in net.parameters()])


def test_memory_that_is_not_torchs_stays_in_use(rank, size):
    lent = multiprocessing.RawArray("f", 24)
    net = nn.Linear(6, 4)
    net.weight = nn.Parameter(torch.frombuffer(lent, dtype=torch.float32).view(4, 6))
    model = dpfuse.DataParallel(net)
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(torch.tensor(list(lent)).view(4, 6), torch.full((4, 6), -0.6))
    assert torch.equal(net.weight, torch.tensor(list(lent)).view(4, 6))


def test_a_parameter_gets_memory_of_another_that_is_used(rank, size):
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    one, other = model.module[0].weight, model.module[1].weight
    for step in range(4):
        model(torch.ones(2, 4)).sum().backward()
        if step == 3:
            kept = one.data
            one.data, other.data = other.data, one.data
            with pytest.raises(dpfuse.DPFuseError, match=r"'1.weight' got the memory of another parameter.*clone\(\)"):
                optimizer.step()
            assert kept is not None
        else:
            optimizer.step()
        optimizer.zero_grad()


def lent_by_numpy() -> Tensor:
    return torch.from_numpy(torch.ones(3).numpy())


def test_an_ordinary_parameter_is_moved():
    param = nn.Parameter(torch.ones(3))
    assert not is_held(param)
    loss = param.sum()
    loss.backward()
    assert not is_held(param)
    assert is_held(nn.Parameter(lent_by_numpy()))


def test_memory_that_was_sent_to_another_process(monkeypatch):
    """On a GPU, where torch has a table of it."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from dpfuse.sharded import held_memory

    param = nn.Parameter(torch.ones(3))
    monkeypatch.setattr(torch.UntypedStorage, "is_cuda", True)
    table: dict[Any, Any] = {}
    monkeypatch.setattr(held_memory, "shared_cache", table)
    assert not is_held(param)
    table["handle"] = StorageWeakRef(param.untyped_storage())
    assert is_held(param)
