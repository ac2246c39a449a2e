"""Runs Model's steps: one network with its wrapper, optimizer, loss and precision. Knows no loader."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import dpfuse
from dpfuse import DPFuseError
from dpfuse.paddle.checks import instance
from dpfuse.paddle.collectives import any_rank, broadcast, world_size
from dpfuse.paddle.data_parallel import DataParallel
from dpfuse.paddle.precision import MixedPrecision
from dpfuse.paddle.schedules import Schedules

__all__ = ["Stepper"]


class Stepper:
    """Runs forward, backward and optimizer steps of one network on this rank's device.

    On several ranks a DataParallel around the network averages its gradients. A network on the CPU is moved to the
    current GPU if there is one.
    """

    def __init__(self, network: nn.Module) -> None:
        instance("network", network, nn.Module, "pass an instance of torch.nn.Module")
        if isinstance(network, (dpfuse.DataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise TypeError(
                f"network is wrapped in {type(network).__name__} already; expected the bare module, which Model wraps "
                "itself. Pass network.module."
            )
        self.network = network
        first = next(iter([*network.parameters(), *network.buffers()]), None)
        self.device = torch.device("cpu") if first is None else first.device
        if self.device.type == "cpu" and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
            network.to(self.device)
        self.optimizer: torch.optim.Optimizer | None = None
        self.loss: Any = None
        self.precision = MixedPrecision(enabled=False)
        self.accumulated = 0  # backwards since the last step
        self.epochs = 0  # trained epochs
        self.schedules = Schedules()
        self.parallel: DataParallel | None = None
        self._known: list[nn.Parameter] = []  # references, so that no new parameter gets an id of these
        self._known_as: list[tuple[Any, ...]] | None = None
        self.wrap()

    def wrap(self) -> None:
        """Give all ranks rank 0's network, and wrap it for its trainable parameters. Every rank must call it.

        If the parameters have not changed, ranks only exchange that fact.
        """
        if world_size() == 1:
            return
        params = dict(self.network.named_parameters())
        facts = [(name, id(param), param.dtype, param.requires_grad) for name, param in params.items()]
        if not any_rank(facts != self._known_as, "the check for changes of the network"):
            return
        self.parallel = None  # removes its hooks from the parameters
        # If only some ranks have frozen a parameter, the wrapper raises on all ranks. So all of them must wrap.
        if any_rank(any(param.requires_grad for param in params.values()), "the check for trainable parameters"):
            self.parallel = DataParallel(self.network)
        else:
            broadcast([*params.items(), *self.network.named_buffers()], "the ranks' network")
        self._known, self._known_as = list(params.values()), facts

    def share_buffers(self) -> None:
        """Give all ranks the buffers (running statistics) of rank 0. Every rank must call it."""
        broadcast(self.network.named_buffers(), "the list of the network's buffers")

    def prepare(self, optimizer: Any, loss: Any, amp_configs: Any) -> None:
        """Check and set optimizer, loss and precision."""
        closure = None
        if optimizer is not None:
            instance("optimizer", optimizer, torch.optim.Optimizer, "pass a torch.optim.Optimizer")
            closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError(
                f"optimizer: {type(optimizer).__name__} needs a closure that computes the loss again, which Model does "
                "not have; expected an optimizer that steps without a closure, such as torch.optim.SGD. Or write the "
                "loop yourself, with dpfuse.DataParallel."
            )
        if loss is not None and (isinstance(loss, type) or not callable(loss)):
            raise TypeError(
                f"loss must be a module or a function of outputs and labels, got {loss!r}; pass an instance"
            )
        if isinstance(loss, nn.Module):
            if world_size() > 1 and any(param.requires_grad for param in loss.parameters()):
                raise ValueError(
                    f"the loss {type(loss).__name__} has trainable parameters. Their gradients would not be averaged "
                    "over the ranks; make it a part of the network"
                )
            loss.to(self.device)
        precision = MixedPrecision.from_configs(amp_configs, self.device)
        self.optimizer, self.loss, self.precision = optimizer, loss, precision

    def check_ready(self) -> None:
        """Raise DPFuseError if the optimizer or the loss is missing."""
        if self.optimizer is None or self.loss is None:
            raise DPFuseError("training needs an optimizer and a loss; call model.prepare(optimizer, loss) first")

    def to_device(self, items: Sequence[Any], what: str = "a batch holds") -> list[Tensor]:
        """Return tensors, arrays or numbers as tensors on the device. Raise TypeError for another item.

        Args:
            items: of a batch.
            what: begins the text of the error.
        """
        # Only copies from other than pinned memory make the host wait.
        return [_tensor(item, what).to(self.device, non_blocking=True) for item in items]

    def train(
        self, inputs: Sequence[Tensor], labels: Sequence[Tensor], update: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run forward and backward of one batch, and a step if `update`. Without a step, nothing is communicated.

        Returns:
            (outputs, losses) of this rank.
        """
        sync = nullcontext() if self.parallel is None else self.parallel.no_sync(enabled=not update)
        with sync:
            with self.precision.autocast(self.device):
                network = self.network if self.parallel is None else self.parallel
                outputs = _tensors(network(*inputs), "the network")
                losses = self.losses(outputs, labels)
            total = sum(losses[1:], losses[0])
            scaler = self.precision.scaler
            (total if scaler is None else scaler.scale(total)).backward()
        self.accumulated += 1
        if update:
            assert self.optimizer is not None
            self.precision.step(self.optimizer)
            self.drop_gradients()
        return [output.detach() for output in outputs], [loss.detach() for loss in losses]

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        self.network.zero_grad()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.accumulated = 0

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the network's outputs in full precision, without gradients and without communication."""
        with torch.no_grad():
            return _tensors(self.network(*inputs), "the network")

    def losses(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        """Return the losses as a list, empty without a loss. Class numbers may have the shape [N, 1], as in Paddle."""
        if self.loss is None:
            return []
        if isinstance(self.loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
            labels = [_class_numbers(outputs[0], label) for label in labels]
        losses = _tensors(self.loss(*outputs, *labels), "the loss")
        for loss in losses:
            if loss.numel() != 1:
                raise ValueError(
                    f"the loss returned a tensor of shape {tuple(loss.shape)}; expected one number for the batch, as "
                    "reduction='mean' gives it"
                )
        return losses


def _tensor(item: Any, what: str) -> Tensor:
    try:
        return torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{what} {item!r:.80}, a {type(item).__name__}; expected tensors, arrays or numbers ({error}). "
            "Leave it out of the dataset's samples, or make them dicts and name what is used: "
            "Model(network, inputs=['x', …])."
        ) from error


def _class_numbers(scores: Tensor, label: Tensor) -> Tensor:
    """Return labels of shape [N, 1] as [N], which torch's losses expect; others unchanged.

    Source: the labels of `paddle.nn.CrossEntropyLoss`.
    """
    column = scores.dim() == label.dim() == 2 and label.shape[1] == 1 and not label.is_floating_point()
    return label.squeeze(1) if column else label


def _tensors(value: Any, what: str) -> list[Tensor]:
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, Mapping) or not found or not all(isinstance(item, Tensor) for item in found):
        raise TypeError(f"{what} returned {type(value).__name__}; expected a tensor, or a list or tuple of tensors")
    return found
