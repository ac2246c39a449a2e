"""Other libraries' wrappers take part only if their gradients are proved, and rules make the buckets that they say."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from bench.equality import prove_peer
from bench.models import Workload, layers
from bench.peer_rules import FUSION_THRESHOLD, deepspeed_plan, horovod_plan
from bench.peers import Peer, peers
from dpfuse.tune import CostTable, Timeline


class Unaveraged(Peer):
    """A wrapper that sends nothing."""

    def gradients(self) -> list[Tensor]:
        return [param.grad for param in self.module.parameters()]


class Stale(Unaveraged):
    """A wrapper that averages in its first backward, and forgets the later ones."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.backwards = 0

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.backwards += 1
        for param in self.module.parameters():
            if self.backwards == 1:
                dist.all_reduce(param.grad.mul_(0.5))


def prove_all_peers(rank: int, size: int) -> dict[str, str]:
    torch.manual_seed(rank)
    workload = layers(3, 5)
    for param in workload.module.parameters():
        dist.broadcast(param.data, 0)
    texts = {}
    for name, wrap in {**peers(size), "unaveraged": Unaveraged, "stale": Stale}.items():
        try:
            prove_peer(name, wrap(copy.deepcopy(workload.module)), workload)
            texts[name] = "proved"
        except AssertionError as error:
            texts[name] = str(error)
        dist.barrier()
    return texts


@pytest.mark.parametrize("size", [2, 3])
def test_every_peer_averages_and_a_wrapper_that_does_not_is_caught(ranks, size):
    for texts in ranks(prove_all_peers, size=size):
        assert texts.pop("unaveraged") == "unaveraged: the gradients are not the mean over the ranks"
        assert texts.pop("stale") == "stale: the gradients are not the mean over the ranks"
        assert {"FSDP2 replicate", "FSDP2 sharded, gathered once"} <= texts.keys()
        assert set(texts.values()) == {"proved"}


def test_a_peer_must_say_where_its_gradients_are():
    module = nn.Linear(2, 1)
    with pytest.raises(NotImplementedError):
        prove_one(Peer(module), Workload(module, lambda model: model(torch.ones(1, 2)).sum()))


def prove_one(peer: Peer, workload: Workload) -> None:
    peer.backward(workload.loss(peer))
    peer.gradients()


def backward(count: int, seconds: float, numel: int = 250) -> Timeline:
    return Timeline.synthetic([dpfuse.ParamSpec(f"w{n}", (numel,), "float32") for n in range(count)], seconds)


def test_horovod_fuses_what_is_ready_when_its_thread_looks():
    # A gradient every 0.5 ms. The thread looks after 1, 2 and 3 ms, because a message takes less than a cycle.
    quick = horovod_plan(backward(6, 0.003), CostTable.affine(1e-4, 1e9))
    assert [bucket.params for bucket in quick.buckets] == [(4, 5), (2, 3), (0, 1)]
    # A message of 2.5 ms delays the second look to 3.5 ms, when all other gradients are ready.
    slow = horovod_plan(backward(6, 0.003), CostTable.affine(2.5e-3, 1e12))
    assert [bucket.params for bucket in slow.buckets] == [(4, 5), (0, 1, 2, 3)]


def test_horovod_sends_no_more_than_its_buffer_holds_at_once():
    third = FUSION_THRESHOLD // 4 // 3 + 1
    plan = horovod_plan(backward(4, 1e-4, third), CostTable.affine(0, 1e12))
    assert [bucket.params for bucket in plan.buckets] == [(2, 3), (0, 1)]


def test_horovod_does_not_fuse_dtypes():
    specs = [dpfuse.ParamSpec(f"w{n}", (4,), dtype) for n, dtype in enumerate(["float32", "bfloat16", "bfloat16"])]
    plan = horovod_plan(Timeline.synthetic(specs, 1e-4), CostTable.affine(0, 1e9))
    assert [bucket.params for bucket in plan.buckets] == [(1, 2), (0,)]


def test_deepspeed_sends_one_bucket_after_backward():
    plan = deepspeed_plan(backward(6, 0.003), CostTable.affine(1e-4, 1e9))
    assert [bucket.params for bucket in plan.buckets] == [(0, 1, 2, 3, 4, 5)]
