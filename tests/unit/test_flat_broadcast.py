"""Where the bytes of a broadcast travel, if the group has a back end for CPUs beside that of GPUs."""

from __future__ import annotations

import pytest
import torch

from dpfuse.comm import flat_broadcast
from dpfuse.comm.abilities import Abilities


@pytest.mark.parametrize("nccl", [True, False])
def test_they_stay_on_the_gpu_where_nccl_takes_them(group, nccl, monkeypatch):
    elsewhere = torch.device("meta")
    monkeypatch.setattr(flat_broadcast, "abilities_of", lambda group, device: Abilities(on_streams=nccl))
    monkeypatch.setattr(flat_broadcast, "group_device", lambda group: elsewhere)
    tensors = [torch.arange(3.0), torch.ones(2, 2)]
    broadcast = flat_broadcast.FlatBroadcast(tensors, group)
    assert broadcast._device == (tensors[0].device if nccl else elsewhere)
    if nccl:
        broadcast(0)
        assert tensors[0].tolist() == [0, 1, 2]


def test_a_counter_that_got_other_memory_is_sent_from_there(group):
    counter = torch.tensor(1)
    broadcast = flat_broadcast.FlatBroadcast([counter, torch.ones(2)], group)
    broadcast.stage()
    counter.data = torch.tensor(2)
    broadcast.stage()
    assert broadcast.values[0].item() == 2
