"""The reducer on buckets that only note what happens to them: every phase and every illegal move, no tensor."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.distributed as dist
from dpfuse.engine.buckets.kinds import make_buckets

from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import plan_buckets
from dpfuse.engine.reducer import Phase, Reducer
from dpfuse.engine.report import Report
from dpfuse.engine.window import Canary
from dpfuse.errors import DPFuseError


@dataclass
class NotedTail:
    rank: int = 0
    world_size: int = 2
    failed: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    deaf: bool = False

    def report(self, *, wait, failed=False):
        if self.deaf:
            return Report([self.rank] if failed else [], [])
        return Report(self.failed, self.changed)

    def used_somewhere(self, indices):
        return set()


class NotedBucket:
    def __init__(self, plan, order, log):
        self.plan, self.order, self.log = plan, order, log
        self.error = None
        self.missing = []
        self.tail = NotedTail()
        self.busy = True

    def eager(self):
        return {}

    def launch(self, *, complete=False, unused=(), failed=False, empty=False):
        self.log.append(("launch", self.order, failed))

    def wait(self):
        self.log.append(("wait", self.order))

    def deliver(self, untouched=()):
        self.log.append(("deliver", self.order))

    def discard(self):
        self.log.append(("discard", self.order))


def make_reducer(count=6, rebuild=None):
    plan = plan_buckets([ParamSpec(f"p{i}", (4,), "float32") for i in range(count)], 32 / 2**20, 16 / 2**20)
    log = []
    buckets = [NotedBucket(bucket, order, log) for order, bucket in enumerate(plan.buckets)]
    reducer = Reducer(
        buckets,
        [f"p{i}" for i in range(count)],
        canary=Canary(),
        index_of=lambda mark: mark,
        warn_unused=False,
        open_backward=lambda: reducer.open(announced=False),
        rebuild=rebuild or (lambda order, marks: None),
    )
    markers = reducer.markers()
    return reducer, log, [partial(marker, index) for index, marker in enumerate(markers)]


def backward(reducer, markers, order=None):
    reducer.open(announced=True)
    for index in range(len(markers))[::-1] if order is None else order:
        markers[index]()
    reducer.close(lambda: True)


def launches(log):
    return [entry[1] for entry in log if entry[0] == "launch"]


def test_the_first_synchronised_backward_is_recorded_and_sent_at_its_end():
    seen = []
    reducer, log, markers = make_reducer(rebuild=lambda order, marks: seen.append((order, marks)))
    reducer.open(announced=True)
    assert reducer.phase is Phase.RECORDING
    for index in [4, 5, 2, 4, 1, 0]:
        markers[index]()
        assert log == []
    reducer.close(lambda: True)
    assert launches(log) == [0, 1, 2, 3]
    assert seen == [([5, 2, 4, 1, 0], [1, 1, 1, 0, 2, 1])]
    assert reducer.phase is Phase.IDLE


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_ready_marks_gives_the_same_order_of_launches(seed):
    reducer, log, markers = make_reducer()
    backward(reducer, markers)
    log.clear()
    order = list(range(6))
    random.Random(seed).shuffle(order)
    backward(reducer, markers, order)
    assert launches(log) == [0, 1, 2, 3]
    assert [entry[1] for entry in log if entry[0] == "deliver"] == [0, 1, 2, 3]


def test_a_bucket_leaves_as_soon_as_it_and_all_before_it_are_complete():
    reducer, log, markers = make_reducer()  # sent as (5,), (3, 4), (1, 2), (0,)
    backward(reducer, markers)
    log.clear()
    reducer.open(announced=True)
    assert reducer.phase is Phase.REDUCING
    for index, sent in [(1, 0), (2, 0), (4, 0), (5, 1), (3, 3), (0, 3)]:
        markers[index]()
        assert len(launches(log)) == sent
    reducer.close(lambda: True)
    assert launches(log) == [0, 1, 2, 3]


def test_marks_of_a_local_backward_send_nothing():
    reducer, log, markers = make_reducer()
    reducer.record_forward(False)
    backward(reducer, markers)
    assert (log, reducer.phase) == ([], Phase.IDLE)


def test_a_mark_without_announcement_opens_the_backward():
    reducer, log, markers = make_reducer()
    markers[3]()
    assert reducer.phase is Phase.RECORDING
    reducer.close(lambda: True)
    assert launches(log) == [0, 1, 2, 3]


def test_a_task_that_reaches_no_leaf_is_no_backward():
    reducer, log, _ = make_reducer()
    reducer.record_forward(True)
    reducer.open(announced=True)
    reducer.close(lambda: False)
    assert (log, reducer.phase) == ([], Phase.IDLE)
    reducer.require_sync = False
    reducer.open(announced=True)
    assert reducer.phase is Phase.RECORDING  # the synchronising forward was not used up


def test_an_abandoned_backward_is_drained_with_a_report_of_failure():
    reducer, log, markers = make_reducer()
    backward(reducer, markers)
    log.clear()
    reducer.open(announced=True)
    markers[5]()
    reducer.buckets[-1].tail.failed = [1]
    reducer.abandon()
    assert reducer.phase is Phase.ABANDONED
    with pytest.raises(DPFuseError, match="interrupted by an exception on rank 1 of 2 only"):
        markers[0]()
    assert [entry[1:] for entry in log if entry[0] == "launch"] == [(0, False), (1, True), (2, True), (3, True)]
    assert [entry[1] for entry in log if entry[0] == "discard"] == [0, 1, 2, 3]
    reducer.buckets[-1].tail.failed = []
    backward(reducer, markers)
    assert launches(log) == [0, 1, 2, 3] * 2


def test_an_abandoned_local_backward_needs_no_drain():
    reducer, log, _ = make_reducer()
    reducer.record_forward(False)
    reducer.open(announced=True)
    reducer.abandon()
    assert (log, reducer.phase) == ([], Phase.IDLE)


def follow(reducer, log, agree):
    """Three parameters in two buckets take the place of six in four; their log has names of its own."""
    plan = plan_buckets([ParamSpec(name, (4,), "float32") for name in "abc"], 32 / 2**20, 16 / 2**20)
    buckets = [NotedBucket(bucket, "new " + str(order), log) for order, bucket in enumerate(plan.buckets)]
    reducer.follow(buckets, ["a", "b", "c"], "parameter 'c' was added", agree)
    return [partial(marker, index) for index, marker in enumerate(reducer.markers())]


def test_the_buckets_of_a_changed_model_leave_once_all_ranks_have_told_of_it_in_the_old_ones():
    seen = []
    reducer, log, markers = make_reducer(rebuild=lambda *order_and_marks: seen.append(order_and_marks))
    backward(reducer, markers)
    log.clear()
    old = reducer.buckets
    markers = follow(reducer, log, lambda: log.append(("agree", "")))
    old[-1].tail.changed = [0, 1]
    reducer.open(announced=True)
    assert reducer.phase is Phase.CHANGED
    for index in (2, 0, 1):
        markers[index]()
    assert log == []  # nothing is sent before the end
    reducer.close(lambda: True)
    assert launches(log) == [0, 1, 2, 3, "new 0", "new 1"]
    assert [entry[1] for entry in log if entry[0] in ("deliver", "agree")] == ["", "new 0", "new 1"]
    assert [entry[1] for entry in log if entry[0] == "discard"] == [0, 1, 2, 3]
    assert seen[1:] == [([2, 0, 1], [1, 1, 1])]
    backward(reducer, markers)
    assert launches(log)[6:] == ["new 0", "new 1"]


@pytest.mark.parametrize("here", [True, False])
def test_a_change_on_one_rank_is_told_by_the_ranks_and_stays(here):
    reducer, log, markers = make_reducer()
    backward(reducer, markers)
    log.clear()
    reducer.buckets[-1].tail.changed = [0] if here else [1]
    if here:
        markers = follow(reducer, log, lambda: pytest.fail("there is nothing to agree on"))
    for _ in range(2):
        with pytest.raises(DPFuseError, match="'c' was added .* and not on rank 1" if here else "^rank 0: the module"):
            backward(reducer, markers)
        assert reducer.phase is Phase.IDLE
    assert launches(log) == [0, 1, 2, 3] * 2


def test_a_change_that_was_undone_leaves_the_old_buckets():
    reducer, log, markers = make_reducer()
    backward(reducer, markers)
    log.clear()
    follow(reducer, log, lambda: None)
    reducer.unfollow([f"p{index}" for index in range(6)], [1] * 6)
    backward(reducer, [partial(marker, index) for index, marker in enumerate(reducer.markers())])
    assert launches(log) == [0, 1, 2, 3]


def test_a_changed_model_is_drained_in_the_old_buckets():
    reducer, log, markers = make_reducer()
    backward(reducer, markers)
    log.clear()
    reducer.buckets[-1].tail.failed = [0]
    markers = follow(reducer, log, lambda: None)
    reducer.open(announced=True)
    markers[0]()
    reducer.abandon()
    with pytest.raises(DPFuseError, match="interrupted by an exception on rank 0 of 2 only"):
        reducer.drain()
    assert [entry[1:] for entry in log if entry[0] == "launch"] == [(order, True) for order in range(4)]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "moves", ["wait", "deliver", "discard", "launch launch", "launch deliver", "launch wait launch"]
)
def test_every_illegal_move_of_a_bucket_is_an_error(group, moves):
    param = torch.nn.Parameter(torch.ones(3))
    (bucket,) = make_buckets(plan_buckets([ParamSpec("weight", (3,), "float32")]), [param], group)
    *legal, illegal = moves.split()
    for move in legal:
        getattr(bucket, move)()
    with pytest.raises(DPFuseError, match=r"bucket 0 .* with parameters weight.* is \w+, expected \w+; this is a bug"):
        getattr(bucket, illegal)()


def test_padding_and_gaps_of_a_flat_buffer_stay_zero(group):
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 1, 5)]
    plan = plan_buckets([ParamSpec(str(p.numel()), tuple(p.shape), "float32") for p in params])
    (bucket,) = make_buckets(plan, params, group, views=True, canary=Canary())
    for step in range(3):
        for param in params:
            param.grad = torch.full_like(param, float("nan") if step else 1.0)
        bucket.launch()
        bucket.wait()
        bucket.deliver()
        flat = bucket._table.flat
        filled = torch.zeros_like(flat, dtype=torch.bool)
        for slot in plan.buckets[0].slots:
            filled[slot.offset : slot.offset + slot.numel] = True
        filled[plan.buckets[0].numel :] = True  # the tail
        assert (flat[~filled] == 0).all()
        assert (~filled).sum() == 1 + 3 + 3


def captured(reducer):
    """The same inside the capture of a CUDA graph: nothing can be read from the device, so the tail must not be."""
    for bucket in reducer.buckets:
        bucket.tail.deaf = True
        bucket.tail.used_somewhere = None  # calling it would wait for the device


def test_a_captured_backward_is_like_any_other():
    reducer, log, markers = make_reducer()
    backward(reducer, markers)
    log.clear()
    captured(reducer)
    backward(reducer, markers)
    assert launches(log) == [0, 1, 2, 3]
    assert [entry[1] for entry in log if entry[0] == "deliver"] == [0, 1, 2, 3]


def test_the_first_backward_of_a_model_is_not_captured():
    reducer, log, markers = make_reducer()
    captured(reducer)
    with pytest.raises(
        DPFuseError, match=r"rank 0: the first .* is captured in a CUDA graph; expected some steps before"
    ):
        backward(reducer, markers)
    assert (log, reducer.phase) == ([], Phase.IDLE)


def test_a_parameter_without_gradient_is_named_in_a_capture():
    reducer, log, markers = make_reducer()
    backward(reducer, markers)
    log.clear()
    captured(reducer)
    reducer.buckets[1].missing = [3]
    with pytest.raises(DPFuseError, match=r"rank 0: parameter 'p3' got no gradient in a backward that a CUDA graph"):
        backward(reducer, markers, [5, 4, 2, 1, 0])
    assert ("discard", 1) in log
    assert ("deliver", 1) not in log
    assert reducer.phase is Phase.IDLE


def test_a_pack_that_fails_in_a_capture_is_reported_without_asking_anybody():
    reducer, _, markers = make_reducer()
    backward(reducer, markers)
    captured(reducer)
    reducer.buckets[0].error = ValueError("2 of 2 tensors are not where the last call found them")
    with pytest.raises(DPFuseError, match="rank 0 could not pack its gradients: 2 of 2 tensors are not where"):
        backward(reducer, markers)
    assert reducer.phase is Phase.IDLE
