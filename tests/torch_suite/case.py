"""One of torch's tests on one rank, with torch's wrapper or with ours."""

from __future__ import annotations

import functools
import unittest
import warnings
from types import ModuleType

import torch
import torch.distributed as dist

import dpfuse
from tests.torch_suite import without_gpu

__all__ = ["FACES", "WORLD_SIZE", "run_test"]

WORLD_SIZE = 2
FACES = {"torch": torch.nn.parallel.DistributedDataParallel, "dpfuse": dpfuse.DistributedDataParallel}


@functools.cache
def load_tests() -> ModuleType:
    """torch's tests, and both wrappers, for processes without GPU."""
    tests = without_gpu.load(WORLD_SIZE)
    for cls in FACES.values():
        without_gpu.drop_devices(cls)
    return tests


def run_test(rank: int, size: int, name: str, face: str) -> None:
    """The test `name` of torch's module; raises what the test raises.

    Args:
        rank: of this process.
        size: `WORLD_SIZE`.
        name: of the test's function.
        face: `"torch"` or `"dpfuse"`: which class the test wraps with.
    """
    tests = load_tests()
    from torch.testing._internal import common_utils

    class Case(tests.DistributedTest._DistTestBase, common_utils.TestCase):
        world_size = str(size)

        def _barrier(self, timeout: float = 0, wait_for: int = 0) -> None:
            dist.barrier()

    without_gpu.use(FACES[face], tests)
    case = Case(name)
    case.rank = rank
    common_utils.set_rng_seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            getattr(case, name)()
        except unittest.SkipTest as skip:
            raise AssertionError(f"skipped: {skip}") from None
    dist.barrier()
