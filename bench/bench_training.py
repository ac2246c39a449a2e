"""What it costs to check a training: whole steps with `check_training` and without, in turns.

A step is forward, backward, SGD, and dropping the gradients. Not each step hashes weights, and the ranks compare
inputs, rates and modes in 17 of the first 20 steps and in two of 128 later. So 128 steps are timed together, after the
first ones. CPU time of the thread that trains, on two gloo ranks. "its calls" is that inside the methods of all checks:
a few microseconds cannot be told from the noise of whole steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch

import dpfuse
from bench.bench_checks import five_ms, time_in_turns
from bench.call_time import time_calls
from bench.equality import prove_gradients
from bench.models import Workload, chain, layers
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort

__all__ = ["CALLS", "ROUND", "SETTLED", "WRAPS", "time_training"]

SETTLED = 40  # steps, after which each rule has decided, or looks as it does from then on
ROUND = 128  # steps, of which two compare the ranks; in them all weights of up to 512 parameters are hashed
WRAPS = ("checked", "checked again", "not checked")
CALLS = "its calls"


def time_training(
    build: Callable[[], Workload], effort: Effort, backwards: int = 1, steps: int = ROUND
) -> dict[str, dict[str, Any]]:
    """Prove that gradients are averaged, then time rounds of steps in turns; on every rank.

    Args:
        build: makes a workload.
        effort: how often.
        backwards: in a step, of which the last one is synchronised.
        steps: in a round.

    Returns:
        The fields of `StepTimes` by contender, for one step; `extra` is over the steps that check nothing, and for the
        calls their time.
    """

    def make(name: str, workload: Workload) -> Callable[[], None]:
        return _round(name, workload, backwards, steps)[0]

    results = time_in_turns(build, make, dict.fromkeys(WRAPS, "not checked"), effort, steps)
    workload = build()
    run, sync = _round("checked", workload, backwards, steps)
    owners = [each for each in (sync.journal, sync.loop, sync.weights) if each is not None]
    calls = time_calls(run, owners, sync.grads.events, steps, effort.rounds * effort.rebuilds)
    calls.facts["parameters"] = len(list(workload.module.parameters()))
    return results | {CALLS: asdict(calls)}


def _round(name: str, workload: Workload, backwards: int, steps: int) -> tuple[Callable[[], None], Any]:
    """So many steps of the wrapped workload, which averages rightly; and its synchronisation."""
    model = dpfuse.DataParallel(workload.module, check_training="off" if name == "not checked" else "raise")
    # With a rate of 0 all weights stay as they are, however many steps are timed.
    optimizer = torch.optim.SGD(workload.module.parameters(), lr=0.0)

    def run(count: int = steps) -> None:
        for _ in range(count):
            for place in range(backwards):
                with model.no_sync(enabled=place < backwards - 1):
                    workload.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    prove_gradients(name, workload.module, lambda: workload.loss(model).backward(), averaged=True)
    optimizer.zero_grad()
    run(SETTLED)
    return run, model._sync


CASES: dict[str, tuple[Callable[[], Workload], Effort, int, int]] = {
    "10 parameters": (partial(chain, 10), Effort(6, 5, 0), 1, ROUND),
    "10 parameters, 4 backwards": (partial(chain, 10), Effort(3, 3, 0), 4, ROUND),
    "100 parameters": (partial(chain, 100), Effort(4, 3, 0), 1, ROUND),
    "1000 parameters": (partial(chain, 1000), Effort(1, 3, 0), 1, 2 * ROUND),
    "step of 5 ms": (five_ms, Effort(2, 3, 0), 1, ROUND),
    "100 MB": (partial(layers, 6, 2048, rows=8), Effort(1, 1, 0), 1, ROUND // 2),
}
QUICK = Effort(1, 1, 0)


@remembered
def _measured(case: str, quick: bool) -> Any:
    build, effort, backwards, steps = CASES[case]
    return on_ranks(2, "cpu", time_training, build, QUICK if quick else effort, backwards, steps)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(("case", "variant"), [(case, variant) for case in CASES for variant in (*WRAPS, CALLS)])


@played_back
def test_training(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "training", "case": case, "variant": variant, **result, **facts})
