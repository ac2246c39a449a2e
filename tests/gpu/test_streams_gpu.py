"""Streams: gradients written on several, unpacked on another; random schedules are bitwise right, and overlap stays."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from dpfuse.comm import collective, registered_memory
from dpfuse.comm.abilities import Abilities
from dpfuse.engine import assembly
from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.delivery import EarlyPrivate, Private

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Newer torch says so of a layer whose stream changes, which is what happens here on purpose.
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad.*stream.*"),
]

NUMEL = 1 << 16
LAYERS = 6
SCHEDULES = 200
SLEEP = 400_000  # cycles at most, some 0.2 ms
LONG = 40_000_000  # some 20 ms
SCALE = 0.5  # a gradient that was not packed, or not unpacked, is wrong by this factor
PLANS = {"one by one": 0, "in pairs": NUMEL * 8 / 2**20, "all in one": float("inf")}
KINDS = {"views": {}, "private": {"gradient_as_bucket_view": False}, "bfloat16": {"wire_dtype": torch.bfloat16}}


@pytest.fixture
def nccl(tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "LEAST", 0)
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    torch.cuda.synchronize()
    dist.destroy_process_group()


class Layers(nn.Module):
    """Vectors that are multiplied with inputs, each on the stream it is told; gradients are known to the last bit.

    Each backward sleeps before it writes its gradient, for as long as it is told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(NUMEL)) for _ in range(LAYERS))

    def forward(self, inputs: list[Tensor], streams: list[torch.cuda.Stream], cycles: list[int]) -> Tensor:
        main, total = torch.cuda.current_stream(), torch.zeros(NUMEL, device="cuda")
        for weight, x, stream, count in zip(self.weights, inputs, streams, cycles, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                product = x * weight
                product.register_hook(lambda grad, count=count: torch.cuda._sleep(count) if count else None)
            main.wait_stream(stream)
            total = total + product
        return total.sum()


def inputs_of(step: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(step)
    x = torch.randn(NUMEL, device="cuda", generator=generator).bfloat16().float()  # exact on every wire
    return [x * 2.0**layer for layer in range(LAYERS)]


def poison(model: nn.Module) -> None:
    """Whatever a step does not write is NaN."""
    for bucket in model.reducer.buckets:
        for view in bucket.parts.buffer.table.views:
            view.fill_(float("nan"))


class Sent:
    """Notes when buckets are sent and unpacked, on the GPU's clock, and how many were unpacked early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[torch.cuda.Event] = []
        self.unpacked: list[torch.cuda.Event] = []
        self.early = 0
        copy_now, delivered, start = Private.copy_now, EarlyPrivate.delivered, GradBucket._start

        def noted_start(bucket, flat, outcome):
            self.sent.append(event())
            return start(bucket, flat, outcome)

        def noted_copy(private, targets, *, matched=True):
            copy_now(private, targets, matched=matched)
            self.unpacked.append(event())

        def noted_delivered(early):
            places = delivered(early)
            self.early += len(places)
            return places

        monkeypatch.setattr(GradBucket, "_start", noted_start)
        monkeypatch.setattr(Private, "copy_now", noted_copy)
        monkeypatch.setattr(EarlyPrivate, "delivered", noted_delivered)


def event() -> torch.cuda.Event:
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_are_bitwise_right_and_buckets_travel_meanwhile(nccl, kind, plan, monkeypatch):
    model = dpfuse.DataParallel(Layers().cuda(), None, PLANS[plan], 0, gradient_scale=SCALE, **KINDS[kind])
    sides = [torch.cuda.Stream() for _ in range(3)]
    main = torch.cuda.current_stream()
    rng = random.Random(f"{kind} {plan}")
    noted = Sent(monkeypatch)
    wrong = torch.zeros((), device="cuda")
    for step in range(SCHEDULES):
        model.zero_grad()
        poison(model)
        inputs = inputs_of(step)
        streams = [rng.choice([main, *sides]) for _ in range(LAYERS)]
        cycles = [rng.choice([0, 0, rng.randrange(SLEEP)]) for _ in range(LAYERS)]
        model(inputs, streams, cycles).backward()
        for weight, x in zip(model.module.weights, inputs, strict=True):
            wrong += (weight.grad != x * SCALE).any()  # the host does not wait for the GPU in between
        if step % 20 == 19:
            assert not wrong, f"a gradient is wrong in steps {step - 19} to {step}"
    # The last bucket is sent when backward has ended. Behind gradients of 16 bits that is the report alone.
    assert (noted.early > 0) == (kind != "views" and len(model.reducer.buckets) > 1)

    # The same wrapper, with a long sleep in the last layer of the backward: what was ready before is away long before.
    model.zero_grad()
    torch.cuda.synchronize()
    noted.sent.clear()
    noted.unpacked.clear()
    model(inputs_of(0), [main] * LAYERS, [LONG] + [0] * (LAYERS - 1)).backward()
    end = event()
    end.synchronize()
    if plan != "all in one":
        assert noted.sent[0].elapsed_time(end) > 5, "the first bucket waited for the end of backward"
        if kind != "views":
            assert noted.unpacked[0].elapsed_time(end) > 5, "the first bucket was unpacked at the end of backward"


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_writer_on_another_stream_is_waited_for(nccl, kind, monkeypatch):
    """Hazard 26, for each layer in turn: it is written late, on a stream of its own, into a bucket of all."""
    model = dpfuse.DataParallel(Layers().cuda(), None, float("inf"), 0, gradient_scale=SCALE, **KINDS[kind])
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for step in range(3 + LAYERS):
        slow = step % LAYERS
        model.zero_grad()
        poison(model)
        inputs = inputs_of(step)
        streams = [side if layer == slow else main for layer in range(LAYERS)]
        cycles = [LONG // 4 if layer == slow else 0 for layer in range(LAYERS)]
        model(inputs, streams, cycles).backward()
        for weight, x in zip(model.module.weights, inputs, strict=True):
            assert torch.equal(weight.grad, x * SCALE), f"layer {slow} was slow"


def test_gradients_accumulate_and_step_behind_early_unpacking(nccl, monkeypatch):
    """Accumulated, stepped and zeroed in place right after backward, beside the wrapper that unpacks at the end."""
    states = []
    for early in (True, False):
        abilities = Abilities(on_streams=early)
        monkeypatch.setattr(assembly, "abilities_of", lambda group, device, abilities=abilities: abilities)
        model = dpfuse.DataParallel(Layers().cuda(), None, 0, 0, gradient_as_bucket_view=False)
        noted = Sent(monkeypatch)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
        main = torch.cuda.current_stream()
        for step in range(30):
            for part in range(2):
                with model.no_sync(enabled=part == 0):
                    model(inputs_of(2 * step + part), [main] * LAYERS, [step % 3 * SLEEP] * LAYERS).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert (noted.early > 0) == early
        states.append([weight.detach().clone() for weight in model.module.weights])
    assert all(map(torch.equal, *states))


def test_gradient_memory_is_not_used_again_before_the_side_stream_is_done(nccl, monkeypatch):
    """Hazard 28: gradients are dropped and their memory poisoned right after backward, and after one that died."""
    model = dpfuse.DataParallel(Layers().cuda(), None, 0, 0, gradient_scale=SCALE, gradient_as_bucket_view=False)
    main = torch.cuda.current_stream()
    for step in range(20):
        inputs = inputs_of(step)
        if step % 5 == 4:
            planted = model.module.weights[0].register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(inputs, [main] * LAYERS, [SLEEP] * LAYERS).backward()
            planted.remove()
            model.zero_grad(set_to_none=step % 2 == 0)
        else:
            model(inputs, [main] * LAYERS, [SLEEP] * LAYERS).backward()
            kept = [weight.grad.clone() for weight in model.module.weights]
            model.zero_grad()
            junk = [torch.full((NUMEL,), float("nan"), device="cuda") for _ in range(2 * LAYERS)]
            assert all(torch.equal(grad, x * SCALE) for grad, x in zip(kept, inputs, strict=True))
            del junk


def test_registered_memory_is_zero_and_travels(nccl):
    device = torch.device("cuda", 0)
    backend = nccl._get_backend(device)
    if not getattr(backend, "supports_tensor_alloc", lambda device: False)(device):
        pytest.skip("this torch, driver or card offers no memory that NCCL can register")
    flat = registered_memory.zeros(1000, dtype=torch.bfloat16, device=device, group=nccl)
    assert flat.device == device
    assert flat.eq(0).all()
    flat.fill_(3)
    collective.all_reduce(flat, nccl).wait()
    assert flat.eq(3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_is_applied_among_coalesced_sums(nccl, dtype):
    """At world size 1 as well, where NCCL could copy instead of summing."""
    device = torch.device("cuda", 0)
    scaled, plain = torch.full((1000,), 6.0, dtype=dtype, device=device), torch.full((7,), 4.0, device=device)

    def start():
        collective.all_reduce_multiplied(scaled, SCALE, nccl)
        collective.all_reduce(plain, nccl)

    collective.coalesced(start, device, nccl).wait()
    assert scaled.eq(6.0 * SCALE).all()
    assert plain.eq(4.0).all()
