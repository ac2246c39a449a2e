"""These tests run on the pretended device only, which `make test-pretended` builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one process run all tests that share a job: those of a face, or else of a file."""
    for item in items if is_present() else ():
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {job_of(params)}"))


def job_of(params: dict[str, Any]) -> str:
    """Return in which job a test needs its ranks; no text where it has none."""
    from tests.pretended_gpu.plants import PLANTS  # it imports dpfuse, which no other run of pytest needs here

    if "face" in params:
        return str(params["face"])
    if (name := params.get("name")) in PLANTS:
        return name if PLANTS[name].breaks else PLANTS[name].face
    return "ours" if "program" in params else ""
