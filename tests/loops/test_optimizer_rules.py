"""Do rules that are not told of windows like those before know the same as if they were told of each?"""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn

from dpfuse.loop import model as model_module
from dpfuse.loop import optimizer_rules
from dpfuse.loop.changed_gradients import STEPS
from dpfuse.loop.findings import findings
from dpfuse.loop.model import Model
from dpfuse.loop.optimizer_rules import OptimizerRules
from dpfuse.loop.watched_gradient import WatchedGradient
from dpfuse.measure.communication_times import CommunicationTimes


class Loop:
    """A parameter, an optimizer that steps on it, and the rules."""

    def __init__(self):
        self.param = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.model = Model(lambda: {"weight": self.param}, bool, 0, [], CommunicationTimes, {}, on_gpu=False)
        self.optimizer = torch.optim.SGD([self.param], lr=0.0)
        self.rules = OptimizerRules(self.model, raises=False)
        self.spares = [WatchedGradient(self.param, "weight", 0)]

    def backward(self, *, sync):
        watched = self.rules.watched or self.spares[0]
        watched.backward_begins(announced=True)
        for rule in self.model.looking:
            rule.backward_begins(sync=True, announced=True)
        (self.param.square().sum() if self.param.grad is None else self.param.sum()).backward()
        if sync:
            self.model.averages += 1
            watched.mean_ends()
        else:
            self.model.others += 1
            watched.local_ends(announced=True)

    def window(self, *, locals_first, sync=True, clip=False, drop=False, again=False):
        for _ in range(locals_first):
            self.backward(sync=False)
            if clip:
                self.param.grad *= 0.5
        if sync:
            self.backward(sync=True)
        if again:
            self.backward(sync=True)
        if not drop:
            self.rules.before_step(self.optimizer, self.spares)
            for rule in self.model.looking.copy():
                rule.after_step(self.optimizer)
        self.param.grad = None

    @property
    def known(self):
        """What the rules would go on with."""
        rules, counts = self.rules._rules, {}
        if self.rules._skipped:
            rules.skipped(self.rules._skipped, *self.rules._counts)
            self.rules._skipped = 0
        for rule in rules[1:]:
            plain = {name: value for name, value in vars(rule).items() if type(value) in (bool, int, tuple)}
            counts[type(rule).__name__] = plain
        return counts


def run(length, seed):
    """The codes that are told in a program of many windows, some unlike the others, and what is known behind these."""
    findings.forget()
    choose, loop, known = random.Random(seed), Loop(), []
    odd = [
        {"sync": False, "locals_first": length},
        {"sync": False, "locals_first": 1},
        {"clip": True, "locals_first": length},
        {"drop": True, "sync": False, "locals_first": 1},
        {"again": True, "locals_first": length - 1},
        {"locals_first": length},
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS + 8):
            loop.window(locals_first=length - 1)
        for _ in range(25):
            for _ in range(choose.choice([1, 2, 9, STEPS + 8])):
                loop.window(locals_first=length - 1)
            for _ in range(choose.choice([1, 1, 1, 2, 30])):
                window = choose.choice(odd)
                loop.window(**window)
                if "drop" not in window:  # else the next step tells the rules of it
                    known.append(loop.known)
    return [each.message.code for each in caught], known


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_windows_that_no_rule_is_told_of_change_nothing(monkeypatch, length, seed):
    monkeypatch.setattr(optimizer_rules, "fits", lambda param: True)
    monkeypatch.setattr(model_module, "weights_may_be_averaged", lambda frame, made: False)
    skipped = []
    as_before = WatchedGradient.stepped_as_before

    def noted(watched, count):
        skipped.append(as_before(watched, count))
        return skipped[-1]

    monkeypatch.setattr(WatchedGradient, "stepped_as_before", noted)
    found = run(length, seed)
    assert True in skipped
    assert False in skipped
    monkeypatch.setattr(WatchedGradient, "stepped_as_before", lambda each, count: False)
    assert run(length, seed) == found
