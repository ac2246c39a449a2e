"""The clip suite proves that all clip equally before it times them, and judges what clipping adds to a bare step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.bench_clip import AGAIN, BASES, VARIANTS, WRAPS, _Clipped, _prove, time_clips
from bench.goals import Entry, judge
from bench.models import Workload, chain
from bench.step_time import FEWEST_ROUNDS, Effort

WEIGHT, BIAS = 4 * 600 * 1024, 4 * 600  # bytes; a private gradient of 2 MB is reduced where it lies


def one_layer() -> Workload:
    x = torch.randn(2, 1024)
    return Workload(nn.Linear(1024, 600), lambda model: model(x).square().sum())


def few_steps(rank, size):
    return time_clips(one_layer, Effort(5, 2, 0))


@pytest.mark.slow
def test_contenders_are_proved_and_timed(ranks):
    for results in ranks(few_steps):
        assert tuple(results) == VARIANTS
        assert all(len(result["seconds"]) == 2 * FEWEST_ROUNDS for result in results.values())
        assert [name for name in VARIANTS if BASES[name] == name] == [
            f"{name} bare" for name in ("DDP default", "DDP view", "dpfuse views", "dpfuse private")
        ]
        assert all(results[name]["extra"] == 0 for name in VARIANTS if BASES[name] == name)
        assert all(results[name]["facts"]["bytes"] == WEIGHT + BIAS for name in WRAPS)


def said_of_wrong_contenders(rank, size):
    torch.manual_seed(rank)
    workload = chain(3)
    said = []
    for name in ("dpfuse views", "DDP view"):
        contenders = {other: _Clipped(workload, WRAPS[other]) for other in ("DDP default", name)}
        clip = contenders[name]._clip
        if name == "dpfuse views":
            contenders[name]._clip = lambda limit, clip=clip: clip(limit) * 1.00001
        else:
            contenders[name]._clip = lambda limit, clip=clip: clip(limit * 1.00001)
        with pytest.raises(AssertionError) as caught:
            _prove(contenders)
        said.append(str(caught.value))
    return said


def test_a_wrong_norm_and_a_wrong_factor_are_found(ranks):
    for norm, factor in ranks(said_of_wrong_contenders):
        assert norm.startswith("dpfuse views: a norm of ")
        assert factor.startswith("DDP view: a gradient is not the mean times the factor")


def test_what_clipping_adds_is_compared_with_ddp_with_such_gradients():
    extras = dict.fromkeys(VARIANTS, 0.0) | {"DDP default": 8.0, "DDP view": 10.0, "dpfuse views": 7.0}
    extras |= {"dpfuse private": 6.0, AGAIN: 0.1}
    outcomes = judge(
        Entry("clip", "pair 100 tiny", name, 1.0, 1.0, 0.0, 5, {"extra": extra}) for name, extra in extras.items()
    )
    added = {outcome.what: outcome.value for outcome in outcomes if "adds" in outcome.what}
    assert added == {
        "what clipping adds, dpfuse views / DDP view": pytest.approx(0.7),
        "what clipping adds, dpfuse private / DDP default": pytest.approx(0.75),
    }
