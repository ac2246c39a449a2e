"""The process groups of torchft, a library for fault-tolerant training, and its way to send gradients by a hook."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse

pytest.importorskip("torchft", reason="torchft is not installed")


def store_address(rank):
    """Start a store on rank 0; return it, which must be kept, and its address."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor(0 if store is None else store.port)
    dist.broadcast(port, 0)
    return store, f"127.0.0.1:{port.item()}"


def train(wrap, rank):
    torch.manual_seed(3)
    model = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def test_jobs_over_torchfts_groups_train_bitwise_like_ddp_over_gloo(rank, size):
    from torchft.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroupDummy, ProcessGroupGloo

    store, address = store_address(rank)

    def joined(name):
        group = ProcessGroupGloo()
        group.configure(f"{address}/{name}", f"replica {rank}", rank, size)
        return group

    def by_hook(module):
        """As torchft's own wrapper does: the group of the wrapper is of one rank, and the hook sends."""
        group = joined("hook")

        def mean(state, bucket):
            buffer = bucket.buffer()
            group.allreduce([buffer], dist.AllreduceOptions()).wait()
            future = torch.futures.Future()
            future.set_result(buffer.div_(size))
            return future

        model = dpfuse.DistributedDataParallel(
            module, process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True
        )
        model.register_comm_hook(None, mean)
        return model

    wraps = {
        "by hook": by_hook,
        "torch's face": lambda module: dpfuse.DistributedDataParallel(module, process_group=joined("torch")),
        "Paddle's face": lambda module: dpfuse.DataParallel(module, group=joined("paddle")),
        "errors swallowed": lambda module: dpfuse.DistributedDataParallel(
            module, process_group=ErrorSwallowingProcessGroupWrapper(joined("swallowing"))
        ),
    }
    # torch's class refuses torchft's group of two ranks, so it trains over gloo's.
    expected = train(TorchDDP, rank)
    for name, wrap in wraps.items():
        assert all(map(torch.equal, train(wrap, rank), expected)), name
    dist.barrier()
    del store
