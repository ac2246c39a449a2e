"""What a benchmark proves before it times: a wrong pack or a gradient that is no mean must not pass."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench import equality
from bench.baselines import PACKS, PackSet, wrappers
from bench.equality import prove_gradients, prove_packs
from bench.interleave import interleave, paired_extra
from bench.models import load_model


def test_every_pack_is_exact():
    prove_packs(PackSet([(5,), (2, 3), (1,)], torch.device("cpu")))


def test_a_pack_that_leaves_an_element_out_is_caught(monkeypatch):
    def forgetful(data: PackSet) -> torch.Tensor:
        data.pieces[0][:-1].copy_(data.sources[0][:-1])
        data.pieces[1].copy_(data.sources[1])
        return data.dense

    monkeypatch.setattr(equality, "PACKS", PACKS | {"forgetful": (forgetful, False)})
    with pytest.raises(AssertionError, match="forgetful"):
        prove_packs(PackSet([(5,), (2, 3)], torch.device("cpu")))


def prove_all_wrappers(rank: int, size: int) -> list[str]:
    base, batch = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.full((2, 3), float(rank + 1))
    caught = []
    for name, wrap in wrappers().items():
        module = copy.deepcopy(base)
        wrapped = wrap(module)
        try:
            prove_gradients(name, module, lambda: wrapped(batch).sum().backward(), averaged=True)  # noqa: B023
        except AssertionError as error:
            caught.append(str(error))
        dist.barrier()
    return caught


def test_only_the_bare_module_fails_the_proof_that_gradients_are_the_mean(ranks):
    for caught in ranks(prove_all_wrappers):
        assert [text.partition(":")[0] for text in caught] == ["bare", "bare again"]


def test_interleaving_gives_every_contender_every_round():
    calls: Counter[str] = Counter()
    steps = {name: lambda name=name: calls.update([name]) for name in ("a", "b", "c")}
    times = interleave(steps, lambda step: (step() or 1.0, 2.0), rounds=5, warmup=2)
    assert calls == {"a": 7, "b": 7, "c": 7}
    assert times == {name: [(1.0, 2.0)] * 5 for name in steps}


def test_extra_time_is_the_median_of_the_differences_in_the_same_round():
    assert paired_extra([(3.0, 9.0), (9.0, 9.0), (4.0, 9.0)], [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]) == 3.0
    assert paired_extra([(3.0, 9.0), (9.0, 9.0), (4.0, 9.0)], [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], 1) == 7.0


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"bench\.models:no_such_model"):
        load_model("bench.models:no_such_model")
