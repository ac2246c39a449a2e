"""The reducer on buckets that only note what happens to them: every phase and every illegal move, no gradient."""

from __future__ import annotations

import gc
import random
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dpfuse.comm.waiting import Track
from dpfuse.engine.bucket import FLIGHT, FREE, LANDED
from dpfuse.engine.bucket_set import BucketSet
from dpfuse.engine.events import Events, Watcher
from dpfuse.engine.feeds.accumulating import Accumulating
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.phase import Phase
from dpfuse.engine.plan import plan_buckets
from dpfuse.engine.protocols import Delivery, Feed
from dpfuse.engine.reducer import Reducer, Wiring
from dpfuse.engine.report import ALL_WELL, Reading
from dpfuse.engine.report_layout import Field, Question, ReportLayout
from dpfuse.engine.send_order import SendOrder
from dpfuse.engine.sync_decision import Window
from dpfuse.errors import DPFuseError

RANK, SIZE = 0, 2


class Group:
    """Stands for a process group."""


class NotedReport:
    """Says what the test wants, or else only what happened on this rank."""

    def __init__(self):
        self.reading = ALL_WELL
        self.unreadable = False
        self.is_on_cpu = True
        self.was_read = True
        self.asked = ()
        self.used = set()
        self.reads = []
        self.handed_over = 0

    def hand_over(self):
        self.handed_over += 1

    def read(self, outcome, *, wait, gather):
        self.reads.append((wait, gather))
        self.was_read = self.is_on_cpu or (wait and not self.unreadable)
        if self.reading is not ALL_WELL and not self.unreadable:
            return self.reading
        return ALL_WELL if outcome.well else Reading(any_failed=True, rank=RANK)

    def follow(self, before):
        """It has told everything."""

    def used_somewhere(self, indices):
        return self.used.intersection(indices)

    def wrong(self):
        return torch.tensor(False)


class NotedFeed(Feed):
    """Has a hook for some parameters, which notes that it was called."""

    def __init__(self, log, large=()):
        self.log, self.large = log, large

    def hooks(self):
        return {index: lambda index=index: self.log.append(("pack", index)) for index in self.large}


class NotedAccumulating(Accumulating):
    """Notes when it takes gradients."""

    def __init__(self, order, log):
        self.order, self.log, self.held, self.error = order, log, set(), None

    def take(self, *, backward_ended):
        self.log.append(("take", self.order, backward_ended))
        if self.error is not None and backward_ended:
            raise self.error
        self.held.add(self.order)

    def forget(self):
        count = len(self.held)
        self.held.clear()
        return count


class NotedBucket:
    """Notes its moves and refuses those that `GradBucket` refuses."""

    def __init__(self, plan, order, params, log, report, feed=None):
        self.plan, self.order, self.params, self.log = plan, order, [params[index] for index in plan.params], log
        flat = SimpleNamespace(device=torch.device("cpu"))
        self.parts = SimpleNamespace(
            report=report, feed=feed or Feed(), writers=None, buffer=SimpleNamespace(flat=flat), delivery=Delivery()
        )
        self.state, self.error, self.missing = FREE, None, []
        self.lacks, self.fails = [], None  # what the test plants
        self.rides = self.carries = False
        self.outcome = None

    @property
    def busy(self):
        return self.state is not FREE

    def send(self, outcome, *, complete):
        self._move(FREE, FLIGHT, ("send", self.order))
        self.missing, self.error, self.complete, self.frozen = list(self.lacks), self.fails, complete, outcome.frozen
        outcome.missing += tuple(self.missing)
        outcome.error = outcome.error or self.error

    def send_empty(self, outcome):
        self.missing = []
        self._move(FREE, FLIGHT, ("send empty", self.order, outcome.failed, outcome.changed))

    def wait(self):
        self._move(FLIGHT, LANDED, ("wait", self.order))

    def arrive(self):
        self._move(FLIGHT, FREE, ("arrive", self.order))

    def deliver(self, untouched=frozenset()):
        self._move(LANDED, FREE, ("deliver", self.order, *sorted(untouched)))

    def discard(self):
        if self.state is FLIGHT:
            self.wait()
        self._move(LANDED, FREE, ("discard", self.order))

    def _move(self, before, after, entry):
        assert self.state is before, (self.order, entry, self.state)
        self.state = after
        self.log.append(entry)


