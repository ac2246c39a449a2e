"""Options of the benchmark suites."""

from __future__ import annotations

import pytest

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dpfuse")
    group.addoption("--gpu", action="store_true", help="time on CUDA devices instead of the CPU")
    group.addoption("--quick", action="store_true", help="few rounds: shows that everything runs, proves little")
    group.addoption("--model", help="package.module:function for bench_bucket_size: returns (module, loss)")
    group.addoption("--comm-buffer-sizes", help="comma-separated MB for bench_bucket_size")
    group.addoption("--last-comm-buffer-sizes", help="comma-separated MB for bench_bucket_size")
