"""The turns of the models of a group: what is compared, which models send first, and that nothing is kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest

from dpfuse.engine.send_order import SendOrder


class Group:
    """Stands for a process group."""

    def __init__(self, ranks=2):
        self.ranks = ranks

    def size(self):
        return self.ranks


class Model:
    """Has one bucket that is due, and notes when it is sent."""

    def __init__(self, group, number, log, *, due=True):
        self.order = SendOrder(group, number)
        self.order.begin()
        self.order.open(self.send_due)
        self.number, self.log, self.due = number, log, due

    def send_due(self, ended):
        if self.due:
            self.due = False
            self.send(0, ended)

    def send(self, place, ended=False):
        self.order.take_turn(place)
        self.log.append((self.number, place, ended))


def models(count=2, **options):
    group, log = Group(), []
    return [Model(group, number, log, **options) for number in range(count)], log


def told_after(turns, count=3):
    made, _ = models(count, due=False)
    for number, place in turns:
        made[number].send(place)
    return [model.order.told for model in made]


def test_a_model_alone_has_nothing_to_compare():
    (model,), _ = models(1)
    for place in range(5):
        model.send(place)
    told = model.order.told
    for place in range(5, 9):
        model.send(place)
    assert model.order.told == told
    model.order.begin()
    for place in range(5):
        model.send(place)
    assert model.order.told == 0
    assert not model.order.is_shared
    assert not model.order.let_others_send(ended=True)


@pytest.mark.parametrize(
    "other",
    [
        [(1, 0), (0, 0), (0, 1), (1, 1)],
        [(0, 0), (1, 0), (0, 1), (1, 1)],
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)],
        [(0, 0), (0, 1), (2, 0), (2, 1)],
        [(0, 0), (1, 0), (1, 1), (0, 1)],
    ],
    ids=str,
)
def test_every_model_tells_another_order_by_its_number(other):
    usual = told_after([(0, 0), (0, 1), (1, 0), (1, 1)])
    assert usual == told_after([(0, 0), (0, 1), (1, 0), (1, 1)])
    assert all(one != two for one, two in zip(usual, told_after(other), strict=True))
    assert all(0 <= number < 1 << 16 for number in usual)


def test_each_model_counts_since_its_own_report():
    (a, b), _ = models(due=False)
    a.send(0)
    b.send(0)
    a.order.begin()
    assert a.order.told == 0 != b.order.told
    field = a.order.field()
    assert field.value() == 0
    b.send(1)
    a.send(0)
    assert field.value() == a.order.told != 0


def test_a_model_counts_nothing_before_its_first_report():
    """A copy may be made at another time on each rank."""
    group, log = Group(), []
    a, b = (Model(group, number, log, due=False) for number in range(2))
    copy = SendOrder(group, 0)
    a.send(0)
    b.send(0)
    assert copy.told == 0 != a.order.told
    copy.begin()
    a.send(0)
    assert copy.told != 0


def test_others_first_send_what_is_due_in_the_order_in_which_their_backwards_began():
    (a, b, c), log = models(3)
    b.order.open(b.send_due)  # later than c
    a.due = False
    a.send(0)
    assert log == [(2, 0, False), (1, 0, False), (0, 0, False)]
    log.clear()
    a.send(1)
    b.due = True
    a.send(2)
    assert log == [(0, 1, False), (0, 2, False)]  # it still has its turn
    c.order.open(c.send_due)
    a.send(3)
    assert log[2:] == [(1, 0, False), (0, 3, False)]
    b.due = c.due = True
    a.order.let_others_send(ended=True)
    assert log[4:] == [(1, 0, True), (2, 0, True)]


def test_a_rest_without_gradients_lets_no_other_model_send():
    (a, b), log = models()
    a.order.take_turn(0, among_others=False)
    assert log == []
    assert b.order.told != 0


def test_no_model_is_kept_alive():
    (a, b), _ = models(due=False)
    b.send(0)
    dead, order = weakref.ref(b), weakref.ref(b.order)
    del b
    gc.collect()
    assert dead() is None
    assert order() is None
    assert not a.order.is_shared
    a.send(0)
    group = Group()
    dead = weakref.ref(group)
    order = SendOrder(group, 0)
    del group
    gc.collect()
    assert dead() is None
    assert not order.is_shared


def test_one_rank_has_nothing_to_tell():
    group, log = Group(ranks=1), []
    made = [Model(group, number, log, due=False) for number in range(2)]
    for number in (0, 1, 0):
        made[number].send(0)
    assert [model.order.told for model in made] == [0, 0]
