"""dpfuse: data-parallel gradient averaging for PyTorch through fused buckets."""

from typing import TYPE_CHECKING, Any

from dpfuse.checkpoint import load_checkpoint, save_checkpoint
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
from dpfuse.stopping.knowledge import agree_to_stop, forget_stop
from dpfuse.stopping.reason import StopReason
from dpfuse.stopping.wish import request_stop
from dpfuse.version import __version__
from dpfuse.wrapper import time_communication

if TYPE_CHECKING:
    from dpfuse.tune import autotune

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


def __getattr__(name: str) -> Any:
    if name == "autotune":  # with all of dpfuse.tune, which most programs never need
        from dpfuse.tune import autotune

        return autotune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
