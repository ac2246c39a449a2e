"""A wish of one rank is known to all of them after the same backward, however gradients are averaged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.comm import votes
from dpfuse.engine.report import Report
from tests.distributed.costs.test_cuda_graph_recipe import pretended_capture
from tests.distributed.failures.test_spoiler import as_on_a_gpu

DDP = dpfuse.DistributedDataParallel
SMALL = {"comm_buffer_size": 0.001, "last_comm_buffer_size": 0.0005}
Make = Callable[[nn.Module], Any]
WAYS: dict[str, Make] = {
    "views": partial(dpfuse.DataParallel, **SMALL),
    "private": partial(dpfuse.DataParallel, gradient_as_bucket_view=False, **SMALL),
    "face": partial(DDP, bucket_cap_mb=0.001),
    "in buckets": partial(dpfuse.DataParallel, accumulate_in_buckets=True, **SMALL),
    "unused": partial(dpfuse.DataParallel, find_unused_parameters=True, **SMALL),
    "deterministic": partial(dpfuse.DataParallel, deterministic=True, **SMALL),
    "bfloat16": partial(dpfuse.DataParallel, wire_dtype=torch.bfloat16, **SMALL),
    "float8": partial(dpfuse.DataParallel, wire_dtype=torch.float8_e4m3fn, **SMALL),
    "unchecked": partial(dpfuse.DataParallel, check_training="off", **SMALL),
    "float64": lambda net: dpfuse.DataParallel(net.double(), **SMALL),
    "strict": partial(dpfuse.DataParallel, check="strict", **SMALL),
}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 2))


@contextmanager
def forgetting() -> Iterator[None]:
    """Ranks of tests live long, and a wish is of their process."""
    try:
        yield
    finally:
        dpfuse.forget_stop()


def backward(model: Any, rank: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.full((3, 4), float(rank + 1), dtype=dtype)).square().sum().backward()


def steps(model: Any, rank: int, asks: dict[int, str], count: int = 6) -> list[str]:
    """What the model says after each of some steps; in step k, before the backward, this rank asks with `asks[k]`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    said = []
    for step in range(count):
        optimizer.zero_grad()
        if step in asks:
            dpfuse.request_stop(asks[step])
        backward(model, rank)
        optimizer.step()
        assert model.stop_requested == (model.stop_reason is not None)
        said.append(str(model.stop_reason or ""))
    return said


def asked(rank: int, size: int, way: str, step: int, askers: tuple[int, ...], late: bool) -> list[str]:
    with forgetting(), as_on_a_gpu() if late else ExitStack():
        return steps(WAYS[way](network()), rank, {step: f"me{rank}"} if rank in askers else {})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_knows_after_the_first_backward_that_begins_behind_the_wish(ranks, way, step, size):
    expected = [""] * step + [f"rank {size - 1} has asked: me{size - 1}"] * (6 - step)
    assert ranks(asked, way, step, (size - 1,), False, size=size) == [expected] * size


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["views", "private", "unused", "strict"])
@pytest.mark.parametrize("step", [0, 2])
def test_on_a_gpu_every_rank_knows_one_backward_later(ranks, way, step):
    expected = [""] * (step + 1) + ["rank 0 has asked: me0"] * (5 - step)
    assert ranks(asked, way, step, (0,), True) == [expected] * 2


def test_all_ranks_that_ask_are_named(ranks):
    expected = ["", *["rank 0 has asked: me0; asked, too: rank 2"] * 5]
    assert ranks(asked, "views", 1, (0, 2), False, size=3) == [expected] * 3


def windows(rank, size, way):
    model = WAYS[way](network())
    said = []
    with forgetting():
        for step in range(3):
            for micro in range(3):
                with model.no_sync(enabled=micro < 2):
                    if (rank, step, micro) == (1, 1, 0):
                        dpfuse.request_stop()
                    backward(model, rank)
                said.append(model.stop_requested)
    return said


