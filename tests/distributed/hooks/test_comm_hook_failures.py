"""Communication hooks that cannot be used, that fail, and that are interrupted."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from dpfuse import DistributedDataParallel
from dpfuse.ddp.hook_check import checked_hook
from dpfuse.engine.exchanges.comm_bucket import CommBucket
from tests.distributed import processes
from tests.distributed.hooks.test_comm_hooks import BUILTIN, SMALL, Mlp, with_then
from tests.patience import patience


class OddHook:
    def __call__(self, state, bucket):
        return debugging_hooks.noop_hook(state, bucket)


def unnamed(state, other):
    pass


def annotated(state, bucket: int):
    pass


def returning(state, bucket) -> int:
    pass


def well_annotated(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return debugging_hooks.noop_hook(state, bucket)


def ours_annotated(state: object, bucket: CommBucket) -> Future[torch.Tensor]:
    return debugging_hooks.noop_hook(state, bucket)


def only_for_type_checkers(state: Nowhere, bucket: Nowhere) -> Nowhere:  # noqa: F821
    return debugging_hooks.noop_hook(state, bucket)


def refusals(rank, size):
    """What torch's class raises for a hook, and what ours does."""
    errors = []
    for kind in (DistributedDataParallel, TorchDDP):
        for hook in ({}, unnamed, annotated, returning):
            model = kind(nn.Linear(2, 1))
            try:
                model.register_comm_hook(None, hook)
            except Exception as error:
                errors.append((type(error).__name__, str(error)))
        model = kind(nn.Linear(2, 1))
        model.register_comm_hook(None, debugging_hooks.noop_hook)
        for again in (
            lambda m: m.register_comm_hook(None, with_then),
            lambda m: m._register_builtin_comm_hook(BUILTIN.ALLREDUCE),
        ):
            try:
                again(model)
            except RuntimeError as error:
                errors.append(("RuntimeError", str(error)))
        model = kind(nn.Linear(2, 1))
        try:
            model._register_builtin_comm_hook("ALLREDUCE")
        except TypeError:
            errors.append(("TypeError", ""))
        model = kind(nn.Linear(2, 1))
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
        try:
            model(torch.ones(1, 2)).sum().backward()
        except RuntimeError as error:
            errors.append(("RuntimeError", re.sub(r".*(?=DDP communication)", "", str(error), flags=re.DOTALL)))
    return errors[: len(errors) // 2], errors[len(errors) // 2 :]


def test_refusals_are_those_of_torch(ranks):
    (ours, theirs), _ = ranks(refusals)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert len(ours) == 8
    for (_, text), (name, gist) in zip(ours, theirs, strict=True):
        assert gist.strip("'") in text or name == "RuntimeError"
    assert "got Tensor from" in ours[-1][1]
    assert ours[-1][1].startswith("DDP communication hook's callback must return a torch.futures.Future object")
    assert ours[4][1].startswith(theirs[4][1])


@pytest.mark.parametrize(
    "hook", [OddHook(), functools.partial(unnamed, None), well_annotated, ours_annotated, only_for_type_checkers]
)
def test_callables_and_annotations_of_every_kind(hook):
    if isinstance(hook, functools.partial):
        with pytest.raises(KeyError, match="must have this name"):
            checked_hook(None, hook, 0)
        return
    buffer = torch.ones(2)
    assert checked_hook(None, hook, 0)(0, buffer, [torch.ones(2)], is_last=True).wait() is buffer


def spoil(rank, size, where, what):
    """A callback of rank `where` (None: of all) fails or gives something that fits nowhere; then all goes on."""
    spoilt = []

    def hook(state, bucket):
        future = default_hooks.allreduce_hook(None, bucket)

        def last(f):
            if spoilt or where not in (None, rank) or bucket.index() != 1:
                return f.value()
            spoilt.append(True)
            if what == "raises":
                raise KeyError("planted")
            return {"short": f.value()[1:], "list": [f.value()], "number": 3}[what]

        return future.then(last)

    model = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
    model.register_comm_hook(None, hook)
    with pytest.raises(dpfuse.DPFuseError) as error:
        model(torch.ones(2, 5)).sum().backward()
    for _ in range(2):
        model.zero_grad()
        model(torch.full((2, 5), 1.0 + rank)).sum().backward()
        bare = copy.deepcopy(model.module)
        bare.zero_grad()
        bare(torch.full((2, 5), 1.0 + rank)).sum().backward()
        for ours, local in zip(model.module.parameters(), bare.parameters(), strict=True):
            mean = local.grad / size
            dist.all_reduce(mean)
            torch.testing.assert_close(ours.grad, mean)
    return str(error.value)


@pytest.mark.parametrize("where", [None, 1], ids=["everywhere", "on one rank"])
@pytest.mark.parametrize(
    ("what", "gist"),
    [
        ("raises", "KeyError: planted"),
        ("short", "expected 36 elements"),
        ("list", r"add .then\(lambda future: future.value\(\)\[0\]\)"),
        ("number", "holds an object of type int, expected one tensor"),
    ],
)
def test_what_goes_wrong_in_a_future_is_an_error_on_all_ranks_and_training_can_go_on(ranks, where, what, gist):
    texts = ranks(spoil, where, what)
    assert re.match(r"rank 1: the communication hook spoil.<locals>.hook failed for bucket 1", texts[1])
    assert re.search(gist.replace("KeyError: planted", "KeyError: 'planted'"), texts[1])
    if where == 1:
        assert texts[0].startswith("the backward failed on rank 1 of 2, so rank 0 has no averaged gradients")


def test_an_exception_of_the_hook_itself_surfaces_and_no_collective_follows_it(rank, size):
    def hook(state, bucket):
        if bucket.index() == 1:
            raise KeyError("planted")
        return default_hooks.allreduce_hook(None, bucket)

    for warm in (False, True):
        failing = []
        model = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL)
        model.register_comm_hook(
            None,
            lambda s, bucket: (hook if failing else default_hooks.allreduce_hook)(s, bucket),  # noqa: B023
        )
        if warm:
            model(torch.ones(2, 5)).sum().backward()
        failing.append(True)
        with pytest.raises(KeyError, match="planted") as error:
            model(torch.ones(2, 5)).sum().backward()
        notes = getattr(error.value, "__notes__", [f"rank {rank}: raised by the communication hook for"])
        assert f"rank {rank}: raised by the communication hook" in notes[0]
        for _ in range(2):
            with pytest.raises(
                dpfuse.DPFuseError, match=r"raised KeyError in an earlier backward.*wrap the module again"
            ):
                model(torch.ones(2, 5)).sum().backward()
        again = DistributedDataParallel(copy.deepcopy(model.module))
        again(torch.ones(2, 5)).sum().backward()


