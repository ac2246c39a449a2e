"""The question of one wrapper: does a rank wish that all stop? It travels in the report of each averaged backward."""

from __future__ import annotations

from dpfuse.engine.feature import Engine, Feature
from dpfuse.engine.report_layout import Question
from dpfuse.errors import DPFuseError
from dpfuse.stopping import knowledge
from dpfuse.stopping.deadline import DeadlineWatch
from dpfuse.stopping.reason import StopReason
from dpfuse.stopping.wish import wish

__all__ = ["StopRequest"]


class StopRequest(Feature):
    """Asks the ranks of one model to stop together, and hears that one of them has asked.

    A step without a wish costs two comparisons, and two elements of the report. Where a rank asks, all ranks hear of it
    in the same backward, and exchange their reasons then.
    """

    _engine: Engine

    def __init__(self) -> None:
        self._heard: StopReason | None = None
        self._question = Question("stop", self._answer)
        self._deadline = DeadlineWatch()

    def join(self, engine: Engine) -> None:
        """As `Feature.join`."""
        self._engine = engine
        engine.layout.ask(self._question)
        knowledge.tell(engine.group, self)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`: ask from this backward on, if this process wishes it."""
        if sync:
            self._deadline.look()
        if wish.words and self._heard is None:
            self._question.asks = True

    def _answer(self) -> None:
        """A rank has asked, and every rank has heard of it in this backward."""
        self._question.asks = False
        # Also where this rank knows it, as on a GPU one backward later: another rank may have forgotten it meanwhile.
        reason = knowledge.exchange(self._engine.group)
        self._heard = self._heard or reason

    def hear(self, reason: StopReason | None) -> None:
        """Know this from now on. To be called on all ranks between the same two backwards; None forgets all."""
        self._heard, self._question.asks = reason, False

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