class Bench:
    """A reducer of `count` parameters in buckets of two, and of one at both ends: (5,), (3, 4), (1, 2), (0,).

    Attributes:
        log: what happened, in order.
        hooks: what is installed, by registration index.
        at_end: how often the reducer has asked to be opened at the end of a backward, if not before.
        seen: order and marks of each first synchronised backward.
    """

    def __init__(self, count=6, *, feed=None, strict=False, warn_unused=False, watchers=()):
        self.log, self.hooks, self.seen, self.guarded, self.installed = [], {}, [], [], []
        self.window = Window()
        self.refuse_rebuild = self.left = None
        self.at_end = 0
        in_use = self.planned([f"p{i}" for i in range(count)], feed)
        self.params, self.names = in_use.params, in_use.names
        self.layout, self.question = ReportLayout(), Question("what", lambda: None)
        self.layout.compare(Field("wrapper", lambda: 0, lambda number: f"has number {number}", "Use the same."))
        self.layout.ask(self.question)
        wiring = Wiring(
            window=self.window,
            layout=self.layout,
            track=Track(),
            events=Events(watchers),
            strict=strict,
            warn_unused=warn_unused,
            asks_graph=False,
            order=SendOrder(Group(), 0),
            rank=RANK,
            size=SIZE,
            open_backward=lambda: self.reducer.open(announced=False),
            open_at_end=self.open_at_end,
            rebuild=self.rebuild,
            decline=lambda: self.log.append(("decline",)),
            check_group=self.check_group,
            install=self.install,
            spoil=self.guarded.append,
            answer=lambda question: self.log.append(("answer", question)),
        )
        self.reducer = Reducer(in_use, wiring)

    def planned(self, names, feed=None, prefix=""):
        plan = plan_buckets([ParamSpec(name, (4,), "float32") for name in names], 32 / 2**20, 16 / 2**20)
        params = [nn.Parameter(torch.zeros(4)) for _ in names]
        self.report = NotedReport()
        last = len(plan.buckets) - 1
        buckets = [
            NotedBucket(
                bucket,
                prefix + str(order) if prefix else order,
                params,
                self.log,
                self.report if order == last else None,
                feed and feed(order, self.log),
            )
            for order, bucket in enumerate(plan.buckets)
        ]
        return BucketSet(plan, params, buckets)

    def install(self, hooks):
        self.installed.append(set(hooks))
        self.hooks.update(hooks)

    def rebuild(self, order, marks, hidden):
        self.seen.append((order, marks))
        if self.refuse_rebuild is not None:
            return self.refuse_rebuild
        self.reducer.adopt(self.reducer.in_use.remade(self.reducer.buckets, marks=marks), rebuilt=True)
        return None

    def check_group(self):
        if self.left is not None:
            raise self.left

    def open_at_end(self):
        self.at_end += 1

    def mark(self, *order):
        for index in order:
            self.hooks[index](self.params[index])

    def backward(self, order=None):
        self.reducer.open(announced=True)
        self.mark(*(range(len(self.params))[::-1] if order is None else order))
        self.reducer.close(lambda: True)

    def settled(self):
        """The same after its first backward, with an empty log."""
        self.backward()
        self.log.clear()
        return self

    def orders(self, move):
        return [entry[1] for entry in self.log if entry[0] == move]

    @property
    def buckets(self):
        return self.reducer.buckets


# --- The first synchronised backward, and the order of sending ---


def test_the_first_synchronised_backward_is_recorded_and_sent_at_its_end():
    bench = Bench()
    bench.reducer.open(announced=True)
    assert bench.reducer.phase is Phase.RECORDING
    for index in [4, 5, 2, 4, 1, 0]:
        bench.mark(index)
        assert bench.log == []
    bench.reducer.close(lambda: True)
    assert bench.orders("send") == [0, 1, 2, 3]
    assert bench.seen == [([5, 2, 4, 1, 0], [1, 1, 1, 0, 2, 1])]
    assert (bench.reducer.phase, bench.reducer.completed) == (Phase.IDLE, 1)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_ready_marks_gives_the_same_order_of_sending(seed):
    bench = Bench().settled()
    order = list(range(6))
    for number in range(4):
        random.Random(seed + 100 * number).shuffle(order)
        bench.log.clear()
        bench.backward(order)
        assert bench.orders("send") == [0, 1, 2, 3]
        assert bench.orders("deliver") == [0, 1, 2, 3]
        assert all(bucket.complete for bucket in bench.buckets)


def test_a_bucket_is_sent_as_soon_as_it_and_all_before_it_are_complete_and_the_last_one_at_the_end():
    bench = Bench().settled()
    bench.reducer.open(announced=True)
    assert bench.reducer.phase is Phase.REDUCING
    for index, sent in [(1, 0), (2, 0), (4, 0), (5, 1), (3, 3), (0, 3)]:
        bench.mark(index)
        assert len(bench.orders("send")) == sent
    bench.reducer.close(lambda: True)
    assert bench.orders("send") == [0, 1, 2, 3]


def test_only_one_parameter_of_each_bucket_has_a_hook_in_python():
    bench = Bench().settled()
    python = {index for index, hook in bench.hooks.items() if type(hook) is not type([].append)}
    assert python == {5, 3, 1, 0}


def test_the_parameter_that_came_last_in_the_first_backward_is_the_sentinel_of_its_bucket():
    bench = Bench()
    bench.backward([5, 3, 4, 0, 1, 2])
    bench.log.clear()
    bench.reducer.open(announced=True)
    for index, sent in [(5, 1), (3, 1), (4, 2), (0, 2), (1, 2), (2, 3)]:
        bench.mark(index)
        assert len(bench.orders("send")) == sent


def test_another_parameter_that_comes_last_twice_becomes_the_sentinel():
    bench = Bench().settled()
    order, sent = [5, 3, 4, 1, 2, 0], []
    for _ in range(3):
        bench.log.clear()
        bench.reducer.open(announced=True)
        bench.mark(*order[:3])
        sent.append(len(bench.orders("send")))
        bench.mark(*order[3:])
        bench.reducer.close(lambda: True)
        assert bench.orders("send") == [0, 1, 2, 3], "the sentinel of another bucket or the end sends what is complete"
    assert sent == [1, 1, 2]
    assert bench.installed[-2:] == [{3, 4}, {1, 2}], "only the hooks of these buckets are replaced"


def test_a_sentinel_that_was_not_used_is_replaced_at_once():
    bench = Bench().settled()
    bench.buckets[1].lacks = [3]
    bench.backward([5, 4, 2, 1, 0])
    assert [bench.buckets[order].complete for order in range(4)] == [True, False, True, True]
    bench.log.clear()
    bench.buckets[1].lacks = []
    bench.reducer.open(announced=True)
    bench.mark(5, 3)
    assert bench.orders("send") == [0]
    bench.mark(4)
    assert bench.orders("send") == [0, 1]


