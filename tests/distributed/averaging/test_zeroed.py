"""Gradients that are zeroed in their place after a backward that every rank interrupted."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

import dpfuse
from tests.distributed.in_place import Net, batch, with_all_large


def zeroed_before_peers_send(rank, size, views, key):
    """Rank 0 zeroes while a bucket of its own is in flight, which the others send after that."""
    store = dist.distributed_c10d._get_default_store()
    model = dpfuse.DistributedDataParallel(
        Net(), bucket_cap_mb=1e-9, find_unused_parameters=True, gradient_as_bucket_view=views
    )
    for step in range(3):
        model.zero_grad(set_to_none=False)
        model(batch(rank, step, 4)).sum().backward()
    model.zero_grad(set_to_none=False)
    loss = model(batch(rank, 0, 4), True).sum()
    if rank:
        loss.register_hook(lambda _: store.wait([key], timedelta(seconds=30)))
    with pytest.raises(KeyError, match="planted"):
        loss.backward()
    model.zero_grad(set_to_none=False)
    store.set(key, "zeroed")
    model(batch(rank, 1, 4)).sum().backward()
    again = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    model(batch(rank, 1, 4)).sum().backward()
    for name, param in model.named_parameters():
        if param.grad is not None:
            assert torch.equal(again[name], param.grad), name


@pytest.mark.parametrize("views", [False, True])
def test_gradients_zeroed_after_an_interruption_stay_zero(ranks, views):
    ranks(with_all_large, zeroed_before_peers_send, views, f"zeroed-{uuid4()}")
