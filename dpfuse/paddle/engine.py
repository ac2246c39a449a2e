"""The engine under Model: one network, its wrapper, optimizer, loss and precision. Knows steps, but no loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import dpfuse
from dpfuse import DPFuseError, fused_allreduce_gradients
from dpfuse.paddle.data_parallel import DataParallel
from dpfuse.paddle.gathered import any_rank, world_size
from dpfuse.paddle.precision import MixedPrecision

__all__ = ["Engine"]


class Engine:
    """Forward, backward and optimizer steps of one network on this rank's device.

    On several ranks the network's gradients are averaged by a DataParallel around it.

    Args:
        network: the bare module. It is moved to the current GPU if there is one and it is on the CPU.

    Raises:
        TypeError: not a module, or one that is wrapped already.
    """

    def __init__(self, network: nn.Module) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be a torch.nn.Module, got {type(network).__name__}; pass an instance")
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
        self.parallel: DataParallel | None = None
        self._wrapped_for: list[tuple[str, bool]] = []
        self.wrap()

    def wrap(self) -> None:
        """Make sure that on several ranks the gradients of what is trainable now will be averaged. A collective."""
        trainable = [(name, param.requires_grad) for name, param in self.network.named_parameters()]
        wanted = trainable != self._wrapped_for and any(requires_grad for _, requires_grad in trainable)
        # What only some ranks have frozen is told by the wrapper, on all ranks, if all of them wrap.
        if world_size() == 1 or not any_rank(wanted):
            return
        self.parallel = None  # takes its hooks off the parameters
        self.parallel = DataParallel(self.network)
        self._wrapped_for = trainable

    def prepare(self, optimizer: Any, loss: Any, amp_configs: Any) -> None:
        """Take what training needs.

        Raises:
            TypeError, ValueError: something that cannot be used.
        """
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if loss is not None and (isinstance(loss, type) or not callable(loss)):
            raise TypeError(
                f"loss must be a module or a function of outputs and labels, got {loss!r}; pass an instance"
            )
        if isinstance(loss, nn.Module):
            if world_size() > 1 and any(param.requires_grad for param in loss.parameters()):
                raise ValueError(
                    f"the loss {type(loss).__name__} has trainable parameters, whose gradients would not be averaged "
                    "over the ranks; make it a part of the network"
                )
            loss.to(self.device)
        precision = MixedPrecision.from_configs(amp_configs, self.device)
        self.optimizer, self.loss, self.precision = optimizer, loss, precision

    def check_ready(self) -> None:
        """Raises DPFuseError where training lacks something."""
        if self.optimizer is None or self.loss is None:
            raise DPFuseError("training needs an optimizer and a loss; call model.prepare(optimizer, loss) first")

    def to_device(self, items: Sequence[Any]) -> list[Tensor]:
        """Tensors of tensors, arrays or numbers, on the device."""
        # Copies from pinned memory need not be waited for; from other memory they are.
        return [torch.as_tensor(item).to(self.device, non_blocking=True) for item in items]

    def train(
        self, inputs: Sequence[Tensor], labels: Sequence[Tensor], update: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Forward and backward of one batch, and a step if `update`; without one, nothing is communicated.

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
            self.step()
        return [output.detach() for output in outputs], [loss.detach() for loss in losses]

    def step(self) -> None:
        """One step of the optimizer with the averaged gradients, which are dropped then."""
        assert self.optimizer is not None
        self.precision.step(self.optimizer)
        self.drop_gradients()

    def flush(self) -> None:
        """Step with gradients that were accumulated in expectation of more."""
        if self.accumulated:
            if self.parallel is not None:
                fused_allreduce_gradients(self.network.parameters())
            self.step()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self.network.zero_grad()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.accumulated = 0

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The network's outputs in full precision and without gradients. Communicates nothing."""
        with torch.no_grad():
            return _tensors(self.network(*inputs), "the network")

    def losses(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        """What the loss returns, in a list; empty without a loss."""
        if self.loss is None:
            return []
        losses = _tensors(self.loss(*outputs, *labels), "the loss")
        for loss in losses:
            if loss.numel() != 1:
                raise ValueError(
                    f"the loss returned a tensor of shape {tuple(loss.shape)}; expected one number for the batch, as "
                    "reduction='mean' gives it"
                )
        return losses


def _tensors(value: Any, what: str) -> list[Tensor]:
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, Mapping) or not found or not all(isinstance(item, Tensor) for item in found):
        raise TypeError(f"{what} returned {type(value).__name__}; expected a tensor, or a list or tuple of tensors")
    return found
