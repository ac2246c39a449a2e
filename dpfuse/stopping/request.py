"""The question of one wrapper: does a rank wish that all stop? It travels in the report of each averaged backward."""

from __future__ import annotations

from dpfuse.engine.feature import Engine, Feature
from dpfuse.engine.report_layout import Question
from dpfuse.errors import DPFuseError
from dpfuse.stopping import knowledge
from dpfuse.stopping.deadline import DeadlineWatch
from dpfuse.stopping.mesh_groups import MeshGroups
from dpfuse.stopping.reason import StopReason
from dpfuse.stopping.wish import wish

__all__ = ["StopRequest"]


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
        knowledge.tell(engine.group, self)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`: ask from this backward on, if this process wishes it."""
        if sync:
            self._deadline.look()
        if wish.words and self._heard is None and self._coming is None:
            self._question.asks = True

    def _answer(self) -> None:
        """A rank has asked, and every rank has heard of it in this backward."""
        self._question.asks = False
        # Also where this rank knows it, as on a GPU one backward later: another rank may have forgotten it meanwhile.
        reason, more = knowledge.exchange(self._engine.group), 0
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

    @property
    def is_open(self) -> bool:
        """Whether this rank neither knows of a wish nor asks."""
        return self._heard is None and self._coming is None and not self._question.asks

    def ask(self) -> None:
        """Ask from the backward on that begins now, also if this process itself does not wish it."""
        self._question.asks = True

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