# --- Which backwards synchronise ---


def test_ready_marks_of_a_local_backward_send_nothing():
    bench = Bench()
    for _ in range(2):
        bench.window.request(False)
        bench.backward()
        assert (bench.log, bench.reducer.phase) == ([], Phase.IDLE)
        bench.settled()


def test_a_ready_mark_without_announcement_opens_the_backward():
    bench = Bench()
    bench.mark(3)
    assert bench.reducer.phase is Phase.RECORDING
    bench.reducer.close(lambda: True)
    assert bench.orders("send") == [0, 1, 2, 3]
    bench.log.clear()
    bench.mark(5)  # a sentinel, which has the first hook that looks
    assert bench.reducer.phase is Phase.REDUCING
    assert bench.orders("send") == [0]
    bench.mark(4, 3, 2, 1, 0)
    bench.reducer.close(lambda: True)
    assert bench.orders("deliver") == [0, 1, 2, 3]


def test_a_task_that_reaches_no_leaf_is_no_backward():
    bench = Bench()
    bench.window.request(True)
    bench.reducer.open(announced=True)
    bench.reducer.close(lambda: False)
    assert (bench.log, bench.reducer.phase) == ([], Phase.IDLE)
    bench.reducer.require_sync = False
    bench.reducer.open(announced=True)
    assert bench.reducer.phase is Phase.RECORDING  # the synchronising forward was not used up


@pytest.mark.parametrize("forwards", [(True, False), (False, True), (True,)])
def test_one_forward_that_synchronises_wins(forwards):
    bench = Bench().settled()
    bench.reducer.require_sync = False
    for sync in forwards:
        bench.window.request(sync)
    assert bench.window.owes_backward
    bench.backward()
    assert bench.orders("send") == [0, 1, 2, 3]
    assert not bench.window.owes_backward


def test_a_forgotten_forward_and_a_prepared_backward_decide_the_next_one():
    bench = Bench().settled()
    bench.reducer.require_sync = False
    bench.window.request(True)
    bench.reducer.forget_forwards()
    bench.backward()
    assert bench.log == []
    bench.reducer.prepare_for_backward([])
    bench.backward()
    assert bench.orders("send") == [0, 1, 2, 3]


@pytest.mark.parametrize("watched", [True, False])
def test_a_backward_through_no_watched_output_takes_the_state_of_no_sync_then(watched):
    bench = Bench().settled()
    bench.window.request(False, watched=watched)
    bench.mark(5)
    if watched:  # its outputs may still be reached
        assert (bench.reducer.phase, bench.at_end) == (Phase.IDLE, 1)
        bench.reducer.open(announced=False)  # they were not
    assert bench.reducer.phase is (Phase.REDUCING if watched else Phase.LOCAL)


# --- An exchange for which a rank asks ---


@pytest.mark.parametrize("failed", [False, True])
def test_what_a_rank_asks_for_is_done_once_all_have_landed_whether_the_backward_failed_or_not(failed):
    bench = Bench().settled()
    bench.report.asked = (bench.question,)
    if failed:
        bench.report.reading = Reading(any_failed=True, rank=1)
    with pytest.raises(DPFuseError) if failed else nullcontext():
        bench.backward()
    assert bench.log.count(("answer", bench.question)) == 1
    before = bench.log[: bench.log.index(("answer", bench.question))]
    assert [entry[1] for entry in before if entry[0] == "wait"] == [0, 1, 2, 3]


def test_a_rank_that_drains_answers_too():
    bench = Bench().settled()
    bench.reducer.open(announced=True)
    bench.reducer.abandon()
    bench.report.asked = (bench.question,)
    with pytest.raises(DPFuseError, match="interrupted"):
        bench.reducer.drain()
    assert bench.log.count(("answer", bench.question)) == 1


# --- Ready marks that no backward took ---


def unaveraged(bench):
    """A backward that went through no output of the wrapper, and reached no sentinel."""
    bench.mark(4, 2)
    assert bench.reducer.phase is Phase.IDLE


def drained_by_all(bench):
    """A backward that died on every rank is drained."""
    assert bench.reducer.phase is Phase.ABANDONED
    bench.report.reading = Reading(any_failed=True, any_well=False)
    bench.reducer.drain()
    assert bench.reducer.phase is Phase.IDLE
    bench.report.reading = ALL_WELL
    bench.log.clear()


OPTIMIZER = {
    "open": lambda bench: bench.reducer.open(announced=True),
    "no_sync": lambda bench: setattr(bench.reducer, "require_sync", False),
    "forward": lambda bench: bench.reducer.refuse_unaveraged(),
    "step": lambda bench: torch.optim.SGD(bench.params, lr=0.1).step(),
}


@pytest.mark.parametrize("finds", OPTIMIZER)
def test_ready_marks_that_no_backward_took_are_an_error_once(finds):
    bench = Bench().settled()
    unaveraged(bench)
    with pytest.raises(DPFuseError, match="no output of the wrapper, and the gradients of parameters 'p4', 'p2' were"):
        OPTIMIZER[finds](bench)
    if finds == "open":  # the peers may wait for this backward
        drained_by_all(bench)
    bench.backward()
    assert bench.orders("deliver") == [0, 1, 2, 3]