@pytest.mark.parametrize("way", ["views", "in buckets"])
def test_inside_a_window_nobody_knows(ranks, way):
    assert ranks(windows, way) == [[False] * 5 + [True] * 4] * 2


def uneven(rank, size, counts, asker, step):
    model = DDP(network(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with forgetting():
        done = 0
        with model.join():
            for index in range(counts[rank]):
                optimizer.zero_grad()
                if (rank, index) == (asker, step):
                    dpfuse.request_stop()
                backward(model, rank)
                optimizer.step()
                done += 1
                if model.stop_requested:
                    break
            if rank == asker and step >= counts[rank]:
                dpfuse.request_stop()  # a rank without inputs asks, too
        weights = torch.cat([param.detach().flatten() for param in model.parameters()])
        return done, str(model.stop_reason), weights.tolist()


@pytest.mark.parametrize(
    ("counts", "asker", "step", "made"),
    [((9, 4), 0, 2, [3, 3]), ((9, 2), 0, 5, [6, 2]), ((9, 2), 1, 1, [2, 2]), ((2, 9), 1, 6, [2, 7])],
)
def test_ranks_with_uneven_inputs_stop_after_the_same_average(ranks, counts, asker, step, made):
    results = ranks(uneven, counts, asker, step)
    assert [done for done, _, _ in results] == made
    assert {said for _, said, _ in results} == {f"rank {asker} has asked"}
    assert results[0][2] == results[1][2]


def test_a_rank_without_inputs_asks_all(ranks):
    results = ranks(uneven, (40, 2), 1, 2)
    assert results[0][0] < 40
    assert [said for _, said, _ in results] == ["rank 1 has asked"] * 2


def two_models(rank, size):
    first, second = (WAYS["views"](network()) for _ in range(2))
    said = []
    with forgetting():
        for step in range(3):
            if (rank, step) == (1, 1):
                dpfuse.request_stop()
            for model in (first, second):
                backward(model, rank)
                said.append((first.stop_requested, second.stop_requested))
    return said


def test_each_model_knows_after_its_own_backward(ranks):
    expected = [(False, False)] * 2 + [(True, False)] + [(True, True)] * 3
    assert ranks(two_models) == [expected] * 2


def failing(rank, size):
    model = WAYS["views"](network())
    with forgetting():
        backward(model, rank)
        if rank == 0:
            dpfuse.request_stop()
        handle = model.module[0].weight.register_hook(partial(_fail_on, 1, rank))
        said = []
        try:
            backward(model, rank)
        except ZeroDivisionError:
            said.append(True)  # what the peers wait for is completed before the question below is answered
        except dpfuse.DPFuseError as error:
            said.append("rank 1" in str(error))
        handle.remove()
        said.append(model.stop_requested)
        backward(model, rank)
        return [*said, model.stop_requested]


def _fail_on(which, rank, grad):
    if rank == which:
        raise ZeroDivisionError


def test_a_backward_that_fails_tells_it_all_the_same(ranks):
    assert ranks(failing) == [[True, True, True]] * 2


def remade(rank, size):
    """On a GPU, one rank alone makes its buckets again between the wish and the news."""
    with forgetting(), as_on_a_gpu():
        model = WAYS["views"](network())
        said = []
        for step in range(5):
            if (rank, step) == (0, 2):
                dpfuse.request_stop()
            if step == 3 and rank == 1:
                model._sync.attach_factors()
            backward(model, rank)
            said.append(model.stop_requested)
        return said


def test_a_rank_that_has_made_its_buckets_again_hears_it_with_the_others(ranks):
    assert ranks(remade) == [[False, False, False, True, True]] * 2


def sharded(rank, size, options):
    model = WAYS["views"](network())
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, **options)
    said = []
    with forgetting():
        for step in range(4):
            if (rank, step) == (1, 2):
                dpfuse.request_stop()
            optimizer.zero_grad()
            backward(model, rank)
            optimizer.step()
            said.append(model.stop_requested)
    return said


@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}], ids=str)
def test_ranks_with_a_sharded_optimizer_know_after_the_same_step(ranks, options):
    assert ranks(sharded, options) == [[False, False, True, True]] * 2


