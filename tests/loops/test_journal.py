"""What the journal writes down, and when it has the rules look: in a settled step, never."""

from __future__ import annotations

from unittest.mock import Mock
from weakref import ref

import pytest
import torch
from torch import nn
from torch.optim import SGD

from dpfuse.comm.step_clock import BACKWARD, DELIVERED, FORWARD, LOADER, MOST, STEPPED
from dpfuse.comm.waiting import Board
from dpfuse.loop.journal import Journal
from dpfuse.loop.training_record import TrainingRecord


class Training:
    """A journal of one model, and events as the engine tells them. `asked` has the names of calls of the rules."""

    def __init__(self, board=None):
        group = Mock()
        group.rank.return_value = 1
        self.module, self.record = nn.Linear(2, 2), TrainingRecord(dict, group, "warn")
        self.record.trains = True
        self.optimizer, param = SGD([nn.Parameter(torch.ones(2))], lr=0.1), Mock()
        self.watched = Mock(rest=0, has_stepped=False, param=param)
        self.known = Mock(averages=0, local_steps=0, rates=[0.1], watched=self.watched)
        self.optimizer.param_groups[0]["lr"] = self.known.rates[0]
        self.loop = Mock(chooses=False, settled=True, next_change=-1, marked=[])
        self.loop.optimizers = {ref(self.optimizer): self.known}
        self.journal = Journal(self.module, self.record, board, self.loop)

    @property
    def asked(self):
        return [name for name, _, _ in self.loop.method_calls]

    def forward(self):
        self.journal.forward_begins(((), {}))

    def backward(self, *, sync=True, announced=True, added=True, dies=False):
        self.journal.backward_begins(sync=sync, announced=announced)
        if dies:
            return
        if sync:
            self.journal.delivered()
        else:
            self.journal.local_backward_ended(added=added)

    def step(self):
        self.journal.before_step(self.optimizer)
        self.journal.after_step(self.optimizer)


@pytest.fixture
def training():
    return Training()


def test_in_a_settled_step_no_rule_is_asked(training):
    for _ in range(3):
        training.forward()
        training.backward()
        training.step()
        assert training.watched.has_stepped
    assert training.asked == training.known.method_calls == training.watched.method_calls == []
    record = training.record
    assert (record.rank, record.averages, record.local_backwards, record.runs) == (1, 3, 0, False)
    assert training.known.averages == training.watched.averages == 3


@pytest.mark.parametrize(
    "change",
    [
        "known.watched=None", "watched.param.grad=None", "watched.rest=1", "known.local_steps=1", "known.averages=1",
        "loop.settled=False", "loop.optimizers={}", "record.runs=True", "record.due=True", "record.heard=True",
    ],
)  # fmt: skip
def test_of_a_step_rules_are_told_where_they_may_have_something_to_look_at(training, change):
    training.backward()
    exec(f"training.{change}", {"training": training})
    training.step()
    assert training.asked == ["note_step"]


def test_another_learning_rate_is_noted(training):
    training.optimizer.param_groups[0]["lr"] = 0.2
    training.backward()
    training.step()
    training.known.note_rates.assert_called_once_with([0.2])
    assert training.asked == []


@pytest.mark.parametrize(
    ("announced", "added", "counted", "asked"),
    [
        (True, True, 1, ["note_backward", "note_local_backward"]),
        (False, True, 0, ["note_backward", "note_local_backward"]),
        (True, False, 0, ["note_backward"]),
    ],
)
def test_of_a_local_backward_rules_are_told(training, announced, added, counted, asked):
    training.backward(sync=False, announced=announced, added=added)
    assert training.asked == asked
    assert (training.record.averages, training.record.local_backwards) == (0, counted)


def test_behind_a_backward_that_has_died_the_next_one_is_told_of_while_the_record_knows_it(training):
    training.backward(dies=True)
    assert (training.asked, training.record.runs) == ([], True)
    training.loop.note_backward.side_effect = lambda **_: seen.append(training.record.runs)
    seen = []
    training.backward()
    training.backward()
    assert seen == [True]


def test_while_optimizers_are_not_known_each_backward_is_told_of(training):
    training.loop.chooses = True
    training.backward()
    assert training.asked == ["note_backward"]


def test_a_forward_is_told_of_where_its_mode_is_another_one_or_words_are_due(training):
    training.forward()
    training.module.eval()
    training.forward()
    training.record.trains, training.record.due = False, True
    training.forward()
    training.record.due = False
    training.forward()
    assert training.asked == ["note_forward"] * 2


@pytest.mark.parametrize(("looks", "change"), [(True, -1), (False, 2)])
def test_an_average_is_told_of_where_a_rule_looks_or_words_begin_or_end(training, looks, change):
    training.loop.next_change = change
    training.backward()
    training.record.looks, training.loop.marked = looks, [training.watched]
    training.watched.mean_ends.side_effect = lambda averages: seen.append((averages, [*training.asked]))
    seen = []
    training.backward()
    assert training.asked == ["note_average"]
    assert seen == [(2, [])]  # before that, so that rules see the mean


def test_what_fails_ends_no_training(training):
    training.loop.marked = [training.watched]
    training.watched.mean_ends.side_effect = error = RuntimeError("planted")
    training.backward()
    training.loop.fail.assert_called_once_with(error)


def test_each_event_leaves_a_mark_and_what_was_waited_for():
    training = Training(board := Board())
    training.forward()
    board.waited = 2.0
    training.journal.backward_begins(sync=False, announced=True)
    training.step()  # inside backward: it belongs to that
    training.journal.local_backward_ended(added=True)
    training.step()
    marks = board.clock.marks
    assert [(kind, waited) for kind, _, waited, _ in marks] == [
        (FORWARD, 0.0),
        (BACKWARD, 2.0),
        (LOADER, 2.0),
        (STEPPED, 2.0),
    ]
    assert sorted(marks, key=lambda mark: mark[1]) == marks


def test_marks_are_added_up_at_the_end_of_a_step_once_they_are_due_and_never_become_too_many():
    training = Training(board := Board())
    training.backward()
    assert (board.clock.marks, board.clock.steps) == ([], 1)
    training.backward()
    assert [kind for kind, *_ in board.clock.marks] == [BACKWARD, DELIVERED]
    for _ in range(2 * MOST):
        training.forward()
    assert len(board.clock.marks) <= MOST
    assert board.clock.steps == 2
    for _ in range(2 * MOST):
        training.step()  # of other models: this one rests
    assert len(board.clock.marks) <= MOST


def test_models_of_a_group_have_one_clock():
    Training(board := Board())
    clock = board.clock
    Training(board)
    assert board.clock is clock