def test_an_optimizer_of_other_parameters_steps_and_so_does_ours_inside_no_sync():
    bench = Bench().settled()
    unaveraged(bench)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()
    with pytest.raises(DPFuseError, match="'p2'"):
        torch.optim.SGD(bench.params[2:3], lr=0.1).step()
    bench.reducer.require_sync = False
    unaveraged(bench)
    torch.optim.SGD(bench.params, lr=0.1).step()
    assert not any(ready.entries for ready in bench.reducer._in_use.ready)


def test_they_count_as_a_backward_inside_no_sync():
    bench = Bench().settled()
    bench.reducer.require_sync = False
    unaveraged(bench)
    bench.reducer.refuse_unaveraged()
    bench.reducer.refuse_unaveraged()
    (backwards, _) = bench.window.fields()
    assert backwards.value() == 1


def test_a_reducer_that_was_freed_is_not_asked():
    bench = Bench().settled()
    unaveraged(bench)
    params = bench.params
    del bench
    gc.collect()
    torch.optim.SGD(params, lr=0.1).step()


# --- Parameters that come too late, too often, never, or are frozen ---


def test_a_parameter_that_becomes_ready_after_its_bucket_was_sent_is_named():
    bench = Bench().settled()
    with pytest.raises(DPFuseError, match="on rank 0 parameter 'p5' became ready after its bucket was sent"):
        bench.backward([5, 5, 4, 3, 2, 1, 0])
    assert bench.reducer.phase is Phase.IDLE
    assert (bench.orders("deliver"), bench.orders("discard")) == ([], [0, 1, 2, 3])
    bench.log.clear()
    bench.backward()
    assert bench.orders("deliver") == [0, 1, 2, 3]


def test_a_parameter_is_waited_for_as_often_as_it_became_ready_in_the_first_backward():
    bench = Bench()
    bench.backward([5, 4, 5, 3, 2, 1, 0])
    bench.log.clear()
    bench.reducer.open(announced=True)
    bench.mark(5, 4, 3)
    assert bench.log == []
    bench.mark(5)
    assert bench.orders("send") == [0, 1]


def test_buckets_that_ride_are_not_waited_for_and_arrive_once_the_one_that_carries_them_has_landed():
    bench = Bench().settled()
    *rest, last = bench.reducer.buckets
    last.carries = True
    rest[0].rides = rest[2].rides = True
    bench.backward()
    assert bench.log == [
        *(("send", order) for order in range(4)),
        *[("wait", 1), ("deliver", 1), ("wait", 3), ("deliver", 3), ("arrive", 0), ("arrive", 2)],
    ]


@pytest.mark.parametrize("why", ["the last bucket carries none", "this rank has failed", "a profiler runs"])
def test_they_are_waited_for_like_others_where_that_may_not_hold(why, monkeypatch):
    bench = Bench().settled()
    first, *_, last = bench.reducer.buckets
    first.rides, last.carries = True, why != "the last bucket carries none"
    if why == "a profiler runs":
        monkeypatch.setattr("dpfuse.engine.reducer.profiler_runs", lambda: True)
    if why == "this rank has failed":
        bench.reducer.buckets[1].fails = RuntimeError("no memory")
        with pytest.raises(DPFuseError):
            bench.backward()
    else:
        bench.backward()
    assert ("wait", 0) in bench.log
    assert ("arrive", 0) not in bench.log


def test_none_arrives_where_the_wait_for_the_last_one_raises(monkeypatch):
    bench = Bench().settled()
    first, *_, last = bench.reducer.buckets
    first.rides = last.carries = True
    monkeypatch.setattr(last, "wait", lambda: (_ for _ in ()).throw(DPFuseError("rank 1 has ended")))
    with pytest.raises(DPFuseError, match="rank 1 has ended"):
        bench.backward()
    assert first.state is FLIGHT


def test_buckets_with_missing_gradients_are_delivered_last_and_without_those_that_no_rank_used():
    bench = Bench(warn_unused=True).settled()
    bench.buckets[1].lacks, bench.buckets[2].lacks = [3], [1, 2]
    bench.report.used = {1}
    with pytest.warns(UserWarning, match=r"parameters 'p1', 'p2', 'p3' got no gradient .* no rank used 2 of them"):
        bench.backward([5, 4, 0])
    assert [entry for entry in bench.log if entry[0] == "deliver"] == [
        ("deliver", 0),
        ("deliver", 3),
        ("deliver", 1, 2, 3),
        ("deliver", 2, 2, 3),
    ]
    assert bench.report.reads[-1][0], "this rank waits for what the others have used"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bench.backward([5, 4, 0])  # it warns once


def test_a_frozen_parameter_is_told_and_no_longer_waited_for():
    bench = Bench().settled()
    bench.params[4].requires_grad_(False)
    bench.backward([5, 3, 2, 1, 0])
    assert bench.buckets[-1].frozen == {4}, "it is told in the backward in which it is noticed"
    bench.log.clear()
    bench.reducer.open(announced=True)
    bench.mark(5, 3)
    assert bench.orders("send") == [0, 1]
    assert bench.buckets[0].frozen == {4}
    bench.mark(2, 1, 0)
    bench.reducer.close(lambda: True)
    bench.params[4].requires_grad_(True)
    bench.log.clear()
    bench.reducer.open(announced=True)
    bench.mark(5, 3)
    assert (bench.orders("send"), bench.buckets[0].frozen) == ([0], set())
    bench.mark(4, 2, 1)
    assert bench.orders("send") == [0, 1, 2]


