"""A whole training step in one CUDA graph, as in docs/train/data_parallel.md: replays are the eager steps, bitwise."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfuse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WARM_UP = 11
REPLAYS = 100


class Net(nn.Sequential):
    """Small and large gradients, in several buckets, and a buffer that is sent before each forward."""

    def __init__(self):
        super().__init__(
            nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.GELU(), nn.Linear(1024, 10)
        )


class Training:
    """A model, its optimizer, and the memory that each step reads its batch from."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
        self.x = torch.zeros(32, 64, device="cuda")
        self.y = torch.zeros(32, 10, device="cuda")
        self.loss = torch.zeros((), device="cuda")

    def feed(self, seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=generator, device="cuda"))
        self.y.copy_(torch.randn(self.y.shape, generator=generator, device="cuda"))

    def step(self, *, set_to_none=False):
        self.optimizer.zero_grad(set_to_none=set_to_none)
        loss = F.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def warm_up(self, steps=WARM_UP):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in range(steps):
                self.feed(-1 - step)
                self.step()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self, **options):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(**options)
        return graph

    def state(self):
        grads = {f"{name}.grad": param.grad for name, param in self.model.named_parameters()}
        return {"loss": self.loss, **self.model.state_dict(), **grads}


def wrap(kind, module):
    if kind == "torch's face":
        return dpfuse.DistributedDataParallel(module, bucket_cap_mb=1)
    options = {"views": {}, "private": {"gradient_as_bucket_view": False}, "bfloat16": {"wire_dtype": torch.bfloat16}}
    return dpfuse.DataParallel(module, None, 1, 0.1, broadcast_buffers=True, **options[kind])


def assert_same(ours, theirs, when):
    for (name, a), b in zip(ours.state().items(), theirs.state().values(), strict=True):
        assert torch.equal(a, b), f"{name} {when}"


@pytest.mark.parametrize("kind", ["views", "private", "bfloat16", "torch's face"])
def test_replays_are_the_eager_steps_bitwise(nccl, kind):
    torch.manual_seed(0)
    base = Net().cuda()
    replayed, eager = (Training(wrap(kind, copy.deepcopy(base))) for _ in range(2))
    replayed.warm_up()
    eager.warm_up()
    assert_same(replayed, eager, "after the warm-up")
    graph = replayed.capture()
    assert_same(replayed, eager, "after the capture, which runs nothing")
    for step in range(REPLAYS):
        replayed.feed(step)
        graph.replay()
        eager.feed(step)
        eager.step()
        assert_same(replayed, eager, f"in replay {step}")


@pytest.mark.parametrize("kind", ["views", "private", "bfloat16"])
def test_replays_and_eager_steps_take_turns(nccl, kind):
    torch.manual_seed(0)
    base = Net().cuda()
    mixed, eager = (Training(wrap(kind, copy.deepcopy(base))) for _ in range(2))
    mixed.warm_up()
    eager.warm_up()
    graph = mixed.capture()
    for step in range(10):
        for training in (mixed, eager):
            training.feed(step)
        graph.replay() if step % 2 else mixed.step()
        eager.step()
        assert_same(mixed, eager, f"in step {step}")


def test_a_captured_step_copies_nothing_from_the_host(nccl):
    training = Training(wrap("bfloat16", Net().cuda()))
    training.warm_up()
    graph = training.capture()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    buckets = len(training.model.bucket_plan.buckets)
    assert buckets > 1
    assert len(training.model.reducer.buckets) == buckets + 1  # the report travels in float32
    assert sum("_flatten_kernel" in name and "unflatten" not in name for name in names) == buckets + 1
    assert sum("_unflatten_kernel" in name for name in names) == buckets
    assert not any("Memcpy HtoD" in name for name in names)


def test_too_early_a_capture_is_refused_and_training_goes_on(nccl):
    Net().cuda()(torch.zeros(32, 64, device="cuda")).sum().backward()  # cuBLAS cannot begin in a capture
    training = Training(wrap("views", Net().cuda()))
    with pytest.raises(dpfuse.DPFuseError, match=r"the first synchronised backward .* is captured in a CUDA graph"):
        training.capture()
    training.model.zero_grad()
    training.warm_up()
    training.capture().replay()
    assert training.loss.isfinite()


def test_gradients_that_are_made_anew_are_refused_in_a_capture(nccl):
    training = Training(wrap("bfloat16", Net().cuda()))
    training.warm_up()
    with pytest.raises(dpfuse.DPFuseError, match=r"tensors are not where the last call found them.*set_to_none=False"):
        training.capture(set_to_none=True)
    training.model.zero_grad()
    training.warm_up()
    training.capture().replay()
    assert training.loss.isfinite()


class Idle(Net):
    """It has a parameter that no step uses."""

    def __init__(self):
        super().__init__()
        self.register_parameter("idle", nn.Parameter(torch.zeros(3)))


@pytest.mark.filterwarnings("ignore:.*got no gradient in this backward")
def test_a_parameter_without_gradient_is_named_in_a_capture(nccl):
    training = Training(wrap("views", Idle().cuda()))
    training.warm_up()
    with pytest.raises(dpfuse.DPFuseError, match="parameter 'idle' got no gradient in a backward that a CUDA graph"):
        training.capture()
    training.model.zero_grad()
    training.warm_up(3)
    assert training.loss.isfinite()
