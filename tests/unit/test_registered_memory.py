"""Registered memory on a back end that only pretends: when it is asked, when it is not, and that it is zeroed."""

from __future__ import annotations

import pytest
import torch

from dpfuse.comm.abilities import Abilities
from dpfuse.comm.registered_memory import VARIABLE, can_register
from dpfuse.engine.assembly import Assembly
from dpfuse.engine.exchanges.comm_hook import CommHook
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import plan_buckets
from dpfuse.engine.protocols import PackArguments
from dpfuse.engine.settings import SyncSettings
from tests.unit.engine_inputs import surroundings

CUDA = torch.device("cuda", 0)


class Backend:
    """Gives memory on the CPU that is full of NaN, as memory from a pool may be."""

    def __init__(self, supports=True, error=None):
        self.supports, self.error, self.given = supports, error, []

    def supports_tensor_alloc(self, device):
        return self.supports

    def allocate_tensor(self, size, *, dtype, device):
        if self.error is not None:
            raise self.error
        self.given.append(torch.full((size,), float("nan"), dtype=dtype))
        return self.given[-1]


class Group:
    def __init__(self, backend, size=2):
        self.backend, self._size = backend, size

    def size(self):
        return self._size

    def rank(self):
        return 0

    def _get_backend(self, device):
        if self.backend is None:
            raise RuntimeError("no back end for this device")
        return self.backend


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group(Backend()), True),
        (Group(Backend(), size=1), False),
        (Group(Backend(supports=False)), False),
        (Group(Backend(error=RuntimeError("the communicator has not been initialized"))), False),
        (Group(Backend(error=ValueError("expected another device"))), False),
        (Group(object()), False),  # an older torch
        (Group(None), False),
    ],
)
def test_it_is_used_only_where_it_was_asked_for_and_given(group, expected, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not can_register(group, CUDA)
    monkeypatch.setenv(VARIABLE, "1")
    assert not can_register(group, torch.device("cpu"))
    assert can_register(group, CUDA) is expected


def test_another_value_is_refused_by_name(monkeypatch):
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="DPFUSE_REGISTERED_BUFFERS is 'yes', expected 0 or 1"):
        can_register(Group(Backend()), CUDA)


def bucket_over(group, **options):
    plan = plan_buckets([ParamSpec("a", (3,), "float32"), ParamSpec("b", (5,), "float32")])
    params = [torch.zeros(3), torch.zeros(5)]
    (bucket,) = Assembly(group, surroundings(), SyncSettings(**options)).make(plan, params)
    return bucket


@pytest.fixture(autouse=True)
def _without_streams(monkeypatch):
    monkeypatch.setattr("dpfuse.engine.assembly.abilities_of", lambda group, device: Abilities())


def test_a_bucket_lies_there_and_its_padding_is_zero():
    backend = Backend()
    bucket = bucket_over(Group(backend), registered=True)
    (given,) = backend.given
    assert bucket.parts.buffer.flat is given
    assert torch.equal(given, torch.zeros_like(given))


def test_without_it_the_back_end_is_not_asked():
    backend = Backend()
    assert bucket_over(Group(backend)).parts.buffer.flat.eq(0).all()
    assert not backend.given


def test_a_bucket_of_a_communication_hook_does_not_lie_there():
    """The hook may replace the buffer."""
    backend = Backend()
    plan = plan_buckets([ParamSpec("a", (3,), "float32")])
    hook = CommHook(None, lambda state, bucket: None, 0)
    Assembly(Group(backend), surroundings(), SyncSettings(registered=True), hook=hook).make(plan, [torch.zeros(3)])
    assert not backend.given


def test_memory_is_taken_when_buckets_are_made_and_so_never_in_a_capture():
    backend = Backend()
    bucket = bucket_over(Group(backend, size=1), registered=True)
    assert len(backend.given) == 1
    bucket.parts.feed.pack([torch.ones(3), torch.ones(5)], PackArguments(bucket.parts.buffer.table, (), 1.0))
    assert len(backend.given) == 1
    assert bucket.parts.buffer.flat is backend.given[0]


def test_buckets_that_replace_others_use_the_same_memory():
    backend = Backend()
    plan = plan_buckets([ParamSpec("a", (3,), "float32")])
    params = [torch.zeros(3)]
    assembly = Assembly(Group(backend), surroundings(), SyncSettings(registered=True))
    before = assembly.make(plan, params)
    (bucket,) = assembly.make(plan, params, before=before)
    assert bucket.parts.buffer is before[0].parts.buffer
    assert len(backend.given) == 1


def test_where_there_is_none_left_making_the_buckets_fails():
    with pytest.raises(RuntimeError, match="ncclMemAlloc failed"):
        bucket_over(Group(Backend(error=RuntimeError("ncclMemAlloc failed"))), registered=True)
