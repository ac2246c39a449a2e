"""What a rank hands to its process group with a fixed number of micro-batches: bytes and calls, counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.comm import collective
from dpfuse.engine.exchanges import tree
from dpfuse.engine.micro_batches import MicroBatches
from tests.operations import Operations

COUNT = 8
PADDING = 4096  # bytes of a bucket beyond its gradients


class Counted:
    """Stands in for `dpfuse.comm.collective` in the exchange, and notes what the two collectives are given."""

    def __init__(self):
        self.sent, self.received, self.gathered = [], [], []

    def start_all_to_all(self, parts, flat, *others):
        self.sent.append(flat.nbytes)
        self.received.append(parts.nbytes)
        return collective.start_all_to_all(parts, flat, *others)

    together = staticmethod(collective.together)

    def start_all_gather_into(self, flat, part, group):
        self.gathered.append(flat.nbytes)
        return collective.start_all_gather_into(flat, part, group)


def counted(rank, size, dtype, buffer_size):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(60, 60) for _ in range(6))).to(dtype)
    sizes = {"comm_buffer_size": buffer_size, "last_comm_buffer_size": buffer_size}
    model = dpfuse.DataParallel(net, fixed_micro_batches=COUNT, **sizes)
    for _ in range(3):  # until buckets are rebuilt
        model.zero_grad()
        for _number in model.micro_batches():
            model(torch.ones(2, 60, dtype=dtype)).sum().backward()
    model.zero_grad()
    seen = tree.collective = Counted()
    try:
        with Operations() as done:
            for _number in model.micro_batches():
                model(torch.ones(2, 60, dtype=dtype)).sum().backward()
    finally:
        tree.collective = collective
    return {
        "elements": sum(param.numel() for param in model.parameters()),
        "buckets": len(model.bucket_plan.buckets),
        "sent": sum(seen.sent),
        "received": sum(seen.received),
        "gathered": sum(seen.gathered),
        "calls": (len(seen.sent), len(seen.gathered)),
        "all-reduces": done.names.count("allreduce_"),
        "all-to-alls": done.names.count("alltoall_base_"),
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("dtype", "buffer_size"), [(torch.float32, 0.03), (torch.bfloat16, 25)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_rank_sends_a_reduce_scatter_for_each_of_its_subtrees_and_one_all_gather(ranks, size, dtype, buffer_size):
    deal = MicroBatches(COUNT, size)
    most = max(len(deal.subtrees(rank)) for rank in range(size))
    everything = ranks(counted, dtype, buffer_size, size=size)
    for rank, facts in enumerate(everything):
        padding = PADDING * facts["buckets"]
        subtrees, elements = len(deal.subtrees(rank)), facts["elements"]
        assert 4 * elements * subtrees <= facts["sent"] <= (4 * elements + padding) * subtrees
        assert dtype.itemsize * elements <= facts["gathered"] <= dtype.itemsize * elements + padding
        assert facts["calls"] == (most * facts["buckets"], facts["buckets"])
        assert facts["all-to-alls"] == facts["calls"][0]
        assert facts["all-reduces"] <= 1  # the report
        assert (facts["buckets"] > 1) == (buffer_size < 1)
    assert sum(facts["received"] for facts in everything) == sum(facts["sent"] for facts in everything)
    assert most == (2 if size == 3 else 1)
