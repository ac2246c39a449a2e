"""The optimizer that `fleet.distributed_optimizer` returns: a torch optimizer with Paddle's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor

from dpfuse import DPFuseError
from dpfuse.paddle.checks import number
from dpfuse.paddle.distributed.fleet.gradient_merge import GradientMerge

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Passes all calls to the optimizer that it wraps. With gradient merging, it steps and clears once per cycle.

    State, parameter groups and hooks are those of the inner optimizer. So schedulers and scalers may be given either
    of the two. With gradient merging, a scheduler that steps in every iteration needs this optimizer. Scalers are
    rejected, and `step()` of the inner optimizer raises DPFuseError. The model averages gradients over the ranks before
    `step()`.

    Args:
        optimizer: the optimizer to wrap; it becomes `inner_opt`.
        k_steps: iterations per cycle; 1 steps at every call.
        avg: True averages gradients over a cycle, False adds them up.

    Source: `fleet.distributed_optimizer`. Its optimizer also has the attribute `_inner_opt`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, k_steps: int = 1, avg: bool = True) -> None:
        # The base class's constructor is not called: groups, state and hooks are those of the inner optimizer.
        self._inner_opt = optimizer
        self._merge = GradientMerge(optimizer, k_steps, avg)
        self._guard = _StepGuard()
        if k_steps > 1:
            hook = optimizer.register_step_pre_hook(self._guard)
            finalize(self, hook.remove).atexit = False
        # With this flag a GradScaler passes itself to step() instead of changing gradients that still accumulate.
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
            The result of the inner optimizer; None if it was not called.

        Raises:
            DPFuseError: A closure or a GradScaler is used with gradient merging.
        """
        merge = self._merge
        if merge.k_steps == 1:
            return self._inner_opt.step(closure) if closure is not None else self._inner_opt.step()
        # GradScaler sets these attributes before step() and deletes them after it. An error would leave them set.
        marks = [self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__]
        if closure is not None or marks:
            what = "a GradScaler" if closure is None else "a closure"
            raise DPFuseError(
                f"gradient_merge got {what} to step with, which would act on gradients that are still accumulating. "
                "Leave gradient_merge off and accumulate by hand, under model.no_sync(); or call restart(), which "
                "drops the gradients, and continue without it."
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
        """Drop the gradients, unless they are still being merged. `restart()` always drops them.

        Args:
            set_to_zero: True sets gradients to zero, as Paddle does. The default sets them to None, as torch does.
        """
        if not self._merge.pending:
            self._inner_opt.zero_grad(set_to_none=not set_to_zero)

    def restart(self, set_to_zero: bool = False) -> None:
        """Drop all gradients, also the merged ones, and begin a new cycle.

        Use it for a cycle that cannot be completed, for example after an exception in its backward. Call it on every
        rank, and for every optimizer over the model.

        Args:
            set_to_zero: as for `clear_grad`.
        """
        self._merge.restart()
        self.clear_grad(set_to_zero)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call `clear_grad` under torch's name."""
        self.clear_grad(set_to_zero=not set_to_none)

    def minimize(self, loss: Tensor) -> tuple[list[Any], list[tuple[Tensor, Tensor]]]:
        """Call `step()`. As in Paddle's dynamic mode, call `loss.backward()` before it.

        Args:
            loss: the loss of the backward.

        Returns:
            (an empty list, for Paddle's operators; pairs of parameter and gradient).

        Raises:
            DPFuseError: No parameter has a gradient.
        """
        pairs = [(param, param.grad) for param in self._params() if param.grad is not None]
        if not pairs:
            raise DPFuseError("minimize found no gradient; expected those of loss.backward(), called before it")
        self.step()
        return [], pairs

    def get_lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, value: float) -> None:
        """Set the learning rate of all parameter groups.

        Raises:
            TypeError: `value` is not a number.
            DPFuseError: A scheduler sets the learning rate.
        """
        value = float(number("value", value))
        if any("initial_lr" in group for group in self.param_groups):
            raise DPFuseError("a scheduler sets the learning rate of this optimizer; change it there")
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict."""
        return self._inner_opt.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the inner optimizer."""
        self._inner_opt.load_state_dict(state_dict)

    set_state_dict = load_state_dict

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer."""
        self._inner_opt.add_param_group(param_group)

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def __getstate__(self) -> NoReturn:
        raise TypeError("a DistributedOptimizer cannot be copied or pickled; use its state_dict(), or its inner_opt")


class _StepGuard:
    """Hook of an inner optimizer. It rejects steps that do not come from the wrapper, and holds no reference to it."""

    def __init__(self) -> None:
        self.is_open = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.is_open:
            raise DPFuseError(
                f"step() of {type(optimizer).__name__} was called, but gradient_merge counts the iterations of the "
                "optimizer that fleet.distributed_optimizer returned for it. Call step() of that one; a GradScaler "
                "cannot be used with gradient_merge."
            )
