"""The part of Model that works on single batches: set up, train, evaluate and predict one. Knows no data set."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse import get_world_size, init_parallel_env
from dpfuse.paddle.batch_split import BatchSplit
from dpfuse.paddle.engine import Engine
from dpfuse.paddle.meters import Meters, as_list, to_numpy
from dpfuse.paddle.mode import network_mode

__all__ = ["BatchModel"]


class BatchModel:
    """Base of `Model`, where the arguments are described."""

    def __init__(self, network: nn.Module, inputs: Any = None, labels: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()) and get_world_size() > 1:
            init_parallel_env()
        self._engine = Engine(network)
        self._split = BatchSplit(inputs, labels, network.forward)
        self._meters = Meters(None, self._engine.device)
        self._measuring = False  # whether a loop is filling the meters
        self.mode = "train"  # or "eval", "test": what was done last
        self.stop_training = False  # set by a callback of any rank, ends fit after the epoch

    @property
    def network(self) -> nn.Module:
        """The bare module."""
        return self._engine.network

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has made its step with the last training batch, and waits for no more."""
        return self._engine.accumulated == 0

    def parameters(self) -> list[nn.Parameter]:
        """The network's parameters, for an optimizer."""
        return list(self.network.parameters())

    def prepare(self, optimizer: Any = None, loss: Any = None, metrics: Any = None, amp_configs: Any = None) -> None:
        """Say how to train and what to measure.

        Args:
            optimizer: of torch, over `parameters()`; needed to train.
            loss: a module or function of (*outputs, *labels) that returns one number, or several, which are added.
            metrics: one or a list, of Paddle's kind or of torchmetrics'.
            amp_configs: mixed precision: None or "O0" for none, "O1", or a dict with "level" and, for the loss scale,
                "init_loss_scaling", "incr_ratio", "decr_ratio", "incr_every_n_steps", "use_dynamic_loss_scaling".
                "O1" trains with autocast, forward and loss: float16 with a GradScaler on a GPU, bfloat16 without on
                the CPU. Evaluation stays in full precision.

        Raises:
            TypeError, ValueError: something that cannot be used.
        """
        meters = Meters(metrics, self._engine.device)
        self._engine.prepare(optimizer, loss, amp_configs)
        self._meters = meters

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> Any:
        """One training step on this rank's batch; every rank must call it.

        Args:
            inputs, labels: a tensor or array, or a list of them.
            update: False only adds to the gradients, without communication, for a later call with True.

        Returns:
            The losses as a list of arrays; with metrics (losses, what each metric's `update` returned).
        """
        engine = self._engine
        engine.check_ready()
        if engine.parallel is None:
            engine.wrap()
        self.mode = "train"
        with network_mode(self.network, training=True):
            targets = engine.to_device(as_list(labels))
            outputs, losses = engine.train(engine.to_device(as_list(inputs)), targets, update)
        return self._result(outputs, losses, targets)

    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """Loss and metrics of one batch of this rank; nothing is communicated. Returns as `train_batch`."""
        engine = self._engine
        self.mode = "eval"
        with network_mode(self.network, training=False), torch.no_grad():
            targets = engine.to_device(as_list(labels))
            outputs = engine.forward(engine.to_device(as_list(inputs)))
            return self._result(outputs, engine.losses(outputs, targets), targets)

    def predict_batch(self, inputs: Any) -> list[Any]:
        """The outputs for one batch of this rank, as arrays; nothing is communicated."""
        self.mode = "test"
        with network_mode(self.network, training=False):
            return [to_numpy(output) for output in self._engine.forward(self._engine.to_device(as_list(inputs)))]

    def _result(self, outputs: list[Tensor], losses: list[Tensor], labels: list[Tensor]) -> Any:
        updates = self._meters.update(outputs, labels)
        found = [to_numpy(loss) for loss in losses]
        return (found, updates) if len(self._meters) else found
