"""A report that the host reads one backward later: nothing is lost, nothing is told twice, whatever comes between."""

from __future__ import annotations

import random

import torch

from dpfuse.engine.late_reading import LateReading
from dpfuse.engine.reading import ALL_WELL, Reading


def said(number: float) -> Reading:
    return ALL_WELL if not number else Reading(told=(f"{number:.0f}",))


def reading_of(host):
    return said(host.values[0].item())


class Backwards:
    """The backwards of one report, which each rank hears in the next one.

    Attributes:
        last: what the last backward has said; 0 says nothing.
    """

    def __init__(self):
        self.late, self.last = LateReading(reading_of), 0
        self.device = torch.zeros(2)

    def backward(self, number, *, hands_over=True, guard=None):
        unread, heard = self.late.hear()
        assert (unread, heard) == (said(self.last), said(self.last))
        self.device[0] = self.last = number
        self.late.keep(self.device)
        if hands_over:
            self.late.hand_over(guard, None if guard is None else self.device)
        return heard


def test_what_one_backward_says_is_heard_once_in_the_next_one():
    training, chance = Backwards(), random.Random(0)
    numbers = [chance.randrange(3) for _ in range(50)]
    heard = [training.backward(number) for number in numbers]
    assert heard == [ALL_WELL, *map(said, numbers[:-1])]
    assert training.late.hear() == (said(numbers[-1]), said(numbers[-1]))
    assert training.late.hear() == (ALL_WELL, ALL_WELL)


def test_what_was_not_handed_over_is_copied_before_the_memory_is_written_again():
    training = Backwards()
    training.backward(1)
    training.backward(2, hands_over=False)  # an interrupt
    assert training.backward(3) == said(2)


def test_a_guard_gets_what_is_to_be_copied_and_copies_it():
    training, copied = Backwards(), []

    def guard(pairs, copy):
        assert pairs is training.device
        copied.append(copy)
        if copy is not None:
            copy[1].copy_(copy[0])

    for number in (1, 2, 3):
        training.backward(number, guard=guard)
    assert [each is None for each in copied] == [
        True,
        False,
        False,
    ]  # the first one was copied where its memory was made
    assert training.backward(4) == said(3)


def test_what_a_rank_has_read_at_once_is_heard_by_all_in_the_next_backward():
    late = LateReading(reading_of)
    late.early = said(5)
    assert late.hear() == (ALL_WELL, said(5))
    assert late.hear() == (ALL_WELL, ALL_WELL)
    late.keep(torch.tensor([7.0]))
    late.early = said(5)
    unread, heard = late.hear()
    assert (unread.told, heard.told) == (("7",), ("7", "5"))


def test_a_report_that_replaces_another_one_tells_what_that_has_not_told():
    first = LateReading(reading_of)
    first.keep(torch.tensor([1.0]))
    first.early = said(2)
    second, third = LateReading(reading_of), LateReading(reading_of)
    second.follow(first)
    third.follow(second)  # it was replaced before any backward
    assert third.hear()[1].told == ("1", "2")
    assert third.hear() == (ALL_WELL, ALL_WELL)
    assert not first.is_pending
