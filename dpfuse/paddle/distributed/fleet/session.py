"""The state of fleet: the strategy of `fleet.init`, and the models made since. Each `fleet.init` replaces it."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from dpfuse import DPFuseError, get_world_size, init_parallel_env
from dpfuse.arguments import flag
from dpfuse.paddle.checks import instance
from dpfuse.paddle.collectives import agree
from dpfuse.paddle.data_parallel import DataParallel
from dpfuse.paddle.distributed.fleet.gradient_merge import follow_optimizers
from dpfuse.paddle.distributed.fleet.merged_data_parallel import MergedDataParallel
from dpfuse.paddle.distributed.fleet.optimizer import DistributedOptimizer
from dpfuse.paddle.distributed.fleet.strategy import DistributedStrategy
from dpfuse.paddle.distributed.fleet.sync_batch_norm import SyncBatchNorm

__all__ = ["distributed_model", "distributed_optimizer", "init"]


class Session:
    """The strategy in force, a private copy, and the models made under it."""

    def __init__(self, strategy: DistributedStrategy) -> None:
        self.strategy = strategy
        self.models: WeakSet[DataParallel] = WeakSet()

    @property
    def k_steps(self) -> int:
        """Number of iterations per step."""
        return int(self.strategy.gradient_merge_configs["k_steps"]) if self.strategy.gradient_merge else 1


_session: Session | None = None


def init(
    role_maker: Any = None,
    is_collective: bool = False,
    strategy: DistributedStrategy | None = None,
    log_level: int | str = "INFO",
) -> None:
    """Join the job and set the strategy. Call it before models and optimizers are made.

    If the environment describes no job, the program runs on one process, with one warning. A second call replaces the
    strategy for all models and optimizers made after it.

    Args:
        role_maker: None, or `PaddleCloudRoleMaker(is_collective=True)`.
        is_collective: must be True if there is no role maker.
        strategy: settings; None means `DistributedStrategy()`. It is copied.
        log_level: of the logger "dpfuse"; a number of the module `logging`, or its name.

    Raises:
        ValueError: Parameter-server mode is requested, the log level is unknown, `dp_degree` is not the number of
            ranks, or the environment is invalid.
        TypeError: An argument has the wrong type.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from dpfuse.paddle.distributed import fleet
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> fleet.init(is_collective=True)
        >>> layer = torch.nn.Linear(4, 2)
        >>> optimizer = fleet.distributed_optimizer(torch.optim.SGD(layer.parameters(), lr=0.5))
        >>> model = fleet.distributed_model(layer)
        >>> model(torch.ones(3, 4)).mean().backward()
        >>> optimizer.step()
        >>> optimizer.clear_grad()
        >>> dist.destroy_process_group()

    Source: `paddle.distributed.fleet.init`.
    """
    global _session
    if role_maker is not None:
        is_collective = getattr(role_maker, "_is_collective", None)  # type: ignore[assignment]
        if is_collective is None:
            raise TypeError(f"role_maker must be a PaddleCloudRoleMaker or None, got {type(role_maker).__name__}")
    if not flag("is_collective", is_collective):
        raise ValueError(
            "fleet.init without is_collective=True asks for Paddle's parameter-server mode, which does not exist here; "
            "write fleet.init(is_collective=True), or pass PaddleCloudRoleMaker(is_collective=True)"
        )
    strategy = DistributedStrategy() if strategy is None else instance("strategy", strategy, DistributedStrategy)
    try:
        logging.getLogger("dpfuse").setLevel(log_level)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"log_level must be a level of the module logging, or its name, got {log_level!r:.100} of type "
            f"{type(log_level).__name__}; pass for example 'INFO'"
        ) from None
    init_parallel_env()
    degree, size = strategy.hybrid_configs["dp_degree"], get_world_size()
    if degree not in (-1, size):
        raise ValueError(
            f"strategy.hybrid_configs['dp_degree'] is {degree}, but the job has {size} ranks; leave it at -1"
        )
    _session = Session(copy.deepcopy(strategy))


def distributed_model(model: nn.Module) -> DataParallel:
    """Wrap a model so that its gradients are averaged over the ranks with the settings of the strategy.

    Args:
        model: the same on every rank, as for `dpfuse.paddle.DataParallel`. With `sync_batch_norm` its BatchNorm layers
            are replaced in place.

    Returns:
        The wrapper. On a single process it passes calls through.

    Raises:
        DPFuseError: `fleet.init` has not been called, or the ranks' strategies differ. Also the errors of
            `DataParallel`.

    Source: `paddle.distributed.fleet.distributed_model`.
    """
    session = _current()
    strategy = session.strategy
    agree(repr(strategy), "the strategy of fleet", "Set the same DistributedStrategy on every rank.")
    if strategy.sync_batch_norm and isinstance(model, nn.Module):
        on_cpu = all(param.device.type == "cpu" for param in model.parameters())
        # A separate group: a rank with unused parameters sends their buckets later than other ranks, so both kinds of
        # all-reduces have no common order. With NCCL several groups are a risk, so torch's layer keeps the default.
        own_group = dist.new_group() if dist.is_initialized() and on_cpu else None
        model = SyncBatchNorm.convert_sync_batchnorm(model, own_group)
    fuses = strategy.fuse_all_reduce_ops
    with warnings.catch_warnings():
        # fleet.init has already warned.
        warnings.filterwarnings("ignore", "there is no process group", UserWarning)
        wrapper = (MergedDataParallel if session.k_steps > 1 else DataParallel)(
            model,
            comm_buffer_size=strategy.fuse_grad_size_in_MB if fuses else 0,
            last_comm_buffer_size=strategy.last_comm_group_size_MB if fuses else 0,
            find_unused_parameters=strategy.find_unused_parameters,
            gradient_scale=None if strategy.gradient_scale_configs["scale_strategy"] == "avg" else 1.0,
            wire_dtype=torch.float16 if strategy.fp16_allreduce else None,
        )
    session.models.add(wrapper)
    return wrapper


def distributed_optimizer(
    optimizer: torch.optim.Optimizer, strategy: DistributedStrategy | None = None
) -> DistributedOptimizer:
    """Give a torch optimizer Paddle's methods, and gradient merging if the strategy has it.

    Args:
        optimizer: over the model's parameters. Call this function before or after `distributed_model`.
        strategy: replaces the strategy of `fleet.init`. It is copied.

    Returns:
        An optimizer that passes all calls to `optimizer`.

    Raises:
        TypeError: `optimizer` is no torch optimizer, or is already distributed; or `strategy` is no strategy.
        DPFuseError: `fleet.init` has not been called, or a model was made under another strategy.

    Source: `paddle.distributed.fleet.distributed_optimizer`.
    """
    session = _current()
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer that is not distributed yet, got {type(optimizer).__name__}"
        )
    if strategy is not None:
        instance("strategy", strategy, DistributedStrategy)
        if session.models and strategy != session.strategy:
            raise DPFuseError(
                f"distributed_optimizer got {strategy!r}, but distributed_model has wrapped a model with "
                f"{session.strategy!r}. Pass the strategy to fleet.init, or call distributed_optimizer first."
            )
        session.strategy = copy.deepcopy(strategy)
    wrapper = DistributedOptimizer(optimizer, session.k_steps, session.strategy.gradient_merge_configs["avg"])
    if session.k_steps > 1:
        for model in session.models:
            follow_optimizers(model)
    return wrapper


def _current() -> Session:
    if _session is None:
        raise DPFuseError("fleet has not been initialised; call fleet.init(is_collective=True) first")
    return _session