def test_a_parameter_that_was_frozen_before_the_first_backward_is_told_in_it():
    bench = Bench()
    bench.params[2].requires_grad_(False)
    bench.backward([5, 4, 3, 1, 0])
    assert all(bucket.frozen == {2} for bucket in bench.buckets)


@pytest.mark.parametrize("warn_unused", [True, False])
def test_a_parameter_that_holds_others_up_in_four_backwards_in_a_row_is_named_once_if_wanted(warn_unused):
    bench = Bench(warn_unused=warn_unused).settled()
    bench.buckets[0].lacks = [5]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            bench.backward([4, 3, 2, 1, 0])
    texts = [
        "rank 0: parameter 'p5' got no gradient in this backward; no ",
        "rank 0: parameter 'p5' did not become ready in 4 backwards, ",
    ]
    assert [str(warning.message)[:60] for warning in caught] == (texts if warn_unused else [])


def test_a_warning_that_is_an_error_comes_when_all_is_delivered():
    bench = Bench(warn_unused=True).settled()
    bench.buckets[0].lacks = [5]
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="'p5' got no gradient"):
        warnings.simplefilter("error")
        bench.backward([4, 3, 2, 1, 0])
    assert sorted(bench.orders("deliver")) == [0, 1, 2, 3]
    assert (bench.reducer.phase, bench.reducer.completed) == (Phase.IDLE, 2)


# --- Errors, and backwards that die ---


def test_an_error_of_a_bucket_discards_what_was_held_and_is_the_cause():
    bench = Bench().settled()
    bench.buckets[1].fails = ValueError("the gradient does not fit")
    with pytest.raises(DPFuseError, match="rank 0 could not pack its gradients: the gradient does not fit") as caught:
        bench.backward()
    assert caught.value.__cause__ is bench.buckets[1].fails
    assert (bench.orders("deliver"), bench.orders("discard")) == ([], [0, 1, 2, 3])
    assert (bench.reducer.phase, bench.reducer.completed) == (Phase.IDLE, 1)


def test_an_error_that_comes_while_buckets_land_leaves_those_before_it_delivered(monkeypatch):
    bench = Bench().settled()
    wait = bench.buckets[2].wait

    def fail():
        wait()
        bench.buckets[2].error = DPFuseError("the communication hook failed")

    monkeypatch.setattr(bench.buckets[2], "wait", fail)
    with pytest.raises(DPFuseError, match=r"rank 0: the communication hook failed\. No rank's gradients"):
        bench.backward()
    assert (bench.orders("deliver"), bench.orders("discard")) == ([0, 1], [2, 3])


@pytest.mark.parametrize(
    ("reading", "text"),
    [
        (Reading(any_failed=True, rank=1), "the backward failed on rank 1 of 2, so rank 0 has no averaged gradients"),
        (Reading(any_failed=True), "the backward failed on several ranks of 2"),
        (
            Reading(any_failed=True, rows=((0, 0, 1, 0), (1, 0, 1, 0))),
            "the backward failed on rank 1 of 2",
        ),
        (Reading(any_changed=True, rank=1), "^rank 0: the module was changed on rank 1 of 2 .* and not on rank 0"),
        (Reading(differing=("wrapper",)), "rank 0: this rank has number 0, and another rank does not; expected"),
        (
            Reading(differing=("wrapper",), rows=((0, 0, 5, 0), (0, 0, 6, 0))),
            "rank 0: rank 1 has number 6, rank 0 has number 5; expected the same on every rank. Use the same.",
        ),
        (
            Reading(differing=("frozen",), rows=((0, 0, 5, 0), (0, 0, 5, 3))),
            r"have frozen different parameters since the module was wrapped \(0, 3 of them, by rank\)",
        ),
    ],
)
def test_what_the_report_says_is_raised_and_the_next_backward_goes_on(reading, text):
    bench = Bench().settled()
    bench.report.reading = reading
    with pytest.raises(DPFuseError, match=text):
        bench.backward()
    assert bench.reducer.phase is Phase.IDLE
    assert bench.reducer.failed_somewhere() is reading.any_failed
    assert bench.report.reads[-1] == (True, False)
    bench.report.reading = ALL_WELL
    bench.backward()
    assert bench.reducer.completed == 2


@pytest.mark.parametrize("told", [True, False], ids=["abandoned", "ended, but not closed"])
def test_an_abandoned_backward_is_drained_with_a_report_of_failure(told):
    bench = Bench().settled()
    bench.reducer.open(announced=True)
    bench.mark(5)
    bench.report.reading = Reading(any_failed=True, rank=1)
    if told:
        bench.reducer.abandon()
        assert bench.reducer.phase is Phase.ABANDONED
    with pytest.raises(DPFuseError, match="interrupted by an exception on rank 1 of 2 only"):
        bench.reducer.open(announced=True)
    assert bench.report.handed_over == 1, "the next pack writes over what was not copied"
    assert bench.orders("send") == [0]
    assert [entry[1:] for entry in bench.log if entry[0] == "send empty"] == [
        (order, True, False) for order in (1, 2, 3)
    ]
    assert bench.orders("discard") == [0, 1, 2, 3]
    bench.report.reading = ALL_WELL
    bench.log.clear()
    bench.backward()
    assert bench.orders("send") == [0, 1, 2, 3]


def test_where_all_ranks_have_abandoned_a_backward_training_goes_on():
    bench = Bench().settled()
    bench.reducer.open(announced=True)
    bench.mark(5)
    bench.reducer.abandon()
    bench.report.reading = Reading(any_failed=True, any_well=False)
    bench.reducer.drain()
    assert bench.reducer.phase is Phase.IDLE
    bench.report.reading = ALL_WELL
    bench.backward()
    assert bench.orders("deliver") == [0, 1, 2, 3]


