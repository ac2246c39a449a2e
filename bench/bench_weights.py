"""What it costs to compare the weights of the ranks: whole steps with and without it, in turns.

A step is forward, backward, SGD, and dropping the gradients. Not each step hashes weights, so the steps of a pass over
all of them are timed together. CPU time of the thread that trains, on two gloo ranks. "its calls" is that inside the
methods of the comparison: a hundredth of a step cannot be told from the noise of whole steps.
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

__all__ = ["CALLS", "WRAPS", "time_weights"]

PASS = 60  # steps in which all weights are hashed, of models of up to 512 parameters
WRAPS = ("compared", "compared again", "not compared")
CALLS = "its calls"
METHODS = ("backward_begins", "delivered", "before_step", "after_step")  # of the comparison


def time_weights(build: Callable[[], Workload], effort: Effort) -> dict[str, dict[str, Any]]:
    """Prove that gradients are averaged, then time passes in turns; on every rank.

    Returns:
        The fields of `StepTimes` by contender, for one step; `extra` is over the steps that compare nothing, and for
        the calls their time.
    """
    results = time_in_turns(build, lambda *made: _pass(*made)[0], dict.fromkeys(WRAPS, "not compared"), effort, PASS)
    workload = build()
    run, sync = _pass("compared", workload)
    run()  # the first steps hash what later ones do not
    calls = time_calls(run, sync.weights, sync.grads.events, METHODS, PASS, effort.rounds * effort.rebuilds)
    calls.facts["parameters"] = len(list(workload.module.parameters()))
    return results | {CALLS: asdict(calls)}


def _pass(name: str, workload: Workload) -> tuple[Callable[[], None], Any]:
    """So many steps of the wrapped workload, which averages rightly; and its synchronisation."""
    model = dpfuse.DataParallel(workload.module, check_weights="off" if name == "not compared" else "raise")
    # With a rate of 0 all weights stay as they are, however many steps are timed.
    optimizer = torch.optim.SGD(workload.module.parameters(), lr=0.0)

    def steps() -> None:
        for _ in range(PASS):
            workload.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    prove_gradients(name, workload.module, lambda: workload.loss(model).backward(), averaged=True)
    return steps, model._sync


CASES: dict[str, tuple[Callable[[], Workload], Effort]] = {
    "10 parameters": (partial(chain, 10), Effort(30, 5, 0)),
    "100 parameters": (partial(chain, 100), Effort(15, 5, 0)),
    "1000 parameters": (partial(chain, 1000), Effort(2, 2, 0)),
    "step of 5 ms": (five_ms, Effort(8, 5, 0)),
    "100 MB": (partial(layers, 6, 2048, rows=8), Effort(1, 1, 0)),
}
QUICK = Effort(1, 1, 0)


@remembered
def _measured(case: str, quick: bool) -> Any:
    build, effort = CASES[case]
    return on_ranks(2, "cpu", time_weights, build, QUICK if quick else effort)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(("case", "variant"), [(case, variant) for case in CASES for variant in (*WRAPS, CALLS)])


@played_back
def test_weights(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "weights", "case": case, "variant": variant, **result, **facts})
