"""Paddle's data-parallel systems under Paddle's names, on PyTorch modules, optimizers and data loaders."""

from dpfuse.paddle import distributed

__all__ = ["distributed"]
