"""One hook of the process before, and one after, the steps of all optimizers. Knows no gradient and no weight."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, ref

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dpfuse.engine.torch_private import leave_untraced

__all__ = ["call_after_steps", "call_before_steps", "leave_steps_untold", "living_optimizers"]

_parts: WeakSet[Optimizer] = WeakSet()  # optimizers whose steps no user is told of


class _StepHook:
    """A hook on all optimizers, as long as it has users. An optimizer without any runs as if it were not there.

    Args:
        register: puts a function on all optimizers.
        method: of its users, which gets the optimizer.
    """

    def __init__(self, register: Callable[[Any], RemovableHandle], method: str) -> None:
        self._register = register
        self._method = method
        self._users: dict[ref[Any], None] = {}  # in the order in which they are called
        self._handle: RemovableHandle | None = None

    def add(self, user: Any) -> None:
        self._users[ref(user, self._forget)] = None
        if self._handle is None:
            self._handle = self._register(self)

    def _forget(self, user: ref[Any]) -> None:
        self._users.pop(user, None)
        if self._users or self._handle is None:
            return
        # The garbage collector may call this while torch iterates over the hooks. To remove the only hook does no harm
        # then. Beside others that would be an error of the step, so the hook stays, and calls nothing.
        hooks = self._handle.hooks_dict_ref()
        if hooks is not None and len(hooks) == 1:
            self._handle.remove()
            self._handle = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in _parts:
            return
        for reference in self._users.copy():  # users may come and go meanwhile, also while a tuple is made
            user = reference()
            if user is not None:
                getattr(user, self._method)(optimizer)

    leave_untraced(__call__, calls=True, reason="dpfuse looks here at gradients and weights")


_before = _StepHook(register_optimizer_step_pre_hook, "before_step")
_after = _StepHook(register_optimizer_step_post_hook, "after_step")


def call_before_steps(user: Any) -> None:
    """Call `user.before_step` before each step of an optimizer, as long as something else keeps `user` alive."""
    _before.add(user)


def call_after_steps(user: Any) -> None:
    """Call `user.after_step` after each step of an optimizer, as long as something else keeps `user` alive."""
    _after.add(user)


def leave_steps_untold(optimizer: Optimizer) -> None:
    """Call no user at the steps of this optimizer: it does a part of what another one does, or is only tried out."""
    _parts.add(optimizer)


def living_optimizers() -> list[Optimizer]:
    """Return all optimizers of the process that have parameters. It takes milliseconds: the garbage collector knows."""
    found = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    return [each for each in found if hasattr(each, "param_groups")]  # else its constructor has raised
