"""Compares the weights of the ranks after the optimizer's steps, a slice in each report. Sends nothing of its own.

Weights are equal after a step of the optimizer. During a backward they may differ: a program may add noise, or climb
as sharpness-aware minimisation does. So they are hashed after the step, and the report of the next backward compares
the hashes. Where they differ, all ranks hear of it in the same backward. The step after it hashes each parameter, and
so does the begin of the backward that follows. In the next averaged one, the ranks exchange these hashes and those of
that moment. What differs in all three is told.

`states.TRANSITIONS` says what follows what. This file tells it what has happened, and does what it says.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.comm import collective
from dpfuse.engine.backward_table import ABANDONED, IDLE, LOCAL
from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.feature import Backwards, Engine, Feature
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import PackStep
from dpfuse.engine.report import Compared, Report
from dpfuse.engine.report_layout import Question, ReportPlace
from dpfuse.engine.streams import capturing
from dpfuse.findings import Level, findings, say
from dpfuse.rules import w02_other_tensors
from dpfuse.rules.codes import OTHER_TENSORS, REST
from dpfuse.rules.w01_weights_differ import OF_BACKWARDS, Phrases
from dpfuse.weights.backward_begins import BackwardBegins
from dpfuse.weights.compared_tensors import ComparedTensors, Model
from dpfuse.weights.delayed import Delayed, Echo
from dpfuse.weights.false_alarms import FalseAlarms
from dpfuse.weights.hashing import Hashing, Hold
from dpfuse.weights.known_differences import Examined, KnownDifferences, Told
from dpfuse.weights.schedule import LastEqual, SliceSchedule
from dpfuse.weights.states import (
    AVERAGED,
    AWAITED,
    BACKWARD,
    DIFFERENT,
    EMPTY_STEP,
    EXAMINATION,
    FIRST,
    HASHED_AFTER,
    LOOK_DUE,
    NO_INPUTS,
    NOTHING,
    OFF,
    OUTER_STEP,
    PASS_SLICE,
    STEP,
    SUSPECTED,
    SYNCHRONIZED,
    TRANSITIONS,
    TURNED_OFF,
    Action,
    Event,
)
from dpfuse.weights.steps import RunningSteps, Steps
from dpfuse.weights.suspicion import Suspicion
from dpfuse.weights.which_ranks_differ import compare
from dpfuse_kernels.bit_hash import BITS

__all__ = ["WeightsCheck"]

LOOK_AGAIN = 64  # averaged backwards after which known differences are looked at again: they may have ended

log = logging.getLogger("dpfuse.weights")


class Averages(Protocol):
    """What averages gradients. The properties are those of `Engine`."""

    @property
    def completed(self) -> int:
        """The number of averages."""

    @property
    def reducer(self) -> Backwards:
        """What knows the state of a backward."""

    @property
    def without_inputs(self) -> bool:
        """Whether this rank only takes part."""


class _Hashes(NamedTuple):
    """The hash of each parameter, [tensors], at the moments before an examination; None at those that it has missed."""

    after_step: Tensor | None = None
    before_backward: Tensor | None = None


class _Slice(NamedTuple):
    number: int
    backward: int  # the averaged one after which it was hashed


class WeightsCheck(Feature):
    """Has the report compare hashes of the weights, and tells of what differs.

    Args:
        tensors: returns the parameters to compare, by name.
        model: knows where `tensors` may return others.
        group: the ranks.
        level: what becomes of a finding.
        words: for the messages.
        hold: how the hashing refers to the parameters; see `Hashing`.

    Attributes:
        question: what differs. A rank that has seen a difference asks.
        off: why weights are not compared any more; empty while they are.
    """

    _averages: Averages
    _place: ReportPlace
    _report: Compared

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, Tensor]],
        model: Model,
        group: dist.ProcessGroup,
        *,
        level: Level,
        words: Phrases = OF_BACKWARDS,
        hold: Hold | None = None,
    ) -> None:
        self.question = Question("weights", self._answer)
        self.off = ""
        self._group = group
        self._state = FIRST
        self._averaged = 0  # averages that this rank has heard of
        self._tensors = ComparedTensors(tensors, model, hold)
        self._schedule = SliceSchedule()
        self._sent: Delayed[_Slice] = Delayed()
        self._last_equal = LastEqual()
        self._steps = Steps()
        self._begins = BackwardBegins(self._backward_begins)
        self._echo = Echo()
        self._hashes = _Hashes()
        self._noticed = 0  # the averaged backward in which hashes differed
        self._suspicion = Suspicion(lambda: self._happens(SUSPECTED))
        self._differing = KnownDifferences(self._tensors, group, level, words)
        self._false_alarms = FalseAlarms()
        self._found: Told | None = None  # to be told once gradients are delivered
        self._act: dict[Action, Callable[[], None]] = {
            Action.HASH_SLICE: partial(self._hash, each=False, again=False),
            Action.HASH_SLICE_AGAIN: partial(self._hash, each=False, again=True),
            Action.HASH_EACH: partial(self._hash, each=True, again=False),
            Action.HASH_EACH_AGAIN: partial(self._hash, each=True, again=True),
            Action.HASH_BEFORE: self._hash_before,
            Action.HEAR_BEGINS: self._hear_begins_of_steps,
            Action.ASK: self._ask,
            Action.NOTICE: self._notice,
            Action.MAKE_DUE: self._make_due,
            Action.EXAMINE: self._examine,
            Action.START_AGAIN: self._start_again,
            Action.SAY_NOTHING: self._say_nothing,
        }
        _living.add(self)

    def _happens(self, event: Event) -> None:
        """Do what follows from an event. Two methods have these lines in them, since a step has no call to spare."""
        action, self._state = TRANSITIONS[self._state, event]
        if action is not NOTHING:
            self._act[action]()

    # --- What the engine tells ---

    def join(self, engine: Engine) -> None:
        """As `Feature.join`."""
        self._averages, self._begins.events = engine, engine.events
        self._differing.planned = lambda: engine.params
        self._place = engine.layout.register("hash of the weights", BITS, compared=True)
        engine.layout.ask(self.question)
        engine.layout.ask(self._suspicion.question)

    def step(self, order: int, bucket: Bucket, buffer: CommBuffer, report: Report | None) -> PackStep | None:
        """As `Feature.step`: take the report that the next backwards send."""
        if report is not None:
            self._take(report.compared(self._place))
        return None

    def compare_in(self, compared: Compared, averages: Averages) -> None:
        """Write hashes there, and learn from it whether they differ: without an engine."""
        self._averages = averages
        self._take(compared)

    def _take(self, report: Compared) -> None:
        self._report, self._sent.late = report, report.late

    def _backward_begins(self, sync: bool) -> bool:
        """Act where a backward begins; return whether there may be something to do in the next one, too."""
        if sync:
            self._echo.backward_begins()
        if not self._is_captured():
            self._happens(BACKWARD)
        return self._echo.left > 0 or self._state is HASHED_AFTER

    def delivered(self) -> None:
        """As `Watcher.delivered`: learn whether the hashes differed, and tell what an examination has found.

        Raises:
            DPFuseError: weights differ, and that is to be an error; on every rank.
        """
        self._averaged += 1
        event = AVERAGED
        if self._report.differs or self._sent.moves:
            event = self._heard()
        if self._differing.known and event is AVERAGED and self._averages.completed % LOOK_AGAIN == 0:
            event = LOOK_DUE
        action, self._state = TRANSITIONS[self._state, event]
        if action is not NOTHING:
            self._act[action]()
        if self._steps.inside:
            self._steps.inside = False
            if not self._is_captured():
                self._happens(STEP)
        if self._found is not None:
            self._tell_found()

    def _heard(self) -> Event:
        """Return what every rank hears now, and note what was equal."""
        counts, compared = self._sent.delivered()
        if counts and self._report.differs:
            self._sent.moves = True  # what every rank hears next may be that the same is equal
            return DIFFERENT
        if counts and compared is not None:
            self._last_equal.note(*compared)
        return AVERAGED

    def backward_failed(self) -> None:
        """As `Watcher.backward_failed`: the peers may have the mean, and step, although this rank has not heard it."""
        self._steps.inside = False
        if self._averages.completed != self._averaged:
            self._averaged = self._averages.completed
            self._happens(AVERAGED)

    @property
    def is_expected(self) -> bool:
        """Whether an examination follows, as far as this rank knows."""
        return self.question.due or self.question.asks

    # --- After a step ---

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`: tell that an optimizer of this model has stepped.

        After steps inside a backward that is told when it is averaged.
        """
        state, backward, steps = self._state, self._averages.reducer.state, self._steps
        if state is OFF or (state is FIRST and backward is IDLE):
            return
        owner = steps.owners.found.get(ref(optimizer))
        if owner is None or owner.groups != len(optimizer.param_groups):
            owner = steps.owners.look_at(optimizer, self._ids)
        if not owner.steps:
            return
        if backward is not IDLE:
            steps.inside = steps.inside or backward not in (LOCAL, ABANDONED)
            return
        event = STEP
        schedule, tensors = self._schedule, self._tensors
        if state is AWAITED and schedule.turn < schedule.empty_until and tensors.model.looks == tensors.made_for:
            event = EMPTY_STEP
            if steps.running is not None:
                steps.running.counted()
        elif self._is_captured():  # a replay would hash the same slice each time
            return
        elif steps.running is not None and steps.running.is_outer(optimizer):
            event = OUTER_STEP
        action, self._state = TRANSITIONS[state, event]
        if action is PASS_SLICE:  # in nearly each step, which has no call to spare
            schedule.turn += 1
        elif action is not NOTHING:
            self._act[action]()

    def _ids(self) -> set[int]:
        self.prepare()
        return self._tensors.ids

    def _hear_begins_of_steps(self) -> None:
        """Nothing tells which of two steps after an average began first, so this rank sends no hash once."""
        if self._steps.running is None:
            self._steps.running = RunningSteps()
            self._say_nothing()

    def _is_captured(self) -> bool:
        return self._report.pairs.is_cuda and capturing()

    def _hash(self, *, each: bool, again: bool) -> None:
        with self._or_off():
            hashing = self.prepare()
            if hashing is None:
                return
            if each:
                self._hashes = _Hashes(hashing.each())
                self._begins.hear()
            if not again:
                self._schedule.turn += 1
            if self._steps.running is not None:
                self._steps.running.counted()
            seed, number = self._schedule.place(hashing.slices)
            if not hashing.is_empty(number):
                known = self._differing.known
                but = [place for place, name in enumerate(hashing.names) if name in known] if known else ()
                hashing.write(number, seed, self._report.pairs, but)
                self._sent.send(_Slice(number, self._averages.completed))
            self._schedule.hashed(empty=hashing.empty_behind(number))

    def _hash_before(self) -> None:
        with self._or_off():
            hashing = self.prepare()
            if hashing is not None:
                self._hashes = self._hashes._replace(before_backward=hashing.each())

    @contextmanager
    def _or_off(self) -> Iterator[None]:
        """Turn the comparison off if what is hashed inside fails."""
        try:
            yield
        except RuntimeError as error:
            # The step itself is done, and a lack of memory passes. A failure of the device does not.
            if not self._report.pairs.is_cpu and not isinstance(error, torch.OutOfMemoryError):
                raise
            self.turn_off(f"hashing them has failed: {error}")

    def prepare(self) -> Hashing | None:
        """Return what hashes the parameters as they are now; None if there are none that can be compared."""
        tensors = self._tensors
        if tensors.model.looks != tensors.made_for:
            first = tensors.made_for < 0
            left = tensors.look(self._report.pairs.device)
            if left and first:
                self._log(
                    f"weights of {len(left)} parameters are not compared between ranks, {left[0]!r} among them: they "
                    "are divided, wrapped or on another device"
                )
            self._schedule.hashed(empty=0)
            self._hashes = _Hashes()  # of other tensors than those that there are now
            self._last_equal.forget()
            self._steps.owners.found.clear()
        return tensors.hashing

    # --- Where they differ ---

    @property
    def known(self) -> dict[str, int]:
        """Parameters that are known to differ, by name; each with the averaged backward of which that is known."""
        return self._differing.known

    @property
    def wrong(self) -> dict[str, int]:
        """The known parameters without those that a program may mean to differ; as `known`."""
        return self._differing.wrong

    def suspect(self, cause: str) -> bool:
        """Have all ranks examine the weights after a step, since this rank has seen what may make them differ.

        It asks in the next averaged backward, and they examine in the one after that.

        Args:
            cause: what this rank has seen, in sentences; for the message where weights differ.

        Returns:
            Whether weights are compared at all.
        """
        if self.off:
            return False
        self._suspicion.begin(cause)
        return True

    def settle(self) -> None:
        """Examine now what a rank suspects; to be called between backwards, on every rank in the same place.

        Raises:
            DPFuseError: weights differ, and that is to be an error; on every rank.
        """
        suspicion = self._suspicion
        row = torch.tensor([suspicion.question.asks or suspicion.common], device=collective.group_device(self._group))
        if any(bool(other.item()) for other in collective.all_gather(row, self._group)):
            suspicion.heard()
            self._noticed = self._averages.completed
            self.examine()
            self._tell_found()

    def tell_open(self) -> None:
        """Log what this rank suspects if the ranks have not compared it."""
        cause = self._suspicion.cause
        if cause and not self.off:
            rank = self._group.rank()
            text = f"rank {rank}: {cause} The program has ended before the ranks could compare their weights."
            findings.note(REST, rank, text)

    def turn_off(self, reason: str) -> None:
        """Compare weights no more.

        Args:
            reason: for the log; a clause.
        """
        if not self.off:
            self._log(f"weights are not compared between ranks any more: {reason}")
        self.off = reason
        self._happens(TURNED_OFF)

    def synchronized(self) -> None:
        """Note that all ranks have the same weights again; to be called on every rank."""
        self._happens(SYNCHRONIZED)

    def without_inputs(self) -> None:
        """Note that this rank only takes part in the next backward. It makes no steps, so it says nothing of them."""
        self._happens(NO_INPUTS)

    def examine(self) -> None:
        """Find what differs; to be called on every rank in the backward in which all do so."""
        self._happens(EXAMINATION)

    def _answer(self) -> None:
        """A rank expects an examination; every rank has heard of it in this backward."""
        if self._suspicion.common or not self._echo.left:
            self.examine()

    def _ask(self) -> None:
        self.question.asks = True  # It is not due: on a GPU a rank whose backward has failed does not know of it.

    def _notice(self) -> None:
        self._ask()
        self._noticed = self._averages.completed - self._report.late

    def _make_due(self) -> None:
        self._suspicion.heard()
        self.question.due = True
        self._noticed = self._averages.completed + 1

    def _examine(self) -> None:
        self.question.due = self.question.asks = False
        self._echo.examined(late=self._report.late)
        if self._echo.left:
            self._begins.hear()
        hashing, device = self.prepare(), collective.group_device(self._group)
        takes_part = not (self.off or self._averages.without_inputs)
        hashes, self._hashes = self._hashes, _Hashes()
        found = compare(hashing, hashes, self._schedule.turn, self._group, device, takes_part=takes_part)
        self._schedule.go_to(found.turn)
        self._sent.forget()
        if found.strangers:
            text = w02_other_tensors.text_of(self._group.rank(), found.strangers)
            self._found = OTHER_TENSORS, text, self._differing.level
            self.turn_off("the ranks have other parameters")
        elif hashing is not None:
            examined = Examined(found, hashing, hashes.after_step, device, takes_part, self._noticed)
            learned = self._differing.learn(examined, self._last_equal, self._suspicion.end())
            if learned.told is not None:
                self._found = learned.told
                self._false_alarms.end()
            elif learned.is_false_alarm and self._false_alarms.count(self._noticed):
                self.turn_off(
                    "they differ after the optimizer's step and are equal in the next backward, as in a program that "
                    "sends them in between"
                )
        self._say_nothing()

    def _tell_found(self) -> None:
        if self._found is not None:
            found, self._found = self._found, None
            say(*found)

    def _start_again(self) -> None:
        self._differing.keep(())
        # Ranks count slices by their own steps, of which one without inputs makes none. Averages are common to all.
        self._schedule.go_to(self._averages.completed)
        self.question.due = self.question.asks = self._suspicion.question.asks = False
        self._suspicion.end()
        self._hashes, self._found = _Hashes(), None
        self._sent.forget()
        self._say_nothing()

    def _say_nothing(self) -> None:
        """Send no hash of this rank. The other ranks compare theirs without it."""
        self._sent.send(None)
        with torch.no_grad():
            self._report.pairs.zero_()

    def _log(self, text: str) -> None:
        log.info("rank %d: %s", rank := self._group.rank(), text, extra={"rank": rank})


_living: WeakSet[WeightsCheck] = WeakSet()


@atexit.register
def _at_exit() -> None:
    for check in tuple(_living):
        check.tell_open()