def exchanges(rank, size, asks):
    with forgetting():
        model = WAYS["views"](network())
        steps(model, rank, {}, 3)
        gathered = []
        gather = votes.gather_texts
        noted = mock.patch.object(votes, "gather_texts", lambda *told: gathered.append(told) or gather(*told))
        with noted, dpfuse.time_communication(model) as times:
            steps(model, rank, {4: ""} if asks and rank == 1 else {}, 10)
        return len(gathered), times.collectives, times.nbytes


def test_a_training_in_which_nobody_asks_exchanges_nothing_and_one_that_stops_exchanges_once(ranks):
    quiet, stopped = ranks(exchanges, False), ranks(exchanges, True)
    assert [found[0] for found in quiet] == [0, 0]
    assert [found[0] for found in stopped] == [1, 1]
    assert [found[1:] for found in quiet] == [found[1:] for found in stopped]


def test_a_wish_takes_two_elements_of_the_report(group):
    report = dpfuse.DataParallel(network()).reducer.buckets[-1].parts.report
    assert [question.name for question in report._format.questions].count("stop") == 1
    assert 4 * report._format.params <= 1024


# --- Without peers, without a backward ---


def test_a_process_without_a_group_knows_its_own_wish():
    with forgetting():
        with pytest.warns(UserWarning, match="there is no process group"):
            model = dpfuse.DataParallel(network())
        assert (model.stop_requested, dpfuse.agree_to_stop()) == (False, False)
        dpfuse.request_stop("a  key\nwas pressed")
        assert (model.stop_requested, dpfuse.agree_to_stop()) == (True, True)
        assert str(model.stop_reason) == "rank 0 has asked: a key was pressed"
        dpfuse.request_stop("again")
        assert model.stop_reason.text == "a key was pressed", "the first wish stays"
    assert not model.stop_requested


@pytest.mark.parametrize("late", [False, True])
def test_a_group_of_one_knows_after_its_next_backward(group, late):
    with forgetting(), as_on_a_gpu() if late else ExitStack():
        model = WAYS["views"](network())
        assert steps(model, 0, {2: "me"}, 4) == ["", "", *["rank 0 has asked: me"] * 2]


def agreed(rank, size):
    with forgetting():
        model, other = WAYS["views"](network()), WAYS["views"](network())
        said = [dpfuse.agree_to_stop()]
        if rank == 1:
            dpfuse.request_stop("ä" * 60)
        said += [dpfuse.agree_to_stop(), model.stop_requested, other.stop_requested]
        backward(model, rank)
        said += [model.stop_reason.text == "ä" * 27, model.stop_reason == other.stop_reason]
        dpfuse.forget_stop()
        return [*said, model.stop_requested, dpfuse.agree_to_stop()]


def test_ranks_agree_where_no_backward_comes(ranks):
    assert ranks(agreed) == [[False, True, True, True, True, True, False, False]] * 2


def by_hand(rank, size, asks):
    """Loops as Paddle's documents have them: every backward inside `no_sync()`, gradients averaged by a call."""
    with forgetting():
        model, other = WAYS["views"](network()), network()
        said = []
        for step in range(5):
            if (rank, step) == asks:
                dpfuse.request_stop(f"me{rank}")
            with model.no_sync():
                backward(model, rank)
            backward(other, rank)
            dpfuse.fused_allreduce_gradients(model.parameters())
            said.append(str(model.stop_reason or ""))
            dpfuse.fused_allreduce_gradients(other.parameters())
        return said


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_average_by_hand_know_after_the_same_call(ranks, size, step):
    expected = [""] * step + [f"rank {size - 1} has asked: me{size - 1}"] * (5 - step)
    assert ranks(by_hand, (size - 1, step), size=size) == [expected] * size


def test_one_rank_that_averages_by_hand_knows_after_its_next_call(group):
    assert by_hand(0, 1, (0, 2)) == ["", "", *["rank 0 has asked: me0"] * 3]


