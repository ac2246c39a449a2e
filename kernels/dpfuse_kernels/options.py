"""Checks the optional arguments of packing: factor and residual."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfuse_kernels.layout import Layout

__all__ = ["check_factor", "check_options", "check_residual"]


def check_options(table: Layout, factor: Tensor | None, residual: Tensor | None) -> None:
    """Raise ValueError for a factor or a residual that does not fit this table."""
    if factor is not None:
        check_factor(factor, table.flat.device)
    if residual is not None:
        check_residual(residual, table.elements, table.flat.device, of=table.flat.dtype)


def check_factor(factor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless `factor` is a float32 scalar on `device`."""
    if factor.dim() or factor.dtype != torch.float32 or factor.device != device:
        raise ValueError(
            f"factor is {_described(factor)}, expected torch.float32 of shape () on {device}: the kernel reads it "
            f"there. Make it with torch.tensor(value, device='{device}')."
        )


def check_residual(residual: Tensor, numel: int, device: torch.device, *, of: torch.dtype) -> None:
    """Raise ValueError unless `residual` is [numel] float32 on `device` and fits a buffer of dtype `of`."""
    if of == torch.float64:
        raise ValueError(
            "residual was given for a buffer of torch.float64, expected float16, bfloat16 or float32: a float32 cannot "
            "hold the rounding error of a float64. Leave residual out."
        )
    fits = residual.shape == (numel,) and residual.dtype == torch.float32 and residual.is_contiguous()
    if not fits or residual.device != device:
        raise ValueError(
            f"residual is {_described(residual)}, expected contiguous torch.float32 of shape {(numel,)} on {device}. "
            f"Make it with torch.zeros({numel}, device='{device}')."
        )
    if of == torch.uint8 and residual.data_ptr() % 16:
        raise ValueError(
            f"residual lies at address {residual.data_ptr():#x}, expected a multiple of 16: kernels move 128 bits "
            "at a time. Pass a whole tensor, or a slice that starts at a multiple of 4 elements."
        )


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
