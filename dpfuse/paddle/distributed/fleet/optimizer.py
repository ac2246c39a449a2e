"""The optimizer that `fleet.distributed_optimizer` returns: a torch optimizer with Paddle's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from dpfuse import DPFuseError
from dpfuse.paddle.distributed.fleet.gradient_merge import GradientMerge

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Passes everything on to the optimizer it wraps; with gradient merging, steps and clears once per cycle.

    State, parameter groups and hooks are those of the inner optimizer, so schedulers and scalers may be given
    either of the two. Gradients are averaged over the ranks by the model, before `step()`.

    Args:
        optimizer: the optimizer to wrap, `inner_opt` from then on.
        merge: the cycle, or None to step at every call.

    Source: `fleet.distributed_optimizer`, whose optimizer has the attribute `_inner_opt`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, merge: GradientMerge | None = None) -> None:
        # Without the base class's constructor: groups, state and hooks are found in the inner optimizer.
        self._inner_opt = optimizer
        self.merge = merge
        # A GradScaler then reports itself to step() instead of changing gradients that are still accumulating.
        self._step_supports_amp_scaling = merge is not None

    @property
    def inner_opt(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        return self._inner_opt

    def __getattr__(self, name: str) -> Any:
        if name == "_inner_opt":
            raise AttributeError(name)
        return getattr(self._inner_opt, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; with gradient merging, only in the last iteration of a cycle.

        Args:
            closure: as in torch; not with gradient merging.

        Returns:
            What the inner optimizer returns; None where it was not called.

        Raises:
            DPFuseError: a closure, or a GradScaler, together with gradient merging.
        """
        if self.merge is None:
            return self._inner_opt.step(closure) if closure is not None else self._inner_opt.step()
        if closure is not None or "grad_scale" in self.__dict__:
            what = "a GradScaler" if closure is None else "a closure"
            raise DPFuseError(
                f"gradient_merge got {what} to step with, which would act on gradients that are still accumulating. "
                "Leave gradient_merge off and accumulate by hand, under model.no_sync()."
            )
        if not self.merge.advance():
            return None
        if self.merge.avg and (grads := [param.grad for param in self._params() if param.grad is not None]):
            with torch.no_grad():
                torch._foreach_div_(grads, self.merge.k_steps)
        return self._inner_opt.step()

    def clear_grad(self, set_to_zero: bool = False) -> None:
        """Drop the gradients, unless they are still being merged.

        Args:
            set_to_zero: True keeps gradients of zeros, which is what Paddle does; None is torch's default.
        """
        if self.merge is None or not self.merge.pending:
            self._inner_opt.zero_grad(set_to_none=not set_to_zero)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's name for `clear_grad`."""
        self.clear_grad(set_to_zero=not set_to_none)

    def minimize(self, loss: Tensor) -> tuple[list[Any], list[tuple[Tensor, Tensor]]]:
        """`step()`, after the `loss.backward()` that has to come before it, as in Paddle's dynamic mode.

        Args:
            loss: what backward was called on.

        Returns:
            (an empty list, for Paddle's operators; pairs of parameter and gradient).

        Raises:
            DPFuseError: no parameter has a gradient.
        """
        pairs = [(param, param.grad) for param in self._params() if param.grad is not None]
        if not pairs:
            raise DPFuseError("minimize found no gradient; expected those of loss.backward(), called before it")
        self.step()
        return [], pairs

    def get_lr(self) -> float:
        """The learning rate (of the first parameter group)."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, value: float) -> None:
        """Set the learning rate of all parameter groups.

        Raises:
            TypeError: `value` is not a number.
            DPFuseError: a scheduler sets it.
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"value must be a number, got {value!r} of type {type(value).__name__}")
        if any("initial_lr" in group for group in self.param_groups):
            raise DPFuseError("a scheduler sets the learning rate of this optimizer; change it there")
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = float(value)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's."""
        return self._inner_opt.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the inner optimizer."""
        self._inner_opt.load_state_dict(state_dict)

    set_state_dict = load_state_dict

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the inner optimizer."""
        self._inner_opt.add_param_group(param_group)

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def __getstate__(self) -> NoReturn:
        raise TypeError("a DistributedOptimizer cannot be copied or pickled; use its state_dict(), or its inner_opt")
