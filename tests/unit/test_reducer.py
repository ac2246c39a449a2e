"""The reducer on buckets that only note what happens to them: what real ranks on a CPU do not show.

That is which hooks it installs, when it reads the report on CUDA, captured backwards, and bookkeeping at the end of a
backward. What a user sees of it is tested on real ranks: `distributed/averaging/test_ready_lists.py` and
`test_sync_rules.py`, `distributed/failures/test_interruptions.py`, `distributed/changes`.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from dpfuse.comm.waiting import Track
from dpfuse.engine.backward_table import State
from dpfuse.engine.bucket import FLIGHT, FREE, LANDED
from dpfuse.engine.bucket_set import BucketSet
from dpfuse.engine.events import Events, Watcher
from dpfuse.engine.feeds.accumulating import Accumulating
from dpfuse.engine.lost_steps import LostSteps
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import plan_buckets
from dpfuse.engine.protocols import Delivery, Feed
from dpfuse.engine.reading import ALL_WELL, Reading
from dpfuse.engine.reducer import Reducer
from dpfuse.engine.report_layout import Field, Question, ReportLayout
from dpfuse.engine.send_order import SendOrder
from dpfuse.engine.settings import SyncSettings
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
        self.reads = []

    def hand_over(self):
        """Nothing is copied."""

    def read(self, outcome, *, wait, gather):
        self.reads.append((wait, gather))
        self.was_read = self.is_on_cpu or (wait and not self.unreadable)
        if self.reading is not ALL_WELL and not self.unreadable:
            return self.reading
        return ALL_WELL if outcome.well else Reading(any_failed=True, rank=RANK)

    def follow(self, before):
        """It has told everything."""

    def used_somewhere(self, indices):
        return set()

    def wrong(self):
        return torch.tensor(False)


class NotedAccumulating(Accumulating):
    """Notes when it takes gradients."""

    def __init__(self, order, log):
        self.order, self.log, self.held = order, log, set()

    def take(self, *, backward_ended):
        self.log.append(("take", self.order, backward_ended))


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

    @property
    def busy(self):
        return self.state is not FREE

    def send(self, outcome, *, complete):
        self._move(FREE, FLIGHT, ("send", self.order))
        self.missing, self.error, self.complete = list(self.lacks), self.fails, complete
        outcome.missing += tuple(self.missing)
        if self.error is not None:
            outcome.note(self.error)

    def send_empty(self, outcome):
        self.missing = []
        self._move(FREE, FLIGHT, ("send empty", self.order, outcome.failed, outcome.changed))

    def wait(self):
        self._move(FLIGHT, LANDED, ("wait", self.order))

    def arrive(self):
        self._move(FLIGHT, FREE, ("arrive", self.order))

    def deliver(self, untouched=frozenset()):
        self._move(LANDED, FREE, ("deliver", self.order, *sorted(untouched)))

    def forget_packed(self):
        self.parts.feed.sent()

    def discard(self):
        if self.state is FLIGHT:
            self.wait()
        self._move(LANDED, FREE, ("discard", self.order))

    def _move(self, before, after, entry):
        assert self.state is before, (self.order, entry, self.state)
        self.state = after
        self.log.append(entry)


class Bench:
    """A reducer of six parameters in buckets of two, and of one at both ends: (5,), (3, 4), (1, 2), (0,).

    Attributes:
        log: what happened, in order.
        hooks: what is installed, by registration index.
        at_end: how often the reducer has asked to be opened at the end of a backward, if not before.
        seen: order and marks of each first synchronised backward.
    """

    def __init__(self, *, feed=None, strict=False, warn_unused=False, watchers=()):
        self.log, self.hooks, self.seen, self.guarded, self.installed = [], {}, [], [], []
        self.window, self.agreed = Window(), None
        self.settings = SyncSettings(warn_unused=warn_unused)
        self.refuse_rebuild = None
        self.at_end = 0
        self.lost = LostSteps(lambda optimizer: True)
        in_use = self.planned([f"p{i}" for i in range(6)], feed)
        self.params, self.names = in_use.params, in_use.names
        self.layout, self.question = ReportLayout(), Question("what", lambda: None)
        self.layout.compare(Field("wrapper", lambda: 0, lambda number: f"has number {number}", "Use the same."))
        self.layout.ask(self.question)
        self.reducer = Reducer(
            in_use,
            maker=self,
            membership=SimpleNamespace(rank=RANK, size=SIZE, check=lambda: None, answer=self.answer),
            window=self.window,
            layout=self.layout,
            track=Track(),
            events=Events(watchers),
            order=SendOrder(Group(), 0, hears_at_once=strict),
            lost=self.lost,
            hooks=SimpleNamespace(install=self.install, come_last=lambda param: True),
        )
        self.reducer.watch = SimpleNamespace(
            begin=lambda: self.reducer.open(announced=False), begin_at_end=self.open_at_end
        )

    def planned(self, names, feed):
        plan = plan_buckets([ParamSpec(name, (4,), "float32") for name in names], 32 / 2**20, 16 / 2**20)
        params = [nn.Parameter(torch.zeros(4)) for _ in names]
        self.report = NotedReport()
        last = len(plan.buckets) - 1
        buckets = [
            NotedBucket(
                bucket,
                order,
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

    def answer(self, question):
        self.log.append(("answer", question))

    def agree(self, in_use, order, marks, *, hidden):
        self.seen.append((order, marks))
        if self.refuse_rebuild is None:
            self.agreed = in_use.remade(in_use.buckets, marks=marks)
        return self.refuse_rebuild

    def decline(self, param_count, *, out_of_memory):  # the peers raise an error then
        self.log.append(("decline",))

    def spoil(self, in_use):
        self.guarded.append(in_use.report)

    def open_at_end(self):
        self.at_end += 1

    def open(self):
        """As `BackwardWatch` opens a backward."""
        try:
            self.reducer.open(announced=True)
        except BaseException:
            self.reducer.abandon(opened=False)
            raise

    def mark(self, *order):
        for index in order:
            self.hooks[index](self.params[index])

    def backward(self, order=None):
        self.open()
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
    assert bench.reducer.state is State.RECORDING
    for index in [4, 5, 2, 4, 1, 0]:
        bench.mark(index)
        assert bench.log == []
    bench.reducer.close(lambda: True)
    assert bench.orders("send") == [0, 1, 2, 3]
    assert bench.seen == [([5, 2, 4, 1, 0], [1, 1, 1, 0, 2, 1])]
    assert (bench.reducer.state, bench.reducer.completed) == (State.IDLE, 1)


def test_only_one_parameter_of_each_bucket_has_a_hook_in_python():
    bench = Bench().settled()
    python = {index for index, hook in bench.hooks.items() if type(hook) is not type([].append)}
    assert python == {5, 3, 1, 0}


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


# --- Which backwards synchronise ---


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
        assert (bench.reducer.state, bench.at_end) == (State.IDLE, 1)
        bench.reducer.open(announced=False)  # they were not
    assert bench.reducer.state is (State.REDUCING if watched else State.LOCAL)


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
    bench.reducer.drain()
    assert bench.log.count(("answer", bench.question)) == 1


# --- Ready marks that no backward took ---


def unaveraged(bench):
    """A backward that went through no output of the wrapper, and reached no sentinel."""
    bench.mark(4, 2)
    assert bench.reducer.state is State.IDLE


def drained_by_all(bench):
    """A backward that died on every rank is drained."""
    assert bench.reducer.state is State.ABANDONED
    bench.report.reading = Reading(any_failed=True)
    bench.reducer.drain()
    assert bench.reducer.state is State.IDLE
    bench.report.reading = ALL_WELL
    bench.log.clear()


OPTIMIZER = {
    "open": Bench.open,
    "no_sync": lambda bench: setattr(bench.reducer, "require_sync", False),
    "forward": lambda bench: bench.reducer.refuse_unaveraged(),
    "step": lambda bench: torch.optim.SGD(bench.params, lr=0.1).step(),
}


@pytest.mark.parametrize("finds", OPTIMIZER)
def test_ready_marks_that_no_backward_took_are_an_error_once(finds):
    bench = Bench().settled()
    unaveraged(bench)
    with pytest.raises(DPFuseError, match="no output of the wrapper, so the gradients of parameters 'p4', 'p2' were"):
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


# --- Buckets that ride, and unused parameters ---


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


def test_a_warning_that_is_an_error_comes_when_all_is_delivered():
    bench = Bench(warn_unused=True).settled()
    bench.buckets[0].lacks = [5]
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="'p5' got no gradient"):
        warnings.simplefilter("error")
        bench.backward([4, 3, 2, 1, 0])
    assert sorted(bench.orders("deliver")) == [0, 1, 2, 3]
    assert (bench.reducer.state, bench.reducer.completed) == (State.IDLE, 2)


# --- Errors, and backwards that die ---


@pytest.mark.parametrize("all_decline", [True, False], ids=["in the vote", "after it"])
def test_a_backward_that_dies_after_the_gradients_were_averaged_declines_the_vote(all_decline):
    bench = Bench()

    def interrupted(in_use, order, marks, *, hidden):
        bench.agreed = None if all_decline else in_use.remade(in_use.buckets, marks=marks)
        raise KeyboardInterrupt

    bench.agree = interrupted
    with pytest.raises(KeyboardInterrupt):
        bench.backward()
    assert bench.reducer.state is State.ABANDONED
    bench.log.clear()
    bench.reducer.drain()
    assert bench.log == [("decline",)] * all_decline
    # Where the vote had ended, the peers have used a mean that this rank has not.
    assert (bench.reducer.completed, bench.lost.steps) == ((0, []) if all_decline else (1, [1]))


def test_an_error_of_the_rebuild_is_raised_once_the_reducer_is_ready_again():
    bench = Bench()
    bench.refuse_rebuild = DPFuseError("no memory for them")
    with pytest.raises(DPFuseError, match="no memory for them"):
        bench.backward()
    assert (bench.reducer.state, bench.reducer.rebuilt) == (State.IDLE, False)
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
        bench.open()
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


@pytest.mark.parametrize("where", ["report", "drain"])
def test_once_a_collective_may_follow_each_report_is_waited_for_with_all_ranks(where):
    bench = Bench().settled()
    bench.report.is_on_cpu = False
    bench.backward()
    assert bench.report.reads[-1] == (False, False)
    bench.reducer._order.hears_at_once = True  # a sharded optimizer was made
    if where == "report":
        bench.backward()
        assert len(bench.guarded) == 1, "the gradients of the one before"
    else:
        bench.reducer.open(announced=True)
        bench.reducer.abandon()
        bench.reducer.drain()
    assert bench.report.reads[-1] == (True, True)


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
    assert (bench.log, bench.reducer.state) == ([], State.ABANDONED)


def test_a_parameter_without_gradient_is_named_in_a_capture():
    bench = captured(Bench().settled())
    bench.buckets[1].lacks = [3]
    with pytest.raises(DPFuseError, match=r"rank 0: parameter 'p3' got no gradient in a backward that a CUDA graph"):
        bench.backward([5, 4, 2, 1, 0])
    assert ("discard", 1) in bench.log
    assert ("deliver", 1) not in bench.log
    assert bench.reducer.state is State.IDLE


def test_a_pack_that_fails_in_a_capture_is_reported_and_nothing_is_read():
    bench = captured(Bench().settled())
    bench.buckets[0].fails = ValueError("2 of 2 tensors are not where the last call found them")
    with pytest.raises(DPFuseError, match="rank 0 could not pack its gradients: 2 of 2 tensors are not where"):
        bench.backward()
    assert bench.reducer.state is State.IDLE


# --- Feeds ---


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


def test_a_mean_before_the_first_step_is_lost_if_an_optimizer_has_the_parameters():
    param = nn.Parameter(torch.zeros(4))
    lost = LostSteps(lambda optimizer: any(param is each for each in optimizer.param_groups[0]["params"]))
    lost.note(2)  # the program may have used the first mean itself
    assert lost.steps == []
    optimizer = torch.optim.SGD([param], lr=0.1)
    lost.note(2)
    assert lost.steps == [2]
    optimizer.step()
    assert lost.steps == []


def test_an_interrupted_change_of_buckets_is_one_in_the_next_backward():
    """After an interrupt in `adopt`, `follow` or `unfollow`, the next backward begins in the state that is due."""
    bench = Bench()
    with mock.patch.object(bench.reducer, "hooks", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        bench.backward()  # the buckets are agreed, and not all hooks are installed
    bench.reducer.drain()
    assert (bench.reducer.rebuilt, bench.agreed, len(bench.seen)) == (True, None, 1)
    bench.open()
    assert bench.reducer.state is State.REDUCING
    bench.mark(*range(6))
    bench.reducer.close(lambda: True)

    def follow():
        bench.reducer.follow(bench.planned(["new"], None), "a change", lambda: None, lambda **_: True)

    with mock.patch.object(bench.reducer, "_freeze", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        follow()
    bench.open()
    assert bench.reducer.state is State.CHANGED
    bench.reducer.abandon()
    with mock.patch.object(bench.reducer, "_freeze", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        bench.reducer.unfollow()
    bench.report.reading = Reading(any_failed=True)
    bench.reducer.drain()
    bench.report.reading = ALL_WELL
    bench.open()
    assert bench.reducer.state is State.REDUCING


def test_a_shadow_backward_that_cannot_open_is_abandoned():
    bench = Bench().settled()
    with mock.patch.object(bench.reducer, "_in_use") as in_use, pytest.raises(KeyboardInterrupt):
        in_use.restore_memory.side_effect = KeyboardInterrupt
        bench.reducer.shadow_backward()
    assert bench.reducer.state is State.ABANDONED
    drained_by_all(bench)
