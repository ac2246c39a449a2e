"""Fixtures of the tests of the Paddle wing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dpfuse.paddle import static


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two CPU devices unless a test says otherwise, a scope of its own, and the same weights in each run."""
    monkeypatch.setenv("CPU_NUM", "2")
    torch.manual_seed(0)
    with static.scope_guard(static.Scope()):
        yield


@pytest.fixture
def exe() -> static.Executor:
    """An executor on one device."""
    torch.manual_seed(0)
    return static.Executor("cpu")
