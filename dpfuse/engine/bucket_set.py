"""All that is in use of one plan: its parameters, buckets, marks and ready lists. Knows no order of events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from torch import Tensor

from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.local_part import leaf_of
from dpfuse.engine.plan import BucketPlan
from dpfuse.engine.ready import ReadyList
from dpfuse.engine.spoiler import Spoiler

__all__ = ["BucketSet", "names_of"]


class BucketSet:
    """One plan, and what is made of it.

    Args:
        plan: the plan of the buckets.
        params: the planned parameters, by registration index.
        buckets: the buckets of the plan, in communication order; the last one carries the report.
        marks: how often each parameter becomes ready in a backward; empty for once each.
        seen: what became ready in an earlier backward, in that order, if it is known.
        spoiler: makes the gradients NaN where the host hears of a failure later; None where it does not.

    Attributes:
        plan, params, buckets, marks, spoiler: as given.
        names: the names of the parameters, by registration index.
        report: what travels with the last bucket.
        buffers: of all buckets that have gradients.
        ready: the ready list of each bucket.
        hidden: whether gradients become ready that the graph of their backward does not show, as in reentrant
            checkpoints.
        recorded: what became ready in a backward before there are ready lists, in that order.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[Tensor],
        buckets: Sequence[GradBucket],
        marks: Sequence[int] = (),
        seen: Sequence[Tensor] = (),
        hidden: bool = False,
        spoiler: Spoiler | None = None,
    ) -> None:
        report = buckets[-1].parts.report
        assert report is not None
        self.plan, self.params, self.buckets = plan, params, list(buckets)
        self.report = report
        self.buffers = [bucket.parts.buffer for bucket in buckets if bucket.params]
        self.hidden = hidden
        self.spoiler = spoiler
        self.marks = marks = marks or [1] * len(params)
        self.names = names_of(plan)
        self.ready = [ReadyList(b.params, [marks[index] for index in b.plan.params], seen) for b in buckets]
        self.recorded: list[Tensor] = []
        self._in_view = [b.parts for b in buckets if b.parts.delivery.gives_views]
        self._early: set[int] = set()  # ids of parameters that are known to be ready before any output is reached
        self._indices = {id(param): index for index, param in enumerate(params)}

    def remade(
        self, buckets: Sequence[GradBucket], plan: BucketPlan | None = None, marks: Sequence[int] = ()
    ) -> BucketSet:
        """Return a set of other buckets for the same parameters, which knows what became ready in this one.

        Args:
            buckets: the other buckets, in communication order.
            plan: their plan; None is the plan of this set.
            marks: how often each parameter becomes ready in a backward; empty is the marks of this set.
        """
        return BucketSet(
            plan or self.plan, self.params, buckets, marks or self.marks, self.recorded, self.hidden, self.spoiler
        )

    def restore_memory(self) -> None:
        """Give memory to communication buffers that a program has freed or moved: its gradients are views of them.

        It is called before a backward writes any of them.
        """
        for parts in self._in_view:
            buffer = parts.buffer
            # Memory of another size may even have the old address.
            if buffer.flat.data_ptr() != buffer.table.address or buffer.storage.nbytes() != buffer.nbytes:
                buffer.restore()
                parts.feed.follow_buffer()

    def index_of(self, param: Tensor) -> int:
        """Return the registration index of a parameter."""
        return self._indices[id(param)]

    def order_of(self, param: Tensor) -> int:
        """Return the place of a parameter's bucket."""
        index = self.index_of(param)
        return next(order for order, bucket in enumerate(self.buckets) if index in bucket.plan.params)

    def names_of(self, params: Iterable[Tensor]) -> list[str]:
        """Return the names of some of the parameters."""
        return [self.names[self._indices[id(param)]] for param in params]

    def entries(self) -> list[Tensor]:
        """Return what became ready, in the ready lists or before there are any."""
        return [*self.recorded, *(param for ready in self.ready for param in ready.entries)]

    def clear(self) -> None:
        """Forget what became ready."""
        self.recorded.clear()
        for ready in self.ready:
            ready.clear()

    def forget_ready(self, leaves: Set[int]) -> None:
        """Forget that the parameters with these ids of leaves became ready."""
        for entries in (self.recorded, *(ready.entries for ready in self.ready)):
            entries[:] = [param for param in entries if id(leaf_of(param)) not in leaves]

    def doubt_early(self) -> None:
        """Doubt the entries that came before an output was reached, except those of parameters known for that."""
        for ready in self.ready:
            if ready.entries and not self._early.issuperset(map(id, ready.entries)):
                ready.uncertain = len(ready.entries)

    def learn_early(self, ready: ReadyList) -> None:
        """Know from now on the parameters that were early in this list, if its bucket became complete with them."""
        self._early.update(map(id, ready.early()))

    def wait_for_all_but(self, frozen: Iterable[int]) -> None:
        """Do not wait for these parameters from now on; registration indices."""
        ids = frozenset(id(self.params[index]) for index in frozen)
        for ready in self.ready:
            ready.wait_for_all_but(ids)

    def waiting_for(self, order: int) -> bool:
        """Whether a complete bucket cannot be sent before this incomplete one."""
        return not self.ready[order].is_complete and any(one.entries and one.is_complete for one in self.ready)

    def recorded_marks(self) -> dict[int, int]:
        """Return how often each parameter was recorded, by registration index, in the order of the last occurrences."""
        counts: dict[int, int] = {}
        for param in self.recorded:
            index = self._indices[id(param)]
            counts[index] = counts.pop(index, 0) + 1
        return counts


def names_of(plan: BucketPlan) -> list[str]:
    """Return the names of the planned parameters, by registration index."""
    return [spec.name for spec in plan.specs]
