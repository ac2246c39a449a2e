"""dpfuse: data-parallel gradient averaging for PyTorch through fused buckets.

The first use of a name imports the library and torch. `import dpfuse` alone imports neither, so a command that needs
no torch starts at once.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpfuse.version import __version__

if TYPE_CHECKING:
    from dpfuse.checkpoint import load_checkpoint, save_checkpoint
    from dpfuse.comm.memory_errors import OutOfMemoryError
    from dpfuse.data_parallel import DataParallel
    from dpfuse.ddp import DistributedDataParallel
    from dpfuse.ddp.patch import patch
    from dpfuse.ddp.replicate import replicate
    from dpfuse.engine.param_spec import ParamSpec
    from dpfuse.engine.plan import Bucket, BucketPlan, plan_buckets
    from dpfuse.errors import DPFuseError, DPFuseWarning, LoopWarning, WeightsWarning
    from dpfuse.grad_scaler import GradScaler
    from dpfuse.job import ParallelEnv, get_rank, get_world_size, init_parallel_env, spawn
    from dpfuse.manual.fused_allreduce import fused_allreduce_gradients
    from dpfuse.manual.replicas import reduce_replicas
    from dpfuse.measure.communication_times import CommunicationTimes
    from dpfuse.model.plan_file import load_plan
    from dpfuse.sharded import ShardedOptimizer
    from dpfuse.stopping.handlers import stop_on_signals
    from dpfuse.stopping.request import agree_to_stop, forget_stop
    from dpfuse.stopping.wish import StopReason, request_stop
    from dpfuse.tune import autotune
    from dpfuse.wrapper import time_communication

__all__ = [
    "Bucket",
    "BucketPlan",
    "CommunicationTimes",
    "DPFuseError",
    "DPFuseWarning",
    "DataParallel",
    "DistributedDataParallel",
    "GradScaler",
    "LoopWarning",
    "OutOfMemoryError",
    "ParallelEnv",
    "ParamSpec",
    "ShardedOptimizer",
    "StopReason",
    "WeightsWarning",
    "__version__",
    "agree_to_stop",
    "autotune",
    "forget_stop",
    "fused_allreduce_gradients",
    "get_rank",
    "get_world_size",
    "init_parallel_env",
    "load_checkpoint",
    "load_plan",
    "patch",
    "plan_buckets",
    "reduce_replicas",
    "replicate",
    "request_stop",
    "save_checkpoint",
    "spawn",
    "stop_on_signals",
    "time_communication",
]

# The modules that define these names, without `autotune`, which most programs never need.
_HOMES = {
    "dpfuse.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "dpfuse.comm.memory_errors": ("OutOfMemoryError",),
    "dpfuse.data_parallel": ("DataParallel",),
    "dpfuse.ddp": ("DistributedDataParallel",),
    "dpfuse.ddp.patch": ("patch",),
    "dpfuse.ddp.replicate": ("replicate",),
    "dpfuse.engine.param_spec": ("ParamSpec",),
    "dpfuse.engine.plan": ("Bucket", "BucketPlan", "plan_buckets"),
    "dpfuse.errors": ("DPFuseError", "DPFuseWarning", "LoopWarning", "WeightsWarning"),
    "dpfuse.grad_scaler": ("GradScaler",),
    "dpfuse.job": ("ParallelEnv", "get_rank", "get_world_size", "init_parallel_env", "spawn"),
    "dpfuse.manual.fused_allreduce": ("fused_allreduce_gradients",),
    "dpfuse.manual.replicas": ("reduce_replicas",),
    "dpfuse.measure.communication_times": ("CommunicationTimes",),
    "dpfuse.model.plan_file": ("load_plan",),
    "dpfuse.sharded": ("ShardedOptimizer",),
    "dpfuse.stopping.handlers": ("stop_on_signals",),
    "dpfuse.stopping.request": ("agree_to_stop", "forget_stop"),
    "dpfuse.stopping.wish": ("StopReason", "request_stop"),
    "dpfuse.wrapper": ("time_communication",),
}


def __getattr__(name: str) -> Any:
    """Return a public name, or a package inside. The first use of one imports all of them."""
    if name == "autotune":
        from dpfuse.tune import autotune

        return autotune
    if not name.startswith("_"):
        _import_all()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import_all() -> None:
    for module, names in _HOMES.items():
        try:
            home = import_module(module)
            found = {name: getattr(home, name) for name in names}
        except AttributeError as error:  # `hasattr` and `from dpfuse import` would hide the reason
            raise ImportError(f"{module} cannot be imported: {error}", name=module) from error
        for name, value in found.items():
            globals().setdefault(name, value)  # what a program has set itself stays


if os.environ.get("DPFUSE_TRACE"):  # made absolute now, since a program may change its folder later
    os.environ["DPFUSE_TRACE"] = os.path.abspath(os.environ["DPFUSE_TRACE"])
if os.environ.get("DPFUSE_STARTUP"):
    # A module of dpfuse acts after `import torch`. No part of dpfuse may be half imported when it does.
    import_module("torch")
