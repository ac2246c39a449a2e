"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


def pytest_addoption(parser):
    parser.addoption("--shard", default="0/1", help="1/4 is the second of four parts of the tests")


def pytest_collection_modifyitems(config, items):
    part, parts = map(int, config.getoption("--shard", "0/1").split("/"))
    config.hook.pytest_deselected(items=[item for number, item in enumerate(items) if number % parts != part])
    items[:] = items[part::parts]


@pytest.fixture
def nccl(tmp_path):
    """A default NCCL group of this process alone, on the first GPU."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    dist.destroy_process_group()
