"""join(): what cannot be shadowed, what does not count, and what an exception leaves behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch.distributed.algorithms.join import Join

import dpfuse
from tests.distributed.ddp_face.test_join import DDP, Net, assert_same, inputs_of


def misused(rank, size, case):
    model = DDP(Net())
    x = torch.ones(2, 4)
    with pytest.raises(dpfuse.errors.DPFuseError) as caught, model.join():
        for _ in range(0 if rank == 2 else 2):
            if case == "two forwards":
                (model(x) + model(x)).sum().backward()
            elif case == "a forward that fails":
                with contextlib.suppress(TypeError):
                    model(None)
            elif case == "a forward at the end":
                model(x)
                break
            elif case == "a backward that fails":
                out = model(x)
                out.register_hook(lambda grad: 1 / 0)
                with contextlib.suppress(ZeroDivisionError):
                    out.sum().backward()
            else:
                with model.no_sync(rank == 0):
                    model(x).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "here", "there"),
    [
        ("two forwards", "expected forward and backward in turn", "failed on rank 0, 1"),
        ("a forward that fails", "expected forward and backward in turn", "failed on rank 0, 1"),
        ("a forward at the end", "expected forward and backward in turn", "failed on rank 0, 1"),
        ("a backward that fails", "the last backward inside join() failed", "failed on rank 0, 1"),
        ("no_sync on one rank", "rank 0 is inside no_sync()", "rank 0 is inside no_sync()"),
    ],
)
def test_what_cannot_be_shadowed_is_an_error_on_every_rank(ranks, case, here, there):
    first, second, without_input = ranks(misused, case, size=3, timeout=20)
    assert here in first
    assert here in second
    assert there in without_input


def trained(rank, halves, failing):
    """What three ranks train, of which one may have a forward that raises before each of its own."""
    torch.manual_seed(0)
    model = DDP(Net(norm=not halves))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for x in inputs_of(rank, (2, 3, 1)[rank]):
            if rank == failing:
                with contextlib.suppress(TypeError):
                    model(None)
            optimizer.zero_grad()
            if halves and rank == failing:  # as where memory has run out
                with model.no_sync():
                    model(x[:3]).sum().backward()
                x = x[3:]
            model(x).sum().backward()
            optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("halves", [False, True], ids=["again", "in halves"])
@pytest.mark.ranks(size=3, timeout=30)
def test_what_runs_in_place_of_a_forward_that_failed_belongs_to_the_same_iteration(rank, size, halves):
    expected = trained(rank, halves, None)
    for failing in range(2):
        assert_same(trained(rank, halves, failing), expected, size)


def not_counted(rank, size):
    model = DDP(Net(norm=True))
    with model.join():
        for x in inputs_of(rank, 1 + 2 * rank):
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
    return copy.deepcopy(model).state_dict()


def test_forwards_without_gradients_do_not_count(ranks):
    first, second = ranks(not_counted, timeout=20)
    assert_same(first, second, 2)


def abandoned(rank, size):
    model = DDP(Net())
    with contextlib.suppress(ZeroDivisionError), Join([model]):
        model(inputs_of(rank, 1)[0]).sum().backward()
        raise ZeroDivisionError
    reference = weakref.ref(model)
    del model
    gc.collect()
    return reference() is None


def test_a_join_that_an_exception_ended_keeps_no_model_alive(ranks):
    assert ranks(abandoned, timeout=20) == [True, True]
