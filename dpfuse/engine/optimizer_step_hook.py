"""The one hook of the process before the steps of all optimizers. Knows no gradient; its users decide what to do."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dpfuse.engine.torch_private import leave_untraced

__all__ = ["StepUser", "call_before_steps"]


class StepUser(Protocol):
    """An object that is called before each step of each optimizer."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise if this optimizer must not step now."""


_users: dict[ref[StepUser], None] = {}  # in the order in which they are called
_handle: RemovableHandle | None = None  # of the hook; None where there is none


def call_before_steps(user: StepUser) -> None:
    """Call `user.before_step` before each step of an optimizer, as long as something else keeps `user` alive."""
    global _handle
    _users[ref(user, _forget)] = None
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_before_step)


def _forget(user: ref[StepUser]) -> None:
    global _handle
    _users.pop(user, None)
    if _users or _handle is None:
        return
    # The garbage collector may call this while torch iterates over the hooks. To remove the only hook does no harm
    # then. Beside others that would be an error of the step, so the hook stays, and calls nothing.
    hooks = _handle.hooks_dict_ref()
    if hooks is not None and len(hooks) == 1:
        _handle.remove()
        _handle = None


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for reference in tuple(_users):  # a copy, since users may come and go meanwhile
        user = reference()
        if user is not None:
            user.before_step(optimizer)


leave_untraced(_before_step, calls=True, reason="dpfuse looks here for gradients that are not averaged in .grad")
