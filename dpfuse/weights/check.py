"""Compares the weights of the ranks after the optimizer's steps, a slice in each report. Sends nothing of its own.

Weights are equal after a step of the optimizer. During a backward they may differ: a program may add noise, or climb
as sharpness-aware minimisation does. So they are hashed after the step, and the report of the next backward compares
the hashes. Where they differ, all ranks hear of it in the same backward. The step after it hashes each parameter, and
so does the begin of the backward that follows. In the next averaged one, the ranks exchange these hashes and those of
that moment. What differs in all three is told.

Only the first step after an average counts. Further ones are made on other gradients, such as those of the inner loop
of meta-learning, whose steps are taken back.
"""

from __future__ import annotations

import atexit
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.comm import collective
from dpfuse.engine.comm_buffer import CommBuffer, dense_stride
from dpfuse.engine.feature import Engine, Feature
from dpfuse.engine.inner_tensors import memories_of
from dpfuse.engine.local_part import LocalPart, leaf_of
from dpfuse.engine.phase import IDLE, Phase
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import PackStep
from dpfuse.engine.report import Compared, Report
from dpfuse.engine.report_layout import Question, ReportPlace
from dpfuse.engine.streams import capturing
from dpfuse.findings import OTHER_TENSORS, REST, WEIGHTS, Level, findings, say
from dpfuse.weights.examination import Differences, compare, measure
from dpfuse.weights.finding import OF_BACKWARDS, Drift, Phrases, tell_other_tensors
from dpfuse.weights.hashing import Hashing, Hold
from dpfuse_kernels.bit_hash import BITS

__all__ = ["WeightsCheck"]

LOOK_AGAIN = 64  # averaged backwards after which known differences are looked at again: they may have ended
FALSE_ALARMS = 3  # differences in a row that had ended a step later, after which a program is left alone
IN_A_ROW = 200  # averaged backwards between two of them, at most

log = logging.getLogger("dpfuse.weights")


class Averages(Protocol):
    """What averages gradients. The properties are those of `Engine`."""

    @property
    def completed(self) -> int:
        """The number of averages."""

    @property
    def phase(self) -> Phase:
        """That of the backward that is open."""

    @property
    def without_inputs(self) -> bool:
        """Whether this rank only takes part."""


class _Memory(NamedTuple):
    memory: Tensor  # of the parameter, or of what has its values
    param: Tensor
    path: str  # of attributes, from one to the other


