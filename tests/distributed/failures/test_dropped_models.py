"""A model that is dropped after its backward has failed, which the peers may still wait for.

Whether Python has collected it must not matter: that differs between ranks.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.engine import send_order
from tests.distributed.failures.test_calls_after_a_failure import (
    FACES,
    assert_mean,
    fail,
    loss_of,
    right_steps,
    wrapped,
)

COLLECTING = [set(), {0}, {1}, {0, 1}]  # ranks on which Python collects garbage at once


def fail_and_drop(rank, group, face, before, place, failing, collecting):
    """Have a model fail in a group and drop it; collect it on these ranks."""
    model = wrapped(face, group)
    right_steps(model, rank, 2, range(before))
    fail(model, rank, 5, place, failing)
    del model
    if rank in collecting:
        gc.collect()


CASES = [  # the face, the ranks that fail, where, and how many backwards have gone well before
    ("dp", {0, 1}, "in the middle", 2),
    ("ddp", {0, 1}, "in the middle", 0),
    ("ddp", {0, 1}, "before the first bucket", 2),
    ("dp", {0, 1}, "above the outputs", 2),
    ("dp", {1}, "in the middle", 0),
    ("ddp", {0}, "in the middle", 2),
    ("dp", {1}, "before the first bucket", 2),
    ("ddp", {1}, "above the outputs", 0),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("collecting", COLLECTING, ids=str)
def test_another_model_of_the_group_goes_on(rank, size, collecting):
    gc.disable()
    try:
        for face, failing, place, before in CASES:
            group = dist.new_group()
            kept = wrapped(face, group)
            right_steps(kept, rank, size)
            fail_and_drop(rank, group, face, before, place, failing, collecting)
            right_steps(kept, rank, size)
    finally:
        gc.enable()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("collecting", COLLECTING, ids=str)
def test_a_smaller_model_is_wrapped_anew(rank, size, collecting):
    gc.disable()
    try:
        for face, failing, place, before in CASES:
            group = dist.new_group()
            fail_and_drop(rank, group, face, before, place, failing, collecting)
            name = "group" if face == "dp" else "process_group"
            torch.manual_seed(1)
            small = FACES[face](nn.Linear(2, 1), **{name: group})
            for number in range(3):
                small.zero_grad()
                small(torch.full((1, 2), 1.0 + rank + number)).sum().backward()
                assert small.module.weight.grad[0, 0] == 1.5 + number
    finally:
        gc.enable()


def test_a_model_that_fails_to_be_wrapped_completes_it_too(rank, size):
    for face in FACES:
        group = dist.new_group()
        fail_and_drop(rank, group, face, 2, "in the middle", {1}, set())
        name = "group" if face == "dp" else "process_group"
        with pytest.raises((dpfuse.DPFuseError, TypeError, RuntimeError)):
            FACES[face](nn.Linear if rank else nn.Linear(2, 2), **{name: group})
        right_steps(wrapped(face, group), rank, size)


def test_a_dropped_model_is_freed_once_it_is_completed(rank, size):
    group = dist.new_group()
    model = wrapped("dp", group)
    right_steps(model, rank, size)
    fail(model, rank, 5, "in the middle", {0, 1})
    alive = weakref.ref(model.module)
    del model
    gc.collect()
    assert alive() is not None
    other = wrapped("dp", group)
    gc.collect()
    assert alive() is None
    right_steps(other, rank, size)


def test_a_dropped_model_does_not_keep_a_destroyed_group(rank, size):
    group = dist.new_group()
    model = wrapped("dp", group)
    right_steps(model, rank, size)
    fail(model, rank, 5, "in the middle", {0, 1})
    module, gone = weakref.ref(model.module), weakref.ref(group)
    dist.barrier()
    dist.destroy_process_group(group)
    del model, group
    wrapped()
    gc.collect()
    assert module() is None
    assert gone() is None
    assert all(each is not None for each in send_order._groups)


def test_a_model_that_lives_completes_what_it_owes_before_another_is_wrapped(rank, size):
    group = dist.new_group()
    model = wrapped("dp", group)
    right_steps(model, rank, size)
    fail(model, rank, 5, "in the middle", {1})
    other = wrapped("dp", group)
    for number in range(3):
        for each in (model, other):
            each.zero_grad()
            loss_of(each, rank, number).backward()
            assert_mean(each, rank, number)
