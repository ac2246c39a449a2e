"""The turns of the models of a group: what is compared, which models send first, and that nothing is kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest

from dpfuse.engine.send_order import SendOrder


class Group:
    """Stands for a process group."""


class Model:
    """Has one bucket that is due, and notes when it is sent."""

    def __init__(self, group, number, log, *, due=True):
        self.order = SendOrder(group, number)
        self.number, self.log, self.due = number, log, due
        self.open()

    def open(self):
        self.order.open(self.send_due)

    def send_due(self, ended):
        if self.due:
            self.due = False
            self.send(0, ended)

    def send(self, place, ended=False):
        self.order.take_turn(place)
        self.log.append((self.number, place, ended))

    @property
    def told(self):
        return self.order.field().value()


def models(count=2, **options):
    group, log = Group(), []
    return [Model(group, number, log, **options) for number in range(count)], log


def told_after(turns):
    """Return what is told after turns (model, place) of a backward that three models share."""
    made, _ = models(3, due=False)
    for number, place in turns:
        made[number].send(place)
    (told,) = {model.told for model in made}
    return told


def test_a_model_alone_has_nothing_to_compare():
    (model,), _ = models(1)
    for place in range(5):
        model.send(place)
    assert model.told == 0
    model.order.close()
    for place in range(5):
        model.send(place)
    assert model.told == 0
    assert not model.order.is_shared
    assert not model.order.another_is_open


@pytest.mark.parametrize(
    "other",
    [
        [(1, 0), (1, 1), (0, 0), (0, 1)],
        [(1, 0), (0, 0), (0, 1), (1, 1)],
        [(0, 0), (1, 0), (0, 1), (1, 1)],
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)],
        [(0, 0), (0, 1), (2, 0), (2, 1)],
        [(0, 0), (1, 0), (1, 1), (0, 1)],
        [(0, 1), (1, 0), (1, 1)],
        [(0, 0), (0, 1)],
    ],
    ids=str,
)
def test_another_order_is_told_by_another_number(other):
    usual = told_after([(0, 0), (0, 1), (1, 0), (1, 1)])
    assert usual == told_after([(0, 0), (0, 1), (1, 0), (1, 1)])
    assert usual != told_after(other)
    assert 0 < usual < 1 << 63


def test_the_first_bucket_of_a_model_is_never_a_late_one_of_the_model_before():
    for place in range(240, 270):
        assert told_after([(0, place), (1, 0)]) != told_after([(1, 0), (0, place)])
        assert told_after([(2, 0), (0, place)]) != told_after([(2, 0), (1, place - 251)])


def test_models_that_share_no_backward_tell_the_same_number_in_any_order():
    """Their reports tell the ranks apart by the number of the wrapper."""
    made, _ = models(3, due=False)
    for model in made:
        model.order.close()
    for number in (0, 2, 2, 1, 0, 1, 2):
        model = made[number]
        model.open()
        for place in range(3):
            model.send(place)
        assert model.told == 0
        model.order.close()


def test_models_that_share_each_backward_tell_the_same_numbers_in_each():
    (a, b), _ = models(due=False)
    told = []
    for _ in range(3):
        a.open()
        b.open()
        a.send(0)
        b.send(0)
        a.send(1)
        first = a.told
        a.order.close()
        assert b.told == first, "its backward is still open"
        b.send(1)
        told.append((first, b.told))
        b.order.close()
        assert a.told == b.told == 0
    assert len(set(told)) == 1
    assert 0 not in told[0]


def test_a_backward_that_opens_again_is_open_once():
    """As one that an error has left open."""
    (a, b), _ = models(due=False)
    a.open()
    b.order.close()
    assert not a.order.another_is_open
    a.order.close()
    a.order.close()
    assert not b.order.another_is_open


def test_others_first_send_what_is_due_in_the_order_in_which_their_backwards_began():
    (a, b, c), log = models(3)
    b.open()  # later than c
    a.due = False
    a.send(0)
    assert log == [(2, 0, False), (1, 0, False), (0, 0, False)]
    log.clear()
    a.send(1)
    b.due = True
    a.send(2)
    assert log == [(0, 1, False), (0, 2, False)]  # it still has its turn
    c.open()
    a.send(3)
    assert log[2:] == [(1, 0, False), (0, 3, False)]
    b.due = c.due = True
    a.order.let_others_send(ended=True)
    assert log[4:] == [(1, 0, True), (2, 0, True)]


def test_a_rest_without_gradients_lets_no_other_model_send():
    (a, b), log = models()
    a.order.take_turn(0, among_others=False)
    assert log == []
    b.order.take_turn(0, among_others=False)
    assert log == []
    assert b.told != 0


def test_no_model_is_kept_alive():
    (a, b), _ = models(due=False)
    b.send(0)
    dead, order = weakref.ref(b), weakref.ref(b.order)
    del b
    gc.collect()
    assert dead() is None
    assert order() is None
    assert not a.order.is_shared
    assert not a.order.another_is_open
    a.send(0)
    group = Group()
    dead = weakref.ref(group)
    order = SendOrder(group, 0)
    del group
    gc.collect()
    assert dead() is None
    assert not order.is_shared
