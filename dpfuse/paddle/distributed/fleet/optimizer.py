"""The optimizer that `fleet.distributed_optimizer` returns: a torch optimizer with Paddle's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor

from dpfuse import DPFuseError
from dpfuse.paddle.distributed.fleet.gradient_merge import GradientMerge

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Passes everything on to the optimizer it wraps; with gradient merging, steps and clears once per cycle.

    State, parameter groups and hooks are those of the inner optimizer, so schedulers and scalers may be given
    either of the two. With gradient merging, a scheduler that steps in every iteration takes this one, scalers
    are refused, and `step()` of the inner one raises DPFuseError. Gradients are averaged over the ranks by the
    model, before `step()`.

    Args:
        optimizer: the optimizer to wrap, `inner_opt` from then on.
        k_steps: iterations per cycle; 1 steps at every call.
        avg: whether gradients are averaged over a cycle, or summed.

    Source: `fleet.distributed_optimizer`, whose optimizer has the attribute `_inner_opt`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, k_steps: int = 1, avg: bool = True) -> None:
        # Without the base class's constructor: groups, state and hooks are found in the inner optimizer.
        self._inner_opt = optimizer
        self._merge = GradientMerge(optimizer, k_steps, avg)
        self._guard = _StepGuard()
        if k_steps > 1:
            hook = optimizer.register_step_pre_hook(self._guard)
            finalize(self, hook.remove).atexit = False
        # A GradScaler then reports itself to step() instead of changing gradients that are still accumulating.
        self._step_supports_amp_scaling = k_steps > 1

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
        merge = self._merge
        if merge.k_steps == 1:
            return self._inner_opt.step(closure) if closure is not None else self._inner_opt.step()
        # torch leaves its marks on an optimizer whose step() raises, and a later step() would find them.
        marks = [self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__]
        if closure is not None or marks:
            what = "a GradScaler" if closure is None else "a closure"
            raise DPFuseError(
                f"gradient_merge got {what} to step with, which would act on gradients that are still accumulating. "
                "Leave gradient_merge off and accumulate by hand, under model.no_sync(); or go on without it, after "
                "restart(), which drops the gradients."
            )
        if not merge.advance():
            return None
        if merge.avg and (grads := [param.grad for param in self._params() if param.grad is not None]):
            with torch.no_grad():
                torch._foreach_div_(grads, merge.k_steps)
        self._guard.is_open = True
        try:
            return self._inner_opt.step()
        finally:
            self._guard.is_open = False

    def clear_grad(self, set_to_zero: bool = False) -> None:
        """Drop the gradients, unless they are still being merged; `restart()` drops them in any case.

        Args:
            set_to_zero: True keeps gradients of zeros, which is what Paddle does; None is torch's default.
        """
        if not self._merge.pending:
            self._inner_opt.zero_grad(set_to_none=not set_to_zero)

    def restart(self, set_to_zero: bool = False) -> None:
        """Drop the gradients, those merged so far too, and begin a new cycle.

        For a cycle that cannot be completed, after an exception in its backward for instance. To be called on every
        rank, and for every optimizer over the model.

        Args:
            set_to_zero: as for `clear_grad`.
        """
        self._merge.restart()
        self.clear_grad(set_to_zero)

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


class _StepGuard:
    """Hook of an inner optimizer: refuses steps that do not come from the wrapper, which it keeps no reference to."""

    def __init__(self) -> None:
        self.is_open = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.is_open:
            raise DPFuseError(
                f"step() of {type(optimizer).__name__} was called, but gradient_merge counts the iterations of the "
                "optimizer that fleet.distributed_optimizer returned for it. Call step() of that one; a GradScaler "
                "does not go with gradient_merge."
            )