def test_a_backward_without_announcement_after_one_that_has_sent_is_an_error():
    bench = Bench().settled()
    bench.reducer.open(announced=True)
    bench.mark(5)
    bench.reducer.abandon()
    bench.report.reading = Reading(any_failed=True, any_well=False)
    with pytest.raises(DPFuseError, match="an exception ended the last backward after it had sent gradients"):
        bench.mark(5)
    drained_by_all(bench)
    bench.backward()
    assert bench.orders("deliver") == [0, 1, 2, 3]


def test_a_collective_that_fails_leaves_the_backward_to_be_drained(monkeypatch):
    bench = Bench().settled()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the network failed"):
        patch.setattr(bench.buckets[2], "wait", lambda: (_ for _ in ()).throw(RuntimeError("the network failed")))
        bench.backward()
    assert bench.reducer.phase is Phase.ABANDONED
    assert bench.reducer.last_error == "<class 'RuntimeError'>: the network failed"
    assert bench.orders("deliver") == [0, 1]
    bench.report.reading = Reading(any_failed=True, any_well=False)
    bench.reducer.drain()
    assert bench.orders("discard") == [2, 3], "those that were delivered are sent no second time"
    assert bench.orders("send empty") == []


def test_a_rank_that_has_left_its_group_drains_nothing():
    bench = Bench().settled()
    bench.reducer.open(announced=True)
    bench.mark(5)
    bench.reducer.abandon()
    bench.left = DPFuseError("a collective of this group has failed")
    bench.log.clear()
    for _ in range(2):
        with pytest.raises(DPFuseError, match="a collective of this group has failed"):
            bench.reducer.open(announced=True)
    assert bench.log == []


def test_an_abandoned_local_backward_needs_no_drain():
    bench = Bench()
    bench.window.request(False)
    bench.reducer.open(announced=True)
    bench.reducer.abandon()
    assert (bench.log, bench.reducer.phase) == ([], Phase.IDLE)
    assert bench.window.died


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("opened", [True, False])
def test_a_backward_that_dies_before_it_is_open_counts_as_abandoned_and_one_that_has_ended_does_not(opened, sync):
    bench = Bench().settled()
    bench.window.request(sync)
    bench.reducer.abandon(opened=opened)
    assert bench.reducer.phase is (Phase.ABANDONED if sync and not opened else Phase.IDLE)
    assert bench.window.died is (not sync and not opened)


