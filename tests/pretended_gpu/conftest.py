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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known where these tests are named on the command line."""
    parser.addoption("--one-in", type=int, default=1, help="run one in so many of the tests that start ranks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the others."""
    count = config.getoption("--one-in", 1) if is_present() else 1
    own = [item for item in items if item.path.stem in ("test_two_ranks", "test_plants", "test_failing_calls")]
    left_out = {id(item) for place, item in enumerate(own) if place % count}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]
