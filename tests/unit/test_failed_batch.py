"""Which arguments are another attempt at the batch of a forward that raised, and which are the next batch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dpfuse.model.failed_batch import FailedBatch

DATA = torch.arange(32.0).view(8, 4)
X, MASK, NAMES = DATA[:4], torch.ones(4), ["cat", "dog"]


@dataclass
class Sample:
    x: torch.Tensor
    size: int = 4


def arguments(*args, **kwargs):
    return args, kwargs


SAME = {
    "itself": (arguments(X), arguments(X)),
    "a part": (arguments(X), arguments(X[:1])),
    "the other part": (arguments(X), arguments(X[2:])),
    "some columns": (arguments(X), arguments(X[:, 1:3])),
    "transposed": (arguments(X), arguments(X.T)),
    "without gradient": (arguments(X.clone().requires_grad_()), None),
    "by name": (arguments(X), arguments(x=X[:2])),
    "with a flag": (arguments(X, True), arguments(X)),
    "with its mask": (arguments(X, mask=MASK), arguments(X[:2], mask=MASK[:2])),
    "in containers": (arguments({"x": [X]}), arguments({"x": [X[:2]]})),
    "in an object": (arguments(Sample(X)), arguments(Sample(X[1:]))),
    "with names": (arguments(X, NAMES), arguments(X[:1], NAMES[:1])),
}
OTHER = {
    "the next rows": (arguments(X), arguments(DATA[4:])),
    "one row more": (arguments(X), arguments(DATA[:5])),
    "the next columns": (arguments(DATA[:, :2]), arguments(DATA[:, 2:])),
    "a copy": (arguments(X), arguments(X.clone())),
    "only the mask is the same": (arguments(X, MASK), arguments(DATA[4:], MASK)),
    "other names beside the mask": (arguments(MASK, ["cat"]), arguments(MASK, ["dog"])),
    "another number beside the mask": (arguments(MASK, 3), arguments(MASK, 4)),
    "an object of another kind": (arguments(MASK, object()), arguments(MASK, object())),
    "no tensor": (arguments(3), arguments(3)),
    "nothing": (arguments(X), arguments()),
    "no elements": (arguments(X), arguments(X[:0])),
    "sparse": (arguments(X), arguments(X.to_sparse())),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_data_is_another_attempt(case):
    first, second = SAME[case]
    assert FailedBatch(first).has(second or arguments(first[0][0].detach()[:2]))


@pytest.mark.parametrize("case", OTHER)
def test_other_data_is_the_next_batch(case):
    first, second = OTHER[case]
    assert not FailedBatch(first).has(second)


def test_memory_that_was_written_has_the_next_batch():
    static = torch.zeros(4, 2)
    batch = FailedBatch(arguments(static))
    assert batch.has(arguments(static))
    static.copy_(torch.ones(4, 2))
    assert not batch.has(arguments(static))
    assert FailedBatch(arguments(static)).has(arguments(static[1:]))


def test_memory_of_a_batch_is_not_used_again_as_long_as_it_is_known():
    x = torch.randn(100, 100)
    address = x.data_ptr()
    batch = FailedBatch(arguments(x))
    del x
    assert all(torch.empty(100, 100).data_ptr() != address for _ in range(10))
    del batch


def test_no_graph_is_kept_alive():
    freed = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.note = Freed(freed)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = Note.apply(torch.ones(2, requires_grad=True))
    batch = FailedBatch(arguments(x))
    assert batch.has(arguments(x))
    del x
    assert freed == [True]


class Freed:
    def __init__(self, freed):
        self.freed = freed

    def __del__(self):
        self.freed.append(True)
