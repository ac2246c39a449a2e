"""Kernel tests run in Triton's interpreter, on CPU tensors full of NaN where nothing was written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
import triton

from dpfuse_kernels import launcher


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Set for the test only, and the compiled kernels forgotten: tests on a GPU may run in the same process.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DPFUSE_KERNELS", "triton")
    launcher.jit.cache_clear()
    # Whoever imported Triton's own functions earlier, has them compiled, not interpreted.
    language = pytest.importorskip("triton.language")
    for name in ("sum", "max"):
        monkeypatch.setattr(language, name, triton.jit(getattr(language, name).fn))
    # numpy computes the interpreter's masked lanes, too, and would warn of what they hold.
    with numpy.errstate(all="ignore"):
        yield
    launcher.jit.cache_clear()


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_strided = torch.empty_strided

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty_strided(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty_strided", poisoned)


@pytest.fixture
def usual_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations choose as they do for users: torch's own operations for CPU tensors."""
    monkeypatch.delenv("DPFUSE_KERNELS")
