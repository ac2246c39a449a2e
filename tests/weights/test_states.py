"""The table of what the comparison of weights does: it is complete, and does what counting averages would do."""

from __future__ import annotations

import ast
import gc
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD

import dpfuse.weights.check
from dpfuse.engine.backward_table import ABANDONED, IDLE, LOCAL, REDUCING
from dpfuse.engine.events import Events, Watcher, hear_steps
from dpfuse.engine.report import Compared
from dpfuse.engine.report_layout import ReportLayout
from dpfuse.rules.w01_weights_differ import OF_BACKWARDS, Drift, Measured
from dpfuse.weights.check import WeightsCheck
from dpfuse.weights.delayed import Delayed, Echo
from dpfuse.weights.false_alarms import IN_A_ROW, FalseAlarms
from dpfuse.weights.known_differences import KnownDifferences
from dpfuse.weights.schedule import LastEqual, SliceSchedule
from dpfuse.weights.states import IMPOSSIBLE, TRANSITIONS, Action, Event, State
from dpfuse.weights.steps import Owners, RunningSteps
from dpfuse.weights.suspicion import Suspicion
from dpfuse.weights.which_ranks_differ import Differences, Distances
from tests.weights.times import EMPTY, SLICES, Times

WALKS = 200  # of 60 events, each on a CPU, on a GPU and by hand

# --- The table ---


def test_each_pair_of_a_state_and_an_event_is_in_one_of_the_tables():
    pairs = {(state, event) for state in State for event in Event}
    assert TRANSITIONS.keys() | IMPOSSIBLE.keys() == pairs
    assert not TRANSITIONS.keys() & IMPOSSIBLE.keys()
    assert all(len(reason.split()) > 5 for reason in IMPOSSIBLE.values())


def test_each_action_exists_and_follows_from_something(trial):
    assert {action for action, _ in TRANSITIONS.values()} == set(Action)
    assert set(trial.check._act) == set(Action) - {Action.NOTHING, Action.PASS_SLICE}


def test_each_state_is_reached_and_only_off_is_never_left():
    reached = {State.FIRST}
    for _ in State:
        reached |= {after for (before, _), (_, after) in TRANSITIONS.items() if before in reached}
    assert reached == set(State)
    for state in State:
        left = {after for (before, _), (_, after) in TRANSITIONS.items() if before is state} - {state}
        assert bool(left) == (state is not State.OFF)


