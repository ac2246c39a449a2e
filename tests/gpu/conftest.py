"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist


def pytest_collection_modifyitems(config, items):
    """Keep one part of the tests: DPFUSE_TEST_SHARD=1/4 is the second of four. Other processes run the others."""
    part, _, parts = os.environ.get("DPFUSE_TEST_SHARD", "0/1").partition("/")
    left_out = [item for number, item in enumerate(items) if number % int(parts) != int(part)]
    items[:] = [item for number, item in enumerate(items) if number % int(parts) == int(part)]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def nccl(tmp_path):
    """A default NCCL group of this process alone, on the first GPU."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    dist.destroy_process_group()
