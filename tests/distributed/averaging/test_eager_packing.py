"""Large gradients on a CPU become their views as soon as they are ready; nobody finds another mean for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import dpfuse
from dpfuse import DPFuseError
from dpfuse.engine.feeds.eager import LARGE
from tests.distributed.random_models import same_bits

# Two large gradients and small ones in most buckets.
SIZES = {"comm_buffer_size": 300 / 1024, "last_comm_buffer_size": 0.1}
SWITCHES = {
    "plain": {},
    "sum": {"gradient_scale": 1.0},
    "third": {"gradient_scale": 1 / 3},
    "deterministic": {"deterministic": True},
    "checked": {"check_finite": "raise"},
    "private": {"gradient_as_bucket_view": False},
    "in buckets": {"accumulate_in_buckets": True},
    "half wire": {"wire_dtype": torch.bfloat16},
}
EARLY = {"plain", "sum", "third", "deterministic", "measured", "private"}


class Net(nn.Module):
    """Tanh layers; `weights.i` is large but for the last, and `twice` runs that layer once more, reentrantly."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [64, 600, 64, 600, 64, 600, 8]
        assert 64 * 600 * dtype.itemsize >= LARGE
        self.layers = nn.ModuleList(nn.Linear(*pair, dtype=dtype) for pair in pairwise(widths))
        self.twice = -1

    def forward(self, batch: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place == self.twice:
                batch = batch + 0 * checkpoint(layer, batch, use_reentrant=True).sum()
            batch = layer(batch).tanh()
        return batch


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def wrapped(net: nn.Module, **options: object) -> dpfuse.DataParallel:
    return dpfuse.DataParallel(net, **{**SIZES, **options})


def step_of(model: nn.Module, rank: int, step: int) -> None:
    dtype = next(model.parameters()).dtype
    model(batch(rank, step, dtype)).square().sum().backward()


def large_ones(model: dpfuse.DataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    for name, param in model.module.named_parameters():
        if param.numel() * param.element_size() >= LARGE:
            yield name, param


def trained(model: dpfuse.DataParallel, rank: int, steps: int = 2) -> None:
    """Past the first backward, in which the order is recorded."""
    for step in range(steps):
        model.zero_grad()
        step_of(model, rank, step)
    model.zero_grad()


def in_the_middle(model: dpfuse.DataParallel, what) -> None:
    """In the next backward, call `what` with the last large parameter when the layer below it is under way.

    Its bucket has not been sent by then.
    """
    *_, (name, param) = large_ones(model)
    (bucket,) = (bucket for bucket in model.reducer.buckets if any(param is other for other in bucket.params))

    def below(_module: nn.Module, _inputs: object, out: Tensor) -> None:
        def reached(_grad: Tensor) -> None:
            assert param.grad is not None
            assert not bucket.busy
            handle.remove()
            what(name, param)

        out.register_hook(reached)

    handle = model.module.layers[4 - 1].register_forward_hook(below)


def packed_early(model: dpfuse.DataParallel, rank: int) -> bool:
    """Whether a large gradient is a view of its bucket before that is sent."""
    seen: list[bool] = []

    def look(_name: str, param: nn.Parameter) -> None:
        flats = [bucket.parts.buffer.flat for bucket in model.reducer.buckets]
        storages = [flat.untyped_storage().data_ptr() for flat in flats]
        seen.append(param.grad.untyped_storage().data_ptr() in storages)

    in_the_middle(model, look)
    model.zero_grad()
    step_of(model, rank, 0)
    model.zero_grad()
    (found,) = seen
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("switch", "dtype"), [*((switch, torch.float32) for switch in SWITCHES), ("plain", torch.float64)]
)
def test_gradients_are_those_of_torchs_class(rank: int, size: int, switch: str, dtype: torch.dtype) -> None:
    options = SWITCHES[switch]
    model = wrapped(Net(dtype), **options)
    net = Net(dtype)
    theirs = TorchDDP(net)
    factor = options.get("gradient_scale", 1 / size) * size  # of the sum over that of DDP's mean
    exact = switch in ("plain", "deterministic", "checked", "measured", "private", "in buckets")
    for step in range(5):
        if step != 3:  # once what is there is added to, in views, too
            model.zero_grad()
            theirs.zero_grad()
        for one in (model, theirs):
            if step in (2, 3):
                with one.no_sync():
                    step_of(one, rank, 10 + step)
            step_of(one, rank, step)
        for param, other in zip(model.module.parameters(), net.parameters(), strict=True):
            if exact:
                assert same_bits(param.grad, other.grad)
            elif step < 3:
                torch.testing.assert_close(param.grad, other.grad * factor, rtol=2e-2, atol=1e-2)
        if step == 2 and not exact:
            break
    if switch == "measured":
        norm = torch.stack([param.grad.double().norm() for param in model.module.parameters()]).norm()
        torch.testing.assert_close(model.grad_norm().double(), norm, rtol=1e-6, atol=0)
    assert packed_early(model, rank) == (switch in EARLY)


def goes_on(model: dpfuse.DataParallel, rank: int, size: int) -> None:
    model.zero_grad()
    alone = copy.deepcopy(model.module)
    step_of(model, rank, 7)
    alone.zero_grad()
    for other in range(size):
        (alone(batch(other, 7)).square().sum() / size).backward()
    for param, mean in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad, mean.grad, rtol=1e-4, atol=1e-5)
    assert packed_early(model, rank)


