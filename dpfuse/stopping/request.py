"""What the ranks of a group know of a wish to stop: by the report of each averaged backward, or by a collective."""

from __future__ import annotations

from math import inf
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from dpfuse.comm import votes
from dpfuse.comm.collective import resolve_group
from dpfuse.engine.feature import Engine, Feature
from dpfuse.engine.report_layout import Question
from dpfuse.errors import DPFuseError
from dpfuse.stopping.deadline import DeadlineWatch, deadline
from dpfuse.stopping.mesh_groups import MeshGroups
from dpfuse.stopping.wish import StopReason, cut, reason_of, wish

__all__ = ["StopRequest", "agree", "agree_to_stop", "asks", "forget_stop", "own_reason", "tell_program"]


class StopRequest(Feature):
    """Asks the ranks of one model to stop together, and hears that one of them has asked.

    A step without a wish costs two comparisons, and two elements of the report. Where a rank asks, all ranks hear of it
    in the same backward, and exchange their reasons then.

    Args:
        groups: those of the mesh, which all stop after the same averaged backward; None where there is one group.
    """

    _engine: Engine

    def __init__(self, groups: MeshGroups | None = None) -> None:
        self._heard: StopReason | None = None
        self._coming: StopReason | None = None  # what is heard after so many more backwards
        self._more = 0
        self._step = 0  # how many backwards have synchronised or failed, beside other groups
        self._groups = groups
        self._question = Question("stop", self._answer)
        self._steps = Question("step", self._count)
        self._deadline = DeadlineWatch(0 if groups is None else groups.delay)

    def join(self, engine: Engine) -> None:
        """As `Feature.join`."""
        self._engine = engine
        if self._groups is not None:
            engine.layout.answered.append(self._steps)
            self._steps.due = True
        engine.layout.ask(self._question)
        _requests.setdefault(engine.group, WeakSet()).add(self)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`: ask from this backward on, if this process or another group wishes it."""
        if sync and (deadline.launcher or deadline.end != inf):  # nearly never, so it is no call
            self._deadline.look()
        if self._heard is not None or self._coming is not None or self._question.asks:
            return
        if wish.words or (sync and self._groups is not None and self._is_wished_in(self._groups)):
            self._question.asks = True

    def _answer(self) -> None:
        """A rank has asked, and every rank has heard of it in this backward."""
        self._question.asks = False
        # Also where this rank knows it, as on a GPU one backward later: another rank may have forgotten it meanwhile.
        reason, more = _exchange(self._engine.group), 0
        if self._groups is not None:
            reason, more = self._groups.agree(reason, self._step)
        if self._heard is None and self._coming is None:
            self._hear_after(more, reason)

    def _count(self) -> None:
        """Count this backward, as every rank of the group does, also where its own part of it has failed."""
        self._steps.due = True
        self._step += 1
        if self._coming is not None:
            self._hear_after(self._more - 1, self._coming)

    def _hear_after(self, more: int, reason: StopReason | None) -> None:
        self._more = more
        self._heard, self._coming = (None, reason) if more else (reason, None)

    def _is_wished_in(self, groups: MeshGroups) -> bool:
        """Look whether one of these groups has heard of a wish.

        One rank of each group looks, so that a large mesh asks the store seldom. Inside `join()` it is one with inputs,
        since others wait for no rank of the other groups.
        """
        return self._engine.group.rank() == self._engine.source and groups.have_heard()

    def hear(self, reason: StopReason | None) -> None:
        """Know this from now on. To be called on all ranks between the same two backwards; None forgets all."""
        self._question.asks = False
        self._hear_after(0, reason)

    def reason(self) -> StopReason | None:
        """Return why all ranks stop, if they do.

        Raises:
            DPFuseError: the last backward was captured in a CUDA graph.
        """
        if self._heard is None and self._engine.captured:
            raise DPFuseError(
                f"rank {self._engine.group.rank()}: the last backward was captured in a CUDA graph, and its replays "
                "tell the host nothing of a wish to stop; expected a backward without a graph. Call "
                "dpfuse.agree_to_stop() between two replays, on all ranks."
            )
        return self._heard


_requests: WeakKeyDictionary[dist.ProcessGroup, WeakSet[StopRequest]] = WeakKeyDictionary()
_agreed: WeakSet[dist.ProcessGroup] = WeakSet()  # groups whose ranks have agreed to stop outside of a backward
_deadline = DeadlineWatch()  # of a loop that asks here


def own_reason() -> StopReason | None:
    """Return why this process stops where it has no group. To be asked in each step."""
    _deadline.look()
    return reason_of([wish.words])


def tell_program(reason: StopReason | None) -> StopReason | None:
    """Return a reason that the program reads. If the program then ends well, the launcher knows why."""
    wish.told |= reason is not None
    return reason


def _exchange(group: dist.ProcessGroup) -> StopReason | None:
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
    reason = _exchange(group)
    if reason is not None:
        _agreed.add(group)
        for request in tuple(_requests.get(group, ())):
            request.hear(reason)
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
    for requests in tuple(_requests.values()):
        for request in tuple(requests):
            request.hear(None)
