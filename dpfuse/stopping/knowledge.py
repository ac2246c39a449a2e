"""What all ranks of a group know of a wish to stop, outside of one wrapper. Knows no report."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from dpfuse.comm import votes
from dpfuse.comm.collective import resolve_group
from dpfuse.stopping.deadline import DeadlineWatch
from dpfuse.stopping.reason import StopReason, cut, reason_of
from dpfuse.stopping.wish import wish

__all__ = ["agree", "agree_to_stop", "asks", "exchange", "forget_stop", "own_reason", "tell", "tell_program"]


class Listener(Protocol):
    """What hears on what the ranks of a group agree."""

    def hear(self, reason: StopReason | None) -> None:
        """Know this from now on; None forgets all."""


_listeners: WeakKeyDictionary[dist.ProcessGroup, WeakSet[Listener]] = WeakKeyDictionary()
_agreed: WeakSet[dist.ProcessGroup] = WeakSet()  # groups whose ranks have agreed to stop outside of a backward
_deadline = DeadlineWatch()  # of a loop that asks here


def tell(group: dist.ProcessGroup, listener: Listener) -> None:
    """Tell this object, as long as it lives, on what the ranks of a group agree."""
    _listeners.setdefault(group, WeakSet()).add(listener)


def own_reason() -> StopReason | None:
    """Return why this process stops where it has no group. To be asked in each step."""
    _deadline.look()
    return reason_of([wish.words])


def tell_program(reason: StopReason | None) -> StopReason | None:
    """Return a reason that the program reads. If the program then ends well, the launcher knows why."""
    wish.told |= reason is not None
    return reason


def exchange(group: dist.ProcessGroup) -> StopReason | None:
    """Return why the ranks stop, if one of them wishes it. A collective of all ranks."""
    if group.size() == 1:
        return reason_of([wish.words])
    return reason_of(votes.gather_texts(cut(wish.words, votes.SHORT_TEXT), group))


def asks(group: dist.ProcessGroup) -> bool:
    """Whether this process asks the ranks of a group, which have not agreed yet, where no backward tells them."""
    _deadline.look()
    return bool(wish.words) and group not in _agreed


def agree(group: dist.ProcessGroup) -> StopReason | None:
    """Return why the ranks stop, which all models of the group then know. A collective of all ranks."""
    reason = exchange(group)
    if reason is not None:
        _agreed.add(group)
        for listener in tuple(_listeners.get(group, ())):
            listener.hear(reason)
    return reason


def agree_to_stop(group: dist.ProcessGroup | None = None) -> bool:
    """Whether a rank has asked all ranks to stop, where no backward tells: one small collective, on all ranks.

    Call it every some batches of a long evaluation, or between replays of a CUDA graph. From a yes on,
    `model.stop_requested` is true of the models of this group.

    Args:
        group: the ranks; None means all. All of them call it, the same number of times.

    Returns:
        The same on all ranks. Without a process group, whether this process wishes it.

    Raises:
        DPFuseError: a rank has ended, or has left the group.

    Example:
        >>> import dpfuse
        >>> dpfuse.agree_to_stop()
        False
        >>> dpfuse.request_stop()
        >>> dpfuse.agree_to_stop()
        True
        >>> dpfuse.forget_stop()
    """
    ranks = resolve_group(group)
    _deadline.look()
    return tell_program(reason_of([wish.words]) if ranks is None else agree(ranks)) is not None


def forget_stop() -> None:
    """Forget that this process has asked to stop, and what its models have heard.

    Call it on all ranks between the same two steps. A process that goes on after a stop needs it: a notebook, a sweep
    over many trainings. Where the job is about to end, the next backward asks again.

    Example:
        >>> import dpfuse
        >>> dpfuse.request_stop("a key was pressed")
        >>> dpfuse.forget_stop()
        >>> dpfuse.agree_to_stop()
        False
    """
    wish.forget()
    wish.forgotten += 1
    _agreed.clear()
    for listeners in tuple(_listeners.values()):
        for listener in tuple(listeners):
            listener.hear(None)
