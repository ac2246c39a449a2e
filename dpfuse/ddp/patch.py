"""patch(): calls of torch's DistributedDataParallel return dpfuse's. Owns the one attribute that changes for it."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpfuse.ddp.distributed_data_parallel import TORCH_CLASS, DistributedDataParallel
from dpfuse.engine.user_line import warn_at_user
from dpfuse.model.options import CommonOptions, check_names, check_values

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Patch", "patch"]

# These drive parts of torch's wrapper that ours does not have: `replicate` calls the two halves of its forward.
TORCH_INTERNAL = "torch.distributed."

_active: list[Patch] = []  # in the order in which they began
_installed = False
_told: weakref.WeakSet[type] = weakref.WeakSet()  # subclasses of torch's class that a warning has named
_torch_init = TORCH_CLASS.__init__  # called in place of ours; looked up again whenever ours is installed


class Patch:
    """What `patch()` has changed, as a context manager and with `undo()`.

    Args:
        options: of the wrappers that are made.
        made: called with each wrapper that is made in the place of torch's; None calls nothing.
        left: called with each wrapper of a class that derives from torch's, and so stays torch's; None calls nothing.
    """

    def __init__(
        self,
        options: CommonOptions,
        made: Callable[[DistributedDataParallel], None] | None = None,
        left: Callable[[Any], None] | None = None,
    ) -> None:
        check_names(options, "patch", DistributedDataParallel)
        check_values(options)
        self.options = options
        self.made = made
        self.left = left
        self.__enter__()

    def __enter__(self) -> Patch:
        global _installed, _torch_init
        if self not in _active:
            _active.append(self)
        if not _installed:
            _installed, _torch_init = True, TORCH_CLASS.__init__
            TORCH_CLASS.__init__ = _construct_ours  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Leave torch's class as it was, unless another patch is active; again, it does nothing."""
        global _installed
        if self in _active:
            _active.remove(self)
        # Where someone else has wrapped the constructor since, theirs stays; ours below it passes calls on.
        if not _active and TORCH_CLASS.__init__ is _construct_ours:
            TORCH_CLASS.__init__ = _torch_init  # type: ignore[method-assign]
            _installed = False


def patch(**options: Unpack[CommonOptions]) -> Patch:
    """From here on `torch.nn.parallel.DistributedDataParallel(...)` makes a `dpfuse.DistributedDataParallel`.

    One line for programs that leave the wrapping to a library: accelerate, transformers' `Trainer`, Lightning, Ray,
    timm. The constructor of torch's class changes, not a name. So it does not matter where and when the class
    was imported, and under which name. Wrappers that exist stay what they are, and the wrappers that
    `torch.distributed` makes for itself are torch's. `isinstance` of torch's class is True for both kinds;
    `type(model) is` torch's class for torch's own only.

    A class that derives from torch's stays torch's, since its methods may use what only torch's class has. A warning
    says so once for each class, when the first instance is made. Derive it from `dpfuse.DistributedDataParallel`.

    It acts on this process: call it in every rank, where the program begins. Call it twice, and it acts until both
    are undone.

    Args:
        options: arguments for each wrapper that is made, such as `metrics=20` or `deterministic=True`: those of
            `DistributedDataParallel` that torch's class does not have. An argument of the call itself takes precedence,
            and a later patch takes precedence over an earlier one.

    Returns:
        A context manager that undoes it at its end, with a method `undo()`.

    Raises:
        TypeError: there is no such option.

    Example:
        >>> import dpfuse, torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel as DDP
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with dpfuse.patch():
        ...     model = DDP(torch.nn.Linear(4, 2))
        >>> type(model), isinstance(model, DDP)
        (<class 'dpfuse.ddp.distributed_data_parallel.DistributedDataParallel'>, True)
        >>> type(DDP(torch.nn.Linear(4, 2)))
        <class 'torch.nn.parallel.distributed.DistributedDataParallel'>
        >>> dist.destroy_process_group()

    Source: the one-line habit of `apply_liger_kernel_to_*`.
    """
    return Patch(options)


@functools.wraps(_torch_init)  # code that inspects the signature sees torch's
def _construct_ours(self: Any, *args: Any, **kwargs: Any) -> None:
    """The constructor of torch's class while it is patched."""
    kind: type = type(self)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    acts = bool(_active) and not caller.startswith(TORCH_INTERNAL)
    if not acts or kind is not TORCH_CLASS:
        derived = acts and not kind.__module__.startswith("torch.")
        if derived:
            _tell_of_subclass(kind)
        _torch_init(self, *args, **kwargs)
        for one in _active if derived else []:
            if one.left is not None:
                one.left(self)
        return
    # Nothing is in the object yet, so it can still become one of ours. A `__new__` that made it one from the start
    # could not be taken away again: Python then refuses the arguments of every later construction.
    object.__setattr__(self, "__class__", DistributedDataParallel)
    options: dict[str, Any] = {}
    for one in _active:
        options |= one.options
    DistributedDataParallel.__init__(self, *args, **(options | kwargs))
    for one in _active:
        if one.made is not None:
            one.made(self)


def _tell_of_subclass(kind: type) -> None:
    if kind in _told:
        return
    warn_at_user(
        f"{kind.__name__} derives from torch's DistributedDataParallel, and dpfuse.patch() is active, expected that it "
        "changes this model: it changes torch's class only, and torch averages the gradients of this model. Derive "
        f"{kind.__name__} from dpfuse.DistributedDataParallel, or make torch's class itself."
    )
    _told.add(kind)
