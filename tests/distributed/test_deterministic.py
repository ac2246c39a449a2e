"""`deterministic=True`: bits that no bucket size and no order of buckets changes, and everything else as ever."""

from __future__ import annotations

import copy
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from bench.network import Network, simulated_network
from dpfuse import collective
from dpfuse.ordered_bucket import _OrderedSum
from dpfuse.plan import plan_buckets
from tests.distributed.random_models import (
    RandomModel,
    added_in_rank_order,
    batch,
    random_sizes,
    same_bits,
    trained,
)

ALL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def reduced(bare, data, **options):
    """The gradients of some accumulated batches, from a new wrapper, after the backward that settles its buckets."""
    model = dpfuse.DataParallel(copy.deepcopy(bare), find_unused_parameters=True, **options)
    for _ in range(2):
        model.zero_grad()
        for micro, seed in enumerate(data):
            with model.no_sync(enabled=micro < len(data) - 1):
                model(batch(bare, seed)).backward()
    return [param.grad for param in trained(model)]


def local(bare, data):
    bare = copy.deepcopy(bare)
    for seed in data:
        bare(batch(bare, seed)).backward()
    return [param.grad for param in trained(bare)]


def no_bit_depends_on_the_sizes(rank, size, seeds):
    changed = 0  # gradients that the default would have changed
    for seed in seeds:
        rng = np.random.default_rng(seed)
        bare = RandomModel(seed, ALL)
        data = [(seed, rank, micro) for micro in range(1 + seed % 4)]
        expected = [added_in_rank_order(grad, size) for grad in local(bare, data)]
        for _ in range(4):
            options = {**random_sizes(rng), "gradient_as_bucket_view": bool(rng.random() < 0.5)}
            for grad, wanted in zip(reduced(bare, data, deterministic=True, **options), expected, strict=True):
                assert same_bits(grad, wanted), f"seed {seed}, {options}"
            changed += sum(not same_bits(*pair) for pair in zip(reduced(bare, data, **options), expected, strict=True))
    # On two ranks there is one order only, which is the default's: all agree, in 16 bits as well.
    assert (changed > 0) == (size > 2)


@pytest.mark.parametrize(
    ("size", "seeds"),
    [(1, range(3)), (2, range(5)), (3, range(5)), (4, range(3))]
    + [pytest.param(size, range(10, 80), marks=pytest.mark.slow) for size in (2, 3, 4)],
)
def test_every_gradient_is_the_sum_in_rank_order_whatever_the_buffer_sizes(ranks, size, seeds):
    ranks(no_bit_depends_on_the_sizes, seeds, size=size, timeout=240)


