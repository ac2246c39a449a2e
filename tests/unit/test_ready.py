"""Ready lists: when a bucket is complete, which parameter looks, which parameters are missing or come too late."""

from __future__ import annotations

import itertools

import pytest
import torch

from dpfuse.engine.ready import MISSES, ReadyList


@pytest.fixture
def params():
    return [torch.zeros(2) for _ in range(3)]  # equal values: only the identity tells them apart


def fill(ready, *params):
    ready.clear()
    ready.entries += params


def test_a_bucket_is_complete_once_each_parameter_is_ready_in_any_order(params):
    for order in itertools.permutations(params):
        ready = ReadyList(params, [1, 1, 1])
        for param in order:
            assert not ready.is_complete
            ready.entries.append(param)
        assert ready.is_complete


def test_parameters_are_told_apart_by_identity(params):
    ready = ReadyList(params, [1, 1, 1])
    fill(ready, params[0], params[1], torch.zeros(2))
    assert not ready.is_complete
    fill(ready, params[0], params[1], params[1])
    assert not ready.is_complete


def test_each_parameter_is_waited_for_as_often_as_it_became_ready_before(params):
    a, b, c = params
    ready = ReadyList(params, [2, 1, 0])  # one that never was is waited for once
    for entries, complete in [
        ([a, b, c], False),
        ([a, b, a, c], True),
        ([c, a, a, b], True),
        ([a, b, b, c], False),
        ([a, b, a, c, c], False),
        ([a, a, a, b, c], False),
    ]:
        fill(ready, *entries)
        assert ready.is_complete is complete


def test_an_order_that_was_seen_is_found_again_without_sorting(params, monkeypatch):
    ready = ReadyList(params, [1, 1, 1])
    fill(ready, params[1], params[0], params[2])
    assert ready.is_complete
    monkeypatch.setattr("builtins.sorted", None)
    fill(ready, params[1], params[0], params[2])
    assert ready.is_complete


def test_a_bucket_without_parameters_is_always_complete():
    ready = ReadyList([], [])
    assert (ready.is_complete, ready.sentinel, ready.missing(), ready.late()) == (True, None, [], [])
    assert not ready.choose_sentinel()


def test_frozen_parameters_are_not_waited_for_until_they_are_trained_again(params):
    ready = ReadyList(params, [1, 2, 1])
    ready.wait_for_all_but(frozenset([id(params[1])]))
    fill(ready, params[0], params[2])
    assert ready.is_complete
    assert ready.missing() == [params[1]]
    fill(ready, params[0], params[2], params[1])
    assert not ready.is_complete
    ready.wait_for_all_but(frozenset())
    fill(ready, params[0], params[2], params[1], params[1])
    assert ready.is_complete


def same(found, expected):
    return list(map(id, found)) == list(map(id, expected))


def test_missing_and_late_parameters(params):
    ready = ReadyList(params, [1, 1, 1])
    fill(ready, params[2], params[2])
    assert same(ready.missing(), params[:2])
    assert ready.late() == [], "it was not sent"
    ready.sent = len(ready.entries)
    assert ready.late() == []
    ready.entries.append(params[0])
    assert same(ready.late(), params[:1])
    ready.sent = 0  # it was sent with nothing in it
    assert same(ready.late(), [params[2], params[2], params[0]])
    ready.clear()
    assert (ready.entries, ready.sent, ready.late()) == ([], -1, [])


def test_hooks_keep_the_same_list(params):
    ready = ReadyList(params, [1, 1, 1])
    append = ready.entries.append
    ready.clear()
    append(params[0])
    assert same(ready.entries, params[:1])


def test_the_first_sentinel_is_the_parameter_that_was_registered_first_or_came_last_before(params):
    assert ReadyList(params, [1, 1, 1]).sentinel is params[0]
    recorded = [params[0], params[2], params[1], params[2]]
    assert ReadyList(params, [1, 1, 2], recorded).sentinel is params[2]
    assert ReadyList(params, [1, 1, 1], [params[0], params[2]]).sentinel is params[2], "the other never came"


def test_a_sentinel_that_is_not_the_last_is_replaced_after_several_backwards_in_a_row(params):
    a, b, c = params
    ready = ReadyList(params, [1, 1, 1])
    for _ in range(MISSES - 1):
        fill(ready, c, a, b)
        assert not ready.choose_sentinel()
    fill(ready, c, b, a)
    assert not ready.choose_sentinel(), "it was the last again, and the count begins again"
    for _ in range(MISSES - 1):
        fill(ready, c, a, b)
        assert not ready.choose_sentinel()
    fill(ready, c, a, b)
    assert ready.choose_sentinel()
    assert ready.sentinel is b
    assert not ready.choose_sentinel()


def test_a_sentinel_that_did_not_become_ready_is_replaced_at_once(params):
    _, b, c = params
    ready = ReadyList(params, [1, 1, 1])
    fill(ready, b, c)
    assert ready.choose_sentinel()
    assert ready.sentinel is c


def test_a_backward_that_reached_no_parameter_of_the_bucket_says_nothing_of_the_sentinel(params):
    ready = ReadyList(params, [1, 1, 1])
    for _ in range(2 * MISSES):
        fill(ready)
        assert not ready.choose_sentinel()
    assert ready.sentinel is params[0]


def test_parameters_that_a_backward_does_not_reach_are_left_out_of_this_one(params):
    a, b, c = params
    ready = ReadyList(params, [1, 2, 1])
    assert ready.due == 4
    ready.leave_out(frozenset({id(b)}))
    assert (ready.due, ready.leaves_out, ready.is_reached) == (2, True, True)
    ready.entries += [a]
    assert not ready.is_complete
    ready.entries += [c]
    assert ready.is_complete
    assert not ready.unexpected()
    ready.entries += [b]  # reached all the same
    assert not ready.is_complete
    assert ready.unexpected()
    fill(ready, a, c)  # in the next backward all are waited for
    assert (ready.due, ready.leaves_out) == (4, False)
    assert not ready.is_complete
    fill(ready, a, b, c, b)
    assert ready.is_complete


def test_a_bucket_that_a_backward_does_not_reach_at_all_is_complete_and_empty(params):
    ready = ReadyList(params, [1, 1, 1])
    ready.leave_out(frozenset(map(id, params)))
    assert ready.is_complete
    assert not ready.is_reached
    ready.uncertain = 1
    assert not ready.is_complete


def test_an_order_without_some_parameters_does_not_replace_the_whole_one(params):
    a, b, c = params
    ready = ReadyList(params, [1, 1, 1])
    fill(ready, b, c, a)
    assert ready.is_complete
    ready.clear()
    ready.leave_out(frozenset({id(b)}))
    ready.entries += [c, a]
    assert ready.is_complete
    fill(ready, b, c, a)
    assert ready.is_complete
    ready.clear()
    ready.leave_out(frozenset({0}))  # of another bucket
    assert not ready.leaves_out
