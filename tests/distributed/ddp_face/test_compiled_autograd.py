"""Compiled autograd: the gradients are those of torch's DDP with the plain engine, whatever runs the graph.

Dynamo takes seconds for each graph, so what does not depend on it runs the captured graph as it is.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from dpfuse import DataParallel, DistributedDataParallel, DPFuseError

FACES = {"ddp": DistributedDataParallel, "data_parallel": DataParallel}


def as_it_is(graph):
    """The simplest compiler: Dynamo is not asked."""
    return graph


def compiled(compiler=as_it_is):
    """Backwards inside are compiled by a backend of that name, or by that function."""
    function = torch.compile(backend=compiler) if isinstance(compiler, str) else compiler
    return torch._dynamo.compiled_autograd._enable(function)


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def pair(module, face=DistributedDataParallel, **options):
    """Torch's DDP, and a face of ours, over equal modules."""
    torch._dynamo.reset()
    return TorchDDP(copy.deepcopy(module), **options), face(copy.deepcopy(module), **options)


def data(rank, step):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def assert_equal(expected, model, step):
    for (name, theirs), ours in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert (theirs.grad is None) == (ours.grad is None), (step, name)
        assert theirs.grad is None or torch.equal(ours.grad, theirs.grad), (step, name, ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("face", "compiler", "views"),
    [
        # Half a minute each, for Dynamo.
        pytest.param("ddp", "eager", False, marks=pytest.mark.slow),
        pytest.param("data_parallel", "aot_eager", True, marks=pytest.mark.slow),
        ("ddp", as_it_is, True),
        ("data_parallel", as_it_is, False),
    ],
)
@pytest.mark.ranks(timeout=180)
def test_gradients_are_those_of_torchs_ddp(rank, size, face, compiler, views):
    """Accumulation over steps, local steps, both ways to zero gradients."""
    expected, model = pair(net(), FACES[face], gradient_as_bucket_view=views)
    call = torch.compile(model, backend=compiler) if compiler == "aot_eager" else model
    for step in range(6):
        local = step == 3
        with expected.no_sync() if local else nullcontext():
            expected(data(rank, step)).sum().backward()
        before = model.reducer.completed
        with compiled(compiler), model.no_sync(local):
            call(data(rank, step)).sum().backward()
        assert model.reducer.completed == before + (not local)
        assert_equal(expected, model, step)
        if step in (0, 4):
            for each in (expected, model):
                each.zero_grad(set_to_none=step == 0)
    assert not any(ready.entries for ready in model.reducer._in_use.ready)


@pytest.mark.slow
@pytest.mark.ranks(timeout=180)
def test_complete_buckets_are_sent_while_the_compiled_backward_runs(rank, size):
    expected, model = pair(net(), bucket_cap_mb=1e-5)
    sent = []
    model.module[0].weight.register_hook(lambda _: sent.append(model.reducer._run.next))
    # After as many compilations as that, Dynamo runs everything as it is.
    with torch._dynamo.config.patch(recompile_limit=2):
        for step in range(4):
            expected(data(rank, step)).sum().backward()
            with compiled("eager"):
                model(data(rank, step)).sum().backward()
            assert_equal(expected, model, step)
    assert len(model.bucket_plan.buckets) > 2
    # In the first step buckets are sent when it has ended.
    assert sent[0] == 0
    assert min(sent[1:]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, "python_reducer"])
@pytest.mark.ranks(timeout=180)
def test_a_compiled_step_with_the_switch(rank, size, mode):
    expected, model = pair(net())

    def step(x):
        model(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True, optimize_ddp=mode):
        step = torch.compile(step, backend="aot_eager")
        for count in range(3):
            expected(data(rank, count)).sum().backward()
            captures = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
            step(data(rank, count))
            assert count > 0 or torch._dynamo.utils.counters["compiled_autograd"]["captures"] == captures + 1
            assert model.reducer.completed == count + 1
            assert_equal(expected, model, count)


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.nobody = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, side):
        return (self.left if side == 0 else self.right)(x)