def by_hand_exchanges(rank, size, asks):
    with forgetting(), mock.patch.object(votes, "gather_texts", wraps=votes.gather_texts) as gather:
        net = network()
        for step in range(4):
            if asks and (rank, step) == (0, 1):
                dpfuse.request_stop()
            backward(net, rank)
            dpfuse.fused_allreduce_gradients(net.parameters())
        known = dpfuse.agree_to_stop() if asks else False
        return gather.call_count, known


def test_calls_exchange_reasons_once_and_only_where_a_rank_asks(ranks):
    assert ranks(by_hand_exchanges, False) == [(0, False)] * 2
    assert ranks(by_hand_exchanges, True) == [(2, True)] * 2  # one of them by agree_to_stop()


def warned(rank, size, changed):
    """Rank 1 asks in each call, and may change its weights alone: both travel in one number of the vote."""
    with forgetting(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(70):  # weights are compared within 64
            if rank == 1:
                dpfuse.request_stop()
            backward(net, rank)
            dpfuse.fused_allreduce_gradients(net.parameters())
            optimizer.step()
            optimizer.zero_grad()
            dpfuse.forget_stop()
            if changed and (rank, step) == (1, 2):
                with torch.no_grad():
                    net[0].bias.add_(1)
        return [each.category is dpfuse.WeightsWarning for each in caught]


@pytest.mark.parametrize("changed", [False, True])
def test_a_wish_in_the_vote_neither_hides_nor_feigns_a_difference_of_the_weights(ranks, changed):
    assert ranks(warned, changed) == [[True] * changed] * 2


def unreadable(rank, size):
    with forgetting():
        model = WAYS["views"](network())
        return steps(model, rank, {1: "no such file: \udcff"} if rank == 1 else {}, 3)


def test_a_reason_with_bytes_that_are_no_text_reaches_all(ranks):
    assert ranks(unreadable) == [["", *["rank 1 has asked: no such file: ?"] * 2]] * 2


def forgotten(rank, size):
    """Rank 0 forgets before a backward, rank 1 after it; a new wish must still be exchanged by both."""
    with forgetting():
        model = WAYS["views"](network())
        steps(model, rank, {1: "first"} if rank == 0 else {}, 3)
        if rank == 0:
            dpfuse.forget_stop()
            dpfuse.request_stop("second")
        backward(model, rank)
        return str(model.stop_reason)


def test_a_rank_that_has_forgotten_earlier_than_another_hangs_nothing(ranks):
    assert ranks(forgotten) == ["rank 0 has asked: second", "rank 0 has asked: first"]


def groups(rank, size):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with forgetting():
        model = dpfuse.DataParallel(network(), group=pairs[rank // 2], **SMALL)
        return steps(model, rank, {1: ""} if rank == 2 else {}, 3)


def test_each_group_stops_for_itself(ranks):
    results = ranks(groups, size=4)
    assert results == [["", "", ""]] * 2 + [["", *["rank 0 has asked"] * 2]] * 2


def test_a_reason_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="got a reason of type int, expected a text"):
        dpfuse.request_stop(3)


def test_a_captured_backward_is_refused_by_name(group):
    model = dpfuse.DataParallel(network(), **SMALL)
    for _ in range(3):
        backward(model)
    report = model.reducer.in_use.report
    with forgetting():
        report.captured = True
        with pytest.raises(dpfuse.DPFuseError, match=r"captured in a CUDA graph.*Call dpfuse.agree_to_stop\(\)"):
            _ = model.stop_requested
        dpfuse.request_stop()
        assert dpfuse.agree_to_stop()
        assert model.stop_requested
    with pretended_capture():
        report.landed(report.source(mock.Mock(well=True, changed=False, missing=(), frozen=frozenset())))
        report.captured = False
        assert Report.read(report, mock.Mock(well=True), wait=False, gather=False).all_well
        assert report.captured
    backward(model)
    assert not report.captured
