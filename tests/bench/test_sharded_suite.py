"""The benchmark of training steps: every contender trains as DDP does, and one that does not is seen."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import bench.bench_sharded as suite
from bench.models import layers, small_cnn
from bench.step_time import Effort
from bench.training import IN_BACKWARD, KEPT, REFERENCE, SHARDED, ZERO, Trained, memory_of, prove_way

ADAMW_CASE, MUON_CASE, COPIES_CASE = "CNN", "Muon", "transformer in bfloat16"
CUDA_CASE, CUDA_COPIES_CASE = "cuda 2000 x 4 KB", "cuda BERT-large b8 in bfloat16"
OURS = {SHARDED, IN_BACKWARD, KEPT}


def small(name):
    """A case with three matrices of 16 x 16 in place of its model."""
    case = (suite.PAIRS | suite.CUDA)[name]
    build = partial(layers, 3, 16, rows=16)
    return case._replace(build=partial(suite._in_bfloat16, with_half(build)) if "bfloat16" in name else build)


def with_half(build):
    """The same model, whose data are cast as its parameters will be."""

    def made():
        workload = build()
        x = torch.randn(16, 16).bfloat16()
        return workload._replace(loss=lambda model: model(x).square().mean())

    return made


def few_steps(rank, size, name):
    """The contenders of a case after the proof, and the bytes of each; one that does not train is named."""
    torch.manual_seed(rank)
    case = small(name)
    workload = case.build()
    for param in workload.module.parameters():
        torch.distributed.broadcast(param.data, 0)
    trained = {each: train(copy.deepcopy(workload)) for each, train in case.contenders.items()}
    case.prove(trained)
    memory = {each: memory_of(one) for each, one in trained.items()}
    alone = Trained(lambda: None, lambda: [param.detach() for param in workload.module.parameters()])
    with pytest.raises(AssertionError, match="idle: the weights differ from DDP's"):
        case.prove({REFERENCE: trained[REFERENCE], "idle": alone})
    return memory


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [ADAMW_CASE, MUON_CASE, COPIES_CASE, CUDA_CASE, CUDA_COPIES_CASE])
def test_every_contender_trains_as_ddp_does_and_an_idle_one_is_seen(ranks, name):
    for memory in ranks(few_steps, name):
        assert {REFERENCE, "DDP views"} | OURS <= set(memory)
        numel = 3 * 16 * 16
        whole = numel * {ADAMW_CASE: 8, CUDA_CASE: 8, MUON_CASE: 4}.get(name, 12)  # float32 copies are 4 of the 12
        for each, facts in memory.items():
            if each in OURS:
                # Two of the three matrices have one owner; other parts are equal, up to their padding.
                assert facts["state_bytes"] in ((whole // 3, whole * 2 // 3) if name == MUON_CASE else (whole // 2,))
                assert facts["bucket_bytes"] >= numel * (2 if "bfloat16" in name else 4)
            elif each.startswith(("DDP default", "DDP views")) or each == "dpfuse":
                assert facts["state_bytes"] == whole


def test_the_cases_have_the_peers_that_can_do_it():
    for name in ("CNN", "cuda ResNet-50 b64"):
        found = (suite.PAIRS | suite.CUDA)[name].contenders
        assert {REFERENCE, "DDP views", "dpfuse", ZERO, "FSDP2 sharded, gathered once"} | OURS <= set(found)
    assert set(suite.PAIRS["Muon"].contenders) == {REFERENCE, "DDP views", "dpfuse", ZERO} | OURS
    assert set(suite.PAIRS[COPIES_CASE].contenders) == {REFERENCE, "DDP views"} | OURS
    assert set(suite.IN_NETWORKS) == {REFERENCE, "DDP views", "dpfuse"} | OURS


def one_step_too_few(rank, size):
    """How far a contender is from DDP that leaves out one step of three."""
    torch.manual_seed(0)
    workload = small_cnn()
    train = suite.CUDA["cuda ResNet-50 b64"].contenders[REFERENCE]
    reference, lazy = (train(copy.deepcopy(workload)) for _ in range(2))
    steps = iter((lazy.step, lazy.step, lambda: None))
    with pytest.raises(AssertionError) as caught:
        prove_way({REFERENCE: reference, "lazy": lazy._replace(step=lambda: next(steps)())}, part=0.0)
    return float(str(caught.value).split("by ")[1].split()[0])


def test_a_missing_step_is_farther_away_than_kernels_of_a_gpu_may_lead(ranks):
    (apart,) = ranks(one_step_too_few, size=1)
    assert apart > 1.2 * suite.CLOSE_CUDA.keywords["part"]


def timed(rank, size, name):
    (suite.PAIRS if name in suite.PAIRS else suite.CUDA)[name] = small(name)
    return suite._time(name, Effort(1, 2, 1), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [COPIES_CASE, CUDA_CASE])
def test_a_case_has_times_and_facts_of_each_contender(ranks, name):
    (found, _) = ranks(timed, name)
    assert set(found) == set((suite.PAIRS | suite.CUDA)[name].contenders)
    for one in found.values():
        assert len(one["seconds"]) == 2 * 5
        assert min(one["seconds"]) > 0
        assert one["facts"]["ranks"] == 2


@pytest.mark.slow
def test_a_network_delays_what_is_not_under_computation(monkeypatch):
    monkeypatch.setattr(suite, "layers", lambda count, features, rows: layers(3, 64, rows))
    fast, slow = (suite._time_network(20e-6, load, Effort(3, 1, 1), 4) for load in (0.25, 200))
    assert set(fast) == set(suite.IN_NETWORKS)
    for name in fast:
        assert slow[name]["wall"] > fast[name]["wall"]
