"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def nccl(tmp_path):
    """A default NCCL group of this process alone, on the first GPU."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    dist.destroy_process_group()