def test_a_backward_that_dies_after_the_gradients_were_averaged_declines_the_vote():
    bench = Bench()

    def interrupted(order, marks, hidden):
        raise KeyboardInterrupt

    object.__setattr__(bench.reducer._wiring, "rebuild", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.backward()
    assert bench.reducer.phase is Phase.ABANDONED
    bench.log.clear()
    with pytest.raises(DPFuseError, match="interrupted by an exception on rank 0 of 2 only"):
        bench.reducer.drain()
    assert bench.log == [("decline",)]


def test_an_error_of_the_rebuild_is_raised_once_the_reducer_is_ready_again():
    bench = Bench()
    bench.refuse_rebuild = DPFuseError("no memory for them")
    with pytest.raises(DPFuseError, match="no memory for them"):
        bench.backward()
    assert (bench.reducer.phase, bench.reducer.rebuilt) == (Phase.IDLE, False)
    bench.refuse_rebuild = None
    bench.backward()
    assert bench.reducer.rebuilt


def test_a_watcher_that_refuses_a_backward_is_asked_before_anything_is_sent_and_the_backward_is_drained():
    class Refuses(Watcher):
        delivered_count, refuses = 0, False

        def backward_begins(self, *, sync, announced):
            self.asked = (sync, announced)
            if self.refuses:
                raise DPFuseError("refused")

        def delivered(self):
            self.delivered_count += 1

    watcher = Refuses()
    bench = Bench(watchers=[watcher]).settled()
    assert (watcher.asked, watcher.delivered_count) == ((True, True), 1)
    watcher.refuses = True
    bench.window.request(True)
    with pytest.raises(DPFuseError, match="refused"):
        bench.reducer.open(announced=True)
    assert bench.log == []
    drained_by_all(bench)
    watcher.refuses = False
    bench.window.request(False)
    bench.backward()
    assert (watcher.asked, watcher.delivered_count) == ((False, True), 1)


# --- The report: read when, and by which ranks ---


@pytest.mark.parametrize("strict", [True, False])
def test_the_report_is_waited_for_where_ranks_agree_next_or_a_gradient_is_missing_or_the_user_wants_it(strict):
    bench = Bench(strict=strict).settled()
    assert bench.report.reads == [(True, True)], "the ranks agree on buckets after the first backward"
    bench.backward()
    assert bench.report.reads[-1] == (strict, True)
    assert bench.guarded == []
    bench.report.is_on_cpu = False
    bench.backward()
    assert bench.report.reads[-1] == (strict, strict), "on CUDA not every rank reads the same backward's"
    assert bench.guarded == ([] if strict else [bench.report])
    bench.buckets[0].lacks = [5]
    bench.backward()
    assert bench.report.reads[-1] == (True, strict)


# --- Captured in a CUDA graph: the report cannot be read ---


def captured(bench):
    """Inside the capture of a CUDA graph nothing can be read from the device, so the report must not be."""
    bench.report.unreadable, bench.report.is_on_cpu = True, False
    bench.report.used_somewhere = None  # calling it would wait for the device
    return bench


def test_a_captured_backward_is_like_any_other():
    bench = captured(Bench(strict=True).settled())
    bench.backward()
    assert bench.orders("send") == [0, 1, 2, 3]
    assert bench.orders("deliver") == [0, 1, 2, 3]
    assert len(bench.guarded) == 1, "only the device can act on the report"


def test_the_first_backward_of_a_model_is_not_captured():
    bench = captured(Bench())
    with pytest.raises(
        DPFuseError, match=r"rank 0: the first .* is captured in a CUDA graph; expected some steps before"
    ):
        bench.backward()
    assert (bench.log, bench.reducer.phase) == ([], Phase.ABANDONED)


def test_a_parameter_without_gradient_is_named_in_a_capture():
    bench = captured(Bench().settled())
    bench.buckets[1].lacks = [3]
    with pytest.raises(DPFuseError, match=r"rank 0: parameter 'p3' got no gradient in a backward that a CUDA graph"):
        bench.backward([5, 4, 2, 1, 0])
    assert ("discard", 1) in bench.log
    assert ("deliver", 1) not in bench.log
    assert bench.reducer.phase is Phase.IDLE


def test_a_pack_that_fails_in_a_capture_is_reported_and_nothing_is_read():
    bench = captured(Bench().settled())
    bench.buckets[0].fails = ValueError("2 of 2 tensors are not where the last call found them")
    with pytest.raises(DPFuseError, match="rank 0 could not pack its gradients: 2 of 2 tensors are not where"):
        bench.backward()
    assert bench.reducer.phase is Phase.IDLE


# --- A model that has changed ---


def follow(bench, agree):
    """Three parameters in two buckets take the place of six in four; their log has names of its own."""
    old = bench.report
    changed = bench.planned(["a", "b", "c"], prefix="new ")
    bench.params = changed.params
    bench.new_report, bench.report = bench.report, old
    bench.hooks.clear()
    bench.reducer.follow(changed, "parameter 'c' was added", lambda: (agree(), bench.reducer.keep_change()))


def test_the_buckets_of_a_changed_model_are_sent_once_all_ranks_have_told_of_it_in_the_old_ones():
    bench = Bench().settled()
    follow(bench, lambda: bench.log.append(("agree", "")))
    bench.report.reading = Reading(any_changed=True, any_unchanged=False)
    bench.reducer.open(announced=True)
    assert bench.reducer.phase is Phase.CHANGED
    bench.mark(2, 0, 1)
    assert bench.log == []  # nothing is sent before the end
    bench.reducer.close(lambda: True)
    assert [entry[1:] for entry in bench.log if entry[0] == "send empty"] == [
        (order, False, True) for order in range(4)
    ]
    assert bench.orders("send") == ["new 0", "new 1"]
    assert [entry[1] for entry in bench.log if entry[0] in ("deliver", "agree")] == ["", "new 0", "new 1"]
    assert bench.orders("discard") == [0, 1, 2, 3]
    assert bench.seen[1:] == [([2, 0, 1], [1, 1, 1])]
    assert bench.reducer.rebuilt
    bench.log.clear()
    bench.backward()
    assert (bench.orders("send"), bench.orders("send empty")) == (["new 0", "new 1"], [])


@pytest.mark.parametrize("here", [True, False])
def test_a_change_on_one_rank_is_told_by_the_ranks_and_stays(here):
    bench = Bench().settled()
    bench.report.reading = Reading(any_changed=True, rank=0 if here else 1)
    if here:
        follow(bench, lambda: pytest.fail("there is nothing to agree on"))
    for _ in range(2):
        with pytest.raises(DPFuseError, match="'c' was added .* and not on rank 1" if here else "^rank 0: the module"):
            bench.backward()
        assert bench.reducer.phase is Phase.IDLE
    assert bench.orders("send empty" if here else "send") == [0, 1, 2, 3] * 2


def test_ranks_that_have_changed_differently_all_raise_and_can_change_again():
    bench = Bench().settled()
    bench.report.reading = Reading(any_changed=True, any_unchanged=False)

    def disagree():
        raise DPFuseError("the change differs between ranks")

    follow(bench, disagree)
    for _ in range(2):
        with pytest.raises(DPFuseError, match="the change differs"):
            bench.backward()
        assert bench.reducer.phase is Phase.IDLE
    assert bench.orders("send") == []


def test_a_change_that_was_undone_leaves_the_old_buckets():
    bench = Bench().settled()
    params = bench.params
    follow(bench, lambda: None)
    follow(bench, lambda: None)
    bench.params = params
    bench.reducer.unfollow()
    bench.backward()
    assert (bench.orders("send"), bench.orders("send empty")) == ([0, 1, 2, 3], [])


def test_a_changed_model_is_drained_in_the_old_buckets():
    bench = Bench().settled()
    bench.report.reading = Reading(any_failed=True, rank=0)
    follow(bench, lambda: None)
    bench.reducer.open(announced=True)
    bench.mark(0)
    bench.reducer.abandon()
    with pytest.raises(DPFuseError, match="interrupted by an exception on rank 0 of 2 only"):
        bench.reducer.drain()
    assert [entry[1:] for entry in bench.log if entry[0] == "send empty"] == [
        (order, True, False) for order in range(4)
    ]


# --- A rank without inputs ---


def test_a_rank_that_shadows_a_backward_takes_part_as_one_without_inputs_and_does_not_warn():
    bench = Bench(warn_unused=True).settled()
    for bucket in bench.buckets:
        bucket.lacks = list(bucket.plan.params)
    elsewhere = []
    bench.report.used_somewhere = lambda indices: elsewhere.append(bench.window.without_inputs) or set(indices)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bench.reducer.shadow_backward()
    assert bench.orders("send") == [0, 1, 2, 3]
    assert (elsewhere, bench.window.without_inputs) == ([True], False)
    for bucket in bench.buckets:
        bucket.lacks = [5] if 5 in bucket.plan.params else []
    with pytest.warns(UserWarning, match="'p5' got no gradient"):
        bench.backward([4, 3, 2, 1, 0])


# --- Feeds ---


def test_a_large_gradient_is_packed_before_it_is_noted_and_only_while_its_bucket_can_take_it():
    bench = Bench(feed=lambda order, log: NotedFeed(log, (3, 4) if order == 1 else ()))
    bench.backward()
    assert bench.orders("pack") == [], "the first backward is recorded"
    bench.log.clear()
    bench.window.request(False)
    bench.backward()
    assert bench.log == [], "a local one sends nothing"
    bench.window.request(True)
    bench.reducer.open(announced=True)
    bench.mark(5, 4, 3)
    assert bench.log == [("send", 0), ("pack", 4), ("pack", 3), ("send", 1)]
    with pytest.raises(DPFuseError, match="parameter 'p4' became ready after"):
        bench.mark(4, 2, 1, 0)
        bench.reducer.close(lambda: True)
    assert bench.orders("pack") == [4, 3], "what was sent is packed no more"


def test_a_parameter_that_becomes_ready_several_times_is_not_packed_early():
    bench = Bench(feed=lambda order, log: NotedFeed(log, (3, 4) if order == 1 else ()))
    bench.backward([5, 4, 4, 3, 2, 1, 0])
    bench.log.clear()
    bench.backward([5, 4, 4, 3, 2, 1, 0])
    assert bench.orders("pack") == [3]


@pytest.mark.parametrize("feed", [None, NotedAccumulating])
def test_hooks_note_the_stream_where_a_bucket_may_be_packed_before_the_end_of_backward(feed):
    bench = Bench(feed=feed).settled() if feed else Bench().settled()
    noted = []

    def noting(hook):
        return lambda param: (noted.append(param), hook(param))

    for bucket in bench.buckets:
        bucket.parts.writers = SimpleNamespace(noting=noting)
    bench.install(bench.reducer.hooks())
    bench.backward()
    early = bench.params[::-1] if feed else bench.params[:0:-1]  # the last bucket has one parameter
    assert list(map(id, noted)) == list(map(id, early))
    assert bench.orders("send") == [0, 1, 2, 3]


@pytest.mark.parametrize("feed", [None, NotedAccumulating])
def test_no_hook_notes_the_stream_in_the_recorded_backward_unless_buckets_accumulate(feed):
    bench = Bench(feed=feed) if feed else Bench()
    noted = []
    for bucket in bench.buckets:
        bucket.parts.writers = SimpleNamespace(noting=lambda hook: lambda param: (noted.append(param), hook(param)))
    bench.install(bench.reducer.hooks())
    bench.backward()
    assert len(noted) == (6 if feed else 0)


@pytest.mark.parametrize("settled", [True, False])
def test_a_local_backward_accumulates_complete_buckets_while_it_runs_and_the_rest_at_its_end(settled):
    bench = Bench(feed=NotedAccumulating)
    if settled:
        bench.settled()
    bench.window.request(False)
    bench.reducer.open(announced=True)
    bench.mark(2, 1, 4)
    assert bench.log == [("take", 2, False)], "in no order of the buckets"
    bench.reducer.close(lambda: True)
    taken = [1, 2] if settled else [0, 1, 2, 3]
    assert bench.log[1:] == [("take", order, True) for order in taken]
    assert bench.orders("send") == []
    (backwards, _) = bench.window.fields()
    assert backwards.value() == 1
    with pytest.raises(DPFuseError, match=r"discard_accumulated\(\) was called while a backward is LOCAL"):
        bench.window.request(False)
        bench.reducer.open(announced=True)
        bench.reducer.discard_accumulated()
    bench.reducer.close(lambda: True)
    bench.reducer.discard_accumulated()
    assert backwards.value() == 0
    assert not any(bucket.parts.feed.held for bucket in bench.buckets)


def test_a_local_backward_that_dies_throws_the_window_away_with_a_warning():
    bench = Bench(feed=NotedAccumulating).settled()
    bench.window.request(False)
    bench.backward()
    bench.reducer.open(announced=True)
    with pytest.warns(UserWarning, match="accumulated in the buckets before, for 4 parameters, was thrown away"):
        bench.reducer.abandon()
    assert bench.reducer.phase is Phase.IDLE
    bench.window.request(False)
    bench.buckets[2].parts.feed.error = ValueError("it does not fit")
    with pytest.warns(UserWarning, match="for 4 parameters"), pytest.raises(ValueError, match="it does not fit"):
        bench.backward()
    assert bench.reducer.phase is Phase.IDLE


def test_an_abandoned_synchronised_backward_forgets_what_was_accumulated():
    bench = Bench(feed=NotedAccumulating).settled()
    bench.window.request(False)
    bench.backward()
    bench.window.request(True)
    bench.reducer.open(announced=True)
    bench.reducer.abandon()
    bench.report.reading = Reading(any_failed=True, any_well=False)
    bench.reducer.drain()
    assert not any(bucket.parts.feed.held for bucket in bench.buckets)
