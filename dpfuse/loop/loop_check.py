"""Watches the gradients of one model from backward to step, and asks rules before a step that they look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from dpfuse.engine.bucket_set import names_of
from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.events import Inputs
from dpfuse.engine.feature import Engine, Feature
from dpfuse.engine.local_part import leaf_of
from dpfuse.engine.plan import Bucket, BucketPlan
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import Question, ReportPlace
from dpfuse.engine.streams import capturing
from dpfuse.errors import DPFuseError, LoopWarning
from dpfuse.findings import findings
from dpfuse.loop.compared_words import LAST, WIDTHS, is_due, next_change
from dpfuse.loop.comparison import RankComparison
from dpfuse.loop.stepping_optimizer import SteppingOptimizer, best_of
from dpfuse.loop.training_record import TrainingRecord
from dpfuse.loop.unowned_parameters import UnownedParameters
from dpfuse.loop.watched_gradient import WatchedGradient, has_plain_class

__all__ = ["LoopCheck"]

SPARES = 8  # gradients that are watched until the optimizers are known
KNOWN = 4  # steps, after which no more optimizer is expected
SOON = 4  # averages in which words travel after a rank has asked
SOON_BATCHES = 12  # the same, for batches that seem equal
OWN = 10  # averages after which a rank looks again whether the mean is what it has itself
PAUSE = 8, 512  # averages before it may ask again, at first and at most: a program may switch modes in each step


class LoopCheck(Feature):
    """Watches one gradient of each optimizer. Costs the same for 10 parameters and for 1,000.

    A rule that fails ends no training: it switches the check off on this rank. The other ranks go on with theirs. They
    compare nothing any more, since this one writes no word into the report.

    Args:
        module: that is wrapped.
        record: what the journal writes of it.
        suspect: has the ranks compare their weights after a step, with what this rank has seen; returns False where
            they compare none.

    Attributes:
        failed: whether a rule has failed, so that the check is off.
        chooses: whether the optimizers are not all known, so that other gradients are watched, too.
        watched: the gradients.
        marked: those of them that are told of each average: all while others are watched, too, and from the first
            backward on that was not synchronised. Until then the number of averages tells as much.
        next_change: how many averages there are when words begin to travel, or no longer do, or a rank looks at its own
            gradient.
        optimizers: what is known of those that have stepped.
        settled: whether a step after an average has nothing that a rule looks at, unless words have arrived or are
            due: the optimizers are known, and the rule of DPF-L04 is decided.
    """

    _engine: Engine
    _place: ReportPlace

    def __init__(self, module: nn.Module, record: TrainingRecord, suspect: Callable[[str], bool]) -> None:
        self._module = module
        self.record = record
        self.failed = False
        self.chooses, self.settled = True, False
        self.next_change = self._words_change = next_change(0)
        self._modes = _Suspicion("modes that a rank has switched", self._compare_soon)
        self._rates = _Suspicion("learning rates that a rank has changed", self._compare_soon)
        self._batches = _Suspicion("batches that a rank takes for equal", self._compare_batches)
        self._until = 0  # how many averages there are when the words no longer travel that a rank has asked for
        self._suspect = suspect
        self._comparison: RankComparison | None = None  # known in the first backward, as is what follows
        self.watched: list[WatchedGradient] = []
        self.marked: list[WatchedGradient] = []
        self._spares: list[WatchedGradient] = []
        self._all_averaged = True  # whether each backward so far was synchronised, and has ended
        self.optimizers: dict[ref[Optimizer], SteppingOptimizer] = {}
        self._steps = 0
        self._never_stepped: UnownedParameters | None = None
        self._own: tuple[Bucket | None, int] = None, -1  # the last bucket, and the place of a gradient in it

    def join(self, engine: Engine) -> None:
        """As `Feature.join`."""
        self._engine, self._place = engine, engine.layout.register("loop", WIDTHS)
        for one in (self._modes, self._rates, self._batches):
            engine.layout.ask(one.question)

    def planned(self, plan: BucketPlan) -> None:
        """As `Feature.planned`."""
        if self._never_stepped is not None and self._never_stepped.misses_names(names_of(plan)):
            self._never_stepped, self.settled = UnownedParameters(self.record), False

    def thawed(self, params: Sequence[Tensor]) -> None:
        """As `Watcher.thawed`."""
        if self._never_stepped is not None and self._never_stepped.misses(map(leaf_of, params)):
            self._never_stepped, self.settled = UnownedParameters(self.record), False

    # --- What the journal tells ---

    def note_forward(self, inputs: Inputs) -> None:
        """A forward begins in another mode than the one before, or one whose backward may be compared."""
        record, trains = self.record, self._module.training
        try:
            if trains is not record.trains:
                switched, record.trains = record.trains is not None, trains
                if switched and self._comparison is not None:
                    self._modes.ask(record.averages)
            if record.due and self._comparison is not None:
                self._comparison.forward_begins(inputs)
        except Exception as error:
            self.fail(error)

    def note_backward(self, *, sync: bool, announced: bool) -> None:
        """A backward begins that is not synchronised, or comes after one that has died, or before the first steps."""
        if self.failed:
            return
        record = self.record
        try:
            if self._comparison is None:
                self._begin()
            if record.runs or not sync:
                self._all_averaged = False
                for watched in () if self.marked else self.watched:
                    watched.catch_up(record.averages, announced=announced)
                self.marked = self.watched
            if record.runs:  # the one before has died, after it had added to some gradients
                for watched in self.watched:
                    watched.forget()
            if not sync or self._spares:  # what an average writes is its own, whatever was there before
                for watched in self.watched:
                    watched.backward_begins(announced=announced)
        except Exception as error:
            self.fail(error)

    def note_local_backward(self) -> None:
        """A backward has added to gradients, and was not synchronised."""
        try:
            for watched in self.watched:
                watched.local_ends(announced=self.record.announced)
        except Exception as error:
            self.fail(error)

    def note_average(self) -> None:
        """A backward was synchronised that a rule looks at, or after which what is to be packed changes."""
        record, comparison, averages = self.record, self._comparison, self.record.averages
        if comparison is None:
            return
        if record.looks:
            if comparison.waits:
                comparison.delivered()
            if comparison.own.look is not None and comparison.own.was_equal():
                self._batches.ask(averages)
            record.looks = comparison.waits
        if averages == self._words_change:
            asked = averages < self._until
            record.due = asked or is_due(averages)
            self._words_change = min([next_change(averages), *[self._until] * asked])
        if averages == self.next_change:
            looks, past = averages >= LAST and not (record.due or record.on_gpu), averages % OWN
            self.next_change = min([self._words_change, *[averages + (OWN - past if past else 1)] * looks])
            self._engine.layout.writers[:] = [self.write] if record.due or (looks and not past) else []

    def _compare_soon(self, asked: _Suspicion, count: int = SOON) -> None:
        """Have words travel in the next averages. A rank has asked, and every rank has heard of it in this backward."""
        asked.question.asks = False
        averages = self.record.averages + 1
        self._until = max(self._until, averages + count)
        self.next_change = self._words_change = averages
        asked.rest(averages)

    def _compare_batches(self, asked: _Suspicion) -> None:
        self._compare_soon(asked, SOON_BATCHES)
        if self._comparison is not None:
            self._comparison.compare_batches()

    # --- What packing tells ---

    def write(self, bucket: Bucket, buffer: CommBuffer, report: Report) -> None:
        """Write into the report what the ranks are to have in common, or keep some elements of a gradient.

        They are packed, and about to be averaged.
        """
        comparison, record = self._comparison, self.record
        if comparison is None or (record.due and self._engine.without_inputs):
            return
        try:
            if record.due:
                comparison.write(report, buffer.report, bucket)
            elif (param := self._param_in(bucket)) is not None:
                comparison.own.look_at(param, buffer)
            record.looks = True
        except Exception as error:
            self.fail(error)

    def _param_in(self, bucket: Bucket) -> Tensor | None:
        """Return the parameter of the last bucket at whose gradient this rank looks."""
        last = self._engine.buckets[-1]
        if self._own[0] is not bucket:
            plain = {str(place): param for place, param in enumerate(last.params) if has_plain_class(param)}
            self._own = bucket, int(best_of(plain)[-1][0]) if plain else -1
        place = self._own[1]
        return None if place < 0 else last.params[place]

    # --- What optimizers tell ---

    def note_step(self, optimizer: Optimizer) -> None:
        """Have the rules look, unless it is a step inside a backward; `optimizer` is about to step."""
        comparison, record = self._comparison, self.record
        if self.failed or comparison is None:
            return
        try:
            if record.on_gpu and capturing():
                return
            if self._never_stepped is not None and not self._never_stepped.decided:
                self._never_stepped.before_step(optimizer)
            if record.runs:
                return
            if record.heard or record.due:
                comparison.before_step(optimizer)
            rules = self.optimizers.get(ref(optimizer))
            if rules is None:
                self.optimizers = {each: found for each, found in self.optimizers.items() if each() is not None}
                rules = self.optimizers[ref(optimizer)] = SteppingOptimizer(record, self._suspect, self._rates.ask)
            before = rules.watched
            rules.before_step(optimizer, self._spares)
            if self._spares or rules.watched is not before:
                self._choose_watched()
            self.settled = not self.chooses and self._never_stepped is not None and self._never_stepped.decided
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Log that a rule has failed, and look at nothing from now on.

        Raises:
            DPFuseError, LoopWarning: what a rule has found, as it is; a program can turn warnings into errors.
        """
        if isinstance(error, (DPFuseError, LoopWarning)):
            raise error
        self.failed, self.chooses, self.settled = True, False, False
        findings.log_failure(self.record.rank, error)
        self.optimizers.clear()
        self._engine.layout.writers.clear()
        self.watched, self.marked, self._spares = [], [], []
        self._comparison = self._never_stepped = None
        self.record.due = self.record.heard = self.record.looks = False

    def _begin(self) -> None:
        grads, record = self._engine, self.record
        record.on_gpu = grads.params[0].is_cuda
        found = best_of({name: param for name, param in record.params().items() if has_plain_class(param)})
        some = found[:: max(1, -(-len(found) // SPARES))]
        self._spares = [WatchedGradient(param, name, record.rank) for name, param in some]
        self.watched = self.marked = list(self._spares)
        self._never_stepped = UnownedParameters(record)
        device, size = grads.params[0].device.type, grads.group.size()
        self._comparison = RankComparison(self._module, record, device, size, self._place)

    def _choose_watched(self) -> None:
        """Watch the gradients of the optimizers, and at first those that one of them may turn out to own."""
        self._steps += 1
        if self._steps >= KNOWN:
            self._spares, self.chooses = [], False
        in_use = [*self._spares, *(each.watched for each in self.optimizers.values() if each.watched is not None)]
        self.watched = list({id(each): each for each in in_use}.values())
        self.marked = [] if self._all_averaged and not self._spares else self.watched


class _Suspicion:
    """Asks the ranks to compare after what this one has seen, ever less often: a program may do it in each step.

    Args:
        what: is to be compared.
        answer: called on all ranks with this object, once a rank has asked.
    """

    def __init__(self, what: str, answer: Callable[[_Suspicion], None]) -> None:
        self.question = Question(what, lambda: answer(self))
        self._silent_until, self._pause = 0, PAUSE[0]

    def ask(self, averages: int) -> None:
        """Ask in the next backward, unless the ranks have answered shortly before; there were so many `averages`."""
        if averages >= self._silent_until:
            self.question.asks = True

    def rest(self, averages: int) -> None:
        """Ask no more for a while."""
        self._silent_until, self._pause = averages + self._pause, min(2 * self._pause, PAUSE[1])
