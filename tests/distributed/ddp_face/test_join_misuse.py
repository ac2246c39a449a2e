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
        ("a backward that fails", "interrupted by an exception on rank 0, 1", "failed on rank 0, 1"),
        ("no_sync on one rank", "rank 0 is inside no_sync()", "rank 0 is inside no_sync()"),
    ],
)
def test_what_cannot_be_shadowed_is_an_error_on_every_rank(ranks, case, here, there):
    first, second, without_input = ranks(misused, case, size=3, timeout=20)
    assert here in first
    assert here in second
    assert there in without_input


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
