"""Which buffers a program has written between a backward and the next forward. The ranks compare it in the report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpfuse.comm import collective
from dpfuse.engine.feature import Engine
from dpfuse.engine.number_hash import number_hash
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import Question, ReportPlace
from dpfuse.engine.streams import capturing
from dpfuse.engine.user_line import warn_at_user
from dpfuse.model.buffers import BufferSync

__all__ = ["WrittenBuffers"]

BITS = 5  # of what a rank tells
FIRST, EVERY = 2, 64  # forwards before which values are compared, too: the first ones, and later one out of so many


class WrittenBuffers:
    """Notices that some ranks have written a buffer that travels in backward, and others have not.

    The next forward had other values on each rank then, unless a collective of the program has made them equal. So the
    values that arrive are compared with those that they replace, where they can be read without a wait.

    Attributes:
        differ: whether ranks have written different ones, so that buffers must be sent before forwards.
    """

    _engine: Engine
    _place: ReportPlace

    def __init__(self, buffers: BufferSync) -> None:
        self.differ = False
        self._buffers = buffers
        self._report: Report | None = None
        # What was written before the first forward since the last backward, and before that one; None is unknown.
        self._written: list[str] | None = None
        self._before: list[str] | None = None
        self._told: list[str] | None = None  # what the report has
        self._looks = 0
        self._replaced: set[str] = set()  # buffers that had other values than those that arrived
        self._warning = ""

    def join(self, engine: Engine) -> None:
        """As `Feature.join`."""
        question = Question("which buffers were written", self._compare)
        self._engine, self._is_alone = engine, engine.group.size() == 1
        self._place = engine.layout.register("written buffers", BITS, compared=True, question=question)

    def use(self, report: Report) -> None:
        """Tell it in this report from now on."""
        self._report, self._told = report, None

    def before_forward(self) -> None:
        """Tell what was written since the buffers were sent, before the first forward since then that counts."""
        if self.differ or self._is_alone:
            return
        self._written = self._buffers.written(compare=self._looks < FIRST or not self._looks % EVERY)
        self._looks += 1
        self._tell()

    def say_nothing(self) -> None:
        """Tell nothing in the next backward, since this rank has run no forward of its own."""
        self._written = None
        self._tell()

    def _tell(self) -> None:
        if self._written == self._told or self._report is None or capturing():
            return
        self._told = self._written
        bits = [[0.0, 0.0]] * BITS
        if self._written is not None:
            # 0 is nothing, and other lists mostly have other numbers.
            number = 1 + number_hash(self._written) % (2**BITS - 1) if self._written else 0
            bits = [[float(number >> place & 1), float(~number >> place & 1)] for place in range(BITS)]
        pairs = self._report.compared(self._place).pairs
        now = torch.tensor(bits, dtype=pairs.dtype, device="cpu")
        now = now.pin_memory() if pairs.is_cuda else now
        pairs.copy_(now, non_blocking=pairs.is_cuda)

    def finish_sending(self) -> None:
        """Let the buffers arrive that were sent beside the last bucket, which has landed."""
        report = self._report
        compare = report is not None and report.is_on_cpu and report.differ_now(self._place)
        self._replaced = self._buffers.finish(self._engine.source, compare=compare)
        if not self.differ:
            self._buffers.mark()

    def delivered(self) -> None:
        """As `Watcher.delivered`."""
        self._before = self._written
        if self._warning:
            warning, self._warning = self._warning, ""
            warn_at_user(warning)

    def _compare(self) -> None:
        """Exchange what was written. Every rank does so in the backward in which all have heard that it differs."""
        engine, names, report = self._engine, list(self._buffers.agreed), self._report
        assert report is not None
        late = not report.is_on_cpu
        written = self._before if late else self._written
        own, other = set(written or ()), set(names) if late else self._replaced
        row = [written is not None, *(name in own for name in names), *(name in other for name in names)]
        wire = torch.tensor(row, dtype=torch.int32, device=collective.group_device(engine.group))
        rows = [each.tolist() for each in collective.all_gather(wire, engine.group)]
        for place, name in enumerate(names, 1):
            wrote = [rank for rank, each in enumerate(rows) if each[0] and each[place]]
            others = [rank for rank, each in enumerate(rows) if each[0] and not each[place]]
            if wrote and others and any(each[place + len(names)] for each in rows):
                self.differ = True
                self.say_nothing()
                self._warning = (
                    f"rank {engine.group.rank()}: after synchronised backward {engine.completed - late} and before the "
                    f"next forward, buffer {name!r} was written on rank {_listed(wrote)}, and not on rank "
                    f"{_listed(others)}. That forward had other values on each; expected the same writes on every "
                    "rank. From now on buffers are sent before forwards, as torch's class sends them. To save that, "
                    "write the buffer on every rank."
                )
                return


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