SCRIPT = """
import sys
import torch
import torch.distributed as dist
import dpfuse
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
model = dpfuse.DistributedDataParallel(torch.nn.Linear(3, 2))

def hook(state, bucket):
    if rank == 1:
        raise KeyError("planted")
    return allreduce_hook(state, bucket)

model.register_comm_hook(None, hook)
model(torch.ones(2, 3)).sum().backward()
print("went on")
"""


@pytest.mark.slow
def test_a_hook_that_raises_on_one_rank_ends_the_others_with_it(tmp_path):
    running = [processes.start("-c", SCRIPT, rank, tmp_path / "store", GLOO_SOCKET_IFNAME="lo") for rank in range(2)]
    outcomes = [process.communicate(timeout=patience(60)) for process in running]
    assert all(process.returncode for process in running)
    assert "went on" not in outcomes[0][0] + outcomes[1][0]
    assert "KeyError: 'planted'" in outcomes[1][1]
    assert re.search("DPFuseError|Connection closed", outcomes[0][1])


def test_registering_within_a_backward_is_an_error(rank, size):
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL)
    handle = model.module.layers[0].weight.register_hook(lambda _: model.register_comm_hook(None, with_then))
    with pytest.raises(dpfuse.DPFuseError, match="while a backward is RECORDING, expected it between backwards"):
        model(torch.ones(2, 5)).sum().backward()
    handle.remove()
    model.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    model.register_comm_hook(None, with_then)
    model.zero_grad()
    model(torch.ones(2, 5)).sum().backward()


def test_a_backward_that_ended_on_one_rank_is_told_to_the_others(rank, size):
    """User code, not the hook, ends a backward on one rank: its peers hear of it."""
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model(torch.ones(2, 5)).sum().backward()

    def blow(_):
        raise KeyError("planted")

    if rank == 1:
        handle = model.module.layers[0].weight.register_hook(blow)
        with pytest.raises(KeyError):
            model(torch.ones(2, 5)).sum().backward()
        handle.remove()
    else:
        with pytest.raises(dpfuse.DPFuseError, match="the backward failed on rank 1 of 2"):
            model(torch.ones(2, 5)).sum().backward()
    model.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    assert model.module.layers[4].bias.grad.tolist() == [2.0, 2.0, 2.0]


def timed(rank, size):
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with dpfuse.time_communication(model) as times:
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
    assert times.seconds > 0
    return times.steps, times.collectives


def test_the_tail_is_a_collective_of_its_own(ranks):
    assert ranks(timed) == [(2, 10)] * 2  # four buckets
