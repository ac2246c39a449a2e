"""Chooses the implementation of the operations: Triton kernels for CUDA tensors, torch's own operations elsewhere."""

from __future__ import annotations

import os

import torch

from dpfuse_kernels.pointer_table import PointerTable

__all__ = ["chooses_triton", "uses_triton"]

VARIABLE = "DPFUSE_KERNELS"


def uses_triton(table: PointerTable) -> bool:
    """Whether operations launch Triton kernels for this table.

    Tables on CUDA use Triton, others use torch's own operations. The environment variable DPFUSE_KERNELS (`triton`
    or `reference`) overrides that. On CPU tensors Triton needs TRITON_INTERPRET=1.

    Raises:
        ValueError: DPFUSE_KERNELS has another value.
    """
    if table.triton is None:
        table.triton = chooses_triton(table.flat.device)
    return table.triton


def chooses_triton(device: torch.device) -> bool:
    """Whether operations launch Triton kernels for tensors of a device; `uses_triton` says how that is chosen."""
    choice = os.environ.get(VARIABLE, "")
    if not choice:
        return device.type == "cuda"
    if choice not in ("triton", "reference"):
        raise ValueError(f"{VARIABLE} is {choice!r}, expected 'triton' or 'reference'. Correct it, or unset it.")
    return choice == "triton"
