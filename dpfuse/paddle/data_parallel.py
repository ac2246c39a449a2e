"""`paddle.DataParallel`: dpfuse's wrapper with Paddle's additional names. Knows nothing of communication."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch import Tensor, nn

import dpfuse
from dpfuse.paddle.checks import instance

__all__ = ["DataParallel"]


class DataParallel(dpfuse.DataParallel):
    """`dpfuse.DataParallel` under Paddle's names; arguments and behaviour are the same, except one default.

    Args:
        layers, strategy, last_comm_buffer_size, find_unused_parameters, group, options: as there.
        comm_buffer_size: in MB; 25 by default, as in Paddle.

    Raises:
        TypeError, ValueError, DPFuseError: as there.

    Example:
        >>> import torch, dpfuse.paddle as paddle
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> dp_layer = paddle.DataParallel(torch.nn.Linear(4, 2))
        >>> dp_layer(torch.ones(3, 4)).mean().backward()
        >>> dp_layer.clear_gradients()
        >>> type(dp_layer._layers).__name__, list(dp_layer.state_dict(structured_name_prefix="net."))
        ('Linear', ['net.weight', 'net.bias'])
        >>> dist.destroy_process_group()

    Source: `paddle.DataParallel`.
    """

    def __init__(
        self,
        layers: nn.Module,
        strategy: Any = None,
        comm_buffer_size: float | None = 25,
        *more: Any,
        **options: Any,
    ) -> None:
        super().__init__(layers, strategy, comm_buffer_size, *more, **options)

    # The arguments of dpfuse, as `help` and editors show them.
    _shown = inspect.signature(dpfuse.DataParallel.__init__)
    __init__.__signature__ = _shown.replace(  # type: ignore[attr-defined]
        parameters=[
            each.replace(default=25) if name == "comm_buffer_size" else each for name, each in _shown.parameters.items()
        ]
    )

    del _shown

    set_dict = load_dict = dpfuse.DataParallel.set_state_dict

    @property
    def _layers(self) -> nn.Module:
        """The wrapped module."""
        return self.module

    def state_dict(  # type: ignore[override]
        self,
        destination: dict[str, Any] | None = None,
        include_sublayers: bool = True,
        structured_name_prefix: str = "",
        *,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the wrapped module's state dict, without a prefix of the wrapper.

        Args:
            destination: a dict to fill; a new one by default.
            include_sublayers: False leaves out the parameters and buffers of the module's children.
            structured_name_prefix: put before each name.
            prefix: torch's name for the same; a parent module passes it.
            keep_vars: True returns the parameters themselves instead of detached tensors.

        Returns:
            `destination`.

        Source: `paddle.DataParallel.state_dict`.
        """
        instance("structured_name_prefix", structured_name_prefix, str, "pass for example 'net.'")
        name_prefix = instance("prefix", prefix, str) + structured_name_prefix
        return super().state_dict(destination, include_sublayers, prefix=name_prefix, keep_vars=keep_vars)

    def clear_gradients(self, set_to_zero: bool = False) -> None:
        """Drop all gradients of the module.

        Args:
            set_to_zero: True sets gradients to zero, as Paddle does. The default sets them to None, as torch does: then
                momentum does not change a parameter that had no gradient in a step.
        """
        self.zero_grad(set_to_none=not set_to_zero)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss`. Deprecated in Paddle: gradients are averaged without it."""
        warnings.warn("scale_loss does nothing; leave it out", DeprecationWarning, stacklevel=2)
        return loss

    def apply_collective_grads(self) -> None:
        """Do nothing. Deprecated in Paddle: `backward()` has averaged the gradients."""
        warnings.warn("apply_collective_grads does nothing; leave it out", DeprecationWarning, stacklevel=2)