def large_gradients_too(rank, size):
    """Some that the default would reduce where they lie."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(700, 800), nn.ReLU(), nn.Linear(800, 3))
    x = torch.randn(4, 700, generator=torch.Generator().manual_seed(rank))
    bare = copy.deepcopy(net)
    bare(x).square().sum().backward()
    expected = [added_in_rank_order(param.grad, size) for param in bare.parameters()]
    for views in (False, True):
        model = dpfuse.DataParallel(copy.deepcopy(net), deterministic=True, gradient_as_bucket_view=views)
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            assert all(same_bits(p.grad, wanted) for p, wanted in zip(model.parameters(), expected, strict=True))
        assert sum(bucket.bytes_in_place for bucket in model.reducer.buckets) == 0


def test_large_private_gradients_are_not_reduced_in_place(ranks):
    ranks(large_gradients_too, size=3)


def no_bit_depends_on_the_order(rank, size):
    bare = RandomModel(13)
    model = dpfuse.DataParallel(copy.deepcopy(bare), None, 1e-3, 1e-3, deterministic=True)
    golden = model.bucket_plan
    alone = plan_buckets(golden.specs, 0, 0)
    others = [alone, replace(alone, buckets=alone.buckets[::-1]), plan_buckets(golden.specs, math.inf, math.inf)]
    expected = [added_in_rank_order(grad, size) for grad in local(bare, [(rank,)])]
    layouts = set()
    for attempt in range(6):
        if attempt > 2:  # as autotune brings other buckets
            model._sync.use_plan(others.pop())
        else:
            assert model.bucket_plan == golden
        model.zero_grad()
        model.module.uses = list(np.random.default_rng([attempt, 0]).permutation(bare.uses))
        model(batch(bare, (rank,))).backward()
        layouts.add(model.bucket_plan.layout)
        for param, wanted in zip(trained(model), expected, strict=True):
            assert same_bits(param.grad, wanted), f"attempt {attempt}"
    assert len(layouts) == 4


def test_no_bit_depends_on_the_order_of_buckets_which_is_not_rebuilt(ranks):
    ranks(no_bit_depends_on_the_order, size=3)


def tuned_while_training(rank, size):
    bare = RandomModel(7, ALL)
    model = dpfuse.DataParallel(copy.deepcopy(bare), deterministic=True, find_unused_parameters=True)
    expected = [added_in_rank_order(grad, size) for grad in local(bare, [(rank,)])]
    tuning = dpfuse.autotune(model, steps=2)
    for step in range(6):
        model.zero_grad()
        model(batch(bare, (rank,))).backward()
        for param, wanted in zip(trained(model), expected, strict=True):
            assert same_bits(param.grad, wanted), f"step {step}"
    assert tuning.done


def test_autotune_may_plan_again(ranks):
    ranks(tuned_while_training, size=3)


def by_hand(rank, size, seeds):
    for seed in seeds:
        bare = RandomModel(seed, ALL)
        data = [(seed, rank, micro) for micro in range(1 + seed % 3)]
        wrapped = reduced(bare, data, deterministic=True, comm_buffer_size=1e-3)
        manual = dpfuse.DataParallel(copy.deepcopy(bare), deterministic=bool(seed % 2))
        with manual.no_sync():
            for key in data:
                manual(batch(bare, key)).backward()
        dpfuse.fused_allreduce_gradients(manual.parameters(), bucket_size=2 ** (seed % 16), deterministic=True)
        for param, wanted in zip(trained(manual), wrapped, strict=True):
            assert same_bits(param.grad, wanted), f"seed {seed}"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_averaging_by_hand_gives_the_wrappers_bits_on_any_number_of_ranks(ranks, size):
    ranks(by_hand, range(6), size=size)


def sixteen_bits(rank, size, dtype, scale):
    """The mean error over that of the default, both against float64."""
    u = torch.finfo(dtype).eps / 2
    grad = torch.randn(200_000, generator=torch.Generator().manual_seed(rank)).to(dtype)
    parts = [torch.empty_like(grad) for _ in range(size)]
    dist.all_gather(parts, grad)
    exact = torch.stack(parts).double() * (scale or 1 / size)
    total, magnitude = exact.sum(0), exact.abs().sum(0)
    errors = []
    for deterministic in (True, False):
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad.clone()
        dpfuse.fused_allreduce_gradients([param], scale=scale, deterministic=deterministic)
        errors.append((param.grad.double() - total).abs())
    # Each part is rounded at most once before the sum, and the sum once; the ring rounds after each addition.
    bound = 1.01 * u * (magnitude + total.abs()) + torch.finfo(dtype).smallest_normal
    assert (errors[0] <= bound).all()
    return (errors[0].mean() / errors[1].mean()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "scale", "limit"), [(3, 1.0, 0.74), (4, 1.0, 0.64), (4, None, 0.64), (3, None, 0.87)])
def test_the_error_of_16_bit_gradients_is_well_below_that_of_a_ring(ranks, size, scale, limit, dtype):
    # A third of a 16-bit number is rounded before it travels, either way, which the last row shows.
    (ratio,) = set(ranks(sixteen_bits, dtype, scale, size=size))
    assert ratio < limit


class Given(nn.Module):
    """One parameter, whose gradient is whatever it is told, and one that is never used."""

    def __init__(self, like):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(like))
        self.other = nn.Parameter(torch.zeros(7, dtype=like.dtype))

    def forward(self, gradient):
        return (self.weight * gradient.conj()).real.sum()


def gradient_of(part, **options):
    model = dpfuse.DataParallel(Given(part), find_unused_parameters=True, deterministic=True, **options)
    for _ in range(2):
        model.zero_grad()
        model(part).backward()
    assert model.other.grad is None  # the flags survive every wire and factor
    return model.weight.grad


def with_other_options(rank, size):
    parts = [torch.randn(500, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    for wire in (torch.bfloat16, torch.float16):
        narrow = [(part * (1 / size)).to(wire).float() for part in parts]
        total = (narrow[0] + narrow[1]) + narrow[2]
        assert same_bits(gradient_of(parts[rank], wire_dtype=wire), total.to(wire).float())
    assert same_bits(gradient_of(parts[rank], gradient_scale=1.0), (parts[0] + parts[1]) + parts[2])
    # float16 holds 40000, and not the sum: it must not be formed there.
    large = torch.full((500,), 40000.0)
    assert gradient_of(large, gradient_scale=1.0, wire_dtype=torch.float16).tolist() == [120000.0] * 500
    pairs = [torch.view_as_complex(part.view(-1, 2)) for part in parts]
    scaled = [part * (1 / size) for part in parts]
    total = (scaled[0] + scaled[1]) + scaled[2]
    for views in (True, False):
        got = gradient_of(pairs[rank], gradient_as_bucket_view=views)
        assert same_bits(torch.view_as_real(got).flatten(), total)


def test_wires_factors_and_complex_numbers_are_as_ever(ranks):
    ranks(with_other_options, size=3)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, 3))
        self.extra = nn.Linear(6, 3)

    def forward(self, x, extra=False):
        return self.layers(x) + self.extra(x) if extra else self.layers(x)


def small(net, face=dpfuse.DataParallel, **options):
    sizes = {"comm_buffer_size": 1e-4, "last_comm_buffer_size": 1e-5}
    if face is dpfuse.DistributedDataParallel:
        sizes = {"bucket_cap_mb": 1e-4}
    return face(net, find_unused_parameters=True, deterministic=True, **sizes, **options)


def assert_mean(model, rank, size, step, used=(True,)):
    """Gradients after one synchronised backward from none are the sums in rank order of those of the bare module."""
    bare = copy.deepcopy(model.module)
    for param in bare.parameters():
        param.grad = None
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    extra = used[rank % len(used)]
    model.zero_grad()
    model(x, extra).square().sum().backward()
    bare(x, extra).square().sum().backward()
    for (name, param), twin in zip(model.module.named_parameters(), bare.parameters(), strict=True):
        if not any(used) and name.startswith("extra"):
            assert param.grad is None
            continue
        wanted = added_in_rank_order(torch.zeros_like(twin) if twin.grad is None else twin.grad, size)
        assert torch.equal(param.grad, wanted), f"{name} in step {step}"  # not in bits: a zero added loses its sign


def unused_changed_and_failed(rank, size, face, views):
    model = small(Mlp(), face, gradient_as_bucket_view=views)
    for step in range(3):
        assert_mean(model, rank, size, step)
    assert_mean(model, rank, size, 3, used=(True, False))  # of some ranks only
    assert_mean(model, rank, size, 4, used=(False,))
    # An error on one rank is one on all, and costs that step alone.
    handle = None
    if rank == 1:
        handle = model.module.layers[2].weight.register_hook(_raise)
    with pytest.raises((KeyError, dpfuse.DPFuseError), match=r"planted|failed on rank 1 of 3|interrupted"):
        model.zero_grad()
        model(torch.ones(2, 6), True).sum().backward()
        if rank == 1:
            raise AssertionError("its own error did not surface")
    if handle is not None:
        handle.remove()
        with pytest.raises(dpfuse.DPFuseError, match="interrupted"):
            model(torch.ones(2, 6), True)
    dist.barrier()
    assert_mean(model, rank, size, 6)
    # A changed model is planned again, on all ranks.
    model.module.layers[0].weight.requires_grad_(False)
    model.module.layers[4].bias = nn.Parameter(torch.full((3,), 0.5))
    model.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    bare = copy.deepcopy(model.module)
    for wrapper in (model, bare):
        wrapper(x, True).square().sum().backward()
    for param, twin in zip(trained(model), trained(bare), strict=True):
        assert torch.equal(param.grad, added_in_rank_order(twin.grad, size))
    assert model._options.deterministic


def _raise(_grad):
    raise KeyError("planted")


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
def test_unused_parameters_errors_and_changes_go_their_usual_way(ranks, face, views):
    ranks(unused_changed_and_failed, face, views, size=3)


def uneven_inputs(rank, size):
    net = nn.Linear(3, 2)
    model = dpfuse.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1e-5, deterministic=True)
    grads = []
    with model.join():
        for step in range(rank + 1):
            model.zero_grad()
            model(torch.full((1, 3), rank + step + 1.0)).sum().backward()
            grads.append(model.module.weight.grad[0, 0].item())
    # In step s the ranks r >= s have input r + s + 1; means are over all three.
    wanted = [sum(r + s + 1.0 for r in range(s, size)) / size for s in range(rank + 1)]
    assert grads == pytest.approx(wanted)


def test_ranks_without_input_take_part_with_zeros(ranks):
    ranks(uneven_inputs, size=3)


def sparse_rows(rank, size):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 5, sparse=True), nn.Linear(5, 3))
    bare, results = copy.deepcopy(net), []
    index = torch.randint(20, (9,), generator=torch.Generator().manual_seed(rank))
    for cap in (25, 0, 1e-5):
        model = dpfuse.DataParallel(copy.deepcopy(net), comm_buffer_size=cap, deterministic=True)
        for _ in range(2):
            model.zero_grad()
            model(index).square().sum().backward()
        results.append([param.grad.to_dense() for param in model.parameters()])
    bare(index).square().sum().backward()
    for other in results:
        for grad, param in zip(other, bare.parameters(), strict=True):
            assert torch.equal(grad, added_in_rank_order(param.grad.to_dense(), size))


def test_sparse_gradients_are_added_in_rank_order_too(ranks):
    ranks(sparse_rows, size=3)


def a_copy_is_deterministic_too(rank, size):
    model = small(Mlp())
    assert_mean(copy.deepcopy(model), rank, size, 0)
    dist.barrier()


def test_a_copy_is_deterministic_too(ranks):
    ranks(a_copy_is_deterministic_too, size=3)


def queued_at_once(rank, size):
    """What follows on a GPU, with streams that are none: nobody has to wait before everything is under way."""
    made = []
    gather = collective.start_all_gather_into
    flat = torch.arange(8.0 * size) + rank
    expected = added_in_rank_order(size * flat, size)
    entered = mock.Mock(side_effect=nullcontext)
    with (
        mock.patch.object(torch.cuda, "stream", entered),
        mock.patch.object(collective, "start_all_gather_into", lambda *args: made.append(gather(*args)) or made[-1]),
    ):
        work = _OrderedSum(flat, torch.empty_like(flat), dist.group.WORLD, "stream")
        assert len(made) == 1
        assert not work.get_future().done()
        work.wait()
    entered.assert_called_once_with("stream")
    assert len(made) == 1
    assert work.get_future().done()
    assert torch.equal(flat, expected)


def test_on_a_stream_the_gather_is_queued_when_the_bucket_is_sent(ranks):
    ranks(queued_at_once, size=3)


def counted(rank, size):
    times = []
    for deterministic in (True, False):
        model = dpfuse.DataParallel(nn.Linear(64, 64), deterministic=deterministic)
        with dpfuse.time_communication(model) as measured:
            model(torch.ones(1, 64)).sum().backward()
        times.append(measured)
    ours, theirs = times
    assert (ours.steps, ours.collectives) == (theirs.steps, theirs.collectives) == (1, 1)
    assert 0 <= ours.nbytes - theirs.nbytes < 8 * 4 * size  # padding up to whole parts
    assert ours.seconds >= ours.exposed * 0.5 > 0


def test_communication_is_timed_and_counted(ranks):
    ranks(counted, size=2)


def refused(rank, size):
    with pytest.raises(dpfuse.DPFuseError, match=r"option deterministic = (True|False)"):
        dpfuse.DataParallel(Mlp(), deterministic=rank == 0)
    params = list(Mlp().parameters())
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(dpfuse.DPFuseError, match=r"deterministic=(True|False)"):
        dpfuse.fused_allreduce_gradients(params, deterministic=rank == 0)
    assert all(param.grad.eq(1).all() for param in params)
    model = small(Mlp(), dpfuse.DistributedDataParallel)
    with pytest.raises(
        dpfuse.DPFuseError, match=r"rank \d: a communication hook was .* with deterministic=True.*Leave"
    ):
        model.register_comm_hook(None, lambda state, bucket: None)
    assert_mean(model, rank, size, 0)
    for call in (partial(dpfuse.DataParallel, Mlp()), partial(dpfuse.fused_allreduce_gradients, params)):
        with pytest.raises((TypeError, dpfuse.DPFuseError)[rank], match="deterministic must be True or False, got 1"):
            call(deterministic=1 if rank == 0 else True)


def test_ranks_must_agree_and_hooks_are_refused(ranks):
    ranks(refused)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_what_is_no_bool_is_named(group, value):
    text = re.escape(f"deterministic must be True or False, got {value!r} of type {type(value).__name__}")
    for face in (dpfuse.DataParallel, dpfuse.DistributedDataParallel):
        with pytest.raises(TypeError, match=text):
            face(nn.Linear(2, 2), deterministic=value)
    with pytest.raises(TypeError, match=text):
        dpfuse.fused_allreduce_gradients([], deterministic=value)


NO_ALL_TO_ALL = r"rank 0: deterministic=True needs a back end with all-to-all .* simulated did not do: .* leave determi"


def test_a_back_end_without_all_to_all_is_named_at_construction(monkeypatch):
    with simulated_network():
        dpfuse.DataParallel(nn.Linear(2, 2), deterministic=True)
        for name in ("alltoall_base", "_allgather_base"):
            with monkeypatch.context() as patch:
                patch.delattr(Network, name)
                for face in (dpfuse.DataParallel, dpfuse.DistributedDataParallel):
                    face(nn.Linear(2, 2))
                    with pytest.raises(dpfuse.DPFuseError, match=NO_ALL_TO_ALL):
                        face(nn.Linear(2, 2), deterministic=True)


def by_hand_without_all_to_all(rank, size):
    def refuse(*_):
        raise RuntimeError("Backend does not support alltoall_base")

    params = list(Mlp().parameters())
    for param in params:
        param.grad = torch.full_like(param, rank)
    text = f"rank {rank}: deterministic=True needs .*does not support"
    with mock.patch("dpfuse.collective.start_all_to_all", refuse), pytest.raises(dpfuse.DPFuseError, match=text):
        dpfuse.fused_allreduce_gradients(params, deterministic=True)
    assert all(param.grad.eq(rank).all() for param in params)
    dist.barrier()


def test_a_back_end_without_all_to_all_is_named_before_averaging_by_hand(ranks):
    ranks(by_hand_without_all_to_all)
