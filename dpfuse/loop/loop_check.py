"""Watches the gradients of one model from backward to step, and has the rules look before each step."""

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
from dpfuse.engine.protocols import PackArguments, PackStep
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import Question, ReportPlace
from dpfuse.engine.streams import capturing
from dpfuse.errors import DPFuseError, LoopWarning
from dpfuse.findings import Level, findings
from dpfuse.loop.comparison import RankComparison
from dpfuse.loop.facts import LoopFacts
from dpfuse.loop.never_stepped import NeverStepped
from dpfuse.loop.optimizer_rules import OptimizerRules, best_of
from dpfuse.loop.rank_words import LAST, WIDTHS, is_due, next_change
from dpfuse.loop.watched_gradient import WatchedGradient, is_plain

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
        rank: of this process.
        suspect: has the ranks compare their weights after a step, with what this rank has seen; returns False where
            they compare none.
        level: what becomes of a finding.

    Attributes:
        failed: whether a rule has failed, so that the check is off.
    """

    _engine: Engine
    _place: ReportPlace

    def __init__(
        self,
        module: nn.Module,
        rank: int,
        suspect: Callable[[str], bool],
        level: Level,
    ) -> None:
        self._module = module
        self._rank = rank
        self.failed = False
        self._next_change = next_change(0)  # how many averages there are when words begin to travel, or no longer do
        self._trains: bool | None = None  # whether the module was in training mode in the last forward
        self._modes = _Suspicion("modes that a rank has switched", self._compare_soon)
        self._rates = _Suspicion("learning rates that a rank has changed", self._compare_soon)
        self._batches = _Suspicion("batches that a rank takes for equal", self._compare_batches)
        self._until = 0  # how many averages there are when the words no longer travel that a rank has asked for
        self._suspect = suspect
        self._level: Level = level
        self._facts: LoopFacts | None = None  # known in the first backward, as is what follows
        self._comparison: RankComparison | None = None
        self._watched: list[WatchedGradient] = []
        self._spares: list[WatchedGradient] = []
        self._of: dict[ref[Optimizer], OptimizerRules] = {}
        self._steps = 0
        self._never_stepped: NeverStepped | None = None
        self._runs = False  # whether a backward was opened and has not ended
        self._announced = False

    def join(self, engine: Engine) -> None:
        """As `Feature.join`."""
        self._engine, self._place = engine, engine.layout.register("loop", WIDTHS)
        for one in (self._modes, self._rates, self._batches):
            engine.layout.ask(one.question)

    def step(self, order: int, bucket: Bucket, buffer: CommBuffer, report: Report | None) -> PackStep | None:
        """As `Feature.step`."""
        return None if report is None else _Tell(self, bucket, buffer, report)

    def planned(self, plan: BucketPlan) -> None:
        """As `Feature.planned`."""
        if self._never_stepped is not None and self._never_stepped.misses_names(names_of(plan)):
            self._look_at_rest()

    def thawed(self, params: Sequence[Tensor]) -> None:
        """As `Watcher.thawed`."""
        if self._never_stepped is not None and self._never_stepped.misses(map(leaf_of, params)):
            self._look_at_rest()

    def _look_at_rest(self) -> None:
        """Look from now on for parameters that no optimizer steps on."""
        if self._facts is not None:
            self._never_stepped = NeverStepped(self._facts)

    def forward_begins(self, inputs: Inputs) -> None:
        """As `Watcher.forward_begins`. Ask all ranks to compare their modes if that of this one was switched."""
        facts, trains = self._facts, self._module.training
        if trains is not self._trains:
            switched, self._trains = self._trains is not None, trains
            if switched and facts is not None:
                self._modes.ask(facts.averages)
        if facts is None or not facts.due or self._comparison is None:
            return
        try:
            self._comparison.forward_begins(inputs)
        except Exception as error:
            self._fail(error)

    def _compare_soon(self, asked: _Suspicion, count: int = SOON) -> None:
        """Have words travel in the next averages. A rank has asked, and every rank has heard of it in this backward."""
        asked.question.asks = False
        if self._facts is not None:
            averages = self._facts.averages + 1
            self._until, self._next_change = max(self._until, averages + count), averages
            asked.rest(averages)

    def _compare_batches(self, asked: _Suspicion) -> None:
        self._compare_soon(asked, SOON_BATCHES)
        if self._comparison is not None:
            self._comparison.compare_batches()

    def look_at_own(self, param: Tensor) -> None:
        """Keep some elements of a gradient that is about to be averaged."""
        try:
            if self._comparison is not None:
                self._comparison.own.look_at(param)
        except Exception as error:
            self._fail(error)

    def tell(self, report: Report, packed: Tensor, bucket: Bucket) -> None:
        """Write into the report, as it is packed after this bucket, what the ranks are to have in common."""
        try:
            facts = self._facts
            if facts is None or self._engine.without_inputs or self._comparison is None:
                return

            def params() -> dict[str, Tensor]:
                found = [*facts.params().items()]
                return dict(found[index] for index in bucket.params)

            self._comparison.write(report, packed, params)
        except Exception as error:
            self._fail(error)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`."""
        if self.failed:
            return
        try:
            facts = self._facts
            if facts is None:
                facts = self._begin()
            elif self._runs:  # the one before has died, after it had added to some gradients
                for watched in self._watched:
                    watched.forget()
            self._runs, self._announced = True, announced
            if not sync or self._spares:  # what an average writes is its own, whatever was there before
                for watched in self._watched:
                    watched.backward_begins(announced=announced)
        except Exception as error:
            self._fail(error)

    def local_backward_ended(self, *, added: bool) -> None:
        """As `Watcher.local_backward_ended`."""
        if self.failed:
            return
        try:
            self._runs = False
            if added:
                assert self._facts is not None
                self._facts.others += self._announced
                for watched in self._watched:
                    watched.local_ends(announced=self._announced)
        except Exception as error:
            self._fail(error)

    def delivered(self) -> None:
        """As `Watcher.delivered`."""
        if self.failed:
            return
        try:
            self._runs = False
            facts, comparison = self._facts, self._comparison
            assert facts is not None
            assert comparison is not None
            facts.averages += 1
            if comparison.waits:
                comparison.delivered()
            if comparison.own.was_equal():
                self._batches.ask(facts.averages)
            if facts.averages == self._next_change:
                asked = facts.averages < self._until
                facts.due = asked or is_due(facts.averages)
                later = next_change(facts.averages)
                self._next_change = min(later, self._until) if asked else later
            for watched in self._watched:
                watched.mean_ends()
        except Exception as error:
            self._fail(error)

    def before_step(self, optimizer: Optimizer) -> None:
        """Have the rules look, unless it is a step inside a backward; `optimizer` is about to step."""
        try:
            facts = self._facts
            if facts is None or (facts.on_gpu and capturing()):
                return
            if self._never_stepped is not None and not self._never_stepped.decided:
                self._never_stepped.before_step(optimizer)
            if self._runs:
                return
            comparison = self._comparison
            if comparison is not None and (comparison.heard or facts.due):
                comparison.before_step(optimizer)
            rules = self._of.get(ref(optimizer))
            if rules is None:
                self._of = {each: found for each, found in self._of.items() if each() is not None}
                rules = self._of[ref(optimizer)] = OptimizerRules(facts, self._suspect)
            if rules.rates_changed(optimizer):
                self._rates.ask(facts.averages)
            before = rules.watched
            rules.before_step(optimizer, self._spares)
            if self._spares or rules.watched is not before:
                self._choose_watched()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Log that a rule has failed, and look at nothing from now on.

        Raises:
            DPFuseError, LoopWarning: what a rule has found, as it is; a program can turn warnings into errors.
        """
        if isinstance(error, (DPFuseError, LoopWarning)):
            raise error
        self.failed = True
        findings.log_failure(self._rank, error)
        self._of.clear()
        self._watched, self._spares = [], []
        self._facts = self._comparison = self._never_stepped = None

    def _begin(self) -> LoopFacts:
        grads = self._engine

        def params() -> dict[str, Tensor]:
            return dict(zip(names_of(grads.plan), map(leaf_of, grads.params), strict=True))

        on_gpu = grads.params[0].is_cuda
        self._facts = facts = LoopFacts(params, self._rank, grads.group, on_gpu=on_gpu, level=self._level)
        found = best_of({name: param for name, param in params().items() if is_plain(param)})
        some = found[:: max(1, -(-len(found) // SPARES))]
        self._spares = [WatchedGradient(param, name, self._rank) for name, param in some]
        self._watched = list(self._spares)
        self._look_at_rest()
        device, size = grads.params[0].device.type, grads.group.size()
        self._comparison = RankComparison(self._module, facts, device, size, self._place)
        return facts

    def _choose_watched(self) -> None:
        """Watch the gradients of the optimizers, and at first those that one of them may turn out to own."""
        self._steps += 1
        if self._steps >= KNOWN:
            self._spares = []
        in_use = [*self._spares, *(each.watched for each in self._of.values() if each.watched is not None)]
        self._watched = list({id(each): each for each in in_use}.values())


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


class _Tell(PackStep):
    """Has the check write into the report, after what the bucket packs."""

    def __init__(self, check: LoopCheck, bucket: Bucket, buffer: CommBuffer, report: Report) -> None:
        self._check = check
        self._bucket = bucket
        self._buffer = buffer
        self._report = report
        plain = {str(place): param for place, param in enumerate(buffer.params) if is_plain(param)}
        # Its place: a bucket that is kept for later keeps no parameter alive.
        self._own = int(best_of(plain)[-1][0]) if plain else -1

    def after(self, arguments: PackArguments) -> None:
        facts = self._check._facts
        if facts is None:
            return
        if facts.due:
            self._check.tell(self._report, self._buffer.report, self._bucket)
        elif (
            facts.averages >= LAST
            and not facts.averages % OWN
            and 0 <= self._own < len(self._buffer.params)
            and not facts.on_gpu
        ):
            self._check.look_at_own(self._buffer.params[self._own])
