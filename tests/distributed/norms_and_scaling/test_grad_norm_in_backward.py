"""Norms that backward has measured: nothing is read again while they hold, and everything is once they do not."""

from __future__ import annotations

import copy
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import dpfuse
from dpfuse.comm.abilities import Abilities
from dpfuse.engine.spoiler import Spoiler
from dpfuse.gradients.square_sum import _MeasuredViews
from tests.distributed.in_place import copied, large_from
from tests.distributed.norms_and_scaling.test_grad_norm import CHANGES, SOME, Net, check, copies, exact_norm, unscaled
from tests.freed import still_held
from tests.streams import PretendedStreams

KINDS = {
    "views": {},
    "private": {"gradient_as_bucket_view": False},
    "bucket each": {"comm_buffer_size": 0, "last_comm_buffer_size": 0},
    "half wire": {"wire_dtype": torch.float16},
    "wide wire": {"wire_dtype": torch.float32},
    "eight bits": {"wire_dtype": torch.float8_e4m3fn},
    "deterministic": {"deterministic": True},
    "deterministic private": {"deterministic": True, "gradient_as_bucket_view": False},
    "in buckets": {"accumulate_in_buckets": True},
    "checked": {"check_finite": "raise"},
    "sum": {"gradient_scale": 1.0, "gradient_as_bucket_view": False},
    "feedback": {"wire_dtype": torch.bfloat16, "error_feedback": True},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


def measured(kind, dtype=torch.float32, steps=3, rank=0, **options):
    model = dpfuse.DataParallel(Net(dtype), grad_norm_in_backward=True, **KINDS[kind], **options)
    for step in range(steps):
        model.zero_grad()
        model(10 * step + rank).backward()
    return model


def unseen(model):
    """Write gradients so that torch counts nothing, and nothing tells whether they are read but their norm."""
    for param in model.module.parameters():
        if param.grad is not None:
            param.grad.data.mul_(2.0)


def is_known(model):
    """Is the norm the one that was measured? Changes the gradients."""
    before = exact_norm(copies(model))
    unseen(model)
    norm = float(model.grad_norm())
    assert norm == pytest.approx(before, rel=1e-6) or norm == pytest.approx(2 * before, rel=1e-6)
    known = norm == pytest.approx(before, rel=1e-6)
    # One that is counted makes all of it known again.
    for param in model.module.parameters():
        if param.grad is not None:
            param.grad.mul_(1.0)
    assert float(model.grad_norm()) == pytest.approx(2 * before, rel=1e-6)
    return known


def test_what_backward_has_measured_is_the_norm_and_nothing_is_read(rank, size):
    for kind in KINDS:
        for dtype in DTYPES if kind in ("views", "private", "half wire", "deterministic") else DTYPES[:1]:
            torch.manual_seed(0)
            model = measured(kind, dtype, rank=rank)
            plain = dpfuse.DataParallel(copy.deepcopy(model.module), **KINDS[kind])
            norm = model.grad_norm()
            assert float(norm) == pytest.approx(exact_norm(copies(model)), rel=1e-6), (kind, dtype)
            assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert is_known(model), (kind, dtype)
            # And gradients have the bits that they have without.
            for one in (model, plain):
                one.zero_grad()
                one(40 + rank).backward()
            if kind != "feedback":  # which remembers the steps before
                for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(mine.grad, other.grad), (kind, dtype)
            if dtype != torch.bfloat16:  # whose norm torch rounds
                assert check(model), (kind, dtype)


def test_whatever_torch_counts_is_noticed(rank, size):
    with large_from(SOME):
        for kind in ("views", "private", "half wire", "eight bits"):
            model = measured(kind, rank=rank)
            for name, change in CHANGES.items():
                if change is unscaled:
                    continue
                model.zero_grad()
                model(rank).backward()
                change(model)
                assert check(model) or name == "zeroed", (kind, name)
                assert check(model, math.inf) is False
            model.zero_grad()
            model(rank).backward()
            with model.no_sync():
                model(5).backward()
            assert check(model), kind


def unnoticed(model):
    """By what, as the documents say: the norm stays that of what backward has delivered."""
    module = model.module
    yield "`.data`", lambda: module.rows.grad.data.mul_(3.0)
    yield "torch's scaler", lambda: unscaled(model)
    yield "a collective", lambda: dist.all_reduce(module.rows.grad)
    yield "NumPy", lambda: module.rows.grad.numpy().fill(7.0)


def test_what_the_documents_say_is_not_noticed_is_not(rank, size):
    for kind in ("views", "private"):
        model = measured(kind, rank=rank)
        for name, write in unnoticed(model):
            model.zero_grad()
            model(rank).backward()
            before = exact_norm(copies(model))
            write()
            now = exact_norm(copies(model))
            assert abs(now - before) > 1e-3 * before, name
            assert float(model.grad_norm()) == pytest.approx(before, rel=1e-6), f"{name} is noticed now: say so"


def test_unusual_backwards(rank, size):
    for kind in ("views", "private"):
        model = measured(kind, rank=rank, find_unused_parameters=True)
        for step in range(4):  # used nowhere, by one rank, by all
            for param in model.parameters():
                param.grad = None
            model(10 * step + rank, spare=step % 2 == 0 and rank <= step // 2).backward()
            check(model)
        # Kept from before, and in no backward since.
        for step in range(2):
            model(step + rank, spare=False).backward()
            check(model)
        # A backward that died, and the one after.
        handle = model.module.first.register_hook(lambda grad: (_ for _ in ()).throw(KeyError("planted")))
        with pytest.raises(KeyError, match="planted"):
            model(7).backward()
        handle.remove()
        model.zero_grad()
        model(8 + rank).backward()
        assert check(model)
        # Weights are one more factor behind the sums.
        model.set_gradient_weight(1 + rank)
        model.zero_grad()
        model(9 + rank).backward()
        assert check(model)
        # Added up once more by hand, where they lie or in other buckets.
        for large in (1, 1 << 60):
            with large_from(large):
                model.zero_grad()
                model(10 + rank).backward()
                before = float(model.grad_norm())
                dpfuse.fused_allreduce_gradients(list(model.parameters()), scale=1.0)
                assert float(model.grad_norm()) == pytest.approx(size * before, rel=1e-6)
        # A window in the buckets.
        lean = measured("in buckets", rank=rank, gradient_as_bucket_view=kind == "views")
        for step in range(2):
            lean.zero_grad()
            with lean.no_sync():
                lean(step + rank).backward()
            lean(3 + rank).backward()
            assert is_known(lean)
        # A parameter that comes, and the buckets with it.
        model.module.extra = nn.Parameter(torch.ones(3))
        model.module.extra.grad = torch.full((3,), 5.0)
        assert check(model)


def test_dpfuses_scaler_is_noticed(rank, size):
    for kind in ("views", "private", "half wire", "sum", "eight bits"):
        model = measured(kind, rank=rank)
        scaler = dpfuse.GradScaler(model=model, init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(step + rank)).backward()
            model.grad_norm()
            scaler.unscale_(optimizer)
            assert check(model), kind
            scaler.step(optimizer)
            scaler.update()


def test_what_a_communication_hook_makes_of_them_is_measured(rank, size):
    for views in (True, False):
        model = dpfuse.DistributedDataParallel(Net(), gradient_as_bucket_view=views, grad_norm_in_backward=True)
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        for step in range(3):
            model.zero_grad()
            model(step + rank).backward()
        assert is_known(model)


def test_gradients_that_nobody_wants_are_freed(group):
    with copied():  # those that lie in a buffer live as long as it does
        model = measured("private")
    gone = [weakref.ref(param.grad) for param in model.parameters()]
    assert all(reference() is not None for reference in gone)
    model.zero_grad()
    assert still_held(gone) == []
    assert model.grad_norm().item() == 0.0


def test_a_buffer_that_an_interrupted_backward_leaves_behind_is_freed(group):
    model = measured("views")
    sizes = [param.grad.untyped_storage().nbytes() for param in model.parameters()]
    handle = model.module.first.register_hook(lambda grad: (_ for _ in ()).throw(KeyError("planted")))
    with pytest.raises(KeyError, match="planted"):
        model(7).backward()
    handle.remove()
    model.zero_grad()
    model(8)  # its forward sends what the peers still wait for, in another buffer
    model(8).backward()
    assert [param.grad.untyped_storage().nbytes() for param in model.parameters()] == sizes
    assert is_known(model)


@pytest.mark.parametrize("kind", ["views", "private"])
def test_a_backward_in_inference_mode_is_read_when_asked(group, kind):
    model = dpfuse.DataParallel(Net(), grad_norm_in_backward=True, **KINDS[kind])
    for seed in range(3):
        model.zero_grad()
        loss = model(seed)
        with torch.inference_mode():
            loss.backward()
        assert not model.module.bias.grad.is_inference()  # buffers were made before
        norm = exact_norm(copies(model))
        assert float(model.grad_norm()) == pytest.approx(norm, rel=1e-6)
        unseen(model)
        # Buffers were made outside inference mode, and count what torch counts. The first backward makes new ones.
        again = 1 if seed > 0 else 2
        assert float(model.grad_norm()) == pytest.approx(again * norm, rel=1e-6)


def test_asking_is_no_write_to_what_a_graph_has_saved(group):
    model = measured("views")
    factor = torch.ones((), requires_grad=True)
    model.module.bias.grad.mul_(1.0)  # so that all is read
    saved = (model.module.first.grad * factor).sum()
    model.grad_norm()
    saved.backward()
    assert factor.grad is not None


def said(alarm):
    """A report that says whether something is wrong."""
    pairs = torch.tensor([1.0, float(alarm)])
    return SimpleNamespace(hand_over=lambda guard: guard(pairs, None), wrong=lambda: torch.tensor(alarm))


def test_a_spoiler_spoils_the_sums_of_the_buckets_in_use(group, monkeypatch):
    monkeypatch.setattr("dpfuse.engine.sync.spoiler_of", lambda params, size: Spoiler(params))
    model = measured("views")
    model.module.extra = nn.Parameter(torch.ones(3))
    model(1)
    del model.module.extra  # taken back before a backward has seen it
    model(1)
    sync = model._sync.grads
    sums = [bucket.parts.delivery.squares.value for bucket in sync.reducer.buckets]
    before = list(map(float, sums))
    sync._spoil(said(False))
    assert list(map(float, sums)) == before
    sync._spoil(said(True))
    assert all(map(torch.isnan, sums))


def test_what_a_cuda_graph_has_measured_holds_in_graphs_only(group, monkeypatch):
    # Replays write gradients behind torch's back, and a captured norm is to follow what was written before its replay.
    streams = PretendedStreams()
    streams.install(monkeypatch)
    model = measured("private")
    streams.current.captured = True
    unseen(model)
    assert float(model.grad_norm()) == pytest.approx(exact_norm(copies(model)), rel=1e-6), "measured before the capture"
    for param in model.parameters():
        param.grad.zero_()
    model(3).backward()
    norm = exact_norm(copies(model))
    unseen(model)
    assert float(model.grad_norm()) == pytest.approx(norm, rel=1e-6), "measured in it"
    streams.current.captured = False
    assert float(model.grad_norm()) == pytest.approx(2 * norm, rel=1e-6)
    model(4).backward()  # an eager step, behind which there may be replays
    assert not is_known(model)


def test_a_bucket_without_gradients_is_not_measured(group, monkeypatch):
    monkeypatch.setattr(_MeasuredViews, "_measure", lambda views: pytest.fail("it was"))
    assert is_known(measured("eight bits"))


def test_gradients_of_a_model_that_was_copied_are_its_own(group):
    model = measured("views")
    twin = copy.deepcopy(model)
    for step in range(2):
        twin.zero_grad()
        twin(step).backward()
    assert check(twin)
    assert check(model)


def test_it_is_the_same_on_all_ranks_and_for_one_wrapper(rank, size):
    keeper = dpfuse.DataParallel(nn.Linear(2, 2), grad_norm_in_backward=True)
    with pytest.raises(ValueError, match="grad_norm_in_backward set; expected one wrapper"):
        dpfuse.DataParallel(keeper.module)
    with pytest.raises(TypeError, match=r"grad_norm_in_backward must be True or False, got 1 of type int"):
        dpfuse.DataParallel(nn.Linear(2, 2), grad_norm_in_backward=1)
    with pytest.raises(dpfuse.DPFuseError, match="grad_norm_in_backward"):
        dpfuse.DataParallel(nn.Linear(2, 2), grad_norm_in_backward=rank == 0)


def test_on_a_gpu_views_are_measured_on_the_side_while_backward_goes_on(group, monkeypatch):
    streams = PretendedStreams()
    streams.install(monkeypatch)
    monkeypatch.setattr("dpfuse.engine.assembly.abilities_of", lambda group, device: Abilities(on_streams=True))
    streams.initialized = False
    measure = _MeasuredViews._measure

    def noted(views):
        streams.log.append((views, streams.current.name))
        measure(views)

    monkeypatch.setattr(_MeasuredViews, "_measure", noted)
    model = measured("bucket each", steps=2)
    deliveries = [bucket.parts.delivery for bucket in model.reducer.buckets]
    count = len(model.bucket_plan.buckets)
    assert count == 4
    for _ in range(2):
        streams.log.clear()
        model.zero_grad()
        model(3).backward()
        on_side = [(views, "side") for views in deliveries[:-1]]
        assert streams.log == [*on_side, "main waits for side", (deliveries[-1], "main")]
    assert is_known(model)
    # What is not complete when backward ends has not been measured before.
    model(4, spare=False).backward()
    check(model)