@pytest.mark.parametrize("change", ["written", "replaced", "moved", "taken away"])
def test_who_changes_one_that_is_packed_is_told(rank: int, size: int, change: str) -> None:
    def do(name: str, param: nn.Parameter) -> None:
        if rank == 1 and change == "written":
            param.grad.clamp_(-1e-3, 1e-3)
        elif rank == 1 and change == "replaced":
            param.grad = param.grad.clamp(-1e-3, 1e-3)
        elif rank == 1 and change == "moved":
            param.grad.data = torch.zeros_like(param.grad)
        elif rank == 1:
            param.grad = None

    model = wrapped(Net())
    trained(model, rank)
    *_, (name, _param) = large_ones(model)
    in_the_middle(model, do)
    expected = rf"rank 1: the gradient of parameter '{name}' was changed" if rank == 1 else "failed on rank 1 of 2"
    with pytest.raises(DPFuseError, match=expected):
        step_of(model, rank, 0)
    goes_on(model, rank, size)


def test_a_second_gradient_is_an_error_or_waited_for(rank: int, size: int) -> None:
    model = wrapped(Net())
    trained(model, rank)
    model.module.twice = 4
    expected = r"rank 0: .*'layers\.4\.weight' was changed .* became ready again" if rank == 0 else "failed on rank 0"
    with pytest.raises(DPFuseError, match=expected):
        if rank == 1:
            model.module.twice = -1
        step_of(model, rank, 0)
    model.module.twice = -1
    goes_on(model, rank, size)
    # Whoever is used twice from the start is packed when all of it is there. So is who is not used at first, for nobody
    # knows how often that will be.
    for unused in (False, True):
        net = Net()
        model = wrapped(net, comm_buffer_size=25, last_comm_buffer_size=25, find_unused_parameters=True)
        if unused:
            model(batch(rank, 0)).sum().backward(inputs=[net.layers[5].weight])
        for _ in range(3):
            model.zero_grad()
            net.twice = 4
            step_of(model, rank, 7)
            net.twice, alone = -1, copy.deepcopy(net)
            alone.zero_grad()
            for other in range(size):
                (alone(batch(other, 7)).square().sum() / size).backward()
            for param, mean in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(param.grad, mean.grad, rtol=1e-4, atol=1e-5)


def test_hooks_of_the_parameter_see_what_was_accumulated(rank: int, size: int) -> None:
    """A hook of the user's on a large parameter sees what was accumulated, and what it makes of it counts."""
    model = wrapped(Net())
    *_, (_name, param) = large_ones(model)
    trained(model, rank)
    alone = copy.deepcopy(model.module)
    (alone(batch(rank, 3)).square().sum()).backward()
    own = dict(alone.named_parameters())[_name].grad
    seen: list[Tensor] = []

    def double(hooked: Tensor) -> None:
        seen.append(hooked.grad.clone())
        hooked.grad.mul_(2)

    handle = param.register_post_accumulate_grad_hook(double)
    step_of(model, rank, 3)
    torch.testing.assert_close(seen[0], own)
    mean = 2 * own
    dist.all_reduce(mean)
    torch.testing.assert_close(param.grad, mean / size)
    handle.remove()
    goes_on(model, rank, size)


def test_what_is_unusual_leaves_nothing_behind(rank: int, size: int) -> None:
    model = wrapped(Net())
    trained(model, rank)

    def fail(name: str, param: nn.Parameter) -> None:
        raise KeyError("planted")

    in_the_middle(model, fail)
    with pytest.raises(KeyError, match="planted"):
        step_of(model, rank, 0)
    goes_on(model, rank, size)
    # Views that the user has moved, an expanded gradient, and one that carries a graph.
    step_of(model, rank, 1)
    for _name, param in large_ones(model):
        param.grad.data = torch.full_like(param.grad, 3.0)
    goes_on(model, rank, size)
    model(batch(rank, 2)).sum().backward(create_graph=True)
    assert not any(param.grad.requires_grad for _, param in large_ones(model))
    goes_on(model, rank, size)
    with model.no_sync():
        step_of(model, rank, 2)
    for _name, param in large_ones(model):
        param.grad = torch.ones(param.shape[::-1]).t()
    step_of(model, rank, 3)
    goes_on(model, rank, size)


