"""`DPFuseAccelerator`: accelerate's `Accelerator`, with dpfuse's wrapper and means over all items of a step."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dpfuse import DistributedDataParallel, patch
from dpfuse.engine.torch_private import uncompiled
from dpfuse.errors import DPFuseError
from dpfuse.gradients.kept_mean import KeptMean
from dpfuse.gradients.weight import GradientWeight

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dpfuse.integrations.accelerate needs the package accelerate, and there is no module {error.name!r}: "
        "pip install 'dpfuse[accelerate]'"
    ) from error

__all__ = ["DPFuseAccelerator"]


class DPFuseAccelerator(Accelerator):
    """accelerate's `Accelerator`, whose `prepare` wraps in `dpfuse.DistributedDataParallel`; with the same arguments.

    `accelerator.backward(loss, num_items=n)` says how many items (tokens, samples) the loss is the mean of. Then each
    step has the gradient of the mean over all items of all ranks and of all batches that `accumulate` puts together.
    The counts travel with the gradients: nothing is gathered, and no batch is counted before its time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window_items: Tensor | float = 0  # of the batches that were accumulated and not yet averaged
        self._kept_mean = KeptMean()  # of one process without a wrapper
        self._prepared: WeakSet[nn.Module] = WeakSet()  # what is trained; accelerate keeps the bare models

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Wrap the model, unless it is only evaluated."""
        with patch():
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        if not evaluation_mode:
            self._prepared.add(prepared)
        return prepared

    def backward(
        self, loss: Tensor, num_items: Tensor | float | None = None, reduction: str = "mean", **kwargs: Any
    ) -> None:
        """As accelerate's; with `num_items` the step has the mean over all items, and nothing else divides the loss.

        Args:
            loss: of this batch.
            num_items: how many items the loss counts, 0 or more; a number or a tensor with one, which is not waited
                for. None leaves everything to accelerate: a mean of means. Give it in each backward, or in none. A step
                without any item has gradients of 0 on one process; several ranks raise.
            reduction: "mean" if the loss is the mean of its items, "sum" if it is their sum. Only a sum can be of no
                item: a mean of none is NaN.
            kwargs: for `Tensor.backward`.

        Raises:
            ValueError: `reduction` is neither; a count is below 0 or not finite.
            TypeError: `num_items` is no such number.
            DPFuseError: there is not exactly one model from `prepare`, or it has a communication hook;
                `sync_each_batch` is on; there are several ranks, and no item on any of them.

        Example:
            >>> import torch
            >>> from dpfuse.integrations.accelerate import DPFuseAccelerator
            >>> accelerator = DPFuseAccelerator(cpu=True, gradient_accumulation_steps=2)
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> for batch in (torch.ones(3, 1), torch.full((1, 1), 5.0)):
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(model(batch).mean(), num_items=len(batch))
            >>> model.weight.grad  # (1 + 1 + 1 + 5) / 4
            tensor([[2.]])
        """
        if num_items is None:
            super().backward(loss, **kwargs)
            return
        place = num_items.device if isinstance(num_items, Tensor) else torch.device("cpu")
        GradientWeight.checked(num_items, reduction, place)
        model = self._model()
        wrapped = uncompiled(model)
        averaged = wrapped if isinstance(wrapped, DistributedDataParallel) else None
        synchronises = self.sync_gradients if averaged is None else averaged.require_backward_grad_sync
        total = self._window_items + (num_items.detach() if isinstance(num_items, Tensor) else num_items)
        self._window_items = 0 if synchronises else total
        if synchronises and averaged is not None:
            averaged.set_gradient_weight(total, reduction="sum")
        if averaged is None:
            self._kept_mean.note(param for param in model.parameters() if param.requires_grad)
        # What accelerate divides by is multiplied with before.
        summed = loss if reduction == "sum" else loss * num_items
        try:
            super().backward(summed * self.gradient_accumulation_steps, **kwargs)
        except BaseException:
            self._window_items = 0  # the window has to begin again
            self._kept_mean.begin()
            raise
        if synchronises and averaged is None:
            # The gradient of no item is 0 already.
            divisor = total.where(total != 0, 1) if isinstance(total, Tensor) else total or 1
            added_to = [param for param in model.parameters() if self._kept_mean.noted(param)]
            self._kept_mean.multiply(added_to, divisor)
            for param in added_to:
                if param.grad is not None:
                    param.grad.div_(_exact(divisor, param.grad))

    def _model(self) -> nn.Module:
        """The one model that was prepared.

        Raises:
            DPFuseError: there are several, or none; another library averages its gradients; each batch is averaged.
        """
        if len(self._prepared) != 1:
            raise DPFuseError(
                f"backward() was given num_items, and prepare() was given {len(self._prepared)} models, expected one: "
                "whose gradients the items weigh is not known. Call model.set_gradient_weight() of each model instead."
            )
        if self.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            raise DPFuseError(
                "backward() was given num_items with sync_each_batch=True, expected one averaging for all batches of a "
                "step. Leave sync_each_batch out of the GradientAccumulationPlugin."
            )
        (model,) = self._prepared
        if self.num_processes > 1 and not isinstance(uncompiled(model), DistributedDataParallel):
            raise DPFuseError(
                f"backward() was given num_items for a {type(model).__name__}, expected that prepare() has wrapped it "
                "in dpfuse.DistributedDataParallel. Use no other plugin, and let prepare() wrap the bare model."
            )
        return model


def _exact(divisor: Any, grad: Tensor) -> Any:
    """Return a divisor that torch does not round to 16 bits on a GPU before it divides: a vector, no scalar."""
    narrow = isinstance(divisor, Tensor) and grad.dtype in (torch.bfloat16, torch.float16) and grad.dim()
    return divisor.reshape(1).float() if narrow else divisor