class WeightsCheck(Feature):
    """Has the report compare hashes of the weights, and tells of what differs.

    Args:
        tensors: returns the parameters to compare, by name.
        version: returns a number that changes where `tensors` may return others.
        group: the ranks.
        level: what becomes of a finding.
        words: for the messages.
        hold: how the hashing refers to the parameters; see `Hashing`.

    Attributes:
        known: parameters that are known to differ, by name; each with the averaged backward of which that is known.
        question: what differs. A rank that has seen a difference asks.
        off: why weights are not compared any more; empty while they are.
    """

    _averages: Averages
    _place: ReportPlace

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, Tensor]],
        version: Callable[[], int],
        group: dist.ProcessGroup,
        *,
        level: Level,
        words: Phrases = OF_BACKWARDS,
        hold: Hold | None = None,
    ) -> None:
        self.known: dict[str, int] = {}
        self.off = ""
        self.question = Question("weights", self._answer)
        self._suspicion = Question("weights that a rank suspects", self._examine_soon)
        self._suspected = False  # whether a rank has, so that the next examination tells
        self._cause = ""  # what this rank has seen
        self._tensors = tensors
        self._version = version
        self._group = group
        self._level = level
        self._words = words
        self._hold = hold
        # Returns the parameters whose gradients are averaged; None: all of them, as without an engine.
        self._planned: Callable[[], Sequence[Tensor]] | None = None
        self._meant: set[str] = set()  # of the known ones, those that may be meant so
        # When the model was wrapped, the ranks have compared them.
        self._strides = {name: dense_stride(each.memory) for name, each in self._memories().items()}
        self._common = set(self._strides)  # names that all ranks have, as far as is known
        self._report: Compared | None = None
        self._hashing: Hashing | None = None
        self._made_for = -1  # the version for which it was made
        self._ids: set[int] = set()  # of the parameters that are compared
        # Of each optimizer, the number of its groups, and whether it steps a parameter that is compared.
        self._owners: dict[ref[Optimizer], tuple[int, bool]] = {}
        self._turn = 0  # the number of the next slice, over all passes
        self._empty = 0  # how many slices from the next one on are known to be empty
        self._hashed_at = -1  # the completed backwards when a slice was last hashed
        self._stepped_inside = False  # whether an optimizer of this model has stepped inside the backward that runs
        self._begun: dict[int, int] = {}  # of each optimizer that steps now, by id, the value of that as it began
        # The slice whose hash the report has, and the averaged backward after which it was hashed.
        self._slice: tuple[int, int] | None = None
        self._travelling: deque[tuple[int, int] | None] = deque()  # those whose comparison this rank has not read
        self._equal: dict[int, int] = {}  # by slice, the last averaged backward after which weights were equal
        # While an examination is due, the hash of each parameter after the step, and as the next backward began.
        self._after_step: Tensor | None = None
        self._before_backward: Tensor | None = None
        self._noticed = 0  # the averaged backward in which hashes differed
        self._ignored = 0  # deliveries whose comparison tells nothing new
        # Averaged backwards until what ranks hear was asked after the last examination: on a GPU they hear it late.
        self._older = 0
        # A code, a text and what becomes of it, to be told once gradients are delivered.
        self._found: tuple[str, str, Level] | None = None
        self._false_alarms = 0
        self._last_alarm = 0  # the averaged backward of the last one
        _living.add(self)

    # --- What the engine tells ---

    def join(self, engine: Engine) -> None:
        """As `Feature.join`."""
        self._averages = engine
        self._planned = lambda: engine.params
        self._place = engine.layout.register("hash of the weights", BITS, compared=True)
        engine.layout.ask(self.question)
        engine.layout.ask(self._suspicion)

    def step(self, order: int, bucket: Bucket, buffer: CommBuffer, report: Report | None) -> PackStep | None:
        """As `Feature.step`: take the report that the next backwards send."""
        if report is not None:
            self._report = report.compared(self._place)
        return None

    def compare_in(self, compared: Compared, averages: Averages) -> None:
        """Write hashes there, and learn from it whether they differ: without an engine."""
        self._report, self._averages = compared, averages

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`: a rank without inputs makes no steps, so it says nothing of its weights."""
        self._stepped_inside = False
        if sync and self._older:
            self._older -= 1
        if sync and self._averages.without_inputs:
            self._say_nothing()
        if self._after_step is not None and self._before_backward is None:
            self._try(self._hash_before_backward)

    def delivered(self) -> None:
        """As `Watcher.delivered`: learn whether the hashes differed, and tell what an examination has found.

        Raises:
            DPFuseError: weights differ, and that is to be an error; on every rank.
        """
        report, completed = self._report, self._averages.completed
        assert report is not None
        late, compared = report.late, self._slice
        if late:  # the comparison that is known now is that of the backward before
            self._travelling.append(self._slice)
            compared = self._travelling.popleft() if len(self._travelling) > 1 else None
        if self._ignored:
            self._ignored -= 1
        elif report.differs:
            self.question.asks = True  # It is not due: on a GPU a rank whose backward has failed does not know of it.
            self._noticed = completed - late
        elif compared is not None:
            number, hashed_at = compared
            self._equal[number] = hashed_at
        if self.known and completed % LOOK_AGAIN == 0:
            self.question.asks = True
        if self._stepped_inside:
            self._try(self._hash_behind_step)
        self._tell_found()

    @property
    def is_expected(self) -> bool:
        """Whether an examination follows, as far as this rank knows."""
        return self.question.due or self.question.asks

    # --- Around a step ---

    def before_step(self, optimizer: Optimizer) -> None:
        """Note whether weights were hashed since the last average. Other steps may run inside this one."""
        self._begun[id(optimizer)] = self._hashed_at

    def after_step(self, optimizer: Optimizer) -> None:
        """Hash the next slice, or each parameter, after the first step of this model after an average.

        After steps inside a backward they are hashed when it is averaged.
        """
        averages, report, hashed_at = self._averages, self._report, self._begun.pop(id(optimizer), -1)
        if self.off or report is None:
            return
        completed = averages.completed
        if averages.phase is not IDLE:
            self._stepped_inside = self._stepped_inside or self._steps_us(optimizer)
        elif completed not in (0, hashed_at) and self._steps_us(optimizer):
            if (
                self._empty
                and self._version() == self._made_for
                and not self.is_expected
                and completed != self._hashed_at
            ):
                self._hashed_at, self._turn, self._empty = completed, self._turn + 1, self._empty - 1
            else:
                self._try(self._hash_behind_step)

    def _try(self, act: Callable[[Hashing, Tensor], None]) -> None:
        """Hash something, if there is anything to hash."""
        pairs = None if self._report is None else self._report.pairs
        if self.off or pairs is None or (pairs.is_cuda and capturing()):
            return  # a replay would hash the same slice each time
        try:
            hashing = self.prepare()
            if hashing is not None:
                act(hashing, pairs)
        except RuntimeError as error:
            # The step itself is done, and a lack of memory passes. A failure of the device does not.
            if not pairs.is_cpu and not isinstance(error, torch.OutOfMemoryError):
                raise
            self.turn_off(f"hashing them has failed: {error}")

    def _hash_before_backward(self, hashing: Hashing, pairs: Tensor) -> None:
        self._before_backward = hashing.each()

    def _hash_behind_step(self, hashing: Hashing, pairs: Tensor) -> None:
        completed = self._averages.completed
        if self.is_expected:
            self._after_step, self._before_backward = hashing.each(), None
        if completed != self._hashed_at:  # else the slice is hashed again, since a step has run inside of this one
            self._hashed_at = completed
            self._turn += 1
        seed, number = divmod(self._turn - 1, hashing.slices)
        if not hashing.is_empty(number):
            but = [place for place, name in enumerate(hashing.names) if name in self.known] if self.known else ()
            hashing.write(number, seed, pairs, but)
            self._slice = number, completed
        self._empty = hashing.empty_behind(number)

    def _steps_us(self, optimizer: Optimizer) -> bool:
        count, known = self._owners.get(ref(optimizer), (0, False))
        if count != len(optimizer.param_groups):
            self.prepare()
            params = (param for group in optimizer.param_groups for param in group["params"])
            known = not self._ids.isdisjoint(map(id, params))
            self._owners = {each: found for each, found in self._owners.items() if each() is not None}
            self._owners[ref(optimizer)] = len(optimizer.param_groups), known
        return known

    def prepare(self) -> Hashing | None:
        """Return what hashes the parameters as they are now; None if there are none that can be compared."""
        version = self._version()
        if version != self._made_for:
            assert self._report is not None
            device = self._report.pairs.device
            # A frozen module may be added on one rank, such as what it evaluates with. Ranks agree on what is trained.
            found = self._memories()
            self._common |= {name for name, each in found.items() if each.param.requires_grad}
            found = {name: each for name, each in found.items() if name in self._common}
            kept = {name: each for name, each in found.items() if _is_plain(each.memory, device)}
            left = [name for name in found if name not in kept]
            if left and self._made_for < 0:
                self._log(
                    f"weights of {len(left)} parameters are not compared between ranks, {left[0]!r} among them: they "
                    "are divided, wrapped or on another device"
                )
            held = {id(each.memory): self._held(each) for each in kept.values()}
            tensors = {name: each.memory for name, each in kept.items()}
            self._hashing = Hashing(tensors, self._strides, device, lambda memory: held[id(memory)]) if kept else None
            self._ids = {id(leaf_of(each.param)) for each in kept.values()}
            self._made_for, self._empty = version, 0
            self._equal = {}
            self._owners.clear()
        return self._hashing

    def _memories(self) -> dict[str, _Memory]:
        """Return what is compared, by name."""
        return {
            name + path: _Memory(memory, param, path)
            for name, param in self._tensors().items()
            for path, memory in memories_of(param).items()
        }

    def _held(self, each: _Memory) -> Callable[[], Tensor | None]:
        """Return what finds this memory again: a parameter may have another one inside by then."""
        param = partial(_itself, each.param) if self._hold is None else self._hold(each.param)
        return param if each.memory is each.param else partial(_inside, param, each.path)

    # --- Where they differ ---

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
        self._suspicion.asks, self._cause = True, cause
        return True

    def settle(self) -> None:
        """Examine now what a rank suspects; to be called between backwards, on every rank in the same place.

        Raises:
            DPFuseError: weights differ, and that is to be an error; on every rank.
        """
        row = torch.tensor([self._suspicion.asks or self._suspected], device=collective.group_device(self._group))
        if any(bool(other.item()) for other in collective.all_gather(row, self._group)):
            self._suspicion.asks, self._suspected, self._noticed = False, True, self._averages.completed
            self.examine()
            self._tell_found()

    def tell_open(self) -> None:
        """Log what this rank suspects if the ranks have not compared it."""
        if self._cause and not self.off:
            rank = self._group.rank()
            text = f"rank {rank}: {self._cause} The program has ended before the ranks could compare their weights."
            findings.note(REST, rank, text)

    def _examine_soon(self) -> None:
        """A rank suspects; every rank has heard of it in this backward."""
        self._suspicion.asks = False
        self._suspected = self.question.due = True
        self._noticed = self._averages.completed + 1

    def turn_off(self, reason: str) -> None:
        """Compare weights no more.

        Args:
            reason: for the log; a clause.
        """
        if not self.off:
            self._log(f"weights are not compared between ranks any more: {reason}")
        self.off = reason
        self._say_nothing()

    def _log(self, text: str) -> None:
        rank = self._group.rank()
        log.info("rank %d: %s", rank, text, extra={"rank": rank})

    def _answer(self) -> None:
        """A rank expects an examination; every rank has heard of it in this backward."""
        if self._suspected or not self._older:
            self.examine()

    def examine(self) -> None:
        """Find what differs; to be called on every rank in the backward in which all do so."""
        self.question.due = self.question.asks = False
        self._older = 2 if self._report is not None and self._report.late else 0
        hashing, device = self.prepare(), collective.group_device(self._group)
        takes_part = not (self.off or self._averages.without_inputs)
        moments = self._after_step, self._before_backward
        found = compare(hashing, moments, self._turn, self._group, device, takes_part=takes_part)
        self._turn, self._hashed_at, self._empty = found.turn, -1, 0
        self._ignored = 1 if self._report is None or not self._report.late else 2
        if found.strangers:
            self._found = OTHER_TENSORS, tell_other_tensors(self._group.rank(), found.strangers), self._level
            self.turn_off("the ranks have other parameters")
        elif hashing is not None:
            self._learn(hashing, found, device, takes_part=takes_part)
        self._after_step = self._before_backward = None
        self._say_nothing()

    def _learn(self, hashing: Hashing, found: Differences, device: torch.device, *, takes_part: bool) -> None:
        names = hashing.names
        differing = {names[place] for place in found.ever}
        recovered = [name for name in self.known if name not in differing]
        for name in recovered:
            del self.known[name]
            self._meant.discard(name)
        new = [place for place in found.always if names[place] not in self.known]
        suspected, self._suspected = self._suspected, False
        cause, self._cause = self._cause, ""
        if not new:
            self._count_false_alarm(looked_again=suspected or bool(recovered or self.known))
            return
        self._false_alarms = 0
        own = hashing if takes_part else None
        first = max(self._last_equal(hashing, place) for place in new)
        apart = measure(own, self._after_step, new, first, self._group, device, suspects=bool(cause))
        names_now = tuple(names[place] for place in new)
        frozen = self._are_frozen(names_now)
        finding = Drift(
            names=names_now,
            count=len(names),
            numels=tuple(hashing.numel(place) for place in new),
            first=apart.first,
            last=self._noticed,
            others=tuple(apart.measured),
            reference=apart.reference,
            size=self._group.size(),
            measured=tuple(apart.measured.values()),
            measured_count=apart.count,
            frozen=frozen,
            words=self._words,
        )
        rank = self._group.rank()
        level: Level = "warn" if self._level == "raise" and finding.may_be_meant else self._level
        if suspected and not frozen:  # what a rank has added to gradients changes no other parameter
            self._found = REST, finding.text_of_rest(rank, cause, apart.suspects), level
        else:
            self._found = WEIGHTS, finding.text(rank), level
        self.known |= dict.fromkeys(finding.names, self._noticed)
        if finding.may_be_meant:
            self._meant |= set(finding.names)

    def _are_frozen(self, names: Collection[str]) -> bool:
        """Whether no gradient of these parameters is averaged."""
        if self._planned is None:
            return False
        # By identity: a module that was put into another one gives its parameters other names.
        planned, found = {id(leaf_of(param)) for param in self._planned()}, self._memories()
        return not any(id(leaf_of(found[name].param)) in planned for name in names if name in found)

    @property
    def wrong(self) -> dict[str, int]:
        """The known parameters without those that a program may mean to differ; as `known`."""
        return {name: since for name, since in self.known.items() if name not in self._meant}

    def _count_false_alarm(self, *, looked_again: bool) -> None:
        if looked_again:
            return
        if self._noticed - self._last_alarm > IN_A_ROW:
            self._false_alarms = 0
        self._last_alarm = self._noticed
        self._false_alarms += 1
        if self._false_alarms == FALSE_ALARMS:
            self.turn_off(
                "they differ after the optimizer's step and are equal in the next backward, as in a program that sends "
                "them in between"
            )

    def _last_equal(self, hashing: Hashing, place: int) -> int:
        """Return the last averaged backward after which all of a parameter was equal."""
        return min(self._equal.get(number, 0) for number in hashing.slices_with(place))

    def _tell_found(self) -> None:
        if self._found is not None:
            found, self._found = self._found, None
            say(*found)

    def synchronized(self) -> None:
        """Note that all ranks have the same weights again; to be called on every rank."""
        self.known, self._meant = {}, set()
        # Ranks count slices by their own steps, of which one without inputs makes none. Averages are common to all.
        self._turn, self._hashed_at, self._empty = self._averages.completed, -1, 0
        self.question.due = self.question.asks = self._suspicion.asks = self._suspected = False
        self._cause = ""
        self._after_step = self._before_backward = self._found = None
        self._ignored = 1 if self._report is None or not self._report.late else 2
        self._say_nothing()

    def _say_nothing(self) -> None:
        """Send no hash of this rank. The other ranks compare theirs without it."""
        self._slice = None
        if self._report is not None:
            with torch.no_grad():
                self._report.pairs.zero_()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _inside(param: Callable[[], Tensor | None], path: str) -> Tensor | None:
    found = param()
    return None if found is None else memories_of(found).get(path)


def _is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether the bits of a tensor are on this rank, and can be read."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer, LocalPart)
    return plain and tensor.layout is torch.strided and tensor.device == device and not tensor.is_meta


_living: WeakSet[WeightsCheck] = WeakSet()


@atexit.register
def _at_exit() -> None:
    for check in tuple(_living):
        check.tell_open()