def test_who_still_needs_the_gradient_that_lay_there_is_told(rank: int, size: int) -> None:
    model = wrapped(Net(), comm_buffer_size=25, last_comm_buffer_size=25, plan="greedy")  # one bucket, sent at the end
    trained(model, rank)
    step_of(model, rank, 2)
    *_, (_name, param) = large_ones(model)
    factor = torch.ones(64, requires_grad=True)
    shift = factor * param.grad.view(-1)[:64]
    model.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batch(rank, 3) + shift).square().sum().backward()
    goes_on(model, rank, size)


def test_gradients_in_the_places_of_others_are_refused(rank: int, size: int) -> None:
    """Gradients of two parameters are accumulated in the place of each other's, in one bucket."""
    model = wrapped(Net(), comm_buffer_size=25, last_comm_buffer_size=25, plan="greedy")
    trained(model, rank)
    step_of(model, rank, 2)
    (_, first), (_, last) = [(name, param) for name, param in large_ones(model) if param.shape == (600, 64)][-2:]
    if rank == 1:
        kept = first.grad, last.grad
        model.zero_grad()
        last.grad, first.grad = kept
    expected = (
        r"parameter 'layers\.[24]\.weight' lies in another parameter's part of"
        if rank == 1
        else "failed on rank 1 of 2"
    )
    with pytest.raises(DPFuseError, match=expected):
        step_of(model, rank, 3)
    goes_on(model, rank, size)


def test_small_gradients_that_were_exchanged_are_refused(rank: int, size: int) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = dpfuse.DataParallel(net)
    step = lambda: model(torch.ones(2, 3)).sum().backward()  # noqa: E731
    step()
    if rank == 1:
        net[0].weight.grad, net[1].weight.grad = net[1].weight.grad, net[0].weight.grad
    with pytest.raises(DPFuseError, match="overlap" if rank == 1 else "failed on rank 1 of 2"):
        step()
    model.zero_grad()
    step()
    torch.testing.assert_close(net[1].bias.grad, torch.full((3,), 2.0))


def test_a_parameter_that_cannot_have_its_view_fails_on_all_ranks(rank: int, size: int) -> None:
    """Between forward and backward a parameter becomes another one, which cannot have the gradient."""
    model = wrapped(Net())
    trained(model, rank)
    *_, (_name, param) = large_ones(model)
    loss = model(batch(rank, 3)).square().sum()
    if rank == 1:
        param.data = param.data.double()
    with pytest.raises(DPFuseError, match="rank 1 could not pack" if rank == 1 else "failed on rank 1 of 2"):
        loss.backward()
    if rank == 1:
        param.data = param.data.float()
    goes_on(model, rank, size)


def test_memory_of_the_users_is_not_zeroed(rank: int, size: int) -> None:
    model = wrapped(Net())
    trained(model, rank, steps=1)
    own = torch.ones(64, 600)

    def move(_name: str, param: nn.Parameter) -> None:
        param.grad.data = own.view_as(param)

    in_the_middle(model, move)
    with pytest.raises(DPFuseError, match="was changed in this backward"):
        step_of(model, rank, 1)
    assert own.eq(1).all()
    goes_on(model, rank, size)


def test_backward_in_inference_mode(rank: int, size: int) -> None:
    """Its tensors count no writes."""
    net = Net()
    model = wrapped(net)
    for step in range(3):
        model.zero_grad()
        loss = model(batch(rank, step)).square().sum()
        with torch.inference_mode():
            loss.backward()
        alone = copy.deepcopy(net)
        alone.zero_grad()
        for other in range(size):
            (alone(batch(other, step)).square().sum() / size).backward()
        for param, mean in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(param.grad.clone(), mean.grad, rtol=1e-4, atol=1e-5)


def test_weights_are_applied_to_all(rank: int, size: int) -> None:
    model = wrapped(Net())
    trained(model, rank)
    model.set_gradient_weight(1 + rank)
    alone = copy.deepcopy(model.module)
    for other in range(size):
        (alone(batch(other, 3)).square().sum() * (1 + other) / 3).backward()
    step_of(model, rank, 3)
    for param, mean in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad, mean.grad, rtol=1e-4, atol=1e-5)
