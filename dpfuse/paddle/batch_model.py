"""The part of Model that works on single batches: prepare, train, evaluate and predict. Knows no data set."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse import get_world_size, init_parallel_env
from dpfuse.paddle.batch_split import BatchSplit
from dpfuse.paddle.meters import Meters, as_list, to_numpy
from dpfuse.paddle.mode import network_mode
from dpfuse.paddle.stepper import Stepper

__all__ = ["BatchModel"]


class BatchModel:
    """Base of `Model`, where the arguments are described."""

    def __init__(self, network: nn.Module, inputs: Any = None, labels: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()) and get_world_size() > 1:
            init_parallel_env()
        self._stepper = Stepper(network)
        self._split = BatchSplit(inputs, labels, network.forward)
        self._meters = Meters(None, self._stepper.device)
        self._measuring = False  # whether a loop is filling the meters
        self.mode = "train"  # or "eval", "test": the last use
        self.stop_training = False  # a callback of any rank may set it; fit then ends after the epoch

    @property
    def network(self) -> nn.Module:
        """The bare module."""
        return self._stepper.network

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has made a step with the last training batch, and does not wait for more batches."""
        return self._stepper.accumulated == 0

    def parameters(self) -> list[nn.Parameter]:
        """The network's parameters, for an optimizer."""
        return list(self.network.parameters())

    def prepare(self, optimizer: Any = None, loss: Any = None, metrics: Any = None, amp_configs: Any = None) -> None:
        """Set the optimizer, the loss, the metrics and the precision.

        Args:
            optimizer: of torch, over `parameters()`; needed to train.
            loss: a module or function of (*outputs, *labels) that returns one number, or several, which are added.
            metrics: one or a list, of Paddle's kind or of torchmetrics'.
            amp_configs: mixed precision: None or "O0" for none, "O1", or a dict with "level" and, for the loss scale,
                "init_loss_scaling", "incr_ratio", "decr_ratio", "incr_every_n_steps", "use_dynamic_loss_scaling".
                "O1" runs forward and loss of training under autocast: float16 with a GradScaler on a GPU, bfloat16
                without one on the CPU. Evaluation stays in full precision.

        Raises:
            TypeError, ValueError: An argument cannot be used.
        """
        meters = Meters(metrics, self._stepper.device)
        self._stepper.prepare(optimizer, loss, amp_configs)
        self._meters = meters

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> Any:
        """Train on this rank's batch. Every rank must call it.

        Args:
            inputs, labels: a tensor or array, or a list of them.
            update: False only adds to the gradients, without communication. A later call with True uses them.

        Returns:
            The losses as a list of arrays. With metrics (losses, the results of each metric's `update`).
        """
        stepper = self._stepper
        stepper.check_ready()
        if stepper.parallel is None:
            stepper.wrap()
        self.mode = "train"
        with network_mode(self.network, training=True):
            targets = stepper.to_device(as_list(labels), "labels hold")
            outputs, losses = stepper.train(stepper.to_device(as_list(inputs), "inputs hold"), targets, update)
        return self._result(outputs, losses, targets)

    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """Return loss and metrics of one batch of this rank, as `train_batch` does, without communication."""
        stepper = self._stepper
        self.mode = "eval"
        with network_mode(self.network, training=False), torch.no_grad():
            targets = stepper.to_device(as_list(labels), "labels hold")
            outputs = stepper.forward(stepper.to_device(as_list(inputs), "inputs hold"))
            return self._result(outputs, stepper.losses(outputs, targets), targets)

    def predict_batch(self, inputs: Any) -> list[Any]:
        """Return the outputs for one batch of this rank as arrays, without communication."""
        self.mode = "test"
        with network_mode(self.network, training=False):
            return [
                to_numpy(output)
                for output in self._stepper.forward(self._stepper.to_device(as_list(inputs), "inputs hold"))
            ]

    def _result(self, outputs: list[Tensor], losses: list[Tensor], labels: list[Tensor]) -> Any:
        updates = self._meters.update(outputs, labels)
        found = [to_numpy(loss) for loss in losses]
        return (found, updates) if len(self._meters) else found
