"""The table of exclusions: each pair of it is refused, whichever of the two a user asks for last."""

from __future__ import annotations

import os
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

import dpfuse
from dpfuse.exclusions import EXCLUSIONS, refuse

BF16, FP8 = torch.bfloat16, torch.float8_e5m2


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def dp(**options):
    return dpfuse.DataParallel(nn.Linear(2, 2), **options)


def ddp(**options):
    return dpfuse.DistributedDataParallel(nn.Linear(2, 2), **options)


def hook(model):
    model.register_comm_hook(None, allreduce_hook)


def weight(model):
    model.set_gradient_weight(2)


def backward(model):
    model(torch.ones(1, 2)).sum().backward()


def shard(model, **options):
    dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, **options)


def scale(model):
    dpfuse.GradScaler("cpu", model=model)


def join(model):
    with model.join():
        pass


def late_buffer_hook(model):
    model._register_buffer_comm_hook(None, lambda state, buffers: None, _BufferCommHookLocation.POST_FORWARD)


update = partial(shard, step_in_backward=True)


def used(model, *actions):
    """A program that makes a model and does these; the last of them is to be refused."""

    def run():
        wrapped = model()
        for action in actions[:-1]:
            action(wrapped)
        with pytest.raises((ValueError, dpfuse.DPFuseError)) as caught:
            actions[-1](wrapped)
        return str(caught.value)

    return run


def made(face, **options):
    """A program that makes a model, which is to be refused."""

    def run():
        with pytest.raises(ValueError) as caught:
            face(**options)
        return str(caught.value)

    return run


def planned(**options):
    module = nn.Linear(2, 2)
    return dpfuse.DistributedDataParallel(module, plan=dpfuse.plan_buckets(module), **options)


def divided(**options):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh["tp"], [Shard(0)]))
    return dpfuse.DistributedDataParallel(module, device_mesh=mesh["dp"], **options)


def sparse():
    return dpfuse.DataParallel(nn.Embedding(3, 2, sparse=True))


def threaded(**options):
    """A model with fixed micro-batches, which torch computes with two threads as long as no other one is wrapped."""
    before = torch.get_num_threads()
    os.environ["DPFUSE_THREADS"] = "2"
    try:
        return dpfuse.DataParallel(nn.Linear(2, 2), fixed_micro_batches=2, **options)
    finally:
        del os.environ["DPFUSE_THREADS"]
        torch.set_num_threads(before)


def no_sync(model):
    with model.no_sync():
        pass


def fixed_with(face=dp, **options):
    return [made(face, fixed_micro_batches=2, **options)]


def fixed_and(*actions, face=dp):
    return [used(partial(face, fixed_micro_batches=2), *actions)]


def hooked_with(**options):
    return [used(partial(ddp, **options), hook)]


