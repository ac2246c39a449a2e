"""Paddle's data-parallel systems under Paddle's names, on PyTorch modules, optimizers and data loaders."""

from dpfuse.paddle import callbacks, distributed, io, metric, static
from dpfuse.paddle.data_parallel import DataParallel
from dpfuse.paddle.model import Model
from dpfuse.paddle.serialization import load, save
from dpfuse.paddle.summary import summary

__all__ = ["DataParallel", "Model", "callbacks", "distributed", "io", "load", "metric", "save", "static", "summary"]
