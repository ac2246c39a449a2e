"""These tests run on the pretended device only, which `make test-pretended` builds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.pretended_gpu.device import is_present

if not is_present():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _rank() -> Iterator[None]:
    """This process is rank 0 of two. The other one is thought to hold what this one holds."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2, device_id=device)
    yield
    dist.destroy_process_group()