PROGRAMS = {
    ("wire", "another reduce_dtype"): [
        made(ddp, wire_dtype=torch.float16, mixed_precision=_MixedPrecision(reduce_dtype=BF16))
    ],
    ("accumulate_in_buckets", "narrow wire"): [
        made(dp, accumulate_in_buckets=True, wire_dtype=BF16),
        made(ddp, accumulate_in_buckets=True, mixed_precision=_MixedPrecision(reduce_dtype=BF16)),
    ],
    ("fixed_micro_batches", "deterministic"): fixed_with(deterministic=True),
    ("fixed_micro_batches", "accumulate_in_buckets"): fixed_with(accumulate_in_buckets=True),
    ("fixed_micro_batches", "error_feedback"): fixed_with(error_feedback=True, wire_dtype=BF16),
    ("fixed_micro_batches", "wire"): fixed_with(wire_dtype=torch.float32),
    ("fixed_micro_batches", "narrow wire"): fixed_with(ddp, mixed_precision=_MixedPrecision(reduce_dtype=BF16)),
    ("fixed_micro_batches", "check_finite"): fixed_with(check_finite="warn"),
    ("fixed_micro_batches", "metrics"): fixed_with(metrics=3),
    ("fixed_micro_batches", "gradient_scale"): fixed_with(gradient_scale=1.0),
    ("fixed_micro_batches", "broadcast_buffers"): fixed_with(broadcast_buffers=True),
    ("fixed_micro_batches", "mixed_precision"): fixed_with(ddp, mixed_precision=_MixedPrecision(param_dtype=BF16)),
    ("fixed_micro_batches", "auto"): fixed_with(plan="auto"),
    ("fixed_micro_batches", "hook"): fixed_and(hook, face=ddp),
    ("fixed_micro_batches", "weight"): fixed_and(weight),
    ("fixed_micro_batches", "step_in_backward"): fixed_and(update),
    ("fixed_micro_batches", "GradScaler"): fixed_and(scale),
    ("fixed_micro_batches", "autotune"): fixed_and(dpfuse.autotune),
    ("fixed_micro_batches", "DTensor"): fixed_with(divided),
    ("fixed_micro_batches", "join"): fixed_and(join, face=ddp),
    ("fixed_micro_batches", "no_sync"): fixed_and(no_sync),
    ("given plan", "bucket rule"): [made(planned, bucket_cap_mb_list=[1])],
    ("bucket_cap_mb_list", "auto"): [made(ddp, bucket_cap_mb_list=[1], plan="auto")],
    ("hook", "deterministic"): hooked_with(deterministic=True),
    ("hook", "accumulate_in_buckets"): hooked_with(accumulate_in_buckets=True),
    ("hook", "error_feedback"): hooked_with(error_feedback=True, wire_dtype=BF16),
    ("hook", "wire"): hooked_with(wire_dtype=torch.float32),
    ("hook", "ShardedOptimizer"): [used(ddp, shard, hook), used(ddp, hook, shard)],
    ("hook", "autotune"): [used(ddp, dpfuse.autotune, hook), used(ddp, hook, dpfuse.autotune)],
    ("autotune", "float8 wire"): [used(partial(dp, wire_dtype=FP8), dpfuse.autotune)],
    ("weight", "gradient_scale"): [used(partial(dp, gradient_scale=1.0), weight)],
    ("weight", "hook"): [used(ddp, hook, weight), used(ddp, weight, hook, backward)],
    ("weight", "ShardedOptimizer"): [used(dp, shard, weight), used(dp, weight, shard)],
    ("ShardedOptimizer", "metrics"): [used(partial(dp, metrics=3), shard)],
    ("ShardedOptimizer", "ShardedOptimizer"): [used(dp, shard, shard)],
    ("ShardedOptimizer", "wire of another dtype"): [used(partial(dp, wire_dtype=BF16), shard)],
    ("ShardedOptimizer", "indivisible parameter"): [used(sparse, shard)],
    ("ShardedOptimizer", "several threads"): [used(threaded, shard)],
    ("step_in_backward", "GradScaler"): [used(dp, scale, update), used(dp, update, scale)],
    ("step_in_backward", "accumulate_in_buckets"): [used(partial(dp, accumulate_in_buckets=True), update)],
    ("step_in_backward", "find_unused_parameters"): [used(partial(dp, find_unused_parameters=True), update)],
    ("DTensor", "accumulate_in_buckets"): [made(divided, accumulate_in_buckets=True)],
    ("DTensor", "check_finite raises"): [made(divided, check_finite="raise")],
    ("DTensor", "metrics"): [made(divided, metrics=True)],
    ("DTensor", "mixed_precision"): [made(divided, mixed_precision=_MixedPrecision(param_dtype=BF16))],
    ("DTensor", "autotune"): [used(divided, dpfuse.autotune)],
    ("DTensor", "GradScaler"): [used(divided, scale)],
    ("DTensor", "ShardedOptimizer"): [used(divided, shard)],
    ("join", "ShardedOptimizer"): [used(ddp, shard, join)],
    ("join", "buffer hook after the forward"): [used(ddp, late_buffer_hook, join)],
}


def test_each_pair_of_the_table_has_a_program():
    assert set(PROGRAMS) == {(row.one, other) for row in EXCLUSIONS for other in row.others}


@pytest.mark.parametrize("pair", PROGRAMS, ids=" and ".join)
def test_each_pair_is_refused_with_its_reason_and_remedy(group, pair):
    (row,) = (row for row in EXCLUSIONS if row.one == pair[0] and pair[1] in row.others)
    for program in PROGRAMS[pair]:
        text = program()
        found = re.fullmatch(r"(?:rank 0: )?(.+ with .+), expected one of the two: (.+?)\. (.+\.)", text)
        assert found, text
        assert found[2] == row.reason
        assert found[3].startswith(row.remedy.partition("{")[0])
        assert "{" not in text


def test_a_text_names_the_option_that_is_to_be_left_out():
    with pytest.raises(
        dpfuse.DPFuseError, match=r"with wire_dtype=torch.bfloat16, .*\. Leave wire_dtype out, or register no"
    ):
        refuse(
            "hook",
            "a communication hook was registered with",
            {"metrics": "metrics=3", "wire": "wire_dtype=torch.bfloat16"},
        )


def test_what_is_in_use_is_no_error_without_a_row_for_both():
    in_use = {"deterministic": "deterministic=True", "hook": "a hook", "unknown": "something"}
    refuse("join", "join() was called with", in_use)
    refuse("metrics", "metrics=True was passed with", in_use)