def test_nothing_but_the_table_says_what_the_state_is():
    sources = []
    for path in Path(dpfuse.weights.check.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = [each for target in getattr(node, "targets", []) for each in ast.walk(target)]
            if any(isinstance(each, ast.Attribute) and each.attr == "_state" for each in targets):
                sources.append(ast.unparse(node.value))
    assert set(sources) == {"FIRST", "TRANSITIONS[self._state, event]", "TRANSITIONS[state, event]"}
    assert sources.count("FIRST") == 1


# --- A walk over it, beside the same program that counts ---


class Hashing:
    """Hashes nothing, and logs that."""

    def __init__(self, log):
        self.names, self.slices, self._log = ["w"], SLICES, log

    def is_empty(self, number):
        return number in EMPTY

    def empty_behind(self, number):
        behind = range(number + 1, SLICES)
        return next((count for count, place in enumerate(behind) if place not in EMPTY), len(behind))

    def slices_with(self, tensor):
        return (0,)

    def numel(self, tensor):
        return 4

    def write(self, number, seed, pairs, but):
        self._log.append(("slice", seed, number))

    def each(self):
        self._log.append("each")
        return torch.zeros(1)


class Trial:
    """A comparison of one rank without others: what it hears is made up."""

    def __init__(self, patch, *, late=False, by_hand=False):
        self.log, self.times, self.by_hand = [], Times(late), by_hand
        param = torch.nn.Parameter(torch.zeros(4))
        self.check = WeightsCheck(
            lambda: {"w": param},
            SimpleNamespace(looks=0),
            SimpleNamespace(rank=lambda: 0, size=lambda: 2),
            level="warn",
        )
        self.report = Compared(torch.zeros(32, 2), late=late)
        self.events = Events([self.check])
        self.engine = SimpleNamespace(
            events=self.events,
            layout=ReportLayout(),
            params=[param],
            completed=0,
            reducer=SimpleNamespace(state=IDLE),
            without_inputs=False,
        )
        self.check.join(self.engine)
        self.check.step(0, None, None, SimpleNamespace(compared=lambda place: self.report))
        self.check._tensors.look(torch.device("cpu"))
        self.check._tensors.hashing = Hashing(self.log)
        self.own = [SGD([param], lr=0.1) for _ in range(2)]
        self.foreign = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        for each in (*self.own, self.foreign):  # and of no other trial
            each.register_step_post_hook(lambda optimizer, *_: self.check.after_step(optimizer))
        self.found, self.ever = False, False
        patch.setattr("dpfuse.comm.collective.group_device", lambda group: torch.device("cpu"))
        patch.setattr("dpfuse.weights.check.compare", self.compare)
        patch.setattr("dpfuse.weights.known_differences.measure", self.measure)
        patch.setattr("dpfuse.weights.check.say", lambda code, text, level: self.log.append((code, *self.facts)))

    def compare(self, hashing, earlier, turn, group, device, *, takes_part):
        after, before = (each is not None for each in earlier)
        self.log.append(("examined", after, before, not takes_part))
        return Differences(turn, always=(0,) * self.found, ever=(0,) * self.ever)

    def measure(self, own, after_step, places, first, group, device, *, suspects):
        self.facts = first, self.check._noticed
        return Distances(0, {1: Measured(1, 0.5, False, 0.0)}, 1, first, (1,))

    def backward(self, chance):
        sync = self.by_hand or chance.random() < 0.8
        self.engine.reducer.state = IDLE if self.by_hand else REDUCING if sync else LOCAL
        if not self.by_hand:
            for begins in self.events.backward_begins:
                begins(sync=sync, announced=True)
            self.times.begins(sync)
            if chance.random() < 0.1:
                self.own[0].step()
                self.times.inside = sync and not self.times.off
        if sync:
            self.questions(chance)
        if chance.random() < 0.005:
            self.turn_off()
        if sync and not self.by_hand and chance.random() < 0.25:
            self.fail(chance)
        elif sync:
            self.report.differs = chance.random() < 0.15
            self.engine.reducer.state, self.engine.completed = IDLE, self.engine.completed + 1
            self.check.delivered()
            self.times.delivered(self.report.differs)
        self.engine.reducer.state = IDLE

    def questions(self, chance):
        question, suspicion = self.check.question, self.check._suspicion.question
        if question.due or (question.asks and chance.random() < 0.7) or chance.random() < 0.08:
            self.found = chance.random() < 0.7
            self.ever = self.found or chance.random() < 0.5
            question.due = False
            question.answer()
            self.times.answers(self.found, self.ever)
        if chance.random() < 0.1:
            suspicion.answer()
            self.times.suspects()

    def fail(self, chance):
        self.engine.reducer.state = ABANDONED
        self.check.backward_failed()
        self.own[0].step()  # which does not count
        completed = chance.random() < 0.5
        self.engine.reducer.state, self.engine.completed = IDLE, self.engine.completed + completed
        self.check.backward_failed()
        self.times.failed(completed)

    def own_step(self, who, inside=None):
        self.times.step_begins(who)
        self.own[who].step(inside)
        self.times.step_ends(who)

    def step(self, chance):
        def inside():
            for _ in range(chance.randrange(4)):
                if chance.random() < 0.5:
                    self.own_step(1)
                else:
                    self.backward(chance)

        how = chance.choice(["one"] * 6 + ["two", "around", "around", "foreign"])
        if how == "foreign":
            self.foreign.step()
        else:
            self.own_step(0, inside if how == "around" else None)
        if how == "two":
            self.own_step(1)

    def turn_off(self):
        self.check.turn_off("this test wants it")
        self.times.off, self.times.slice = True, None

    def rare(self, chance):
        how = chance.choice(["synchronized", "no inputs", "no inputs", "off"] + ["nothing"] * 80)
        if how == "synchronized":
            self.check.synchronized()
            self.times.synchronized()
        elif how == "no inputs":
            self.check.without_inputs()
            self.times.slice = None
        elif how == "off":
            self.turn_off()

    def state(self):
        """What is compared after each event."""
        question, check = self.check.question, self.check
        own = question.asks, question.due, check._suspicion.common, bool(check.off), check.known, check._schedule.turn
        times = self.times
        return own, (times.asks, times.due, times.suspected, times.off, times.known, times.turn)


@pytest.fixture
def trial(monkeypatch):
    return Trial(monkeypatch)


def walked(trial, chance, count):
    for _ in range(count):
        (trial.backward if chance.random() < 0.55 else trial.step)(chance)
        trial.rare(chance)
        own, other = trial.state()
        assert own == other
        assert len(trial.log) == len(trial.times.log)
        assert trial.log[-5:] == [each if type(each) is tuple else "each" for each in trial.times.log[-5:]]


class Noted(dict):
    """The table, which notes where it was looked into."""

    def __init__(self, table):
        super().__init__(table)
        self.pairs = set()

    def __getitem__(self, pair):
        self.pairs.add(pair)
        return super().__getitem__(pair)


@pytest.mark.parametrize("walks", [40, pytest.param(WALKS, marks=pytest.mark.slow)])
def test_a_random_walk_does_what_counting_averages_would_do(monkeypatch, walks):
    table, told = Noted(TRANSITIONS), set()
    monkeypatch.setattr("dpfuse.weights.check.TRANSITIONS", table)
    for module in ("dpfuse.weights.check", "tests.weights.times"):
        monkeypatch.setattr(f"{module}.LOOK_AGAIN", 8)
    # In a thousand walks there is one in which counting hashes something else: where the first two backwards fail and
    # a rank suspects something in both, a step counts that is made before the first average.
    for seed in range(walks):
        for kind in ({"late": False}, {"late": True}, {"by_hand": True}):
            trial = Trial(monkeypatch, **kind)
            walked(trial, random.Random(seed), 60)
            told |= {each[0] for each in trial.log if type(each) is tuple}
    assert told == {"slice", "examined", "DPF-W01", "DPF-L01"}
    missed = [pair for pair in TRANSITIONS if pair not in table.pairs]
    assert len(missed) < 8 if walks < WALKS else missed == [], missed


# --- Its parts ---


def test_on_a_gpu_what_is_sent_is_heard_one_backward_later():
    sent = Delayed()
    sent.send("first")
    assert sent.delivered() == (True, "first")
    assert not sent.moves
    late = Delayed()
    late.late = True
    late.send("first")
    assert late.delivered() == (True, None)
    late.send("second")
    assert late.delivered() == (True, "first")
    assert late.moves
    assert late.delivered() == (True, "second")
    assert not late.moves


@pytest.mark.parametrize("late", [False, True])
def test_what_is_forgotten_is_not_heard(late):
    sent = Delayed()
    sent.late = late
    sent.send("first")
    sent.delivered()
    sent.forget()
    for _ in range(1 + late):
        assert sent.moves
        assert sent.delivered() == (False, None)
    assert sent.delivered() == (True, None)
    assert not sent.moves


def test_questions_from_before_an_examination_are_heard_for_one_more_backward_on_a_gpu():
    echo = Echo()
    echo.examined(late=False)
    assert not echo.left
    echo.examined(late=True)
    echo.backward_begins()
    assert echo.left, "what is asked in the backward of the examination is heard in this one"
    echo.backward_begins()
    assert not echo.left
    echo.backward_begins()
    assert not echo.left


def test_slices_are_counted_over_passes_and_each_pass_has_another_seed():
    schedule, seen = SliceSchedule(), []
    for _ in range(5):
        schedule.turn += 1
        seen.append(schedule.place(2))
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    schedule.hashed(empty=2)
    assert (schedule.turn, schedule.empty_until) == (5, 7)
    schedule.go_to(11)
    assert (schedule.turn, schedule.empty_until) == (11, 11)


def test_a_tensor_was_equal_when_the_last_of_its_slices_was():
    equal = LastEqual()
    equal.note(0, 7)
    equal.note(2, 5)
    assert [equal.of((0,)), equal.of((0, 2)), equal.of((0, 1))] == [7, 5, 0]
    equal.forget()
    assert equal.of((0,)) == 0


def test_only_false_alarms_in_a_row_count():
    alarms = FalseAlarms()
    assert [alarms.count(1), alarms.count(2)] == [False, False]
    alarms.end()
    assert [alarms.count(each) for each in (3, 4, 5 + IN_A_ROW, 6 + IN_A_ROW)] == [False] * 4
    assert alarms.count(6 + 2 * IN_A_ROW)
    assert alarms.in_a_row == 3


def test_a_suspicion_lasts_until_it_is_examined():
    suspicion = Suspicion(lambda: None)
    suspicion.begin("Seen.")
    assert suspicion.question.asks
    suspicion.heard()
    assert not suspicion.question.asks
    assert suspicion.end() == (True, "Seen.")
    assert suspicion.end() == (False, "")


def drift(name, *, frozen):
    measured = (Measured(2, 0.5, False, 0.0),)
    return Drift((name,), 3, (4,), 5, 9, (1,), 0, 2, measured, 1, frozen=frozen)


def test_what_ranks_may_mean_is_known_and_not_wrong_and_only_a_warning():
    differing = KnownDifferences(None, SimpleNamespace(rank=lambda: 0), "raise", OF_BACKWARDS)
    code, _, level = differing.add(drift("frozen", frozen=True), "Seen.", (0,))
    assert (code, level) == ("DPF-W01", "warn")
    code, _, level = differing.add(drift("trained", frozen=False), "Seen.", (0,))
    assert (code, level) == ("DPF-L01", "raise")
    assert differing.known == {"frozen": 9, "trained": 9}
    assert differing.wrong == {"trained": 9}
    assert not differing.keep(("frozen", "trained"))
    assert differing.keep(("trained",))
    differing.add(drift("frozen", frozen=False), "", None)
    assert differing.wrong == {"frozen": 9, "trained": 9}


def test_an_optimizer_that_got_another_group_is_looked_at_again_and_a_freed_one_is_forgotten():
    ours, other = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    owners, optimizer = Owners(), SGD([other], lr=0.1)
    assert not owners.look_at(optimizer, lambda: {id(ours)}).steps
    optimizer.add_param_group({"params": [ours]})
    assert owners.look_at(optimizer, lambda: {id(ours)}).steps
    assert len(owners.found) == 1
    del optimizer
    gc.collect()
    owners.look_at(SGD([other], lr=0.1), lambda: ())
    assert len(owners.found) == 1


def test_a_step_around_another_one_knows_that_this_has_counted():
    param = torch.nn.Parameter(torch.zeros(1))
    outer, inner, seen = SGD([param], lr=0.1), SGD([param], lr=0.1), []

    class Hear(Watcher):
        def after_step(self, optimizer):
            seen.append((optimizer is outer, running.is_outer(optimizer)))

    hear_steps(hear := Hear())
    running = RunningSteps()
    outer.step(lambda: (inner.step(), running.counted()))
    assert seen == [(False, False), (True, True)]
    inner.step()
    outer.step()
    assert seen[2:] == [(False, False), (True, False)]
    inner.step(lambda: (inner.step(), running.counted()))
    assert seen[4:] == [(False, False), (False, True)], "also one of the same optimizer"
    assert type(hear) is Hear, "it lives until here"
