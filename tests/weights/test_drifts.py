"""Each kind of drift is named on every rank, within 64 steps, with the right parameter."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import dpfuse
from dpfuse import DPFuseError, WeightsWarning
from tests.one_in import one_in
from tests.weights.drifts import DRIFTS, START, Network, Trial

BOUND = 64  # steps from the first that differs


def told(rank, size, name, face):
    """Train until a drift is named; return the step in which that was, and its text."""
    torch.manual_seed(0)
    drift, module = DRIFTS[name], Network()
    model = getattr(dpfuse, face)(module)
    optimizer = drift.optimizer([param for param in module.parameters() if param.requires_grad])
    trial = Trial(module, optimizer, 0)
    generator = torch.Generator().manual_seed(rank)
    for step in range(START + BOUND + 1):
        trial.step, raised = step, None
        inputs = torch.randn(4, 6, generator=generator)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model(inputs).square().mean().backward()
            except DPFuseError as error:
                raised = error
        found = [each.message for each in caught if isinstance(each.message, WeightsWarning)]
        if raised is not None or found:
            assert [each.code for each in found or [raised]] == ["DPF-W01"]
            text = str(raised or found[0])
            # In a step or two, what is trained may have become equal again, and only frozen ones are left.
            meant = "No gradient of" in text and "one bit" not in text
            assert drift.may_be_meant <= meant, text
            assert (raised is None) == (meant or face == "DistributedDataParallel"), text
            return step, text
        differs = rank == size - 1 and step >= START
        if differs and drift.before_step is not None:
            drift.before_step(trial)
        for _ in range(drift.steps if differs and step == START else 1):
            optimizer.step()
        optimizer.zero_grad()
        if differs and drift.after_step is not None:
            drift.after_step(trial)
    return None, ""


def check(found, size, name):
    steps = {step for step, _ in found}
    assert len(steps) == 1, f"ranks were told at different steps: {steps}"
    (step,) = steps
    assert step is not None, f"{name}: nothing was told within {BOUND} steps"
    assert START < step <= START + BOUND
    for rank, (_, text) in enumerate(found):
        assert text.startswith(f"DPF-W01: rank {rank}: the weights of the ranks differ")
    assert len({text.partition(": the weights")[2] for _, text in found}) == 1, "one text for all ranks"
    text = found[0][1]
    first, last = map(int, re.search(r"after the averaged backward (\d+) and before (\d+)", text).groups())
    assert first <= START + 1 < last <= step + 1, text
    named = re.search(r"parameters? '([\w.]+)'", text)[1]
    assert named in (DRIFTS[name].named or dict(Network().named_parameters())), text
    if DRIFTS[name].named:
        frozen = " No gradient of it is averaged." * (set(DRIFTS[name].named) <= {"frozen.weight", "frozen.bias"})
        assert f"; {len(set(DRIFTS[name].named))} of 11 differ.{frozen} " in text, text
    if size > 2:
        assert f"Rank {size - 1} differs from the {size - 1} others, which are equal" in text, text
    else:
        assert "Of two ranks none can be said to be right" in text, text


@pytest.mark.parametrize("name", one_in(4, DRIFTS))
def test_a_drift_is_named(ranks, name):
    check(ranks(told, name, "DataParallel", size=2), 2, name)


def test_of_three_ranks_the_one_that_differs_from_the_others_is_named(ranks):
    name = next(iter(DRIFTS))
    check(ranks(told, name, "DataParallel", size=3), 3, name)


@pytest.mark.slow
@pytest.mark.parametrize("face", ["DataParallel", "DistributedDataParallel"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", DRIFTS)
def test_a_drift_is_named_on_more_ranks(ranks, name, size, face):
    check(ranks(told, name, face, size=size, timeout=120), size, name)
