"""Which buffers a program has written between a backward and the next forward. The ranks compare it in the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


class _Written(NamedTuple):
    """What a rank has written since buffers were sent, before a forward."""

    names: list[str] | None  # None is unknown
    hashes: dict[str, int]  # of the values, as far as they are known
    in_eval: bool  # whether that forward is in eval mode


UNKNOWN = _Written(None, {}, False)


class WrittenBuffers:
    """Notices that ranks have written a buffer that travels in backward: some and not others, or with other values.

    The next forward had other values on each rank then, unless a collective of the program has made them equal. So the
    values that arrive are compared with those that they replace, where they can be read without a wait. What all ranks
    have written they compare by its hash: on a GPU in the first forwards only, since the host waits for it.

    Attributes:
        differ: whether ranks have written different ones, so that buffers must be sent before forwards.
    """

    _engine: Engine
    _place: ReportPlace

    def __init__(self, buffers: BufferSync) -> None:
        self.differ = False
        self._buffers = buffers
        self._report: Report | None = None
        # Before the first forward since the last backward, before that one, and before a forward in eval mode.
        self._now = self._before = self._noted = UNKNOWN
        self._told: _Written | None = None  # what the report has
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

    def before_forward(self, *, by_value: bool) -> None:
        """Tell what was written since the buffers were sent, before the first forward since then that counts.

        Args:
            by_value: whether it matters what all ranks have written.
        """
        if not (self.differ or self._is_alone):
            self._tell(self._look(by_value, in_eval=False))
            self._looks += 1

    def note(self, *, by_value: bool) -> None:
        """As `before_forward`, before a forward in eval mode: it is told if that has a backward of this rank."""
        if not (self.differ or self._is_alone):
            # In place of what was noted before an earlier one, which a rank may have run alone.
            self._noted = self._look(by_value, in_eval=True)

    def tell_noted(self) -> None:
        """Tell what was noted before a forward in eval mode; nothing, if this rank has run none."""
        self._tell(self._noted)

    def say_nothing(self) -> None:
        """Tell nothing in the next backward, since this rank has run no forward of its own."""
        self._tell(UNKNOWN)

    def _look(self, by_value: bool, *, in_eval: bool) -> _Written:
        first = self._looks < FIRST
        looks = first or not self._looks % EVERY
        names = self._buffers.written(compare=looks)
        hashes: dict[str, int] = {}
        if names and by_value:
            hashes = self._buffers.hashes_of(names, looks=looks, waits=first and not capturing())
        return _Written(names, hashes, in_eval)

    def _tell(self, now: _Written) -> None:
        self._now, self._noted = now, UNKNOWN
        if now == self._told or self._report is None or capturing():
            return
        self._told = now
        bits = [[0.0, 0.0]] * BITS
        if now.names is not None:
            # 0 is nothing, and other lists mostly have other numbers.
            number = 1 + number_hash((*now.names, *now.hashes.values())) % (2**BITS - 1) if now.names else 0
            bits = [[float(number >> place & 1), float(~number >> place & 1)] for place in range(BITS)]
        pairs = self._report.compared(self._place).pairs
        row = torch.tensor(bits, dtype=pairs.dtype, device="cpu")
        row = row.pin_memory() if pairs.is_cuda else row
        pairs.copy_(row, non_blocking=pairs.is_cuda)

    def finish_sending(self) -> None:
        """Let the buffers arrive that were sent beside the last bucket, which has landed."""
        report = self._report
        compare = report is not None and report.is_on_cpu and report.differ_now(self._place)
        self._replaced = self._buffers.finish(self._engine.source, compare=compare)
        if not self.differ:
            self._buffers.mark()

    def delivered(self) -> None:
        """As `Watcher.delivered`."""
        self._before = self._now
        if self._warning:
            warning, self._warning = self._warning, ""
            warn_at_user(warning)

    def _compare(self) -> None:
        """Exchange what was written. Every rank does so in the backward in which all have heard that it differs."""
        engine, names, report = self._engine, list(self._buffers.agreed), self._report
        assert report is not None
        late = not report.is_on_cpu
        written = self._before if late else self._now
        own, other = set(written.names or ()), set(names) if late else self._replaced
        row: list[int] = [written.names is not None, *(name in own for name in names)]
        row += [name in other for name in names]
        row += [written.hashes.get(name, 0) for name in names]
        wire = torch.tensor(row, dtype=torch.int32, device=collective.group_device(engine.group))
        rows = [each.tolist() for each in collective.all_gather(wire, engine.group)]
        for place, name in enumerate(names, 1):
            wrote = [rank for rank, each in enumerate(rows) if each[0] and each[place]]
            others = [rank for rank, each in enumerate(rows) if each[0] and not each[place]]
            values = {rank: value for rank in wrote if (value := rows[rank][place + 2 * len(names)])}  # 0 is unknown
            first = next(iter(values), 0)
            apart = [rank for rank, value in values.items() if value != values[first]]
            if wrote and others and any(each[place + len(names)] for each in rows):
                what = (
                    f"was written on rank {_listed(wrote)}, and not on rank {_listed(others)}. That forward had other "
                    "values on each; expected the same writes on every rank"
                )
                remedy = "write the buffer on every rank"
            elif apart:
                what = (
                    f"was written on rank {_listed(wrote)}, with other values on rank {_listed(apart)} than on rank "
                    f"{first}. If that forward has read it, it had other values on each; expected the same values "
                    "on every rank"
                )
                remedy = "write the same values on every rank"
            else:
                continue
            self.differ = True
            and_then = (
                " in training mode only, and this one was in eval mode. To be right in both,"
                if written.in_eval
                else ", as torch's class sends them. To save that,"
            )
            self.say_nothing()
            self._warning = (
                f"rank {engine.group.rank()}: after synchronised backward {engine.completed - late} and before the "
                f"next forward, buffer {name!r} {what}. From now on buffers are sent before forwards{and_then} "
                f"{remedy}."
            )
            return


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
