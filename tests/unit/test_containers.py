"""The walk through containers finds each tensor, ends wherever containers lead, and runs no code of the program."""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from dpfuse.engine.containers import tensors_in

DEEP = 10_000


@dataclasses.dataclass(eq=False)
class Node:
    value: Any
    parent: Any = None
    children: Any = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Slots:
    __slots__ = ("unset", "value")
    value: Any
    unset: Any


@dataclasses.dataclass
class SlotsOfSlots(Slots):
    __slots__ = ("more",)
    more: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any
    name: str = "name"


class Refuses:
    """Attributes and methods that a walk would meet, and must not run."""

    def __getattribute__(self, name):
        raise AssertionError(f"{name} was read")


@dataclasses.dataclass
class Lazy:
    value: Any
    head: Any = None

    @cached_property
    def logits(self):
        raise AssertionError("a property was read")


class Counts(dict):
    def values(self):
        raise AssertionError("a method was called")

    __iter__ = __getitem__ = items = keys = values


class Computes(Mapping):
    def __getitem__(self, key):
        raise AssertionError("a value was computed")

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


class Reads(list):
    def __iter__(self):
        raise AssertionError("a list was read twice")


Pair = namedtuple("Pair", ["left", "right"])
A, B = torch.ones(1), torch.zeros(2)
REFERRED = Counts(a=B)


def bare_slots(kind, **values):
    made = object.__new__(kind)
    for name, value in values.items():
        setattr(made, name, value)
    return made


class PropertyField:
    @property
    def value(self):
        raise AssertionError("a property was read")


KINDS = {
    "a tensor": (A, [A]),
    "nothing": (None, []),
    "text and numbers": (["text", 1, {"a": 2.5}, b"bytes"], []),
    "a tuple": ((A, B), [A, B]),
    "a named tuple": (Pair(A, [B]), [A, B]),
    "a set": ({A}, [A]),
    "a frozen set": (frozenset([B]), [B]),
    "dicts": ({"a": OrderedDict(b=A), "c": defaultdict(list, d=[B])}, [A, B]),
    "a dict of a class of its own": (Counts(a=A, b=(B,)), [A, B]),
    "a wrapped dict": (UserDict(a=A), [A]),
    "a list of a class of its own": (Reads([A, B]), [A, B]),
    "a mapping that computes": ([Computes(), A], [A]),
    "a packed sequence": (pack_sequence([A, A]), None),
    "a dataclass": (Node(A, None, [B]), [A, B]),
    "the class itself": (Node, []),
    "slots": (Slots(A, B), [B, A]),
    "slots that were never set": (bare_slots(Slots, value=A), [A]),
    "slots of a base class": (SlotsOfSlots(A, None, B), [A, B]),
    "a frozen dataclass": (Frozen(A), [A]),
    "a dataclass with a property": (Lazy(A, B), [A, B]),
    "a field that is a property": (
        bare_slots(dataclasses.make_dataclass("Made", ["value"], bases=(PropertyField,), init=False)),
        [],
    ),
    "an object that refuses": ((Refuses(), A), [A]),
    "a weak proxy": ([weakref.proxy(REFERRED), A], [A]),
    "a generator": ([(value for value in [A])], []),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_found_and_nothing_is_run(kind):
    value, expected = KINDS[kind]
    found = tensors_in(value)
    if expected is None:
        assert len(found) > 0
        expected = [each for each in value if isinstance(each, torch.Tensor)]
    assert sorted(map(id, found)) == sorted(map(id, expected))


def test_a_generator_is_not_consumed():
    generator = (value for value in [A])
    assert tensors_in({"a": generator}) == []
    assert next(generator) is A


def holds_itself(kind):
    if kind is list:
        made = [A]
        made.append(made)
    elif kind is dict:
        made = {"a": A}
        made["self"] = made
    elif kind is tuple:
        inside = [A]
        made = (inside,)
        inside.append(made)
    else:
        made = Node(A)
        made.children = [Node(A, made), Node(A, made)]
    return made


@pytest.mark.parametrize(("kind", "count"), [(list, 1), (dict, 1), (tuple, 1), (Node, 3)])
def test_containers_that_refer_to_each_other_are_visited_once(kind, count):
    assert len(tensors_in(holds_itself(kind))) == count


def test_a_container_that_many_hold_is_visited_once():
    shared = [A]
    for _ in range(60):  # 2 ** 60 ways lead to the tensor
        shared = [shared, shared]
    assert tensors_in(shared) == [A]


def test_depth_is_no_limit():
    nested = A
    for level in range(DEEP):
        nested = [nested] if level % 2 else {"inside": nested}
    assert tensors_in(nested) == [A]
    chain = Node(A)
    for _ in range(DEEP):
        chain = Node(B, children=[chain])
        chain.children[0].parent = chain
    assert len(tensors_in(chain)) == DEEP + 1
    while chain.children:  # Python, too, frees a deep chain by recursion
        chain = chain.children.pop()