def test_unused_parameters(rank, size):
    expected, model = pair(Fork(), find_unused_parameters=True)
    for step, side in enumerate([0, rank, rank, 1, rank]):
        expected(data(rank, step), side).sum().backward()
        with compiled():
            model(data(rank, step), side).sum().backward()
        assert_equal(expected, model, step)


def test_asking_for_gradients_communicates_nothing(rank, size):
    expected, model = pair(net())
    expected(data(rank, 0)).sum().backward()
    with compiled():
        x = data(rank, 1).requires_grad_()
        for wanted in ([x], list(model.parameters())):
            torch.autograd.grad(model(x).sum(), wanted)
            assert all(param.grad is None for param in model.parameters())
            assert model.reducer.completed == 0
        model(data(rank, 0)).sum().backward()
    assert model.reducer.completed == 1
    assert_equal(expected, model, 0)


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.two, self.one(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(rank, size, reentrant):
    expected, model = pair(Recomputed(reentrant))
    for step in range(3):
        expected(data(rank, step)).sum().backward()
        with compiled():
            model(data(rank, step)).sum().backward()
        assert_equal(expected, model, step)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Anomaly")
def test_two_wrappers_in_one_backward_and_anomaly_mode(rank, size):
    (expected, model), (expected_head, head) = pair(net()), pair(nn.Linear(2, 2))
    for step in range(3):
        expected_head(expected(data(rank, step))).sum().backward()
        # The check that we step in for is made too.
        with compiled(), torch.autograd.detect_anomaly() if step else nullcontext():
            head(model(data(rank, step))).sum().backward()
        assert_equal(expected, model, step)
        assert_equal(expected_head, head, step)
    with compiled(), torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="NaN"):
        (head(model(data(rank, step))).sum() * float("nan")).backward()


@pytest.mark.parametrize("compiler", [as_it_is, pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.ranks(timeout=180)
def test_an_exception_on_one_rank_is_heard_of_on_all(rank, size, compiler):
    expected, model = pair(net())
    broken = False

    def fail(_):
        if broken and rank == 1:
            raise ZeroDivisionError("mine")

    model.module[2].weight.register_hook(fail)
    for step in range(5):
        model.zero_grad()
        broken = step == 2
        with compiled(compiler):
            if not broken:
                model(data(rank, step)).sum().backward()
            elif rank == 0:
                with pytest.raises(DPFuseError, match="failed on rank 1 of 2"):
                    model(data(rank, step)).sum().backward()
            else:
                with pytest.raises(ZeroDivisionError, match="mine"):
                    model(data(rank, step)).sum().backward()
        if not broken:
            expected.zero_grad()
            expected(data(rank, step)).sum().backward()
            assert_equal(expected, model, step)


@pytest.mark.slow
def test_a_graph_without_breaks_is_refused_by_name(rank, size):
    expected, model = pair(net())
    with (
        compiled(torch.compile(backend="eager", fullgraph=True)),
        pytest.raises(RuntimeError, match="dpfuse notes here that a backward begins"),
    ):
        model(data(rank, 0)).sum().backward()
    for each in (expected, model):
        each(data(rank, 0)).sum().backward()
    assert_equal(expected, model, 0)


def test_a_torch_that_does_not_tell_the_end_is_refused(rank, size):
    _, model = pair(net())
    runner = torch._dynamo.compiled_autograd.AutogradCompilerInstance
    original = runner.end_capture

    def end_capture(self, outputs):
        _, graph = original(self, outputs)
        return run_unnamed, graph

    def run_unnamed(graph, *args):
        with torch._dynamo.compiled_autograd._disable():
            return graph(*args)

    runner.end_capture = end_capture
    try:
        with compiled(), pytest.raises(DPFuseError, match="compiled_autograd off"):
            model(data(rank, 0)).sum().backward()
    finally:
        runner.end_capture = original
