"""Paddle's data-parallel systems under Paddle's names, for PyTorch modules, optimizers and data loaders.

Read `data_parallel` first, then `distributed.fleet`. The high-level API is `model`. It builds on `batch_model` (one
batch), `stepper` (forward, backward, step), `loops` and `batches` (many batches), and `collectives` (exchange between
ranks). `static` has programs and executors, and is independent of the rest. `distributed`, `static`, `io`, `metric`
and `callbacks` are paths of Paddle's API. `counterparts` answers for the paths that are not here.
"""

from dpfuse.paddle import callbacks, distributed, io, metric, static
from dpfuse.paddle.counterparts import answer_imports, lacks
from dpfuse.paddle.data_parallel import DataParallel
from dpfuse.paddle.model import Model
from dpfuse.paddle.paddle_files import to_torch_state_dict
from dpfuse.paddle.serialization import load, save
from dpfuse.paddle.summary import summary

__all__ = [
    "DataParallel",
    "Model",
    "callbacks",
    "distributed",
    "io",
    "load",
    "metric",
    "save",
    "static",
    "summary",
    "to_torch_state_dict",
]

__getattr__ = lacks(__name__)
answer_imports()
